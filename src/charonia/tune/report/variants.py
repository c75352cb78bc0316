"""The section of each variant: its configuration, what was measured of it load by load."""

from html import escape

from charonia.report.html_tables import scrolling
from charonia.report.quantities import percent
from charonia.tune.api import Metric
from charonia.tune.report.tables import measured, role_badge
from charonia.tune.report.view import LATENCIES, MEMORIES, VariantView
from charonia.tune.report.wording import settings_of
from charonia.tune.result import GroupRecord, ModelConfigRecord
from charonia.tune.tables import Row

_DIFF_KINDS = {"+": "ins", "-": "del"}
_DIFF_HEADER = ("---", "+++", "@@")


def variant_section(group: GroupRecord, view: VariantView, identity: str) -> str:
    """Return the section of a variant, folded away.

    Args:
        group: The search.
        view: The variant.
        identity: Id of the section, which links lead to.
    """
    settings = "as it was found" if view.is_default else settings_of(view.record.variant)
    head = f"<b>{escape(view.record.name)}</b>{role_badge(view)} <span>{escape(settings)}</span>"
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
    """Return a unified diff with what is new and what is gone marked."""
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
    shares = [_error_share(row, model) for row in view.rows]
    titles = [
        "Load",
        "Throughput",
        *(LATENCIES[metric] for metric in latencies),
        *(MEMORIES[metric] for metric in memories),
    ]
    titles += ["Errors"] if any(shares) else []
    titles += ["Measured", "Limits"] if any(row.point.violation for row in view.rows) else ["Measured"]
    head = "".join(f"<th scope='col'>{escape(title)}</th>" for title in titles)
    body = ""
    for row, share in zip(view.rows, shares, strict=True):
        metrics = row.point.metrics[model]
        cells = [measured(Metric.THROUGHPUT, metrics.get(Metric.THROUGHPUT))]
        cells += [measured(metric, metrics.get(metric)) for metric in latencies]
        cells += [measured(metric, metrics.get(metric), is_plain=True) for metric in memories]
        cells += [percent(share)] if any(shares) else []
        cells.append(f"{len(row.trials)} &times;")
        if "Limits" in titles:
            cells.append("<span class='badge bad'>missed</span>" if row.point.violation else "kept")
        kind = " class='best'" if row is view.best_row and len(view.rows) > 1 else ""
        load = "; ".join(str(load) for load in row.point.loads if load.model == model)
        body += f"<tr{kind}><th scope='row'>{escape(load)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    title = f"Loads of {escape(model)}" if is_named else "Loads"
    return f"<h3>{title}</h3>" + scrolling(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def _has(view: VariantView, model: str, metric: Metric) -> bool:
    return any(metric in row.point.metrics[model] for row in view.rows)


def _error_share(row: Row, model: str) -> float:
    levels = [trial.levels[model] for trial in row.trials if model in trial.levels]
    ended = sum(level.error_count + level.request_count for level in levels)
    return sum(level.error_count for level in levels) / ended if ended else 0.0
