"""Whether more measurements can still tell two variants apart. Pure.

The rule is that of a trial which ends early for futility: what is still to come may move the difference by about its
present uncertainty, and where even that is not likely to make it significant, the verdict is known already.

Source: Lan, Simon, Halperin, Stochastically curtailed testing in long-term clinical trials (1982).
"""

import math
from dataclasses import replace
from statistics import NormalDist

from charonia.tools.results.student import student
from charonia.tools.tune.objective import Point, Score, counted

CHANCE_MIN = 0.2
"""Least chance of a verdict that is worth further measurements."""


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
    """Return the score as it will be known with so many measurements more, were its value to stay."""
    before, later = (counted(count) for count in (point.count, point.count + left))
    error = point.score.error * math.sqrt(before / later)
    return replace(point.score, error=error, freedom=point.score.freedom + 2 * left)
