"""Calls to models of other applications, without a cluster: a handle is faked where one is needed."""

import asyncio
import pickle
import time
from typing import Any

import numpy as np
import pytest
from tests.support.fake_engine import FakeEngine

from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.request import CallFrame, InferRequest
from charonia.core.response import InferResponse, Outcome
from charonia.core.tensor import Tensor
from charonia.ray.replica import RemoteModels, received, sent


class Models(FakeEngine):
    def is_loadable(self, name: str) -> bool:
        return False


class FakeHandle:
    """The handle of an application whose models are those of an engine, or which answers with what it was given."""

    def __init__(self, answer: Any) -> None:
        self.infer = self.model_ready = self
        self.answer = answer
        self.calls: list[tuple[Any, ...]] = []
        self.is_cancelled = False

    def remote(self, *arguments: Any) -> "FakeHandle":
        self.calls.append(pickle.loads(pickle.dumps(arguments)))
        return self

    def cancel(self) -> None:
        self.is_cancelled = True

    def __await__(self) -> Any:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        if self.answer is None:
            await asyncio.Event().wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return pickle.loads(pickle.dumps(self.answer))


def request(model: str = "far") -> InferRequest:
    tensor = Tensor("INPUT0", DataType.FP32, np.ones((1, 4), np.float32))
    return InferRequest(model, {"INPUT0": tensor}, id="7", parameters={"p": 1}, caller=CallFrame("caller", "1"))


def ask(answer: Any, given: InferRequest, cancel: bool = False) -> tuple[list[tuple[Outcome, bool]], FakeHandle]:
    async def run() -> tuple[list[tuple[Outcome, bool]], FakeHandle]:
        handle = FakeHandle(answer)
        models = RemoteModels(Models(), {"far": "others"})
        models._handles["others"] = handle
        outcomes: list[tuple[Outcome, bool]] = []
        ticket = models.infer(given, lambda outcome, final: outcomes.append((outcome, final)))
        await asyncio.sleep(0.01)
        if cancel:
            ticket.cancel()
            await asyncio.sleep(0.01)
        return outcomes, handle

    return asyncio.run(run())


def test_a_request_and_its_response_travel_whole() -> None:
    response = InferResponse("far", "2", "7", [Tensor("OUTPUT0", DataType.BYTES, np.array([b"x"], object))])

    outcomes, handle = ask(response, request())

    ((outcome, is_final),) = outcomes
    assert isinstance(outcome, InferResponse)
    assert (outcome.model_version, outcome.outputs[0].array.tolist(), is_final) == ("2", [b"x"], True)
    ((arrived, left_ns),) = handle.calls
    assert (arrived.id, arrived.parameters, arrived.caller, left_ns) == ("7", {"p": 1}, None, 0)
    assert np.array_equal(arrived.inputs["INPUT0"].array, np.ones((1, 4)))


@pytest.mark.parametrize(
    ("answer", "code", "text"),
    [
        (("NOT_FOUND", "unknown model", "load it"), Code.NOT_FOUND, "unknown model (hint: load it)"),
        (RuntimeError("the replica died"), Code.INTERNAL, "model 'far' of the application 'others': the replica died"),
    ],
)
def test_an_error_is_the_only_outcome(answer: Any, code: Code, text: str) -> None:
    ((error, is_final),), _ = ask(answer, request())

    assert isinstance(error, ServingError)
    assert (error.code, str(error), is_final) == (code, text, True)


def test_a_cancelled_call_is_cancelled_there() -> None:
    ((error, _),), handle = ask(None, request(), cancel=True)

    assert isinstance(error, ServingError)
    assert error.code is Code.CANCELLED
    assert handle.is_cancelled


def test_other_models_are_those_of_this_replica() -> None:
    outcomes, handle = ask(None, request("identity"))

    assert isinstance(outcomes[0][0], InferResponse)
    assert handle.calls == []


def test_a_deadline_is_sent_as_what_is_left_of_it() -> None:
    given = request()
    given.deadline_ns = time.monotonic_ns() + 10**9

    copy, left_ns = sent(given)

    assert 0 < left_ns <= 10**9
    assert abs(received(copy, left_ns).deadline_ns - given.deadline_ns) < 10**8


def test_models_elsewhere_are_not_controlled_from_here() -> None:
    models = RemoteModels(Models(), {"far": "others"})

    with pytest.raises(ServingError, match="cannot be controlled: it is in 'others'"):
        asyncio.run(models.load_model("far"))
    with pytest.raises(ServingError, match="is in the application 'others'"):
        models.model_config("far")
    assert models.is_loadable("far")
