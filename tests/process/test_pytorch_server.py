"""A server with PyTorch models, as its clients see it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http
from numpy.typing import NDArray
from tests.support.fork_server import run_command
from tests.support.process import ServeProcess
from tests.support.stock_clients import infer_input

torch = pytest.importorskip("torch")
torch_models = pytest.importorskip("tests.support.torch_models")

ROWS = 3
KINDS = ("traced", "scripted", "exported", "eager", "automatic")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    repository = tmp_path_factory.mktemp("pytorch")
    network = torch_models.Perceptron()
    torch_models.save_traced(network, (torch.zeros(2, 16),), repository / "traced")
    torch_models.save_scripted(network, repository / "scripted")
    torch_models.exported_perceptron(repository / "exported")
    torch_models.exported_perceptron(repository / "automatic")
    (repository / "automatic" / "config.pbtxt").write_text("instance_group { kind: KIND_AUTO count: 2 }")
    torch_models.eager_perceptron(repository / "eager")
    (repository / "eager" / "config.pbtxt").write_text(
        'backend: "pytorch" runtime: "model.py" max_batch_size: 8 dynamic_batching { } '
        'input { name: "x" data_type: TYPE_FP32 dims: 16 }'
    )
    with ServeProcess(repository) as running:
        yield running


def expected(x: "NDArray[np.float32]") -> "NDArray[np.float32]":
    with torch.inference_mode():
        result: NDArray[np.float32] = torch_models.Perceptron()(torch.from_numpy(x)).numpy()
    return result


@pytest.mark.parametrize("model", KINDS)
def test_every_format_answers_over_both_protocols(server: ServeProcess, model: str) -> None:
    x = np.random.default_rng(1).random((ROWS, 16), np.float32)

    with http.InferenceServerClient(server.http) as client:
        one = client.infer(model, [infer_input(http, "x", x)]).as_numpy("OUTPUT__0")
    with grpc.InferenceServerClient(server.grpc) as client:
        other = client.infer(model, [infer_input(grpc, "x", x)]).as_numpy("OUTPUT__0")

    np.testing.assert_allclose(one, expected(x), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(one, other)


def test_the_memory_of_each_instance_is_shown(server: ServeProcess) -> None:
    page = server.metrics_page()
    with http.InferenceServerClient(server.http) as client:
        [statistics] = client.get_inference_statistics("automatic")["model_stats"]

    shown = [
        line
        for line in page.splitlines()
        if line.startswith("charonia_model_memory_bytes{") and 'model="automatic"' in line
    ]
    size = 4 * (16 * 32 + 32 + 32 * 4 + 4)
    assert len(shown) == 2
    assert [float(line.split()[-1]) for line in shown] == [size, size]
    assert [usage["byte_size"] for usage in statistics["memory_usage"]] == [size, size]
    assert "nv_pinned_memory_pool_total_bytes 268435456" in page


def test_the_completed_configuration_is_printed(server: ServeProcess, tmp_path: Path) -> None:
    torch_models.save_scripted(torch_models.Perceptron(), tmp_path / "m")

    done = run_command("config", tmp_path / "m")

    assert "input 'x': FP32 [16], from the model" in done.stderr
    assert 'name: "OUTPUT__0"' in done.stdout


def test_a_server_without_pytorch_models_does_not_read_pytorch() -> None:
    program = "import charonia.server.app, charonia.cli.serve, sys; print('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=True)

    assert done.stdout.strip() == "False"
