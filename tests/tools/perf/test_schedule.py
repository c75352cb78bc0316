from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.core.errors import ServingError
from charonia.tools.perf import schedule
from charonia.tools.perf.api import Distribution

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
