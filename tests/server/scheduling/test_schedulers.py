"""The scheduler that a configuration asks for."""

import pytest

from charonia.config.kinds import TimeoutAction
from charonia.config.model import DynamicBatching, ModelConfig, QueuePolicy
from charonia.server.rate_limiter.resources import Arbiter, LimitedScheduler
from charonia.server.scheduling.api import (
    BatchPolicy,
    Command,
    Drop,
    DropReason,
    Run,
    Scheduler,
    SlotIdle,
    Submit,
    Tick,
)
from charonia.server.scheduling.configuration import idle_settings
from charonia.server.scheduling.dynamic import DynamicBatcher
from charonia.server.scheduling.schedulers import make_scheduler
from charonia.server.sequences.api import SequencePolicy
from charonia.server.sequences.scheduler import Sequencer

MS = 1_000_000
BATCH_SIZES = [0, 1, 4]


def scheduler(batch_size_max: int, dynamic: DynamicBatching | None) -> Scheduler:
    """One slot, which runs request 100."""
    made = make_scheduler(ModelConfig(name="m", max_batch_size=batch_size_max, dynamic_batching=dynamic))
    made.handle(SlotIdle(0), 0)
    (run,) = made.handle(Submit(100, max(1, batch_size_max)), 0)
    assert isinstance(run, Run)
    return made


def drained(made: Scheduler) -> list[int]:
    """The ids in the order in which they run."""
    order: list[int] = []
    while made.queued:
        for command in made.handle(SlotIdle(0), 10):
            assert isinstance(command, Run)
            order += command.ids
    return order


@pytest.mark.parametrize("batch_size_max", BATCH_SIZES)
def test_a_queue_limit_holds_whatever_the_batch_size(batch_size_max: int) -> None:
    made = scheduler(batch_size_max, DynamicBatching(default_queue_policy=QueuePolicy(max_queue_size=2)))

    commands: list[Command] = [command for n in (1, 2, 3) for command in made.handle(Submit(n), 1)]

    assert commands == [Drop(3, DropReason.QUEUE_FULL)]


@pytest.mark.parametrize("batch_size_max", BATCH_SIZES)
def test_a_queue_timeout_holds_whatever_the_batch_size(batch_size_max: int) -> None:
    policy = QueuePolicy(default_timeout_microseconds=5_000, allow_timeout_override=True)
    made = scheduler(batch_size_max, DynamicBatching(default_queue_policy=policy))
    made.handle(Submit(1), 0)
    made.handle(Submit(2, timeout_us=2_000), 0)

    assert made.handle(Tick(), 2 * MS) == [Drop(2, DropReason.TIMEOUT)]
    assert made.handle(Tick(), 5 * MS) == [Drop(1, DropReason.TIMEOUT)]


@pytest.mark.parametrize("batch_size_max", BATCH_SIZES)
def test_an_expired_request_moves_back_whatever_the_batch_size(batch_size_max: int) -> None:
    policy = QueuePolicy(timeout_action=TimeoutAction.DELAY, default_timeout_microseconds=1)
    made = scheduler(batch_size_max, DynamicBatching(default_queue_policy=policy))
    made.handle(Submit(1, batch_size=max(1, batch_size_max)), 0)
    made.handle(Submit(2, batch_size=max(1, batch_size_max)), 9_500)

    assert drained(made) == [2, 1]


@pytest.mark.parametrize("batch_size_max", BATCH_SIZES)
def test_priority_levels_and_their_policies_hold_whatever_the_batch_size(batch_size_max: int) -> None:
    dynamic = DynamicBatching(
        priority_levels=3, default_priority_level=2, priority_queue_policy={3: QueuePolicy(max_queue_size=1)}
    )
    made = scheduler(batch_size_max, dynamic)
    for request_id, priority in ((1, 3), (2, 0), (3, 1)):
        assert made.handle(Submit(request_id, max(1, batch_size_max), priority=priority), 1) == []

    assert made.handle(Submit(4, priority=3), 1) == [Drop(4, DropReason.QUEUE_FULL)]
    assert drained(made) == [3, 2, 1]


def test_without_a_batch_dimension_no_request_waits_for_others() -> None:
    dynamic = DynamicBatching(max_queue_delay_microseconds=5_000)
    made = make_scheduler(ModelConfig(name="m", max_batch_size=0, dynamic_batching=dynamic))
    made.handle(SlotIdle(0), 0)

    assert [command.ids for command in made.handle(Submit(1), 0) if isinstance(command, Run)] == [(1,)]


def test_without_dynamic_batching_requests_run_alone() -> None:
    made = scheduler(8, None)
    for request_id in (1, 2):
        made.handle(Submit(request_id), 1)

    assert [command.ids for command in made.handle(SlotIdle(0), 2) if isinstance(command, Run)] == [(1,)]


@pytest.mark.parametrize(
    ("batch_size_max", "dynamic", "expected"),
    [
        (0, DynamicBatching(max_queue_delay_microseconds=7), ["max_queue_delay_microseconds"]),
        (1, DynamicBatching(preferred_batch_size=(1,)), ["preferred_batch_size"]),
        (8, DynamicBatching(max_queue_delay_microseconds=7, preferred_batch_size=(4,)), []),
        (
            0,
            DynamicBatching(default_priority_level=1, priority_queue_policy={1: QueuePolicy(max_queue_size=1)}),
            ["default_priority_level", "priority_queue_policy"],
        ),
        (
            0,
            DynamicBatching(default_queue_policy=QueuePolicy(timeout_action=TimeoutAction.DELAY)),
            ["default_queue_policy.timeout_action"],
        ),
        (
            0,
            DynamicBatching(
                priority_levels=1,
                default_priority_level=1,
                priority_queue_policy={1: QueuePolicy(timeout_action=TimeoutAction.DELAY)},
            ),
            ["priority_queue_policy[1].timeout_action"],
        ),
        (
            0,
            DynamicBatching(
                default_queue_policy=QueuePolicy(timeout_action=TimeoutAction.DELAY, allow_timeout_override=True)
            ),
            [],
        ),
        (0, None, []),
    ],
)
def test_a_setting_without_effect_is_named(
    batch_size_max: int, dynamic: DynamicBatching | None, expected: list[str]
) -> None:
    config = ModelConfig(name="m", max_batch_size=batch_size_max, dynamic_batching=dynamic)

    assert [each.split()[0].removeprefix("dynamic_batching.") for each in idle_settings(config)] == expected


def test_a_scheduler_says_its_state_in_one_line() -> None:
    batcher = DynamicBatcher(BatchPolicy(size_max=4, delay_ns=5_000_000))
    assert repr(batcher) == "<DynamicBatcher [queued 0 | idle 0 of 0 | no timer]>"
    for event, at_us in ((SlotIdle(0), 0), (SlotIdle(1), 0), (Submit(1), 0), (Submit(2, 4), 700), (Submit(3), 800)):
        batcher.handle(event, at_us * 1_000)

    assert repr(batcher) == "<DynamicBatcher [queued 1 | idle 0 of 2 | no timer]>"
    batcher.handle(SlotIdle(1), 1_000_000)
    assert repr(batcher) == "<DynamicBatcher [queued 1 | idle 1 of 2 | wake at +4.8 ms]>"
    policy = SequencePolicy(idle_ns=20_000, rows=2, size_max=2)
    assert repr(Sequencer(policy, 3)) == "<Sequencer [queued 0 | idle 0 of 3 | sequences 0 (0 wait) | no timer]>"
    limited = LimitedScheduler(DynamicBatcher(BatchPolicy()), {}, Arbiter(()))
    assert repr(limited).startswith("<LimitedScheduler [idle 0 | offered 0 | wait for resources 0 | <DynamicBatcher")
