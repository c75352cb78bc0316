"""The CSV file of a run: perf_analyzer's columns, with its names and order, followed by our own.

Rows are sorted by ascending throughput. Times are in microseconds. Each composing model of an ensemble has another
file, `<model>_v<version>.<file name>`.
"""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from charonia.tools.report.console import HIGH_PERCENTILES, high_percentiles, percentiles, usec
from charonia.tools.report.language import language_columns
from charonia.tools.results.records import Gpu, LevelResult, PerfRun, ServerModel

Cell = str | int | float


@dataclass(frozen=True, slots=True)
class CsvColumn:
    """A column: its heading, and its value for a level."""

    head: str
    value: Callable[[LevelResult], Cell]


def csv_files(run: PerfRun, path: Path, *, verbose: bool = False, metrics: bool = False) -> dict[Path, str]:
    """Return the text of every file to write, by path; nothing if no level has a successful request.

    Args:
        verbose: Whether to add the columns of `--verbose-csv`.
        metrics: Whether these include GPUs.
    """
    levels = sorted((level for level in run.levels if level.request_count), key=lambda level: level.throughput.value)
    if not levels:
        return {}
    columns = [*_columns(run, levels), *(_verbose_columns(run, metrics) if verbose else []), *_own_columns(run)]
    files = {path: _text(columns, levels)}
    models = [level.server.model for level in levels]
    parts = {(part.name, part.version): None for model in models if model is not None for part in model.composing}
    for name, version in parts:
        files[path.with_name(f"{name}_v{version}.{path.name}")] = _composing_text(run, levels, name, version)
    return files


def _text(columns: Sequence[CsvColumn], levels: Sequence[LevelResult]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([column.head for column in columns])
    rows = ([column.value(level) for column in columns] for level in levels)
    writer.writerows([[f"{cell:g}" if isinstance(cell, float) else cell for cell in row] for row in rows])
    return buffer.getvalue()


def _columns(run: PerfRun, levels: Sequence[LevelResult]) -> list[CsvColumn]:
    columns = [_level_column(levels), CsvColumn("Inferences/Second", lambda level: level.throughput.value)]
    if run.model.decoupled:
        columns.append(CsvColumn("Response Throughput", lambda level: level.response_rate))
    columns.append(CsvColumn("Client Send", lambda level: usec(level.client.send_ns)))
    if any(level.server.model is not None for level in levels):
        columns.append(CsvColumn("Network+Server Send/Recv", _network))
        columns += _server_columns(run.model.cached, lambda level: level.server.model)
    columns.append(CsvColumn("Client Recv", lambda level: usec(level.client.receive_ns)))
    return columns + [_percentile(percent) for percent in percentiles(run.stabilising_percentile)]


def _level_column(levels: Sequence[LevelResult]) -> CsvColumn:
    is_rate = levels[0].level.mode.is_rate
    return CsvColumn("Request Rate" if is_rate else "Concurrency", lambda level: float(level.level.value))


def _server_columns(cached: bool, model_of: Callable[[LevelResult], ServerModel | None]) -> list[CsvColumn]:
    def column(head: str, mean: Callable[[ServerModel], float]) -> CsvColumn:
        return CsvColumn(head, lambda level: 0 if (model := model_of(level)) is None else usec(mean(model)))

    columns = [
        column("Server Queue", lambda model: model.mean(model.queue_ns)),
        column("Server Compute Input", lambda model: model.mean(model.compute_input_ns)),
        column("Server Compute Infer", lambda model: model.mean(model.compute_infer_ns)),
        column("Server Compute Output", lambda model: model.mean(model.compute_output_ns)),
    ]
    if cached:
        columns += [
            column("Server Cache Hit", lambda model: model.cache_hit_ns / max(1, model.success_count)),
            column("Server Cache Miss", lambda model: model.cache_miss_ns / max(1, model.success_count)),
        ]
    return columns


def _network(level: LevelResult) -> Cell:
    """Return a request's time without client, queue, compute and cache."""
    rest = level.service_times.mean - level.client.send_ns - level.client.receive_ns
    model = level.server.model
    if model is not None:
        rest -= model.request_ns - model.overhead_ns
    return usec(max(0.0, rest))


def _percentile(percent: float) -> CsvColumn:
    return CsvColumn(f"p{percent:g} latency", lambda level: usec(level.percentile(percent)))


def _verbose_columns(run: PerfRun, metrics: bool) -> list[CsvColumn]:
    columns = []
    if run.stabilising_percentile is None:
        columns.append(CsvColumn("Avg latency", lambda level: usec(level.response_times.mean)))
    columns.append(
        CsvColumn("request/response", lambda level: usec(level.client.send_ns) + usec(level.client.receive_ns))
    )
    columns.append(CsvColumn("response wait", _wait))
    if metrics:
        columns += [
            CsvColumn("Avg GPU Utilization", lambda level: _by_gpu(level, lambda gpu: gpu.utilization)),
            CsvColumn("Avg GPU Power Usage", lambda level: _by_gpu(level, lambda gpu: gpu.power_watts)),
            CsvColumn("Max GPU Memory Usage", lambda level: _by_gpu(level, lambda gpu: gpu.memory_used_bytes)),
            CsvColumn("Total GPU Memory", lambda level: _by_gpu(level, lambda gpu: gpu.memory_total_bytes)),
        ]
    return columns


def _wait(level: LevelResult) -> Cell:
    return usec(max(0.0, level.service_times.mean - level.client.send_ns - level.client.receive_ns))


def _by_gpu(level: LevelResult, value: Callable[[Gpu], float | None]) -> str:
    values = [(gpu.uuid, value(gpu)) for gpu in level.gpus]
    return "".join(f"{uuid}:{number:.15g};" for uuid, number in values if number is not None)


def _high_percentile(percent: float) -> CsvColumn:
    def value(level: LevelResult) -> Cell:
        return usec(level.percentile(percent)) if percent in high_percentiles(level) else ""

    return CsvColumn(f"p{percent:g} latency", value)


def _own_columns(run: PerfRun) -> list[CsvColumn]:
    columns = [_high_percentile(percent) for percent in HIGH_PERCENTILES if percent != run.stabilising_percentile]
    columns += [
        CsvColumn("Throughput Low", lambda level: level.throughput.low),
        CsvColumn("Throughput High", lambda level: level.throughput.high),
        CsvColumn("Errors", lambda level: level.error_count),
        CsvColumn("Error Share", lambda level: float(level.error_share)),
    ]
    if any(level.offered is not None for level in run.levels):
        columns += [
            CsvColumn("Sent Rate", lambda level: "" if level.offered is None else float(level.offered.sent_rate)),
            CsvColumn(
                "Delayed Share", lambda level: "" if level.offered is None else float(level.offered.delayed_share)
            ),
            CsvColumn("p99 service time", lambda level: usec(level.service_times.percentile(99))),
        ]
    if any(level.language is not None for level in run.levels):
        columns += [CsvColumn(head, value) for head, value in language_columns()]
    if any(level.goodput is not None for level in run.levels):
        columns.append(CsvColumn("Goodput", lambda level: "" if level.goodput is None else float(level.goodput.rate)))
    return [*columns, CsvColumn("Verdict", lambda level: level.verdict.value)]


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

    columns = [
        _level_column(levels),
        CsvColumn("Inferences/Second", inferences),
        CsvColumn("Client Send", _nothing),
        CsvColumn("Network+Server Send/Recv", lambda level: usec(part.overhead_ns) if (part := part_of(level)) else 0),
        *_server_columns(run.model.cached, part_of),
        CsvColumn("Client Recv", _nothing),
    ]
    return _text(columns, [level for level in levels if part_of(level) is not None])


def _nothing(level: LevelResult) -> Cell:
    return 0
