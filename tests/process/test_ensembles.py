"""Ensembles as clients see them: identity, ONNX and Python models connected, and asked by stock clients."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tests.support.fork_server import run_command
from tests.support.models import identity_pbtxt, write_model
from tests.support.process import ServeProcess
from tests.support.stock_clients import infer_input
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


def step(model: str, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    maps = "".join(f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in inputs.items())
    maps += "".join(f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in outputs.items())
    return f'step {{ model_name: "{model}" model_version: -1 {maps} }} '


def ensemble(inputs: str, outputs: str, *steps: str, max_batch_size: int = 0) -> str:
    tensor = 'name: "{}" data_type: TYPE_FP32 dims: [ 4 ]'
    given = "".join(f"input {{ {tensor.format(name)} }} " for name in inputs.split())
    wanted = "".join(f"output {{ {tensor.format(name)} }} " for name in outputs.split())
    scheduling = f"ensemble_scheduling {{ {' '.join(steps)} }}"
    return f'platform: "ensemble" max_batch_size: {max_batch_size} {given} {wanted} {scheduling}'


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "echo", "", config=identity_pbtxt(dims=(4,), max_batch_size=16))
    write_model(folder, "double", DOUBLE, config=DOUBLE_CONFIG)
    echo = step("echo", {"INPUT0": "IN"}, {"OUTPUT0": "mid"})
    double = step("double", {"X": "mid"}, {"Y": "OUT"})
    write_model(folder, "pipeline", "", config=ensemble("IN", "OUT", echo, double, max_batch_size=16))
    nested = step("pipeline", {"IN": "IN"}, {"OUT": "once"}) + step("pipeline", {"IN": "once"}, {"OUT": "OUT"})
    write_model(folder, "nested", "", config=ensemble("IN", "OUT", nested, max_batch_size=16))
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServeProcess]:
    with ServeProcess(repository) as started:
        yield started
        assert started.stop() == 0


def ask(server: ServeProcess, model: str, *values: float, module: Any = httpclient) -> list[list[float]]:
    array = np.repeat(np.array(values, np.float32)[:, None], 4, axis=1)
    address = server.http if module is httpclient else server.grpc
    with module.InferenceServerClient(address) as client:
        result: list[list[float]] = client.infer(model, [infer_input(module, "IN", array)]).as_numpy("OUT").tolist()
        return result


@pytest.mark.parametrize("module", [httpclient, grpcclient])
def test_both_protocols_get_what_the_steps_compute(server: ServeProcess, module: Any) -> None:
    assert ask(server, "pipeline", 1, 3, module=module) == [[2] * 4, [6] * 4]
    assert ask(server, "nested", 1, 3, module=module) == [[4] * 4, [12] * 4]


@pytest.mark.parametrize("module", [httpclient, grpcclient])
def test_a_step_that_fails_for_one_request_of_a_batch_fails_that_one_alone(server: ServeProcess, module: Any) -> None:
    def outcome(value: float) -> object:
        try:
            return ask(server, "pipeline", value, module=module)[0][0]
        except InferenceServerException as error:
            return f"{error.status()} {error.message()}"

    failures = server.metric("nv_inference_request_failure", "pipeline", reason="OTHER")
    with ThreadPoolExecutor(8) as clients:
        outcomes = list(clients.map(outcome, [1, 2, 3, -1, 5, 6, 7, 8]))

    status = "400" if module is httpclient else "StatusCode.INVALID_ARGUMENT"
    assert outcomes.pop(3) == f"{status} in ensemble 'pipeline', step 'double': less than nothing"
    assert outcomes == [2, 4, 6, 10, 12, 14, 16]
    with pytest.raises(InferenceServerException, match="in ensemble 'nested', in ensemble 'pipeline'"):
        ask(server, "nested", -1, module=module)
    assert server.metric("nv_inference_request_failure", "pipeline", reason="OTHER") == failures + 2


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
