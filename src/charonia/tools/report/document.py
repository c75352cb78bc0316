"""A self-contained HTML file, and its tables: it loads nothing, and executes only our own script.

Text from users (models, servers, error messages) must be escaped in the markup. In the page's JSON it has no `<`, and
the script inserts it as text. The content security policy allows the one script, by its hash.
"""

import json
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

from charonia.tools.report.language import STATISTICS, counted_text, spread_rows
from charonia.tools.report.quantities import duration, number, percent, size
from charonia.tools.report.summary import VERDICT_TEXTS, best_level, is_open_loop, is_trusted
from charonia.tools.results.records import LevelResult, PerfRun

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9, 99.99)

_UNKNOWN = "-"

_Cell = Callable[[LevelResult], str]


_COLUMNS_DENSE = 11
"""A table of more columns is set narrower, so that it fits a usual window."""


@dataclass(frozen=True, slots=True)
class _Column:
    """A column: its title, the markup of its cells, and whether they are text, not numbers."""

    title: str
    cell: _Cell
    is_text: bool = False


def levels_table(run: PerfRun) -> str:
    """Return a table with a row per level: throughput, latencies, errors, verdict."""
    columns = [
        _level_column(run),
        _Column("Verdict", _verdict, is_text=True),
        *(_of_language() if any(result.language is not None for result in run.levels) else _of_inferences()),
        _Column("Errors", lambda result: percent(result.error_share)),
        *(_open_loop() if is_open_loop(run) else ()),
        *(_goodput() if any(result.goodput is not None for result in run.levels) else ()),
    ]
    best = best_level(run) if len(run.levels) > 1 else None
    return _table(columns, run.levels, best)


def _level_column(run: PerfRun) -> _Column:
    """Return the column of the load: its value alone where all levels are of one kind, as this table is the widest."""
    kinds = {str(result.level).rpartition(" ")[0] for result in run.levels}
    if len(kinds) != 1:
        return _Column("Level", lambda result: escape(str(result.level)), is_text=True)
    return _Column(kinds.pop().capitalize(), lambda result: f"{result.level.value:g}", is_text=True)


def resources_table(run: PerfRun) -> str:
    """Return a table of the resources of server and client, "" if the server's are unknown."""
    if not any(result.resources is not None or result.gpus for result in run.levels):
        return ""
    columns = [_Column("Level", lambda result: escape(str(result.level)), is_text=True)]
    if any(result.resources is not None for result in run.levels):
        most = max(result.resources.cpu_cores for result in run.levels if result.resources is not None)
        columns += [
            _Column("Server's CPU", lambda result: _bar(result, most)),
            _Column("CPU an inference", _cpu_an_inference),
            _Column(
                "Server's memory", lambda result: size(result.resources.rss_bytes) if result.resources else _UNKNOWN
            ),
        ]
    gpus = max((result.gpus for result in run.levels), key=lambda gpus: len(gpus))
    columns += [_Column(f"GPU {gpu.uuid}", _gpu(place)) for place, gpu in enumerate(gpus)]
    columns.append(_Column("Client's busiest process", lambda result: percent(result.client.overhead)))
    return _table(columns, run.levels, None)


def errors_table(run: PerfRun) -> str:
    """Return a table with a row per level and kind of error, "" if there are none."""
    rows = [
        f"<tr><th scope='row'>{escape(str(result.level))}</th><td class='text'>{escape(error.kind)}</td>"
        f"<td>{error.count:,}</td><td class='text message'>{'<br>'.join(map(escape, error.samples))}</td></tr>"
        for result in run.levels
        for error in result.errors
    ]
    if not rows:
        return ""
    head = "<th class='text'>Level</th><th class='text'>Kind</th><th>Count</th><th class='text'>Messages</th>"
    return scrolling(f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>")


def trials_tables(run: PerfRun) -> Iterator[str]:
    """Yield a collapsed table of all windows."""
    head = (
        "<th>Window</th><th>Length</th><th>Requests</th><th>Errors</th><th>Inferences/s</th><th>Latency</th><th></th>"
    )
    rows = [
        f"<tr><th scope='row' class='text'>{escape(str(result.level))}: {place}</th>"
        f"<td>{duration(window.end_ns - window.begin_ns)}</td><td>{window.request_count:,}</td>"
        f"<td>{window.error_count:,}</td><td>{number(window.throughput)}</td><td>{duration(window.latency_ns)}</td>"
        f"<td class='text'>{'' if window.used else 'not used'}</td></tr>"
        for result in run.levels
        for place, window in enumerate(result.windows, 1)
    ]
    if rows:
        table = scrolling(f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>")
        title = f"All {len(rows)} measured windows" if len(rows) > 1 else "The measured window"
        yield f"<details><summary>{title}</summary>{table}</details>"


def _table(columns: Sequence[_Column], rows: Sequence[LevelResult], best: LevelResult | None) -> str:
    head = "".join(f"<th scope='col'{_class(column)}>{escape(column.title)}</th>" for column in columns)
    body = "".join(f"<tr{' class=best' if row is best else ''}>{_cells(columns, row)}</tr>" for row in rows)
    kind = " class='dense'" if len(columns) > _COLUMNS_DENSE else ""
    return scrolling(f"<table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def _cells(columns: Sequence[_Column], row: LevelResult) -> str:
    first, *others = columns
    cells = "".join(f"<td{_class(column)}>{column.cell(row)}</td>" for column in others)
    return f"<th scope='row'>{first.cell(row)}</th>{cells}"


def _class(column: _Column) -> str:
    return " class='text'" if column.is_text else ""


def scrolling(table: str) -> str:
    """Return a table that scrolls if it is wider than the page."""
    # With focus, the keyboard can scroll the table.
    return f"<div class='wide' tabindex='0' role='group' aria-label='Table'>{table}</div>"


def _throughput(result: LevelResult) -> str:
    estimate = result.throughput
    spread = f" <small>± {percent(estimate.relative_half_width)}</small>" if estimate.confidence else ""
    return f"{number(estimate.value)}{spread}"


def _percentile(percent: float) -> _Cell:
    def cell(result: LevelResult) -> str:
        # With less than one request beyond a percentile, it is the slowest request.
        if result.request_count * (1 - percent / 100) < 1:
            return _UNKNOWN
        return duration(result.percentile(percent))

    return cell


def _open_loop() -> tuple[_Column, ...]:
    return (
        _Column("Answered/s", lambda result: number(result.offered.achieved_rate) if result.offered else _UNKNOWN),
        _Column("Sent late", lambda result: percent(result.offered.delayed_share) if result.offered else _UNKNOWN),
        _Column("Service p99", lambda result: duration(result.service_times.percentile(99))),
    )


def _of_inferences() -> tuple[_Column, ...]:
    return (
        _Column("Inferences/s", _throughput),
        *(_Column(f"p{percent:g}", _percentile(percent)) for percent in PERCENTILES),
        _Column("Slowest", lambda result: duration(result.response_times.maximum)),
    )


def _of_language() -> tuple[_Column, ...]:
    return (
        _Column("Tokens/s", lambda result: number(result.language.output_rate) if result.language else _UNKNOWN),
        _Column("TTFT p50", _of_tokens("first_token", "p50")),
        _Column("p99", _of_tokens("first_token", "p99")),
        _Column("ITL p50", _of_tokens("inter_token", "p50")),
        _Column("p99", _of_tokens("inter_token", "p99")),
        _Column("Requests/s", _throughput),
        _Column("Latency p50", _percentile(50.0)),
        _Column("p99", _percentile(99.0)),
    )


def _of_tokens(figure: str, field: str) -> _Cell:
    def cell(result: LevelResult) -> str:
        spread = None if result.language is None else result.language.spread(figure)
        return _UNKNOWN if spread is None else duration(getattr(spread, field))

    return cell


def language_tables(run: PerfRun) -> Iterator[str]:
    """Yield, for each level of a language model, a collapsed table of the figures of its requests."""
    head = "".join(f"<th scope='col'>{name}</th>" for name in ("", *STATISTICS))
    measured = [result for result in run.levels if result.language is not None]
    for result in measured:
        assert result.language is not None
        rows = "".join(
            f"<tr><th scope='row'>{escape(title)}</th>"
            + "".join(f"<td>{number(getattr(spread, field) * factor)}</td>" for field in STATISTICS.values())
            + "</tr>"
            for title, spread, factor in spread_rows(result.language)
        )
        table = scrolling(f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>")
        about = f"<p class='about'>{escape(counted_text(result.language))}</p>"
        is_open = " open" if len(measured) == 1 else ""
        yield f"<details{is_open}><summary>Tokens at {escape(str(result.level))}</summary>{table}{about}</details>"


def _goodput() -> tuple[_Column, ...]:
    return (_Column("Goodput", lambda result: f"{number(result.goodput.rate)}/s" if result.goodput else _UNKNOWN),)


def _verdict(result: LevelResult) -> str:
    kind = "good" if is_trusted(result) else "bad"
    over = " <span class='badge bad'>over the limit</span>" if result.over_latency_limit else ""
    return f"<span class='badge {kind}'>{VERDICT_TEXTS[result.verdict]}</span>{over}"


def _bar(result: LevelResult, most: float) -> str:
    if result.resources is None:
        return _UNKNOWN
    cores = result.resources.cpu_cores
    width = 100 * cores / most if most else 0.0
    return f"<span class='bar'><i style='width:{width:.1f}%'></i></span>{number(cores)} cores"


def _cpu_an_inference(result: LevelResult) -> str:
    if result.resources is None or not result.throughput.value:
        return _UNKNOWN
    return duration(1e9 * result.resources.cpu_cores / result.throughput.value)


def _gpu(place: int) -> _Cell:
    def cell(result: LevelResult) -> str:
        if place >= len(result.gpus):
            return _UNKNOWN
        gpu = result.gpus[place]
        parts = (
            percent(gpu.utilization) if gpu.utilization is not None else "",
            f"{number(gpu.power_watts)} W" if gpu.power_watts is not None else "",
            size(gpu.memory_used_bytes) if gpu.memory_used_bytes is not None else "",
        )
        return ", ".join(part for part in parts if part) or _UNKNOWN

    return cell


SCRIPTS = ("plots.js", "controls.js")
"""Scripts of every page: plots, and their controls."""


def document(
    title: str, body: Sequence[str], data: Any, *, script: str, style: str = "", connects: bool = False
) -> bytes:
    """Return a page as UTF-8.

    Args:
        title: Its title, as text.
        body: Its markup, with text from users escaped.
        data: The data of its script, as values of JSON.
        script: The page's own script, in addition to `SCRIPTS`.
        style: Its own style sheet, in addition to `page.css`.
        connects: Whether the script may connect to the page's server.
    """
    whole = "\n".join([*(asset("charonia.tools.report", name) for name in SCRIPTS), script])
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_digest(whole)}'"
    if connects:
        policy += "; connect-src 'self'"
    # Escaped, so that no text can contain `</script>`.
    shown = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{asset('charonia.tools.report', 'page.css')}{style}</style>\n</head>\n<body>\n<main>",
            *body,
            "</main>",
            f'<script type="application/json" id="data">{shown}</script>',
            f"<script>{whole}</script>\n</body>\n</html>\n",
        ]
    ).encode("utf-8", "replace")


def separated(facts: Sequence[str]) -> str:
    """Return facts in a line; where it is broken, no dot comes first."""
    *others, final = (escape(fact) for fact in facts)
    return " ".join([*(f"<span>{fact} ·</span>" for fact in others), f"<span>{final}</span>"])


def moment(iso: str) -> str:
    """Return a time in ISO format for people: `2026-01-02 03:04:05 UTC`."""
    return iso.replace("T", " ", 1).replace("+00:00", " UTC")


def asset(package: str, name: str) -> str:
    """Return a file of the folder `page` of a package."""
    return (files(package) / "page" / name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return b64encode(sha256(script.encode()).digest()).decode()
