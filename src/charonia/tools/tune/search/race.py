"""Racing: a brief look at everything, and more and more time for fewer and fewer. Pure.

Each round measures what is left with twice the effort. Who is significantly worse than the leader is out; where
intervals do not tell enough apart, only the best part goes on (sequential halving), so that a round never costs more
than the one before. The last rounds, for the finalists, are `final.refine` and `final.repeat`.

Source: Maron and Moore, Hoeffding races (1994); Karnin, Koren, Somekh, Almost optimal exploration (2013).
"""

import itertools
import math
from random import Random

from charonia.tools.tune.api import Variant
from charonia.tools.tune.objective import Point, gain
from charonia.tools.tune.search import load
from charonia.tools.tune.search.bench import USUAL, Bench, Steps
from charonia.tools.tune.space import Coordinate

FIRST_LOOK_MAX = 128
"""Most variants of the first round. Of a larger space it takes a spread, and then the neighbours of the best."""

_NEIGHBOUR_ROUNDS_MAX = 8
_KEPT = 4  # one of so many gets a second look


def explore(bench: Bench) -> Steps[None]:
    """Race all variants down to a few."""
    order = _spread(bench)
    # Shuffled, a good one comes early and throws the others out, and a short budget reaches a fair sample.
    Random(bench.options.seed).shuffle(order)
    coordinates = {bench.grid.variant(coordinate).key: coordinate for coordinate in order}
    for coordinate in coordinates.values():
        yield from _look(bench, coordinate)
    yield from _visit_neighbours(bench, coordinates)
    for variant in _survivors(bench, max(2 * bench.options.finalist_count, len(coordinates) // _KEPT)):
        point = bench.evidence.best(variant)
        if point:
            yield from bench.measure(variant, point.loads, USUAL, "second look")


def _spread(bench: Bench) -> list[Coordinate]:
    """Return the coordinates of the first round: all in order, or a spread of a large space, corners included."""
    every = list(bench.grid.coordinates())
    if len(every) <= FIRST_LOOK_MAX:
        return every
    shape = bench.grid.shape
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


def _look(bench: Bench, coordinate: Coordinate) -> Steps[None]:
    yield from load.climb(bench, bench.grid.variant(coordinate), bench.look_effort, "first look")


def _visit_neighbours(bench: Bench, seen: dict[str, Coordinate]) -> Steps[None]:
    """Look at the neighbours of the best, and at those of what is better then, until nothing new is near."""
    for _ in range(_NEIGHBOUR_ROUNDS_MAX):
        best = [point.variant.key for point in bench.evidence.ranking()[: bench.options.finalist_count]]
        near = [other for key in best if key in seen for other in bench.grid.neighbours(seen[key])]
        new = {bench.grid.variant(coordinate).key: coordinate for coordinate in near}
        new = {key: coordinate for key, coordinate in new.items() if key not in seen}
        if not new:
            return
        seen |= new
        for coordinate in new.values():
            yield from _look(bench, coordinate)


def _survivors(bench: Bench, count: int) -> list[Variant]:
    """Return at most so many variants that may still win, the most promising first."""
    ranking = bench.evidence.ranking()
    if not ranking:
        return []
    leader = ranking[0]
    hopes = [(hope, point) for point in ranking if (hope := load.potential(bench, point.variant))]
    left = [(hope, point) for hope, point in hopes if _hopeful(bench, leader, point, hope)]
    left.sort(key=lambda pair: (pair[1].violation == 0, pair[0].score.value), reverse=True)
    kept = [point.variant for _, point in left[:count]]
    bench.note(
        f"{len(ranking) - len(kept)} of {len(ranking)} variants dropped after {len(bench.history)} measurements."
    )
    return kept


def _hopeful(bench: Bench, leader: Point, point: Point, hope: Point) -> bool:
    """Return whether a variant may win, by its best point and what it may reach at the edge of the constraints."""
    if leader.violation:
        return True
    return not point.surely_violates and gain(hope, leader, bench.goal.confidence).high >= 0
