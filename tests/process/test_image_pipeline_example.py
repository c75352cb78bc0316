"""The image pipeline over HTTP and gRPC, and the image backend's own model for shared memory."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shared_memory
from tests.process.test_image_service_example import color_network, jpeg
from tests.support.photos import photo
from tests.support.process import ServeProcess
from tests.support.stock_clients import infer_input

EXAMPLE = Path(__file__).parents[2] / "examples" / "image_pipeline"

YOLO = """
backend: "image"
input [ { name: "IMAGE" data_type: TYPE_UINT8 dims: [ -1 ] } ]
parameters { key: "resize" value { string_value: "letterbox" } }
parameters { key: "size" value { string_value: "640" } }
parameters { key: "padding_value" value { string_value: "114" } }
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("image_pipeline")
    (folder / "colors.onnx").write_bytes(color_network())
    (folder / "labels.txt").write_text("red\ngreen\nblue\n")
    command = [sys.executable, str(EXAMPLE / "make_repository.py"), "models", "colors.onnx", "--labels", "labels.txt"]
    subprocess.run(command, cwd=folder, check=True, timeout=200)
    (folder / "models" / "letterbox" / "1").mkdir(parents=True)
    (folder / "models" / "letterbox" / "config.pbtxt").write_text(YOLO)
    with ServeProcess(folder / "models", "--allow-client-shm=true") as started:
        yield started


def inputs(module: Any, *files: bytes) -> list[Any]:
    return [infer_input(module, "IMAGE", np.array(files, np.object_).reshape(-1, 1))]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_batch_of_images_is_classified(server: ServeProcess, protocol: str) -> None:
    module = httpclient if protocol == "http" else grpcclient
    with module.InferenceServerClient(getattr(server, protocol)) as client:
        asked = inputs(module, jpeg("red"), jpeg("lime", (30, 400)), jpeg("blue"))
        output = module.InferRequestedOutput("SCORES", class_count=1)
        answer = client.infer("classifier", asked, outputs=[output]).as_numpy("SCORES")

    assert [text.decode().split(":")[-1] for text in answer.reshape(-1)] == ["red", "green", "blue"]


def test_one_file_in_shared_memory_comes_back_in_a_letterbox(server: ServeProcess) -> None:
    file = photo()
    region = shared_memory.create_shared_memory_region("photo", "/photo_of_test", len(file))
    try:
        shared_memory.set_shared_memory_region(region, [np.frombuffer(file, np.uint8)])
        with httpclient.InferenceServerClient(server.http) as client:
            client.register_system_shared_memory("photo", "/photo_of_test", len(file))
            tensor = httpclient.InferInput("IMAGE", [len(file)], "UINT8")
            tensor.set_shared_memory("photo", len(file))
            answer = client.infer("letterbox", [tensor])
            client.unregister_system_shared_memory("photo")
    finally:
        shared_memory.destroy_shared_memory_region(region)

    assert answer.as_numpy("PIXELS").shape == (3, 640, 640)
    assert answer.as_numpy("PADDING").tolist() == [0, 106]
    assert answer.as_numpy("SCALE").tolist() == [1, 1]
    assert answer.as_numpy("ORIGINAL_SIZE").tolist() == [640, 427]
