"""When an instance gets its next batch: as soon as the last one has run, before what that leads to."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import pytest
from tests.support.in_place import FixedPlace
from tests.support.recorded import RecordedScheduler

from charonia.config.kinds import InstanceKind
from charonia.config.model import DynamicBatching, ModelConfig, ModelInput, ModelOutput
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.request import InferRequest
from charonia.core.response import Outcome
from charonia.core.tensor import Tensor
from charonia.server.backends.api import Execution, Outputs, Placement
from charonia.server.execution.executor import BlockingExecutor, ExecutableBatch
from charonia.server.execution.runner import ModelRunner
from charonia.server.scheduling.in_place import InPlaceRule
from charonia.server.scheduling.schedulers import make_scheduler


class Echo:
    """A blocking instance that notes what it runs."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def execute(self, requests: Sequence[InferRequest]) -> Execution:
        self._events.append("run " + "".join(request.id for request in requests))
        return Execution([Outputs([request.inputs["IN"]]) for request in requests], 0, 0)

    def close(self) -> None:
        """There is nothing to give back."""


class Executor(BlockingExecutor):
    """One whose thread runs a batch when the test says so, unless it computes on the event loop."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(Echo(events), Placement("m_0", InstanceKind.KIND_CPU), asyncio.get_running_loop())
        self.rule: InPlaceRule = FixedPlace(in_place=False)
        self.batches: list[ExecutableBatch] = []

    def run(self, batch: ExecutableBatch) -> None:
        if self.rule.in_place:
            super().run(batch)
        else:
            self.batches.append(batch)

    def finish(self) -> None:
        """Run the oldest batch, and report it as the thread does."""
        batch = self.batches.pop(0)
        batch.executed(*self.run_in_place(batch.requests))


class Model:
    """A runner of one instance."""

    def __init__(self, max_batch_size: int) -> None:
        config = ModelConfig(
            name="m",
            max_batch_size=max_batch_size,
            input=(ModelInput("IN", DataType.FP32, dims=(1,)),),
            output=(ModelOutput("OUT", DataType.FP32, (1,)),),
            dynamic_batching=DynamicBatching() if max_batch_size else None,
        )
        self.events: list[str] = []
        self.executor = Executor(self.events)
        self.runner = ModelRunner(
            config,
            "1",
            scheduler=RecordedScheduler(make_scheduler(config)),
            executors=[self.executor],
            labels={},
            loop=asyncio.get_running_loop(),
        )
        self._shape = (1, 1) if max_batch_size else (1,)
        self.then: dict[str, Callable[[], object]] = {}

    def submit(self, names: str) -> None:
        for name in names:
            self.runner.submit(self.request(name), partial(self._answered, name))

    def request(self, name: str) -> InferRequest:
        return InferRequest("m", {"IN": Tensor("IN", DataType.FP32, np.zeros(self._shape, "<f4"))}, id=name)

    def _answered(self, name: str, outcome: Outcome, final: bool) -> None:
        handed = ["".join(request.id for request in batch.requests) for batch in self.executor.batches]
        self.events.append(f"answer {name}, handed over {handed}")
        self.then.get(name, lambda: None)()


@asynccontextmanager
async def playing(max_batch_size: int = 0) -> AsyncIterator[Model]:
    model = Model(max_batch_size)
    yield model
    await model.runner.aclose()


async def test_the_next_request_is_handed_over_before_the_last_one_is_answered() -> None:
    async with playing() as model:
        model.submit("abc")
        model.executor.finish()
        assert model.events == ["run a", "answer a, handed over ['b']"]


async def test_a_full_batch_is_handed_over_before_the_last_one_is_answered() -> None:
    async with playing(max_batch_size=2) as model:
        model.submit("abcd")
        model.executor.finish()
        assert model.events == ["run a", "answer a, handed over ['bc']"]


async def test_a_batch_with_room_waits_until_the_loop_has_read_what_has_arrived_meanwhile() -> None:
    async with playing(max_batch_size=4) as model:
        model.submit("abc")
        asyncio.get_running_loop().call_soon(model.submit, "d")
        model.executor.finish()
        assert model.events == ["run a", "answer a, handed over []"]
        await asyncio.sleep(0)
        assert [len(batch.requests) for batch in model.executor.batches] == [3]


async def test_what_a_reply_submits_waits_for_those_before_it() -> None:
    async with playing() as model:
        model.then["a"] = lambda: model.submit("d")
        model.submit("abc")
        while model.executor.batches:
            model.executor.finish()
        assert [event for event in model.events if event.startswith("run")] == ["run a", "run b", "run c", "run d"]


@pytest.mark.parametrize(("limit_ns", "turns"), [(0, ["a", "b", "c"]), (60 * 10**9, ["a", "bc"])])
async def test_an_instance_on_the_loop_runs_the_requests_that_wait_for_a_limited_time_and_leaves_it(
    monkeypatch: pytest.MonkeyPatch, limit_ns: int, turns: list[str]
) -> None:
    monkeypatch.setattr("charonia.server.execution.runner.TOGETHER_NS_MAX", limit_ns - 1)

    async with playing() as model:
        model.submit("abc")
        model.executor.rule = FixedPlace(in_place=True)
        model.executor.finish()
        expected: list[str] = []
        for turn in turns:
            for name in turn:
                expected += [f"run {name}", f"answer {name}, handed over []"]
            assert model.events == expected
            await asyncio.sleep(0)
        model.submit("d")
        assert model.events[-2:] == ["run d", "answer d, handed over []"]


async def test_a_reply_may_cancel_another_request_of_a_batch_whose_instance_is_busy_again() -> None:
    async with playing(max_batch_size=2) as model:
        outcomes: list[Outcome] = []
        model.submit("ab")
        ticket = model.runner.submit(model.request("c"), lambda outcome, final: outcomes.append(outcome))
        model.submit("de")
        model.then["b"] = ticket.cancel
        model.executor.finish()
        model.executor.finish()
        assert model.events[-1] == "answer b, handed over ['de']"
        (outcome,) = outcomes
        assert isinstance(outcome, ServingError)
        assert outcome.code is Code.CANCELLED
        model.executor.finish()
        await model.runner.drain()
        assert model.runner.metrics.statistics.success.count == 4
        assert model.runner.metrics.statistics.execution_count == 3
