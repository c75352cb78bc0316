"""Ensembles as clients see them: identity, ONNX and Python models connected, and asked by stock clients."""

import json
import queue
import re
import socket
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tests.support.fork_server import run_command
from tests.support.gate import Gate, gated
from tests.support.models import PYTHON_IDENTITY, add_sub, identity_pbtxt, write_model
from tests.support.process import ServeProcess, eventually
from tritonclient.utils import InferenceServerException

DOUBLE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(r, "X").as_numpy()) for r in requests]

    def answer(self, array):
        if (array < 0).any():
            error = pb_utils.TritonError("less than nothing", pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=error)
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", array * 2)])
"""

DOUBLE_CONFIG = """
backend: "python" max_batch_size: 16
input { name: "X" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }
dynamic_batching { max_queue_delay_microseconds: 20000 }
"""

CALL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        given = pb_utils.Tensor("IN", pb_utils.get_input_tensor_by_name(request, "X").as_numpy())
        called = pb_utils.InferenceRequest(model_name="{model}", requested_output_names=["OUT"], inputs=[given]).exec()
        if called.has_error():
            return pb_utils.InferenceResponse(error=called.error())
        output = pb_utils.get_output_tensor_by_name(called, "OUT")
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", output.as_numpy())])
"""

COUNT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            array = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            for number in range(int(array[0])):
                values = np.full(4, number, np.float32)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", values)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

COUNT_CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }
model_transaction_policy { decoupled: true }
"""


def step(model: str, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    maps = "".join(f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in inputs.items())
    maps += "".join(f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in outputs.items())
    return f'step {{ model_name: "{model}" model_version: -1 {maps} }} '


def ensemble(inputs: str, outputs: str, *steps: str, max_batch_size: int = 0, more: str = "") -> str:
    tensor = 'name: "{}" data_type: TYPE_FP32 dims: [ 4 ]'
    given = "".join(f"input {{ {tensor.format(name)} }} " for name in inputs.split())
    wanted = "".join(f"output {{ {tensor.format(name)} }} " for name in outputs.split())
    scheduling = f"ensemble_scheduling {{ {' '.join(steps)} {more} }}"
    return f'platform: "ensemble" max_batch_size: {max_batch_size} {given} {wanted} {scheduling}'


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "echo", "", config=identity_pbtxt(dims=(4,), max_batch_size=16))
    write_model(folder, "alone", "", config=identity_pbtxt(dims=(4,), max_batch_size=0))
    held = identity_pbtxt("python", dims=(4,), max_batch_size=0)
    write_model(folder, "held", gated(PYTHON_IDENTITY), config=held)
    write_model(folder, "add_sub", add_sub(dims=(4,)), config="max_batch_size: 16")
    write_model(folder, "double", DOUBLE, config=DOUBLE_CONFIG)
    write_model(folder, "count", COUNT, config=COUNT_CONFIG)
    echo = step("echo", {"INPUT0": "IN"}, {"OUTPUT0": "mid"})
    double = step("double", {"X": "mid"}, {"Y": "OUT"})
    write_model(folder, "pipeline", "", config=ensemble("IN", "OUT", echo, double, max_batch_size=16))
    nested = step("pipeline", {"IN": "IN"}, {"OUT": "once"}) + step("pipeline", {"IN": "once"}, {"OUT": "OUT"})
    write_model(folder, "nested", "", config=ensemble("IN", "OUT", nested, max_batch_size=16))
    branches = (
        step("add_sub", {"INPUT0": "A", "INPUT1": "B"}, {"OUTPUT0": "sum", "OUTPUT1": "DIFFERENCE"})
        + step("alone", {"INPUT0": "sum"}, {"OUTPUT0": "copy"})
        + step("double", {"X": "copy"}, {"Y": "TWICE"})
    )
    write_model(folder, "branches", "", config=ensemble("A B", "DIFFERENCE TWICE", branches))
    plain = DOUBLE_CONFIG.replace("dynamic_batching", "# ")
    write_model(folder, "caller", CALL.replace("{model}", "pipeline"), config=plain)
    write_model(
        folder, "around", "", config=ensemble("IN", "OUT", step("caller", {"X": "IN"}, {"Y": "OUT"}), max_batch_size=8)
    )
    write_model(folder, "recaller", CALL.replace("{model}", "circle"), config=plain)
    circle = step("echo", {"INPUT0": "IN"}, {"OUTPUT0": "mid"}) + step("recaller", {"X": "mid"}, {"Y": "OUT"})
    write_model(folder, "circle", "", config=ensemble("IN", "OUT", circle, max_batch_size=8))
    stream = step("count", {"X": "IN"}, {"Y": "number"}) + step("double", {"X": "number"}, {"Y": "OUT"})
    write_model(folder, "stream", "", config=ensemble("IN", "OUT", stream, more="max_inflight_requests: 2"))
    waits = step("held", {"INPUT0": "IN"}, {"OUTPUT0": "mid"}) + step("alone", {"INPUT0": "mid"}, {"OUTPUT0": "OUT"})
    write_model(folder, "waits", "", config=ensemble("IN", "OUT", waits))
    ghostly = step("ghost", {"INPUT0": "IN"}, {"OUTPUT0": "OUT"})
    write_model(folder, "ghostly", "", config=ensemble("IN", "OUT", ghostly))
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServeProcess]:
    names = ("pipeline", "nested", "branches", "stream", "waits", "around", "circle")
    loads = [f"--load-model={name}" for name in names]
    with ServeProcess(repository, "--model-control-mode=explicit", *loads) as started:
        yield started
        assert started.stop() == 0


@pytest.fixture
def gate(repository: Path) -> Gate:
    """What the first step of the ensemble "waits" is held up by."""
    return Gate(repository / "held" / "1")


def given(module: Any, name: str, array: "np.ndarray[Any, Any]") -> Any:
    made = module.InferInput(name, list(array.shape), "FP32")
    made.set_data_from_numpy(array)
    return made


def ask(server: ServeProcess, model: str, *values: float, module: Any = httpclient) -> list[list[float]]:
    array = np.repeat(np.array(values, np.float32)[:, None], 4, axis=1)
    address = server.http if module is httpclient else server.grpc
    with module.InferenceServerClient(address) as client:
        result: list[list[float]] = client.infer(model, [given(module, "IN", array)]).as_numpy("OUT").tolist()
        return result


def metric(server: ServeProcess, name: str, model: str, reason: str = "") -> float:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=10) as page:
        text = page.read().decode()
    label = f'reason="{reason}",' if reason else ""
    found = re.search(rf'^{name}{{model="{model}",{label}version="1"}} (\S+)$', text, re.M)
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize("module", [httpclient, grpcclient])
def test_both_protocols_get_what_the_steps_compute(server: ServeProcess, module: Any) -> None:
    assert ask(server, "pipeline", 1, 3, module=module) == [[2] * 4, [6] * 4]
    assert ask(server, "nested", 1, 3, module=module) == [[4] * 4, [12] * 4]


@pytest.mark.parametrize("module", [httpclient, grpcclient])
def test_models_with_and_without_a_batch_dimension_work_together(server: ServeProcess, module: Any) -> None:
    a, b = np.arange(4, dtype=np.float32), np.ones(4, np.float32)
    address = server.http if module is httpclient else server.grpc
    with module.InferenceServerClient(address) as client:
        result = client.infer("branches", [given(module, "A", a), given(module, "B", b)])
        assert result.as_numpy("DIFFERENCE").tolist() == [-1, 0, 1, 2]
        assert result.as_numpy("TWICE").tolist() == [2, 4, 6, 8]

        before = client.get_inference_statistics("double", as_json=True) if module is grpcclient else None
        wanted = [module.InferRequestedOutput("DIFFERENCE")]
        only = client.infer("branches", [given(module, "A", a), given(module, "B", b)], outputs=wanted)
        assert only.as_numpy("TWICE") is None
        if before is not None:
            assert client.get_inference_statistics("double", as_json=True) == before


def test_a_step_may_call_an_ensemble(server: ServeProcess) -> None:
    assert ask(server, "around", 3) == [[6] * 4]
    with pytest.raises(InferenceServerException, match=r"^.*in ensemble 'around', step 'caller': .*less than nothing"):
        ask(server, "around", -1)


def test_a_step_that_calls_its_own_ensemble_is_told_instead_of_waiting_for_ever(server: ServeProcess) -> None:
    with pytest.raises(InferenceServerException) as raised:
        ask(server, "circle", 1)

    message = raised.value.message()
    assert message.startswith("in ensemble 'circle', step 'recaller': ")
    assert "would deadlock" in message
    assert "circle -> recaller -> circle -> recaller" in message


def test_an_ensemble_describes_itself(server: ServeProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        assert client.get_model_metadata("pipeline") == {
            "name": "pipeline",
            "versions": ["1"],
            "platform": "ensemble",
            "inputs": [{"name": "IN", "datatype": "FP32", "shape": [-1, 4]}],
            "outputs": [{"name": "OUT", "datatype": "FP32", "shape": [-1, 4]}],
        }
        config = client.get_model_config("stream")
        assert config["model_transaction_policy"] == {"decoupled": True}
        assert config["ensemble_scheduling"]["step"][0]["model_name"] == "count"
        assert config["ensemble_scheduling"]["max_inflight_requests"] == 2


def test_an_ensemble_and_its_steps_are_counted(server: ServeProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:

        def counts() -> dict[str, int]:
            statistics = client.get_inference_statistics()["model_stats"]
            return {entry["name"]: entry["inference_stats"]["success"]["count"] for entry in statistics}

        before = counts()
        requests = metric(server, "nv_inference_request_success", "pipeline")
        ask(server, "pipeline", 1, 2)
        after = counts()

        assert {name for name in after if after[name] != before[name]} == {"pipeline", "echo", "double"}
        assert metric(server, "nv_inference_request_success", "pipeline") == requests + 1
        entry = client.get_inference_statistics("pipeline")["model_stats"][0]
        assert entry["inference_stats"]["queue"]["count"] == entry["inference_stats"]["success"]["count"]
        assert entry["inference_stats"]["compute_infer"]["ns"] > 0


@pytest.mark.parametrize("module", [httpclient, grpcclient])
def test_a_step_that_fails_for_one_request_of_a_batch_fails_that_one_alone(server: ServeProcess, module: Any) -> None:
    def outcome(value: float) -> object:
        try:
            return ask(server, "pipeline", value, module=module)[0][0]
        except InferenceServerException as error:
            return f"{error.status()} {error.message()}"

    failures = metric(server, "nv_inference_request_failure", "pipeline", "OTHER")
    with ThreadPoolExecutor(8) as clients:
        outcomes = list(clients.map(outcome, [1, 2, 3, -1, 5, 6, 7, 8]))

    status = "400" if module is httpclient else "StatusCode.INVALID_ARGUMENT"
    assert outcomes.pop(3) == f"{status} in ensemble 'pipeline', step 'double': less than nothing"
    assert outcomes == [2, 4, 6, 10, 12, 14, 16]
    assert metric(server, "nv_inference_request_failure", "pipeline", "OTHER") == failures + 1


def test_an_error_in_a_nested_ensemble_has_the_whole_way(server: ServeProcess) -> None:
    with pytest.raises(InferenceServerException) as raised:
        ask(server, "nested", -1)

    assert raised.value.message() == (
        "in ensemble 'nested', step 'pipeline': in ensemble 'pipeline', step 'double': less than nothing"
    )


def test_responses_of_a_decoupled_step_stream_to_the_client(server: ServeProcess) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        array = np.full(4, 7, np.float32)
        client.async_stream_infer("stream", [given(grpcclient, "IN", array)], enable_empty_final_response=True)
        values: list[float] = []
        is_final = False
        while not is_final:
            result, error = answers.get(timeout=30)
            assert error is None
            is_final = result.get_response().parameters["triton_final_response"].bool_param
            values += [] if result.as_numpy("OUT") is None else [result.as_numpy("OUT").tolist()[0]]
        client.stop_stream()

    assert values == [0, 2, 4, 6, 8, 10, 12]


def test_a_client_that_leaves_in_mid_flight_stops_the_request(server: ServeProcess, gate: Gate) -> None:
    before = metric(server, "nv_inference_request_failure", "waits", "CANCELED")
    body = json.dumps({"inputs": [{"name": "IN", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}]}).encode()
    host, port = server.http.split(":")
    success = metric(server, "nv_inference_request_success", "alone")
    runs = gate.runs

    with gate.closed():
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            head = f"POST /v2/models/waits/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            assert eventually(lambda: gate.runs > runs)

        assert eventually(lambda: metric(server, "nv_inference_request_failure", "waits", "CANCELED") == before + 1)
        assert metric(server, "nv_inference_request_failure", "held", "CANCELED") >= 1
    ask_flat(server, "waits")  # behind the one that is stopped
    assert metric(server, "nv_inference_request_success", "alone") == success + 1


def test_a_deadline_reaches_the_steps(server: ServeProcess, gate: Gate) -> None:
    before = metric(server, "nv_inference_request_failure", "held", "CANCELED")
    runs = gate.runs
    with gate.closed(), grpcclient.InferenceServerClient(server.grpc) as client:
        while gate.runs == runs:  # a machine that stands still lets a request be late before it arrives
            with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
                client.infer("waits", [given(grpcclient, "IN", np.zeros(4, np.float32))], client_timeout=0.1)

        assert eventually(lambda: metric(server, "nv_inference_request_failure", "held", "CANCELED") > before)


def test_an_ensemble_of_a_model_that_is_not_there_is_refused(server: ServeProcess) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        with pytest.raises(
            InferenceServerException, match="contains models that are not available or ambiguous: ghost"
        ):
            client.load_model("ghostly")
        client.unload_model("ghostly")


def test_a_step_that_is_unloaded_is_named_and_all_is_well_when_it_is_back(server: ServeProcess, gate: Gate) -> None:
    def reasons() -> dict[str, str]:
        return {e["name"]: e.get("reason", "") for e in client.get_model_repository_index() if e.get("version")}

    runs = gate.runs
    with httpclient.InferenceServerClient(server.http) as client, ThreadPoolExecutor(1) as other:
        with gate.closed():
            running = other.submit(ask_flat, server, "waits")
            assert eventually(lambda: gate.runs > runs)
            client.unload_model("alone")

        with pytest.raises(InferenceServerException, match=r"in ensemble 'waits', step 'alone': .*'alone'"):
            running.result()
        assert "ensemble 'waits' depends on 'alone' which has no loaded version." in reasons()["waits"]
        assert not client.is_model_ready("waits")
        assert not client.is_model_ready("branches")
        with pytest.raises(InferenceServerException, match="'waits' has no available versions"):
            ask_flat(server, "waits")
        assert ask(server, "pipeline", 1) == [[2] * 4]

        client.load_model("alone")
        assert client.is_model_ready("waits")
        assert client.is_model_ready("branches")
        assert ask_flat(server, "waits") == [0, 1, 2, 3]


def test_the_config_command_shows_an_ensemble_and_what_is_wrong_with_it(repository: Path) -> None:
    shown = run_command("config", repository / "pipeline")
    assert shown.returncode == 0, shown.stderr
    assert 'model_name: "double"' in shown.stdout
    wrong = repository.parent / "wrong" / "1"
    wrong.mkdir(parents=True)
    config = ensemble("IN", "OUT", step("echo", {"INPUT0": "other"}, {"OUTPUT0": "OUT"}))
    (wrong.parent / "config.pbtxt").write_text(config)
    refused = run_command("config", wrong.parent)

    assert refused.returncode == 1
    assert "ensemble input 'IN' for ensemble 'wrong' is not used" in refused.stderr
    assert "'other', is not connected" in refused.stderr


def ask_flat(server: ServeProcess, model: str) -> list[float]:
    with httpclient.InferenceServerClient(server.http) as client:
        array = np.arange(4, dtype=np.float32)
        result: list[float] = client.infer(model, [given(httpclient, "IN", array)]).as_numpy("OUT").tolist()
        return result
