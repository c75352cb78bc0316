"""Predicts from the measured variants which others cannot fit in memory. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from charonia.tools.tune.api import Measured, Metric, ModelChange, SearchSpace, Told, Variant
from charonia.tools.tune.space import instance_count


def too_large(space: SearchSpace, variant: Variant, history: Sequence[Told]) -> str:
    """Return why a variant cannot fit, "" if it may.

    It cannot where the instances that it adds take more than there is, or where two measured variants that differ from
    it in the number of instances alone lie on a line that leads beyond the limit.
    """
    if not space.memory or not space.memory.limit_mb:
        return ""
    limit = space.memory.limit_mb
    expected = _added(space, variant)
    if expected > limit:
        return f"needs at least {expected:,.0f} MB of memory by what one instance takes, there are {limit:,.0f} MB"
    expected = _extrapolated(space, variant, history, space.memory.metric)
    if expected > limit:
        return f"would need about {expected:,.0f} MB of memory by what fewer instances took, there are {limit:,.0f} MB"
    return ""


def _added(space: SearchSpace, variant: Variant) -> float:
    """Return the memory of the default configuration and of the missing instances, 0 if it is unknown."""
    added = sum(
        model.instance_memory_mb * (instance_count(model, variant.change(model.name)) - model.instance_count)
        for model in space.models
    )
    return space.memory.base_mb + added if space.memory and added > 0 else 0.0


def _extrapolated(space: SearchSpace, variant: Variant, history: Sequence[Told], metric: Metric) -> float:
    wanted = _total(space, variant)
    without = _without_instances(variant)
    known: dict[int, float] = {}
    for told in history:
        count = _total(space, told.trial.variant)
        if count < wanted and isinstance(told.outcome, Measured) and _without_instances(told.trial.variant) == without:
            known[count] = max(known.get(count, 0.0), _used(told.outcome, metric))
    if not known:
        return 0.0
    more = max(known)
    fewer = [count for count in known if count < more]
    slope = (known[more] - known[max(fewer)]) / (more - max(fewer)) if fewer else 0.0
    return known[more] + max(0.0, slope) * (wanted - more)


def _used(outcome: Measured, metric: Metric) -> float:
    """Return the memory of the server, which every model's metrics contain in full."""
    used = [metrics[metric] for metrics in outcome.metrics.values() if metric in metrics]
    return max((estimate.value for estimate in used), default=0.0)


def _total(space: SearchSpace, variant: Variant) -> int:
    return sum(instance_count(model, variant.change(model.name)) for model in space.models)


def _without_instances(variant: Variant) -> tuple[ModelChange, ...]:
    return tuple(replace(change, instance_count=None) for change in variant.changes)
