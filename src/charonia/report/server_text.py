"""The part of a level's text that comes from the server."""

from collections.abc import Iterator

from charonia.results.records import LevelResult
from charonia.results.server import ServerModel

GPUS_MAX = 16
"""Most GPUs that are listed."""


def server_lines(result: LevelResult) -> Iterator[str]:
    """Return the block of the server's own account, composing models included."""
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
    """Return the block of the metrics page."""
    yield "  Server Prometheus Metrics: "
    if len(result.gpus) > GPUS_MAX:
        yield f"    {len(result.gpus)} GPUs: the CSV file lists them all"
        return
    for title, unit, values in (
        (
            "Avg GPU Utilization",
            "%",
            [(g.uuid, None if g.utilization is None else g.utilization * 100) for g in result.gpus],
        ),
        ("Avg GPU Power Usage", " watts", [(g.uuid, g.power_watts) for g in result.gpus]),
        ("Max GPU Memory Usage", " bytes", [(g.uuid, g.memory_used_bytes) for g in result.gpus]),
        ("Total GPU Memory", " bytes", [(g.uuid, g.memory_total_bytes) for g in result.gpus]),
    ):
        yield f"    {title}:"
        yield from (f"      {uuid} : {value:.15g}{unit}" for uuid, value in values if value is not None)


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
    waiting = f"queue {_mean(model, model.queue_ns)} usec + "
    if is_cached:
        average = (model.cache_hit_ns + model.cache_miss_ns) / max(1, model.success_count)
        waiting += f"cache hit/miss {_usec(average)} usec + "
    yield (
        f"Avg request latency: {_usec(model.request_ns)} usec (overhead {_usec(model.overhead_ns)} usec + "
        f"{waiting}compute input {_mean(model, model.compute_input_ns)} usec + "
        f"compute infer {_mean(model, model.compute_infer_ns)} usec + "
        f"compute output {_mean(model, model.compute_output_ns)} usec)"
    )
    if model.cache_hit_count:
        yield f"Average Cache Hit Latency: {_usec(model.cache_hit_ns / model.cache_hit_count)} usec"
    if model.cache_miss_count:
        yield f"Average Cache Miss Latency: {_usec(model.cache_miss_ns / model.cache_miss_count)} usec"


def _ensemble_line(model: ServerModel) -> str:
    """Return the line of a model made of others: queue and compute are the sums of theirs."""
    queue = sum(part.mean(part.queue_ns) for part in model.composing)
    compute = sum(
        part.mean(part.compute_input_ns + part.compute_infer_ns + part.compute_output_ns) for part in model.composing
    )
    overhead = max(0.0, model.request_ns - queue - compute)
    return (
        f"Avg request latency: {_usec(model.request_ns)} usec (overhead {_usec(overhead)} usec + "
        f"queue {_usec(queue)} usec + compute {_usec(compute)} usec)"
    )


def _mean(model: ServerModel, total_ns: int) -> int:
    return _usec(model.mean(total_ns))


def _usec(duration_ns: float) -> int:
    return int(duration_ns / 1000)
