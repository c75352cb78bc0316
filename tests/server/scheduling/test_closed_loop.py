"""Who pays the batching delay, and who does not."""

from charonia.server.scheduling.api import (
    BatchPolicy,
    Cancel,
    CloseReason,
    QueueLimits,
    Run,
    SlotIdle,
    SlotRemoved,
    Submit,
    Tick,
)
from charonia.server.scheduling.dynamic import RECENT_PERIODS, DynamicBatcher

MS = 1_000_000
DELAY_NS = 5 * MS
POLICY = BatchPolicy(size_max=8, delay_ns=DELAY_NS)
QUEUE_EMPTY, DELAY = CloseReason.QUEUE_EMPTY, CloseReason.DELAY


def lonely_batcher(policy: BatchPolicy = POLICY) -> DynamicBatcher:
    """A batcher that has learnt that its client is alone; slot 0 is idle, the time is 100 ms."""
    batcher = DynamicBatcher(policy)
    batcher.handle(SlotIdle(0), 0)
    for period in range(RECENT_PERIODS):
        now_ns = 20 * MS * period
        assert batcher.handle(Submit(-1 - period), now_ns) == []
        assert batcher.handle(Tick(), now_ns + DELAY_NS) == [Run(0, (-1 - period,), DELAY)]
        assert batcher.handle(SlotIdle(0), now_ns + 10 * MS) == []
    return batcher


def test_a_lone_client_pays_the_delay_a_few_times_and_then_no_more() -> None:
    batcher = lonely_batcher()

    for request_id in range(5):
        now_ns = (100 + request_id) * MS
        assert batcher.handle(Submit(request_id), now_ns) == [Run(0, (request_id,), QUEUE_EMPTY)]
        assert batcher.handle(SlotIdle(0), now_ns + MS // 2) == []


def test_without_adapt_delay_a_lone_client_always_pays() -> None:
    batcher = lonely_batcher(BatchPolicy(size_max=8, delay_ns=DELAY_NS, adapt_delay=False))

    assert batcher.handle(Submit(1), 100 * MS) == []
    assert batcher.wake_at() == 105 * MS


def test_waiting_resumes_when_a_request_arrives_while_another_one_runs() -> None:
    batcher = lonely_batcher()
    assert batcher.handle(Submit(1), 100 * MS) == [Run(0, (1,), QUEUE_EMPTY)]

    assert batcher.handle(Submit(2), 101 * MS) == []
    assert batcher.handle(SlotIdle(0), 102 * MS) == []
    assert batcher.wake_at() == 106 * MS
    assert batcher.handle(Submit(3), 103 * MS) == [Run(0, (2, 3), QUEUE_EMPTY)]  # both known clients are here


def test_waiting_resumes_when_a_request_arrives_while_another_one_is_queued() -> None:
    batcher = lonely_batcher()
    batcher.handle(SlotRemoved(0), 100 * MS)
    batcher.handle(Submit(1), 100 * MS)
    batcher.handle(Submit(2), 100 * MS)
    batcher.handle(Cancel(1), 101 * MS)

    assert batcher.handle(SlotIdle(0), 102 * MS) == []
    assert batcher.wake_at() == 105 * MS


def test_those_who_leave_are_forgotten_after_a_few_batches() -> None:
    batcher = lonely_batcher()
    batcher.handle(Submit(1), 100 * MS)
    batcher.handle(Submit(2), 100 * MS)  # beside the first, which runs
    batcher.handle(Cancel(2), 100 * MS)
    batcher.handle(SlotIdle(0), 101 * MS)
    waits = []

    for period in range(RECENT_PERIODS + 3):
        now_ns = (200 + 20 * period) * MS
        waits.append(not batcher.handle(Submit(10 + period), now_ns) and not batcher.handle(Tick(), now_ns + 1))
        batcher.handle(Tick(), now_ns + DELAY_NS)
        batcher.handle(SlotIdle(0), now_ns + 10 * MS)

    # The peak of 2 belongs to the period that the first of these ends, and is remembered for so many more.
    assert waits == [True, *[True] * RECENT_PERIODS, False, False]


def test_a_refused_or_cancelled_request_is_not_inside_any_more() -> None:
    limits = QueueLimits(size_max=1, timeout_ns=2 * MS)
    batcher = DynamicBatcher(BatchPolicy(size_max=8, delay_ns=MS, limits=limits))
    batcher.handle(Submit(1), 0)
    batcher.handle(Submit(2), 0)  # refused
    batcher.handle(Submit(3), 2 * MS)  # the first has timed out
    batcher.handle(Cancel(3), 2 * MS)

    for period in range(RECENT_PERIODS + 1):
        batcher.handle(SlotIdle(0), 10 * MS * (period + 1))
        batcher.handle(Submit(10 + period), 10 * MS * (period + 1))
        batcher.handle(Tick(), 10 * MS * (period + 1) + MS)
    batcher.handle(SlotIdle(0), 100 * MS)

    assert batcher.handle(Submit(20), 100 * MS) == [Run(0, (20,), QUEUE_EMPTY)]


def test_what_ran_on_a_slot_that_has_gone_is_not_inside_any_more() -> None:
    batcher = lonely_batcher()
    assert batcher.handle(Submit(1), 100 * MS) == [Run(0, (1,), QUEUE_EMPTY)]
    batcher.handle(SlotRemoved(0), 101 * MS)
    batcher.handle(SlotIdle(1), 102 * MS)

    assert batcher.handle(Submit(2), 103 * MS) == [Run(1, (2,), QUEUE_EMPTY)]


def test_requests_that_time_out_together_are_all_gone() -> None:
    limits = QueueLimits(timeout_ns=MS)
    batcher = DynamicBatcher(BatchPolicy(size_max=8, delay_ns=DELAY_NS, limits=limits))
    for request_id in range(3):
        batcher.handle(Submit(request_id), 0)
    assert len(batcher.handle(Tick(), MS)) == 3
    batcher.handle(SlotIdle(0), 2 * MS)

    for period in range(RECENT_PERIODS + 1):  # full batches, since waiting would be timing out
        assert batcher.handle(Submit(10 + period, batch_size=8), 3 * MS)
        assert batcher.handle(SlotIdle(0), 3 * MS) == []

    assert batcher.handle(Submit(20), 4 * MS) == [Run(0, (20,), QUEUE_EMPTY)]


def test_cancelling_a_request_that_runs_does_not_make_it_absent() -> None:
    batcher = lonely_batcher()
    assert batcher.handle(Submit(1), 100 * MS) == [Run(0, (1,), QUEUE_EMPTY)]
    assert batcher.handle(Cancel(1), 100 * MS) == []

    assert batcher.handle(Submit(2), 101 * MS) == []
    assert batcher.handle(SlotIdle(0), 102 * MS) == []
    assert batcher.wake_at() == 106 * MS


def test_a_backlog_counts_as_loop_though_no_request_arrives_while_it_is_worked_off() -> None:
    batcher = DynamicBatcher(BatchPolicy(size_max=4, delay_ns=DELAY_NS))
    for request_id in range(17):
        batcher.handle(Submit(request_id), 0)
    for step in range(4):
        assert len(batcher.handle(SlotIdle(0), step * MS)) == 1

    assert batcher.handle(SlotIdle(0), 4 * MS) == []
    assert batcher.queued == 1
    assert batcher.wake_at() == DELAY_NS
