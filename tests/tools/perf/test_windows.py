import numpy as np
import pytest

from charonia.tools.perf import outcome, samples
from charonia.tools.perf.api import MeasurePlan, ServiceObjective
from charonia.tools.perf.samples import Rows
from charonia.tools.results.records import Window

SECOND = 1_000_000_000
MS = 1_000_000


def request(done_ns: int, took_ns: int, outcome: int = 0) -> list[int]:
    row = [0] * samples.WIDTH
    row[samples.INTENDED] = row[samples.SENT] = done_ns - took_ns
    row[samples.DONE], row[samples.OUTCOME] = done_ns, outcome
    return row


def rows(*requests: list[int]) -> Rows:
    return np.array(requests, np.int64)


def window(throughput: float, latency_ms: float) -> Window:
    return Window(0, SECOND, 10, 0, throughput, latency_ms * MS, used=False)


def test_a_time_window_is_a_fifth_longer_than_asked_for() -> None:
    assert outcome.window_ns(5000) == 6 * SECOND
    assert outcome.window_ns(7) == 8 * MS


def test_a_request_counts_in_the_window_in_which_it_ended() -> None:
    window, deviation_ns = outcome.measure(
        rows(request(1 * SECOND - 1, 5), request(1 * SECOND, SECOND), request(2 * SECOND, 5)),
        *(SECOND, 2 * SECOND),
        batch_size=8,
        percentile=None,
    )

    assert (window.request_count, window.throughput, window.latency_ns) == (1, 8.0, SECOND)
    assert deviation_ns == 0.0


def test_failures_are_counted_apart() -> None:
    requests = rows(request(10, 4), request(11, 6), request(12, 5, outcome=2))
    window, deviation_ns = outcome.measure(requests, 0, 100, 1, None)

    assert (window.request_count, window.error_count, window.latency_ns) == (2, 1, 5.0)
    assert deviation_ns == pytest.approx(2**0.5)


def test_an_empty_window_is_zero() -> None:
    found, _ = outcome.measure(samples.no_rows(), 5, 5, 1, 99)

    assert (found.request_count, found.throughput, found.latency_ns) == (0, 0.0, 0.0)


@pytest.mark.parametrize(("percentile", "expected"), [(None, 50.5), (50, 51), (99, 99), (1, 2)])
def test_the_latency_is_the_mean_or_the_nearest_rank(percentile: float | None, expected: float) -> None:
    assert outcome.stabilising_latency(np.arange(1, 101), percentile) == expected


def test_a_time_line_has_the_requests_of_each_interval() -> None:
    found = [
        *(request(10 * SECOND + 50 * MS, 5 * MS), request(10 * SECOND + 99 * MS, 9 * MS)),
        *(request(10 * SECOND + 100 * MS, 7 * MS), request(10 * SECOND + 250 * MS, 3 * MS, outcome=1)),
        request(10 * SECOND + 309 * MS, 2 * MS),
    ]

    buckets = outcome.timeline(rows(*found), np.empty((0, 2), np.int64), 10 * SECOND, 10 * SECOND + 310 * MS)

    counts = [(each.sent_count, each.completed_count, each.error_count) for each in buckets]
    assert counts == [(3, 2, 0), (0, 1, 0), (1, 0, 1), (1, 1, 0)]
    assert [(each.begin_ns, each.end_ns) for each in buckets] == [
        *((0, 100 * MS), (100 * MS, 200 * MS), (200 * MS, 300 * MS), (300 * MS, 310 * MS))
    ]
    assert [(each.p50_ns, each.p99_ns, each.max_ns) for each in buckets] == [
        *((5 * MS, 9 * MS, 9 * MS), (7 * MS, 7 * MS, 7 * MS), (0, 0, 0), (2 * MS, 2 * MS, 2 * MS))
    ]


def test_a_long_time_line_has_at_most_so_many_intervals() -> None:
    sent = np.array([[0, 5 * SECOND], [0, 125 * SECOND]], np.int64)

    buckets = outcome.timeline(samples.no_rows(), sent, 0, 126 * SECOND)

    assert len(buckets) == outcome.TIMELINE_BUCKETS == 120
    assert [(number, each.sent_count) for number, each in enumerate(buckets) if each.sent_count] == [(4, 1), (119, 1)]
    assert outcome.timeline(samples.no_rows(), sent, 5, 5) == ()


def test_good_requests_are_those_within_every_limit() -> None:
    plan = MeasurePlan(objectives=(ServiceObjective("latency 10", 10.0), ServiceObjective("latency 20", 20.0)))
    used = rows(request(100, 10), request(100, 11), request(100, 5, outcome=1), request(100, 9))

    found = outcome.goodput(used, plan, 2 * SECOND)
    none = outcome.goodput(used[:0], plan, 0)

    assert (found.objectives, found.good_count, found.rate, found.share) == (("latency 10", "latency 20"), 2, 1.0, 0.5)
    assert (none.good_count, none.rate, none.share) == (0, 0.0, 0.0)


def test_an_interval_of_requests_is_from_the_first_send_to_the_last_end() -> None:
    assert outcome.clamped(rows(request(100, 10), request(95, 20)), 5, 500) == (75, 101)
    assert outcome.clamped(samples.no_rows(), 5, 500) == (5, 500)


def _differing(name: str, found: list[Window], agree: bool) -> list[str]:
    """Return what differs where only this does; too few windows do not agree at all."""
    return [] if agree else [name] if len(found) >= outcome.LAST else ["throughput", "latency"]


@pytest.mark.parametrize(
    ("throughputs", "agree"),
    [
        ((100, 105, 110), True),
        ((100, 105, 111), False),
        ((500, 100, 100, 100), True),
        ((100, 100), False),
        ((0, 0, 0), False),
    ],
)
def test_the_last_three_windows_agree_within_the_stability(throughputs: tuple[float, ...], agree: bool) -> None:
    found = [window(throughput, 5) for throughput in throughputs]

    assert outcome.differing(found, 0.1) == _differing("throughput", found, agree)
    assert outcome.differing([window(5, value) for value in throughputs], 0.1) == _differing("latency", found, agree)


def test_the_limit_is_reached_in_whole_milliseconds_of_a_late_window() -> None:
    slow, fast = window(10, 50.2), window(10, 49.9)

    assert outcome.is_over([slow, fast, fast], 50 * MS)
    assert not outcome.is_over([slow, fast, fast, fast], 50 * MS)
    assert outcome.is_over([slow], 50 * MS + 200_000)
    assert not outcome.is_over([slow], 51 * MS)
    assert not outcome.is_over([slow], 0)


def test_the_last_three_windows_are_the_result() -> None:
    marked = outcome.mark_used([window(1, 1)] * 5)

    assert [entry.used for entry in marked] == [False, False, True, True, True]
    assert [entry.used for entry in outcome.mark_used([window(1, 1)])] == [True]
