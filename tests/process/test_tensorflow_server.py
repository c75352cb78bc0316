"""A server with TensorFlow models, as its clients see it: one import of TensorFlow for all of them."""

import signal
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http
from tests.support import tensorflow_models
from tests.support.models import identity, write_model
from tests.support.process import ServeProcess, eventually, started_by
from tests.support.stock_clients import infer_input

from charonia.core.dtypes import DataType

pytestmark = [
    pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs TensorFlow"),
]

TEMPLATE = "worker/template.py"

ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input { name: "X" data_type: TYPE_FP32 dims: 4 }
output { name: "ROOT" data_type: TYPE_FP32 dims: 4 }
ensemble_scheduling {
  step { model_name: "roots" model_version: -1 input_map { key: "X" value: "X" } output_map { key: "ROOT" value: "r" } }
  step {
    model_name: "copy" model_version: -1
    input_map { key: "INPUT0" value: "r" } output_map { key: "OUTPUT0" value: "ROOT" }
  }
}
"""

WARM = """
model_warmup { name: "zeros" batch_size: 2 inputs { key: "X" value { data_type: TYPE_FP32 dims: 4 zero_data: true } } }
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[ServeProcess]:
    models = tensorflow_models.models(pytestconfig)
    repository = tmp_path_factory.mktemp("tensorflow")
    tensorflow_models.place(models / "roots", repository / "roots", WARM)
    tensorflow_models.place(models / "texts", repository / "texts")
    tensorflow_models.place(models / "dense.keras", repository / "dense")
    write_model(repository, "copy", identity(DataType.FP32, [4]))
    write_model(repository, "both", b"", config=ENSEMBLE, file_name="none")
    with ServeProcess(repository) as running:
        yield running


def templates(server: ServeProcess) -> list[psutil.Process]:
    return [child for child in psutil.Process(server.process.pid).children() if _is_template(child)]


def _is_template(process: psutil.Process) -> bool:
    return any(word.endswith(TEMPLATE) for word in process.cmdline())


@pytest.mark.parametrize("model", ["roots", "both"])
def test_a_model_answers_over_both_protocols(server: ServeProcess, model: str) -> None:
    x = np.random.default_rng(1).random((3, 4), np.float32)

    with http.InferenceServerClient(server.http) as client:
        one = client.infer(model, [infer_input(http, "X", x)]).as_numpy("ROOT")
    with grpc.InferenceServerClient(server.grpc) as client:
        other = client.infer(model, [infer_input(grpc, "X", x)]).as_numpy("ROOT")

    np.testing.assert_allclose(one, np.sqrt(x), rtol=1e-5)
    np.testing.assert_array_equal(one, other)


def test_strings_and_keras_files_are_served(server: ServeProcess) -> None:
    texts = infer_input(http, "S", np.array([[b"a", b"\xff"]], object))
    features = infer_input(http, "features", np.zeros((1, 8), np.float32))

    with http.InferenceServerClient(server.http) as client:
        assert client.infer("texts", [texts]).as_numpy("TWICE").tolist() == [[b"aa", b"\xff\xff"]]
        assert client.infer("dense", [features]).as_numpy("output_0").tolist() == [[0.0] * 4]


def test_all_workers_are_forks_of_one_process(server: ServeProcess) -> None:
    (template,) = templates(server)

    assert len(template.children()) == 3
    assert all(worker.memory_full_info().pss < worker.memory_info().rss for worker in template.children())


def test_a_worker_that_is_killed_is_replaced_and_warmed_up_again(server: ServeProcess) -> None:
    (template,) = templates(server)
    before = {worker.pid for worker in template.children()}
    for worker in template.children():
        worker.send_signal(signal.SIGKILL)

    def all_are_back() -> bool:
        return len({worker.pid for worker in template.children()} - before) == 3 and server.log.count("is back") >= 3

    assert eventually(all_are_back)
    test_a_model_answers_over_both_protocols(server, "roots")


def test_nothing_is_left_when_the_server_is_killed(server: ServeProcess) -> None:
    processes = started_by(server.process.pid)
    assert len(processes) >= 4

    server.kill()

    assert eventually(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes))
