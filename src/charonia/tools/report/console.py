"""The text output of a run: the lines of perf_analyzer, which existing scripts parse, followed by our own.

Lines of perf_analyzer keep their words, their order and their number format (six significant digits, microseconds
truncated to integers). Ours are additional percentiles and, at the end of a block, intervals, errors, goodput, offered
load and the verdict.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from charonia.tools.report.language import language_lines, language_summary
from charonia.tools.report.quantities import in_columns
from charonia.tools.report.summary import is_trusted
from charonia.tools.results.records import (
    PERCENTILES,
    ErrorKind,
    Estimate,
    Gpu,
    LevelResult,
    LoadLevel,
    LoadMode,
    PerfRun,
    ServerModel,
    Window,
)

GPUS_MAX = 16
"""Limit of GPUs in the list."""

GPU_FIGURES: Mapping[str, Callable[[Gpu], float | None]] = {
    "Avg GPU Utilization": lambda gpu: gpu.utilization,
    "Avg GPU Power Usage": lambda gpu: gpu.power_watts,
    "Max GPU Memory Usage": lambda gpu: gpu.memory_used_bytes,
    "Total GPU Memory": lambda gpu: gpu.memory_total_bytes,
}
"""perf_analyzer's figures of a GPU."""

_GPU_UNITS = (("%", 100), (" watts", 1), (" bytes", 1), (" bytes", 1))


def server_lines(result: LevelResult) -> Iterator[str]:
    """Yield the block of the server's statistics, including composing models."""
    server, resources = result.server, result.resources
    if server.model is None and resources is None and not server.notes:
        return
    yield "  Server: "
    if server.model is not None:
        yield from (f"    {line}" for line in _model_lines(server.model))
    if resources is not None:
        plural = "es" if resources.process_count > 1 else ""
        yield (
            f"    CPU: {resources.cpu_cores:.2f} cores, memory: {resources.rss_bytes / 2**20:.1f} MiB "
            f"({resources.process_count} process{plural})"
        )
    yield from (f"    Note: {note}" for note in server.notes)
    if server.model is not None and server.model.composing:
        yield ""
        yield "  Composing models: "
        for model in server.model.composing:
            yield f"  {model.name}, version: {model.version}"
            yield from (f"      {line}" for line in _model_lines(model))
            yield ""


def gpu_lines(result: LevelResult) -> Iterator[str]:
    """Yield the block of the metrics page."""
    yield "  Server Prometheus Metrics: "
    if len(result.gpus) > GPUS_MAX:
        yield f"    {len(result.gpus)} GPUs: the CSV file lists them all"
        return
    for (title, value), (unit, factor) in zip(GPU_FIGURES.items(), _GPU_UNITS, strict=True):
        yield f"    {title}:"
        found = [(gpu.uuid, value(gpu)) for gpu in result.gpus]
        yield from (f"      {uuid} : {number * factor:.15g}{unit}" for uuid, number in found if number is not None)


def _model_lines(model: ServerModel) -> Iterator[str]:
    yield f"Inference count: {model.inference_count}"
    yield f"Execution count: {model.execution_count}"
    is_cached = bool(model.cache_hit_count or model.cache_miss_count)
    if is_cached:
        yield f"Cache hit count: {model.cache_hit_count}"
        yield f"Cache miss count: {model.cache_miss_count}"
    yield f"Successful request count: {model.success_count}"
    if model.composing:
        yield _ensemble_line(model)
        return
    queue, *computed = (f"{name} {usec(model.mean(total))} usec" for name, total in model.sums_ns.items())
    cache = [f"cache hit/miss {usec(model.cache_ns)} usec"] if is_cached else []
    parts = " + ".join([f"overhead {usec(model.overhead_ns)} usec", queue, *cache, *computed])
    yield f"Avg request latency: {usec(model.request_ns)} usec ({parts})"
    if model.cache_hit_count:
        yield f"Average Cache Hit Latency: {usec(model.cache_hit_ns / model.cache_hit_count)} usec"
    if model.cache_miss_count:
        yield f"Average Cache Miss Latency: {usec(model.cache_miss_ns / model.cache_miss_count)} usec"


def _ensemble_line(model: ServerModel) -> str:
    """Return the line of an ensemble: queue and compute are the sums over its composing models."""
    queue, compute = 0.0, 0.0
    for part in model.composing:
        waiting, *computing = part.sums_ns.values()
        queue, compute = queue + part.mean(waiting), compute + part.mean(sum(computing))
    overhead = max(0.0, model.request_ns - queue - compute)
    return (
        f"Avg request latency: {usec(model.request_ns)} usec (overhead {usec(overhead)} usec + "
        f"queue {usec(queue)} usec + compute {usec(compute)} usec)"
    )


def usec(duration_ns: float) -> int:
    """Return microseconds, truncated as perf_analyzer does."""
    return int(duration_ns / 1000)


HIGH_PERCENTILES = (99.9, 99.99)
"""Percentiles in addition to every table's."""

DELAYED_SHARE_MAX = 0.01
"""Share of delayed requests above which there is a warning."""

OVERHEAD_MAX = 0.5
"""CPU utilisation of the client above which there is a warning."""


@dataclass(frozen=True, slots=True)
class View:
    """How to print results.

    Attributes:
        protocol: "http" or "grpc".
        percentile: Percentile that is reported as the latency, None for the mean.
    """

    protocol: str = "http"
    percentile: float | None = None
    verbose: bool = False
    decoupled: bool = False
    language: bool = False
    metrics: bool = False


def level_title(level: LoadLevel) -> str:
    """Return the text printed at the start of a level, "" for none."""
    match level.mode:
        case LoadMode.REQUEST_RATE:
            return f"Request Rate: {level.value:g} inference requests per seconds"
        case LoadMode.INTERVALS:
            return ""
    return f"Request concurrency: {level.value:g}"


def pass_text(number: int, window: Window, deviation_ns: float, percentile: float | None) -> str:
    """Return the line of a window."""
    latency = (
        f"Avg latency: {usec(window.latency_ns)} usec (std {usec(deviation_ns)} usec). "
        if percentile is None
        else f"p{percentile:g} latency: {usec(window.latency_ns)} usec"
    )
    return f"  Pass [{number}] throughput: {window.throughput:g} infer/sec. {latency}"


def level_text(result: LevelResult, view: View) -> str:
    """Return the text printed after the measurement of a level."""
    client = language_lines(result) if view.language else _client_lines(result, view)
    lines = ["  Client: ", *(f"    {line}" for line in (*client, *_own_lines(result, view)))]
    lines += server_lines(result)
    if view.metrics:
        lines += ["", *gpu_lines(result)]
    lines.append(f"  Verdict: {verdict_text(result)}")
    return "\n".join(lines) + "\n"


def summary_text(run: PerfRun) -> str:
    """Return the text printed at the end of a run."""
    if any(result.language is not None for result in run.levels):
        return language_summary(run)
    percentile = run.stabilising_percentile
    name = "Average" if percentile is None else f"p{percentile:g}"
    lines = [f"Inferences/Second vs. Client {name} Batch Latency"]
    for result in run.levels:
        title = "Request Rate" if result.level.mode.is_rate else "Concurrency"
        remark = "" if is_trusted(result) else f" ({result.verdict.text})"
        lines.append(
            f"{title}: {result.level.value:g}, throughput: {result.throughput.value:g} infer/sec, "
            f"latency {usec(result.latency.value)} usec{remark}"
        )
    if len(run.levels) > 1:
        lines += ["", *_table(run.levels)]
    if run.answer is not None:
        lines += ["", f"Highest level within the latency limit: {run.answer}"]
    lines += [f"Note: {note}" for note in run.notes]
    return "\n".join(lines)


def verdict_text(result: LevelResult) -> str:
    """Return a verdict with its reasons, as one line."""
    word = result.verdict.text
    return f"{word}: {' '.join(result.reasons)}" if result.reasons else word


def _client_lines(result: LevelResult, view: View) -> Iterator[str]:
    yield f"Request count: {result.request_count}"
    offered = result.offered
    if offered is not None and offered.delayed_share > DELAYED_SHARE_MAX:
        yield f"Avg send request rate: {offered.sent_rate:.2f} requests/sec"
        yield (
            f"[WARNING] {offered.delayed_share:.2%} of the requests were sent more than 1 ms after their scheduled "
            "time. Their latency counts from the scheduled time. "
        )
    if result.sequence_count:
        yield f"Sequence count: {result.sequence_count} ({result.sequence_rate:g} seq/sec)"
    yield f"Throughput: {result.throughput.value:g} infer/sec"
    if view.decoupled:
        yield f"Response Throughput: {result.response_rate:g} infer/sec"
    if view.verbose:
        yield f"Avg client overhead: {result.client.overhead * 100:.2f}%"
    times = result.response_times
    if view.percentile is None:
        yield f"Avg latency: {usec(times.mean)} usec (standard deviation {usec(times.deviation)} usec)"
    for percent in sorted({*percentiles(view.percentile), *high_percentiles(result)}):
        yield f"p{percent:g} latency: {usec(times.percentile(percent))} usec"
    yield f"Max latency: {usec(times.maximum)} usec"
    if not view.decoupled:
        yield _network_line(result, view)


def percentiles(extra: float | None) -> list[float]:
    """Return the percentiles of perf_analyzer's tables and the requested one, ascending."""
    return sorted({*PERCENTILES, *(() if extra is None else (extra,))})


def high_percentiles(result: LevelResult) -> list[float]:
    """Return the additional percentiles beyond which there is at least one request."""
    return [percent for percent in HIGH_PERCENTILES if round(result.request_count * (100 - percent), 6) >= 100]


def _network_line(result: LevelResult, view: View) -> str:
    client, total, wait = result.client, result.service_times.mean, result.wait_ns
    send, receive, both = usec(client.send_ns), usec(client.receive_ns), usec(client.send_ns + client.receive_ns)
    if view.protocol == "grpc":
        head = f"Avg gRPC time: {usec(total)} usec"
        if view.verbose:
            return f"{head} (marshal {send} usec + response wait {usec(wait)} usec + unmarshal {receive} usec)"
        return f"{head} ((un)marshal request/response {both} usec + response wait {usec(wait)} usec)"
    head = f"Avg HTTP time: {usec(total)} usec"
    if view.verbose:
        return f"{head} (send {send} usec + response wait {usec(wait)} usec + receive {receive} usec)"
    return f"{head} (send/recv {both} usec + response wait {usec(wait)} usec)"


def _own_lines(result: LevelResult, view: View) -> Iterator[str]:
    if result.throughput.confidence:
        unit = "requests/sec" if view.language else "infer/sec"
        yield f"Throughput interval: {_interval(result.throughput, 1.0, unit)}"
    if result.latency.confidence:
        name = "Avg" if view.percentile is None else f"p{view.percentile:g}"
        yield f"{name} latency interval: {_interval(result.latency, 1e-3, 'usec')}"
    first = result.first_response_times
    if view.decoupled and not view.language and first is not None and first.count:
        yield f"First response: avg {usec(first.mean)} usec, p99 {usec(first.percentile(99))} usec"
    if result.offered is not None:
        offered, service = result.offered, result.service_times
        yield (
            f"Offered: {offered.rate:g} requests/sec, sent {offered.sent_rate:g}, answered {offered.achieved_rate:g}, "
            f"waiting {offered.backlog_begin} at the start and {offered.backlog_end} at the end"
        )
        yield (
            f"Service time: avg {usec(service.mean)} usec, p50 {usec(service.percentile(50))} usec, "
            f"p99 {usec(service.percentile(99))} usec (from the actual send time)"
        )
    if result.errors:
        yield f"Errors: {result.error_count} ({result.error_share:.2%} of the requests)"
        yield from (f"  {_error(error)}" for error in result.errors)
    if result.goodput is not None:
        good = result.goodput
        yield f"Goodput: {good.rate:g} requests/sec ({good.share:.2%} within {', '.join(good.objectives)})"
    if result.client.overhead > OVERHEAD_MAX:
        yield (
            f"[WARNING] The client was busy {result.client.overhead:.0%} of the time: "
            "the server may be faster than measured. "
        )


def _error(error: ErrorKind) -> str:
    sample = f": {error.samples[0]}" if error.samples else ""
    return f"{error.count} {error.kind}{sample}"


def _interval(estimate: Estimate, factor: float, unit: str) -> str:
    low, high = (_short(max(0.0, end * factor)) for end in (estimate.low, estimate.high))
    return f"{low} to {high} {unit} ({estimate.confidence:.0%} confidence)"


def _short(value: float) -> str:
    """Return a number with three significant digits, or all digits of its integer part."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _table(levels: Sequence[LevelResult]) -> Iterator[str]:
    """Yield a table of the levels, numbers aligned to the right."""
    head = ["requests/sec" if levels[0].level.mode.is_rate else "Concurrency", "infer/sec"]
    head += ["p50", "p90", "p95", "p99", "p99.9", "errors", "verdict"]
    rows = [
        [
            f"{result.level.value:g}",
            f"{result.throughput.value:.1f}",
            *(str(usec(result.percentile(percent))) for percent in (50, 90, 95, 99, 99.9)),
            f"{result.error_count}",
            result.verdict.text,
        ]
        for result in levels
    ]
    yield from (f"  {line}" for line in in_columns([head, *rows], range(len(head) - 1)))
    yield "  Latencies in usec."
