"""A self-contained HTML file, and its tables: it loads nothing, and executes only our own script.

Text from users (models, servers, error messages) must be escaped in the markup. In the page's JSON it has no `<`, and
the script inserts it as text. The content security policy allows the one script, by its hash.
"""

import json
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

from charonia.tools.report.columns import Column, markup_table
from charonia.tools.report.language import SPREAD_COLUMNS, counted_text, spread_rows
from charonia.tools.report.quantities import duration, number, percent, size
from charonia.tools.report.summary import VERDICT_TEXTS, best_level, is_open_loop, is_trusted
from charonia.tools.results.records import ErrorKind, LevelResult, LoadLevel, Machine, PerfRun, Window

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9, 99.99)

_UNKNOWN = "-"

_Columns = list[Column[LevelResult]]
_Cell = Callable[[LevelResult], str]

_LEVEL: Column[LevelResult] = Column("Level", lambda result: str(result.level), "text")

_COLUMNS_DENSE = 11
"""A table of more columns is set narrower, so that it fits a usual window."""


def level_columns(run: PerfRun) -> _Columns:
    """Return the columns of the table of levels: load, verdict, throughput, latencies, errors."""
    return [
        _level_column(run),
        Column("Verdict", lambda result: VERDICT_TEXTS[result.verdict], "text", _verdict),
        *(_of_language() if any(result.language is not None for result in run.levels) else _of_inferences()),
        Column("Errors", lambda result: percent(result.error_share)),
        *(_open_loop() if is_open_loop(run) else ()),
        *(_goodput() if any(result.goodput is not None for result in run.levels) else ()),
    ]


def levels_table(run: PerfRun) -> str:
    """Return a table with a row per level."""
    columns, best = level_columns(run), best_level(run) if len(run.levels) > 1 else None
    return markup_table(columns, run.levels, "dense" * (len(columns) > _COLUMNS_DENSE), best)


def _level_column(run: PerfRun) -> Column[LevelResult]:
    """Return the column of the load: its value alone where all levels are of one kind, as this table is the widest."""
    kinds = {str(result.level).rpartition(" ")[0] for result in run.levels}
    if len(kinds) != 1:
        return _LEVEL
    return Column(kinds.pop().capitalize(), lambda result: f"{result.level.value:g}", "text")


def resources_table(run: PerfRun) -> str:
    """Return a table of the resources of server and client, "" if the server's are unknown."""
    if not any(result.resources is not None or result.gpus for result in run.levels):
        return ""
    columns: _Columns = [_LEVEL]
    if any(result.resources is not None for result in run.levels):
        most = max(result.resources.cpu_cores for result in run.levels if result.resources is not None)
        columns += [
            Column("Server's CPU", _cores, markup=lambda result: _bar(result, most)),
            Column("CPU an inference", _cpu_an_inference),
            Column(
                "Server's memory", lambda result: size(result.resources.rss_bytes) if result.resources else _UNKNOWN
            ),
        ]
    gpus = max((result.gpus for result in run.levels), key=lambda gpus: len(gpus))
    columns += [Column(f"GPU {gpu.uuid}", _gpu(place)) for place, gpu in enumerate(gpus)]
    columns.append(Column("Client's busiest process", lambda result: percent(result.client.overhead)))
    return markup_table(columns, run.levels)


def errors_table(run: PerfRun) -> str:
    """Return a table with a row per level and kind of error, "" if there are none."""
    columns: tuple[Column[tuple[LoadLevel, ErrorKind]], ...] = (
        Column("Level", lambda row: str(row[0]), "text"),
        Column("Kind", lambda row: row[1].kind, "text"),
        Column("Count", lambda row: f"{row[1].count:,}"),
        Column("Messages", kind="text message", markup=lambda row: "<br>".join(map(escape, row[1].samples))),
    )
    rows = [(result.level, error) for result in run.levels for error in result.errors]
    return markup_table(columns, rows) if rows else ""


def trials_tables(run: PerfRun) -> Iterator[str]:
    """Yield a collapsed table of all windows."""
    columns: tuple[Column[tuple[str, Window]], ...] = (
        Column("Window", lambda row: row[0], "text"),
        Column("Length", lambda row: duration(row[1].end_ns - row[1].begin_ns)),
        Column("Requests", lambda row: f"{row[1].request_count:,}"),
        Column("Errors", lambda row: f"{row[1].error_count:,}"),
        Column("Inferences/s", lambda row: number(row[1].throughput)),
        Column("Latency", lambda row: duration(row[1].latency_ns)),
        Column("", lambda row: "" if row[1].used else "not used", "text"),
    )
    windows = ((result.level, place, each) for result in run.levels for place, each in enumerate(result.windows, 1))
    rows = [(f"{level}: {place}", window) for level, place, window in windows]
    if rows:
        title = f"All {len(rows)} measured windows" if len(rows) > 1 else "The measured window"
        yield f"<details><summary>{title}</summary>{markup_table(columns, rows)}</details>"


def _per_second(result: LevelResult) -> str:
    return number(result.throughput.value)


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


def _open_loop() -> _Columns:
    return [
        Column("Answered/s", lambda result: number(result.offered.achieved_rate) if result.offered else _UNKNOWN),
        Column("Sent late", lambda result: percent(result.offered.delayed_share) if result.offered else _UNKNOWN),
        Column("Service p99", lambda result: duration(result.service_times.percentile(99))),
    ]


def _of_inferences() -> _Columns:
    return [
        Column("Inferences/s", _per_second, markup=_throughput),
        *(Column(f"p{percent:g}", _percentile(percent)) for percent in PERCENTILES),
        Column("Slowest", lambda result: duration(result.response_times.maximum)),
    ]


def _of_language() -> _Columns:
    return [
        Column("Tokens/s", lambda result: number(result.language.output_rate) if result.language else _UNKNOWN),
        Column("TTFT p50", _of_tokens("first_token", "p50")),
        Column("p99", _of_tokens("first_token", "p99")),
        Column("ITL p50", _of_tokens("inter_token", "p50")),
        Column("p99", _of_tokens("inter_token", "p99")),
        Column("Requests/s", _per_second, markup=_throughput),
        Column("Latency p50", _percentile(50.0)),
        Column("p99", _percentile(99.0)),
    ]


def _of_tokens(figure: str, field: str) -> _Cell:
    def cell(result: LevelResult) -> str:
        spread = None if result.language is None else result.language.spread(figure)
        return _UNKNOWN if spread is None else duration(getattr(spread, field))

    return cell


def language_tables(run: PerfRun) -> Iterator[str]:
    """Yield, for each level of a language model, a collapsed table of the figures of its requests."""
    measured = [result for result in run.levels if result.language is not None]
    for result in measured:
        assert result.language is not None
        table = markup_table(SPREAD_COLUMNS, spread_rows(result.language))
        about = f"<p class='about'>{escape(counted_text(result.language))}</p>"
        is_open = " open" if len(measured) == 1 else ""
        yield f"<details{is_open}><summary>Tokens at {escape(str(result.level))}</summary>{table}{about}</details>"


def _goodput() -> _Columns:
    return [Column("Goodput", lambda result: f"{number(result.goodput.rate)}/s" if result.goodput else _UNKNOWN)]


def _verdict(result: LevelResult) -> str:
    kind = "good" if is_trusted(result) else "bad"
    over = " <span class='badge bad'>over the limit</span>" if result.over_latency_limit else ""
    return f"<span class='badge {kind}'>{VERDICT_TEXTS[result.verdict]}</span>{over}"


def _cores(result: LevelResult) -> str:
    return f"{number(result.resources.cpu_cores)} cores" if result.resources is not None else _UNKNOWN


def _bar(result: LevelResult, most: float) -> str:
    if result.resources is None:
        return _UNKNOWN
    width = 100 * result.resources.cpu_cores / most if most else 0.0
    return f"<span class='bar'><i style='width:{width:.1f}%'></i></span>{_cores(result)}"


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


def document(title: str, body: Sequence[str], data: Any, *, script: str, style: str = "") -> bytes:
    """Return a page as UTF-8.

    Args:
        script: The page's own script, in addition to `SCRIPTS`.
        style: Its own style sheet, in addition to `page.css`.
    """
    whole = "\n".join([*(asset("charonia.tools.report", name) for name in SCRIPTS), script])
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_digest(whole)}'"
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


def tile(name: str, value: str, below: str) -> str:
    """Return the markup of a figure in the summary, with markup below it."""
    return f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd class='below'>{below}</dd></div>"


def notes_markup(lines: Sequence[str]) -> str:
    """Return the markup of what readers have to know, lines of markup; "" for nothing."""
    items = "".join(f"<li>{line}</li>" for line in lines)
    return f'<div class="cautions"><h3>To know</h3><ul>{items}</ul></div>' if lines else ""


def environment(
    title: str, facts: Iterable[tuple[str, str]], command: str, options: Mapping[str, str], summary: str, more: str = ""
) -> str:
    """Return the section of server, machine, command line and options; `more` is markup between facts and command."""
    rows = "".join(
        f"<tr><th scope='row'>{escape(name)}</th><td class='text message'>{escape(value)}</td></tr>"
        for name, value in options.items()
    )
    table = f"<div class='wide'><table><tbody>{rows}</tbody></table></div>"
    shown = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in facts)
    parts = [f'<section><h2>{escape(title)}</h2><dl class="facts">{shown}</dl>{more}']
    parts += [f"<h3>Command</h3><pre tabindex='0'>{escape(command)}</pre>"] if command else []
    parts += [f"<details><summary>{summary}</summary>{table}</details>"] if options else []
    return "".join(parts) + "</section>"


def machine_facts(machine: Machine, title: str, began_at: str) -> Iterator[tuple[str, str]]:
    """Yield the facts of the machine of a run, and when that began."""
    yield title, machine.host
    yield "Processor", f"{machine.processor}, {machine.core_count} cores"
    yield "Memory", size(machine.memory_bytes)
    yield "System", machine.system
    yield "Python", machine.python
    yield "Began", began_at.replace("T", " ", 1).replace("+00:00", " UTC")


def separated(facts: Sequence[str]) -> str:
    """Return facts in a line; where it is broken, no dot comes first."""
    *others, final = (escape(fact) for fact in facts)
    return " ".join([*(f"<span>{fact} ·</span>" for fact in others), f"<span>{final}</span>"])


def asset(package: str, name: str) -> str:
    """Return a file of the folder `page` of a package."""
    return (files(package) / "page" / name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return b64encode(sha256(script.encode()).digest()).decode()
