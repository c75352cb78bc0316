"""When a server gives back memory: seconds of CPU time in, decisions out."""

import itertools

import pytest

from charonia.server.machine.idle_memory import QUIET_S, IdleMemory


def given_back_after(*used_s: float) -> list[int]:
    """Return the seconds after which memory is given back, of the CPU time of each."""
    idle = IdleMemory()
    return [n for n, total in enumerate(itertools.accumulate(used_s), 1) if idle.second_passed(total)]


def test_memory_is_given_back_once_when_a_burst_was_over_for_some_seconds() -> None:
    assert given_back_after(*[0.0] * 20, *[1.5] * 3, *[0.002] * 60) == [23 + QUIET_S]


def test_each_burst_counts() -> None:
    burst = [1.0, *[0.0] * 9]

    assert given_back_after(*burst * 3) == [1 + QUIET_S, 11 + QUIET_S, 21 + QUIET_S]


def test_a_trickle_of_requests_does_not_keep_the_memory_of_a_burst() -> None:
    assert given_back_after(1.0, *[0.04] * 30) == [1 + QUIET_S]


@pytest.mark.parametrize("used_s", [[1.0], [0.09], [0.001], [1.0, 0.2], [1.0, *[0.0] * (QUIET_S - 1)]])
def test_steady_load_and_no_load_and_short_pauses_give_back_nothing(used_s: list[float]) -> None:
    assert given_back_after(*used_s * 50) == []
