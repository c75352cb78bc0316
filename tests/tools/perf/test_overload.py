import numpy as np
import pytest
from numpy.typing import NDArray

from charonia.tools.perf.outcome import backlog

SECOND = 1_000_000_000
Times = NDArray[np.int64]


def arrivals(rate: float, seconds: float) -> Times:
    return (np.arange(int(rate * seconds)) * SECOND / rate).astype(np.int64)


def served(arrived: Times, rate: float) -> Times:
    """End times at a server that answers one after the other, so many a second."""
    step = SECOND / rate
    done, at = [], 0.0
    for time in arrived.tolist():
        at = max(at, time) + step
        done.append(int(at))
    return np.array(done, np.int64)


@pytest.mark.parametrize(("offered", "capacity"), [(200, 45), (100, 90), (1000, 950)])
def test_requests_that_pile_up_on_and_on_are_overload(offered: float, capacity: float) -> None:
    arrived = arrivals(offered, 6)

    found = backlog(arrived, served(arrived, capacity), 0, 6 * SECOND)

    assert found.is_overload
    assert found.growth == pytest.approx(offered - capacity, rel=0.1)
    assert found.end == pytest.approx((offered - capacity) * 6, rel=0.1)


@pytest.mark.parametrize(("offered", "capacity"), [(100, 105), (100, 1000), (5, 100)])
def test_a_server_that_keeps_up_is_not_overloaded(offered: float, capacity: float) -> None:
    arrived = arrivals(offered, 6)

    assert not backlog(arrived, served(arrived, capacity), 0, 6 * SECOND).is_overload


@pytest.mark.parametrize("seconds", [2.0, 2.5, 3.0, 5.2, 7.8])
def test_stalls_that_are_worked_off_are_not_overload(seconds: float) -> None:
    arrived = arrivals(100, seconds)
    cycle, stall = int(2.6 * SECOND), int(0.6 * SECOND)
    phase = (arrived + int(1.5 * SECOND)) % cycle
    done = np.sort(arrived + np.maximum(stall - phase, 0) + 2_000_000)

    assert not backlog(arrived, done, 0, int(seconds * SECOND)).is_overload


def test_random_arrivals_near_capacity_are_not_overload() -> None:
    arrived = np.cumsum(np.random.default_rng(4).exponential(SECOND / 80, 800)).astype(np.int64)

    assert not backlog(arrived, served(arrived, 100), 0, int(arrived[-1])).is_overload


def test_little_is_never_called_overload() -> None:
    arrived = arrivals(10, 3)

    assert not backlog(arrived, arrived[:1], 0, 3 * SECOND).is_overload
    assert not backlog(arrived[:0], arrived[:0], 5, 5).is_overload
