"""Successive halving: a short measurement of every variant, then more time for fewer and fewer of them. Pure.

Each round measures the survivors with twice the effort. A variant that is significantly worse than the leader drops
out; if the intervals overlap for too many, only the best part continues, so a round never costs more than the previous
one. The last rounds, for the finalists, are `final.refine` and `final.repeat`.

Source: Maron and Moore, Hoeffding races (1994); Karnin, Koren, Somekh, Almost optimal exploration (2013).
"""

import itertools
import math
from random import Random

from charonia.tools.tune.api import Variant
from charonia.tools.tune.objective import Point, gain
from charonia.tools.tune.search import load
from charonia.tools.tune.search.trial_driver import USUAL, Steps, TrialDriver
from charonia.tools.tune.space import Coordinate

FIRST_LOOK_MAX = 128
"""Limit of variants of the first round. It samples a larger space evenly, then the neighbours of the best."""

_NEIGHBOUR_ROUNDS_MAX = 8
_KEPT = 4  # one of this number is measured again


def explore(driver: TrialDriver) -> Steps[None]:
    """Narrow all variants down to a few."""
    order = _spread(driver)
    # In random order, a good variant comes early and eliminates others, and a short budget covers a fair sample.
    Random(driver.options.seed).shuffle(order)
    coordinates = {driver.grid.variant(coordinate).key: coordinate for coordinate in order}
    for coordinate in coordinates.values():
        yield from _look(driver, coordinate)
    yield from _visit_neighbours(driver, coordinates)
    for variant in _survivors(driver, max(2 * driver.options.finalist_count, len(coordinates) // _KEPT)):
        point = driver.evidence.best(variant)
        if point:
            yield from driver.measure(variant, point.loads, USUAL, "second look")


def _spread(driver: TrialDriver) -> list[Coordinate]:
    """Return the coordinates of the first round: all in order, or an even sample of a large space with its corners."""
    every = list(driver.grid.coordinates())
    if len(every) <= FIRST_LOOK_MAX:
        return every
    shape = driver.grid.shape
    kept = list(shape)
    while math.prod(kept) > FIRST_LOOK_MAX:
        longest = max(range(len(kept)), key=lambda axis: kept[axis])
        kept[longest] -= 1
    axes = [_evenly(size, count) for size, count in zip(shape, kept, strict=True)]
    return list(itertools.product(*axes))


def _evenly(size: int, count: int) -> list[int]:
    if count == 1:
        return [size // 2]
    return [round(index * (size - 1) / (count - 1)) for index in range(count)]


def _look(driver: TrialDriver, coordinate: Coordinate) -> Steps[None]:
    yield from load.climb(driver, driver.grid.variant(coordinate), driver.look_effort, "first look")


def _visit_neighbours(driver: TrialDriver, seen: dict[str, Coordinate]) -> Steps[None]:
    """Measure the neighbours of the best, then of any better ones, until there are no new neighbours."""
    for _ in range(_NEIGHBOUR_ROUNDS_MAX):
        best = [point.variant.key for point in driver.evidence.ranking()[: driver.options.finalist_count]]
        near = [other for key in best if key in seen for other in driver.grid.neighbours(seen[key])]
        new = {driver.grid.variant(coordinate).key: coordinate for coordinate in near}
        new = {key: coordinate for key, coordinate in new.items() if key not in seen}
        if not new:
            return
        seen |= new
        for coordinate in new.values():
            yield from _look(driver, coordinate)


def _survivors(driver: TrialDriver, count: int) -> list[Variant]:
    """Return a limited number of variants that may still win, the most promising first."""
    ranking = driver.evidence.ranking()
    if not ranking:
        return []
    leader = ranking[0]
    hopes = [(hope, point) for point in ranking if (hope := load.potential(driver, point.variant))]
    left = [(hope, point) for hope, point in hopes if _hopeful(driver, leader, point, hope)]
    left.sort(key=lambda pair: (pair[1].violation == 0, pair[0].score.value), reverse=True)
    kept = [point.variant for _, point in left[:count]]
    driver.note(
        f"{len(ranking) - len(kept)} of {len(ranking)} variants dropped after {len(driver.history)} measurements."
    )
    return kept


def _hopeful(driver: TrialDriver, leader: Point, point: Point, hope: Point) -> bool:
    """Return whether a variant may win, by its best point or by its potential at the limit of the constraints."""
    if leader.violation:
        return True
    return not point.surely_violates and gain(hope, leader, driver.goal.confidence).high >= 0
