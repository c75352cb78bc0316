"""The data of the plots of a configuration search, for the HTML page. Pure.

It decides what both must agree on: labels, titles, colours, and whether an axis is logarithmic. A colour is the
name of one in the style sheet of the page. Latencies and times of a request are in nanoseconds, times of the search in
milliseconds from its start, memory is in MB, gains are in percent. `page/tune.js` reads these names.
"""

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

from charonia.tools.report.plot_data import PARTS, latency_axis, parts
from charonia.tools.results.records import Estimate, LevelResult
from charonia.tools.tune.api import Measured, Metric
from charonia.tools.tune.report.view import LATENCIES, MEMORIES, Role, VariantView, latency_metric
from charonia.tools.tune.report.wording import constraint_text, settings_of, value_text
from charonia.tools.tune.result import GroupRecord, TrialRecord, TuneRun
from charonia.tools.tune.tables import Row

TITLES = {
    "latency": "Latency against throughput",
    "sizes": "Throughput by the size of a request",
    "memory": "Memory against throughput",
    "search": "How the search went",
    "breakdown": "Where the time of a mean request goes",
    "gain": "Gain over the default configuration, with its interval",
}
"""Titles of the plots by their kind."""

THROUGHPUT = "Inferences per second"
"""Name of the axis of throughputs."""

_BEST, _DEFAULT, _OTHERS = "s0", "s5", ("s1", "s2", "s3", "s4")
_COLORED_MAX = 5
_PHASES = ("s5", "s2", "s4", "s3", "s0", "s1")

_NANOSECONDS = 1e6  # of a millisecond


def plot_data(run: TuneRun, views: Sequence[Sequence[VariantView]]) -> dict[str, Any]:
    """Return the data of all plots.

    Args:
        run: The results.
        views: The variants of each of its groups.
    """
    return {
        "titles": TITLES,
        "parts": list(PARTS.items()),
        "throughput": THROUGHPUT,
        "groups": [_group(group, shown) for group, shown in zip(run.groups, views, strict=True)],
    }


def _group(group: GroupRecord, views: Sequence[VariantView]) -> dict[str, Any]:
    places = {view.record.variant.key: place for place, view in enumerate(views)}
    shades = dict(_shades(views))
    return {
        "models": list(group.models),
        "latencies": [LATENCIES[metric] for metric in LATENCIES if _is_measured(views, metric)],
        "latency": LATENCIES[latency_metric(group)],
        "memories": [(metric.value, MEMORIES[metric]) for metric in reversed(MEMORIES) if _is_measured(views, metric)],
        "axes": [_axis(views, model, latency_metric(group)) for model in group.models],
        "limits": [_limits(group, model) for model in group.models],
        "variants": [_variant(group, view, shades.get(place, "")) for place, view in enumerate(views)],
        "phases": list(zip(dict.fromkeys(record.trial.purpose for record in group.trials), cycle(_PHASES))),
        "trials": _trials(group, places),
    }


def _shades(views: Sequence[VariantView]) -> Iterator[tuple[int, str]]:
    """Yield the variants with a separate colour: first the ones with a role, then the best of the others."""
    measured = [(place, view) for place, view in enumerate(views) if view.rows]
    measured.sort(key=lambda pair: not (pair[1].role or pair[1].is_default))
    others = iter(_OTHERS)
    for place, view in measured[:_COLORED_MAX]:
        if _is_best(view):
            yield place, _BEST
        else:
            yield place, _DEFAULT if view.is_default else next(others, "")


def _is_best(view: VariantView) -> bool:
    return view.role in (Role.RECOMMENDED, Role.CLOSEST)


def _axis(views: Sequence[VariantView], model: str, metric: Metric) -> str:
    points = [row.point.metrics[model] for view in views for row in view.rows]
    values = [metrics[metric].value for metrics in points if metric in metrics]
    return latency_axis(values, values)


def _is_measured(views: Sequence[VariantView], metric: Metric) -> bool:
    return any(metric in metrics for view in views for row in view.rows for metrics in row.point.metrics.values())


def _limits(group: GroupRecord, model: str) -> list[dict[str, Any]]:
    goal = next(goal for goal in group.goal.models if goal.model == model)
    return [
        {
            "metric": LATENCIES.get(limit.metric, limit.metric.value),
            "value": bound * (_NANOSECONDS if limit.metric in LATENCIES else 1),
            "text": f"{'at least' if bound == limit.minimum else 'at most'} {value_text(limit.metric, bound)}",
            "full": constraint_text(limit),
        }
        for limit in goal.constraints
        for bound in (limit.minimum, limit.maximum)
        if bound is not None
    ]


def _variant(group: GroupRecord, view: VariantView, shade: str) -> dict[str, Any]:
    best = view.best_row
    return {
        "name": view.record.short_name,
        "settings": settings_of(view.record.variant),
        "label": f"{view.record.short_name} ({view.role})" if _is_best(view) else view.record.short_name,
        "shade": shade,
        "role": view.role.value,
        "default": view.is_default,
        "best": view.rows.index(best) if best is not None else -1,
        "gain": _gain(view),
        "loads": [_load(group, row) for row in view.rows],
    }


def _gain(view: VariantView) -> list[float] | None:
    """Return the gain over the default configuration with its interval, None for the default itself."""
    gain = None if view.best is None or view.is_default else view.best.gain
    return None if gain is None else _three(gain, 100)


def _load(group: GroupRecord, row: Row) -> dict[str, Any]:
    batches = [load.batch_size for load in row.point.loads]
    return {
        "text": "; ".join(dict.fromkeys(map(str, row.point.loads))),
        "batch": max(batches),
        "keeps": not row.point.violation,
        "count": len(row.trials),
        "of": [_metrics(row.point.metrics[model]) for model in group.models],
        "parts": [_parts(row.trials, model) for model in group.models],
    }


def _metrics(metrics: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"throughput": _three(metrics[Metric.THROUGHPUT]) if Metric.THROUGHPUT in metrics else None}
    for metric, name in LATENCIES.items():
        if metric in metrics:
            found[name] = _three(metrics[metric], _NANOSECONDS)
    for metric in MEMORIES:
        if metric in metrics:
            found[metric.value] = _three(metrics[metric])
    return found


def _three(estimate: Estimate, factor: float = 1.0) -> list[float]:
    return [round(value * factor, 3) for value in (estimate.value, estimate.low, estimate.high)]


def _parts(trials: Sequence[TrialRecord], model: str) -> list[dict[str, Any]]:
    """Return the parts of a mean request, from the trial with the most requests, the model first."""
    levels = [trial.levels[model] for trial in trials if model in trial.levels]
    return _rounded(max(levels, key=lambda level: level.request_count)) if levels else []


def _rounded(level: LevelResult) -> list[dict[str, Any]]:
    return [
        {name: value if isinstance(value, str) else round(value) for name, value in part.items()}
        for part in parts(level)
    ]


def _trials(group: GroupRecord, places: dict[str, int]) -> list[dict[str, Any]]:
    found, begin = [], 0.0
    for record in group.trials:
        end = begin + 1000 * record.outcome.elapsed_s
        found.append(
            {
                "number": record.trial.number,
                "variant": places.get(record.trial.variant.key, -1),
                "purpose": record.trial.purpose,
                "load": "; ".join(dict.fromkeys(map(str, record.trial.loads))),
                "begin": round(begin),
                "end": round(end),
                "throughput": _throughput(record.outcome),
                "failed": record.failed.reason if record.failed is not None else "",
                "resumed": record.is_resumed,
            }
        )
        begin = end
    return found


def _throughput(outcome: object) -> float | None:
    if not isinstance(outcome, Measured):
        return None
    rates = [metrics[Metric.THROUGHPUT].value for metrics in outcome.metrics.values() if Metric.THROUGHPUT in metrics]
    return round(sum(rates), 3) if rates else None
