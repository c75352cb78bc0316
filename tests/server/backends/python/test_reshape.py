"""Python models see the shapes of `reshape`, in worker processes and in threads."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support import python_model

from charonia.config.model import ModelConfig, ModelInput, ModelOutput, Reshape
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, internal
from charonia.core.request import CallFrame, InferRequest
from charonia.core.tensor import Tensor
from charonia.server.backends.api import BatchSink, Outputs, Result
from charonia.server.backends.workers.model import MODE, ReshapedInstance, reshaped

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


class Kept:
    def __init__(self) -> None:
        self.sinks: list[BatchSink] = []
        self.cancelled: list[int] = []

    def start(self, requests: Sequence[InferRequest], sink: BatchSink) -> None:
        self.sinks.append(sink)

    def cancel(self, sink: BatchSink, index: int) -> None:
        assert sink in self.sinks
        self.cancelled.append(index)

    async def aclose(self) -> None:
        pass


class Sink:
    def __init__(self) -> None:
        self.responses: list[tuple[int, bool]] = []
        self.has_finished = False

    def respond(self, index: int, result: Result | None, final: bool) -> None:
        self.responses.append((index, final))

    def finish(
        self, input_end_ns: int, output_start_ns: int, error: ServingError | None = None, *, leaves_open: bool = False
    ) -> None:
        self.has_finished = True

    def is_cancelled(self, index: int) -> bool:
        return index in (1, 7)

    def frame(self) -> CallFrame:
        return CallFrame("m", "1", "m_0")


def test_requests_that_are_left_open_can_still_be_cancelled_and_answered() -> None:
    kept, sink = Kept(), Sink()
    instance = reshaped(kept, CONFIG)
    instance.start([request(), request(), request()], sink)
    mine = kept.sinks[0]

    mine.respond(0, None, True)
    mine.finish(1, 2, leaves_open=True)
    instance.cancel(sink, 1)
    mine.respond(2, internal("no"), False)
    mine.respond(2, None, True)
    instance.cancel(sink, 2)

    assert kept.cancelled == [1]
    assert sink.responses == [(0, True), (2, False), (2, True)]
    assert sink.has_finished
    assert mine.is_cancelled(7)
    assert mine.frame().model == "m"


def test_a_batch_that_leaves_nothing_open_is_forgotten() -> None:
    kept, sink = Kept(), Sink()
    instance = ReshapedInstance(kept, CONFIG)
    instance.start([request()], sink)

    kept.sinks[0].finish(1, 2, internal("all of it"))
    instance.cancel(sink, 0)

    assert kept.cancelled == []


def test_without_reshape_there_is_nothing_around_an_instance() -> None:
    kept = Kept()

    assert reshaped(kept, ModelConfig(input=(ModelInput("IN", FP32, dims=(4,)),))) is kept
