"""The OCR pipelines read what the package's own pipeline reads, and fail for those only whose request is wrong."""

import importlib
import io
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from examples.demo import pictures
from examples.demo.pictures import photo, scanned_page
from examples.ocr.make_repository import (
    ANGLE_CLASSIFICATION,
    BLS,
    ENSEMBLE,
    TEXT_RECOGNITION,
    build_ocr,
    shipped_file,
)
from PIL import Image, ImageDraw, ImageFont
from tests.support.kept import kept_folder
from tests.support.process import ServeProcess
from tests.support.stock_clients import infer_input
from tritonclient.utils import InferenceServerException


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ocr")
    build_ocr(folder)
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServeProcess]:
    with ServeProcess(repository, "--model-control-mode=explicit", "--load-model=*") as running:
        yield running


def file_of(picture: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    picture.save(file, kind)
    return file.getvalue()


def page(**turn: Any) -> bytes:
    return file_of(Image.open(io.BytesIO(scanned_page())).rotate(**turn))


SENTENCE = "Tides turn twice daily; the harbour master writes down wind, depth and every ship that enters (1904-1911)."


def dense_page() -> bytes:
    """Draw thirteen lines in two columns, of many lengths and sizes: three batches of lines."""
    picture = Image.new("RGB", (800, 330), (235, 232, 220))
    pen = ImageDraw.Draw(picture)
    for number in range(13):
        text = " ".join((SENTENCE.split() * 2)[number % 17 : number % 17 + 1 + number % 4])
        place = (20 + 400 * (number // 7), 10 + 44 * (number % 7))
        pen.text(place, text, fill=(20, 20, 60), font=ImageFont.load_default(16 + number * 7 % 11))
    return file_of(picture, "JPEG")


def blank() -> bytes:
    return file_of(Image.new("RGB", (640, 480), "white"))


PICTURES = {
    "scanned page": scanned_page,
    "photo": photo,
    "lettering": lambda: shipped_file("scikit-image", "skimage/data/text.png").read_bytes(),
    "aslant": lambda: page(angle=6, expand=True, fillcolor=210),
    "on its side": lambda: page(angle=90, expand=True),
    "upside down": lambda: page(angle=180),
    "a single line": lambda: file_of(Image.open(io.BytesIO(scanned_page())).crop((0, 45, 384, 65))),
    "larger than 2000 pixels": lambda: file_of(Image.open(io.BytesIO(scanned_page())).resize((3072, 1528))),
    "thirteen lines": dense_page,
    "no text": lambda: shipped_file("scikit-image", "skimage/data/coffee.png").read_bytes(),
    "nothing": blank,
}


def image_of(client_module: Any, picture: bytes) -> Any:
    return infer_input(client_module, "IMAGE", np.array([picture], np.object_))


def read(address: str, model: str, picture: bytes, client_module: Any = httpclient) -> tuple[list[str], Any, Any]:
    with client_module.InferenceServerClient(address) as client:
        answer = client.infer(model, [image_of(client_module, picture)])
    texts = [text.decode() for text in answer.as_numpy("TEXT")]
    return texts, answer.as_numpy("BOX"), answer.as_numpy("SCORE")


@pytest.fixture(scope="module")
def read_once(server: ServeProcess) -> Callable[[str, str], tuple[list[str], Any, Any]]:
    """Returns what a model reads in one of the pictures; networks take their time."""

    @cache
    def read_picture(model: str, name: str) -> tuple[list[str], Any, Any]:
        return read(server.http, model, PICTURES[name]())

    return read_picture


# The package with the settings that each pipeline has: the ensemble does not look for lines that stand upside down and
# reads all lines of a page as one batch.
SETTINGS: dict[str, dict[str, Any]] = {ENSEMBLE: {"use_cls": False, "rec_batch_num": 128}, BLS: {}}


@cache
def package_with(model: str) -> Any:
    package = importlib.import_module("rapidocr_onnxruntime")
    # One thread: by default those of the package turn on every core while they wait, which starves the server.
    return package.RapidOCR(**SETTINGS[model], intra_op_num_threads=1)


@pytest.fixture
def expected(request: pytest.FixtureRequest, model: str, name: str) -> list[Any]:
    """What the package reads in a picture with a model's settings: box, text and score of each line."""
    pytest.importorskip("rapidocr_onnxruntime", reason="the package that ships PP-OCRv4 is for Python < 3.13")

    def write(folder: Path) -> None:
        lines = package_with(model)(PICTURES[name]())[0] or []
        (folder / "lines.json").write_text(json.dumps(lines, default=float))

    kept = kept_folder(
        *(request.config, f"{model}-{name.replace(' ', '-')}", write),
        sources=(Path(__file__), Path(pictures.__file__)),
        packages=("rapidocr-onnxruntime", "onnxruntime", "opencv-python", "numpy", "pillow", "scikit-image"),
    )
    lines: list[Any] = json.loads((kept / "lines.json").read_text())
    return lines


@pytest.mark.parametrize("model", SETTINGS)
@pytest.mark.parametrize("name", PICTURES)
def test_text_and_boxes_are_those_of_the_packages_own_pipeline(
    read_once: Callable[[str, str], tuple[list[str], Any, Any]], expected: list[Any], name: str, model: str
) -> None:
    texts, boxes, scores = read_once(model, name)

    assert texts == [text for _, text, _ in expected]
    assert boxes.shape == (len(expected), 4, 2)
    for box, score, (expected_box, _, expected_score) in zip(boxes, scores, expected, strict=True):
        assert np.abs(box - expected_box).max() <= 1
        assert score == pytest.approx(expected_score, abs=1e-3)


def test_the_pictures_have_text_to_read(read_once: Callable[[str, str], tuple[list[str], Any, Any]]) -> None:
    pytest.importorskip("rapidocr_onnxruntime", reason="other networks read other things")
    counts = {name: len(read_once(BLS, name)[0]) for name in PICTURES}

    assert counts.pop("no text") == counts.pop("nothing") == 0
    assert min(counts.values()) >= 1
    assert counts["thirteen lines"] == 13


@pytest.mark.parametrize("model", [ENSEMBLE, BLS])
def test_both_protocols_give_the_same_text(
    server: ServeProcess, read_once: Callable[[str, str], tuple[list[str], Any, Any]], model: str
) -> None:
    over_http = read_once(model, "lettering")
    over_grpc = read(server.grpc, model, PICTURES["lettering"](), grpcclient)

    assert over_http[0] == over_grpc[0]
    assert np.array_equal(over_http[1], over_grpc[1])


def test_upside_down_lines_are_turned_unless_the_request_says_not_to(
    server: ServeProcess, read_once: Callable[[str, str], tuple[list[str], Any, Any]]
) -> None:
    angles = infer_input(httpclient, "ANGLES", np.array([False]))

    with httpclient.InferenceServerClient(server.http) as client:
        answer = client.infer(BLS, [image_of(httpclient, PICTURES["upside down"]()), angles])

    as_they_stand = [text.decode() for text in answer.as_numpy("TEXT")]
    turned = read_once(BLS, "upside down")[0]
    assert turned
    assert as_they_stand != turned


def executions(address: str, model: str) -> int:
    with httpclient.InferenceServerClient(address) as client:
        (statistics,) = client.get_inference_statistics(model)["model_stats"]
    return int(statistics["execution_count"])


def test_a_page_without_text_costs_no_recognition_in_the_bls_model_and_an_empty_line_in_the_ensemble(
    server: ServeProcess,
) -> None:
    before = executions(server.http, "text_recognition")
    assert read(server.http, BLS, blank())[0] == []
    after_bls = executions(server.http, "text_recognition")
    assert read(server.http, ENSEMBLE, blank())[0] == []
    after_ensemble = executions(server.http, "text_recognition")

    assert (after_bls - before, after_ensemble - after_bls) == (0, 1)


@pytest.mark.parametrize("model", [ENSEMBLE, BLS])
@pytest.mark.parametrize("file", [b"this is no picture", b""], ids=["text", "nothing"])
def test_a_file_that_is_no_picture_is_refused_by_the_step_that_reads_it(
    server: ServeProcess, model: str, file: bytes
) -> None:
    with pytest.raises(InferenceServerException, match="IMAGE: expected a JPEG or PNG file") as caught:
        read(server.http, model, file)

    assert "detection_preprocessing" in str(caught.value)
    assert caught.value.status() == "400"


@pytest.mark.parametrize("model", [ENSEMBLE, BLS])
def test_pictures_read_at_the_same_time_as_a_broken_one_are_read(
    server: ServeProcess, read_once: Callable[[str, str], tuple[list[str], Any, Any]], model: str
) -> None:
    good = ("scanned page", "nothing", "lettering")
    page, nothing, letters = (PICTURES[name]() for name in good)
    files = [page, b"no picture", nothing, page[:9000], letters]

    with httpclient.InferenceServerClient(server.http, concurrency=len(files)) as client:
        pending = [client.async_infer(model, [image_of(httpclient, file)]) for file in files]
        outcomes: list[Any] = []
        for each in pending:
            try:
                outcomes.append([text.decode() for text in each.get_result().as_numpy("TEXT")])
            except InferenceServerException as error:
                outcomes.append(error)

    assert "that are neither" in str(outcomes.pop(1))
    assert "breaks off or is damaged" in str(outcomes.pop(2))
    assert outcomes == [read_once(model, name)[0] for name in good]


def test_a_bls_model_whose_step_is_not_in_the_repository_names_it(
    server: ServeProcess, repository: Path, read_once: Callable[[str, str], tuple[list[str], Any, Any]], tmp_path: Path
) -> None:
    line = PICTURES["a single line"]()

    with httpclient.InferenceServerClient(server.http, network_timeout=60) as client:
        client.unload_model(ANGLE_CLASSIFICATION)
        (repository / ANGLE_CLASSIFICATION).rename(tmp_path / ANGLE_CLASSIFICATION)
        try:
            with pytest.raises(InferenceServerException, match=f"step '{ANGLE_CLASSIFICATION}'"):
                read(server.http, BLS, line)
            assert read(server.http, ENSEMBLE, line)[0] == read_once(ENSEMBLE, "a single line")[0]
        finally:
            (tmp_path / ANGLE_CLASSIFICATION).rename(repository / ANGLE_CLASSIFICATION)
            client.load_model(ANGLE_CLASSIFICATION)


def test_a_page_with_more_lines_than_the_recogniser_takes_is_read_by_the_bls_model_alone(
    server: ServeProcess, repository: Path, read_once: Callable[[str, str], tuple[list[str], Any, Any]]
) -> None:
    config = repository / TEXT_RECOGNITION / "config.pbtxt"
    text = config.read_text(encoding="utf-8")
    assert "max_batch_size: 128" in text
    page = PICTURES["thirteen lines"]()
    expected = read_once(BLS, "thirteen lines")[0]

    with httpclient.InferenceServerClient(server.http, network_timeout=60) as client:
        config.write_text(text.replace("max_batch_size: 128", "max_batch_size: 8"), encoding="utf-8")
        try:
            client.load_model(TEXT_RECOGNITION)
            with pytest.raises(InferenceServerException, match=f"<= 8 for '{TEXT_RECOGNITION}'"):
                read(server.http, ENSEMBLE, page)
            assert read(server.http, BLS, page)[0] == expected
        finally:
            config.write_text(text, encoding="utf-8")
            client.load_model(TEXT_RECOGNITION)
