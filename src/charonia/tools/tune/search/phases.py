"""The phases of a search: the default configuration, the search mode, and the finalists. Pure.

At the end, it finds the best variants' limits of load, then repeats them until the verdict is certain.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist

from charonia.core.errors import invalid
from charonia.tools.results.records import student
from charonia.tools.tune.api import (
    Goal,
    Outcome,
    SearchMode,
    SearchOptions,
    SearchSpace,
    Skipped,
    Told,
    Trial,
    Variant,
)
from charonia.tools.tune.objective import Point, Score, confidence_of_looks, counted, gain
from charonia.tools.tune.search import load
from charonia.tools.tune.search.explore import brute_force, halve, raise_delays
from charonia.tools.tune.search.trial_driver import USUAL, OutOfBudget, Steps, TrialDriver

_TIME_SHARES = (0.6, 0.75, 1.0, 1.0)
"""Shares of the time budget by which the phases have to end."""

_TRIALS_SHARE = 0.5
"""Share of the measurements reserved for the phases after the search."""


def _steps(driver: TrialDriver) -> Steps[None]:
    later = int(driver.options.trials_max * _TRIALS_SHARE)
    finalists = (driver.options.finalist_count + 1) * driver.options.repeats_max
    phases: tuple[tuple[str, Callable[[TrialDriver], Steps[None]], int], ...] = (
        ("search", _explore, min(later, 2 * finalists)),
        ("search for the edges of the constraints", refine, min(later, finalists)),
        ("repeats of the finalists", repeat, 0),
        ("comparison with what looks better", settle, 0),
    )
    for (name, phase, reserve), share in zip(phases, _TIME_SHARES, strict=True):
        driver.begin(share, reserve)
        try:
            yield from phase(driver)
        except OutOfBudget as limit:
            driver.note(f"The {name} ended early: {limit}.")
        if not driver.evidence.variants():
            return


def _explore(driver: TrialDriver) -> Steps[None]:
    yield from load.sweep(driver, driver.default, USUAL, "default configuration")
    yield from (halve if driver.options.mode is SearchMode.RACE else brute_force)(driver)
    yield from raise_delays(driver)


class Search:
    """A search: a state machine without clock, network and files. The same outcomes lead to the same trials.

    To resume, create the same search again and tell it the journal's outcomes of its trials.
    """

    def __init__(self, space: SearchSpace, goal: Goal, options: SearchOptions) -> None:
        """Prepare it.

        Raises:
            ServingError: INVALID_ARGUMENT for too many variants.
        """
        self._bench = TrialDriver(space, goal, options)
        self._steps = _steps(self._bench)
        self._trial: Trial | None = None
        self._has_begun = self._has_ended = False

    def ask(self) -> Trial | None:
        """Return what to measure next, None at the end. Until `tell` it returns the same trial."""
        if not self._has_begun:
            self._has_begun = True
            self._advance(None)
        return self._trial

    def tell(self, outcome: Outcome) -> None:
        """Take the outcome of the trial that `ask` returned."""
        if self._trial is None:
            raise invalid("no trial is open whose outcome could be told", hint="ask first")
        self._advance(outcome)

    def _advance(self, outcome: Outcome | None) -> None:
        try:
            self._trial = next(self._steps) if outcome is None else self._steps.send(outcome)
        except StopIteration:
            self._trial = None
            self._has_ended = True

    @property
    def history(self) -> tuple[Told, ...]:
        """All trials and outcomes told, in order."""
        return tuple(self._bench.history)

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Variants that were not measured, and why."""
        return tuple(self._bench.skipped.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """Decisions of the search, one sentence each: where it stopped, and the dropped variants with reasons."""
        return tuple(self._bench.notes)

    @property
    def trials_left(self) -> int:
        """Most trials to come."""
        return 0 if self._has_ended else self._bench.left


TIE = 0.02
"""Variants are equally good if the interval of their difference lies within this share."""

CLEAR = 0.05
"""A configuration that looks better than the recommended one by more than this is measured again."""

_REFINED_MAX = 12
_REPEATS_MIN = 2


def refine(driver: TrialDriver) -> Steps[None]:
    """Sweep the loads of the best variants, and approach the limits of the constraints while that may win."""
    for best in driver.evidence.ranking()[: driver.options.finalist_count]:
        yield from _sweep_loads(driver, best.variant)
    yield from _sweep_loads(driver, driver.default)
    yield from load.approach_edges(driver, driver.default, USUAL)
    promising = [(point, point.variant) for v in driver.evidence.variants() if (point := load.potential(driver, v))]
    promising.sort(key=lambda pair: pair[0].score.value, reverse=True)
    promising.sort(key=lambda pair: _keeps(driver, pair[1]), reverse=True)
    for point, variant in promising[:_REFINED_MAX]:
        leader = driver.evidence.ranking()[0]
        if not leader.violation and point.score.value <= leader.score.value:
            continue
        yield from load.approach_edges(driver, variant, USUAL)


def _sweep_loads(driver: TrialDriver, variant: Variant) -> Steps[None]:
    yield from load.sweep(driver, variant, USUAL, "loads of the best variants")


def _keeps(driver: TrialDriver, variant: Variant) -> bool:
    best = driver.evidence.best(variant)
    return best is not None and not best.violation


def repeat(driver: TrialDriver) -> Steps[None]:
    """Measure the best variants and the default one in turn until one is better, or they are as good as each other."""
    count = max(1, driver.options.finalist_count)
    finalists = [point for point in driver.evidence.ranking() if not point.variant.is_default][:count]
    running = [(point.variant, point.loads) for point in finalists]
    default = driver.evidence.best(driver.default)
    if default:
        # Under its own best load and that of the best: a gain that is only one of the load is none of the variant.
        both = [default.loads, *(point.loads for point in finalists[:1])]
        running += [(driver.default, loads) for loads in dict.fromkeys(both)]
    for number in range(1, driver.options.repeats_max + 1):
        for variant, loads in running:
            yield from driver.again(variant, loads, driver.repeat_effort, "repeat of the best")
        points = [point for variant, loads in running if (point := driver.evidence.point(variant, loads))]
        left = driver.options.repeats_max - number
        if number < _REPEATS_MIN and not _is_early_enough(driver, points, left):
            continue
        points = _still_running(driver, points)
        # Where there is nothing to compare, only the repeats show how much a measurement varies.
        if finalists and (len(points) <= 1 or _settled(driver, points, left)):
            return
        running = [(point.variant, point.loads) for point in points]


def settle(driver: TrialDriver) -> Steps[None]:
    """Measure again the present recommendation, and variants that look clearly better.

    So a report does not recommend one configuration and show a better one: variants that were lucky in a brief
    measurement fall back, and better ones win.
    """
    rounds = 0
    while rounds < driver.options.repeats_max and (champion := _champion(driver)) is not None:
        rivals = [point for point in driver.evidence.ranking() if _challenges(driver, point, champion)]
        if not rivals:
            return
        # Briefly measured variants come first, one time each.
        rival = min(rivals, key=lambda point: (point.effort, -point.score.value))
        if rival.effort < driver.repeat_effort:
            yield from driver.again(rival.variant, rival.loads, driver.repeat_effort, "whether it is better")
            continue
        rounds += 1
        for point in (rival, champion):
            yield from driver.again(point.variant, point.loads, driver.repeat_effort, "whether it is better")


def _champion(driver: TrialDriver) -> Point | None:
    """Return the present recommendation, None if there is no default configuration to compare with."""
    default, first = driver.evidence.best(driver.default), driver.evidence.ranking()[0]
    if default is None or default.violation or first.violation:
        return None
    return first if gain(first, default, _level(driver)).low > 0 else default


def _challenges(driver: TrialDriver, point: Point, champion: Point) -> bool:
    return (
        point.variant != champion.variant
        and not point.violation
        and gain(point, champion, _level(driver)).value > CLEAR
    )


def _is_early_enough(driver: TrialDriver, points: list[Point], left: int) -> bool:
    """Return whether one repeat is enough: all were measured twice, and nothing better than the default is in sight.

    A variant that seems better may owe that to one lucky measurement, so it is measured again.
    """
    default = [point for point in points if point.variant.is_default]
    if not default or min(point.count for point in points) < _REPEATS_MIN:
        return False
    best = max(default, key=lambda point: point.order)
    return not any(
        point.order > best.order and may_decide(point, best, _level(driver), left)
        for point in points
        if not point.variant.is_default
    )


def _still_running(driver: TrialDriver, points: list[Point]) -> list[Point]:
    leader = max(points, key=lambda point: point.order, default=None)
    return [point for point in points if leader and may_win(leader, point, _level(driver))]


def may_win(leader: Point, point: Point, level: float) -> bool:
    """Return whether a point may still turn out as good as the leader."""
    if leader.violation:
        return True
    return not point.surely_violates and gain(leader, point, level).low <= 0


def _settled(driver: TrialDriver, points: list[Point], left: int) -> bool:
    """Return whether the rest are as good as the leader, or no other measurement would distinguish them."""
    leader = max(points, key=lambda point: point.order)
    if leader.violation:
        return False
    others = [point for point in points if point is not leader]
    return all(_tied(driver, leader, other) or not may_decide(other, leader, _level(driver), left) for other in others)


def _tied(driver: TrialDriver, leader: Point, point: Point) -> bool:
    difference = gain(point, leader, _level(driver))
    return difference.low >= -TIE and difference.high <= TIE


def _level(driver: TrialDriver) -> float:
    return confidence_of_looks(driver.goal, driver.options)


CHANCE_MIN = 0.2
"""Probability of a verdict below which more measurements are not worth their time."""


def may_decide(one: Point, other: Point, level: float, left: int) -> bool:
    """Return whether two points may still turn out significantly different.

    This is the futility rule of clinical trials: the remaining measurements may move the difference by about its
    present uncertainty. If even that is unlikely to make it significant, the verdict is already known.

    Source: Lan, Simon, Halperin, Stochastically curtailed testing in long-term clinical trials (1982).
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
