"""Sentences and labels of the reports."""

from charonia.tools.report.quantities import duration, number
from charonia.tools.results.records import Estimate
from charonia.tools.tune.api import Constraint, Metric, ModelGoal, Variant
from charonia.tools.tune.decision import Conclusion
from charonia.tools.tune.report.view import LATENCIES
from charonia.tools.tune.result import GroupRecord

METRIC_NAMES = {
    Metric.THROUGHPUT: "throughput",
    Metric.LATENCY_AVG: "mean latency",
    Metric.LATENCY_P50: "median latency",
    Metric.LATENCY_P90: "p90 latency",
    Metric.LATENCY_P95: "p95 latency",
    Metric.LATENCY_P99: "p99 latency",
    Metric.OUTPUT_TOKENS: "output tokens",
    Metric.TTFT_AVG: "mean time to first token",
    Metric.TTFT_P50: "median time to first token",
    Metric.TTFT_P99: "p99 time to first token",
    Metric.ITL_AVG: "mean inter-token latency",
    Metric.ITL_P50: "median inter-token latency",
    Metric.ITL_P99: "p99 inter-token latency",
    Metric.CPU_USED_RAM: "memory",
    Metric.CPU_AVAILABLE_RAM: "free memory",
    Metric.GPU_USED_MEMORY: "GPU memory",
    Metric.GPU_FREE_MEMORY: "free GPU memory",
    Metric.GPU_UTILIZATION: "GPU utilisation",
    Metric.GPU_POWER_USAGE: "GPU power",
}

_MEMORY = (
    Metric.CPU_USED_RAM,
    Metric.CPU_AVAILABLE_RAM,
    Metric.GPU_USED_MEMORY,
    Metric.GPU_FREE_MEMORY,
)


def headline(group: GroupRecord) -> str:
    """Return the verdict in a sentence or two."""
    decision = group.decision
    best, default = decision.best, decision.default
    if decision.conclusion is Conclusion.NO_GAIN:
        others = [ranked for ranked in decision.ranking if not ranked.variant.is_default and ranked.gain is not None]
        first = decision.sentences[0]
        if not others or others[0].gain is None:
            return first
        loads = f" {others[0].between_loads}" if others[0].between_loads else ""
        settings = settings_of(others[0].variant)
        return f"{first} The best of the others, {settings}, came to {change(others[0].gain)}{loads}."
    is_measured = best is not None and best.gain is not None and default is not None and default.keeps_constraints
    if decision.conclusion is not Conclusion.BETTER or not is_measured or best is None or best.gain is None:
        return " ".join(decision.sentences[:1])
    settings = settings_of(best.variant)
    more = _more(group, best.gain) + (f" ({best.between_loads})" if best.between_loads else "")
    return f"{settings[:1].upper()}{settings[1:]}: {more}{_within(group)}."


def _more(group: GroupRecord, gain: Estimate) -> str:
    aims = [aim for goal in group.goal.models for aim in goal.objectives]
    if len({aim.metric for aim in aims}) > 1:
        return f"{change(gain)} by the weighted objectives over the default configuration"
    metric = aims[0].metric
    if metric.larger_is_better:
        return f"{_percents(gain)} more {METRIC_NAMES[metric]} than the default configuration"
    value, low, high = (1 - 1 / (1 + share) for share in (gain.value, gain.low, gain.high))
    less = Estimate(value, low, high, gain.confidence)
    return f"{_percents(less)} less {METRIC_NAMES[metric]} than the default configuration"


def _percents(share: Estimate) -> str:
    value, low, high = map(_hundredths, (share.value, share.low, share.high))
    return f"{value} % [{low}, {high}]"


def _hundredths(share: float, sign: str = "") -> str:
    return f"{100 * share:{sign},.{0 if abs(share) >= 0.9995 else 1}f}"


def _within(group: GroupRecord) -> str:
    texts = [constraint_text(limit) for goal in group.goal.models for limit in goal.constraints]
    return f", with {' and '.join(dict.fromkeys(texts))}" if texts else ""


def change(gain: Estimate) -> str:
    """Return a gain with its interval: `+12.3 % [+9.1, +15.0]`."""
    value, low, high = (_hundredths(bound, "+") for bound in (gain.value, gain.low, gain.high))
    return f"{value} % [{low}, {high}]"


def constraint_text(constraint: Constraint) -> str:
    """Return a constraint: `p99 latency at most 20 ms`."""
    bounds = [
        f"{word} {value_text(constraint.metric, bound)}"
        for word, bound in (("at least", constraint.minimum), ("at most", constraint.maximum))
        if bound is not None
    ]
    return f"{METRIC_NAMES[constraint.metric]} {' and '.join(bounds)}"


def goal_text(goal: ModelGoal) -> str:
    """Return the goal of a model: `most throughput, p99 latency at most 20 ms`."""
    aims = [
        f"{'most' if aim.metric.larger_is_better else 'least'} {METRIC_NAMES[aim.metric]}"
        + (f" (weight {aim.weight:g})" if len(goal.objectives) > 1 else "")
        for aim in goal.objectives
    ]
    return ", ".join([*aims, *map(constraint_text, goal.constraints)])


def value_text(metric: Metric, value: float) -> str:
    """Return a value with its unit."""
    if metric in LATENCIES:
        return duration(value * 1e6)
    if metric in _MEMORY:
        return megabytes(value)
    units = {
        Metric.THROUGHPUT: "/s",
        Metric.OUTPUT_TOKENS: "/s",
        Metric.GPU_UTILIZATION: " %",
        Metric.GPU_POWER_USAGE: " W",
    }
    return f"{number(value)}{units.get(metric, '')}"


def megabytes(value: float) -> str:
    """Return memory in MB (10^6 bytes) as text."""
    return f"{number(value / 1000)} GB" if value >= 999.5 else f"{number(value)} MB"


def settings_of(variant: Variant) -> str:
    """Return the changes of a variant, for the middle of a sentence."""
    return "the default configuration" if variant.is_default else str(variant)
