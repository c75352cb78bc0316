"""The Prometheus text format, and the metrics of a server in it. Pure.

Names and labels that start with `nv_` are Triton's; names that start with `charonia_` are ours and follow Prometheus'
own conventions (seconds, `_total`). Format source: Prometheus exposition formats, text version 0.0.4.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from charonia.core.statistics import Duration, ModelStatistics, WorkerState
from charonia.server.metrics.custom import CustomFamily, CustomMetrics
from charonia.server.metrics.metric_families import Family, Histogram
from charonia.server.metrics.model_metrics import (
    BATCH_SIZE,
    CACHE_SUMMARIES,
    COMPUTE_DURATION,
    FIRST_RESPONSE,
    QUEUE_DURATION,
    REQUEST_DURATION,
    REQUEST_SUMMARY,
    SUMMARIES,
    ModelMetrics,
)
from charonia.server.metrics.tokens import (
    BETWEEN_TOKENS,
    CACHED_TOKENS,
    COMPLETION_TOKENS,
    FIRST_TOKEN,
    GEN_AI_FIRST_TOKEN,
    GEN_AI_PER_TOKEN,
    GEN_AI_USAGE,
    PROMPT_TOKENS,
    TokenMetrics,
)

_NS_PER_US = 1000
_NS_PER_MS = 1e6
_NS_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class MachineGauges:
    """Gauges of the machine. Utilisations are in 0..1.

    Attributes:
        cpu_utilization: Share of all cores in use since the previous reading, None at the first.
        memory_total_bytes: Memory of the machine.
        memory_used_bytes: Memory in use.
        process_memory_bytes: Resident memory of the server process.
    """

    cpu_utilization: float | None
    memory_total_bytes: int
    memory_used_bytes: int
    process_memory_bytes: int


@dataclass(frozen=True, slots=True)
class InstanceCount:
    """The bounds of a number of instances that follows the load.

    Attributes:
        least: The configured minimum.
        most: The configured maximum.
        changes: Changes of their number so far, by reason.
    """

    least: int
    most: int
    changes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ModelSample:
    """One model version on the metrics page: its metrics, tags, waiting requests, workers and instances.

    `pending` is None for an ensemble, whose requests wait only at the models of its steps; `scaling` is None where the
    number of instances is fixed.
    """

    metrics: ModelMetrics
    tags: Mapping[str, str]
    pending: int | None
    workers: Sequence[WorkerState] = ()
    scaling: InstanceCount | None = None
    instances: int = 0


@dataclass(frozen=True, slots=True)
class _Counter:
    name: str
    help: str
    read: Callable[[ModelStatistics], int]


def _us(read: Callable[[ModelStatistics], Duration]) -> Callable[[ModelStatistics], int]:
    return lambda statistics: read(statistics).ns // _NS_PER_US


_COUNTERS = (
    _Counter("nv_inference_request_success", "Requests answered", lambda s: s.success.count),
    _Counter("nv_inference_count", "Inferences computed (batch elements)", lambda s: s.inference_count),
    _Counter("nv_inference_exec_count", "Batches executed", lambda s: s.execution_count),
    _Counter(
        "nv_inference_request_duration_us", "Time of answered requests, arrival to answer", _us(lambda s: s.success)
    ),
    _Counter("nv_inference_queue_duration_us", "Time that requests waited", _us(lambda s: s.queue)),
    _Counter("nv_inference_compute_input_duration_us", "Time to put inputs in place", _us(lambda s: s.compute_input)),
    _Counter("nv_inference_compute_infer_duration_us", "Time that models computed", _us(lambda s: s.compute_infer)),
    _Counter("nv_inference_compute_output_duration_us", "Time to take outputs", _us(lambda s: s.compute_output)),
)

_CACHE_COUNTERS = (
    _Counter("nv_cache_num_hits_per_model", "Requests answered from the response cache", lambda s: s.cache_hit.count),
    _Counter("nv_cache_num_misses_per_model", "Requests not in the response cache", lambda s: s.cache_miss.count),
    _Counter("nv_cache_hit_duration_per_model", "Time of hits in microseconds", _us(lambda s: s.cache_hit)),
    _Counter("nv_cache_miss_duration_per_model", "Time of misses in microseconds", _us(lambda s: s.cache_miss)),
)

COLLAPSED = "charonia_cache_collapsed_total"

_DURATIONS: tuple[tuple[str, str, Callable[[ModelMetrics], Histogram]], ...] = (
    (REQUEST_DURATION, "Arrival to answer", lambda m: m.request_ns),
    (QUEUE_DURATION, "Arrival to execution", lambda m: m.queue_ns),
    (COMPUTE_DURATION, "Execution of the batch a request was in", lambda m: m.compute_ns),
)


_WORKERS: tuple[tuple[str, str, str, Callable[[WorkerState], int]], ...] = (
    ("charonia_worker_up", "gauge", "Whether the worker process of an instance is ready", lambda w: not w.problem),
    ("charonia_worker_restarts_total", "counter", "Worker processes that took over from one", lambda w: w.restarts),
    ("charonia_worker_memory_bytes", "gauge", "Resident memory of a worker process", lambda w: w.memory_bytes),
)

_INSTANCES: tuple[tuple[str, str, Callable[[InstanceCount], int]], ...] = (
    ("charonia_instances_min", "The fewest instances that it may have", lambda i: i.least),
    ("charonia_instances_max", "The most instances that it may have", lambda i: i.most),
)
INSTANCE_CHANGES = "charonia_instance_changes_total"
INSTANCES = "charonia_instances"
LOAD = "charonia_load_seconds_total"


_TOKEN_COUNTERS: tuple[tuple[str, str, Callable[[TokenMetrics], int]], ...] = (
    (PROMPT_TOKENS, "Tokens of prompts", lambda t: t.prompt),
    (COMPLETION_TOKENS, "Tokens of answers", lambda t: t.completion),
    (CACHED_TOKENS, "Tokens of prompts whose computation was saved by a cache", lambda t: t.cached),
)
_TOKEN_TIMES: tuple[tuple[str, str, Callable[[TokenMetrics], Histogram]], ...] = (
    (FIRST_TOKEN, "Arrival to the first response of a stream", lambda t: t.first_ns),
    (BETWEEN_TOKENS, "Time between two responses of a stream", lambda t: t.between_ns),
    (GEN_AI_FIRST_TOKEN, "Arrival to the first response of a stream", lambda t: t.first_ns),
    (GEN_AI_PER_TOKEN, "Time for each token after the first of a stream", lambda t: t.per_token_ns),
)


@dataclass(frozen=True, slots=True)
class PageView:
    """The forms in which the page shows latencies.

    Attributes:
        counters: Whether to show sums.
        histograms: Whether to show histograms.
        quantiles: The quantiles of summaries, from 0 to 1; none for no summaries.
        now_ns: Monotonic time, for summaries.
    """

    counters: bool = True
    histograms: bool = True
    quantiles: tuple[float, ...] = ()
    now_ns: int = 0


def metric_names() -> tuple[str, ...]:
    """Return the names of every metric family of the server's own that `render` can write."""
    return (
        *(c.name for c in (*_COUNTERS, *_CACHE_COUNTERS)),
        COLLAPSED,
        "nv_inference_request_failure",
        "nv_inference_pending_request_count",
        "nv_model_load_duration_secs",
        *SUMMARIES,
        *CACHE_SUMMARIES,
        *(name for name, _, _ in _DURATIONS),
        FIRST_RESPONSE,
        BATCH_SIZE,
        "charonia_batches_closed_total",
        *(name for name, _, _ in (*_TOKEN_COUNTERS, *_TOKEN_TIMES)),
        GEN_AI_USAGE,
        *(name for name, _, _, _ in _WORKERS),
        LOAD,
        INSTANCES,
        *(name for name, _, _ in _INSTANCES),
        INSTANCE_CHANGES,
        "nv_cpu_utilization",
        "nv_cpu_memory_total_bytes",
        "nv_cpu_memory_used_bytes",
        "charonia_process_memory_bytes",
    )


def render(
    models: Sequence[ModelSample],
    machine: MachineGauges | None = None,
    custom: CustomMetrics | None = None,
    families: Iterable[Family] = (),
    view: PageView | None = None,
) -> bytes:
    """Return the metrics page of a server with these model versions.

    Args:
        models: The model versions.
        machine: The machine, if requested.
        custom: The metrics that models define themselves.
        families: The metrics of other parts of the server.
        view: The forms of latencies; None for all except summaries.
    """
    view = view if view is not None else PageView()
    lines: list[str] = []
    labelled = [(_labels(sample.metrics.labels(sample.tags)), sample) for sample in models]
    for counter in _COUNTERS:
        if counter.name.endswith("_duration_us") and not view.counters:
            continue
        _family(
            lines,
            counter.name,
            "counter",
            counter.help,
            ((labels, counter.read(sample.metrics.statistics)) for labels, sample in labelled),
        )
    _caching(lines, [(labels, sample.metrics) for labels, sample in labelled if sample.metrics.is_cached])
    _family(
        lines,
        "nv_inference_request_failure",
        "counter",
        "Requests that failed, by reason",
        (
            (_labels({**sample.metrics.labels(sample.tags), "reason": reason.value}), count)
            for sample in models
            for reason, count in sample.metrics.failures.items()
        ),
    )
    _family(
        lines,
        "nv_inference_pending_request_count",
        "gauge",
        "Requests that wait for an instance",
        ((labels, sample.pending or 0) for labels, sample in labelled),
    )
    _family(
        lines,
        "nv_model_load_duration_secs",
        "gauge",
        "Time that loading the model version took",
        ((labels, round(sample.metrics.load_seconds, 6)) for labels, sample in labelled),
    )
    if view.quantiles:
        _summaries(lines, labelled, view)
    _distributions(lines, labelled, view)
    _language(lines, labelled)
    _workers(lines, labelled)
    _instances(lines, labelled)
    if machine is not None:
        _machine(lines, machine)
    for shared in families:
        samples = ((_labels(sample.labels), sample.value) for sample in shared.samples)
        _family(lines, shared.name, shared.kind, shared.help, samples)
    for family in custom.families() if custom is not None else ():
        _custom(lines, family)
    return ("\n".join(_shown(lines)) + "\n").encode()


def _shown(lines: Sequence[str]) -> Iterator[str]:
    """Leave out the heads of families without samples."""
    heads: list[str] = []
    for line in lines:
        if line.startswith("#"):
            heads = [*heads, line] if line.startswith("# TYPE") else [line]
        else:
            yield from heads
            yield line
            heads = []


def _language(lines: list[str], labelled: Sequence[tuple[str, ModelSample]]) -> None:
    shown = [(labels, sample.metrics.tokens) for labels, sample in labelled if sample.metrics.tokens is not None]
    if not shown:
        return
    for name, help_text, count in _TOKEN_COUNTERS:
        _family(lines, name, "counter", help_text, ((labels, count(tokens)) for labels, tokens in shown))
    for name, help_text, read in _TOKEN_TIMES:
        _head(lines, name, "histogram", help_text)
        for labels, tokens in shown:
            _histogram(lines, name, labels, read(tokens), _NS_PER_S)
    _head(lines, GEN_AI_USAGE, "histogram", "Tokens of a request")
    for labels, tokens in shown:
        _histogram(lines, GEN_AI_USAGE, f'{labels},gen_ai_token_type="input"', tokens.prompts, 1)
        _histogram(lines, GEN_AI_USAGE, f'{labels},gen_ai_token_type="output"', tokens.completions, 1)


def _workers(lines: list[str], labelled: Sequence[tuple[str, ModelSample]]) -> None:
    for name, kind, help_text, value in _WORKERS:
        _family(
            lines,
            name,
            kind,
            help_text,
            (
                (f'{labels},model_instance="{_escape(worker.instance)}"', int(value(worker)))
                for labels, sample in labelled
                for worker in sample.workers
            ),
        )


def _instances(lines: list[str], labelled: Sequence[tuple[str, ModelSample]]) -> None:
    """Write the number of instances, their load, and the bounds where the number follows the load."""
    present = [(labels, sample) for labels, sample in labelled if sample.instances]
    load = ((labels, sample.metrics.statistics.load_ns / _NS_PER_S) for labels, sample in present)
    _family(lines, LOAD, "counter", "Time that instances would have needed with full batches", load)
    _family(lines, INSTANCES, "gauge", "Instances", ((labels, sample.instances) for labels, sample in present))
    shown = [(labels, sample.scaling) for labels, sample in labelled if sample.scaling is not None]
    if not shown:
        return
    for name, help_text, value in _INSTANCES:
        _family(lines, name, "gauge", help_text, ((labels, value(instances)) for labels, instances in shown))
    changes = (
        (f'{labels},reason="{reason}"', count)
        for labels, instances in shown
        for reason, count in instances.changes.items()
    )
    _family(lines, INSTANCE_CHANGES, "counter", "Changes of the number of instances, by reason", changes)


def _caching(lines: list[str], cached: Sequence[tuple[str, ModelMetrics]]) -> None:
    for counter in _CACHE_COUNTERS if cached else ():
        samples = ((labels, counter.read(metrics.statistics)) for labels, metrics in cached)
        _family(lines, counter.name, "counter", counter.help, samples)
    if cached:
        samples = ((labels, metrics.collapsed) for labels, metrics in cached)
        _family(lines, COLLAPSED, "counter", "Requests answered with the response to an equal one in flight", samples)


def _summaries(lines: list[str], labelled: Sequence[tuple[str, ModelSample]], view: PageView) -> None:
    cached = [each for each in labelled if each[1].metrics.is_cached]
    families = [(name, text, labelled) for name, text in SUMMARIES.items()]
    families += [(name, text, cached) for name, text in CACHE_SUMMARIES.items() if cached]
    for name, help_text, shown in families:
        _head(lines, name, "summary", help_text)
        for labels, sample in shown:
            summaries = sample.metrics.summaries
            # Requests behind a cache have no summary: it lacks the hits.
            if summaries is not None and not (name == REQUEST_SUMMARY and sample.metrics.is_cached):
                lines.extend(summaries.lines(name, labels, view.quantiles, view.now_ns))


def _distributions(lines: list[str], labelled: Sequence[tuple[str, ModelSample]], view: PageView) -> None:
    if view.histograms:
        for name, help_text, read in _DURATIONS:
            _head(lines, name, "histogram", help_text)
            for labels, sample in labelled:
                _histogram(lines, name, labels, read(sample.metrics), _NS_PER_S)
        _head(lines, FIRST_RESPONSE, "histogram", "Arrival to the first response of decoupled models")
        for labels, sample in labelled:
            if sample.metrics.first_response_ns.count:
                _histogram(lines, FIRST_RESPONSE, labels, sample.metrics.first_response_ns, _NS_PER_MS)
    _head(lines, BATCH_SIZE, "histogram", "Batch elements of an execution")
    for labels, sample in labelled:
        _histogram(lines, BATCH_SIZE, labels, sample.metrics.batch_size, 1)
    _family(
        lines,
        "charonia_batches_closed_total",
        "counter",
        "Batches by the reason they were sent",
        (
            (f'{labels},reason="{reason.value}"', count)
            for labels, sample in labelled
            for reason, count in sample.metrics.closes.items()
        ),
    )


def _machine(lines: list[str], machine: MachineGauges) -> None:
    gauges: list[tuple[str, str, float]] = [
        ("nv_cpu_memory_total_bytes", "Memory of the machine", machine.memory_total_bytes),
        ("nv_cpu_memory_used_bytes", "Memory of the machine in use", machine.memory_used_bytes),
        ("charonia_process_memory_bytes", "Resident memory of the server process", machine.process_memory_bytes),
    ]
    if machine.cpu_utilization is not None:
        gauges.insert(0, ("nv_cpu_utilization", "Share of all cores in use, 0 to 1", machine.cpu_utilization))
    for name, help_text, value in gauges:
        _family(lines, name, "gauge", help_text, [("", value)])


def _custom(lines: list[str], family: CustomFamily) -> None:
    _head(lines, family.name, family.kind, _escape_help(family.description))
    for metric in family.metrics.values():
        labels = _labels(dict(metric.labels))
        if family.kind != "histogram":
            lines.append(
                f"{family.name}{{{labels}}} {_number(metric.value)}"
                if labels
                else f"{family.name} {_number(metric.value)}"
            )
            continue
        before = f"{labels}," if labels else ""
        below = 0
        for bound, count in zip((*metric.bounds, math.inf), metric.counts, strict=True):
            below += count
            lines.append(f'{family.name}_bucket{{{before}le="{_number(bound)}"}} {below}')
        suffix = f"{{{labels}}}" if labels else ""
        lines.append(f"{family.name}_sum{suffix} {_number(metric.value)}")
        lines.append(f"{family.name}_count{suffix} {below}")


def _number(value: float) -> str:
    if math.isfinite(value):
        return f"{value:.15g}"
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _head(lines: list[str], name: str, kind: str, help_text: str) -> None:
    lines.append(f"# HELP {name} {help_text}")
    lines.append(f"# TYPE {name} {kind}")


def _family(lines: list[str], name: str, kind: str, help_text: str, samples: Iterable[tuple[str, float]]) -> None:
    _head(lines, name, kind, help_text)
    lines.extend(f"{name}{{{labels}}} {value}" if labels else f"{name} {value}" for labels, value in samples)


def _histogram(lines: list[str], name: str, labels: str, histogram: Histogram, divisor: float) -> None:
    below = 0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        below += count
        lines.append(f'{name}_bucket{{{labels},le="{bound / divisor:g}"}} {below}')
    lines.append(f'{name}_bucket{{{labels},le="+Inf"}} {histogram.count}')
    lines.append(f"{name}_sum{{{labels}}} {histogram.total / divisor:.9g}")
    lines.append(f"{name}_count{{{labels}}} {histogram.count}")


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escape(value)}"' for name, value in sorted(labels.items()))


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
