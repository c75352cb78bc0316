"""Python models see the shapes of `reshape`, in worker processes and in threads."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support import python_model
from tests.support.process import until

from charonia.config.model import ModelConfig, ModelInput, ModelOutput, Reshape
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.core.request import InferRequest
from charonia.core.tensor import Tensor
from charonia.server.backends.api import Outputs, Result
from charonia.server.backends.workers.model import MODE

FP32 = DataType.FP32
CONFIG = ModelConfig(
    name="m",
    backend="python",
    max_batch_size=4,
    input=(
        ModelInput("IN", FP32, dims=(4,), reshape=Reshape((2, 2))),
        ModelInput("HOW", FP32, dims=(1,), optional=True),
    ),
    output=(ModelOutput("OUT", FP32, (4,), reshape=Reshape((2, 2))), ModelOutput("SHAPE", FP32, (3,))),
)
CODE = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            how = pb_utils.get_input_tensor_by_name(request, "HOW")
            shape = pb_utils.Tensor("SHAPE", np.array([array.shape], np.float32))
            if how is not None:
                array = array.reshape((1, 4) if how.as_numpy()[0, 0] else (1, 4, 1))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array), shape]))
        return responses
"""


def request(how: float | None = None) -> InferRequest:
    inputs = {"IN": Tensor("IN", FP32, np.arange(4, dtype="f4")[None])}
    if how is not None:
        inputs["HOW"] = Tensor("HOW", FP32, np.array([[how]], "f4"))
    return InferRequest("m", inputs)


def arrays(result: Result | None) -> dict[str, object]:
    assert isinstance(result, Outputs), result
    return {tensor.name: tensor.array.tolist() for tensor in result.tensors}


@pytest.mark.parametrize("mode", ["process", "thread"])
async def test_a_model_sees_and_answers_in_the_shapes_of_reshape(tmp_path: Path, mode: str) -> None:
    loaded = await python_model.load(tmp_path, CODE, replace(CONFIG, parameters={MODE: mode}))
    sent = request()
    plain, flat, wrong = await loaded.run([sent, request(1), request(0)])
    await loaded.close()

    assert arrays(plain) == {"OUT": [[0, 1, 2, 3]], "SHAPE": [[1, 2, 2]]}
    assert arrays(flat)["OUT"] == [[0, 1, 2, 3]]  # the shape of dims is understood, too
    assert isinstance(wrong, ServingError)
    assert "'OUT': expected an array of shape ['batch', 2, 2], got [1, 4, 1]" in wrong.message
    assert sent.inputs["IN"].array.shape == (1, 4)


async def test_a_worker_that_ends_is_noticed_and_its_successor_warmed_up(tmp_path: Path) -> None:
    lost: list[bool] = []
    code = CODE.replace("            how =", "            assert array.shape == (1, 2, 2)\n            how =")
    loaded = await python_model.load(tmp_path, code, replace(CONFIG, parameters={MODE: "process"}))
    loaded.instance.keep_warm([[request()]])
    loaded.instance.when_lost(lambda: lost.append(True))

    os.kill(loaded.instance.pid, signal.SIGKILL)
    await until(lambda: lost)
    [result] = await loaded.run([request()])
    await loaded.close()

    assert arrays(result)["OUT"] == [[0, 1, 2, 3]]
