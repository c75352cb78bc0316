"""The CSV file of a run: perf_analyzer's columns, with its names and order, followed by our own.

Rows are sorted by ascending throughput. Times are in microseconds. Each composing model of an ensemble has another
file, `<model>_v<version>.<file name>`.
"""

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path

from charonia.tools.report.console import GPU_FIGURES, HIGH_PERCENTILES, high_percentiles, percentiles, usec
from charonia.tools.report.language import language_columns
from charonia.tools.results.records import Gpu, LevelResult, PerfRun, ServerModel

Cell = str | int | float


Columns = dict[str, Callable[[LevelResult], Cell]]
"""The values of a level by the heading of their column."""


def csv_files(run: PerfRun, path: Path, *, verbose: bool = False, metrics: bool = False) -> dict[Path, str]:
    """Return the text of every file to write, by path; nothing if no level has a successful request.

    Args:
        verbose: Whether to add the columns of `--verbose-csv`.
        metrics: Whether these include GPUs.
    """
    levels = sorted((level for level in run.levels if level.request_count), key=lambda level: level.throughput.value)
    if not levels:
        return {}
    columns = _columns(run, levels) | (_verbose_columns(run, metrics) if verbose else {}) | _own_columns(run)
    files = {path: _text(columns, levels)}
    models = [level.server.model for level in levels]
    parts = {(part.name, part.version): None for model in models if model is not None for part in model.composing}
    for name, version in parts:
        files[path.with_name(f"{name}_v{version}.{path.name}")] = _composing_text(run, levels, name, version)
    return files


def _text(columns: Columns, levels: Sequence[LevelResult]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    rows = ([value(level) for value in columns.values()] for level in levels)
    writer.writerows([[f"{cell:g}" if isinstance(cell, float) else cell for cell in row] for row in rows])
    return buffer.getvalue()


def _columns(run: PerfRun, levels: Sequence[LevelResult]) -> Columns:
    columns = _level_column(levels) | {"Inferences/Second": lambda level: level.throughput.value}
    if run.model.decoupled:
        columns["Response Throughput"] = lambda level: level.response_rate
    columns["Client Send"] = lambda level: usec(level.client.send_ns)
    if any(level.server.model is not None for level in levels):
        columns["Network+Server Send/Recv"] = _network
        columns |= _server_columns(run.model.cached, lambda level: level.server.model)
    columns["Client Recv"] = lambda level: usec(level.client.receive_ns)
    return columns | dict(map(_percentile, percentiles(run.stabilising_percentile)))


def _level_column(levels: Sequence[LevelResult]) -> Columns:
    name = "Request Rate" if levels[0].level.mode.is_rate else "Concurrency"
    return {name: lambda level: float(level.level.value)}


def _server_columns(cached: bool, model_of: Callable[[LevelResult], ServerModel | None]) -> Columns:
    def mean(of: Callable[[ServerModel], float]) -> Callable[[LevelResult], Cell]:
        return lambda level: 0 if (model := model_of(level)) is None else usec(of(model))

    def part(name: str) -> Callable[[LevelResult], Cell]:
        return mean(lambda model: model.mean(model.sums_ns[name]))

    names = ("queue", "compute input", "compute infer", "compute output")
    columns = {f"Server {name.title()}": part(name) for name in names}
    if cached:
        columns |= {
            "Server Cache Hit": mean(lambda model: model.cache_hit_ns / max(1, model.success_count)),
            "Server Cache Miss": mean(lambda model: model.cache_miss_ns / max(1, model.success_count)),
        }
    return columns


def _network(level: LevelResult) -> Cell:
    """Return a request's time without client, queue, compute and cache."""
    rest = level.service_times.mean - level.client.send_ns - level.client.receive_ns
    model = level.server.model
    if model is not None:
        rest -= model.request_ns - model.overhead_ns
    return usec(max(0.0, rest))


def _percentile(percent: float) -> tuple[str, Callable[[LevelResult], Cell]]:
    return f"p{percent:g} latency", lambda level: usec(level.percentile(percent))


def _verbose_columns(run: PerfRun, metrics: bool) -> Columns:
    columns: Columns = {}
    if run.stabilising_percentile is None:
        columns["Avg latency"] = lambda level: usec(level.response_times.mean)
    columns["request/response"] = lambda level: usec(level.client.send_ns) + usec(level.client.receive_ns)
    columns["response wait"] = lambda level: usec(level.wait_ns)
    return columns | (dict(map(_gpu_column, GPU_FIGURES.items())) if metrics else {})


def _gpu_column(figure: tuple[str, Callable[[Gpu], float | None]]) -> tuple[str, Callable[[LevelResult], Cell]]:
    name, value = figure

    def cell(level: LevelResult) -> Cell:
        values = [(gpu.uuid, value(gpu)) for gpu in level.gpus]
        return "".join(f"{uuid}:{number:.15g};" for uuid, number in values if number is not None)

    return name, cell


def _high_percentile(percent: float) -> Callable[[LevelResult], Cell]:
    return lambda level: usec(level.percentile(percent)) if percent in high_percentiles(level) else ""


def _own_columns(run: PerfRun) -> Columns:
    high = [percent for percent in HIGH_PERCENTILES if percent != run.stabilising_percentile]
    columns: Columns = {
        **{f"p{percent:g} latency": _high_percentile(percent) for percent in high},
        "Throughput Low": lambda level: level.throughput.low,
        "Throughput High": lambda level: level.throughput.high,
        "Errors": lambda level: level.error_count,
        "Error Share": lambda level: float(level.error_share),
    }
    if any(level.offered is not None for level in run.levels):
        columns |= {
            "Sent Rate": lambda level: "" if level.offered is None else float(level.offered.sent_rate),
            "Delayed Share": lambda level: "" if level.offered is None else float(level.offered.delayed_share),
            "p99 service time": lambda level: usec(level.service_times.percentile(99)),
        }
    if any(level.language is not None for level in run.levels):
        columns |= language_columns()
    if any(level.goodput is not None for level in run.levels):
        columns["Goodput"] = lambda level: "" if level.goodput is None else float(level.goodput.rate)
    return columns | {"Verdict": lambda level: level.verdict.value}


def _composing_text(run: PerfRun, levels: Sequence[LevelResult], name: str, version: str) -> str:
    """Return the file of a composing model."""

    def part_of(level: LevelResult) -> ServerModel | None:
        parts = level.server.model.composing if level.server.model is not None else ()
        return next((part for part in parts if (part.name, part.version) == (name, version)), None)

    def inferences(level: LevelResult) -> Cell:
        top, part = level.server.model, part_of(level)
        return level.throughput.value * (
            part.success_count / top.success_count if top and part and top.success_count else 0.0
        )

    columns: Columns = {
        **_level_column(levels),
        "Inferences/Second": inferences,
        "Client Send": _nothing,
        "Network+Server Send/Recv": lambda level: usec(part.overhead_ns) if (part := part_of(level)) else 0,
        **_server_columns(run.model.cached, part_of),
        "Client Recv": _nothing,
    }
    return _text(columns, [level for level in levels if part_of(level) is not None])


def _nothing(level: LevelResult) -> Cell:
    return 0
