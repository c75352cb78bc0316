"""Instances with padding around them."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from tests.support.recorded import RecordedScheduler

from charonia.clock import now_ns
from charonia.config.kinds import InstanceKind
from charonia.config.model import DynamicBatching, ModelConfig, ModelInput, ModelOutput
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, internal
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse, Outcome
from charonia.core.tensor import Array, Tensor
from charonia.server.backends.api import BatchSink, Execution, Outputs, Placement, Result
from charonia.server.execution.admission import Admission
from charonia.server.execution.executor import make_executor
from charonia.server.execution.runner import ModelRunner
from charonia.server.ragged.configuration import padding_plan
from charonia.server.ragged.padding import PADDED_BYTES_MAX, PaddingPlan, PaddingStrategy, pad_instance
from charonia.server.scheduling.schedulers import make_scheduler
from charonia.testing.decoupled_suite import begin

CONFIG = ModelConfig(
    name="m",
    max_batch_size=8,
    input=(
        ModelInput("X", DataType.FP32, dims=(-1,)),
        ModelInput("MASK", DataType.FP32, dims=(-1,), optional=True),
    ),
    output=(ModelOutput("Y", DataType.FP32, (-1,)), ModelOutput("SUM", DataType.FP32, (1,))),
    dynamic_batching=DynamicBatching(),
    parameters={"PADDING": '{"inputs": {"X": {"value": 9, "mask": "MASK"}}, "outputs": {"Y": {"input": "X"}}}'},
)
FAILS = -1.0


def plan_of(config: ModelConfig = CONFIG) -> PaddingPlan:
    plan = padding_plan(config)
    assert plan is not None
    return plan


def answer(request: InferRequest) -> Result:
    """Return twice the input and its masked sum, with the input as the parameter `seen`."""
    x, mask = request.inputs["X"].array.astype("f4"), request.inputs["MASK"].array.astype("f4")
    if FAILS in x:
        return internal("no")
    total = (x * mask).sum(1, keepdims=True)
    y = x[:, :1] if x[0, 0] == -2 else 2 * x
    return Outputs([Tensor("Y", DataType.FP32, y), Tensor("SUM", DataType.FP32, total)], {"seen": str(x.tolist())})


class Blocking:
    def __init__(self) -> None:
        self.is_closed = False

    def execute(self, requests: Sequence[InferRequest]) -> Execution:
        return Execution([answer(request) for request in requests], now_ns(), now_ns())

    def close(self) -> None:
        self.is_closed = True


class Later:
    """An asynchronous instance that answers soon."""

    def __init__(self) -> None:
        self.cancelled: list[tuple[BatchSink, int]] = []
        self.sinks: list[BatchSink] = []
        self.is_closed = False

    def start(self, requests: Sequence[InferRequest], sink: BatchSink) -> None:
        self.sinks.append(sink)
        asyncio.get_running_loop().call_soon(self._finish, requests, sink)

    def _finish(self, requests: Sequence[InferRequest], sink: BatchSink) -> None:
        assert sink.frame().model == "m"
        for index, request in enumerate(requests):
            if not sink.is_cancelled(index):
                sink.respond(index, answer(request), True)
        sink.finish(now_ns(), now_ns())

    def cancel(self, sink: BatchSink, index: int) -> None:
        self.cancelled.append((sink, index))

    async def aclose(self) -> None:
        self.is_closed = True


def request(id: str, *values: float) -> InferRequest:
    return InferRequest("m", {"X": Tensor("X", DataType.FP32, np.array([values], "f4"))}, id=id)


def answers_of(instance: Blocking | Later, requests: Sequence[InferRequest], cancel: str = "") -> dict[str, Outcome]:
    """Run requests, all but the first of which wait together; return what each was answered."""
    found: dict[str, Outcome] = {}

    async def main() -> None:
        padded = pad_instance(instance, plan_of())
        executor = make_executor(padded, Placement("m_0", InstanceKind.KIND_CPU), asyncio.get_running_loop())
        strategy = PaddingStrategy(plan_of())
        runner = ModelRunner(
            CONFIG,
            "1",
            scheduler=RecordedScheduler(make_scheduler(CONFIG, strategy)),
            executors=[executor],
            labels={},
            loop=asyncio.get_running_loop(),
        )
        strategy.entry_of = runner.entry
        entries = {}
        for each in requests:

            def note(outcome: Outcome, final: bool, request_id: str = each.id) -> None:
                found[request_id] = outcome

            entries[each.id] = runner.submit(each, note)
        if cancel:
            entries[cancel].cancel()
        await runner.drain()
        await runner.aclose()

    asyncio.run(main())
    return found


def outputs(outcome: Outcome) -> dict[str, Array]:
    assert isinstance(outcome, InferResponse), outcome
    return {tensor.name: tensor.array for tensor in outcome.outputs}


def _columns(outcome: Outcome) -> int:
    assert isinstance(outcome, InferResponse)
    return len(str(outcome.parameters["seen"]).split(","))


@pytest.mark.parametrize("make", [Blocking, Later])
def test_requests_of_different_lengths_run_together_and_get_their_own(make: type[Blocking | Later]) -> None:
    instance = make()

    found = answers_of(instance, [request("first", 1), request("a", 1, 2, 3), request("b", 4), request("c")])

    assert {name: outputs(each)["Y"].tolist() for name, each in found.items()} == {
        "first": [[2.0]],
        "a": [[2.0, 4.0, 6.0]],
        "b": [[8.0]],
        "c": [[]],
    }
    assert [outputs(found[name])["SUM"].tolist() for name in "abc"] == [[[6.0]], [[4.0]], [[0.0]]]
    (seen,) = {_columns(found[name]) for name in "abc"}
    assert seen == 3  # one shape for all
    assert instance.is_closed


@pytest.mark.parametrize("make", [Blocking, Later])
def test_a_request_that_fails_leaves_the_others_their_answers(make: type[Blocking | Later]) -> None:
    found = answers_of(
        make(), [request("first", 1), request("a", 1, 2), request("bad", FAILS), request("short", -2, 1)]
    )

    assert outputs(found["a"])["Y"].tolist() == [[2.0, 4.0]]
    assert isinstance(found["bad"], ServingError)
    assert isinstance(found["short"], ServingError)
    assert "output 'Y': expected at least 2" in found["short"].message


def test_a_caller_that_leaves_is_passed_on_while_the_batch_runs() -> None:
    instance = Later()

    found = answers_of(instance, [request("first", 1), request("a", 2)], cancel="first")

    assert instance.cancelled == [(instance.sinks[0], 0)]
    assert outputs(found["a"])["Y"].tolist() == [[4.0]]


async def test_a_batch_that_is_over_is_forgotten() -> None:
    instance = Later()
    padded = pad_instance(instance, plan_of())
    sink = begin(padded, [request("a", 1)])  # type: ignore[arg-type]  # as an asynchronous instance
    await asyncio.sleep(0.01)
    padded.cancel(sink, 0)  # type: ignore[union-attr]
    assert instance.cancelled == []


def test_the_request_of_the_front_end_stays_as_it_is() -> None:
    mine = request("a", 1)

    pad_instance(Blocking(), plan_of()).execute([mine, request("b", 1, 2)])  # type: ignore[union-attr]  # it is blocking

    assert list(mine.inputs) == ["X"]
    assert mine.inputs["X"].array.shape == (1, 1)


def test_shapes_and_what_is_computed_are_no_part_of_the_key() -> None:
    of = Admission(CONFIG)
    with_mask = request("a", 1, 2)
    with_mask.inputs["MASK"] = Tensor("MASK", DataType.FP32, np.ones((1, 2), "f4"))

    assert of.check(request("a", 1)) == of.check(request("b", 1, 2, 3)) == of.check(with_mask)


class Gathered:
    def __init__(self, request: InferRequest) -> None:
        self.request = request


def test_a_request_that_would_make_the_batch_too_large_stays_out() -> None:
    strategy = PaddingStrategy(plan_of(), bytes_max=4 * 10)
    waiting = {1: request("a", 1, 2), 2: request("b", 3), 3: request("c", *[1.0] * 4), 4: request("d", 1)}
    strategy.entry_of = lambda each: Gathered(waiting[each])  # all that it needs

    gathering = strategy()

    assert [gathering.take(each).value for each in (1, 2, 3)] == ["joins", "joins", "stays_out"]
    gathering.end()
    assert PADDED_BYTES_MAX == 64 * 1024 * 1024


def test_a_strategy_that_knows_no_requests_fails() -> None:
    assert PaddingStrategy(plan_of())().take(1).value == "failed"
