"""The result tables as CSV, with Model Analyzer's names, headers and order. Pure.

The best configuration comes first. Within a configuration, rows that keep the constraints come first, then better ones.
Repeated measurements of a load are pooled into one row. A file ends with a blank line.
"""

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from charonia.tools.results.records import Gpu, LoadMode, ServerModel
from charonia.tools.tune.api import METRICS, Metric
from charonia.tools.tune.objective import Evidence, Point
from charonia.tools.tune.result import GroupRecord, ModelConfigRecord, TrialRecord, VariantRecord

SERVER_NAME = "triton-server"
"""Name of the idle server in its table."""

BACKEND_PARAMETER = "backend_parameter/"
"""Prefix of the name of a field that shows a parameter of the model."""


@dataclass(frozen=True, slots=True)
class Row:
    """A point of a variant."""

    group: GroupRecord
    variant: VariantRecord
    point: Point
    trials: tuple[TrialRecord, ...]

    @property
    def profiled(self) -> tuple[ModelConfigRecord, ...]:
        """Configurations of the models that got load."""
        return tuple(config for config in self.variant.configs if config.is_profiled)


Cell = Callable[[Row], str]


def inference_csv(groups: Sequence[GroupRecord], fields: Sequence[str] = ()) -> str:
    """Return the table of all measurements."""
    rows = [row for group in groups for row in rows_of(group)]
    is_rate = any(row.point.loads[0].mode is not LoadMode.CONCURRENCY for row in rows)
    has_tokens = any(Metric.OUTPUT_TOKENS in metrics for row in rows for metrics in row.point.metrics.values())
    shown = (*_INFERENCE_FIELDS, *(_TOKEN_FIELDS if has_tokens else ()))
    names = list(fields) or (["model_name", "batch_size", "concurrency", *shown])
    if is_rate:
        names = ["request_rate" if name == "concurrency" else name for name in names]
    headers = [header_of(name) for name in names]
    return _csv(headers, ([_cell(name)(row) for name in names] for row in rows))


def gpu_csv(groups: Sequence[GroupRecord], fields: Sequence[str] = ()) -> str:
    """Return the table of the GPUs in all measurements, "" without any GPU."""
    names = list(fields) or list(_GPU_TABLE)
    headers = [header_of(name) for name in names]
    lines = [
        [_GPU_CELLS[name](gpu) if name in _GPU_CELLS else _cell(name)(row) for name in names]
        for group in groups
        for row in rows_of(group)
        for gpu in _gpus(row)
    ]
    return _csv(headers, lines) if lines else ""


def server_csv(gpus: Sequence[Gpu], fields: Sequence[str] = ()) -> str:
    """Return the table of the idle server, "" without any GPU."""
    names = list(fields) or list(_SERVER_TABLE)
    lines = [[SERVER_NAME if name == "model_name" else _GPU_CELLS[name](gpu) for name in names] for gpu in gpus]
    return _csv([header_of(name) for name in names], lines) if lines else ""


def rows_of(group: GroupRecord) -> Iterator[Row]:
    """Yield the measurements, in the order of the tables."""
    evidence = Evidence(group.goal)
    for told in group.history:
        evidence.add(told)
    by_number = {trial.trial.number: trial for trial in group.trials}
    for best in evidence.ranking():
        record = group.variant(best.variant)
        if record is None:
            continue
        for point in sorted(evidence.points(best.variant), key=lambda point: point.order, reverse=True):
            yield Row(group, record, point, tuple(by_number[number] for number in point.trial_numbers))


def header_of(name: str) -> str:
    """Return the header of a field; an unknown name is its own header."""
    return HEADERS.get(name, name)


HEADERS: Mapping[str, str] = {
    **{metric.value: text.head for metric, text in METRICS.items()},
    "model_name": "Model",
    "batch_size": "Batch",
    "concurrency": "Concurrency",
    "request_rate": "Request Rate",
    "model_config_path": "Model Config Path",
    "instance_group": "Instance Group",
    "max_batch_size": "Max Batch Size",
    "satisfies_constraints": "Satisfies Constraints",
    "perf_client_send_recv": "Client Send/Recv (ms)",
    "perf_client_response_wait": "Response Wait Time (ms)",
    "perf_server_queue": "Server Queue time (ms)",
    "perf_server_compute_input": "Server Compute Input time (ms)",
    "perf_server_compute_infer": "Server Compute Infer time (ms)",
    "perf_server_compute_output": "Server Compute Output time (ms)",
    "gpu_uuid": "GPU UUID",
}
"""Header by field."""

_INFERENCE_FIELDS = (
    "model_config_path",
    "instance_group",
    "max_batch_size",
    "satisfies_constraints",
    "perf_throughput",
    "perf_latency_p99",
)
_TOKEN_FIELDS = ("output_token_throughput", "time_to_first_token_p99", "inter_token_latency_p99")
_SERVER_TABLE = ("model_name", "gpu_uuid", "gpu_used_memory", "gpu_utilization", "gpu_power_usage")
_GPU_TABLE = (
    *("model_name", "gpu_uuid", "batch_size", "concurrency", "model_config_path", "instance_group"),
    *("satisfies_constraints", "gpu_used_memory", "gpu_utilization", "gpu_power_usage"),
)
_SUMMED = (Metric.THROUGHPUT.value, Metric.OUTPUT_TOKENS.value)


def _cell(name: str) -> Cell:
    if name in _CELLS:
        return _CELLS[name]
    if name.startswith(BACKEND_PARAMETER):
        key = name.removeprefix(BACKEND_PARAMETER)
        return lambda row: ",".join(config.parameters.get(key, "") for config in row.variant.tuned)
    if name in _SERVER_TIMES:
        return lambda row: _over_models(row, lambda trial, model: _server_time(trial, model, name), name)
    return lambda row: _metric(row, name)


def _metric(row: Row, name: str) -> str:
    values = [row.point.metrics[model][name].value for model in row.group.models if name in row.point.metrics[model]]
    return _together(values, name)


def _over_models(row: Row, of: Callable[[TrialRecord, str], float | None], name: str) -> str:
    values = []
    for model in row.group.models:
        found = [value for value in (of(trial, model) for trial in row.trials) if value is not None]
        if found:
            values.append(sum(found) / len(found))
    return _together(values, name)


def _together(values: Sequence[float], name: str) -> str:
    """Return the value of a model; for several, the sum (of latencies the largest), with each in brackets."""
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:.1f}"
    total = sum(values) if name in _SUMMED else max(values)
    return f"{total:.1f},[{','.join(f'{value:.1f}' for value in values)}]"


def _server_time(trial: TrialRecord, model: str, name: str) -> float | None:
    level = trial.levels.get(model)
    if level is None:
        return None
    if name == "perf_client_send_recv":
        return (level.client.send_ns + level.client.receive_ns) / 1e6
    if name == "perf_client_response_wait":
        return max(0.0, level.service_times.mean - level.client.send_ns - level.client.receive_ns) / 1e6
    stats = level.server.model
    return None if stats is None else stats.mean(_STATS[name](stats)) / 1e6


_STATS: Mapping[str, Callable[[ServerModel], int]] = {
    "perf_server_queue": lambda stats: stats.queue_ns,
    "perf_server_compute_input": lambda stats: stats.compute_input_ns,
    "perf_server_compute_infer": lambda stats: stats.compute_infer_ns,
    "perf_server_compute_output": lambda stats: stats.compute_output_ns,
}
_SERVER_TIMES = ("perf_client_send_recv", "perf_client_response_wait", *_STATS)


def _config_path(row: Row) -> str:
    below = [config.name for config in row.variant.configs if not config.is_profiled]
    return f"{row.variant.name}: {', '.join(below)}" if below else row.variant.name


_CELLS: Mapping[str, Cell] = {
    "model_name": lambda row: ",".join(row.group.models),
    "batch_size": lambda row: ",".join(str(load.batch_size) for load in row.point.loads),
    "concurrency": lambda row: ",".join(f"{load.value:g}" for load in row.point.loads),
    "request_rate": lambda row: ",".join(f"{load.value:g}" for load in row.point.loads),
    "model_config_path": _config_path,
    "instance_group": lambda row: ",".join(config.instance_group for config in row.variant.tuned),
    "max_batch_size": lambda row: ",".join(str(config.max_batch_size) for config in row.variant.tuned),
    "satisfies_constraints": lambda row: "No" if row.point.violation else "Yes",
}

_GPU_CELLS: Mapping[str, Callable[[Gpu], str]] = {
    "gpu_uuid": lambda gpu: gpu.uuid,
    "gpu_used_memory": lambda gpu: _number(gpu.memory_used_bytes, 1e-6),
    "gpu_free_memory": lambda gpu: _number(gpu.memory_free_bytes, 1e-6),
    "gpu_utilization": lambda gpu: _number(gpu.utilization, 100),
    "gpu_power_usage": lambda gpu: _number(gpu.power_watts, 1),
}


def _gpus(row: Row) -> list[Gpu]:
    """Return the GPUs of the last trial of a point; models that run at the same time share them."""
    found = {gpu.uuid: gpu for trial in row.trials for level in trial.levels.values() for gpu in level.gpus}
    return list(found.values())


def _number(value: float | None, factor: float) -> str:
    return "" if value is None else f"{value * factor:.1f}"


def _csv(headers: Sequence[str], lines: Iterator[list[str]] | Sequence[list[str]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(headers)
    writer.writerows(lines)
    return text.getvalue() + "\n"
