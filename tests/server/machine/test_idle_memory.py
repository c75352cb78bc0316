"""When a server gives back memory: seconds of CPU time in, decisions out."""

import itertools
from fractions import Fraction

import pytest

from charonia.server.machine.memory import QUIET_S, STEPS, IdleMemory


def given_back(*used_s: float) -> list[tuple[int, float]]:
    """Return the seconds after which memory is given back and the share that stays, of the CPU time of each second."""
    idle = IdleMemory()
    shares = [(n, idle.second_passed(total)) for n, total in enumerate(itertools.accumulate(used_s), 1)]
    return [(n, share) for n, share in shares if share is not None]


def test_memory_is_given_back_in_equal_parts_when_a_burst_was_over_for_some_seconds() -> None:
    found = given_back(*[0.0] * 20, *[1.5] * 3, *[0.002] * 60)

    assert [n for n, _ in found] == [23 + step * QUIET_S for step in range(1, STEPS + 1)]
    kept = list(
        itertools.accumulate((Fraction(share).limit_denominator(STEPS) for _, share in found), lambda a, b: a * b)
    )
    assert kept == [Fraction(STEPS - step, STEPS) for step in range(1, STEPS + 1)]


def test_each_burst_begins_with_the_first_step() -> None:
    burst = [1.0, *[0.0] * 9]
    first = (STEPS - 1) / STEPS

    assert given_back(*burst * 3) == [(1 + QUIET_S, first), (11 + QUIET_S, first), (21 + QUIET_S, first)]


def test_a_trickle_of_requests_does_not_keep_the_memory_of_a_burst() -> None:
    found = given_back(1.0, *[0.04] * 60)

    assert len(found) == STEPS
    assert found[-1] == (1 + STEPS * QUIET_S, 0.0)


@pytest.mark.parametrize("used_s", [[1.0], [0.09], [0.001], [1.0, 0.2], [1.0, *[0.0] * (QUIET_S - 1)]])
def test_steady_load_and_no_load_and_short_pauses_give_back_nothing(used_s: list[float]) -> None:
    assert given_back(*used_s * 50) == []
