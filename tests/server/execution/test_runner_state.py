"""What a runner says of itself, what it counts, and what becomes of requests when a part of it fails."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from tests.support.in_place import FixedPlace
from tests.support.scripted import ScriptedInstance

from charonia.config.kinds import InstanceKind
from charonia.config.model import DynamicBatching, ModelConfig, ModelInput, ModelOutput, TransactionPolicy
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse, Outcome
from charonia.core.tensor import Tensor
from charonia.server.backends.api import BatchSink, Execution, Outputs, Placement
from charonia.server.execution.executor import AsyncExecutor, BlockingExecutor
from charonia.server.execution.runner import ModelRunner
from charonia.server.metrics.model_metrics import FailureReason
from charonia.server.scheduling.api import Command, Event, Scheduler, SlotIdle, Submit, Tick
from charonia.server.scheduling.dynamic import DynamicBatcher
from charonia.server.scheduling.schedulers import make_scheduler
from charonia.testing.clock import FakeClock

US = 1_000


class FailingInstance(ScriptedInstance):
    error: Exception | None = None

    def __repr__(self) -> str:
        return f"{len(self.batches)} batches"

    def start(self, requests: Sequence[InferRequest], sink: BatchSink) -> None:
        if self.error is not None:
            raise self.error
        super().start(requests, sink)


class Fragile:
    """A scheduler that raises on one kind of event from the moment on in which it is told to."""

    def __init__(self, inner: Scheduler) -> None:
        self.inner = inner
        self.fails_on: type[Event] | None = None
        self.wakes_ns: int | None = None

    def __repr__(self) -> str:
        return "<Fragile>"

    @property
    def queued(self) -> int:
        return self.inner.queued

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        if self.fails_on is not None and isinstance(event, self.fails_on):
            raise RuntimeError("a fault of the scheduler")
        return self.inner.handle(event, now_ns)

    def wake_at(self) -> int | None:
        return self.wakes_ns

    def check_invariants(self) -> None:
        self.inner.check_invariants()


def config(*, decoupled: bool = False, batches: bool = False) -> ModelConfig:
    return ModelConfig(
        name="m",
        max_batch_size=4 if batches else 0,
        input=(ModelInput("IN", DataType.FP32, dims=(2,)),),
        output=(ModelOutput("OUT", DataType.FP32, (2,)),),
        dynamic_batching=DynamicBatching() if batches else None,
        model_transaction_policy=TransactionPolicy(decoupled) if decoupled else None,
    )


def request(*, batch: bool = False) -> InferRequest:
    array = np.zeros((1, 2) if batch else (2,), "<f4")
    return InferRequest("m", {"IN": Tensor("IN", DataType.FP32, array)})


def out() -> Outputs:
    return Outputs([Tensor("OUT", DataType.FP32, np.zeros(2, "<f4"))])


class Bench:
    """A runner over one instance, and the outcomes of its requests by number."""

    def __init__(self, cfg: ModelConfig) -> None:
        self.instance = FailingInstance()
        self.scheduler = Fragile(make_scheduler(cfg))
        self.runner = ModelRunner(
            cfg,
            "1",
            scheduler=self.scheduler,
            executors=[AsyncExecutor(self.instance, Placement("m_0", InstanceKind.KIND_CPU))],
            labels={},
            loop=asyncio.get_running_loop(),
        )
        self.outcomes: list[list[Outcome]] = []

    def submit(self, *, batch: bool = False) -> None:
        taken: list[Outcome] = []
        self.outcomes.append(taken)
        self.runner.submit(request(batch=batch), lambda outcome, final: taken.append(outcome))

    def codes(self) -> list[Code | None]:
        assert all(len(taken) == 1 for taken in self.outcomes)
        return [taken[0].code if isinstance(taken[0], ServingError) else None for taken in self.outcomes]

    async def end(self) -> None:
        async with asyncio.timeout(200):
            await self.runner.drain()
        await self.runner.aclose()


class Zeros:
    def execute(self, requests: Sequence[InferRequest]) -> Execution:
        return Execution([out() for _ in requests], 0, 0)

    def close(self) -> None:
        """Nothing to close."""


@pytest.mark.usefixtures("scheduler_fails")
@pytest.mark.pure_form
async def test_a_scheduler_that_raises_fails_a_request_that_would_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, loop = config(batches=True), asyncio.get_running_loop()
    executor = BlockingExecutor(Zeros(), Placement("m_0", InstanceKind.KIND_CPU), loop)
    executor.rule = FixedPlace(in_place=True)
    runner = ModelRunner(cfg, "1", scheduler=make_scheduler(cfg), executors=[executor], labels={}, loop=loop)
    outcomes: list[Outcome] = []

    def submit() -> None:
        runner.submit(request(batch=True), lambda outcome, final: outcomes.append(outcome))

    submit()
    await asyncio.sleep(0)
    assert isinstance(outcomes.pop(), InferResponse)
    monkeypatch.setattr(DynamicBatcher, "handle", lambda *_: 1 // 0)
    submit()
    submit()

    assert [isinstance(one, ServingError) and one.code for one in outcomes] == [Code.INTERNAL] * 2
    monkeypatch.undo()
    await runner.drain()
    await runner.aclose()


@pytest.mark.usefixtures("scheduler_fails")
async def test_a_scheduler_that_raises_fails_what_is_in_flight_and_what_comes(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(config())
    bench.submit()
    bench.submit()
    bench.scheduler.fails_on = Submit
    bench.submit()
    assert bench.codes() == [Code.INTERNAL] * 3

    bench.submit()
    assert bench.codes() == [Code.INTERNAL] * 4
    [outcome] = bench.outcomes[3]
    assert "the scheduler of model 'm' failed" in str(outcome)

    _, sink = bench.instance.batches[0]
    sink.respond(0, out(), True)
    sink.finish(0, 0)
    assert bench.codes() == [Code.INTERNAL] * 4
    await bench.end()
    [record] = [each for each in caplog.records if each.name == "charonia.server.execution.runner"]
    assert "<Fragile>" in record.getMessage()
    assert record.exc_info is not None


@pytest.mark.usefixtures("scheduler_fails")
async def test_a_scheduler_that_raises_when_its_time_has_come_hangs_no_request() -> None:
    bench = Bench(config())
    bench.submit()
    bench.scheduler.fails_on, bench.scheduler.wakes_ns = Tick, 1
    bench.submit()
    async with asyncio.timeout(200):
        while bench.runner.in_flight:
            await asyncio.sleep(0)
    assert bench.codes() == [Code.INTERNAL] * 2
    await bench.end()


@pytest.mark.usefixtures("scheduler_fails")
async def test_a_scheduler_that_raises_when_a_slot_is_offered_later_hangs_no_request() -> None:
    bench = Bench(config(batches=True))
    bench.submit(batch=True)
    bench.submit(batch=True)
    bench.scheduler.fails_on = SlotIdle
    _, sink = bench.instance.batches[0]
    sink.respond(0, out(), True)
    sink.finish(0, 0)
    await asyncio.sleep(0)
    assert bench.codes() == [None, Code.INTERNAL]
    await bench.end()


async def test_an_instance_that_cannot_start_a_batch_fails_that_batch_only() -> None:
    bench = Bench(config())
    bench.instance.error = ValueError("out of tune")
    bench.submit()
    assert bench.codes() == [Code.INTERNAL]
    assert "the model failed: ValueError: out of tune" in str(bench.outcomes[0][0])

    bench.instance.error = None
    bench.submit()
    _, sink = bench.instance.batches[0]
    sink.respond(0, out(), True)
    sink.finish(0, 0)
    assert bench.codes() == [Code.INTERNAL, None]
    await bench.end()


async def test_a_runner_says_its_state_in_one_line() -> None:
    bench = Bench(config())
    bench.submit()
    bench.submit()
    assert repr(bench.runner) == (
        "<ModelRunner m 1 [in flight 2 | <Slots [running 1 | idle 0 | capacity 1]> | <Fragile>]>"
    )
    assert repr(bench.runner._executors[0]) == "<AsyncExecutor m_0 [1 batches]>"
    bench.runner.abandon(ServingError(Code.UNAVAILABLE, "enough"))
    bench.instance.batches[0][1].finish(0, 0)
    await bench.end()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    made = FakeClock(1_000 * US)
    for module in ("in_flight", "runner"):
        monkeypatch.setattr(f"charonia.server.execution.{module}.now_ns", made.now_ns)
    return made


async def test_the_queue_time_of_a_request_is_the_time_until_its_batch_begins(clock: FakeClock) -> None:
    bench = Bench(config())
    bench.submit()
    clock.advance(30 * US)
    bench.submit()
    for compute_us in (100, 200):
        start_ns = clock.now_ns()
        _, sink = bench.instance.batches.pop(0)
        clock.advance(compute_us * US)
        sink.respond(0, out(), True)
        sink.finish(start_ns + 10 * US, start_ns + 90 * US)
        await asyncio.sleep(0)

    records = [taken[0].execution for taken in bench.outcomes if isinstance(taken[0], InferResponse)]
    assert [(each.queue_ns, each.compute_ns) for each in records if each is not None] == [
        (0, 130 * US),
        (100 * US, 200 * US),
    ]
    statistics = bench.runner.metrics.statistics
    assert (statistics.queue.count, statistics.queue.ns) == (2, 100 * US)
    assert statistics.compute_infer.ns == 2 * 80 * US
    assert statistics.success.ns == (130 + 300) * US
    await bench.end()


async def test_the_queue_time_of_a_request_that_is_answered_over_time_is_counted_too(clock: FakeClock) -> None:
    bench = Bench(config(decoupled=True))
    bench.submit()
    bench.submit()
    start_ns = clock.now_ns()
    _, first = bench.instance.batches.pop(0)
    clock.advance(50 * US)
    first.respond(0, out(), False)
    first.finish(start_ns + 10 * US, start_ns + 40 * US, leaves_open=True)
    await asyncio.sleep(0)
    clock.advance(400 * US)
    first.respond(0, None, True)

    statistics = bench.runner.metrics.statistics
    assert (statistics.queue.count, statistics.queue.ns) == (1, 0)
    assert (statistics.success.count, statistics.success.ns) == (1, 450 * US)
    assert statistics.compute_input.ns == 10 * US
    assert statistics.compute_infer.ns == 440 * US

    _, second = bench.instance.batches.pop(0)
    second.finish(start_ns, start_ns, leaves_open=True)
    clock.advance(7 * US)
    second.respond(0, None, True)
    assert (statistics.queue.count, statistics.queue.ns) == (2, 50 * US)
    counts = bench.runner.metrics.queue_ns
    assert (sum(counts.counts), counts.total) == (2, 50 * US)
    await bench.end()


async def test_the_compute_time_of_responses_is_counted_by_what_became_of_them(clock: FakeClock) -> None:
    bench = Bench(config(decoupled=True))
    bench.submit()
    _, sink = bench.instance.batches.pop(0)
    clock.advance(20 * US)
    sink.respond(0, out(), False)
    clock.advance(30 * US)
    sink.respond(0, ServingError(Code.INTERNAL, "no"), False)
    clock.advance(5 * US)
    sink.respond(0, None, True)
    sink.finish(0, 0)

    first, second, third = (bench.runner.metrics.statistics.responses[index] for index in "012")
    assert (first.success.count, first.success.ns) == (1, 20 * US)
    assert (first.compute_infer.count, first.compute_infer.ns) == (1, 20 * US)
    assert (second.fail.count, second.fail.ns, second.success.count) == (1, 30 * US, 0)
    assert (second.compute_infer.count, second.compute_infer.ns) == (1, 30 * US)
    assert (third.empty_response.count, third.empty_response.ns) == (1, 5 * US)
    assert (third.compute_infer.count, third.compute_output.count) == (0, 0)
    to_first = bench.runner.metrics.first_response_ns
    assert (to_first.count, to_first.total) == (1, 20 * US)
    assert bench.runner.metrics.failures[FailureReason.BACKEND] == 1
    await bench.end()
