"""When an open loop sends: pure, seeded, and the same for every process of a run.

A schedule is an endless list of offsets from the begin of a level. Several processes each make all of it and take every
n-th arrival, so that their number changes nothing about what the server sees.
"""

from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from charonia.core.errors import invalid
from charonia.tools.perf.api import Distribution

_BLOCK = 1024
SECOND_NS = 1_000_000_000


def constant(rate: float) -> Iterator[int]:
    """Yield offsets in nanoseconds at equal distances, the first at 0.

    Args:
        rate: Arrivals a second.
    """
    number = 0
    while True:
        # From the number, not from the one before: rounding does not add up.
        yield round(number * SECOND_NS / rate)
        number += 1


def poisson(rate: float, seed: int) -> Iterator[int]:
    """Yield offsets in nanoseconds with exponential gaps.

    Args:
        rate: Arrivals a second, on average.
        seed: The same seed gives the same arrivals.
    """
    random = np.random.default_rng(seed)
    at = 0.0
    while True:
        times: NDArray[np.float64] = at + np.cumsum(random.exponential(SECOND_NS / rate, _BLOCK))
        at = float(times[-1])
        yield from np.rint(times).astype(np.int64).tolist()


def intervals(gaps_ns: tuple[int, ...]) -> Iterator[int]:
    """Yield offsets in nanoseconds with these gaps, over and over; the first is one gap after the begin."""
    at = 0
    while True:
        for gap in gaps_ns:
            at += gap
            yield at


def interval_rate(gaps_ns: tuple[int, ...]) -> float:
    """Return the arrivals a second of `intervals`.

    Raises:
        ServingError: INVALID_ARG when there is no gap, one is negative, or all are 0.
    """
    if not gaps_ns or min(gaps_ns) < 0 or not sum(gaps_ns):
        raise invalid("request intervals: expected at least one, none negative and not all of them 0")
    return len(gaps_ns) * SECOND_NS / sum(gaps_ns)


def arrivals(distribution: Distribution, rate: float, gaps_ns: tuple[int, ...], seed: int) -> Iterator[int]:
    """Yield the offsets of a level.

    Args:
        distribution: How arrivals are spread, where there are no gaps.
        rate: Arrivals a second.
        gaps_ns: Custom gaps, which go before all else; empty for none.
        seed: For what is drawn at random.
    """
    if gaps_ns:
        return intervals(gaps_ns)
    return poisson(rate, seed) if distribution is Distribution.POISSON else constant(rate)


def share(schedule: Iterator[int], process: int, process_count: int) -> Iterator[int]:
    """Yield the arrivals of one process: every `process_count`-th, the first being number `process`."""
    return islice(schedule, process, None, process_count)


def split(total: int, process_count: int) -> list[int]:
    """Return `total` in parts that differ by at most one, larger ones first."""
    return [total // process_count + (part < total % process_count) for part in range(process_count)]
