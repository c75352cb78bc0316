"""The HTML page of runs.

Tables and text are part of the markup, so they are readable without JavaScript; `page/page.js` draws the plots from the
page's JSON.
"""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from charonia.core.errors import invalid
from charonia.core.latency import LatencyHistogram
from charonia.tools.report.document import (
    asset,
    document,
    environment,
    errors_table,
    language_tables,
    levels_table,
    machine_facts,
    notes_markup,
    resources_table,
    separated,
    tile,
    trials_tables,
)
from charonia.tools.report.quantities import clock, duration, number, percent, size
from charonia.tools.report.summary import VERDICT_TEXTS, best_level, headline, is_trusted
from charonia.tools.results.language import LanguageFigures
from charonia.tools.results.records import LevelResult, PerfRun, ServerModel, TimeBucket


def render(runs: Sequence[PerfRun], names: Sequence[str] = (), lead: Sequence[str] = ()) -> bytes:
    """Return the page of one run, or of several for comparison, as UTF-8.

    Args:
        names: Their names, () for the names of model and server.
    """
    if not runs:
        raise invalid("the page: expected at least one run, got none")
    names = names or _names(runs)
    title = " and ".join(dict.fromkeys(run.model.name for run in runs))
    body = [*lead, *_sections(runs, names), *_ending(runs, names)]
    script = asset("charonia.tools.report", "page.js")
    return document(f"{title}: load test", body, plot_data(runs, names), script=script)


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
    yield _cautions(run)
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
    yield tile(f"Best {load}" if len(run.levels) > 1 else load.capitalize(), value, _badge(best))
    if best.language is not None:
        yield from _language_tiles(best.language)
    estimate = best.throughput
    sure = f"{100 * estimate.confidence:g} % sure"
    spread = f"± {percent(estimate.relative_half_width)}, {sure}" if estimate.confidence else ""
    name = "Inferences/s" if best.language is None else "Requests/s"
    yield tile(name, number(estimate.value), escape(spread))
    yield tile("Median latency", duration(best.percentile(50)), escape(f"p99 {duration(best.percentile(99))}"))
    if best.goodput is not None:
        objectives = escape(", ".join(best.goodput.objectives))
        yield tile("Goodput", f"{number(best.goodput.rate)}/s", f"{percent(best.goodput.share)} within {objectives}")
    failed = f"{best.error_count:,} of {best.error_count + best.request_count:,} requests"
    yield tile("Errors", percent(best.error_share), failed)
    if best.resources is not None:
        yield tile("Server CPU", f"{number(best.resources.cpu_cores)} cores", size(best.resources.rss_bytes))


def _language_tiles(figures: LanguageFigures) -> Iterator[str]:
    user = figures.user_rate
    if figures.output_tokens is not None:
        below = f"{number(user.mean)} a user" if user is not None else ""
        yield tile("Output tokens/s", number(figures.output_rate), below)
    for name, spread in (("Time to first token", figures.first_token), ("Inter-token latency", figures.inter_token)):
        if spread is not None:
            yield tile(name, duration(spread.p50), f"p99 {duration(spread.p99)}")


def _badge(result: LevelResult) -> str:
    kind = "good" if is_trusted(result) else "bad"
    return f'<span class="badge {kind}">{VERDICT_TEXTS[result.verdict]}</span>'


def _cautions(run: PerfRun) -> str:
    lines = [escape(note) for note in run.notes]
    levels: dict[tuple[str, str], list[str]] = {}
    for result in run.levels:
        # The reason why a level is stable is shown only with other reasons.
        is_plain = is_trusted(result) and len(result.reasons) == 1
        sentences = [*(() if is_plain else result.reasons), *result.server.notes]
        if sentences or not is_trusted(result):
            levels.setdefault((_badge(result), " ".join(sentences)), []).append(str(result.level))
    lines += [f"{escape(_enumerated(names))} {badge} {escape(text)}" for (badge, text), names in levels.items()]
    return notes_markup(lines)


def _enumerated(levels: Sequence[str]) -> str:
    """Return levels of one kind as `concurrency 1, 2 and 4`."""
    *others, last = [level.rsplit(" ", 1)[1] for level in levels]
    values = f"{', '.join(others)} and {last}" if others else last
    return f"{levels[0].rsplit(' ', 1)[0]} {values}"


def _ending(runs: Sequence[PerfRun], names: Sequence[str]) -> Iterator[str]:
    for run, name in zip(runs, names, strict=True):
        of_which = f": {escape(name)}" if len(runs) > 1 else ""
        resources = resources_table(run)
        if resources:
            yield f"<section><h2>Resources{of_which}</h2>{resources}</section>"
        title = "Environment" + (f": {name}" if len(runs) > 1 else "")
        yield environment(title, _facts(run), run.command, run.options, "All options in force")


def _facts(run: PerfRun) -> Iterator[tuple[str, str]]:
    yield "Model", f"{run.model.name} {run.model.version}".strip()
    if run.model.platform:
        yield "Platform", run.model.platform
    yield "Largest batch", str(run.model.max_batch_size) if run.model.max_batch_size else "does not batch"
    yield "Server", f"{run.server.name} {run.server.version}".strip() or run.server.url
    yield "Client", run.tool
    yield from machine_facts(run.machine, "Client's machine", run.began_at)


STEPS_A_DECADE = 24
"""Points of a distribution from 0 to 90 %, from 90 to 99 % and so on."""

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
"""Percentiles plotted against the throughput."""

PARTS = {
    "outside": "Network and client",
    "other": "Server, other",
    "cache": "Cache",
    "queue": "Queue",
    "input": "Compute input",
    "infer": "Compute infer",
    "output": "Compute output",
}
"""The parts of a request's time, in the order of the bar. The style sheet has a colour `--p-NAME` for each."""

TITLES = {
    "load": "Throughput and latency by load",
    "tradeoff": "Latency against throughput",
    "ttft": "Time to first token",
    "itl": "Inter-token latency",
    "icl": "Inter-chunk latency",
    "distribution": "Latency distribution",
    "timeline": "Time line",
    "parts": "Where the time goes",
}
"""Titles of the plots by their kind."""

_MILLISECOND = 1_000_000
_OUTLIER_FACTOR = 20


def plot_data(runs: Sequence[PerfRun], names: Sequence[str]) -> dict[str, Any]:
    """Return the data of all plots."""
    latencies = [
        [result.percentile(percent) for percent in PERCENTILES]
        for run in runs
        for result in run.levels
        if result.request_count
    ]
    return {
        "percentiles": list(PERCENTILES),
        "parts": list(PARTS.items()),
        "work": "Output tokens per second" if any(map(is_language, runs)) else "Inferences per second",
        "axis": latency_axis([values[0] for values in latencies], [values[-1] for values in latencies]),
        "runs": [
            {"name": name, "axis": _time_axis(run), "levels": _level_data(run)}
            for run, name in zip(runs, names, strict=True)
        ],
    }


def latency_axis(usual: Sequence[float], slowest: Sequence[float]) -> str:
    """Return the kind of axis for latencies: "log" where outliers would squeeze the usual ones on a linear axis."""
    usable = sorted(value for value in usual if value > 0)
    has_outliers = usable and max(slowest, default=0) > _OUTLIER_FACTOR * usable[len(usable) // 2]
    return "log" if has_outliers else "linear"


def _time_axis(run: PerfRun) -> str:
    pieces = [piece for result in run.levels for piece in result.timeline if piece.end_ns > piece.begin_ns]
    return latency_axis([piece.p50_ns for piece in pieces], [piece.max_ns for piece in pieces])


def _level_data(run: PerfRun) -> list[dict[str, Any]]:
    best = best_level(run)
    begins = _begins(run)
    return [
        {
            "label": str(result.level),
            "value": f"{result.level.value:g}",
            "load": result.level.value,
            "best": result is best,
            "verdict": result.verdict.value,
            "throughput": _work(result),
            "latencies": [result.percentile(percent) for percent in PERCENTILES],
            "requests": result.request_count,
            "curve": _curve(result.response_times, result.service_times),
            **_token_curves(result),
            "time": _time_line(result, begin),
            "windows": _windows(result, begin),
            "parts": list(parts(result)),
        }
        for result, begin in zip(run.levels, begins, strict=True)
        if result.request_count or result.timeline
    ]


def _begins(run: PerfRun) -> list[int]:
    """Return the start of each level, in nanoseconds since the start of the first."""
    if all(result.epoch_ns for result in run.levels):
        first = min((result.epoch_ns for result in run.levels), default=0)
        return [result.epoch_ns - first for result in run.levels]
    begins, begin = [], 0
    for result in run.levels:
        begins.append(begin)
        begin += result.timeline[-1].end_ns if result.timeline else result.duration_ns
    return begins


def is_language(run: PerfRun) -> bool:
    return any(result.language is not None for result in run.levels)


def _work(result: LevelResult) -> list[float]:
    """Return the work done per second, with the ends of its interval."""
    if result.language is not None:
        return [result.language.output_rate] * 3
    return [result.throughput.value, result.throughput.low, result.throughput.high]


def _token_curves(result: LevelResult) -> dict[str, Any]:
    """Return the distributions of a language model by the name of their plot."""
    figures = result.language
    if figures is None:
        return {}
    found = {"ttft": figures.first_token_times, "itl": figures.inter_token_times, "icl": figures.inter_chunk_times}
    return {name: _curve(times, times) for name, times in found.items() if times.count}


def _curve(response_times: LatencyHistogram, service_times: LatencyHistogram) -> dict[str, Any]:
    """Return latencies at the quantiles `1 - 10 ** -x` for `x` in steps, up to the last value."""
    count = max(response_times.count, 1)
    steps = math.ceil(math.log10(count) * STEPS_A_DECADE) + 1
    xs = [min(step / STEPS_A_DECADE, math.log10(count)) for step in range(steps)]
    percents = [*(100 * (1 - 10**-x) for x in xs[:-1]), 100.0]
    response = _at(response_times, percents)
    service = _at(service_times, percents)
    return {"x": [round(x, 4) for x in xs], "response": response, "service": None if service == response else service}


def _at(histogram: LatencyHistogram, percents: list[float]) -> list[int]:
    return [histogram.percentile(percent) for percent in percents]


def _time_line(result: LevelResult, begin: int) -> dict[str, list[float]]:
    pieces = [piece for piece in result.timeline if piece.end_ns > piece.begin_ns]
    return {
        "begin": [(begin + piece.begin_ns) / _MILLISECOND for piece in pieces],
        "end": [(begin + piece.end_ns) / _MILLISECOND for piece in pieces],
        "sent": [_rate(piece.sent_count, piece) for piece in pieces],
        "done": [_rate(piece.completed_count, piece) for piece in pieces],
        "errors": [_rate(piece.error_count, piece) for piece in pieces],
        "p50": [piece.p50_ns for piece in pieces],
        "p99": [piece.p99_ns for piece in pieces],
        "max": [piece.max_ns for piece in pieces],
    }


def _rate(count: int, piece: TimeBucket) -> float:
    return round(count * 1e9 / (piece.end_ns - piece.begin_ns), 3)


def _windows(result: LevelResult, begin: int) -> list[list[float]]:
    """Return start and end of the windows of the result."""
    return [
        [(begin + window.begin_ns) / _MILLISECOND, (begin + window.end_ns) / _MILLISECOND]
        for window in result.windows
        if window.used
    ]


def parts(result: LevelResult) -> Iterator[dict[str, Any]]:
    """Yield the parts of a mean request's time: of the model, then of the composing models of an ensemble."""
    model = result.server.model
    if model is None or not model.success_count:
        return
    outside = result.service_times.mean - model.request_ns
    yield {**_model_parts(model), "outside": max(0.0, outside)}
    for inner in _inner(model):
        yield _model_parts(inner)


def _inner(model: ServerModel) -> Iterator[ServerModel]:
    for composing in model.composing:
        if composing.success_count:
            yield composing
        yield from _inner(composing)


def _model_parts(model: ServerModel) -> dict[str, Any]:
    names = ("queue", "input", "infer", "output")
    means = dict(zip(names, map(model.mean, model.sums_ns.values()), strict=True))
    return {"model": model.name, **means, "cache": model.cache_ns, "other": model.overhead_ns}
