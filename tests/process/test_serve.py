"""A real server process, the stock clients, real models."""

import http.client
import json
import shutil
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tests.support import models
from tests.support.gate import Gate, gated
from tests.support.process import SHAPES, ServeProcess, Shape, eventually, started_by
from tests.support.stock_clients import infer_input
from tritonclient.utils import InferenceServerException

IDENTITY = models.identity_pbtxt(max_batch_size=8, more="dynamic_batching { }")

PYTHON = """
backend: "python"
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""

MODEL_PY = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            value = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
            if value == -1:
                raise ValueError("minus one is not for me")
            if value == -2:
                os._exit(3)
            out = np.array([value * 2], np.int32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)]))
        return responses
"""


def write_python_model(repository: Path, name: str = "double", code: str = MODEL_PY) -> None:
    models.write_model(repository, name, code, config=PYTHON)


def write_identity(repository: Path, name: str = "identity", config: str = IDENTITY) -> None:
    models.write_model(repository, name, "", config=config)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_identity(folder)
    write_python_model(folder)
    models.write_model(folder, "add_sub", models.add_sub())
    (folder / "broken" / "1").mkdir(parents=True)
    (folder / "broken" / "1" / "model.onnx").write_bytes(b"this is no model")
    return folder


@pytest.fixture(scope="module", params=SHAPES)
def server(repository: Path, request: pytest.FixtureRequest) -> Iterator[ServeProcess]:
    with ServeProcess(
        repository, "--model-control-mode=explicit", "--load-model=*", "--exit-on-error=false", *request.param
    ) as started:
        yield started


def get(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=200) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.mark.parametrize("binary", [True, False])
def test_http_client_gets_its_tensor_back(server: ServeProcess, binary: bool) -> None:
    sent = np.arange(32, dtype=np.float32).reshape(2, 16)
    with httpclient.InferenceServerClient(server.http) as client:
        outputs = [httpclient.InferRequestedOutput("OUTPUT0", binary_data=binary)]
        inputs = [infer_input(httpclient, "INPUT0", sent, binary_data=binary)]
        result = client.infer("identity", inputs, outputs=outputs, request_id="r1")
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), sent)
    assert result.get_response()["id"] == "r1"


def test_grpc_client_gets_its_tensor_back(server: ServeProcess) -> None:
    sent = np.arange(32, dtype=np.float32).reshape(2, 16)
    with grpcclient.InferenceServerClient(server.grpc) as client:
        result = client.infer("identity", [infer_input(grpcclient, "INPUT0", sent)], request_id="r1")
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), sent)
    assert result.get_response().id == "r1"


def test_a_model_without_configuration_is_completed_and_served(server: ServeProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        metadata = client.get_model_metadata("add_sub")
        config = client.get_model_config("add_sub")
        names = [i["name"] for i in metadata["inputs"]]
        shape = [max(d, 1) for d in metadata["inputs"][0]["shape"]]
        a, b = np.full(shape, 5, np.float32), np.full(shape, 3, np.float32)
        result = client.infer("add_sub", [infer_input(httpclient, names[0], a), infer_input(httpclient, names[1], b)])
    outputs = [o["name"] for o in metadata["outputs"]]
    np.testing.assert_array_equal(result.as_numpy(outputs[0]), a + b)
    np.testing.assert_array_equal(result.as_numpy(outputs[1]), a - b)
    assert config["backend"] == "onnxruntime"


def test_a_broken_model_is_listed_with_its_reason(server: ServeProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        index = {entry["name"]: entry for entry in client.get_model_repository_index()}
        assert index["identity"]["state"] == "READY"
        assert index["broken"]["state"] == "UNAVAILABLE"
        assert index["broken"]["reason"]
        assert not client.is_model_ready("broken")
        assert client.is_model_ready("identity")
        assert client.is_server_live()
        with pytest.raises(InferenceServerException, match="unknown model: 'nobody'"):
            client.get_model_metadata("nobody")


def test_statistics_and_metrics_count_what_was_answered(server: ServeProcess) -> None:
    sent = np.zeros((3, 16), np.float32)
    with httpclient.InferenceServerClient(server.http) as client, grpcclient.InferenceServerClient(server.grpc) as grpc:
        (before,) = client.get_inference_statistics("identity")["model_stats"]
        for _ in range(5):
            client.infer("identity", [infer_input(httpclient, "INPUT0", sent)])
        with pytest.raises(InferenceServerException):
            client.infer("identity", [infer_input(httpclient, "INPUT0", np.zeros((9, 16), np.float32))])
        (after,) = client.get_inference_statistics("identity")["model_stats"]
        (same,) = grpc.get_inference_statistics("identity", as_json=True)["model_stats"]
    assert after["inference_count"] - before["inference_count"] == 15
    assert after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"] == 5
    assert after["inference_stats"]["fail"]["count"] - before["inference_stats"]["fail"]["count"] == 1
    assert int(same["inference_count"]) == after["inference_count"]
    status, page = get(f"http://{server.metrics}/metrics")
    assert status == 200
    assert f'nv_inference_count{{model="identity",version="1"}} {after["inference_count"]}' in page.decode()


@pytest.fixture
def late(repository: Path) -> Iterator[None]:
    write_identity(repository, "late")
    yield
    shutil.rmtree(repository / "late")


@pytest.mark.usefixtures("late")
def test_models_are_loaded_and_unloaded_over_both_protocols(server: ServeProcess) -> None:
    sent = np.zeros((1, 16), np.float32)
    with httpclient.InferenceServerClient(server.http) as client, grpcclient.InferenceServerClient(server.grpc) as grpc:
        client.load_model("late")
        assert client.is_model_ready("late")
        grpc.unload_model("late")
        assert not client.is_model_ready("late")
        config = {
            "backend": "identity",
            "input": [{"name": "INPUT1", "data_type": "TYPE_FP32", "dims": [16]}],
            "output": [{"name": "OUTPUT1", "data_type": "TYPE_FP32", "dims": [16]}],
        }
        grpc.load_model("late", config=json.dumps(config))
        assert client.get_model_metadata("late")["inputs"][0] == {"name": "INPUT1", "datatype": "FP32", "shape": [16]}
        client.load_model("made_up", config=json.dumps(config), files={"file:1/note.txt": b"files"})
        result = client.infer("made_up", [infer_input(httpclient, "INPUT1", sent[0])])
        np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), sent[0])
        with pytest.raises(InferenceServerException, match="load failed for model 'late'"):
            client.load_model("late", config='{"backend": "no such backend"}')
        assert client.is_model_ready("late")


def test_startup_shows_a_table_and_a_broken_model_ends_the_server_unless_told_otherwise(
    server: ServeProcess, repository: Path
) -> None:
    assert "identity" in server.log
    assert "READY" in server.log
    assert "UNAVAILABLE" in server.log
    with pytest.raises(RuntimeError, match="broken"), ServeProcess(repository):
        pass


def test_sigterm_finishes_what_is_in_flight(tmp_path: Path) -> None:
    write_python_model(tmp_path, code=gated(MODEL_PY))
    values: list[int] = []

    def call() -> None:
        with httpclient.InferenceServerClient(started.http, network_timeout=60) as client:
            result = client.infer("double", [infer_input(httpclient, "IN", np.array([3], np.int32))])
            values.append(int(result.as_numpy("OUT")[0]))

    with ServeProcess(tmp_path) as started, Gate(tmp_path / "double" / "1").closed() as gate:
        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert eventually(lambda: started.pending("double") >= 2)
        children = started_by(started.process.pid)
        started.begin_to_stop()
        started.process.send_signal(signal.SIGTERM)  # as GNU timeout does: to the child, and to its group
        gate.open()
        assert started.wait() == 0
        for thread in threads:
            thread.join()
    assert values == [6, 6, 6]
    assert children
    assert not any(child.is_running() for child in children)


def test_a_port_that_is_taken_ends_the_server_before_it_loads_models(tmp_path: Path, server: ServeProcess) -> None:
    write_identity(tmp_path, "late")
    port = server.http.partition(":")[2]

    with (
        pytest.raises(RuntimeError, match=f"cannot listen on 127.0.0.1:{port}") as caught,
        ServeProcess(tmp_path, f"--http-port={port}"),
    ):
        pass

    assert "loading: late" not in str(caught.value)


def test_a_server_without_its_repository_listens_if_it_is_told_to(tmp_path: Path) -> None:
    with ServeProcess(tmp_path / "later", "--exit-on-error=false", "--model-control-mode=explicit") as server:
        with httpclient.InferenceServerClient(server.http) as client:
            assert not client.is_server_live()
            assert client.get_server_metadata()["name"] == "triton"
            with pytest.raises(InferenceServerException, match="Server not ready"):
                client.get_model_repository_index()
            with pytest.raises(InferenceServerException, match="failed to load 'late', failed to poll"):
                client.load_model("late")
            write_identity(tmp_path / "later", "late")
            client.load_model("late")
            assert client.is_server_live()
            assert client.is_model_ready("late")
        assert server.stop() == 0


def test_a_killed_server_leaves_no_worker_behind(tmp_path: Path) -> None:
    write_python_model(tmp_path)
    with ServeProcess(tmp_path) as server:
        children = started_by(server.process.pid)
        assert children
        server.process.send_signal(signal.SIGKILL)
        server.wait()
        _, alive = psutil.wait_procs(children, timeout=200)
    assert alive == []


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose sockets have names that are short enough."""
    with TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_killed_server_leaves_in_the_temporary_folder_is_removed_by_the_next(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch, shape: Shape
) -> None:
    monkeypatch.setenv("TMPDIR", str(short_folder))
    tensor = {"data_type": "TYPE_FP32", "dims": [1]}
    tensors = {"input": [{"name": "INPUT0", **tensor}], "output": [{"name": "OUTPUT0", **tensor}]}
    config = json.dumps({"backend": "identity", **tensors})
    arguments = ("--model-control-mode=explicit", *shape)
    with ServeProcess(tmp_path, *arguments) as server:
        with httpclient.InferenceServerClient(server.http) as client:
            client.load_model("sent", config=config, files={"file:1/note.txt": b"files"})
        children = started_by(server.process.pid)
        server.kill()
        psutil.wait_procs(children, timeout=200)
    assert list(short_folder.glob("*/1/note.txt"))

    with ServeProcess(tmp_path, *arguments) as server:
        assert not list(short_folder.glob("*/1/note.txt"))
        assert server.stop() == 0
    assert list(short_folder.iterdir()) == []


def test_an_exit_timeout_answers_what_is_still_in_flight_and_exits_with_status_one(tmp_path: Path) -> None:
    write_python_model(tmp_path, code=gated(MODEL_PY))
    gate = Gate(tmp_path / "double" / "1")
    errors: list[str] = []

    def call() -> None:
        with httpclient.InferenceServerClient(started.http, network_timeout=60) as client:
            try:
                client.infer("double", [infer_input(httpclient, "IN", np.array([3], np.int32))])
            except InferenceServerException as error:
                errors.append(str(error))

    with gate.closed(), ServeProcess(tmp_path, "--exit-timeout-secs=1") as started:
        thread = threading.Thread(target=call)
        thread.start()
        assert eventually(lambda: bool(gate.runs))
        assert started.stop() == 1
        thread.join()
    assert len(errors) == 1
    assert "exit timeout" in errors[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_during_the_exit_delay_requests_are_answered_and_clients_asked_to_leave(tmp_path: Path, shape: Shape) -> None:
    write_identity(tmp_path, "echo", IDENTITY)
    tensor = {"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "data": [1.0] * 16}
    body = json.dumps({"inputs": [tensor]})

    with ServeProcess(tmp_path, "--exit-delay-secs=10", *shape) as server:
        kept = http.client.HTTPConnection(server.http, timeout=200)

        def asks_to_leave() -> bool:
            kept.request("POST", "/v2/models/echo/infer", body)
            answer = kept.getresponse()
            assert answer.status == 200
            answer.read()
            return answer.getheader("Connection") == "close"

        assert not asks_to_leave()
        server.begin_to_stop()
        assert eventually(asks_to_leave)  # each front end learns of it by itself
        assert eventually(lambda: not is_ready(server))
        kept.close()
        with grpcclient.InferenceServerClient(server.grpc) as late:
            assert eventually(lambda: not late.is_server_ready())
            late.infer("echo", [infer_input(grpcclient, "INPUT0", np.ones((1, 16), np.float32))])
        assert server.wait() == 0


def is_ready(server: ServeProcess) -> bool:
    with httpclient.InferenceServerClient(server.http) as client:
        return bool(client.is_server_ready())
