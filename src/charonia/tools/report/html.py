"""The HTML page of runs.

Tables and text are part of the markup, so they are readable without JavaScript; `page/page.js` draws the plots from the
page's JSON.
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from charonia.core.errors import invalid
from charonia.tools.report.document import (
    asset,
    document,
    errors_table,
    language_tables,
    levels_table,
    moment,
    resources_table,
    separated,
    trials_tables,
)
from charonia.tools.report.plot_data import TITLES, plot_data
from charonia.tools.report.quantities import clock, duration, number, percent, size
from charonia.tools.report.summary import VERDICT_TEXTS, best_level, headline, is_trusted
from charonia.tools.results.language import LanguageFigures
from charonia.tools.results.records import LevelResult, PerfRun


def render(runs: Sequence[PerfRun], names: Sequence[str] = (), lead: Sequence[str] = ()) -> bytes:
    """Return the page of one run, or of several for comparison, as UTF-8.

    Args:
        names: Their names, () for the names of model and server.
        lead: Markup that comes before them.

    Raises:
        ServingError: INVALID_ARG without a run.
    """
    if not runs:
        raise invalid("the page: expected at least one run, got none")
    names = names or _names(runs)
    title = " and ".join(dict.fromkeys(run.model.name for run in runs))
    body = [*lead, *_sections(runs, names), *_ending(runs, names)]
    script = asset("charonia.tools.report", "page.js")
    return document(f"{title}: load test", body, plot_data(runs, names), script=script)


def render_live(run: PerfRun, page: str, points_max: int) -> bytes:
    """Return the page of a run in progress as UTF-8: all results so far, then updates by events of its server.

    Args:
        run: The run so far.
        page: Identifies this page. An event with another one makes the browser load the page again.
        points_max: Points of time that the page shows.
    """
    name = run.model.name
    so_far = [*_summary(run), *_plots()] if run.levels else []
    body = [_header(run, name), '<section id="live" hidden></section>', *so_far, *_ending([run], [name])]
    data = {**plot_data([run], [name]), "page": page, "pointsMax": points_max}
    script = asset("charonia.tools.report", "page.js") + asset("charonia.tools.report", "live.js")
    return document(f"Measuring {name}", body, data, script=script, connects=True)


def _names(runs: Sequence[PerfRun]) -> list[str]:
    """Return unique names of the runs: model and server, with a number if these are equal."""
    plain = [f"{run.model.name} on {run.server.name or run.server.url}" for run in runs]
    return [
        f"{name} ({place})" if plain.count(name) > 1 else name
        for name, place in zip(plain, range(1, len(plain) + 1), strict=True)
    ]


def _sections(runs: Sequence[PerfRun], names: Sequence[str]) -> Iterator[str]:
    for run, name in zip(runs, names, strict=True):
        yield _header(run, name if len(runs) > 1 else run.model.name)
        yield from _summary(run)
    yield from _plots()


def _plots() -> Iterator[str]:
    yield "<noscript><p>The plots need JavaScript; the tables do not.</p></noscript>"
    for identity, text in _PLOTS.items():
        if identity == "ttft":
            yield '<div id="chooser"></div>'  # of the run that the plots from here on show
        title = TITLES[identity]
        yield f'<section class="plot" id="{identity}" hidden><h2>{title}</h2><p class="about">{text}</p></section>'


_PLOTS = {
    "load": "How much the server does under each load, and how long requests take. Shades are intervals.",
    "tradeoff": "Each point is a level. Right is more work done, low is a shorter wait. "
    "Dashed: more load than at the peak, without more work done.",
    "ttft": "How long requests waited for the first piece of their response.",
    "itl": "The mean time between the tokens of a response, a value for each request.",
    "icl": "The time between two pieces of a response that follow each other, all of all responses.",
    "distribution": "Latencies of requests: each step of the axis to the right is ten times rarer.",
    "timeline": "The course of the run, from the first request on. The results are from the shaded time.",
    "parts": "A mean request, by the server's own statistics; the rest is the network and the client.",
}


def _header(run: PerfRun, title: str) -> str:
    return f"<header><h1>{escape(title)}</h1><p class='about'>{_measured(run)}</p></header>"


def _summary(run: PerfRun) -> Iterator[str]:
    best = best_level(run)
    yield f'<section class="summary"><p class="headline">{escape(headline(run))}</p>'
    if best is not None:
        yield f'<dl class="tiles">{"".join(_tiles(run, best))}</dl>'
    yield from _cautions(run)
    yield f"</section><section><h2>Levels</h2>{levels_table(run)}"
    yield from language_tables(run)
    yield from trials_tables(run)
    yield "</section>"
    errors = errors_table(run)
    if errors:
        yield f"<section><h2>Errors</h2>{errors}</section>"


def _measured(run: PerfRun) -> str:
    server = f"{run.server.name} {run.server.version}".strip() or "a server"
    facts = [
        f"{server} at {run.server.url}",
        run.server.protocol.upper() if run.server.protocol == "http" else "gRPC",
        f"batch size {run.batch_size}",
        run.began_at.replace("T", " ", 1)[:16],
        *([f"measured for {clock(run.duration_ns / 1e9)}"] if run.levels else []),
    ]
    return separated(facts)


def _tiles(run: PerfRun, best: LevelResult) -> Iterator[str]:
    load, value = str(best.level).rsplit(" ", 1)
    yield _tile(f"Best {load}" if len(run.levels) > 1 else load.capitalize(), value, _badge(best))
    if best.language is not None:
        yield from _language_tiles(best.language)
    estimate = best.throughput
    sure = f"{100 * estimate.confidence:g} % sure"
    spread = f"± {percent(estimate.relative_half_width)}, {sure}" if estimate.confidence else ""
    name = "Inferences/s" if best.language is None else "Requests/s"
    yield _tile(name, number(estimate.value), escape(spread))
    yield _tile("Median latency", duration(best.percentile(50)), escape(f"p99 {duration(best.percentile(99))}"))
    if best.goodput is not None:
        objectives = escape(", ".join(best.goodput.objectives))
        yield _tile("Goodput", f"{number(best.goodput.rate)}/s", f"{percent(best.goodput.share)} within {objectives}")
    failed = f"{best.error_count:,} of {best.error_count + best.request_count:,} requests"
    yield _tile("Errors", percent(best.error_share), failed)
    if best.resources is not None:
        yield _tile("Server CPU", f"{number(best.resources.cpu_cores)} cores", size(best.resources.rss_bytes))


def _language_tiles(figures: LanguageFigures) -> Iterator[str]:
    user = figures.user_rate
    if figures.output_tokens is not None:
        below = f"{number(user.mean)} a user" if user is not None else ""
        yield _tile("Output tokens/s", number(figures.output_rate), below)
    for name, spread in (("Time to first token", figures.first_token), ("Inter-token latency", figures.inter_token)):
        if spread is not None:
            yield _tile(name, duration(spread.p50), f"p99 {duration(spread.p99)}")


def _tile(name: str, value: str, below: str) -> str:
    return f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd class='below'>{below}</dd></div>"


def _badge(result: LevelResult) -> str:
    kind = "good" if is_trusted(result) else "bad"
    return f'<span class="badge {kind}">{VERDICT_TEXTS[result.verdict]}</span>'


def _cautions(run: PerfRun) -> Iterator[str]:
    lines = [escape(note) for note in run.notes]
    levels: dict[tuple[str, str], list[str]] = {}
    for result in run.levels:
        # The reason why a level is stable is shown only with other reasons.
        is_plain = is_trusted(result) and len(result.reasons) == 1
        sentences = [*(() if is_plain else result.reasons), *result.server.notes]
        if sentences or not is_trusted(result):
            levels.setdefault((_badge(result), " ".join(sentences)), []).append(str(result.level))
    lines += [f"{escape(_enumerated(names))} {badge} {escape(text)}" for (badge, text), names in levels.items()]
    if lines:
        yield f'<div class="cautions"><h3>To know</h3><ul>{_items(lines)}</ul></div>'


def _enumerated(levels: Sequence[str]) -> str:
    """Return levels of one kind as `concurrency 1, 2 and 4`."""
    *others, last = [level.rsplit(" ", 1)[1] for level in levels]
    values = f"{', '.join(others)} and {last}" if others else last
    return f"{levels[0].rsplit(' ', 1)[0]} {values}"


def _items(lines: Iterable[str]) -> str:
    return "".join(f"<li>{line}</li>" for line in lines)


def _ending(runs: Sequence[PerfRun], names: Sequence[str]) -> Iterator[str]:
    for run, name in zip(runs, names, strict=True):
        of_which = f": {escape(name)}" if len(runs) > 1 else ""
        resources = resources_table(run)
        if resources:
            yield f"<section><h2>Resources{of_which}</h2>{resources}</section>"
        yield f"<section><h2>Environment{of_which}</h2>"
        facts = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in _facts(run))
        yield f'<dl class="facts">{facts}</dl>'
        if run.command:
            yield f"<h3>Command</h3><pre tabindex='0'>{escape(run.command)}</pre>"
        if run.options:
            yield f"<details><summary>All options in force</summary>{_options(run)}</details>"
        yield "</section>"


def _options(run: PerfRun) -> str:
    rows = "".join(
        f"<tr><th scope='row'>{escape(name)}</th><td class='text message'>{escape(value)}</td></tr>"
        for name, value in run.options.items()
    )
    return f"<div class='wide'><table><tbody>{rows}</tbody></table></div>"


def _facts(run: PerfRun) -> Iterator[tuple[str, str]]:
    yield "Model", f"{run.model.name} {run.model.version}".strip()
    if run.model.platform:
        yield "Platform", run.model.platform
    yield "Largest batch", str(run.model.max_batch_size) if run.model.max_batch_size else "does not batch"
    yield "Server", f"{run.server.name} {run.server.version}".strip() or run.server.url
    yield "Client", run.tool
    yield "Client's machine", run.machine.host
    yield "Processor", f"{run.machine.processor}, {run.machine.core_count} cores"
    yield "Memory", size(run.machine.memory_bytes)
    yield "System", run.machine.system
    yield "Python", run.machine.python
    yield "Began", moment(run.began_at)
