"""The image service names the class of a picture, and a file that is no picture fails alone."""

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.support.fork_server import run_command
from tests.support.onnx_writer import GraphWriter
from tests.support.process import ServeProcess

import charonia.client
from charonia.core.dtypes import DataType

EXAMPLE = Path(__file__).parents[2] / "examples" / "image_service"


def color_network() -> bytes:
    """The mean of each color: a network with the classes red, green and blue."""
    graph = GraphWriter()
    pixels = graph.input("pixels", DataType.FP32, ["batch", 3, 224, 224])
    graph.node("Flatten", [graph.node("GlobalAveragePool", [pixels], "mean")], "scores")
    graph.output("scores", DataType.FP32, ["batch", 3])
    return graph.model()


def jpeg(color: str, size: tuple[int, int] = (640, 480)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "JPEG")
    return file.getvalue()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("image_service")
    (folder / "colors.onnx").write_bytes(color_network())
    (folder / "labels.txt").write_text("red\ngreen\nblue\n")
    command = [sys.executable, str(EXAMPLE / "make_repository.py"), "models", "colors.onnx", "--labels", "labels.txt"]
    subprocess.run(command, cwd=folder, check=True, timeout=200)
    with ServeProcess(folder / "models") as started:
        yield started


@pytest.mark.parametrize("color", ["red", "lime", "blue"])
def test_the_service_names_the_class(server: ServeProcess, tmp_path: Path, color: str) -> None:
    (tmp_path / "picture.jpg").write_bytes(jpeg(color))

    command = ("infer", "image_service", "-i", "IMAGE=@picture.jpg", "--url", server.http)
    lines = run_command(*command, folder=tmp_path).stdout.splitlines()

    best = next(line for line in lines if line.split()[-1] in ("red", "green", "blue"))
    assert best.split()[-1] == color.replace("lime", "green")


def test_a_file_that_is_no_image_fails_alone(server: ServeProcess) -> None:
    with charonia.client.Client(f"http://{server.http}") as client:
        with pytest.raises(charonia.client.ClientError, match="IMAGE: cannot identify image file"):
            client.infer("image_service", {"IMAGE": np.array([[b"no image"]], np.object_)})
        answer = client.infer("image_service", {"IMAGE": np.array([[jpeg("red", (30, 400))]], np.object_)})
    assert answer["SCORES"].argmax() == 0
