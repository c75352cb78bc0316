from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.backends import request_of, version_of

from charonia.config.kinds import InstanceKind
from charonia.config.model import InstanceGroup, ModelConfig, ModelInput, ModelOutput, TransactionPolicy
from charonia.core.dtypes import DataType
from charonia.core.request import InferRequest
from charonia.core.tensor import Array
from charonia.server.backends.python.backend import PythonBackend
from charonia.testing.backend_suite import BackendCase, BackendSuite
from charonia.testing.decoupled_suite import DecoupledCase, DecoupledSuite

ROOTS = b"""\
import numpy
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "X").as_numpy()) for request in requests]

    def answer(self, x):
        if (x < 0).any():
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("a root of a negative number"))
        text = numpy.array([[str(row[0]).encode(), b""] for row in x], object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("ROOT", numpy.sqrt(x)), pb_utils.Tensor("TEXT", text)])
"""

COUNT = b"""\
import threading

import numpy
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])
            threading.Thread(target=self.answer, args=(request.get_response_sender(), count)).start()

    def answer(self, sender, count):
        for number in range(abs(count)):
            if sender.is_cancelled():
                break
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("I", numpy.full(50_000, number, "i4"))]))
        response = None
        if count < 0:
            response = pb_utils.InferenceResponse(error=pb_utils.TritonError("below zero"))
        sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

COUNT_CONFIG = ModelConfig(
    name="count",
    backend="python",
    input=(ModelInput("N", DataType.INT32, dims=(1,)),),
    output=(ModelOutput("I", DataType.INT32, (-1,)),),
    instance_group=(InstanceGroup("count_0", InstanceKind.KIND_CPU, count=1),),
    model_transaction_policy=TransactionPolicy(decoupled=True),
)

CONFIG = ModelConfig(
    name="roots",
    backend="python",
    max_batch_size=8,
    input=(ModelInput("X", DataType.FP32, dims=(4,)),),
    output=(ModelOutput("ROOT", DataType.FP32, (4,)), ModelOutput("TEXT", DataType.BYTES, (2,))),
    instance_group=(InstanceGroup("roots_0", InstanceKind.KIND_CPU, count=1),),
)


def request(array: Array) -> InferRequest:
    return request_of(X=array)


def numbers(seed: int, size: int) -> InferRequest:
    return request(np.random.default_rng(seed).random((size, 4), np.float32))


def count_to(number: int) -> InferRequest:
    return request_of(N=np.array([number], "<i4"))


@pytest.fixture(params=["process", "thread"])
def mode(request: pytest.FixtureRequest) -> dict[str, str]:
    return {"EXECUTION_MODE": request.param}


class TestPython(BackendSuite):
    @pytest.fixture
    def backend_case(self, tmp_path: Path, mode: dict[str, str]) -> BackendCase:
        files = version_of(tmp_path / "roots", model_py=ROOTS)
        config = replace(CONFIG, parameters=mode)
        return BackendCase(PythonBackend, files, config, numbers, lambda: request(np.full((1, 4), -1, np.float32)))


class TestDecoupledPython(DecoupledSuite):
    @pytest.fixture
    def decoupled_case(self, tmp_path: Path, mode: dict[str, str]) -> DecoupledCase:
        files = version_of(tmp_path / "count", model_py=COUNT)
        config = replace(COUNT_CONFIG, parameters=mode)
        return DecoupledCase(PythonBackend, files, config, count_to, lambda: count_to(-2))
