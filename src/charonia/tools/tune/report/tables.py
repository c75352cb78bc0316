"""The tables of the HTML page: the ranking, failures, and a section for each variant with its measurements by load."""

from collections.abc import Sequence
from html import escape

from charonia.tools.report.document import scrolling
from charonia.tools.report.quantities import duration, percent
from charonia.tools.results.records import Estimate
from charonia.tools.tune.api import Metric
from charonia.tools.tune.decision import Ranked, loads_text
from charonia.tools.tune.report.view import LATENCIES, MEMORIES, Role, VariantView, latency_metric, overall
from charonia.tools.tune.report.wording import change, settings_of, value_text
from charonia.tools.tune.result import GroupRecord, ModelConfigRecord
from charonia.tools.tune.tables import Row

ROWS_MAX = 12
"""Variants that are compared at once; the others are folded away."""

_SPAN_MIN, _SPAN_ROOM = 0.05, 1.25


def ranking_table(group: GroupRecord, views: Sequence[VariantView], identity: str) -> str:
    """Return a row for each variant under its best load, best first, with the gain over the default as a bar."""
    ranked = [(place, view, view.best) for place, view in enumerate(views) if view.best is not None]
    span = _span([best for _, _, best in ranked[:ROWS_MAX]])
    latency = latency_metric(group)
    memory = next(
        (metric for metric in reversed(MEMORIES) if any(overall(best, metric) for _, _, best in ranked)), None
    )
    head = "".join(
        f"<th scope='col'{kind}>{escape(title)}</th>"
        for title, kind in (
            ("Configuration", " class='text'"),
            ("Gain over the default", " class='text gain'"),
            ("Throughput", ""),
            (f"{LATENCIES[latency]} latency", ""),
            *([(MEMORIES[memory], "")] if memory is not None else ()),
            ("Batch", ""),
            ("Delay", ""),
            ("Best load", ""),
        )
    )
    rows = [_row(view, best, (latency, memory), span, f"{identity}-v{place}") for place, view, best in ranked]
    shown = _table(head, rows[:ROWS_MAX])
    if len(rows) > ROWS_MAX:
        shown += f"<details><summary>{len(rows) - ROWS_MAX} more</summary>{_table(head, rows[ROWS_MAX:])}</details>"
    return shown


def _table(head: str, rows: Sequence[str]) -> str:
    body = "".join(rows)
    return scrolling(f"<table class='ranking'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def _row(view: VariantView, best: Ranked, metrics: tuple[Metric, Metric | None], span: float, identity: str) -> str:
    latency, memory = metrics
    first = (Role.RECOMMENDED, Role.CLOSEST)
    name = f"<a href='#{identity}'>{escape(view.record.short_name)}</a>{role_badge(view)}"
    settings = f"<br><small>{escape(settings_of(view.record.variant))}</small>"
    cells = [
        f"<td class='text gain'>{_gain(view, best.gain, span)}{_other_load(view, best)}</td>",
        f"<td>{measured(Metric.THROUGHPUT, overall(best, Metric.THROUGHPUT))}</td>",
        f"<td>{measured(latency, overall(best, latency))}</td>",
        f"<td>{measured(memory, overall(best, memory), is_plain=True)}</td>" if memory is not None else "",
        f"<td>{escape(', '.join(str(config.max_batch_size or '-') for config in view.record.tuned))}</td>",
        f"<td>{escape(', '.join(map(delay_text, view.record.tuned)))}</td>",
        f"<td>{escape(loads_text(best.loads))}</td>",
    ]
    kind = " class='best'" if view.role in first else ""
    return f"<tr{kind}><th scope='row'>{name}{settings}</th>{''.join(cells)}</tr>"


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
    """Return what became of a variant as a badge, "" where there is nothing to say."""
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
        metric: Of what.
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
    rows = []
    for trial in group.trials:
        if trial.failed is None:
            continue
        record = group.variant(trial.trial.variant)
        name = record.short_name if record is not None else settings_of(trial.trial.variant)
        load = loads_text(trial.trial.loads)
        rows.append(
            f"<tr><th scope='row'>{escape(name)}</th><td class='text'>{escape(load)}</td>"
            f"<td class='text message'>{escape(trial.failed.reason)}</td></tr>"
        )
    if not rows:
        return ""
    head = "".join(f"<th scope='col' class='text'>{title}</th>" for title in ("Configuration", "Load", "Reason"))
    return scrolling(f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>")


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
