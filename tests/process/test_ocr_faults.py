"""A fault in the middle of an OCR pipeline fails only the requests that it concerns, and the error names the step."""

import concurrent.futures
import io
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from examples.demo.pictures import scanned_page
from examples.ocr.make_repository import (
    ANGLE_CLASSIFICATION,
    BLS,
    DETECTION_POSTPROCESSING,
    ENSEMBLE,
    TEXT_DETECTION,
    TEXT_RECOGNITION,
    build_ocr,
)
from PIL import Image, ImageDraw, ImageFont
from tests.support.gate import Gate, gated
from tests.support.process import ServeProcess
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.timeout(300)  # the networks take seconds for a page

FIRST_LINE = "Region-basedsegmentation"  # one of the networks joins the words
PIPELINES = [ENSEMBLE, BLS]

# What detection_postprocessing does at the beginning of a batch here, before it waits at its gate: it says who it is.
MARK = """\
        import os, pathlib
        pathlib.Path(__file__).with_name("busy").write_text(str(os.getpid()))
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ocr")
    build_ocr(folder)
    code = folder / DETECTION_POSTPROCESSING / "1" / "model.py"
    head = "    def execute(self, requests):\n"
    assert head in code.read_text(encoding="utf-8")
    code.write_text(gated(code.read_text(encoding="utf-8")).replace(head, head + MARK), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServeProcess]:
    with ServeProcess(repository, "--model-control-mode=explicit", "--load-model=*") as running:
        yield running


def read(server: ServeProcess, model: str, picture: bytes) -> list[str]:
    image = httpclient.InferInput("IMAGE", [1], "BYTES")
    image.set_data_from_numpy(np.array([picture], np.object_))
    with httpclient.InferenceServerClient(server.http) as client:
        return [text.decode().replace(" ", "") for text in client.infer(model, [image]).as_numpy("TEXT")]


def refusal(server: ServeProcess, model: str, picture: bytes) -> str:
    with pytest.raises(InferenceServerException) as caught:
        read(server, model, picture)
    return str(caught.value)


def eventually(holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.01)


@pytest.mark.parametrize("model", PIPELINES)
@pytest.mark.parametrize("step", [TEXT_DETECTION, TEXT_RECOGNITION])
def test_a_step_that_is_unloaded_is_named_and_all_is_well_when_it_is_back(
    server: ServeProcess, model: str, step: str
) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        client.unload_model(step)
        try:
            assert step in refusal(server, model, scanned_page())
        finally:
            client.load_model(step)
            client.load_model(ENSEMBLE)

    assert read(server, model, scanned_page())[0] == FIRST_LINE


@pytest.mark.parametrize("model", PIPELINES)
def test_a_step_that_is_unloaded_while_pictures_are_read_fails_only_those_that_still_need_it(
    server: ServeProcess, repository: Path, model: str
) -> None:
    gate = Gate(repository / DETECTION_POSTPROCESSING / "1")
    runs = gate.runs
    with (
        concurrent.futures.ThreadPoolExecutor(2) as pool,
        httpclient.InferenceServerClient(server.http) as client,
    ):
        with gate.closed():
            reading = pool.submit(read, server, model, scanned_page())
            eventually(lambda: gate.runs > runs)
            client.unload_model(TEXT_RECOGNITION)
        try:
            texts = reading.result(60)
            assert texts[0] == FIRST_LINE
        except InferenceServerException as error:
            assert TEXT_RECOGNITION in str(error)  # noqa: PT017 - either is right, it depends on who is first
        finally:
            client.load_model(TEXT_RECOGNITION)
            client.load_model(ENSEMBLE)

    assert read(server, model, scanned_page())[0] == FIRST_LINE


@pytest.mark.parametrize("model", PIPELINES)
def test_a_worker_killed_in_mid_batch_fails_the_picture_it_had_and_the_others_are_read(
    server: ServeProcess, repository: Path, model: str
) -> None:
    folder = repository / DETECTION_POSTPROCESSING / "1"
    gate = Gate(folder)
    runs = gate.runs
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        with gate.closed():
            reading = [pool.submit(read, server, model, scanned_page()) for _ in range(4)]
            eventually(lambda: gate.runs > runs)
            os.kill(int((folder / "busy").read_text()), signal.SIGKILL)
        errors = [str(each.exception(60)) for each in reading if each.exception(60)]
        texts = [each.result() for each in reading if not each.exception(60)]

    assert len(errors) == 1
    assert DETECTION_POSTPROCESSING in errors[0]
    assert "SIGKILL" in errors[0]
    assert errors[0].startswith("[500]")
    assert [lines[0] for lines in texts] == [FIRST_LINE] * 3


def test_a_bls_model_whose_step_is_not_in_the_repository_names_it(repository: Path, tmp_path: Path) -> None:
    shutil.copytree(repository, tmp_path / "models")
    shutil.rmtree(tmp_path / "models" / ANGLE_CLASSIFICATION)

    with ServeProcess(tmp_path / "models") as server:
        message = refusal(server, BLS, scanned_page())
        assert read(server, ENSEMBLE, scanned_page())[0] == FIRST_LINE

    assert f"step '{ANGLE_CLASSIFICATION}'" in message


def test_a_page_with_more_lines_than_the_recogniser_takes_is_read_by_the_bls_model_alone(server: ServeProcess) -> None:
    picture = Image.new("L", (1400, 1000), 255)
    pen = ImageDraw.Draw(picture)
    for number in range(135):
        place = (20 + 150 * (number % 9), 20 + 64 * (number // 9))
        pen.text(place, f"line {number + 100}", fill=0, font=ImageFont.load_default(24))
    file = io.BytesIO()
    picture.save(file, "PNG")

    message = refusal(server, ENSEMBLE, file.getvalue())
    texts = read(server, BLS, file.getvalue())

    assert TEXT_RECOGNITION in message
    assert "128" in message
    assert len(texts) == 135
    assert texts[0] == "line100"
    assert texts[-1] == "line234"
