"""Selects the next level: a sweep, or a binary search for the highest level within the latency limit. Pure."""

import math
from collections.abc import Generator

from charonia.tools.perf.api import LoadPlan
from charonia.tools.results.records import LoadMode

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
