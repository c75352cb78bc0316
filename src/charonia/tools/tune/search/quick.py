"""Hill climbing on the grid of variants, starting from the smallest values. Pure.

Each point is measured under one load that fills its batches, or, where the loads are given, under the closest of them.
A few points around the current one give the direction, and their gain gives the length of the next step. When steps no
longer improve, the direct neighbours decide: the climb ends on a point that is better than all of its neighbours.
"""

import math
from collections.abc import Sequence

from charonia.tools.results.records import LoadMode
from charonia.tools.tune.objective import Point, gain
from charonia.tools.tune.search import load
from charonia.tools.tune.search.trial_driver import USUAL, Steps, TrialDriver
from charonia.tools.tune.space import Coordinate

RADIUS = 3
"""Distance of the points that give the direction."""

_SAMPLES_MIN = 3
_STEP_GAINS = (0.09, 0.3, 1.0)
"""Gains in a direction from which on the next step is 1, 2 and 3 values long."""

_STEPS_MAX = 1000


def explore(driver: TrialDriver) -> Steps[None]:
    """Climb until no neighbour is better."""
    if not driver.grid.shape:
        return
    climber = _Climber(driver)
    home: Coordinate = (0,) * len(driver.grid.shape)
    yield from climber.visit(home)
    for _ in range(_STEPS_MAX):
        there = yield from climber.leap(home)
        if there == home:
            there = yield from climber.step(home)
        if there == home:
            driver.note(f"No neighbour of '{driver.grid.variant(home)}' is better.")
            return
        home = there


class _Climber:
    def __init__(self, driver: TrialDriver) -> None:
        self._bench = driver
        self._points: dict[Coordinate, Point | None] = {}

    def visit(self, coordinate: Coordinate) -> Steps[Point | None]:
        """Measure a point."""
        if coordinate not in self._points:
            driver, loads = self._bench, self._bench.grid.space.load
            variant = driver.grid.variant(coordinate)
            if loads.values or loads.mode is LoadMode.REQUEST_RATE:
                yield from load.climb(driver, variant, USUAL, "hill climbing")
            else:
                for batch_size in loads.batch_sizes:
                    yield from driver.measure(variant, driver.formula(variant, batch_size), USUAL, "hill climbing")
            self._points[coordinate] = driver.evidence.best(variant)
        return self._points[coordinate]

    def leap(self, home: Coordinate) -> Steps[Coordinate]:
        """Return the point that samples around home lead to, or home if that is no better."""
        around = list(self._bench.grid.neighbours(home, RADIUS))
        samples = [coordinate for coordinate in around if self._points.get(coordinate)]
        while len(samples) < _SAMPLES_MIN:
            fresh = [coordinate for coordinate in around if coordinate not in self._points]
            if not fresh:
                break
            # Python's max keeps the first, and so the nearest, of equals.
            chosen = max(fresh, key=lambda coordinate: _new_values(coordinate, (home, *samples)))
            if (yield from self.visit(chosen)):
                samples.append(chosen)
        target = self._target(home, samples)
        yield from self.visit(target)
        return max((home, target, *samples), key=self._order)

    def step(self, home: Coordinate) -> Steps[Coordinate]:
        """Return the best of home and its neighbours; points whose difference may be noise are measured once more."""
        near = [home, *self._bench.grid.neighbours(home, math.isqrt(len(home) - 1) + 1)]
        near = [other for other in near if max(abs(a - b) for a, b in zip(home, other, strict=True)) <= 1]
        for coordinate in near:
            yield from self.visit(coordinate)
        best = max(near, key=self._order)
        rival = best if best != home else max(near[1:], key=self._order, default=home)
        yield from self._repeat(home, rival)
        return max(near, key=self._order)

    def _repeat(self, home: Coordinate, rival: Coordinate) -> Steps[None]:
        pair = [point for point in (self._points[home], self._points[rival]) if point]
        if len(pair) < len((home, rival)) or home == rival:
            return
        difference = gain(pair[1], pair[0], self._bench.goal.confidence)
        if difference.low >= 0 or difference.high <= 0:
            return
        for coordinate, point in zip((home, rival), pair, strict=True):
            if len(point.trial_numbers) == 1:
                yield from self._bench.again(point.variant, point.loads, USUAL, "whether this is the top")
                self._points[coordinate] = self._bench.evidence.point(point.variant, point.loads)

    def _order(self, coordinate: Coordinate) -> tuple[bool, float]:
        point = self._points.get(coordinate)
        return point.order if point else (False, -math.inf)

    def _target(self, home: Coordinate, samples: Sequence[Coordinate]) -> Coordinate:
        """Return the point in the direction of the samples' gains over home."""
        here = self._points.get(home)
        offsets = [(self._weight(here, self._points[other]), other) for other in samples]
        moved = []
        for axis, index in enumerate(home):
            total = sum(weight * _sign(other[axis] - index) for weight, other in offsets)
            distance = sum(abs(other[axis] - index) for _, other in offsets)
            slope = total / distance if distance else 0.0
            length = sum(abs(slope) > threshold for threshold in _STEP_GAINS)
            moved.append(min(max(index + length * _sign(slope), 0), self._bench.grid.shape[axis] - 1))
        return tuple(moved)

    def _weight(self, here: Point | None, there: Point | None) -> float:
        if here is None or there is None:
            return 0.0
        if here.violation or there.violation:
            return max(-1.0, min(1.0, here.violation - there.violation))
        return gain(there, here, self._bench.goal.confidence).value


def _new_values(coordinate: Coordinate, known: Sequence[Coordinate]) -> int:
    """Return in how many dimensions a coordinate has a value that no known one has."""
    return sum(all(index != other[axis] for other in known) for axis, index in enumerate(coordinate))


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)
