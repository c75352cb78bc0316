"""What a model version did of late: marks of its counters, and what came between them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.server.explain.rules import MARKS_MAX, Activity, Counts, History, counts_of
from charonia.server.metrics.model_metrics import FailureReason, ModelMetrics
from charonia.server.rate_limiter.limiter import Shortage
from charonia.server.scheduling.api import CloseReason

S = 1_000_000_000
MS = 1_000_000


def batch(metrics: ModelMetrics, size: int, *, begin_ns: int = 0, reason: CloseReason = CloseReason.FULL) -> None:
    """Run a batch whose requests waited 2 ms: 1 ms of input, 7 of computing, 2 of output."""
    marks = (begin_ns, begin_ns + MS, begin_ns + 8 * MS, begin_ns + 10 * MS)
    metrics.batch_done(
        arrivals_ns=[begin_ns - 2 * MS] * size,
        inferences=size,
        batch_size=size,
        reason=reason,
        marks_ns=marks,
        wall_ms=0,
    )


def test_what_happened_between_the_marks_is_the_difference_of_the_counters() -> None:
    metrics, history = ModelMetrics("m", "1"), History()
    batch(metrics, 8)
    metrics.failed(FailureReason.REJECTED, MS)
    history.mark(metrics, 0, 0, 0.0)
    batch(metrics, 4, reason=CloseReason.DELAY)
    batch(metrics, 4)
    metrics.failed(FailureReason.BACKEND, MS)
    history.mark(metrics, S, 3, 1.5)

    found = history.activity()

    assert (found.seconds, found.active_seconds, found.queued, found.idle_cores) == (1, 1, (3,), 1.5)
    assert found.counts.success == found.counts.inferences == 8
    assert found.counts.batches == {4: 2}
    assert found.counts.closes == {CloseReason.DELAY: 1, CloseReason.FULL: 1}
    assert found.counts.failed == {FailureReason.BACKEND: 1}
    assert (found.counts.infer_ns, found.counts.moving_ns) == (14 * MS, 6 * MS)
    assert found.counts.queue_ns == 8 * 2 * MS
    assert (found.batch_count, found.mean_batch, found.counts.ended) == (2, 4, 9)
    assert found.closed(CloseReason.DELAY) == 0.5
    assert found.closed(CloseReason.SHAPE) == 0


def test_only_the_last_minute_counts() -> None:
    metrics, history = ModelMetrics("m", "1"), History()
    for second in range(100):
        batch(metrics, 1)
        history.mark(metrics, second * S, 0, 0.0)

    found = history.activity()

    assert found.seconds == MARKS_MAX - 1 == 60
    assert found.batch_count == 60


def test_seconds_without_requests_do_not_make_a_model_look_idle() -> None:
    metrics, history = ModelMetrics("m", "1"), History()
    for second in range(11):
        if second in (3, 4, 5):
            for _ in range(100 if second == 4 else 50):
                batch(metrics, 1)
        history.mark(metrics, second * S, 0, 0.5 if second in (3, 4, 5) else 2.0)

    found = history.activity()

    # In the first and the last one half as much ended as between them: 200 batches of 10 ms in 2 s.
    assert (found.seconds, found.active_seconds) == (10, 2)
    assert found.occupancy(1) == pytest.approx(1)
    assert found.idle_cores == 0.5


def test_a_second_in_which_requests_only_waited_is_an_active_one() -> None:
    metrics, history = ModelMetrics("m", "1"), History()
    for second, queued in enumerate((0, 0, 7, 0, 0)):
        history.mark(metrics, second * S, queued, 0.0)

    assert history.activity().active_seconds == 2  # before and after it was seen


def test_what_was_waited_for_is_counted_in_the_active_seconds() -> None:
    metrics, history = ModelMetrics("m", "1"), History()
    needs = ("disk", "licence", "memory")
    seen = [
        Shortage(9 * S, needs),
        Shortage(9 * S, needs, ("disk", "memory"), ("a",)),
        Shortage(10 * S, needs, ("memory",), ("b", "a")),
        *[Shortage(11 * S, needs)] * 4,
    ]
    for second, (queued, shortage) in enumerate(zip((0, 3, 3, 3, 3, 0, 0), seen, strict=True)):
        history.mark(metrics, second * S, queued, 0.0, shortage)

    found = history.activity()

    assert found.short == pytest.approx(2 / 5)  # of five seconds that had work
    assert found.resources == ("memory", "disk")
    assert found.holders == ("a", "b")


def test_what_was_never_seen_to_be_missing_may_be_anything_that_is_needed() -> None:
    metrics, history = ModelMetrics("m", "1"), History()
    for second in range(3):
        history.mark(metrics, second * S, 1, 0.0, Shortage(second * S // 2, ("disk", "memory")))

    found = history.activity()

    assert (found.short, found.resources, found.holders) == (0.5, ("disk", "memory"), ())


def test_requests_that_take_longer_than_a_second_keep_a_model_busy() -> None:
    metrics, history = ModelMetrics("m", "1"), History()
    for second in range(6):
        if second in (2, 4):
            batch(metrics, 1)
        history.mark(metrics, second * S, 1, 0.0)

    assert history.activity().active_seconds == 5


def test_nothing_is_copied_while_nothing_happens() -> None:
    metrics, history = ModelMetrics("m", "1"), History()
    batch(metrics, 1)
    for second in range(3):
        history.mark(metrics, second * S, 0, 0.0)

    counts = {id(mark.counts) for mark in history._marks}

    assert len(counts) == 1


def test_before_the_second_mark_nothing_is_known() -> None:
    history = History()

    assert history.activity() == Activity()

    history.mark(ModelMetrics("m", "1"), 0, 4, 0.0)
    assert history.activity() == Activity(queued=(4,))


def test_without_requests_there_are_no_shares() -> None:
    found = Activity()

    assert (found.mean_batch, found.occupancy(1), found.wait_ns(0.5), found.counts.ended) == (0, 0, None, 0)
    assert found.closed(CloseReason.FULL) == 0


@pytest.mark.parametrize(
    ("waits", "share", "expected"),
    [
        ((400, 0, 0), 0.5, 5),  # half of those in the bucket up to 10
        ((200, 200, 0), 0.75, 15),
        ((0, 0, 400), 0.99, 20),  # above the last bound
        ((100, 0, 300), 0.25, 10),
    ],
)
def test_a_share_of_the_waits_is_read_off_the_buckets(waits: tuple[int, ...], share: float, expected: float) -> None:
    found = Activity(counts=Counts(waits=waits, queue_ns=10**6), wait_bounds_ns=(10, 20))

    assert found.wait_ns(share) == expected


@pytest.mark.parametrize(
    ("waits", "share", "is_known"),
    [
        ((1, 0), 0.5, False),
        ((19, 0), 0.5, False),
        ((20, 0), 0.5, True),
        ((99, 0), 0.99, False),
        ((100, 0), 0.99, True),
        ((10**6, 0), 1.0, False),
    ],
)
def test_a_share_of_too_few_waits_is_not_known(waits: tuple[int, ...], share: float, is_known: bool) -> None:
    found = Activity(counts=Counts(waits=waits, queue_ns=10**6), wait_bounds_ns=(10,))

    assert (found.wait_ns(share) is not None) is is_known


def test_no_request_waited_longer_than_all_together() -> None:
    found = Activity(counts=Counts(waits=(98, 2), queue_ns=1000), wait_bounds_ns=(100, 10_000))

    assert found.wait_ns(0.99) == 500  # two of the hundred waited so long, or longer
    assert found.wait_ns(0.5) == pytest.approx(1000 / 51)


@given(st.lists(st.integers(1, 16), max_size=30), st.lists(st.integers(1, 16), max_size=30))
def test_a_difference_holds_what_came_in_between_and_nothing_else(before: list[int], after: list[int]) -> None:
    metrics, history = ModelMetrics("m", "1"), History()
    for size in before:
        batch(metrics, size)
    history.mark(metrics, 0, 0, 0.0)
    for size in after:
        batch(metrics, size)
    history.mark(metrics, S, 0, 0.0)

    found = history.activity().counts

    fresh = ModelMetrics("m", "1")
    for size in after:
        batch(fresh, size)
    expected = counts_of(fresh)
    assert (found.success, found.batches, found.infer_ns, found.queue_ns) == (
        expected.success,
        expected.batches,
        expected.infer_ns,
        expected.queue_ns,
    )
