"""Queue delays: whether the best variants gain by waiting for fuller batches. Pure.

As a dimension of the grid, the delay would multiply its size, and it matters little while the batch size is wrong. So
it is tried last, and only for the best few variants.
"""

from dataclasses import replace

from charonia.tools.tune.api import LoadPoint, Metric, ModelChange, ModelFacts, Variant
from charonia.tools.tune.objective import Point, gain
from charonia.tools.tune.search.trial_driver import USUAL, Steps, TrialDriver
from charonia.tools.tune.space import instance_count, max_batch_size

LATENCY_SHARE_MAX = 0.5
"""A delay beyond this share of the mean response time costs more than fuller batches gain."""


def explore(driver: TrialDriver) -> Steps[None]:
    """Measure the best variants and the default one with growing queue delays, while these bring more."""
    best = driver.evidence.ranking()[: driver.options.finalist_count]
    default = driver.evidence.best(driver.default)
    if default and default not in best:
        best.append(default)
    for point in best:
        for facts in driver.grid.space.models:
            yield from _raise(driver, point, facts)


def _raise(driver: TrialDriver, point: Point, facts: ModelFacts) -> Steps[None]:
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
    return _value(point, load.model, Metric.THROUGHPUT) * _value(point, load.model, Metric.LATENCY_AVG) / 1e3


def _longest_us(point: Point) -> float:
    return LATENCY_SHARE_MAX * min(_value(point, model, Metric.LATENCY_AVG) for model in point.metrics) * 1e3


def _value(point: Point, model: str, metric: Metric) -> float:
    """Return a metric, 0 if it was not measured: then no delay is tried."""
    estimate = point.metrics[model].get(metric)
    return estimate.value if estimate else 0.0
