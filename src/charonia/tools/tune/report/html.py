"""A configuration search as one HTML file.

Python writes sentences and tables, so they are readable without JavaScript; `page/tune.js` draws the plots from JSON in
the page.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from html import escape
from itertools import cycle
from typing import Any

from charonia.tools.report.columns import Column, markup_table
from charonia.tools.report.document import (
    asset,
    document,
    environment,
    machine_facts,
    notes_markup,
    separated,
    tile,
)
from charonia.tools.report.html import PARTS, latency_axis, parts
from charonia.tools.report.quantities import clock, duration, number, percent, size
from charonia.tools.results.records import Estimate, LevelResult
from charonia.tools.tune.api import METRICS, Constraint, Measured, Metric, ModelGoal, Trial, TrialRecord, Variant
from charonia.tools.tune.decision import Conclusion, Ranked, loads_text
from charonia.tools.tune.result import GroupRecord, ModelConfigRecord, TuneRun, VariantRecord
from charonia.tools.tune.tables import Row, rows_of

LATENCIES = {metric: text.short for metric, text in METRICS.items() if text.unit == " ms"}
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


FIRST = (Role.RECOMMENDED, Role.CLOSEST)
"""Roles of the best variant."""


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
    return tuple(
        sorted(views, key=lambda view: (view.role not in FIRST, order.get(view.record.variant.key, len(order))))
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
        f"{'most' if aim.metric.text.larger_is_better else 'least'} {aim.metric.text.name}"
        + (f" (weight {aim.weight:g})" if len(goal.objectives) > 1 else "")
        for aim in goal.objectives
    ]
    return ", ".join([*aims, *map(constraint_text, goal.constraints)])


def value_text(metric: Metric, value: float) -> str:
    """Return a value with its unit."""
    unit = METRICS[metric].unit
    if unit == " ms":
        return duration(value * 1e6)
    return megabytes(value) if unit == " MB" else f"{number(value)}{unit}"


def megabytes(value: float) -> str:
    """Return memory in MB (10^6 bytes) as text."""
    return f"{number(value / 1000)} GB" if value >= 999.5 else f"{number(value)} MB"


def settings_of(variant: Variant) -> str:
    """Return the changes of a variant, for the middle of a sentence."""
    return "the default configuration" if variant.is_default else str(variant)


_PACKAGE = "charonia.tools.tune.report"


def render(run: TuneRun, names: Sequence[str] = ()) -> bytes:
    """Return the page of a run as UTF-8.

    Args:
        names: Just these variants beside the default and the recommended one; () for all.
    """
    views = [_chosen(variant_views(group), names) for group in run.groups]
    body: list[str] = list(_problems(run))
    for number_, (group, shown) in enumerate(zip(run.groups, views, strict=True)):
        body += _group(run, group, shown, f"g{number_}")
    body += ["<noscript><p>The plots need JavaScript; the tables do not.</p></noscript>", _environment(run)]
    title = " and ".join(model for group in run.groups for model in group.models) or "no model"
    return document(
        f"{title}: configuration search",
        body,
        plot_data(run, views),
        script=asset(_PACKAGE, "tune.js"),
        style=asset(_PACKAGE, "tune.css"),
    )


def _chosen(views: Sequence[VariantView], names: Sequence[str]) -> tuple[VariantView, ...]:
    return tuple(
        view
        for view in views
        if not names or view.record.is_named(names) or view.is_default or view.role is Role.RECOMMENDED
    )


def _problems(run: TuneRun) -> Iterator[str]:
    if run.problem:
        text = f"The run ended early: {run.problem}. The report has the measurements up to then."
    elif run.is_interrupted:
        text = "The run was interrupted. The report has the measurements up to then."
    elif not run.groups:
        text = "No model was tuned."
    else:
        return
    yield f'<section><p class="headline"><span class="badge bad">incomplete</span> {escape(text)}</p></section>'


def _group(run: TuneRun, group: GroupRecord, views: Sequence[VariantView], identity: str) -> Iterator[str]:
    yield f"<header><h1>{escape(' and '.join(group.models))}</h1><p class='about'>{_measured(run, group)}</p></header>"
    yield '<section class="summary">' + "".join(_summary(group, views)) + "</section>"
    if any(view.rows for view in views):
        plots = [
            _plot(identity, "latency", _LATENCY),
            _plot(identity, "sizes", _SIZES),
        ]
        yield from reversed(plots) if run.is_offline else plots
        table = ranking_table(group, views, identity)
        yield f"<section><h2>Configurations compared</h2><p class='about'>{_COMPARED}</p>{table}</section>"
        yield _plot(identity, "memory", "Each configuration under its best load.")
    if any(trial.measured for trial in group.trials):
        yield _plot(identity, "search", _SEARCH)
    sections = "".join(variant_section(group, view, f"{identity}-v{place}") for place, view in enumerate(views))
    if sections:
        yield f"<section class='variants'><h2>Every configuration</h2>{sections}</section>"
    left_out = "".join(_left_out(group))
    if left_out:
        yield f"<section><h2>Left out</h2>{left_out}</section>"


_LATENCY = (
    "A line is a configuration under more and more load. Right is more work done, low is a shorter wait; hollow points "
    "miss a limit, the shade around a point is its interval. Click a point, or press Enter, to follow a configuration."
)
_SIZES = "Each configuration by the items of its requests, under the load with the highest throughput."
_COMPARED = (
    "Each under its best load. The bar is the interval of the gain over the default configuration: where it reaches "
    "across the line in the middle, it is not known which is better."
)
_SEARCH = "Every measurement in order. Unpromising variants were dropped, close ones were repeated."


def _plot(identity: str, kind: str, text: str) -> str:
    title = f"<h2>{TITLES[kind]}</h2>"
    return f'<section class="plot" id="{identity}-{kind}" hidden>{title}<p class="about">{text}</p></section>'


def _measured(run: TuneRun, group: GroupRecord) -> str:
    server = f"{run.server.name} {run.server.version}".strip() or "a server"
    facts = [
        *(["for batches of work (offline)"] if run.is_offline else []),
        *(goal_text(goal) for goal in group.goal.models),
        f"{server} at {run.server.url}" if run.is_remote else server,
        run.began_at.replace("T", " ", 1)[:16],
        f"{group.extent} in {clock(group.duration_s)}",
    ]
    return separated(facts)


def _summary(group: GroupRecord, views: Sequence[VariantView]) -> Iterator[str]:
    badge = _BADGES[group.decision.conclusion]
    text = escape(group.decision.sentences[0].removeprefix("Undecided: "))
    yield f'<p class="headline"><span class="badge {badge[0]}">{badge[1]}</span> {text}</p>'
    best = group.decision.best
    if best is not None:
        yield f'<dl class="tiles">{"".join(_tiles(group, best))}</dl>'
    if views and has_recommendation(group):
        yield from _change(views[0])
    if group.decision.conclusion is Conclusion.NOTHING_MEASURED:
        notes = group.decision.sentences[1:]
    else:
        notes = (*filter(None, [group.disturbance]), *group.decision.sentences[1:], *group.notes)
    if not group.is_complete:
        notes = ("The search did not come to its end.", *notes)
    yield notes_markup([escape(note) for note in notes])


_BADGES = {
    Conclusion.BETTER: ("good", "better"),
    Conclusion.NO_GAIN: ("plain", "no gain"),
    Conclusion.UNDECIDED: ("plain", "undecided"),
    Conclusion.NO_OTHER: ("plain", "no comparison"),
    Conclusion.NO_DEFAULT: ("plain", "no comparison"),
    Conclusion.CONSTRAINTS_NOT_MET: ("bad", "limits not met"),
    Conclusion.NOTHING_MEASURED: ("bad", "nothing measured"),
}


def _tiles(group: GroupRecord, best: Ranked) -> Iterator[str]:
    default = group.decision.default
    record = group.variant(best.variant)
    title = "Recommended" if has_recommendation(group) else "Closest"
    yield tile(title, record.short_name if record else "", loads_text(best.loads))
    for metric in (Metric.THROUGHPUT, latency_metric(group), *MEMORIES):
        estimate = overall(best, metric)
        if estimate is None or (metric is Metric.CPU_USED_RAM and (overall(best, Metric.GPU_USED_MEMORY) is not None)):
            continue
        base = overall(default, metric) if default is not None and not best.variant.is_default else None
        below = f"{value_text(metric, estimate.low)} to {value_text(metric, estimate.high)}"
        if base is not None:
            below = f"default {value_text(metric, base.value)}"
            if best.between_loads:
                below += " " + f"at {loads_text(best.base_loads)}".replace(" ", "\N{NO-BREAK SPACE}")
        name = METRICS[metric].name
        title = name if metric in LATENCIES else f"{name[:1].upper()}{name[1:]}"
        yield tile(title, value_text(metric, estimate.value), below)
    if best.gain is not None and not best.variant.is_default and has_recommendation(group):
        yield tile(
            "Gain over the default", change(best.gain).partition(" [")[0], f"[{change(best.gain).partition('[')[2]}"
        )


def _change(view: VariantView) -> Iterator[str]:
    changed = [config for config in view.record.configs if config.diff]
    for config in changed:
        yield f"<h3>Change of {escape(config.model)}/config.pbtxt</h3>{diff_markup(config.diff)}"
    if changed:
        folders = ", ".join(f"{config.name}/config.pbtxt" for config in changed)
        yield f"<p class='about after'>Ready to serve in the output repository: {escape(folders)}</p>"


def _left_out(group: GroupRecord) -> Iterator[str]:
    by_reason: dict[str, int] = {}
    for skipped in group.skipped:
        by_reason[skipped.reason] = by_reason.get(skipped.reason, 0) + 1
    if by_reason:
        items = "".join(
            f"<li>{escape(reason)}{f' ({count} configurations)' if count > 1 else ''}</li>"
            for reason, count in by_reason.items()
        )
        yield f"<h3>Not measured</h3><ul class='plain'>{items}</ul>"
    failures = failures_table(group)
    if failures:
        yield f"<h3>Failed</h3>{failures}"


def _environment(run: TuneRun) -> str:
    notes = "".join(f"<li>{escape(note)}</li>" for note in run.notes)
    more = f"<h3>Notes</h3><ul class='plain'>{notes}</ul>" if notes else ""
    return environment("Environment", _facts(run), run.command, run.options, "Options that were named", more)


def _facts(run: TuneRun) -> Iterator[tuple[str, str]]:
    yield "Server", f"{run.server.name} {run.server.version}".strip() or run.server.url
    yield "Address", run.server.url if run.is_remote else "started for the search"
    for gpu in run.idle_gpus:
        yield "GPU", f"{gpu.uuid}" + (f", {size(gpu.memory_total_bytes)}" if gpu.memory_total_bytes else "")
    yield "Tool", run.tool
    yield from machine_facts(run.machine, "Client's machine" if run.is_remote else "Machine", run.began_at)
    yield "Took", clock(run.duration_s)
    yield "Seed", number(run.seed) if run.seed else "0"


ROWS_MAX = 12
"""Variants that are compared initially; the others are folded away."""

_SPAN_MIN, _SPAN_ROOM = 0.05, 1.25


_Best = tuple[str, VariantView, Ranked]
"""A variant under its best load, with the id of its section."""


def ranking_table(group: GroupRecord, views: Sequence[VariantView], identity: str) -> str:
    """Return a row for each variant under its best load, best first, with the gain over the default as a bar."""
    ranked = [(f"{identity}-v{place}", view, view.best) for place, view in enumerate(views) if view.best is not None]
    span = _span([best for _, _, best in ranked[:ROWS_MAX]])
    latency = latency_metric(group)
    memory = next(
        (metric for metric in reversed(MEMORIES) if any(overall(best, metric) for _, _, best in ranked)), None
    )
    columns: list[Column[_Best]] = [
        Column("Configuration", kind="text", markup=_configuration),
        Column(
            "Gain over the default",
            kind="text gain",
            markup=lambda row: _gain(row[1], row[2].gain, span) + _other_load(row[1], row[2]),
        ),
        Column("Throughput", markup=_overall(Metric.THROUGHPUT)),
        Column(f"{LATENCIES[latency]} latency", markup=_overall(latency)),
        *([Column(MEMORIES[memory], markup=_overall(memory, is_plain=True))] if memory is not None else ()),
        Column("Batch", lambda row: ", ".join(str(config.max_batch_size or "-") for config in row[1].record.tuned)),
        Column("Delay", lambda row: ", ".join(map(delay_text, row[1].record.tuned))),
        Column("Best load", lambda row: loads_text(row[2].loads)),
    ]
    best = next((row for row in ranked if row[1].role in FIRST), None)
    shown = markup_table(columns, ranked[:ROWS_MAX], "ranking", best)
    if len(ranked) > ROWS_MAX:
        rest = markup_table(columns, ranked[ROWS_MAX:], "ranking", best)
        shown += f"<details><summary>{len(ranked) - ROWS_MAX} more</summary>{rest}</details>"
    return shown


def _configuration(row: _Best) -> str:
    identity, view, _ = row
    settings = escape(settings_of(view.record.variant))
    return f"<a href='#{identity}'>{escape(view.record.short_name)}</a>{role_badge(view)}<br><small>{settings}</small>"


def _overall(metric: Metric, *, is_plain: bool = False) -> Callable[[_Best], str]:
    return lambda row: measured(metric, overall(row[2], metric), is_plain=is_plain)


def delay_text(config: ModelConfigRecord) -> str:
    """Return the longest time that requests wait for a batch, `-` without dynamic batching."""
    if not config.queue_delay_us:
        return "-" if config.queue_delay_us is None else "0"
    return duration(config.queue_delay_us * 1e3)


def _other_load(view: VariantView, best: Ranked) -> str:
    if view.is_default or not best.between_loads:
        return ""
    return f"<small>default at {escape(loads_text(best.base_loads))}</small>"


def role_badge(view: VariantView) -> str:
    """Return the result of a variant as a badge, "" for none."""
    kinds = {Role.RECOMMENDED: "good", Role.CLOSEST: "bad", Role.DEFAULT: "plain", Role.TIE: "plain"}
    texts = [(kinds[view.role], view.role.value)] if view.role in kinds else []
    if view.is_default and view.role is not Role.DEFAULT:
        texts.append(("plain", Role.DEFAULT.value))
    if view.best is not None and not view.best.keeps_constraints and view.role is not Role.CLOSEST:
        texts.append(("bad", "over a limit"))
    return "".join(f" <span class='badge {kind}'>{text}</span>" for kind, text in texts)


def measured(metric: Metric, estimate: Estimate | None, *, is_plain: bool = False) -> str:
    """Return a value with half its interval, as markup.

    Args:
        estimate: The value, None for unknown.
        is_plain: Whether the interval is left out.
    """
    if estimate is None:
        return "-"
    text = escape(value_text(metric, estimate.value))
    if is_plain or not estimate.confidence or not estimate.value:
        return text
    return f"{text} <small>± {100 * estimate.relative_half_width:.0f} %</small>"


def _span(ranked: Sequence[Ranked]) -> float:
    """Return the half-width of the axis of gains; longer intervals are cut off."""
    values = [_SPAN_ROOM * abs(each.gain.value) for each in ranked if each.gain]
    widths = [each.gain.high - each.gain.low for each in ranked if each.gain]
    return max([_SPAN_MIN, *values, *(min(width, 1.0) for width in widths)])


def _gain(view: VariantView, gain: Estimate | None, span: float) -> str:
    if gain is None or view.is_default:
        return "<span class='interval'></span>" if view.is_default else "-"
    low, value, high = (50 + 50 * max(-1.0, min(1.0, bound / span)) for bound in (gain.low, gain.value, gain.high))
    kind = "good" if gain.low > 0 else "bad" if gain.high < 0 else "open"
    bar = (
        f"<span class='interval {kind}'><i style='left:{low:.1f}%;width:{high - low:.1f}%'></i>"
        f"<b style='left:{value:.1f}%'></b></span>"
    )
    return f"{bar}<small>{escape(change(gain))}</small>"


def failures_table(group: GroupRecord) -> str:
    """Return what could not be measured and why, "" where everything could."""
    failed = [(trial.trial, trial.failed.reason) for trial in group.trials if trial.failed is not None]

    def name(trial: Trial) -> str:
        record = group.variant(trial.variant)
        return record.short_name if record is not None else settings_of(trial.variant)

    columns: tuple[Column[tuple[Trial, str]], ...] = (
        Column("Configuration", lambda row: name(row[0]), "text"),
        Column("Load", lambda row: loads_text(row[0].loads), "text"),
        Column("Reason", lambda row: row[1], "text message"),
    )
    return markup_table(columns, failed) if failed else ""


_DIFF_KINDS = {"+": "ins", "-": "del"}
_DIFF_HEADER = ("---", "+++", "@@")


def variant_section(group: GroupRecord, view: VariantView, identity: str) -> str:
    """Return the section of a variant, folded away."""
    settings = "as it was found" if view.is_default else settings_of(view.record.variant)
    head = f"<b>{escape(view.record.short_name)}</b>{role_badge(view)} <span>{escape(settings)}</span>"
    parts = [_config(config) for config in view.record.configs]
    parts += [_loads(view, model, is_named=len(group.models) > 1) for model in group.models if view.rows]
    parts.append(f"<div class='parts' data-variant='{identity}'></div>")
    notes = dict.fromkeys(
        note for row in view.rows for trial in row.trials if trial.measured for note in trial.measured.notes
    )
    notes |= dict.fromkeys(f"{load}: {reason}" for load, reason in view.failures)
    if notes:
        parts.append(f"<h3>To know</h3><ul class='plain'>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>")
    return f"<details class='variant' id='{identity}'><summary>{head}</summary>{''.join(parts)}</details>"


def diff_markup(diff: str) -> str:
    """Return a unified diff as markup, with insertions and deletions marked."""
    lines = [line for line in diff.splitlines() if not line.startswith(_DIFF_HEADER)]
    return f"<pre class='diff' tabindex='0'>{''.join(map(_diff_line, lines))}</pre>"


def _diff_line(line: str) -> str:
    tag = _DIFF_KINDS.get(line[:1], "span")
    return f"<{tag}>{escape(line) or ' '}</{tag}>"


def _config(config: ModelConfigRecord) -> str:
    title = f"<h3>{escape(config.name)}/config.pbtxt</h3>"
    whole = f"<pre tabindex='0'>{escape(config.text)}</pre>"
    if not config.diff:
        return title + whole
    return f"{title}{diff_markup(config.diff)}<details><summary>The whole file</summary>{whole}</details>"


def _loads(view: VariantView, model: str, *, is_named: bool) -> str:
    latencies = [metric for metric in reversed(LATENCIES) if _has(view, model, metric)]
    memories = [metric for metric in MEMORIES if _has(view, model, metric)]
    columns: list[Column[Row]] = [
        Column("Load", lambda row: "; ".join(str(load) for load in row.point.loads if load.model == model)),
        Column("Throughput", markup=_of_model(model, Metric.THROUGHPUT)),
        *(Column(LATENCIES[metric], markup=_of_model(model, metric)) for metric in latencies),
        *(Column(MEMORIES[metric], markup=_of_model(model, metric, is_plain=True)) for metric in memories),
    ]
    if any(_error_share(row, model) for row in view.rows):
        columns.append(Column("Errors", lambda row: percent(_error_share(row, model))))
    columns.append(Column("Measured", markup=lambda row: f"{len(row.trials)} &times;"))
    if any(row.point.violation for row in view.rows):
        missed = "<span class='badge bad'>missed</span>"
        columns.append(Column("Limits", markup=lambda row: missed if row.point.violation else "kept"))
    title = f"Loads of {escape(model)}" if is_named else "Loads"
    best = view.best_row if len(view.rows) > 1 else None
    return f"<h3>{title}</h3>" + markup_table(columns, view.rows, best=best)


def _of_model(model: str, metric: Metric, *, is_plain: bool = False) -> Callable[[Row], str]:
    return lambda row: measured(metric, row.point.metrics[model].get(metric), is_plain=is_plain)


def _has(view: VariantView, model: str, metric: Metric) -> bool:
    return any(metric in row.point.metrics[model] for row in view.rows)


def _error_share(row: Row, model: str) -> float:
    levels = [trial.levels[model] for trial in row.trials if model in trial.levels]
    ended = sum(level.error_count + level.request_count for level in levels)
    return sum(level.error_count for level in levels) / ended if ended else 0.0


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
    """Return the data of all plots."""
    return {
        "titles": TITLES,
        "parts": list(PARTS.items()),
        "throughput": THROUGHPUT,
        "groups": [_group_data(group, shown) for group, shown in zip(run.groups, views, strict=True)],
    }


def _group_data(group: GroupRecord, views: Sequence[VariantView]) -> dict[str, Any]:
    places = {view.record.variant.key: place for place, view in enumerate(views)}
    shades = dict(_colored_variants(views))
    return {
        "models": list(group.models),
        "latencies": [LATENCIES[metric] for metric in LATENCIES if _is_measured(views, metric)],
        "latency": LATENCIES[latency_metric(group)],
        "memories": [(metric.value, MEMORIES[metric]) for metric in reversed(MEMORIES) if _is_measured(views, metric)],
        "axes": [_axis(views, model, latency_metric(group)) for model in group.models],
        "limits": [_limit_data(group, model) for model in group.models],
        "variants": [_variant(group, view, shades.get(place, "")) for place, view in enumerate(views)],
        "phases": list(zip(dict.fromkeys(record.trial.purpose for record in group.trials), cycle(_PHASES))),
        "trials": _trials(group, places),
    }


def _colored_variants(views: Sequence[VariantView]) -> Iterator[tuple[int, str]]:
    """Yield the variants with a separate colour: first the ones with a role, then the best of the others."""
    measured = [(place, view) for place, view in enumerate(views) if view.rows]
    measured.sort(key=lambda pair: not (pair[1].role or pair[1].is_default))
    others = iter(_OTHERS)
    for place, view in measured[:_COLORED_MAX]:
        if view.role in FIRST:
            yield place, _BEST
        else:
            yield place, _DEFAULT if view.is_default else next(others, "")


def _axis(views: Sequence[VariantView], model: str, metric: Metric) -> str:
    points = [row.point.metrics[model] for view in views for row in view.rows]
    values = [metrics[metric].value for metrics in points if metric in metrics]
    return latency_axis(values, values)


def _is_measured(views: Sequence[VariantView], metric: Metric) -> bool:
    return any(metric in metrics for view in views for row in view.rows for metrics in row.point.metrics.values())


def _limit_data(group: GroupRecord, model: str) -> list[dict[str, Any]]:
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
        "label": f"{view.record.short_name} ({view.role})" if view.role in FIRST else view.record.short_name,
        "shade": shade,
        "role": view.role.value,
        "default": view.is_default,
        "best": view.rows.index(best) if best is not None else -1,
        "gain": _gain_data(view),
        "loads": [_load_data(group, row) for row in view.rows],
    }


def _gain_data(view: VariantView) -> list[float] | None:
    """Return the gain over the default configuration with its interval, None for the default itself."""
    gain = None if view.best is None or view.is_default else view.best.gain
    return None if gain is None else _three(gain, 100)


def _load_data(group: GroupRecord, row: Row) -> dict[str, Any]:
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
