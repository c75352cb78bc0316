"""When an executor runs batches on the event loop, and when it is handed several at once."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.recorded import RecordedScheduler
from tests.support.scripted import ScriptedInstance

from charonia.config.kinds import InstanceKind
from charonia.config.model import DynamicBatching, ModelConfig, ModelInput, ModelOutput
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, internal
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse, Outcome
from charonia.core.tensor import Tensor
from charonia.server.backends.api import Execution, Outputs, Placement
from charonia.server.execution.executor import (
    AsyncExecutor,
    BlockingExecutor,
    ExecutableBatch,
    usage,
    used_since,
)
from charonia.server.execution.runner import ModelRunner
from charonia.server.scheduling.in_place import WAITS_FORGOTTEN, WAITS_MAX, InPlaceRule
from charonia.server.scheduling.schedulers import make_scheduler
from charonia.server.scheduling.slots import CAPACITY_MAX, CAPACITY_MAX_BATCHED, SUPPLY_NS_MAX

SHORT = SUPPLY_NS_MAX // (4 * CAPACITY_MAX)
LONG = 100 * SUPPLY_NS_MAX


class Model:
    """A runner of scripted instances, and what its callers got."""

    def __init__(self, instances: int = 1, max_batch_size: int = 0) -> None:
        cfg = ModelConfig(
            name="m",
            max_batch_size=max_batch_size,
            input=(ModelInput("IN", DataType.FP32, dims=(1,)),),
            output=(ModelOutput("OUT", DataType.FP32, (1,)),),
            dynamic_batching=DynamicBatching() if max_batch_size else None,
        )
        self.instances = [ScriptedInstance() for _ in range(instances)]
        self.runner = ModelRunner(
            cfg,
            "1",
            scheduler=RecordedScheduler(make_scheduler(cfg)),
            executors=[
                AsyncExecutor(i, Placement(f"m_{n}", InstanceKind.KIND_CPU)) for n, i in enumerate(self.instances)
            ],
            labels={},
            loop=asyncio.get_running_loop(),
        )
        self.shape = (1, 1) if max_batch_size else (1,)
        self.sent = 0
        self.outcomes: list[Outcome] = []

    def submit(self, count: int = 1) -> None:
        for _ in range(count):
            self.sent += 1
            array = np.zeros(self.shape, "<f4")
            request = InferRequest("m", {"IN": Tensor("IN", DataType.FP32, array)}, id=str(self.sent))
            self.runner.submit(request, lambda outcome, final: self.outcomes.append(outcome))

    async def finish(self, duration_ns: int, instance: int = 0, error: ServingError | None = None) -> None:
        """End the oldest batch of an instance and let the loop offer what became free."""
        self.instances[instance].finish(duration_ns=duration_ns, error=error)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def warm(self, duration_ns: int, count: int = 60) -> None:
        """Run requests one after the other on every instance."""
        for _ in range(count):
            self.submit(len(self.instances))
            for number, instance in enumerate(self.instances):
                while instance.batches:
                    await self.finish(duration_ns, number)

    def handed(self, instance: int = 0) -> int:
        return len(self.instances[instance].batches)

    def is_all_answered(self) -> bool:
        return len(self.outcomes) == self.sent and all(isinstance(o, InferResponse) for o in self.outcomes)


def run(scenario: Callable[[], Coroutine[object, object, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 30))


async def test_an_instance_that_is_not_known_yet_or_slow_is_handed_one_batch_at_a_time() -> None:
    model = Model()
    model.submit(6)
    assert model.handed() == 1
    while model.handed():
        await model.finish(LONG)
        assert model.handed() <= 1
    assert model.is_all_answered()


async def test_an_instance_with_short_executions_is_handed_several_batches_at_once() -> None:
    model = Model()
    await model.warm(SHORT)
    model.submit(CAPACITY_MAX + 6)
    assert model.handed() == CAPACITY_MAX
    assert model.runner.pending == 6
    while model.handed():
        await model.finish(SHORT)
        assert model.handed() <= CAPACITY_MAX
    assert model.is_all_answered()


async def test_when_executions_get_long_again_only_one_batch_at_a_time_is_handed_over() -> None:
    model = Model()
    await model.warm(SHORT)
    model.submit(CAPACITY_MAX + 8)
    await model.finish(LONG)
    handed = []
    while model.handed():
        handed.append(model.handed())
        await model.finish(LONG)
    # Those that were handed over already run out, then it is one by one.
    assert handed == [*range(CAPACITY_MAX - 1, 1, -1), *[1] * 9]
    assert model.is_all_answered()


async def test_a_line_that_was_closed_while_idle_is_opened_again() -> None:
    model = Model()
    for _ in range(3):
        await model.warm(SHORT, 80)
        model.submit(CAPACITY_MAX + 1)
        assert model.handed() == CAPACITY_MAX
        while model.handed():
            await model.finish(SHORT)
        model.submit()
        await model.finish(5 * SUPPLY_NS_MAX * 8)
        model.submit(2)
        assert model.handed() == 1
        while model.handed():
            await model.finish(SHORT)
    assert model.is_all_answered()


async def test_instances_are_kept_supplied_each_by_its_own_measure() -> None:
    model = Model(instances=2)
    for _ in range(80):
        model.submit(2)
        for number, duration in enumerate((SHORT, LONG)):
            while model.handed(number):
                await model.finish(duration, number)
    model.submit(20)
    assert [model.handed(0), model.handed(1)] == [CAPACITY_MAX // 2, 1]
    while model.handed(0) or model.handed(1):
        for number, duration in enumerate((SHORT, LONG)):
            if model.handed(number):
                await model.finish(duration, number)
    assert model.is_all_answered()


async def test_a_batch_does_not_stand_in_line_behind_another_while_an_instance_is_idle() -> None:
    model = Model(instances=4)
    await model.warm(SHORT, 80)
    handed = []
    for _ in range(8):
        model.submit()
        handed.append([model.handed(number) for number in range(4)])
    assert sorted(handed[3]) == [1, 1, 1, 1]
    assert sorted(handed[7]) == [2, 2, 2, 2]
    for number in range(4):
        while model.handed(number):
            await model.finish(SHORT, number)
    assert model.is_all_answered()


async def test_a_model_that_batches_has_one_batch_in_line_so_that_the_next_one_grows() -> None:
    model = Model(max_batch_size=64)
    await model.warm(SHORT, 80)
    model.submit(10)
    assert model.handed() == CAPACITY_MAX_BATCHED
    assert model.runner.pending == 10 - CAPACITY_MAX_BATCHED
    while model.handed():
        await model.finish(SHORT)
    assert model.is_all_answered()


async def test_batches_are_formed_from_what_waits_when_the_line_is_full() -> None:
    model = Model(max_batch_size=4)
    await model.warm(SHORT, 80)
    model.submit(CAPACITY_MAX_BATCHED + 4)
    sizes = []
    while model.handed():
        sizes.append(len(model.instances[0].batches[0][0]))
        await model.finish(SHORT)
    assert sum(sizes) == CAPACITY_MAX_BATCHED + 4
    assert sizes[-1] == 4
    assert model.is_all_answered()


@pytest.mark.parametrize("duration_ns", [SHORT, LONG])
async def test_draining_ends_when_every_batch_that_was_handed_over_has_ended(duration_ns: int) -> None:
    model = Model()
    await model.warm(SHORT)
    model.submit(7)
    draining = asyncio.ensure_future(model.runner.drain())
    await asyncio.sleep(0)
    while model.handed():
        assert not draining.done()
        await model.finish(duration_ns)
    await asyncio.wait_for(draining, 60)
    await model.runner.aclose()
    assert model.is_all_answered()


async def test_draining_an_idle_model_whose_line_is_open_ends_at_once() -> None:
    model = Model()
    await model.warm(SHORT)
    await asyncio.wait_for(model.runner.drain(), 60)


async def test_a_failed_batch_of_several_in_line_leaves_the_others_alone() -> None:
    model = Model()
    await model.warm(SHORT)
    model.submit(CAPACITY_MAX)
    before = len(model.outcomes)
    await model.finish(0, error=internal("the worker died"))
    while model.handed():
        await model.finish(SHORT)
    failed, *others = model.outcomes[before:]
    assert isinstance(failed, ServingError)
    assert failed.code is Code.INTERNAL
    assert len(others) == CAPACITY_MAX - 1
    assert all(isinstance(o, InferResponse) for o in others)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([SHORT, SHORT, SHORT, LONG])), max_size=120))
def test_every_request_is_answered_and_no_more_than_the_capacity_is_ever_handed_over(
    steps: list[tuple[int, int]],
) -> None:
    async def scenario() -> None:
        model = Model()
        await model.warm(SHORT, 30)
        for count, duration in steps:
            model.submit(count)
            assert model.handed() <= CAPACITY_MAX
            if model.handed():
                await model.finish(duration)
        while model.handed():
            await model.finish(SHORT)
        await asyncio.wait_for(model.runner.drain(), 60)
        assert model.is_all_answered()

    run(scenario)


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count how often a thread waited")


def test_the_cpu_time_of_a_thread_is_what_it_has_computed() -> None:
    before = usage()
    while used_since(before)[0] <= 2_000_000:  # ends only if computing counts
        sum(range(10_000))


@on_linux
def test_what_a_thread_computed_before_is_not_counted_when_its_core_is_taken_away_afterwards() -> None:
    counted_ns = 0
    for _ in range(20):
        until_ns = time.monotonic_ns() + 3_000_000
        while time.monotonic_ns() < until_ns:  # the system's account of this is behind by up to a tick
            pass
        before = usage()
        time.sleep(1e-6)  # gives the core away, which brings the account up to date
        counted_ns += used_since(before)[0]

    assert counted_ns < 20 * 300_000


@on_linux
def test_a_thread_that_computes_has_not_waited_and_one_that_sleeps_has() -> None:
    before = usage()
    sum(range(100_000))
    assert not used_since(before)[1]

    slept = False
    while not slept:  # it may be that its core was taken away as well
        before = usage()
        time.sleep(0.002)
        slept = used_since(before)[1]


class SometimesWaiting:
    """A blocking instance that waits for something in one execution of twenty."""

    def __init__(self) -> None:
        self.executions = 0
        self.hold_ups = 0

    def execute(self, requests: Sequence[InferRequest]) -> Execution:
        self.executions += 1
        if self.executions % 20 == 0:
            self.hold_ups += threading.current_thread() is threading.main_thread()
            time.sleep(0.003)
        return Execution([], 0, 0)

    def close(self) -> None:
        """There is nothing to give back."""


class Busy:
    """A blocking instance that computes for half a millisecond for each request."""

    def execute(self, requests: Sequence[InferRequest]) -> Execution:
        until_ns = time.thread_time_ns() + 500_000 * len(requests)
        while time.thread_time_ns() < until_ns:
            pass
        return Execution([Outputs([])] * len(requests), 0, 0)

    def close(self) -> None:
        """There is nothing to give back."""


async def test_by_what_a_request_takes_a_batch_is_as_long_as_its_share() -> None:
    told: list[int] = []
    executor = BlockingExecutor(Busy(), Placement("m_0", InstanceKind.KIND_CPU), asyncio.get_running_loop())
    requests = [InferRequest("m", {}) for _ in range(8)]

    class Told(InPlaceRule):
        def ran_in_place(self, duration_ns: int, cpu_ns: int, *, has_waited: bool = False) -> None:
            told.append(cpu_ns)

    executor.rule = Told()
    executor.run_in_place(requests)
    executor.rule.begin()
    executor.run_in_place(requests)
    await executor.aclose()

    whole, share = told
    assert whole >= 8 * 500_000
    assert 500_000 <= share < 2 * 500_000


class EmptyBatch:
    """A batch without requests; tells when it was run."""

    requests: Sequence[InferRequest] = ()

    def __init__(self) -> None:
        self.ran = asyncio.Event()

    def executed(self, execution: Execution | ServingError, start_ns: int, end_ns: int) -> None:
        self.ran.set()


@on_linux
async def test_the_loop_is_held_up_by_a_model_that_waits_a_few_times_only() -> None:
    instance = SometimesWaiting()
    executor = BlockingExecutor(instance, Placement("m_0", InstanceKind.KIND_CPU), asyncio.get_running_loop())
    while instance.executions < WAITS_FORGOTTEN:
        batch = EmptyBatch()
        executor.run(cast("ExecutableBatch", batch))
        await batch.ran.wait()
    await executor.aclose()

    # Twice, and once more for each in which the system took the core away, too, which is rare in 3 ms.
    assert instance.hold_ups <= 2 * WAITS_MAX
