"""Which variants to measure: successive halving or all of them, then queue delays of the best. Pure.

Successive halving measures every variant briefly, then gives more time to fewer and fewer of them. Each round measures
the survivors with twice the effort. A variant that is significantly worse than the leader drops out; if the intervals
overlap for too many, only the best part continues, so a round never costs more than the previous one. The last rounds,
for the finalists, are in `phases`.

As a dimension of the grid, the queue delay would multiply its size, and it matters little while the batch size is
wrong. So it is tried last, and only for the best few variants.

Source: Maron and Moore, Hoeffding races (1994); Karnin, Koren, Somekh, Almost optimal exploration (2013).
"""

import itertools
import math
from dataclasses import replace
from random import Random

from charonia.tools.tune.api import LoadPoint, Metric, ModelChange, ModelFacts, Variant
from charonia.tools.tune.objective import Point, gain
from charonia.tools.tune.search import load
from charonia.tools.tune.search.trial_driver import USUAL, Steps, TrialDriver
from charonia.tools.tune.space import Coordinate, instance_count, max_batch_size

FIRST_LOOK_MAX = 128
"""Limit of variants of the first round. It samples a larger space evenly, then the neighbours of the best."""

_NEIGHBOUR_ROUNDS_MAX = 8
_KEPT = 4  # one of this number is measured again


def halve(driver: TrialDriver) -> Steps[None]:
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


def brute_force(driver: TrialDriver) -> Steps[None]:
    """Measure all variants."""
    for coordinate in driver.grid.coordinates():
        yield from load.sweep(driver, driver.grid.variant(coordinate), USUAL, "brute search")


LATENCY_SHARE_MAX = 0.5
"""A delay beyond this share of the mean response time costs more than fuller batches gain."""


def raise_delays(driver: TrialDriver) -> Steps[None]:
    """Measure the best variants and the default one with growing queue delays, while these bring more."""
    best = driver.evidence.ranking()[: driver.options.finalist_count]
    default = driver.evidence.best(driver.default)
    if default and default not in best:
        best.append(default)
    for point in best:
        for facts in driver.grid.space.models:
            yield from _raise_delay(driver, point, facts)


def _raise_delay(driver: TrialDriver, point: Point, facts: ModelFacts) -> Steps[None]:
    if not _can_wait(point, facts):
        return
    here = point
    for delay_us in facts.queue_delays_us:
        if delay_us > _longest_us(point):
            return
        variant = delayed(driver, point.variant, facts.name, delay_us)
        there = yield from driver.measure(variant, point.loads, USUAL, "queue delay")
        if there is None or gain(there, here, driver.goal.confidence).value <= 0:
            return
        here = there


def delayed(driver: TrialDriver, variant: Variant, model: str, delay_us: int) -> Variant:
    """Return a variant with a queue delay for a model."""
    changes = tuple(
        variant.change(facts.name) if facts.name != model else replace(variant.change(model), queue_delay_us=delay_us)
        for facts in driver.grid.space.models
    )
    return Variant(changes)


def _can_wait(point: Point, facts: ModelFacts) -> bool:
    """Return whether waiting can fill batches: batching is on, and more than one request per batch is in flight."""
    change = point.variant.change(facts.name)
    size = max_batch_size(facts, change)
    if not facts.queue_delays_us or size < 2 or not _batches(facts, change):
        return False
    return all(
        _items(load, point) >= 2 * instance_count(facts, change) and load.batch_size < size for load in point.loads
    )


def _batches(facts: ModelFacts, change: ModelChange) -> bool:
    return facts.is_batching or change.max_batch_size is not None


def _items(load: LoadPoint, point: Point) -> float:
    """Return how many items are in flight, by Little's law: arrivals in a response time."""
    return _metric_of(point, load.model, Metric.THROUGHPUT) * _metric_of(point, load.model, Metric.LATENCY_AVG) / 1e3


def _longest_us(point: Point) -> float:
    return LATENCY_SHARE_MAX * min(_metric_of(point, model, Metric.LATENCY_AVG) for model in point.metrics) * 1e3


def _metric_of(point: Point, model: str, metric: Metric) -> float:
    """Return a metric, 0 if it was not measured: then no delay is tried."""
    estimate = point.metrics[model].get(metric)
    return estimate.value if estimate else 0.0
