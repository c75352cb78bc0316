"""The image backend before a real network, as the steps of an ensemble."""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from examples.demo.pictures import scanned_page
from examples.image_pipeline.make_repository import make_repository
from examples.ocr.make_repository import ANGLE_CLASSIFICATION, NETWORKS, shipped_file
from numpy.typing import NDArray
from PIL import Image
from tests.support.photos import encoded

from charonia import Server
from charonia.core.errors import ServingError
from charonia.core.request import InferRequest
from charonia.core.tensor import Array
from charonia.server.backends.api import Execution, Outputs
from charonia.server.backends.image.instance import ImageInstance
from charonia.server.backends.onnxruntime.backend import OnnxRuntimeInstance

ANGLE = {
    "resize": "letterbox",
    "size": "192x48",
    "padding_position": "end",
    "padding_value": "127.5",
    "color": "BGR",
    "mean": "0.5",
    "std": "0.5",
}
"""What PP-OCR's classifier of upright and upside-down lines takes."""


def network() -> Path:
    return shipped_file("rapidocr-onnxruntime", NETWORKS["rapidocr-onnxruntime"][ANGLE_CLASSIFICATION])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    try:
        file = network()
    except ServingError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("angle")
    make_repository(folder, file, parameters=ANGLE)
    with Server(folder) as started:
        yield started


def line() -> Image.Image:
    """Some words of the scanned page."""
    return Image.open(io.BytesIO(scanned_page())).crop((60, 45, 130, 65)).convert("RGB")


def batch(*files: bytes) -> NDArray[np.object_]:
    return np.array(files, np.object_).reshape(-1, 1)


def expected(image: Image.Image) -> NDArray[np.float32]:
    """The network's scores for the same steps in Pillow and numpy."""
    small = image.resize((168, 48), Image.Resampling.BILINEAR)
    pixels = np.full((48, 192, 3), 127.5, np.float32)
    pixels[:, :168] = np.asarray(small)[..., ::-1]
    feed = ((pixels / np.float32(255) - np.float32(0.5)) / np.float32(0.5)).transpose(2, 0, 1)[None]
    session = onnxruntime.InferenceSession(network(), providers=["CPUExecutionProvider"])
    scores: NDArray[np.float32] = session.run(None, {session.get_inputs()[0].name: np.ascontiguousarray(feed)})[0][0]
    return scores


def test_the_network_sees_what_it_would_see_after_pillow(server: Server) -> None:
    upright, turned = line(), line().rotate(180)

    scores = server.infer("classifier", {"IMAGE": batch(encoded(upright), encoded(turned))})["SCORES"]

    assert scores.argmax(1).tolist() == [0, 1]
    assert np.abs(scores.astype(np.float32) - np.stack([expected(upright), expected(turned)])).max() < 0.02


def test_a_photograph_that_is_stored_upside_down_is_upright(server: Server) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3

    scores = server.infer("classifier", {"IMAGE": batch(encoded(line().rotate(180), exif=exif))})["SCORES"]

    assert scores.argmax(1).tolist() == [0]


def test_the_network_reads_the_memory_that_the_images_were_written_to(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    read: list[int] = []
    execute, run = ImageInstance.execute, OnnxRuntimeInstance.run

    def executing(self: ImageInstance, requests: Sequence[InferRequest]) -> Execution:
        execution = execute(self, requests)
        for result in execution.results:
            assert isinstance(result, Outputs)
            written.append(result.tensors[0].array.ctypes.data)
        return execution

    def running(self: OnnxRuntimeInstance, names: Sequence[str], feed: dict[str, Array]) -> Sequence[Array]:
        read.extend(array.ctypes.data for array in feed.values())
        return run(self, names, feed)

    monkeypatch.setattr(ImageInstance, "execute", executing)
    monkeypatch.setattr(OnnxRuntimeInstance, "run", running)
    server.infer("classifier", {"IMAGE": batch(*[encoded(line())] * 3)})

    assert len(read) == 1
    assert read == written
