"""A finished search as the reports show it: each variant once, with its role and measurements."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from charonia.tools.report.quantities import duration, number
from charonia.tools.results.records import Estimate
from charonia.tools.tune.api import METRICS, Constraint, Metric, ModelGoal, Variant
from charonia.tools.tune.decision import Conclusion, Ranked
from charonia.tools.tune.result import GroupRecord, VariantRecord
from charonia.tools.tune.tables import Row, rows_of

LATENCIES = {metric: text.short for metric, text in METRICS.items() if text.unit == "ms"}
"""Metrics of latency and their short names."""

MEMORIES = {metric: METRICS[metric].short for metric in (Metric.CPU_USED_RAM, Metric.GPU_USED_MEMORY)}


class Role(StrEnum):
    """The role of a variant in the verdict."""

    RECOMMENDED = "recommended"
    CLOSEST = "closest"
    """The best one if none keeps the constraints."""
    DEFAULT = "default"
    TIE = "as good"
    OTHER = ""


@dataclass(frozen=True, slots=True)
class VariantView:
    """A variant.

    Attributes:
        rows: The measurements, a load a row, from the lightest load to the heaviest.
        best: Its best load, None where nothing was measured.
        failures: Why it was not measured under loads, by load.
    """

    record: VariantRecord
    role: Role
    rows: tuple[Row, ...]
    best: Ranked | None
    failures: tuple[tuple[str, str], ...]

    @property
    def best_row(self) -> Row | None:
        """The measurements under its best load."""
        return next((row for row in self.rows if self.best and row.point.loads == self.best.loads), None)

    @property
    def is_default(self) -> bool:
        return self.record.variant.is_default


def variant_views(group: GroupRecord) -> tuple[VariantView, ...]:
    """Return the variants that were tried, best first; those without a measurement come last."""
    rows: dict[str, list[Row]] = {}
    for row in rows_of(group):
        rows.setdefault(row.variant.variant.key, []).append(row)
    ranked = {each.variant.key: each for each in group.decision.ranking}
    order = {key: place for place, key in enumerate(ranked)}
    views = [
        VariantView(
            record,
            _role(group, record.variant.key, is_default=record.variant.is_default),
            tuple(sorted(rows.get(record.variant.key, ()), key=_weight)),
            ranked.get(record.variant.key),
            tuple(_failures(group, record.variant.key)),
        )
        for record in group.variants
    ]
    first = (Role.RECOMMENDED, Role.CLOSEST)
    return tuple(
        sorted(views, key=lambda view: (view.role not in first, order.get(view.record.variant.key, len(order))))
    )


def latency_metric(group: GroupRecord) -> Metric:
    """Return the latency metric of the goal, the 99th percentile if it has none."""
    for goal in group.goal.models:
        for metric in (*(limit.metric for limit in goal.constraints), *(aim.metric for aim in goal.objectives)):
            if metric in LATENCIES:
                return metric
    return Metric.LATENCY_P99


def overall(ranked: Ranked, metric: Metric) -> Estimate | None:
    """Return a metric of all models together: the sum of rates, the worst of the rest. None if it was not measured."""
    found = [metrics[metric] for metrics in ranked.metrics.values() if metric in metrics]
    if not found:
        return None
    if metric not in (Metric.THROUGHPUT, Metric.OUTPUT_TOKENS):
        return max(found, key=lambda estimate: estimate.value)
    return Estimate(
        sum(estimate.value for estimate in found),
        sum(estimate.low for estimate in found),
        sum(estimate.high for estimate in found),
        min(estimate.confidence for estimate in found),
    )


def has_recommendation(group: GroupRecord) -> bool:
    """Whether the best variant is one to use."""
    return group.decision.conclusion in (
        Conclusion.BETTER,
        Conclusion.NO_GAIN,
        Conclusion.UNDECIDED,
        Conclusion.NO_OTHER,
        Conclusion.NO_DEFAULT,
    )


def _weight(row: Row) -> tuple[int, float]:
    return max(load.batch_size for load in row.point.loads), sum(load.value for load in row.point.loads)


def _role(group: GroupRecord, key: str, *, is_default: bool) -> Role:
    decision = group.decision
    if decision.best is not None and decision.best.variant.key == key:
        return Role.RECOMMENDED if has_recommendation(group) else Role.CLOSEST
    if is_default:
        return Role.DEFAULT
    # A variant that was measured once has so wide an interval that it ties with everything.
    repeated = {tie.variant.key for tie in decision.ties if len(tie.trial_numbers) > 1}
    return Role.TIE if key in repeated else Role.OTHER


def _failures(group: GroupRecord, key: str) -> Iterator[tuple[str, str]]:
    for trial in group.trials:
        if trial.failed is not None and trial.trial.variant.key == key:
            yield "; ".join(dict.fromkeys(map(str, trial.trial.loads))), trial.failed.reason


def change(gain: Estimate) -> str:
    """Return a gain with its interval: `+12.3 % [+9.1, +15.0]`."""
    value, low, high = (
        f"{100 * bound:+,.{0 if abs(bound) >= 0.9995 else 1}f}" for bound in (gain.value, gain.low, gain.high)
    )
    return f"{value} % [{low}, {high}]"


def constraint_text(constraint: Constraint) -> str:
    """Return a constraint: `p99 latency at most 20 ms`."""
    bounds = [
        f"{word} {value_text(constraint.metric, bound)}"
        for word, bound in (("at least", constraint.minimum), ("at most", constraint.maximum))
        if bound is not None
    ]
    return f"{METRICS[constraint.metric].name} {' and '.join(bounds)}"


def goal_text(goal: ModelGoal) -> str:
    """Return the goal of a model: `most throughput, p99 latency at most 20 ms`."""
    aims = [
        f"{'most' if aim.metric.larger_is_better else 'least'} {METRICS[aim.metric].name}"
        + (f" (weight {aim.weight:g})" if len(goal.objectives) > 1 else "")
        for aim in goal.objectives
    ]
    return ", ".join([*aims, *map(constraint_text, goal.constraints)])


def value_text(metric: Metric, value: float) -> str:
    """Return a value with its unit."""
    unit = METRICS[metric].unit
    if unit == "ms":
        return duration(value * 1e6)
    return megabytes(value) if unit == "MB" else f"{number(value)}{unit}"


def megabytes(value: float) -> str:
    """Return memory in MB (10^6 bytes) as text."""
    return f"{number(value / 1000)} GB" if value >= 999.5 else f"{number(value)} MB"


def settings_of(variant: Variant) -> str:
    """Return the changes of a variant, for the middle of a sentence."""
    return "the default configuration" if variant.is_default else str(variant)
