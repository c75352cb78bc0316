"""The default scheduler, rule by rule."""

import pytest

from charonia.server.scheduling.api import (
    BatchPolicy,
    Cancel,
    CloseReason,
    Drop,
    DropReason,
    QueueLimits,
    Run,
    SlotIdle,
    SlotRemoved,
    Stop,
    Submit,
    Tick,
)
from charonia.server.scheduling.dynamic import DynamicBatcher

MS = 1_000_000
FULL = CloseReason.FULL


def busy_scheduler(limits: QueueLimits) -> DynamicBatcher:
    """Slot 0 runs request 100, no request waits."""
    scheduler = DynamicBatcher(BatchPolicy(limits=limits))
    scheduler.handle(SlotIdle(0), 0)
    assert scheduler.handle(Submit(100), 0) == [Run(0, (100,), FULL)]
    return scheduler


def test_a_request_that_finds_an_idle_slot_starts_at_once() -> None:
    scheduler = DynamicBatcher(BatchPolicy())

    assert scheduler.handle(SlotIdle(3), 0) == []
    assert scheduler.handle(Submit(1, batch_size=8), 5) == [Run(3, (1,), FULL)]
    assert scheduler.queued == 0


def test_requests_run_alone_first_come_first_served() -> None:
    scheduler = busy_scheduler(QueueLimits())
    for request_id in (1, 2, 3):
        assert scheduler.handle(Submit(request_id, priority=4 - request_id), request_id) == []

    assert scheduler.queued == 3
    assert scheduler.handle(SlotIdle(0), 10) == [Run(0, (1,), FULL)]
    assert scheduler.handle(SlotIdle(0), 20) == [Run(0, (2,), FULL)]
    assert scheduler.handle(SlotIdle(0), 30) == [Run(0, (3,), FULL)]
    assert scheduler.handle(SlotIdle(0), 40) == []


def test_the_slot_that_became_idle_last_is_taken_first() -> None:
    scheduler = DynamicBatcher(BatchPolicy())
    for slot in (2, 0, 1):
        scheduler.handle(SlotIdle(slot), 0)

    slots = [command.slot for i in range(3) for command in scheduler.handle(Submit(i), 1) if isinstance(command, Run)]

    assert slots == [1, 0, 2]


def test_a_slot_that_has_gone_gets_no_work() -> None:
    scheduler = DynamicBatcher(BatchPolicy())
    scheduler.handle(SlotIdle(0), 0)
    scheduler.handle(SlotIdle(1), 0)

    assert scheduler.handle(SlotRemoved(1), 1) == []
    assert scheduler.handle(SlotRemoved(7), 1) == []
    assert scheduler.handle(Submit(1), 2) == [Run(0, (1,), FULL)]
    assert scheduler.handle(Submit(2), 2) == []


def test_the_queue_limit_counts_only_those_that_wait() -> None:
    scheduler = busy_scheduler(QueueLimits(size_max=2))

    assert scheduler.handle(Submit(1), 1) == []
    assert scheduler.handle(Submit(2), 1) == []
    assert scheduler.handle(Submit(3), 1) == [Drop(3, DropReason.QUEUE_FULL)]
    assert scheduler.handle(Cancel(1), 2) == []
    assert scheduler.handle(Submit(4), 2) == []
    assert scheduler.handle(SlotIdle(0), 3) == [Run(0, (2,), FULL)]
    assert scheduler.queued == 1


def test_a_request_times_out_at_its_deadline_to_the_nanosecond_while_the_slot_is_busy() -> None:
    scheduler = busy_scheduler(QueueLimits(timeout_ns=5 * MS))
    scheduler.handle(Submit(1), 1 * MS)

    assert scheduler.wake_at() == 6 * MS
    assert scheduler.handle(Tick(), 6 * MS - 1) == []
    assert scheduler.handle(Tick(), 6 * MS) == [Drop(1, DropReason.TIMEOUT)]
    assert scheduler.wake_at() is None


def test_a_slot_that_becomes_idle_at_the_deadline_is_too_late() -> None:
    scheduler = busy_scheduler(QueueLimits(timeout_ns=5))
    scheduler.handle(Submit(1), 0)
    scheduler.handle(Submit(2), 1)

    assert scheduler.handle(SlotIdle(0), 5) == [Drop(1, DropReason.TIMEOUT), Run(0, (2,), FULL)]


def test_a_request_that_started_leaves_no_deadline_behind() -> None:
    scheduler = busy_scheduler(QueueLimits(timeout_ns=5))
    scheduler.handle(Submit(1), 0)
    scheduler.handle(SlotIdle(0), 1)

    assert scheduler.wake_at() is None
    assert scheduler.handle(Tick(), 100) == []


@pytest.mark.parametrize(
    ("default_ns", "override", "asked_us", "deadline"),
    [
        (0, False, 7, None),
        (0, True, 7, 7_000),
        (0, True, 0, None),
        (9_000, False, 7, 9_000),
        (9_000, True, 7, 7_000),
        (9_000, True, 0, 9_000),
        (9_000, True, 10, 9_000),
    ],
)
def test_a_request_may_only_shorten_its_timeout_or_set_one_where_there_is_none(
    default_ns: int, override: bool, asked_us: int, deadline: int | None
) -> None:
    scheduler = busy_scheduler(QueueLimits(timeout_ns=default_ns, timeout_override=override))

    scheduler.handle(Submit(1, timeout_us=asked_us), 0)

    assert scheduler.wake_at() == deadline


def test_an_expired_request_moves_behind_those_in_time_where_the_policy_says_delay() -> None:
    scheduler = busy_scheduler(QueueLimits(timeout_ns=10, delay_expired=True))
    scheduler.handle(Submit(1), 0)
    scheduler.handle(Submit(2), 5)

    assert scheduler.handle(Tick(), 10) == []
    scheduler.handle(Submit(3), 12)

    assert scheduler.handle(SlotIdle(0), 13) == [Run(0, (2,), FULL)]
    assert scheduler.handle(SlotIdle(0), 14) == [Run(0, (3,), FULL)]
    assert scheduler.handle(SlotIdle(0), 100) == [Run(0, (1,), FULL)]
    assert scheduler.wake_at() is None


def test_after_stop_the_queue_runs_empty_and_newcomers_are_refused() -> None:
    scheduler = busy_scheduler(QueueLimits())
    scheduler.handle(Submit(1), 0)

    assert scheduler.handle(Stop(), 1) == []
    assert scheduler.handle(Submit(2), 2) == [Drop(2, DropReason.STOPPING)]
    assert scheduler.handle(SlotIdle(0), 3) == [Run(0, (1,), FULL)]
    assert scheduler.handle(SlotIdle(0), 4) == []
    assert scheduler.handle(Submit(3), 5) == [Drop(3, DropReason.STOPPING)]


def test_cancelling_an_unknown_running_or_dropped_request_does_nothing() -> None:
    scheduler = busy_scheduler(QueueLimits(size_max=1))
    scheduler.handle(Submit(1), 0)
    scheduler.handle(Submit(2), 0)

    for request_id in (100, 2, 77):
        assert scheduler.handle(Cancel(request_id), 1) == []

    assert scheduler.queued == 1
