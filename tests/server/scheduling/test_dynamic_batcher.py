"""The dynamic batcher, rule by rule."""

import pytest

from charonia.core.request import Flow
from charonia.server.scheduling.api import (
    BatchPolicy,
    Cancel,
    CloseReason,
    Command,
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
FULL, PREFERRED, DELAY = CloseReason.FULL, CloseReason.PREFERRED, CloseReason.DELAY
QUEUE_EMPTY, SHAPE = CloseReason.QUEUE_EMPTY, CloseReason.SHAPE

PLAIN = BatchPolicy(size_max=4)
PATIENT = BatchPolicy(size_max=4, delay_ns=5 * MS, adapt_delay=False)


def idle_batcher(policy: BatchPolicy) -> DynamicBatcher:
    """Slot 0 is idle, no request waits. (A batcher that was told of no slot is one whose slots are all busy.)"""
    batcher = DynamicBatcher(policy)
    assert batcher.handle(SlotIdle(0), 0) == []
    return batcher


def submit_all(batcher: DynamicBatcher, requests: list[Submit], now_ns: int) -> list[Command]:
    return [command for request in requests for command in batcher.handle(request, now_ns)]


def sizes(*batch_sizes: int) -> list[Submit]:
    """Requests 1, 2, ... of these batch sizes."""
    return [Submit(request_id, batch_size) for request_id, batch_size in enumerate(batch_sizes, 1)]


# --- without a delay


def test_a_request_that_finds_an_idle_slot_starts_at_once() -> None:
    batcher = idle_batcher(PLAIN)

    assert batcher.handle(Submit(1), 1) == [Run(0, (1,), QUEUE_EMPTY)]
    assert batcher.queued == 0
    assert batcher.wake_at() is None


@pytest.mark.parametrize(("batch_size", "reason"), [(1, QUEUE_EMPTY), (2, PREFERRED), (4, FULL), (9, FULL)])
def test_a_request_that_runs_alone_says_why(batch_size: int, reason: CloseReason) -> None:
    batcher = idle_batcher(BatchPolicy(size_max=4, preferred_sizes=(2,)))

    assert batcher.handle(Submit(1, batch_size), 1) == [Run(0, (1,), reason)]


def test_what_came_in_while_the_slot_was_busy_runs_together() -> None:
    batcher = DynamicBatcher(PLAIN)
    assert submit_all(batcher, sizes(1, 1, 1), 1) == []

    assert batcher.queued == 3
    assert batcher.handle(SlotIdle(0), 2) == [Run(0, (1, 2, 3), QUEUE_EMPTY)]
    assert batcher.queued == 0


def test_a_batch_takes_no_more_than_size_max() -> None:
    batcher = DynamicBatcher(PLAIN)
    submit_all(batcher, sizes(1, 1, 1, 1, 1), 1)

    assert batcher.handle(SlotIdle(0), 2) == [Run(0, (1, 2, 3, 4), FULL)]
    assert batcher.handle(SlotIdle(1), 2) == [Run(1, (5,), QUEUE_EMPTY)]


def test_a_request_is_not_split_and_not_overtaken_by_one_that_would_fit() -> None:
    batcher = DynamicBatcher(PLAIN)
    submit_all(batcher, sizes(2, 3, 1), 1)

    assert batcher.handle(SlotIdle(0), 2) == [Run(0, (1,), FULL)]
    assert batcher.handle(SlotIdle(0), 3) == [Run(0, (2, 3), FULL)]


def test_a_request_larger_than_a_batch_holds_up_no_other() -> None:
    batcher = DynamicBatcher(PLAIN)
    submit_all(batcher, sizes(1, 9, 1), 1)

    assert batcher.handle(SlotIdle(0), 2) == [Run(0, (1,), FULL)]
    assert batcher.handle(SlotIdle(0), 3) == [Run(0, (2,), FULL)]
    assert batcher.handle(SlotIdle(0), 4) == [Run(0, (3,), QUEUE_EMPTY)]


def test_requests_of_different_shapes_never_share_a_batch() -> None:
    batcher = DynamicBatcher(PLAIN)
    submit_all(batcher, [Submit(1, 1, "a"), Submit(2, 1, "a"), Submit(3, 1, "b"), Submit(4, 1, "a")], 1)

    assert batcher.handle(SlotIdle(0), 2) == [Run(0, (1, 2), SHAPE)]
    assert batcher.handle(SlotIdle(0), 3) == [Run(0, (3,), SHAPE)]
    assert batcher.handle(SlotIdle(0), 4) == [Run(0, (4,), QUEUE_EMPTY)]


def test_the_slot_that_became_idle_last_is_taken_first() -> None:
    batcher = DynamicBatcher(PLAIN)
    for slot in (2, 0, 1):
        batcher.handle(SlotIdle(slot), 0)

    slots = [command.slot for command in submit_all(batcher, sizes(1, 1, 1), 1) if isinstance(command, Run)]

    assert slots == [1, 0, 2]


# --- with a delay


def test_a_lone_request_waits_for_the_delay_and_not_longer() -> None:
    batcher = idle_batcher(PATIENT)

    assert batcher.handle(Submit(7), 1 * MS) == []
    assert batcher.wake_at() == 6 * MS
    assert batcher.handle(Tick(), 6 * MS - 1) == []
    assert batcher.wake_at() == 6 * MS
    assert batcher.handle(Tick(), 6 * MS) == [Run(0, (7,), DELAY)]
    assert batcher.wake_at() is None


def test_the_delay_counts_from_the_oldest_request_of_the_batch() -> None:
    batcher = idle_batcher(PATIENT)

    batcher.handle(Submit(1), 1 * MS)
    batcher.handle(Submit(2), 4 * MS)

    assert batcher.wake_at() == 6 * MS
    assert batcher.handle(Tick(), 6 * MS) == [Run(0, (1, 2), DELAY)]


def test_the_oldest_request_of_a_batch_need_not_be_its_first() -> None:
    batcher = idle_batcher(BatchPolicy(4, delay_ns=5 * MS, priority_levels=2, default_level=2, adapt_delay=False))

    batcher.handle(Submit(1, priority=2), 1 * MS)
    batcher.handle(Submit(2, priority=1), 4 * MS)

    assert batcher.wake_at() == 6 * MS
    assert batcher.handle(Tick(), 6 * MS) == [Run(0, (2, 1), DELAY)]


def test_the_delay_runs_while_all_slots_are_busy() -> None:
    batcher = DynamicBatcher(PATIENT)
    batcher.handle(Submit(1), 1 * MS)

    assert batcher.wake_at() is None  # nothing can happen before a slot is idle
    assert batcher.handle(SlotIdle(0), 4 * MS) == []
    assert batcher.wake_at() == 6 * MS
    assert batcher.handle(Submit(2), 6 * MS) == [Run(0, (1, 2), DELAY)]


def test_a_slot_that_becomes_idle_after_the_delay_gets_the_batch_at_once() -> None:
    batcher = DynamicBatcher(PATIENT)
    batcher.handle(Submit(1), 1 * MS)
    batcher.handle(Submit(2), 7 * MS)

    assert batcher.handle(SlotIdle(0), 8 * MS) == [Run(0, (1, 2), DELAY)]


def test_a_full_batch_does_not_wait() -> None:
    batcher = idle_batcher(PATIENT)

    assert submit_all(batcher, sizes(2, 1, 1), 1) == [Run(0, (1, 2, 3), FULL)]


def test_a_batch_that_the_next_request_does_not_fit_into_does_not_wait() -> None:
    batcher = idle_batcher(PATIENT)

    assert submit_all(batcher, sizes(3, 2), 1) == [Run(0, (1,), FULL)]
    assert batcher.queued == 1
    assert batcher.wake_at() is None


def test_a_batch_that_another_shape_cuts_off_does_not_wait() -> None:
    batcher = idle_batcher(PATIENT)

    assert submit_all(batcher, [Submit(1, 1, "a"), Submit(2, 1, "a"), Submit(3, 1, "b")], 1) == [Run(0, (1, 2), SHAPE)]
    assert batcher.handle(SlotIdle(0), 2) == []
    assert batcher.wake_at() == 1 + 5 * MS


def test_an_urgent_request_of_another_shape_is_sent_before_the_batch_that_waits() -> None:
    batcher = idle_batcher(BatchPolicy(4, delay_ns=5 * MS, priority_levels=2, default_level=2, adapt_delay=False))
    batcher.handle(Submit(1, 1, "a"), 0)

    assert batcher.handle(Submit(2, 1, "b", priority=1), 1) == [Run(0, (2,), SHAPE)]
    assert batcher.handle(SlotIdle(0), 2) == []
    assert batcher.wake_at() == 5 * MS


def test_when_the_idle_slot_goes_the_batch_waits_for_another_slot() -> None:
    batcher = idle_batcher(PATIENT)
    batcher.handle(Submit(1), 0)

    assert batcher.handle(SlotRemoved(0), 1) == []
    assert batcher.wake_at() is None
    assert batcher.handle(Submit(2), 2) == []
    assert batcher.handle(Tick(), 5 * MS) == []
    assert batcher.handle(SlotIdle(1), 6 * MS) == [Run(1, (1, 2), DELAY)]


def test_what_comes_after_the_idle_slot_has_gone_is_taken_in_order_all_the_same() -> None:
    batcher = idle_batcher(PATIENT)
    batcher.handle(Submit(1, 1, "a"), 0)
    batcher.handle(SlotRemoved(0), 1)
    submit_all(batcher, [Submit(2, 1, "b"), Submit(3, 1, "a")], 2)

    assert batcher.handle(SlotIdle(1), 3) == [Run(1, (1,), SHAPE)]


# --- preferred sizes


def test_a_preferred_size_is_sent_as_soon_as_it_is_reached() -> None:
    batcher = idle_batcher(BatchPolicy(8, preferred_sizes=(3, 5), delay_ns=5 * MS, adapt_delay=False))

    assert submit_all(batcher, sizes(1, 1, 1), 1) == [Run(0, (1, 2, 3), PREFERRED)]


def test_the_largest_preferred_size_that_is_reached_exactly_is_sent() -> None:
    batcher = DynamicBatcher(BatchPolicy(8, preferred_sizes=(2, 4, 6), delay_ns=5 * MS, adapt_delay=False))
    submit_all(batcher, sizes(1, 1, 1, 1, 1), 1)

    assert batcher.handle(SlotIdle(0), 2) == [Run(0, (1, 2, 3, 4), PREFERRED)]
    assert batcher.handle(SlotIdle(0), 3) == []
    assert batcher.wake_at() == 1 + 5 * MS


def test_a_preferred_size_that_is_stepped_over_is_not_reached() -> None:
    batcher = DynamicBatcher(BatchPolicy(8, preferred_sizes=(4, 8), delay_ns=5 * MS, adapt_delay=False))
    submit_all(batcher, sizes(3, 2), 1)

    assert batcher.handle(SlotIdle(0), 2) == []
    assert batcher.handle(Tick(), 1 + 5 * MS) == [Run(0, (1, 2), DELAY)]


@pytest.mark.parametrize("size", [7, 8])
def test_a_request_larger_than_every_preferred_size_does_not_wait(size: int) -> None:
    policy = BatchPolicy(8, preferred_sizes=(2, 6), delay_ns=5 * MS, adapt_delay=False)
    late = DynamicBatcher(policy)
    late.handle(Submit(1, size), 1)

    assert idle_batcher(policy).handle(Submit(1, size), 1) == [Run(0, (1,), FULL)]
    assert late.handle(SlotIdle(0), 2) == [Run(0, (1,), FULL)]


@pytest.mark.parametrize(("first", "second"), [(3, 4), (5, 3), (5, 2), (4, 5)])
def test_a_batch_that_the_next_request_takes_past_every_preferred_size_does_not_wait(first: int, second: int) -> None:
    batcher = idle_batcher(BatchPolicy(8, preferred_sizes=(1, 6), delay_ns=5 * MS, adapt_delay=False))
    assert batcher.handle(Submit(1, first), 1) == []

    assert batcher.handle(Submit(2, second), 2) == [Run(0, (1,), FULL)]
    assert batcher.handle(SlotIdle(0), 3) == []
    assert batcher.wake_at() == 2 + 5 * MS


def test_a_batch_past_every_preferred_size_is_full_though_the_next_request_has_another_shape() -> None:
    batcher = DynamicBatcher(BatchPolicy(8, preferred_sizes=(2,), delay_ns=5 * MS, adapt_delay=False))
    submit_all(batcher, [Submit(1, 3, "b"), Submit(2, 1, "a")], 1)

    assert batcher.handle(SlotIdle(0), 2) == [Run(0, (1,), FULL)]


def test_what_has_waited_for_the_delay_is_sent_with_all_that_fits() -> None:
    batcher = DynamicBatcher(BatchPolicy(8, preferred_sizes=(6,), delay_ns=5 * MS, adapt_delay=False))
    submit_all(batcher, sizes(3, 4, 1), 1)

    assert batcher.handle(SlotIdle(0), 1 + 5 * MS) == [Run(0, (1, 2, 3), FULL)]


def test_without_a_delay_a_batch_may_pass_the_preferred_sizes() -> None:
    batcher = DynamicBatcher(BatchPolicy(8, preferred_sizes=(6,)))
    submit_all(batcher, sizes(3, 4), 1)

    assert batcher.handle(SlotIdle(0), 2) == [Run(0, (1, 2), QUEUE_EMPTY)]


def test_a_batch_past_the_preferred_sizes_waits_for_no_one_where_all_clients_are_in_it() -> None:
    batcher = idle_batcher(BatchPolicy(8, preferred_sizes=(6,), delay_ns=5 * MS))
    for number in range(3):  # two clients, until their number is known
        batcher.handle(Submit(2 * number + 1, 2), number * MS)
        batcher.handle(Submit(2 * number + 2, 4), number * MS)
        batcher.handle(SlotIdle(0), number * MS)

    assert batcher.handle(Submit(7, 3), 4 * MS) == []
    assert batcher.handle(Submit(8, 4), 4 * MS) == [Run(0, (7, 8), QUEUE_EMPTY)]


def test_a_preferred_size_goes_before_a_cut_by_size_or_shape() -> None:
    batcher = DynamicBatcher(BatchPolicy(8, preferred_sizes=(4,)))
    submit_all(batcher, [Submit(1, 4), Submit(2, 2), Submit(3, 1, "b"), Submit(4, 8, "b")], 1)

    assert batcher.handle(SlotIdle(0), 2) == [Run(0, (1,), PREFERRED)]
    assert batcher.handle(SlotIdle(0), 3) == [Run(0, (2,), SHAPE)]


def test_without_a_delay_what_is_not_preferred_is_sent_all_the_same() -> None:
    batcher = DynamicBatcher(BatchPolicy(8, preferred_sizes=(4,)))
    submit_all(batcher, sizes(1, 1, 1), 1)

    assert batcher.handle(SlotIdle(0), 2) == [Run(0, (1, 2, 3), QUEUE_EMPTY)]


def test_a_cancellation_can_make_a_preferred_size_reachable() -> None:
    batcher = idle_batcher(BatchPolicy(8, preferred_sizes=(4, 8), delay_ns=5 * MS, adapt_delay=False))
    assert submit_all(batcher, sizes(3, 2, 1), 1) == []

    assert batcher.handle(Cancel(2), 2) == [Run(0, (1, 3), PREFERRED)]


# --- priorities


def test_urgent_levels_are_served_first_and_unknown_priorities_are_the_default_level() -> None:
    batcher = DynamicBatcher(BatchPolicy(2, priority_levels=3, default_level=2))
    for request_id, priority in enumerate((3, 0, 4, 1, 2, 1)):
        batcher.handle(Submit(request_id, priority=priority), request_id)

    runs = [command for _ in range(3) for command in batcher.handle(SlotIdle(0), 10)]

    assert runs == [Run(0, (3, 5), FULL), Run(0, (1, 2), FULL), Run(0, (4, 0), FULL)]


def test_without_levels_priorities_have_no_effect() -> None:
    batcher = DynamicBatcher(PLAIN)
    submit_all(batcher, [Submit(1, priority=2), Submit(2, priority=1), Submit(3)], 1)

    assert batcher.handle(SlotIdle(0), 2) == [Run(0, (1, 2, 3), QUEUE_EMPTY)]


def test_each_level_has_its_own_queue_policy() -> None:
    limits = ((1, QueueLimits(size_max=1, timeout_ns=10)),)
    batcher = DynamicBatcher(
        BatchPolicy(8, priority_levels=2, default_level=2, limits=QueueLimits(size_max=2), level_limits=limits)
    )

    assert batcher.handle(Submit(1, priority=1), 0) == []
    assert batcher.handle(Submit(2, priority=1), 0) == [Drop(2, DropReason.QUEUE_FULL)]
    assert submit_all(batcher, [Submit(3), Submit(4), Submit(5)], 0) == [Drop(5, DropReason.QUEUE_FULL)]
    assert batcher.handle(Tick(), 10) == [Drop(1, DropReason.TIMEOUT)]
    assert batcher.queued == 2


# --- queue limits


def test_a_request_that_completes_a_batch_starts_although_the_queue_was_full() -> None:
    batcher = idle_batcher(BatchPolicy(4, delay_ns=5 * MS, limits=QueueLimits(size_max=3), adapt_delay=False))

    assert submit_all(batcher, sizes(1, 1, 1, 1), 1) == [Run(0, (1, 2, 3, 4), FULL)]


def test_a_request_that_finds_the_queue_full_changes_nothing_for_those_in_it() -> None:
    batcher = idle_batcher(BatchPolicy(4, delay_ns=5 * MS, limits=QueueLimits(size_max=2), adapt_delay=False))
    submit_all(batcher, sizes(1, 1), 0)

    assert batcher.handle(Submit(3), 1 * MS) == [Drop(3, DropReason.QUEUE_FULL)]
    assert batcher.wake_at() == 5 * MS
    assert batcher.handle(Tick(), 5 * MS) == [Run(0, (1, 2), DELAY)]


def test_the_delay_ends_later_when_the_oldest_request_makes_room_for_another_flow() -> None:
    batcher = idle_batcher(BatchPolicy(4, delay_ns=5 * MS, limits=QueueLimits(size_max=1), adapt_delay=False))
    batcher.handle(Submit(1, flow=Flow("a")), 0)

    assert batcher.handle(Submit(2, flow=Flow("b", 3)), 1 * MS) == [Drop(1, DropReason.QUEUE_FULL)]
    assert batcher.wake_at() == 6 * MS
    assert batcher.handle(Tick(), 6 * MS) == [Run(0, (2,), DELAY)]


def test_those_moved_back_by_their_timeout_count_as_waiting() -> None:
    limits = QueueLimits(size_max=2, timeout_ns=10, delay_expired=True)
    batcher = DynamicBatcher(BatchPolicy(8, limits=limits))
    batcher.handle(Submit(1), 0)
    batcher.handle(Submit(2), 5)

    assert batcher.handle(Submit(3), 10) == [Drop(3, DropReason.QUEUE_FULL)]


def test_a_timeout_makes_room_at_the_very_nanosecond() -> None:
    batcher = DynamicBatcher(BatchPolicy(8, limits=QueueLimits(size_max=1, timeout_ns=10)))
    batcher.handle(Submit(1), 0)

    assert batcher.handle(Submit(2), 9) == [Drop(2, DropReason.QUEUE_FULL)]
    assert batcher.handle(Submit(3), 10) == [Drop(1, DropReason.TIMEOUT)]
    assert batcher.queued == 1


# --- timeouts


def test_a_request_times_out_beside_an_idle_slot_where_the_delay_is_longer() -> None:
    limits = QueueLimits(timeout_ns=2 * MS)
    batcher = idle_batcher(BatchPolicy(4, delay_ns=5 * MS, limits=limits, adapt_delay=False))
    batcher.handle(Submit(1), 0)
    batcher.handle(Submit(2), 1 * MS)

    assert batcher.wake_at() == 2 * MS
    assert batcher.handle(Tick(), 2 * MS) == [Drop(1, DropReason.TIMEOUT)]
    assert batcher.wake_at() == 3 * MS


def test_the_delay_counts_from_the_oldest_that_is_left_after_a_timeout() -> None:
    limits = QueueLimits(timeout_override=True)
    batcher = idle_batcher(BatchPolicy(4, delay_ns=5 * MS, limits=limits, adapt_delay=False))
    batcher.handle(Submit(1, timeout_us=2000), 0)
    batcher.handle(Submit(2), 1 * MS)

    batcher.handle(Tick(), 2 * MS)

    assert batcher.wake_at() == 6 * MS


def test_a_batch_that_timed_out_leaves_no_wake_up_call_behind() -> None:
    limits = QueueLimits(timeout_ns=2 * MS)
    batcher = idle_batcher(BatchPolicy(4, delay_ns=5 * MS, limits=limits, adapt_delay=False))
    batcher.handle(Submit(1), 0)

    assert batcher.handle(Submit(2, 4), 2 * MS) == [Drop(1, DropReason.TIMEOUT), Run(0, (2,), FULL)]
    assert batcher.wake_at() is None


def test_expired_requests_move_behind_those_in_time_of_their_level_only() -> None:
    limits = QueueLimits(timeout_ns=10, delay_expired=True)
    batcher = DynamicBatcher(BatchPolicy(8, priority_levels=2, default_level=1, limits=limits))
    batcher.handle(Submit(1), 0)
    batcher.handle(Submit(2, priority=2), 5)
    batcher.handle(Submit(3), 6)

    assert batcher.handle(Tick(), 10) == []
    assert batcher.wake_at() == 15
    assert batcher.handle(SlotIdle(0), 11) == [Run(0, (3, 1, 2), QUEUE_EMPTY)]


def test_a_batch_that_waits_is_reordered_by_a_timeout() -> None:
    limits = QueueLimits(timeout_override=True, delay_expired=True)
    batcher = idle_batcher(BatchPolicy(4, delay_ns=5 * MS, limits=limits, adapt_delay=False))
    batcher.handle(Submit(1, timeout_us=2000), 0)
    batcher.handle(Submit(2), 1 * MS)

    assert batcher.handle(Tick(), 2 * MS) == []
    assert batcher.handle(Submit(3), 3 * MS) == []
    assert batcher.wake_at() == 5 * MS  # the one that moved back is still the oldest
    assert batcher.handle(Tick(), 5 * MS) == [Run(0, (2, 3, 1), DELAY)]


# --- cancellation and the end


@pytest.mark.parametrize("position", range(4))
def test_cancelling_at_any_position_leaves_the_rest_of_the_batch_as_it_was(position: int) -> None:
    batcher = idle_batcher(BatchPolicy(8, delay_ns=5 * MS, adapt_delay=False))
    for request_id in range(4):
        batcher.handle(Submit(request_id), request_id * MS)

    assert batcher.handle(Cancel(position), 4 * MS) == []

    rest = tuple(request_id for request_id in range(4) if request_id != position)
    due_ns = rest[0] * MS + 5 * MS
    assert batcher.queued == 3
    assert batcher.wake_at() == due_ns
    assert batcher.handle(Tick(), due_ns) == [Run(0, rest, DELAY)]


@pytest.mark.parametrize("position", range(4))
def test_cancelling_at_any_position_while_the_slot_is_busy(position: int) -> None:
    batcher = DynamicBatcher(PLAIN)
    submit_all(batcher, [Submit(request_id) for request_id in range(4)], 0)

    batcher.handle(Cancel(position), 1)

    rest = tuple(request_id for request_id in range(4) if request_id != position)
    assert batcher.handle(SlotIdle(0), 2) == [Run(0, rest, QUEUE_EMPTY)]


def test_cancelling_all_of_a_batch_that_waits_leaves_nothing_to_do() -> None:
    batcher = idle_batcher(PATIENT)
    submit_all(batcher, sizes(1, 1), 0)

    assert batcher.handle(Cancel(1), 1) == []
    assert batcher.handle(Cancel(2), 1) == []
    assert batcher.wake_at() is None
    assert batcher.handle(Tick(), 5 * MS) == []


def test_cancelling_an_unknown_running_or_dropped_request_does_nothing() -> None:
    batcher = idle_batcher(BatchPolicy(2, limits=QueueLimits(size_max=1)))
    assert submit_all(batcher, sizes(1, 1, 1), 0) == [Run(0, (1,), QUEUE_EMPTY), Drop(3, DropReason.QUEUE_FULL)]

    for request_id in (1, 3, 77):
        assert batcher.handle(Cancel(request_id), 1) == []

    assert batcher.queued == 1


def test_stopping_sends_what_waits_without_delay_and_refuses_newcomers() -> None:
    batcher = idle_batcher(PATIENT)
    submit_all(batcher, sizes(1, 1), 0)

    assert batcher.handle(Stop(), 1) == [Run(0, (1, 2), QUEUE_EMPTY)]
    assert batcher.handle(Submit(3), 2) == [Drop(3, DropReason.STOPPING)]
    assert batcher.wake_at() is None


def test_stopping_while_the_slot_is_busy_sends_what_waits_when_it_is_idle() -> None:
    batcher = DynamicBatcher(PATIENT)
    submit_all(batcher, sizes(1, 1), 0)

    assert batcher.handle(Stop(), 1) == []
    assert batcher.handle(SlotIdle(0), 2) == [Run(0, (1, 2), QUEUE_EMPTY)]
    assert batcher.handle(SlotIdle(0), 3) == []


def test_two_idle_slots_take_one_batch_after_the_other() -> None:
    batcher = idle_batcher(PATIENT)
    batcher.handle(SlotIdle(1), 0)

    assert submit_all(batcher, sizes(3, 2, 2), 1) == [Run(1, (1,), FULL), Run(0, (2, 3), FULL)]
