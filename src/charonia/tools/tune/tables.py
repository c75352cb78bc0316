"""The result tables as CSV, with Model Analyzer's names, headers and order, and the summary on the terminal. Pure.

The best configuration comes first. Within a configuration, rows that keep the constraints come first, then better ones.
Repeated measurements of a load are pooled into one row. A file ends with a blank line.
"""

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from charonia.tools.report.quantities import in_columns, number
from charonia.tools.results.records import Estimate, Gpu, LevelResult, LoadMode
from charonia.tools.tune.api import METRICS, Metric, TrialRecord, counted_noun
from charonia.tools.tune.decision import GAIN_MAX, Conclusion, Ranked, loads_text
from charonia.tools.tune.objective import Evidence, Point
from charonia.tools.tune.result import GroupRecord, ModelConfigRecord, TuneRun, VariantRecord

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
    for trial in group.trials:
        evidence.add(trial)
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
    "model_name", "gpu_uuid", "batch_size", "concurrency", "model_config_path", "instance_group",
    "satisfies_constraints", "gpu_used_memory", "gpu_utilization", "gpu_power_usage",
)  # fmt: skip
_SUMMED = (Metric.THROUGHPUT.value, Metric.OUTPUT_TOKENS.value)


def _cell(name: str) -> Cell:
    if name in _CELLS:
        return _CELLS[name]
    if name.startswith(BACKEND_PARAMETER):
        key = name.removeprefix(BACKEND_PARAMETER)
        return lambda row: ",".join(config.parameters.get(key, "") for config in row.variant.tuned)
    if name in _SERVER_TIMES:
        return lambda row: _over_models(row, _SERVER_TIMES[name], name)
    return lambda row: _metric(row, name)


def _metric(row: Row, name: str) -> str:
    values = [row.point.metrics[model][name].value for model in row.group.models if name in row.point.metrics[model]]
    return _together(values, name)


def _over_models(row: Row, of: Callable[[LevelResult], float | None], name: str) -> str:
    values = []
    for model in row.group.models:
        levels = [trial.levels[model] for trial in row.trials if model in trial.levels]
        found = [value / 1e6 for value in map(of, levels) if value is not None]
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


_SERVER_TIMES: Mapping[str, Callable[[LevelResult], float | None]] = {
    "perf_client_send_recv": lambda level: level.client.send_ns + level.client.receive_ns,
    "perf_client_response_wait": lambda level: level.wait_ns,
    "perf_server_queue": lambda level: _part(level, "queue"),
    "perf_server_compute_input": lambda level: _part(level, "compute input"),
    "perf_server_compute_infer": lambda level: _part(level, "compute infer"),
    "perf_server_compute_output": lambda level: _part(level, "compute output"),
}
"""Times in nanoseconds by their field."""


def _part(level: LevelResult, name: str) -> float | None:
    model = level.server.model
    return None if model is None else model.mean(model.sums_ns[name])


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


_COLUMNS = ("configuration", "instances", "batch", "delay", "load", "infer/s", "p99 ms", "memory", "over default")
_TOKEN_COLUMNS = (*_COLUMNS[:5], "tokens/s", "TTFT p99 ms", "ITL p99 ms", *_COLUMNS[7:])
_NAME_LENGTH_MAX = 24
_CHANGE_LINES_MAX = 60
_SKIPPED_MAX = 6


def summary(run: TuneRun, configs_per_model: int = 3, names: Sequence[str] = (), top_configs: int = 0) -> str:
    """Return the summary of a run.

    Args:
        names: Just these variants, () for the best.
        top_configs: Variants of all models together, 0 for no such table.
    """
    blocks = [_group(group, configs_per_model, names) for group in run.groups]
    if top_configs and len(run.groups) > 1:
        blocks.append(_top(run, top_configs))
    if run.problem:
        blocks.append(f"The run ended early: {run.problem}. The measurements are kept; the same command resumes.")
    elif run.is_interrupted:
        blocks.append("Interrupted. The measurements are kept; the same command resumes.")
    return "\n\n".join(blocks)


def table(lines: Sequence[Sequence[str]]) -> str:
    """Return lines in columns with two blanks between them, the first line on top of a rule."""
    shown = in_columns(lines)
    return "\n".join([shown[0], "-" * max(map(len, shown)), *shown[1:]])


def _group(group: GroupRecord, configs_per_model: int, names: Sequence[str]) -> str:
    decision = group.decision
    head = f"{' and '.join(group.models)}: {group.extent} in {group.duration_s:.0f} s"
    resumed = sum(trial.is_resumed for trial in group.trials)
    if resumed:
        head += f", {resumed} of them from the journal"
    blocks = [head, "\n".join((*decision.sentences, *filter(None, [group.disturbance])))]
    shown = _shown(group, configs_per_model, names)
    if shown:
        has_tokens = any(Metric.OUTPUT_TOKENS in metrics for ranked in shown for metrics in ranked.metrics.values())
        lines: list[tuple[str, ...]] = [_TOKEN_COLUMNS if has_tokens else _COLUMNS]
        lines += [_line(group, ranked, _TOKENS if has_tokens else _REQUESTS) for ranked in shown]
        blocks.append(table(lines))
        if any(line[-1].endswith(_OTHER_LOAD) for line in lines[1:]):
            blocks.append(f"{_OTHER_LOAD} The default configuration does best under another load.")
    blocks.append(_change(group))
    blocks.append(_not_measured(group))
    return "\n\n".join(block for block in blocks if block)


def _not_measured(group: GroupRecord) -> str:
    """Return the variants without a measurement, those with the same reason on one line."""
    variants: dict[str, list[str]] = {}
    for skipped in group.skipped:
        reason = next(iter(skipped.reason.splitlines()), "")
        variants.setdefault(reason, []).append(str(skipped.variant))
    if not variants:
        return ""
    lines = []
    for reason, names in variants.items():
        more = f" and {counted_noun(len(names) - 1, 'other configuration')}" if len(names) > 1 else ""
        lines.append(f"  {names[0]}{more}: {reason}")
    rest = [f"  and {counted_noun(len(lines) - _SKIPPED_MAX, 'other reason')}"] if len(lines) > _SKIPPED_MAX else []
    return "\n".join(["Not measured:", *lines[:_SKIPPED_MAX], *rest])


def _shown(group: GroupRecord, configs_per_model: int, names: Sequence[str]) -> list[Ranked]:
    ranking = group.decision.ranking
    if names:
        records = [(ranked, group.variant(ranked.variant)) for ranked in ranking]
        return [ranked for ranked, record in records if record is not None and record.is_named(names)]
    best = list(ranking[:configs_per_model])
    for extra in (group.decision.best, group.decision.default):
        if extra is not None and all(extra.variant.key != ranked.variant.key for ranked in best):
            best.append(extra)
    return best


_OTHER_LOAD = "*"
_REQUESTS = (Metric.THROUGHPUT, Metric.LATENCY_P99)
_TOKENS = (Metric.OUTPUT_TOKENS, Metric.TTFT_P99, Metric.ITL_P99)


def _line(group: GroupRecord, ranked: Ranked, metrics: Sequence[Metric]) -> tuple[str, ...]:
    record = group.variant(ranked.variant)
    tuned = record.tuned if record is not None else ()
    is_best = group.decision.best is not None and ranked.variant.key == group.decision.best.variant.key
    memory = _values(ranked, Metric.CPU_USED_RAM)[:1]  # the server's, the same for every model
    name = _name(group, ranked)
    return (
        f"{'>' if is_best else ' '} {name if len(name) <= _NAME_LENGTH_MAX else f'…{name[1 - _NAME_LENGTH_MAX :]}'}",
        ",".join(config.instance_group for config in tuned),
        ",".join(str(config.max_batch_size) for config in tuned),
        ",".join("-" if config.queue_delay_us is None else f"{config.queue_delay_us} us" for config in tuned),
        loads_text(ranked.loads),
        *("; ".join(map(_estimate, _values(ranked, metric))) for metric in metrics),
        "; ".join(f"{number(value.value)} MB" for value in memory),
        _over_default(ranked),
    )


def _over_default(ranked: Ranked) -> str:
    if ranked.gain is None or ranked.variant.is_default:
        return ""
    return _percent(ranked.gain) + (f" {_OTHER_LOAD}" if ranked.between_loads else "")


def _values(ranked: Ranked, metric: Metric) -> list[Estimate]:
    return [metrics[metric] for metrics in ranked.metrics.values() if metric in metrics]


def _estimate(estimate: Estimate) -> str:
    if not estimate.confidence or not estimate.value:
        return number(estimate.value)
    return f"{number(estimate.value)} ±{100 * estimate.relative_half_width:.0f} %"


def _percent(share: Estimate) -> str:
    high = f"{100 * share.high:+.0f}" if share.high < GAIN_MAX else f"over {100 * GAIN_MAX:.0f}"
    return f"{100 * share.value:+.0f} % [{100 * share.low:+.0f}, {high}]"


def _name(group: GroupRecord, ranked: Ranked) -> str:
    record = group.variant(ranked.variant)
    return record.short_name if record is not None else str(ranked.variant)


def _change(group: GroupRecord) -> str:
    best = group.decision.best
    record = group.variant(best.variant) if best is not None else None
    if record is None or group.decision.conclusion is Conclusion.CONSTRAINTS_NOT_MET:
        return ""
    lines = []
    for config in record.configs:
        if config.diff:
            lines += [f"Change of {config.model} ({config.name}/config.pbtxt):", *_indented(config.diff)]
    return "\n".join(lines)


def _indented(diff: str) -> list[str]:
    lines = [f"  {line}" for line in diff.splitlines()[2:]]
    return lines if len(lines) <= _CHANGE_LINES_MAX else [*lines[:_CHANGE_LINES_MAX], "  ..."]


def _top(run: TuneRun, count: int) -> str:
    ranked = [(group, each) for group in run.groups for each in group.decision.ranking]
    ranked.sort(key=lambda pair: (not pair[1].keeps_constraints, -(pair[1].gain.value if pair[1].gain else 0.0)))
    return table([_COLUMNS, *(_line(group, each, _REQUESTS) for group, each in ranked[:count])])
