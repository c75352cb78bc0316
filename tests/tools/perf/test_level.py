"""Whole levels in simulated time: what is measured of a load, when it is enough, and the verdict."""

import threading

import numpy as np
import pytest
from tests.support.simulated_load import SimulatedPool, Times, Traffic, simulated_level

from charonia.tools.perf.api import Event, MeasurementMode, MeasurePlan, ServiceObjective, WindowDone
from charonia.tools.perf.level import DRAIN_S
from charonia.tools.results.records import LevelResult, LoadLevel, LoadMode, Verdict

SECOND = 1_000_000_000
MS = 1_000_000
HOUR_S = 3600


def callers(count: int, service_ns: int, seconds: float = 20) -> Traffic:
    """Callers that each send their next request when the answer to the one before has come."""
    begins = np.arange(int(seconds * SECOND / service_ns), dtype=np.int64) * service_ns
    return Traffic(begins.repeat(count), begins.repeat(count) + service_ns)


def arrivals(rate: float, seconds: float = 20) -> Times:
    return np.arange(int(rate * seconds), dtype=np.int64) * int(SECOND / rate)


def one_by_one(arrived: Times, service_ns: int) -> Times:
    """When a server has answered that takes one request after the other."""
    done, at = [], 0
    for time in arrived.tolist():
        at = max(at, time) + service_ns
        done.append(at)
    return np.array(done, np.int64)


def measured(traffic: Traffic, plan: MeasurePlan) -> LevelResult:
    mode = LoadMode.REQUEST_RATE if traffic.is_open else LoadMode.CONCURRENCY
    return simulated_level(LoadLevel(mode, 1), SimulatedPool(traffic), plan)


def test_a_steady_level_is_settled_after_three_windows() -> None:
    found = measured(callers(2, 10 * MS), MeasurePlan(interval_ms=200))

    assert found.verdict is Verdict.STABLE
    assert [(window.begin_ns, window.end_ns) for window in found.windows] == [
        *((0, 240 * MS), (240 * MS, 480 * MS), (480 * MS, 720 * MS)),
    ]
    # The first window has no answers in its first 10 ms.
    assert [window.request_count for window in found.windows] == [46, 48, 48]
    assert found.throughput.value == pytest.approx(142 / 0.72)
    assert found.latency.value == 10 * MS


def test_failures_do_not_unsettle_a_level() -> None:
    times = callers(2, 2 * MS)
    failed = np.arange(len(times.intended_ns)) % 4 == 3

    found = measured(Traffic(times.intended_ns, times.done_ns, failed=failed), MeasurePlan(interval_ms=200))

    (kind,) = found.errors
    assert (kind.kind, kind.samples) == ("UNAVAILABLE", ("no luck today",))
    assert found.error_share == pytest.approx(0.25, abs=0.002)
    assert found.verdict is Verdict.STABLE


def test_a_level_that_never_agrees_is_unstable_and_says_in_what() -> None:
    # By turns 1 ms and 20 ms, every 300 ms.
    times = np.concatenate([np.full(300, MS) if number % 2 else np.full(15, 20 * MS) for number in range(20)])
    done = np.cumsum(times)

    found = measured(Traffic(done - times, done), MeasurePlan(interval_ms=250, trials_max=4))

    assert found.verdict is Verdict.UNSTABLE
    assert found.reasons == ("After 4 windows, throughput and latency of the last 3 still differed by more than 10%.",)


def test_too_few_windows_cannot_agree() -> None:
    found = measured(callers(1, 5 * MS), MeasurePlan(interval_ms=200, trials_max=1))

    assert found.verdict is Verdict.UNSTABLE
    assert found.reasons == ("3 windows are needed to compare them, and there were 1.",)


def test_a_window_of_a_count_takes_as_many_whole_seconds_as_it_needs() -> None:
    plan = MeasurePlan(MeasurementMode.COUNT_WINDOWS, window_request_count=25, trials_max=3)

    found = measured(callers(1, 50 * MS), plan)

    assert [(window.end_ns - window.begin_ns, window.request_count) for window in found.windows] == [
        *((2 * SECOND, 39), (2 * SECOND, 40), (2 * SECOND, 40)),
    ]


def test_a_window_of_a_count_ends_after_a_minute() -> None:
    plan = MeasurePlan(MeasurementMode.COUNT_WINDOWS, window_request_count=25, trials_max=1)

    found = measured(callers(1, 10 * SECOND, seconds=HOUR_S), plan)

    assert [(window.end_ns, window.request_count) for window in found.windows] == [(60 * SECOND, 5)]


def test_an_adaptive_level_ends_when_both_intervals_are_tight() -> None:
    found = measured(callers(2, 5 * MS), MeasurePlan(MeasurementMode.ADAPTIVE))

    assert found.verdict is Verdict.STABLE
    assert found.windows[0].end_ns <= 2 * SECOND
    assert found.throughput.relative_half_width <= 0.05
    assert found.latency.relative_half_width <= 0.05


def test_an_adaptive_level_that_stays_wild_ends_on_time() -> None:
    times = np.random.default_rng(1).lognormal(np.log(20 * MS), 2.0, 5000).astype(np.int64)
    done = np.cumsum(times)

    found = measured(Traffic(done - times, done), MeasurePlan(MeasurementMode.ADAPTIVE, time_max_s=3.0))

    assert found.verdict is Verdict.UNSTABLE
    assert found.windows[0].end_ns == 3 * SECOND
    assert found.reasons == ("The confidence intervals were not within 5% after 3 s.",)


def test_an_open_loop_counts_latency_from_the_intended_time_through_stalls() -> None:
    """The server stalls for 600 ms in every 2.6 s."""
    cycle, stall, service_ns = int(2.6 * SECOND), int(0.6 * SECOND), 2 * MS
    intended = arrivals(100)
    response_times = np.maximum(stall - (intended + int(1.5 * SECOND)) % cycle, 0) + service_ns
    # Those that wait for the server's answers are sent late: that must not make them fast.
    traffic = Traffic(intended, intended + response_times, is_open=True, sent_ns=intended + response_times - service_ns)

    found = measured(traffic, MeasurePlan(interval_ms=2167, percentile=95))

    done = intended + response_times
    reference = sorted(response_times[(done >= found.windows[-3].begin_ns) & (done < found.windows[-1].end_ns)])
    assert found.percentile(95) == pytest.approx(reference[int(0.95 * len(reference))], rel=0.02)
    assert found.percentile(50) == pytest.approx(2 * MS, rel=0.02)
    assert found.service_times.percentile(99) == pytest.approx(2 * MS, rel=0.02)
    assert found.offered is not None
    assert found.offered.achieved_rate == pytest.approx(100, rel=0.01)
    assert found.verdict is Verdict.STABLE


def test_an_overloaded_server_is_called_so_and_soon() -> None:
    intended = arrivals(200)
    pool = SimulatedPool(Traffic(intended, one_by_one(intended, 20 * MS), is_open=True))

    found = simulated_level(LoadLevel(LoadMode.REQUEST_RATE, 200), pool, MeasurePlan(interval_ms=800))

    assert found.verdict is Verdict.OVERLOADED
    assert len(found.windows) == 3  # of ten
    assert pool.waits_s == [DRAIN_S]
    assert found.offered is not None
    assert found.offered.sent_rate == pytest.approx(200, rel=0.01)
    assert found.offered.achieved_rate == pytest.approx(50, rel=0.01)
    assert found.offered.backlog_end == pytest.approx(2.88 * 150, rel=0.01)
    assert found.percentile(50) > 1 * SECOND
    # Of those that were sent, what is answered in the time of the drain is seen, and no more.
    assert sum(bucket.sent_count for bucket in found.timeline) == 580
    assert sum(bucket.completed_count for bucket in found.timeline) == pytest.approx((2.9 + DRAIN_S) * 50, abs=1)


def test_an_adaptive_level_is_overloaded_as_soon_as_two_seconds_show_it() -> None:
    intended = arrivals(200)

    found = measured(
        Traffic(intended, one_by_one(intended, 20 * MS), is_open=True), MeasurePlan(MeasurementMode.ADAPTIVE)
    )

    assert found.verdict is Verdict.OVERLOADED
    assert found.windows[0].end_ns <= 2.5 * SECOND


def test_the_latency_limit_ends_a_level_before_three_windows() -> None:
    found = measured(callers(1, 50 * MS), MeasurePlan(interval_ms=200, latency_limit_ns=45 * MS))

    assert (found.verdict, found.over_latency_limit, len(found.windows)) == (Verdict.UNSTABLE, True, 1)
    assert found.reasons == ("The latency limit was reached before three windows agreed.",)
    assert not measured(callers(1, 40 * MS), MeasurePlan(interval_ms=200, latency_limit_ns=45 * MS)).over_latency_limit


def test_goodput_is_what_met_its_objective() -> None:
    times = np.where(np.arange(100) % 5 == 4, 60 * MS, 2 * MS)
    done = np.cumsum(times)
    plan = MeasurePlan(request_count=100, objectives=(ServiceObjective("latency:30ms", 30 * MS),))

    found = measured(Traffic(done - times, done), plan)

    assert found.verdict is Verdict.COMPLETE
    assert found.goodput is not None
    assert (found.goodput.good_count, found.goodput.share) == (80, 0.8)
    assert found.goodput.rate == pytest.approx(80 * SECOND / (done[-1] + 1))


def test_a_server_that_falls_silent_is_measured_as_long_as_it_answered() -> None:
    """Callers whose connections fail from 700 ms on."""
    times = callers(2, 5 * MS)
    lost = times.intended_ns >= 700 * MS

    found = measured(
        Traffic(times.intended_ns, times.done_ns, failed=lost, kind="REFUSED"), MeasurePlan(interval_ms=500)
    )

    assert found.verdict is Verdict.SERVER_LOST
    assert [(window.begin_ns, window.end_ns) for window in found.windows] == [(0, 600 * MS)]
    assert found.throughput.value == pytest.approx(400, rel=0.01)
    assert [kind.kind for kind in found.errors] == ["REFUSED"]


def test_a_server_that_is_lost_under_a_rate_is_not_overloaded() -> None:
    """The server stops responding at 2.6 s: a backlog builds up, and later one connection is reset."""
    intended = arrivals(200)
    answered = intended < int(2.6 * SECOND)
    done = np.where(answered, intended + 5 * MS, HOUR_S * SECOND)
    cut = int(np.argmin(answered)) + 20
    done[cut] = intended[cut] + 10 * MS

    found = measured(
        Traffic(intended, done, is_open=True, failed=~answered, kind="RESET"),
        MeasurePlan(interval_ms=800, stability=0.0),
    )

    assert found.verdict is Verdict.SERVER_LOST
    assert found.throughput.value == pytest.approx(200, rel=0.01)


def test_who_wants_the_end_does_not_wait_for_answers() -> None:
    stop = threading.Event()

    def stop_at_the_second_window(event: Event) -> None:
        if isinstance(event, WindowDone) and event.number == 2:
            stop.set()

    pool = SimulatedPool(callers(2, 30 * MS))
    level, plan = LoadLevel(LoadMode.CONCURRENCY, 2), MeasurePlan(interval_ms=400, stability=0.0)
    found = simulated_level(level, pool, plan, stop_at_the_second_window, stop)

    assert (found.verdict, len(found.windows)) == (Verdict.INTERRUPTED, 2)
    assert pool.waits_s == [0.0]
