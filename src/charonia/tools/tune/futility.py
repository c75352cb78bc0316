"""Whether further measurements can still tell two variants apart. Pure.

This is the futility rule of clinical trials: the remaining measurements may move the difference by about its present
uncertainty. If even that is unlikely to make it significant, the verdict is already known.

Source: Lan, Simon, Halperin, Stochastically curtailed testing in long-term clinical trials (1982).
"""

import math
from dataclasses import replace
from statistics import NormalDist

from charonia.tools.results.student import student
from charonia.tools.tune.objective import Point, Score, counted

CHANCE_MIN = 0.2
"""Probability of a verdict below which further measurements are not worth their time."""


def may_decide(one: Point, other: Point, level: float, left: int) -> bool:
    """Return whether two points may still turn out significantly different.

    Args:
        one: A point.
        other: Another one.
        level: Confidence of the comparison.
        left: Measurements of each that are still to come.
    """
    if not left or one.violation or other.violation:
        return bool(left)
    now = math.hypot(one.score.error, other.score.error)
    after = [_after(point, left) for point in (one, other)]
    later = math.hypot(*(score.error for score in after))
    needed = student(level, min(score.freedom for score in after)) * later
    reach = NormalDist().inv_cdf(1 - CHANCE_MIN) * now
    return abs(one.score.value - other.score.value) + reach > needed


def _after(point: Point, left: int) -> Score:
    """Return the score with the uncertainty that it would have after more measurements with the same mean."""
    before, later = (counted(count) for count in (point.count, point.count + left))
    error = point.score.error * math.sqrt(before / later)
    return replace(point.score, error=error, freedom=point.score.freedom + 2 * left)
