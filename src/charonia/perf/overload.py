"""Whether an open loop asks more than the server can do: requests pile up as long as it lasts. Pure.

A server that stalls now and then lets requests pile up too, and works them off again. Overload is growth that goes on:
the line through the backlog rises by more than a few requests in a hundred that arrive, and by far more than the
backlog swings around it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_POINTS = 64
_GROWTH_MIN = 0.03
_ARRIVALS_MIN = 50
_SWINGS = 3.0


@dataclass(frozen=True, slots=True)
class Backlog:
    """Requests without an answer over a time.

    Attributes:
        begin: How many at the begin.
        end: How many at the end.
        growth: By how many they grew a second.
        is_overload: Whether the growth goes on.
    """

    begin: int
    end: int
    growth: float
    is_overload: bool


def backlog(intended_ns: NDArray[np.int64], done_ns: NDArray[np.int64], begin_ns: int, end_ns: int) -> Backlog:
    """Return what happened to the backlog.

    Args:
        intended_ns: Intended send times of all requests of the level, ascending.
        done_ns: When those that ended did, ascending.
        begin_ns: Begin of the time that is looked at.
        end_ns: End of it.
    """
    at = np.linspace(begin_ns, end_ns, _POINTS)
    waiting = np.searchsorted(intended_ns, at, side="right") - np.searchsorted(done_ns, at, side="right")
    seconds = (at - begin_ns) / 1e9
    arrived = int(np.searchsorted(intended_ns, end_ns) - np.searchsorted(intended_ns, begin_ns))
    first, last = int(waiting[0]), int(waiting[-1])
    if arrived < _ARRIVALS_MIN or end_ns <= begin_ns:
        return Backlog(first, last, 0.0, False)
    growth, base = (float(number) for number in np.polyfit(seconds, waiting, 1))
    swing = float(np.std(waiting - (growth * seconds + base)))
    risen = growth * seconds[-1]
    overload = risen > max(_GROWTH_MIN * arrived, _SWINGS * swing, 2.0)
    return Backlog(first, last, growth, bool(overload))
