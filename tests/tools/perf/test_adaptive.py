"""Measured on simulated servers: requests one after the other, with response times drawn from known distributions."""

from dataclasses import replace

import numpy as np
import pytest

from charonia.tools.perf import intervals, samples
from charonia.tools.perf.api import MeasurePlan
from charonia.tools.perf.samples import Rows

SECOND = 1_000_000_000
MS = 1_000_000


def closed_loop(seconds: float, mean_ns: float, spread: float, seed: int) -> Rows:
    """A lone caller's requests to a server with log-normal times around a mean."""
    random = np.random.default_rng(seed)
    count = int(seconds * SECOND / mean_ns * 1.5)
    times = random.lognormal(np.log(mean_ns) - spread**2 / 2, spread, count).astype(np.int64)
    done = np.cumsum(times)
    rows = np.zeros((count, samples.WIDTH), np.int64)
    rows[:, samples.DONE], rows[:, samples.INTENDED] = done, done - times
    return rows[done < seconds * SECOND]


def time_to_settle(rows: Rows, plan: MeasurePlan) -> tuple[float, intervals.Look] | None:
    """Look every quarter of a second until the level is settled."""
    decision = intervals.AdaptiveStop(plan, 0)
    for now in range(intervals.CHECK_NS, 60 * SECOND, intervals.CHECK_NS):
        found = intervals.look(rows, 0, now, plan)
        ended = int(np.count_nonzero(rows[:, samples.DONE] < now))
        if decision.settled(found, ended):
            return now / SECOND, found
        if decision.out_of_time(now):
            return None
    return None


def test_a_steady_server_is_settled_within_two_seconds() -> None:
    found = time_to_settle(closed_loop(10, 2 * MS, 0.2, seed=1), MeasurePlan())

    assert found is not None
    seconds, look = found
    assert seconds <= 2
    assert look.latency.value == pytest.approx(2 * MS, rel=0.05)
    assert look.throughput.value == pytest.approx(500, rel=0.05)


def test_a_short_measurement_is_looked_at_four_times_and_ends_on_time() -> None:
    decision = intervals.AdaptiveStop(MeasurePlan(time_max_s=0.4), begin_ns=SECOND)

    looks = [SECOND]
    while not decision.out_of_time(looks[-1]):
        looks.append(decision.next_ns(looks[-1]))

    assert [look - SECOND for look in looks[1:]] == [100 * MS, 200 * MS, 300 * MS, 400 * MS]


@pytest.mark.parametrize("time_max_s", [1e-9, 0.1, 1.2 * 10 / 7, 1 / 3, 12.3456789012])
def test_every_measurement_comes_to_its_end(time_max_s: float) -> None:
    decision = intervals.AdaptiveStop(MeasurePlan(time_max_s=time_max_s), begin_ns=7)

    at_ns = 7
    for _ in range(1000):
        at_ns = decision.next_ns(at_ns)

    assert decision.out_of_time(at_ns)


def test_a_long_measurement_is_looked_at_every_quarter_of_a_second_and_then_less_often() -> None:
    decision = intervals.AdaptiveStop(MeasurePlan(time_max_s=30), begin_ns=0)

    assert decision.next_ns(0) == 250 * MS
    assert decision.next_ns(10 * SECOND) == 11 * SECOND
    assert decision.next_ns(29 * SECOND) == 30 * SECOND


def test_the_shortest_time_of_a_steady_level_can_be_chosen() -> None:
    rows = closed_loop(10, MS, 0.05, seed=1)
    decision = intervals.AdaptiveStop(MeasurePlan(time_min_s=0.2), 0)

    settled = [decision.settled(intervals.look(rows, 0, now * MS, MeasurePlan()), 100) for now in (100, 200, 300)]

    assert settled == [False, False, True]


def test_a_level_is_settled_by_two_tight_analyses_in_a_row_of_enough_requests() -> None:
    tight = intervals.look(closed_loop(10, MS, 0.05, seed=1), 0, SECOND, MeasurePlan())
    loose = replace(tight, latency=replace(tight.latency, high=tight.latency.value * 2))
    decision = intervals.AdaptiveStop(MeasurePlan(time_min_s=1), 0)

    looks = [(tight, 39), (tight, 40), (loose, 50), (tight, 50), (loose, 60), (tight, 60), (tight, 60)]
    assert [decision.settled(*each) for each in looks] == [False, False, False, False, False, False, True]


def test_a_wilder_server_takes_longer() -> None:
    steady = time_to_settle(closed_loop(30, 5 * MS, 0.2, seed=1), MeasurePlan())
    wild = time_to_settle(closed_loop(30, 5 * MS, 1.0, seed=1), MeasurePlan())

    assert steady is not None
    assert wild is not None
    assert wild[0] > steady[0]


def test_what_is_settled_is_near_the_truth() -> None:
    found = [time_to_settle(closed_loop(20, 4 * MS, 0.7, seed), MeasurePlan()) for seed in range(20)]

    errors = [abs(entry[1].latency.value - 4 * MS) / (4 * MS) for entry in found if entry is not None]
    assert len(errors) >= 18
    assert sum(error <= 0.05 for error in errors) >= 0.85 * len(errors)


def test_a_percentile_can_be_what_settles() -> None:
    found = time_to_settle(closed_loop(20, 2 * MS, 0.3, seed=2), MeasurePlan(percentile=95))

    assert found is not None
    exact = 2 * MS * np.exp(0.3 * 1.6449 - 0.3**2 / 2)
    assert found[1].latency.value == pytest.approx(exact, rel=0.06)


def test_the_slow_begin_of_a_server_is_left_out() -> None:
    cold = closed_loop(1, 20 * MS, 0.2, seed=1)
    warm = closed_loop(10, 2 * MS, 0.2, seed=2)
    warm[:, [samples.DONE, samples.INTENDED]] += cold[-1, samples.DONE]

    found = time_to_settle(np.concatenate([cold, warm]), MeasurePlan())

    assert found is not None
    assert found[1].begin_ns >= 0.9 * SECOND
    assert found[1].latency.value == pytest.approx(2 * MS, rel=0.06)


def test_a_level_without_requests_never_settles() -> None:
    assert time_to_settle(samples.no_rows(), MeasurePlan(time_max_s=3)) is None


def test_few_requests_do_not_settle_however_equal_they_are() -> None:
    assert time_to_settle(closed_loop(20, 1000 * MS, 0.001, seed=1), MeasurePlan(time_max_s=10)) is None
