"""The levels of a run, and the send times of an open loop. Pure. Choices are seeded, and the same in every worker.

The next level comes from a sweep, or from a binary search for the highest one within the latency limit.

A schedule is an endless series of offsets from the start of a level. Each worker generates all of it and takes every
n-th arrival, so that the load does not depend on the number of workers.
"""

import math
from collections.abc import Generator, Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from charonia.core.errors import invalid
from charonia.tools.perf.api import Distribution, LoadPlan
from charonia.tools.results.records import LoadMode

_BLOCK = 1024
SECOND_NS = 1_000_000_000


def constant(rate: float) -> Iterator[int]:
    """Yield equally spaced offsets in nanoseconds, the first at 0.

    Args:
        rate: Arrivals per second.
    """
    number = 0
    while True:
        # From the number, not from the previous offset, so that rounding errors do not add up.
        yield round(number * SECOND_NS / rate)
        number += 1


def poisson(rate: float, seed: int) -> Iterator[int]:
    """Yield offsets in nanoseconds with exponential gaps.

    Args:
        rate: Mean arrivals per second.
    """
    random = np.random.default_rng(seed)
    at = 0.0
    while True:
        times: NDArray[np.float64] = at + np.cumsum(random.exponential(SECOND_NS / rate, _BLOCK))
        at = float(times[-1])
        yield from np.rint(times).astype(np.int64).tolist()


def intervals(gaps_ns: tuple[int, ...]) -> Iterator[int]:
    """Yield offsets in nanoseconds with these gaps, repeated; the first is one gap after the start."""
    at = 0
    while True:
        for gap in gaps_ns:
            at += gap
            yield at


def gaps_between(times_s: Sequence[float], option: str) -> tuple[int, ...]:
    """Return the time in nanoseconds before each request of a replay; the first is sent immediately.

    Args:
        times_s: Times of the requests in seconds, ascending.
        option: Option that replays, for the error.

    Raises:
        ServingError: INVALID_ARG if several have the same time and no other, which does not define a rate.
    """
    if len(times_s) == 1:
        return (SECOND_NS,)  # a rate has to be positive
    if times_s[-1] == times_s[0]:
        raise invalid(f"{option}: expected requests at different times, got one time only")
    return tuple(
        round((time - last) * SECOND_NS) for last, time in zip((times_s[0], *times_s[:-1]), times_s, strict=True)
    )


def interval_rate(gaps_ns: tuple[int, ...]) -> float:
    """Return the arrivals per second of `intervals`.

    Raises:
        ServingError: INVALID_ARG if there is no gap, one is negative, or all are 0.
    """
    if not gaps_ns or min(gaps_ns) < 0 or not sum(gaps_ns):
        raise invalid("request intervals: expected at least one, none negative and not all of them 0")
    return len(gaps_ns) * SECOND_NS / sum(gaps_ns)


def arrivals(distribution: Distribution, rate: float, gaps_ns: tuple[int, ...], seed: int) -> Iterator[int]:
    """Yield the offsets of a level.

    Args:
        distribution: Distribution of arrivals without custom gaps.
        rate: Arrivals per second.
        gaps_ns: Custom gaps, which take precedence; empty for none.
    """
    if gaps_ns:
        return intervals(gaps_ns)
    return poisson(rate, seed) if distribution is Distribution.POISSON else constant(rate)


def share(schedule: Iterator[int], process: int, process_count: int) -> Iterator[int]:
    """Yield the arrivals of one worker: every `process_count`-th, from number `process` on."""
    return islice(schedule, process, None, process_count)


def split(total: int, process_count: int) -> list[int]:
    """Split `total` into parts that differ by at most one, larger ones first."""
    return [total // process_count + (part < total % process_count) for part in range(process_count)]


_SLACK = 1e-9  # 0.1 + 0.1 + 0.1 reaches the end of a range to 0.3

Levels = Generator[float, bool, float | None]
"""Yields values of levels, is sent whether each met the latency limit, and returns the last that did."""


def levels(plan: LoadPlan) -> Levels:
    return _binary(plan) if plan.binary_search else _linear(plan)


def level_count(plan: LoadPlan) -> int:
    """Return the number of levels, 0 if it depends on the results."""
    if plan.binary_search or math.isinf(plan.end):
        return 0
    return int((plan.end - plan.start) / plan.step + _SLACK) + 1


def _linear(plan: LoadPlan) -> Levels:
    best: float | None = None
    number, value = 0, plan.start
    while value <= plan.end * (1 + _SLACK):
        if not (yield value):
            return best
        best = value
        number += 1
        value = plan.start + number * plan.step
    return best


def _binary(plan: LoadPlan) -> Levels:
    low, high = plan.start, plan.end
    if not (yield low):
        return None
    if (yield high):
        return high
    whole = plan.mode is LoadMode.CONCURRENCY
    while high - low > plan.step:
        middle = (low + high) // 2 if whole else (low + high) / 2
        if middle in (low, high):
            break
        if (yield middle):
            low = middle
        else:
            high = middle
    return low
