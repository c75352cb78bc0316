"""The Prometheus text format, and the metrics of a server in it. Pure.

Names and labels that start with `nv_` are Triton's; names that start with `charonia_` are ours and follow Prometheus'
own conventions (seconds, `_total`). Format source: Prometheus exposition formats, text version 0.0.4.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

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


_Values = Iterable[tuple[str | dict[str, str], float | Histogram]]
"""Values with the labels that they have beyond those of their model version: text behind them, or in order of names."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A family of the page.

    Attributes:
        read: Returns the values of a model version.
        unit: Size of the unit of a histogram, in that of its values.
    """

    name: str
    kind: str
    help: str
    read: Callable[[ModelSample], _Values]
    unit: float = 1


def _counter(name: str, help: str, read: Callable[[ModelStatistics], float]) -> _Row:
    return _Row(name, "counter", help, lambda sample: [("", read(sample.metrics.statistics))])


def _sum(name: str, help: str, read: Callable[[ModelStatistics], Duration]) -> _Row:
    return _counter(name, help, lambda statistics: read(statistics).ns // _NS_PER_US)


def _cached(row: _Row) -> _Row:
    return replace(row, read=lambda sample: row.read(sample) if sample.metrics.is_cached else ())


def _histogram_of(name: str, help: str, read: Callable[[ModelMetrics], Histogram], unit: float = _NS_PER_S) -> _Row:
    return _Row(name, "histogram", help, lambda sample: [("", read(sample.metrics))], unit)


def _of_tokens(name: str, kind: str, help: str, read: Callable[[TokenMetrics], _Values], unit: float = 1) -> _Row:
    return _Row(name, kind, help, lambda s: read(s.metrics.tokens) if s.metrics.tokens is not None else (), unit)


def _of_workers(name: str, kind: str, help: str, read: Callable[[WorkerState], int]) -> _Row:
    def values(sample: ModelSample) -> _Values:
        return [(f'model_instance="{_escape(worker.instance)}"', int(read(worker))) for worker in sample.workers]

    return _Row(name, kind, help, values)


def _of_scaling(name: str, kind: str, help: str, read: Callable[[InstanceCount], _Values]) -> _Row:
    return _Row(name, kind, help, lambda sample: read(sample.scaling) if sample.scaling is not None else ())


COLLAPSED = "charonia_cache_collapsed_total"
INSTANCE_CHANGES = "charonia_instance_changes_total"
INSTANCES = "charonia_instances"
LOAD = "charonia_load_seconds_total"

_COUNTERS = (
    _counter("nv_inference_request_success", "Requests answered", lambda s: s.success.count),
    _counter("nv_inference_count", "Inferences computed (batch elements)", lambda s: s.inference_count),
    _counter("nv_inference_exec_count", "Batches executed", lambda s: s.execution_count),
)
_SUMS = (
    _sum("nv_inference_request_duration_us", "Time of answered requests, arrival to answer", lambda s: s.success),
    _sum("nv_inference_queue_duration_us", "Time that requests waited", lambda s: s.queue),
    _sum("nv_inference_compute_input_duration_us", "Time to put inputs in place", lambda s: s.compute_input),
    _sum("nv_inference_compute_infer_duration_us", "Time that models computed", lambda s: s.compute_infer),
    _sum("nv_inference_compute_output_duration_us", "Time to take outputs", lambda s: s.compute_output),
)
_CACHE = tuple(
    _cached(row)
    for row in (
        _counter("nv_cache_num_hits_per_model", "Requests answered from the cache", lambda s: s.cache_hit.count),
        _counter("nv_cache_num_misses_per_model", "Requests not in the response cache", lambda s: s.cache_miss.count),
        _sum("nv_cache_hit_duration_per_model", "Time of hits in microseconds", lambda s: s.cache_hit),
        _sum("nv_cache_miss_duration_per_model", "Time of misses in microseconds", lambda s: s.cache_miss),
        _Row(
            COLLAPSED, "counter", "Requests answered with the response to an equal one in flight",
            lambda sample: [("", sample.metrics.collapsed)],
        ),
    )
)  # fmt: skip
_STATES = (
    _Row(
        "nv_inference_request_failure", "counter", "Requests that failed, by reason",
        lambda sample: [({"reason": reason.value}, count) for reason, count in sample.metrics.failures.items()],
    ),
    _Row(
        "nv_inference_pending_request_count", "gauge", "Requests that wait for an instance",
        lambda sample: [("", sample.pending or 0)],
    ),
    _Row(
        "nv_model_load_duration_secs", "gauge", "Time that loading the model version took",
        lambda sample: [("", round(sample.metrics.load_seconds, 6))],
    ),
)  # fmt: skip
_HISTOGRAMS = (
    _histogram_of(REQUEST_DURATION, "Arrival to answer", lambda m: m.request_ns),
    _histogram_of(QUEUE_DURATION, "Arrival to execution", lambda m: m.queue_ns),
    _histogram_of(COMPUTE_DURATION, "Execution of the batch a request was in", lambda m: m.compute_ns),
    _Row(
        FIRST_RESPONSE, "histogram", "Arrival to the first response of decoupled models",
        lambda s: [("", s.metrics.first_response_ns)] if s.metrics.first_response_ns.count else (), _NS_PER_MS,
    ),
)  # fmt: skip
_FIRST = "Arrival to the first response of a stream"
_OTHERS = (
    _histogram_of(BATCH_SIZE, "Batch elements of an execution", lambda m: m.batch_size, 1),
    _Row(
        "charonia_batches_closed_total", "counter", "Batches by the reason they were sent",
        lambda sample: [(f'reason="{reason.value}"', count) for reason, count in sample.metrics.closes.items()],
    ),
    _of_tokens(PROMPT_TOKENS, "counter", "Tokens of prompts", lambda t: [("", t.prompt)]),
    _of_tokens(COMPLETION_TOKENS, "counter", "Tokens of answers", lambda t: [("", t.completion)]),
    _of_tokens(
        CACHED_TOKENS, "counter", "Tokens of prompts whose computation was saved by a cache",
        lambda t: [("", t.cached)],
    ),
    *(
        _of_tokens(name, "histogram", _FIRST, lambda t: [("", t.first_ns)], _NS_PER_S)
        for name in (FIRST_TOKEN, GEN_AI_FIRST_TOKEN)
    ),
    _of_tokens(
        BETWEEN_TOKENS, "histogram", "Time between two responses of a stream",
        lambda t: [("", t.between_ns)], _NS_PER_S,
    ),
    _of_tokens(
        GEN_AI_PER_TOKEN, "histogram", "Time for each token after the first of a stream",
        lambda t: [("", t.per_token_ns)], _NS_PER_S,
    ),
    _of_tokens(
        GEN_AI_USAGE, "histogram", "Tokens of a request",
        lambda t: [('gen_ai_token_type="input"', t.prompts), ('gen_ai_token_type="output"', t.completions)],
    ),
    _of_workers(
        "charonia_worker_up", "gauge", "Whether the worker process of an instance is ready", lambda w: not w.problem
    ),
    _of_workers(
        "charonia_worker_restarts_total", "counter", "Worker processes that took over from one", lambda w: w.restarts
    ),
    _of_workers(
        "charonia_worker_memory_bytes", "gauge", "Resident memory of a worker process", lambda w: w.memory_bytes
    ),
    _Row(
        LOAD, "counter", "Time that instances would have needed with full batches",
        lambda s: [("", s.metrics.statistics.load_ns / _NS_PER_S)] if s.instances else (),
    ),
    _Row(INSTANCES, "gauge", "Instances", lambda sample: [("", sample.instances)] if sample.instances else ()),
    _of_scaling("charonia_instances_min", "gauge", "The fewest instances that it may have", lambda i: [("", i.least)]),
    _of_scaling("charonia_instances_max", "gauge", "The most instances that it may have", lambda i: [("", i.most)]),
    _of_scaling(
        INSTANCE_CHANGES, "counter", "Changes of the number of instances, by reason",
        lambda i: [(f'reason="{reason}"', count) for reason, count in i.changes.items()],
    ),
)  # fmt: skip
_MACHINE: tuple[tuple[str, str, Callable[[MachineGauges], float | None]], ...] = (
    ("nv_cpu_utilization", "Share of all cores in use, 0 to 1", lambda m: m.cpu_utilization),
    ("nv_cpu_memory_total_bytes", "Memory of the machine", lambda m: m.memory_total_bytes),
    ("nv_cpu_memory_used_bytes", "Memory of the machine in use", lambda m: m.memory_used_bytes),
    ("charonia_process_memory_bytes", "Resident memory of the server process", lambda m: m.process_memory_bytes),
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
    rows = (*_COUNTERS, *_SUMS, *_CACHE, *_STATES, *_HISTOGRAMS, *_OTHERS)
    return (*(row.name for row in rows), *SUMMARIES, *CACHE_SUMMARIES, *(name for name, _, _ in _MACHINE))


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
    _rows(lines, (*_COUNTERS, *(_SUMS if view.counters else ()), *_CACHE, *_STATES), labelled)
    if view.quantiles:
        _summaries(lines, labelled, view)
    _rows(lines, (*(_HISTOGRAMS if view.histograms else ()), *_OTHERS), labelled)
    for name, text, read in _MACHINE if machine is not None else ():
        value = read(machine)  # type: ignore[arg-type]  # not None here
        _family(lines, name, "gauge", text, [("", value)] if value is not None else ())
    for shared in families:
        _family(lines, shared.name, shared.kind, shared.help, ((_labels(s.labels), s.value) for s in shared.samples))
    for family in custom.families() if custom is not None else ():
        _custom(lines, family)
    return ("\n".join(lines) + "\n").encode()


def _rows(lines: list[str], rows: Iterable[_Row], labelled: Sequence[tuple[str, ModelSample]]) -> None:
    for row in rows:
        samples = (
            (_with(own, labels, sample), value) for labels, sample in labelled for own, value in row.read(sample)
        )
        _family(lines, row.name, row.kind, row.help, samples, row.unit)


def _with(own: str | dict[str, str], labels: str, sample: ModelSample) -> str:
    if isinstance(own, dict):
        return _labels(sample.metrics.labels(sample.tags) | own)
    return f"{labels},{own}" if own else labels


def _summaries(lines: list[str], labelled: Sequence[tuple[str, ModelSample]], view: PageView) -> None:
    for name, help_text in {**SUMMARIES, **CACHE_SUMMARIES}.items():
        # Requests behind a cache have no summary: it lacks the hits.
        excluded = True if name == REQUEST_SUMMARY else False if name in CACHE_SUMMARIES else None
        found: list[str] = []
        for labels, sample in labelled:
            summaries = sample.metrics.summaries
            if summaries is not None and sample.metrics.is_cached is not excluded:
                found.extend(summaries.lines(name, labels, view.quantiles, view.now_ns))
        if found:
            _head(lines, name, "summary", help_text)
            lines += found


def _custom(lines: list[str], family: CustomFamily) -> None:
    _head(lines, family.name, family.kind, family.description.replace("\\", "\\\\").replace("\n", "\\n"))
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


def _head(lines: list[str], name: str, kind: str, help_text: str) -> None:
    lines.append(f"# HELP {name} {help_text}")
    lines.append(f"# TYPE {name} {kind}")


def _family(
    lines: list[str],
    name: str,
    kind: str,
    help_text: str,
    samples: Iterable[tuple[str, float | Histogram]],
    unit: float = 1,
) -> None:
    """Write a family; nothing where it has no values."""
    is_begun = False
    for labels, value in samples:
        if not is_begun:
            _head(lines, name, kind, help_text)
            is_begun = True
        if isinstance(value, Histogram):
            below = 0
            for bound, count in zip(value.bounds, value.counts, strict=False):
                below += count
                lines.append(f'{name}_bucket{{{labels},le="{bound / unit:g}"}} {below}')
            lines.append(f'{name}_bucket{{{labels},le="+Inf"}} {value.count}')
            lines.append(f"{name}_sum{{{labels}}} {value.total / unit:.9g}")
            lines.append(f"{name}_count{{{labels}}} {value.count}")
        else:
            lines.append(f"{name}{{{labels}}} {value}" if labels else f"{name} {value}")


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escape(value)}"' for name, value in sorted(labels.items()))


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
