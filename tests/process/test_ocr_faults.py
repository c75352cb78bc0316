"""A fault in the middle of an OCR pipeline fails only the requests that it concerns, and the error names the step."""

import concurrent.futures
import io
import os
import shutil
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
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
from tests.support.process import ServeProcess, eventually
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.timeout(300)  # the networks take seconds for a page

LINE = "Lighthouse"
LINES_MAX = 8  # lines that the recogniser takes at once: with the example's 128, reading takes many seconds
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
    config = folder / TEXT_RECOGNITION / "config.pbtxt"
    limit = "max_batch_size: 128"
    assert limit in config.read_text(encoding="utf-8")
    config.write_text(
        config.read_text(encoding="utf-8").replace(limit, f"max_batch_size: {LINES_MAX}"), encoding="utf-8"
    )
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServeProcess]:
    with ServeProcess(repository, "--model-control-mode=explicit", "--load-model=*") as running:
        yield running


@cache
def picture() -> bytes:
    """Return a small square with one line, which costs the networks the least."""
    drawn = Image.new("L", (320, 320), 255)
    ImageDraw.Draw(drawn).text((30, 130), LINE, fill=0, font=ImageFont.load_default(44))
    return file_of(drawn)


def file_of(drawn: Image.Image) -> bytes:
    file = io.BytesIO()
    drawn.save(file, "PNG")
    return file.getvalue()


def read(server: ServeProcess, model: str, file: bytes) -> list[str]:
    image = httpclient.InferInput("IMAGE", [1], "BYTES")
    image.set_data_from_numpy(np.array([file], np.object_))
    with httpclient.InferenceServerClient(server.http) as client:
        return [text.decode().replace(" ", "") for text in client.infer(model, [image]).as_numpy("TEXT")]


def refusal(server: ServeProcess, model: str, file: bytes) -> str:
    with pytest.raises(InferenceServerException) as caught:
        read(server, model, file)
    return str(caught.value)


@pytest.mark.parametrize("model", PIPELINES)
@pytest.mark.parametrize("step", [TEXT_DETECTION, TEXT_RECOGNITION])
def test_a_step_that_is_unloaded_is_named_and_all_is_well_when_it_is_back(
    server: ServeProcess, model: str, step: str
) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        client.unload_model(step)
        try:
            assert step in refusal(server, model, picture())
        finally:
            client.load_model(step)
            client.load_model(ENSEMBLE)

    assert read(server, model, picture()) == [LINE]


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
            reading = pool.submit(read, server, model, picture())
            assert eventually(lambda: gate.runs > runs)
            client.unload_model(TEXT_RECOGNITION)
        try:
            texts = reading.result(60)
            assert texts == [LINE]
        except InferenceServerException as error:
            assert TEXT_RECOGNITION in str(error)  # noqa: PT017 - either is right, it depends on who is first
        finally:
            client.load_model(TEXT_RECOGNITION)
            client.load_model(ENSEMBLE)

    assert read(server, model, picture()) == [LINE]


@pytest.mark.parametrize("model", PIPELINES)
def test_a_worker_killed_in_mid_batch_fails_the_picture_it_had_and_the_others_are_read(
    server: ServeProcess, repository: Path, model: str
) -> None:
    folder = repository / DETECTION_POSTPROCESSING / "1"
    gate = Gate(folder)
    runs = gate.runs
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        with gate.closed():
            reading = [pool.submit(read, server, model, picture()) for _ in range(4)]
            assert eventually(lambda: gate.runs > runs)
            os.kill(int((folder / "busy").read_text()), signal.SIGKILL)
        errors = [str(each.exception(60)) for each in reading if each.exception(60)]
        texts = [each.result() for each in reading if not each.exception(60)]

    assert len(errors) == 1
    assert DETECTION_POSTPROCESSING in errors[0]
    assert "SIGKILL" in errors[0]
    assert errors[0].startswith("[500]")
    assert texts == [[LINE]] * 3


def test_a_bls_model_whose_step_is_not_in_the_repository_names_it(repository: Path, tmp_path: Path) -> None:
    shutil.copytree(repository, tmp_path / "models")
    shutil.rmtree(tmp_path / "models" / ANGLE_CLASSIFICATION)

    with ServeProcess(tmp_path / "models") as server:
        message = refusal(server, BLS, picture())
        assert read(server, ENSEMBLE, picture()) == [LINE]

    assert f"step '{ANGLE_CLASSIFICATION}'" in message


def test_a_page_with_more_lines_than_the_recogniser_takes_is_read_by_the_bls_model_alone(server: ServeProcess) -> None:
    page = Image.new("L", (600, 600), 255)
    pen = ImageDraw.Draw(page)
    for number in range(LINES_MAX + 1):
        pen.text((20, 20 + 64 * number), f"line {number + 100}", fill=0, font=ImageFont.load_default(24))

    message = refusal(server, ENSEMBLE, file_of(page))
    texts = read(server, BLS, file_of(page))

    assert TEXT_RECOGNITION in message
    assert str(LINES_MAX) in message
    assert texts == [f"line{number + 100}" for number in range(LINES_MAX + 1)]
