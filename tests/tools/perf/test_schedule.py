import math
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.core.errors import ServingError
from charonia.tools.perf import schedule
from charonia.tools.perf.api import Distribution, LoadPlan
from charonia.tools.results.records import LoadMode

MS = 1_000_000


def test_a_constant_rate_does_not_drift() -> None:
    times = list(islice(schedule.constant(3.0), 30_001))

    assert times[:3] == [0, 333_333_333, 666_666_667]
    assert times[-1] == 10_000 * schedule.SECOND_NS


def test_poisson_arrivals_are_repeatable_and_have_the_rate() -> None:
    first = list(islice(schedule.poisson(1000.0, seed=7), 20_000))

    assert first == list(islice(schedule.poisson(1000.0, seed=7), 20_000))
    assert first != list(islice(schedule.poisson(1000.0, seed=8), 20_000))
    gaps = np.diff(first)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 * MS, rel=0.03)
    assert gaps.std() == pytest.approx(1 * MS, rel=0.05)


def test_intervals_are_played_over_and_over() -> None:
    assert list(islice(schedule.intervals((10, 20)), 5)) == [10, 30, 40, 60, 70]


def test_a_replay_keeps_the_times_between_requests_and_begins_at_once() -> None:
    assert schedule.gaps_between([5.0, 5.25, 5.25, 6.0], "--replay") == (0, 250_000_000, 0, 750_000_000)
    assert schedule.gaps_between([5.0], "--replay") == (1_000_000_000,)
    with pytest.raises(ServingError, match="--replay: expected requests at different times"):
        schedule.gaps_between([5.0, 5.0], "--replay")


def test_the_rate_of_intervals_is_exact() -> None:
    assert schedule.interval_rate((20 * MS, 40 * MS, 20 * MS)) == 37.5


@pytest.mark.parametrize("gaps", [(), (0, 0), (5, -1)])
def test_intervals_without_a_rate_are_refused(gaps: tuple[int, ...]) -> None:
    with pytest.raises(ServingError, match="request intervals"):
        schedule.interval_rate(gaps)


def test_custom_intervals_go_before_a_distribution() -> None:
    assert next(schedule.arrivals(Distribution.POISSON, 1.0, (5,), 0)) == 5
    assert next(schedule.arrivals(Distribution.CONSTANT, 1.0, (), 0)) == 0
    assert next(schedule.arrivals(Distribution.POISSON, 1.0, (), 0)) > 0


@given(st.integers(1, 7), st.integers(0, 100))
def test_the_processes_together_send_every_arrival_once(process_count: int, seed: int) -> None:
    whole = list(islice(schedule.poisson(50.0, seed), 7 * process_count))

    shares = [
        list(islice(schedule.share(schedule.poisson(50.0, seed), process, process_count), 7))
        for process in range(process_count)
    ]

    assert sorted(time for share in shares for time in share) == whole


@given(st.integers(0, 1000), st.integers(1, 16))
def test_a_split_is_fair(total: int, process_count: int) -> None:
    parts = schedule.split(total, process_count)

    assert sum(parts) == total
    assert max(parts) - min(parts) <= 1


def played(plan: LoadPlan, limit: float) -> tuple[list[float], float | None]:
    """Run a search on a server that meets the latency limit up to a level."""
    levels, tried = schedule.levels(plan), []
    value = next(levels)
    while True:
        tried.append(value)
        try:
            value = levels.send(value <= limit)
        except StopIteration as end:
            return tried, end.value


@pytest.mark.parametrize(
    ("start", "end", "step", "limit", "tried", "found"),
    [
        (1, 8, 3, 99, [1, 4, 7], 7),
        (1, 8, 1, 3, [1, 2, 3, 4], 3),
        (5, 8, 1, 3, [5], None),
        (2, math.inf, 2, 7, [2, 4, 6, 8], 6),
    ],
)
def test_a_sweep_ends_with_its_range_or_at_the_level_that_misses_the_limit(
    start: int, end: float, step: int, limit: float, tried: list[float], found: float | None
) -> None:
    plan = LoadPlan(start=start, end=end, step=step)

    assert played(plan, limit) == (tried, found)
    assert schedule.level_count(plan) == (0 if math.isinf(end) else (end - start) // step + 1)


def test_fractions_reach_the_end_of_their_range() -> None:
    plan = LoadPlan(LoadMode.REQUEST_RATE, start=0.1, end=0.3, step=0.1)

    assert len(played(plan, 1)[0]) == schedule.level_count(plan) == 3


@pytest.mark.parametrize("limit", range(1, 65))
def test_a_binary_search_finds_the_largest_level(limit: int) -> None:
    tried, found = played(LoadPlan(start=1, end=64, binary_search=True), limit)

    assert found == limit
    assert len(tried) <= 8


def test_a_binary_search_of_rates_has_the_step_s_precision() -> None:
    _, found = played(LoadPlan(LoadMode.REQUEST_RATE, start=100, end=1000, step=10, binary_search=True), 333.3)

    assert found is not None
    assert found <= 333.3 < found + 10


def test_a_binary_search_whose_begin_misses_the_limit_has_no_answer() -> None:
    assert played(LoadPlan(start=4, end=64, binary_search=True), 3) == ([4], None)
    assert schedule.level_count(LoadPlan(start=4, end=64, binary_search=True)) == 0


def test_a_binary_search_with_a_fine_step_ends() -> None:
    assert played(LoadPlan(start=1, end=4, step=0.5, binary_search=True), 2)[1] == 2
