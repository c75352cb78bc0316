"""When a lane runs batches on the event loop, and when it is handed several at once."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.config.kinds import InstanceKind
from charonia.config.model import DynamicBatching, ModelConfig, ModelInput, ModelOutput
from charonia.core.calls import Outcome
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, internal
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse
from charonia.core.tensor import Tensor
from charonia.server.backends.api import BatchSink, Execution, Outputs, Placement
from charonia.server.execution.lanes import (
    FORGIVEN_AFTER,
    FORGIVEN_NS_MAX,
    IN_PLACE_NS_MAX,
    IN_PLACE_PROBES,
    IN_PLACE_RETRY_MAX,
    PIPELINE_DEPTH,
    PIPELINE_DEPTH_BATCHED,
    PIPELINE_NS_MAX,
    WAITS_MAX,
    AsyncLane,
    BlockingLane,
    InPlaceRule,
    LaneBatch,
    PipelineRule,
)
from charonia.server.execution.runner import ModelRunner
from charonia.server.execution.switches import has_waited, switches
from charonia.server.scheduling.schedulers import make_scheduler

SHORT = PIPELINE_NS_MAX // (4 * PIPELINE_DEPTH)
LONG = 100 * PIPELINE_NS_MAX
HELD_UP = 10 * IN_PLACE_NS_MAX + 1


def took(rule: InPlaceRule, duration_ns: int, cpu_ns: int | None = None) -> None:
    """One execution, where the rule says; it computes all the time unless said otherwise, else it waits."""
    if rule.in_place and rule.is_watched:
        rule.ran_watched(duration_ns, has_waited=cpu_ns is not None and cpu_ns < duration_ns)
    elif rule.in_place:
        rule.ran_in_place(duration_ns)
    else:
        rule.ran_in_thread(duration_ns, duration_ns if cpu_ns is None else cpu_ns)


def in_place_rule(durations_ns: Iterable[int]) -> InPlaceRule:
    rule = InPlaceRule()
    for duration in durations_ns:
        took(rule, duration)
    return rule


def executions_until_in_place(rule: InPlaceRule, duration_ns: int = IN_PLACE_NS_MAX) -> int:
    count = 0
    while not rule.in_place:
        took(rule, duration_ns)
        count += 1
    return count


def pipeline_rule(durations_ns: Iterable[int]) -> PipelineRule:
    rule = PipelineRule()
    for duration in durations_ns:
        rule.took(duration)
    return rule


def test_the_loop_runs_a_model_itself_after_enough_short_executions_in_a_row() -> None:
    assert not in_place_rule([IN_PLACE_NS_MAX] * (IN_PLACE_PROBES - 1)).in_place
    assert in_place_rule([IN_PLACE_NS_MAX] * IN_PLACE_PROBES).in_place


def test_one_longer_execution_in_the_thread_starts_the_count_anew() -> None:
    almost = [IN_PLACE_NS_MAX] * (IN_PLACE_PROBES - 1)
    assert not in_place_rule([*almost, IN_PLACE_NS_MAX + 1, *almost]).in_place
    assert in_place_rule([*almost, IN_PLACE_NS_MAX + 1, *almost, 1]).in_place


def test_an_execution_that_is_a_little_longer_stays_on_the_loop() -> None:
    rule = in_place_rule([1] * IN_PLACE_PROBES)
    took(rule, HELD_UP - 1)
    assert rule.in_place


def test_each_time_the_loop_was_held_up_it_takes_twice_as_many_short_executions_up_to_a_limit() -> None:
    rule = InPlaceRule()
    needed = []
    for _ in range(12):
        needed.append(executions_until_in_place(rule))
        took(rule, HELD_UP)
    assert needed[:4] == [8, 16, 32, 64]
    assert needed[-2:] == [IN_PLACE_RETRY_MAX, IN_PLACE_RETRY_MAX]


def test_the_system_that_takes_the_core_away_now_and_then_does_not_take_the_model_off_the_loop() -> None:
    rule = in_place_rule([1] * IN_PLACE_PROBES)
    for _ in range(5):
        for _ in range(FORGIVEN_AFTER):
            took(rule, 1)
        took(rule, FORGIVEN_NS_MAX)
        assert rule.in_place
    took(rule, HELD_UP)
    assert not rule.in_place
    assert executions_until_in_place(rule) == 2 * IN_PLACE_PROBES


def test_an_execution_that_is_very_long_takes_the_model_off_the_loop_however_many_were_short() -> None:
    rule = in_place_rule([1] * (IN_PLACE_PROBES + FORGIVEN_AFTER))
    took(rule, FORGIVEN_NS_MAX + 1)
    assert not rule.in_place


def test_waiting_for_the_interpreter_does_not_keep_a_short_model_in_the_thread() -> None:
    rule = InPlaceRule()
    for _ in range(IN_PLACE_PROBES - 1):
        took(rule, 5 * IN_PLACE_NS_MAX, IN_PLACE_NS_MAX)
    took(rule, IN_PLACE_NS_MAX, IN_PLACE_NS_MAX)
    assert rule.in_place


def test_a_model_that_waits_for_something_stays_in_the_thread() -> None:
    rule = InPlaceRule()
    for _ in range(2 * IN_PLACE_RETRY_MAX):
        took(rule, IN_PLACE_NS_MAX + 1, 1)
    assert not rule.in_place


@pytest.mark.parametrize("short_ones", [1, IN_PLACE_PROBES, 40])
def test_a_model_that_waits_more_than_it_computes_holds_up_the_loop_twice_and_never_again(short_ones: int) -> None:
    rule, hold_ups = InPlaceRule(), 0
    for _ in range(3 * IN_PLACE_RETRY_MAX // short_ones):
        for _ in range(short_ones):
            took(rule, 10_000, 10_000)
        hold_ups += rule.in_place
        took(rule, HELD_UP, 10_000)

    assert hold_ups == WAITS_MAX


def test_a_model_that_waited_for_a_while_only_comes_back_to_the_loop() -> None:
    rule = InPlaceRule()
    for _ in range(WAITS_MAX):
        executions_until_in_place(rule)
        took(rule, HELD_UP, 10_000)

    assert executions_until_in_place(rule) == IN_PLACE_RETRY_MAX
    took(rule, HELD_UP, 10_000)
    for _ in range(IN_PLACE_RETRY_MAX):
        took(rule, HELD_UP, 10_000)
    assert executions_until_in_place(rule) <= 2 * IN_PLACE_RETRY_MAX


def test_waits_are_forgotten_and_no_longer_looked_for_once_the_model_has_run_on_the_loop_for_long() -> None:
    rule = in_place_rule([1] * IN_PLACE_PROBES)
    for _ in range(5):
        took(rule, HELD_UP, 10_000)
        executions_until_in_place(rule)
        assert rule.is_watched
        for _ in range(FORGIVEN_AFTER):
            took(rule, 1)
        assert rule.in_place
        assert not rule.is_watched
    took(rule, FORGIVEN_NS_MAX)
    assert rule.in_place
    assert rule.is_watched


def test_a_core_that_was_taken_away_is_not_taken_for_waiting() -> None:
    rule = InPlaceRule()
    for _ in range(WAITS_MAX + 1):
        needed = executions_until_in_place(rule)
        took(rule, HELD_UP)
    assert needed == 2**WAITS_MAX * IN_PLACE_PROBES


@given(st.lists(st.tuples(st.integers(0, 2 * HELD_UP), st.integers(0, 2 * IN_PLACE_NS_MAX)), max_size=300))
def test_the_loop_is_never_entered_by_a_long_execution_nor_soon_kept_by_one(times_ns: list[tuple[int, int]]) -> None:
    rule = InPlaceRule()
    for duration, cpu in times_ns:
        was_in_place = rule.in_place
        took(rule, duration, min(cpu, duration))
        if rule.in_place and not was_in_place:
            assert min(cpu, duration) <= IN_PLACE_NS_MAX
        if was_in_place and duration >= HELD_UP:
            assert not rule.in_place


def test_an_instance_is_not_handed_batches_ahead_before_its_executions_are_known_to_be_short() -> None:
    assert PipelineRule().depth == 1
    assert pipeline_rule([SHORT]).depth == 1
    assert pipeline_rule([SHORT] * 60).depth == PIPELINE_DEPTH
    assert pipeline_rule([LONG] * 60).depth == 1


@pytest.mark.parametrize(("share", "depth"), [(1, 1), (2, 2), (3, 2), (4, 4), (15, 8), (16, 16), (1000, 16)])
def test_what_is_handed_over_computes_no_longer_than_the_limit(share: int, depth: int) -> None:
    assert pipeline_rule([PIPELINE_NS_MAX // share - 1] * 100).depth == depth


def test_a_mean_between_two_limits_leaves_things_as_they_are() -> None:
    between = [PIPELINE_NS_MAX // PIPELINE_DEPTH * 3 // 2] * 50
    assert pipeline_rule(between).depth == PIPELINE_DEPTH // 2
    assert pipeline_rule([SHORT] * 60 + between).depth == PIPELINE_DEPTH


def test_one_execution_that_is_a_little_longer_changes_nothing_and_a_very_long_one_does() -> None:
    assert pipeline_rule([SHORT] * 60 + [PIPELINE_NS_MAX // 2]).depth == PIPELINE_DEPTH
    assert pipeline_rule([SHORT] * 60 + [LONG]).depth == 1


def test_a_limit_holds_whatever_is_measured_and_is_never_raised() -> None:
    rule = pipeline_rule([SHORT] * 60)
    depths = []
    for limit in (3, 8, 1, 16):
        rule.limit(limit)
        for _ in range(60):
            rule.took(SHORT)
        depths.append(rule.depth)
    assert depths == [3, 3, 1, 1]


@given(st.lists(st.integers(0, 10 * PIPELINE_NS_MAX), max_size=200), st.integers(0, SHORT))
def test_whatever_came_before_enough_short_executions_open_the_line(durations_ns: list[int], short_ns: int) -> None:
    assert pipeline_rule([*durations_ns, *[short_ns] * 100]).depth == PIPELINE_DEPTH
    assert pipeline_rule([*durations_ns, *[10 * PIPELINE_NS_MAX] * 100]).depth == 1


class ScriptedInstance:
    """An asynchronous instance whose batches take as long as the test says."""

    def __init__(self) -> None:
        self.batches: list[tuple[Sequence[InferRequest], BatchSink]] = []

    def start(self, requests: Sequence[InferRequest], sink: BatchSink) -> None:
        self.batches.append((requests, sink))

    def cancel(self, sink: BatchSink, index: int) -> None:
        pass

    async def aclose(self) -> None:
        pass

    def finish(self, duration_ns: int, error: ServingError | None = None) -> None:
        """End the oldest batch, which is said to have computed for that long."""
        requests, sink = self.batches.pop(0)
        for index, request in enumerate(requests):
            if error is None:
                sink.respond(index, Outputs([request.inputs["IN"]]), True)
        sink.finish(1000, 1000 + duration_ns, error)


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
            scheduler=make_scheduler(cfg),
            lanes=[AsyncLane(i, Placement(f"m_{n}", InstanceKind.KIND_CPU)) for n, i in enumerate(self.instances)],
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
        self.instances[instance].finish(duration_ns, error)
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


def test_an_instance_that_is_not_known_yet_or_slow_is_handed_one_batch_at_a_time() -> None:
    async def scenario() -> None:
        model = Model()
        model.submit(6)
        assert model.handed() == 1
        while model.handed():
            await model.finish(LONG)
            assert model.handed() <= 1
        assert model.is_all_answered()

    run(scenario)


def test_an_instance_with_short_executions_is_handed_several_batches_at_once() -> None:
    async def scenario() -> None:
        model = Model()
        await model.warm(SHORT)
        model.submit(PIPELINE_DEPTH + 6)
        assert model.handed() == PIPELINE_DEPTH
        assert model.runner.pending == 6
        while model.handed():
            await model.finish(SHORT)
            assert model.handed() <= PIPELINE_DEPTH
        assert model.is_all_answered()

    run(scenario)


def test_when_executions_get_long_again_only_one_batch_at_a_time_is_handed_over() -> None:
    async def scenario() -> None:
        model = Model()
        await model.warm(SHORT)
        model.submit(PIPELINE_DEPTH + 8)
        await model.finish(LONG)
        handed = []
        while model.handed():
            handed.append(model.handed())
            await model.finish(LONG)
        # Those that were handed over already run out, then it is one by one.
        assert handed == [*range(PIPELINE_DEPTH - 1, 1, -1), *[1] * 9]
        assert model.is_all_answered()

    run(scenario)


def test_a_line_that_was_closed_while_idle_is_opened_again() -> None:
    async def scenario() -> None:
        model = Model()
        for _ in range(3):
            await model.warm(SHORT, 80)
            model.submit(PIPELINE_DEPTH + 1)
            assert model.handed() == PIPELINE_DEPTH
            while model.handed():
                await model.finish(SHORT)
            model.submit()
            await model.finish(5 * PIPELINE_NS_MAX * 8)
            model.submit(2)
            assert model.handed() == 1
            while model.handed():
                await model.finish(SHORT)
        assert model.is_all_answered()

    run(scenario)


def test_instances_are_kept_supplied_each_by_its_own_measure() -> None:
    async def scenario() -> None:
        model = Model(instances=2)
        for _ in range(80):
            model.submit(2)
            for number, duration in enumerate((SHORT, LONG)):
                while model.handed(number):
                    await model.finish(duration, number)
        model.submit(20)
        assert [model.handed(0), model.handed(1)] == [PIPELINE_DEPTH // 2, 1]
        while model.handed(0) or model.handed(1):
            for number, duration in enumerate((SHORT, LONG)):
                if model.handed(number):
                    await model.finish(duration, number)
        assert model.is_all_answered()

    run(scenario)


def test_a_batch_does_not_stand_in_line_behind_another_while_an_instance_is_idle() -> None:
    async def scenario() -> None:
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

    run(scenario)


def test_a_model_that_batches_has_one_batch_in_line_so_that_the_next_one_grows() -> None:
    async def scenario() -> None:
        model = Model(max_batch_size=64)
        await model.warm(SHORT, 80)
        model.submit(10)
        assert model.handed() == PIPELINE_DEPTH_BATCHED
        assert model.runner.pending == 10 - PIPELINE_DEPTH_BATCHED
        while model.handed():
            await model.finish(SHORT)
        assert model.is_all_answered()

    run(scenario)


def test_batches_are_formed_from_what_waits_when_the_line_is_full() -> None:
    async def scenario() -> None:
        model = Model(max_batch_size=4)
        await model.warm(SHORT, 80)
        model.submit(PIPELINE_DEPTH_BATCHED + 4)
        sizes = []
        while model.handed():
            sizes.append(len(model.instances[0].batches[0][0]))
            await model.finish(SHORT)
        assert sum(sizes) == PIPELINE_DEPTH_BATCHED + 4
        assert sizes[-1] == 4
        assert model.is_all_answered()

    run(scenario)


@pytest.mark.parametrize("duration_ns", [SHORT, LONG])
def test_draining_ends_when_every_batch_that_was_handed_over_has_ended(duration_ns: int) -> None:
    async def scenario() -> None:
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

    run(scenario)


def test_draining_an_idle_model_whose_line_is_open_ends_at_once() -> None:
    async def scenario() -> None:
        model = Model()
        await model.warm(SHORT)
        await asyncio.wait_for(model.runner.drain(), 60)

    run(scenario)


def test_a_failed_batch_of_several_in_line_leaves_the_others_alone() -> None:
    async def scenario() -> None:
        model = Model()
        await model.warm(SHORT)
        model.submit(PIPELINE_DEPTH)
        before = len(model.outcomes)
        await model.finish(0, error=internal("the worker died"))
        while model.handed():
            await model.finish(SHORT)
        failed, *others = model.outcomes[before:]
        assert isinstance(failed, ServingError)
        assert failed.code is Code.INTERNAL
        assert len(others) == PIPELINE_DEPTH - 1
        assert all(isinstance(o, InferResponse) for o in others)

    run(scenario)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([SHORT, SHORT, SHORT, LONG])), max_size=120))
def test_every_request_is_answered_and_no_more_than_the_depth_is_ever_handed_over(steps: list[tuple[int, int]]) -> None:
    async def scenario() -> None:
        model = Model()
        await model.warm(SHORT, 30)
        for count, duration in steps:
            model.submit(count)
            assert model.handed() <= PIPELINE_DEPTH
            if model.handed():
                await model.finish(duration)
        while model.handed():
            await model.finish(SHORT)
        await asyncio.wait_for(model.runner.drain(), 60)
        assert model.is_all_answered()

    run(scenario)


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count how often a thread waited")


@on_linux
def test_a_thread_that_computes_has_not_waited_and_one_that_sleeps_has() -> None:
    before = switches()
    sum(range(100_000))
    assert not has_waited(before)

    slept = False
    while not slept:  # it may be that its core was taken away as well
        before = switches()
        time.sleep(0.002)
        slept = has_waited(before)


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


class EmptyBatch:
    """A batch without requests; tells when it was run."""

    requests: Sequence[InferRequest] = ()

    def __init__(self) -> None:
        self.ran = asyncio.Event()

    def executed(self, execution: Execution | ServingError, start_ns: int, end_ns: int) -> None:
        self.ran.set()


@on_linux
def test_the_loop_is_held_up_by_a_model_that_waits_a_few_times_only() -> None:
    async def scenario() -> None:
        instance = SometimesWaiting()
        lane = BlockingLane(instance, Placement("m_0", InstanceKind.KIND_CPU), asyncio.get_running_loop())
        while instance.executions < IN_PLACE_RETRY_MAX:
            batch = EmptyBatch()
            lane.run(cast("LaneBatch", batch))
            await batch.ran.wait()
        await lane.aclose()

        # Twice, and once more for each in which the system took the core away, too, which is rare in 3 ms.
        assert instance.hold_ups <= 2 * WAITS_MAX

    run(scenario)
