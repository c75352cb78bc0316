"""A server with OpenVINO and TensorFlow Lite models, as its clients see it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openvino
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http
from numpy.typing import NDArray
from tests.support import tflite_models
from tests.support.fork_server import run_command
from tests.support.models import mlp, write_model
from tests.support.process import ServeProcess
from tests.support.stock_clients import infer_input

ACCELERATED = """\
optimization { execution_accelerators { cpu_execution_accelerator { name: "openvino" } } }
instance_group { count: 2 kind: KIND_CPU }
"""


def layer(folder: Path) -> Path:
    """Write scores = 2 x as IR and return the path of the .xml file."""
    op = openvino.opset13
    x = op.parameter([-1, 16], np.float32, name="x")
    result = op.multiply(x, op.constant(np.float32(2)))
    result.output(0).tensor.set_names({"scores"})
    folder.mkdir(parents=True)
    openvino.save_model(openvino.Model([result], [x], "layer"), folder / "layer.xml", compress_to_fp16=False)
    return folder / "layer.xml"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    repository = tmp_path_factory.mktemp("openvino")
    layer(repository / "ir" / "1")
    write_model(repository, "onnx", mlp(), config='backend: "openvino"')
    write_model(repository, "runtime", mlp())
    write_model(repository, "accelerated", mlp(), config=ACCELERATED)
    write_model(repository, "lite", tflite_models.mlp(), file_name="model.tflite")
    write_model(repository, "arm", tflite_models.mlp(), file_name="model.tflite", config='backend: "armnn_tflite"')
    with ServeProcess(repository) as running:
        yield running


def infer(server: ServeProcess, model: str, name: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the only output over HTTP, which is the same over gRPC."""
    results: list[NDArray[np.float32]] = []
    for module, address in ((http, server.http), (grpc, server.grpc)):
        with module.InferenceServerClient(address) as client:
            metadata = client.get_model_metadata(model)
            output = metadata["outputs"][0]["name"] if module is http else metadata.outputs[0].name
            results.append(client.infer(model, [infer_input(module, name, x)]).as_numpy(output))
    np.testing.assert_array_equal(results[0], results[1])
    return results[0]


def test_every_form_answers_over_both_protocols(server: ServeProcess) -> None:
    x = np.random.default_rng(1).random((3, 16), np.float32)

    np.testing.assert_allclose(infer(server, "ir", "x", x), 2 * x)
    for model in ("lite", "arm"):
        np.testing.assert_allclose(infer(server, model, "x", x), tflite_models.mlp_expected(x), rtol=1e-5)


def test_an_onnx_model_runs_in_openvino_by_backend_or_accelerator(server: ServeProcess) -> None:
    x = np.random.default_rng(1).random((3, 128), np.float32)

    expected = infer(server, "runtime", "input", x)

    for model in ("onnx", "accelerated"):
        np.testing.assert_allclose(infer(server, model, "input", x), expected, rtol=1e-4, atol=1e-6)
    assert server.logs("model 'accelerated': execution accelerator openvino: the openvino backend runs the model")


def test_files_are_served_without_a_repository(tmp_path: Path) -> None:
    lite = tmp_path / "small.tflite"
    lite.write_bytes(tflite_models.mlp())
    x = np.ones((1, 16), np.float32)

    with ServeProcess(layer(tmp_path / "ir"), str(lite)) as running:
        np.testing.assert_allclose(infer(running, "layer", "x", x), 2 * x)
        np.testing.assert_allclose(infer(running, "small", "x", x), tflite_models.mlp_expected(x), rtol=1e-5)


def test_charonia_config_shows_who_runs_an_accelerated_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "accelerated", mlp(), config=ACCELERATED)

    shown = run_command("config", folder)

    assert "the openvino backend runs the model" in shown.stdout + shown.stderr
