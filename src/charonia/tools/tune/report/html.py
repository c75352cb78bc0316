"""A configuration search as one HTML file.

Python writes sentences and tables, so they are readable without JavaScript; `page/tune.js` draws the plots from JSON in
the page.
"""

from collections.abc import Iterator, Sequence
from html import escape

from charonia.tools.report.document import asset, document, moment, separated
from charonia.tools.report.quantities import clock, number, size
from charonia.tools.tune.api import Metric
from charonia.tools.tune.decision import Conclusion, Ranked, loads_text
from charonia.tools.tune.report.plot_data import TITLES, plot_data
from charonia.tools.tune.report.tables import diff_markup, failures_table, ranking_table, variant_section
from charonia.tools.tune.report.view import (
    LATENCIES,
    MEMORIES,
    Role,
    VariantView,
    has_recommendation,
    latency_metric,
    overall,
    variant_views,
)
from charonia.tools.tune.report.wording import METRIC_NAMES, change, goal_text, headline, value_text
from charonia.tools.tune.result import GroupRecord, TuneRun

_PACKAGE = "charonia.tools.tune.report"


def render(run: TuneRun, names: Sequence[str] = ()) -> bytes:
    """Return the page of a run as UTF-8.

    Args:
        run: What was found.
        names: Just these variants beside the default and the recommended one; () for all.
    """
    views = [_chosen(variant_views(group), names) for group in run.groups]
    body: list[str] = list(_problems(run))
    for number_, (group, shown) in enumerate(zip(run.groups, views, strict=True)):
        body += _group(run, group, shown, f"g{number_}")
    body += ["<noscript><p>The plots need JavaScript; the tables do not.</p></noscript>", *_environment(run)]
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
        text = f"The run ended early: {run.problem}. What was measured until then is shown."
    elif run.is_interrupted:
        text = "The run was interrupted. What was measured until then is shown."
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
_SIZES = "Each configuration with requests of so many items, under the load that brings the most."
_COMPARED = (
    "Each under its best load. The bar is the interval of the gain over the default configuration: where it reaches "
    "across the line in the middle, it is not known which is better."
)
_SEARCH = "Every measurement in order. What did not look promising was dropped, what was close was repeated."


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
    yield f'<p class="headline"><span class="badge {badge[0]}">{badge[1]}</span> {escape(headline(group))}</p>'
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
    if notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in notes)
        yield f'<div class="cautions"><h3>To know</h3><ul>{items}</ul></div>'


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
    yield _tile(title, record.short_name if record else "", loads_text(best.loads))
    for metric in (Metric.THROUGHPUT, latency_metric(group), *MEMORIES):
        estimate = overall(best, metric)
        if estimate is None or (metric is Metric.CPU_USED_RAM and _has_gpu(best)):
            continue
        base = overall(default, metric) if default is not None and not best.variant.is_default else None
        below = f"{value_text(metric, estimate.low)} to {value_text(metric, estimate.high)}"
        if base is not None:
            below = f"default {value_text(metric, base.value)}"
            if best.between_loads:
                below += " " + f"at {loads_text(best.base_loads)}".replace(" ", "\N{NO-BREAK SPACE}")
        name = METRIC_NAMES[metric]
        title = name if metric in LATENCIES else f"{name[:1].upper()}{name[1:]}"
        yield _tile(title, value_text(metric, estimate.value), below)
    if best.gain is not None and not best.variant.is_default and has_recommendation(group):
        yield _tile(
            "Gain over the default", change(best.gain).partition(" [")[0], f"[{change(best.gain).partition('[')[2]}"
        )


def _has_gpu(best: Ranked) -> bool:
    return overall(best, Metric.GPU_USED_MEMORY) is not None


def _tile(name: str, value: str, below: str) -> str:
    return f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd class='below'>{escape(below)}</dd></div>"


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


def _environment(run: TuneRun) -> Iterator[str]:
    facts = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in _facts(run))
    yield f'<section><h2>Environment</h2><dl class="facts">{facts}</dl>'
    if run.notes:
        yield f"<h3>Notes</h3><ul class='plain'>{''.join(f'<li>{escape(note)}</li>' for note in run.notes)}</ul>"
    if run.command:
        yield f"<h3>Command</h3><pre tabindex='0'>{escape(run.command)}</pre>"
    if run.options:
        rows = "".join(
            f"<tr><th scope='row'>{escape(name)}</th><td class='text message'>{escape(value)}</td></tr>"
            for name, value in run.options.items()
        )
        yield f"<details><summary>Options that were named</summary><div class='wide'><table><tbody>{rows}"
        yield "</tbody></table></div></details>"
    yield "</section>"


def _facts(run: TuneRun) -> Iterator[tuple[str, str]]:
    yield "Server", f"{run.server.name} {run.server.version}".strip() or run.server.url
    yield "Address", run.server.url if run.is_remote else "started for the search"
    for gpu in run.idle_gpus:
        yield "GPU", f"{gpu.uuid}" + (f", {size(gpu.memory_total_bytes)}" if gpu.memory_total_bytes else "")
    yield "Tool", run.tool
    yield "Client's machine" if run.is_remote else "Machine", run.machine.host
    yield "Processor", f"{run.machine.processor}, {run.machine.core_count} cores"
    yield "Memory", size(run.machine.memory_bytes)
    yield "System", run.machine.system
    yield "Python", run.machine.python
    yield "Began", moment(run.began_at)
    yield "Took", clock(run.duration_s)
    yield "Seed", number(run.seed) if run.seed else "0"
