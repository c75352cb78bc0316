"""The data of the plots of the HTML page, as lists and numbers. Pure.

Times are in nanoseconds, except along the time line: there they are milliseconds from the start of the run. `page.js`
reads these names.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from charonia.core.latency import LatencyHistogram
from charonia.tools.report.summary import best_level
from charonia.tools.results.records import LevelResult, PerfRun, TimeBucket
from charonia.tools.results.server import ServerModel

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
    """Return the data of all plots.

    Args:
        names: Their names.
    """
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
            {"name": name, "axis": _time_axis(run), "levels": _levels(run)}
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


def _levels(run: PerfRun) -> list[dict[str, Any]]:
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
            "time": _time(result, begin),
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


def _time(result: LevelResult, begin: int) -> dict[str, list[float]]:
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
    return {
        "model": model.name,
        "queue": model.mean(model.queue_ns),
        "input": model.mean(model.compute_input_ns),
        "infer": model.mean(model.compute_infer_ns),
        "output": model.mean(model.compute_output_ns),
        "cache": (model.cache_hit_ns + model.cache_miss_ns) / model.success_count,
        "other": model.overhead_ns,
    }
