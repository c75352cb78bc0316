"""The loads that a variant is measured under: a sweep up to the plateau, and the limit that constraints set. Pure."""

import itertools
import math
from collections.abc import Sequence

from charonia.tools.results.records import LoadMode
from charonia.tools.tune.api import Metric, Variant
from charonia.tools.tune.objective import Point, gain
from charonia.tools.tune.search.trial_driver import Steps, TrialDriver
from charonia.tools.tune.space import load_values

PLATEAU = 0.05
"""Three loads in a row that gain at most this over the previous load are the plateau."""

_PLATEAU_LOADS = 3
_RATE_PRECISION = 0.02
_FAILED_LOADS_MAX = 2


def sweep(driver: TrialDriver, variant: Variant, effort: float, purpose: str) -> Steps[None]:
    """Measure a variant under growing loads, until throughput no longer grows or the constraints are missed."""
    load = driver.grid.space.load
    for batch_size in load.batch_sizes:
        if load.formula:
            yield from driver.measure(variant, driver.formula(variant, batch_size), effort, purpose)
        else:
            yield from _sweep(driver, variant, batch_size, effort, purpose)


def _sweep(driver: TrialDriver, variant: Variant, batch_size: int, effort: float, purpose: str) -> Steps[None]:
    load = driver.grid.space.load
    points: list[Point] = []
    failed = 0
    for value in load_values(load):
        point = yield from driver.measure(variant, driver.loads(value, batch_size), effort, purpose)
        if point is None:
            failed += 1
            if failed == _FAILED_LOADS_MAX or not driver.fits(variant):
                return
            continue
        points.append(point)
        if load.values and not load.stops_early:
            continue
        if _missed(points) or (yield from _levelled(driver, points, effort)):
            return


def _missed(points: Sequence[Point]) -> bool:
    """Return whether more load would only miss the constraints by more."""
    if len(points) < 2 or not points[-1].violation:
        return False
    if not points[-2].violation:
        return points[-1].surely_violates
    return points[-1].violation >= points[-2].violation


def _levelled(driver: TrialDriver, points: list[Point], effort: float) -> Steps[bool]:
    """Return whether the last loads gained nothing. If noise may be the reason, they are measured once more."""
    if len(points) <= _PLATEAU_LOADS:
        return False
    before, best = points[-_PLATEAU_LOADS - 1], max(points[-_PLATEAU_LOADS:], key=lambda point: point.order)
    if _rises(before, best):
        return False
    undecided = gain(best, before, driver.goal.confidence).high > PLATEAU
    if undecided and not before.violation and len(before.trial_numbers) == len(best.trial_numbers) == 1:
        for point in (before, best):
            yield from driver.again(point.variant, point.loads, effort, "whether this is the plateau")
        before, best = _fresh(driver, before), _fresh(driver, best)
        points[:] = [_fresh(driver, point) for point in points]
        return not _rises(before, best)
    return True


def _rises(before: Point, after: Point) -> bool:
    if before.violation:
        return not after.violation or after.violation < before.violation * (1 - PLATEAU)
    return not after.violation and after.score.value - before.score.value > math.log1p(PLATEAU)


def _fresh(driver: TrialDriver, point: Point) -> Point:
    return driver.evidence.point(point.variant, point.loads) or point


def edges(driver: TrialDriver, variant: Variant) -> list[tuple[Point, Point]]:
    """Return two neighbouring points of a variant: the first keeps the constraints, the second does not.

    At most two for each batch size: the smallest load that keeps them and the largest.
    """
    found = []
    by_batch: dict[int, list[Point]] = {}
    for point in driver.evidence.points(variant):
        if len({load.value for load in point.loads}) == 1:
            by_batch.setdefault(point.loads[0].batch_size, []).append(point)
    for points in by_batch.values():
        points.sort(key=lambda point: point.loads[0].value)
        pairs = list(itertools.pairwise(points))
        rising = [(after, before) for before, after in pairs if before.violation and not after.violation]
        falling = [(before, after) for before, after in pairs if not before.violation and after.violation]
        found += rising[:1] + falling[-1:]
    return found


def potential(driver: TrialDriver, variant: Variant) -> Point | None:
    """Return the best score that a variant may reach at the limit of the constraints, None if it was not measured.

    Between a load that keeps the constraints and one that misses them, the objective lies between the two.
    """
    best = driver.evidence.best(variant)
    if best is None or best.violation or not searches_edges(driver):
        return best
    return max([best, *(outside for _, outside in edges(driver, variant))], key=lambda point: point.score.value)


def searches_edges(driver: TrialDriver) -> bool:
    """Return whether loads between the sweep's may be measured: not if the user named the loads."""
    load = driver.grid.space.load
    return not load.values and not load.formula and load.binary_steps_max > 0


def approach_edges(driver: TrialDriver, variant: Variant, effort: float) -> Steps[None]:
    """Find the limits that the constraints set, by bisection."""
    if not searches_edges(driver):
        return
    for inside, outside in edges(driver, variant):
        for _ in range(driver.grid.space.load.binary_steps_max):
            value = _middle(driver, inside, outside)
            if value is None:
                break
            loads = driver.loads(value, inside.loads[0].batch_size)
            point = yield from driver.measure(variant, loads, effort, "edge of the constraints")
            if point is None:
                break
            inside, outside = (inside, point) if point.violation else (point, outside)


def _middle(driver: TrialDriver, inside: Point, outside: Point) -> float | None:
    low, high = sorted((inside.loads[0].value, outside.loads[0].value))
    if driver.grid.space.load.mode is LoadMode.CONCURRENCY:
        return float((low + high) // 2) if high - low >= 2 else None
    return (low + high) / 2 if high - low > _RATE_PRECISION * low else None


def climb(driver: TrialDriver, variant: Variant, effort: float, purpose: str) -> Steps[None]:
    """Measure a variant with full batches, and continue in the direction that improves it."""
    load = driver.grid.space.load
    for batch_size in load.batch_sizes:
        formula = driver.formula(variant, batch_size)
        if load.formula:
            yield from driver.measure(variant, formula, effort, purpose)
            continue
        values = load_values(load)
        wanted = max(point.value for point in formula)
        if load.mode is LoadMode.REQUEST_RATE:
            known = driver.evidence.best(driver.default)
            wanted = known.loads[0].value if known else values[0]
        start = next((index for index, value in enumerate(values) if value >= wanted), len(values) - 1)
        yield from _climb(driver, variant, (batch_size, start), effort, purpose)


def _climb(driver: TrialDriver, variant: Variant, origin: tuple[int, int], effort: float, purpose: str) -> Steps[None]:
    batch_size, start = origin
    values = load_values(driver.grid.space.load)
    first = yield from driver.measure(variant, driver.loads(values[start], batch_size), effort, purpose)
    if first is None or _hopeless(driver, first):
        return
    for step in (-1, 1) if first.violation else (1, -1):
        here, index = first, start + step
        while 0 <= index < len(values):
            point = yield from driver.measure(variant, driver.loads(values[index], batch_size), effort, purpose)
            if point is None or not _better(here, point):
                break
            here, index = point, index + step
        if here is not first:
            return


def _hopeless(driver: TrialDriver, first: Point) -> bool:
    """Return whether no other load can make a variant win, given its measurement with full batches.

    Less load never brings more throughput, and more than fills the batches brings only a little.
    """
    if any(objective.metric is not Metric.THROUGHPUT for model in driver.goal.models for objective in model.objectives):
        return False
    leader = driver.evidence.ranking()[0]
    lacking = 0.0 if first.violation else _ROOM_ABOVE
    return not leader.violation and gain(first, leader, driver.goal.confidence).high < -lacking


def _better(here: Point, there: Point) -> bool:
    """Return whether a load is better: the constraints are kept or missed by less, or the gain is significant."""
    if here.violation:
        return not there.violation or there.violation < here.violation
    return not there.violation and there.score.value - here.score.value > math.log1p(_WORTH_A_STEP)


_WORTH_A_STEP = 0.01
_ROOM_ABOVE = 0.2  # what more load than fills the batches may bring at most
