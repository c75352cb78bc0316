"""The CSV file of a run: perf_analyzer's columns, with its names and order, followed by our own.

Rows are sorted by ascending throughput. Times are in microseconds. Each composing model of an ensemble has another
file, `<model>_v<version>.<file name>`.
"""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from charonia.tools.report.console import HIGH_PERCENTILES, high_percentiles, percentiles
from charonia.tools.report.language import language_columns
from charonia.tools.results.records import Gpu, LevelResult, LoadMode, PerfRun, ServerModel

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
    files = {path: _text([column.head for column in columns], [[c.value(level) for c in columns] for level in levels])}
    models = [level.server.model for level in levels]
    parts = {(part.name, part.version): None for model in models if model is not None for part in model.composing}
    for name, version in parts:
        files[path.with_name(f"{name}_v{version}.{path.name}")] = _composing_text(run, levels, name, version)
    return files


def _text(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(head)
    writer.writerows([[f"{cell:g}" if isinstance(cell, float) else cell for cell in row] for row in rows])
    return buffer.getvalue()


def _columns(run: PerfRun, levels: Sequence[LevelResult]) -> list[CsvColumn]:
    columns = [_level_column(levels), CsvColumn("Inferences/Second", lambda level: level.throughput.value)]
    if run.model.decoupled:
        columns.append(CsvColumn("Response Throughput", lambda level: level.response_rate))
    columns.append(CsvColumn("Client Send", lambda level: _usec(level.client.send_ns)))
    if any(level.server.model is not None for level in levels):
        columns.append(CsvColumn("Network+Server Send/Recv", _network))
        columns += _server_columns(run.model.cached)
    columns.append(CsvColumn("Client Recv", lambda level: _usec(level.client.receive_ns)))
    return columns + [_percentile(percent) for percent in percentiles(run.stabilising_percentile)]


def _level_column(levels: Sequence[LevelResult]) -> CsvColumn:
    is_count = levels[0].level.mode in (LoadMode.CONCURRENCY, LoadMode.PERIODIC)
    return CsvColumn("Concurrency" if is_count else "Request Rate", lambda level: float(level.level.value))


def _server_columns(cached: bool) -> list[CsvColumn]:
    def mean(total: Callable[[ServerModel], int]) -> Callable[[LevelResult], Cell]:
        def value(level: LevelResult) -> Cell:
            model = level.server.model
            return 0 if model is None else _usec(model.mean(total(model)))

        return value

    def cache(total: Callable[[ServerModel], int]) -> Callable[[LevelResult], Cell]:
        def value(level: LevelResult) -> Cell:
            model = level.server.model
            return 0 if model is None else _usec(total(model) / max(1, model.success_count))

        return value

    columns = [
        CsvColumn("Server Queue", mean(lambda model: model.queue_ns)),
        CsvColumn("Server Compute Input", mean(lambda model: model.compute_input_ns)),
        CsvColumn("Server Compute Infer", mean(lambda model: model.compute_infer_ns)),
        CsvColumn("Server Compute Output", mean(lambda model: model.compute_output_ns)),
    ]
    if cached:
        columns.append(CsvColumn("Server Cache Hit", cache(lambda model: model.cache_hit_ns)))
        columns.append(CsvColumn("Server Cache Miss", cache(lambda model: model.cache_miss_ns)))
    return columns


def _network(level: LevelResult) -> Cell:
    """Return a request's time without client, queue, compute and cache."""
    rest = level.service_times.mean - level.client.send_ns - level.client.receive_ns
    model = level.server.model
    if model is not None:
        rest -= model.request_ns - model.overhead_ns
    return _usec(max(0.0, rest))


def _percentile(percent: float) -> CsvColumn:
    return CsvColumn(f"p{percent:g} latency", lambda level: _usec(level.percentile(percent)))


def _verbose_columns(run: PerfRun, metrics: bool) -> list[CsvColumn]:
    columns = []
    if run.stabilising_percentile is None:
        columns.append(CsvColumn("Avg latency", lambda level: _usec(level.response_times.mean)))
    columns.append(
        CsvColumn("request/response", lambda level: _usec(level.client.send_ns) + _usec(level.client.receive_ns))
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
    return _usec(max(0.0, level.service_times.mean - level.client.send_ns - level.client.receive_ns))


def _by_gpu(level: LevelResult, value: Callable[[Gpu], float | None]) -> str:
    values = [(gpu.uuid, value(gpu)) for gpu in level.gpus]
    return "".join(f"{uuid}:{number:.15g};" for uuid, number in values if number is not None)


def _high_percentile(percent: float) -> CsvColumn:
    def value(level: LevelResult) -> Cell:
        return _usec(level.percentile(percent)) if percent in high_percentiles(level) else ""

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
            CsvColumn("p99 service time", lambda level: _usec(level.service_times.percentile(99))),
        ]
    if any(level.language is not None for level in run.levels):
        columns += [CsvColumn(head, value) for head, value in language_columns()]
    if any(level.goodput is not None for level in run.levels):
        columns.append(CsvColumn("Goodput", lambda level: "" if level.goodput is None else float(level.goodput.rate)))
    return [*columns, CsvColumn("Verdict", lambda level: level.verdict.value)]


def _composing_text(run: PerfRun, levels: Sequence[LevelResult], name: str, version: str) -> str:
    """Return the file of a composing model."""
    first = _level_column(levels)
    head = [first.head, "Inferences/Second", "Client Send", "Network+Server Send/Recv"]
    head += [column.head for column in _server_columns(run.model.cached)]
    rows: list[list[Cell]] = []
    for level in levels:
        top = level.server.model
        part = next((m for m in top.composing if (m.name, m.version) == (name, version)), None) if top else None
        if top is None or part is None:
            continue
        share = part.success_count / top.success_count if top.success_count else 0.0
        times = (part.queue_ns, part.compute_input_ns, part.compute_infer_ns, part.compute_output_ns)
        row: list[Cell] = [first.value(level), level.throughput.value * share, 0, _usec(part.overhead_ns)]
        row += [_usec(part.mean(total)) for total in times]
        if run.model.cached:
            row += [_usec(total / max(1, part.success_count)) for total in (part.cache_hit_ns, part.cache_miss_ns)]
        rows.append([*row, 0])
    return _text([*head, "Client Recv"], rows)


def _usec(duration_ns: float) -> int:
    return int(duration_ns / 1000)
