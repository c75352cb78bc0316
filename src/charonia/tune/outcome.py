"""From what the load generator found to the metrics of a trial."""

import math
from collections.abc import Mapping
from statistics import NormalDist

import psutil

from charonia.results.records import Estimate, LevelResult, Verdict
from charonia.results.server import Gpu
from charonia.stats.latency import LatencyHistogram
from charonia.tune.api import Failed, Measured, Metric, Outcome

CONFIDENCE = 0.95
ERROR_SHARE_MAX = 0.5
"""Share of failed requests from which a trial has failed; below it is noted."""

_PERCENTILES = {
    Metric.LATENCY_P50: 50.0,
    Metric.LATENCY_P90: 90.0,
    Metric.LATENCY_P95: 95.0,
    Metric.LATENCY_P99: 99.0,
}


def outcome_of(
    results: Mapping[str, LevelResult], percentiles: Mapping[str, float | None], elapsed_s: float
) -> Outcome:
    """Return what a trial found.

    Args:
        results: The measurement of each model.
        percentiles: Percentile that `LevelResult.latency` is, by model; None for the mean.
        elapsed_s: Wall time of the trial.
    """
    notes: list[str] = []
    metrics = {}
    for model, result in results.items():
        problem = _problem(model, result)
        if problem:
            return Failed(problem, elapsed_s=elapsed_s)
        if result.error_count:
            kinds = ", ".join(f"{error.kind} {error.count}" for error in result.errors)
            notes.append(f"{model}: {result.error_share:.1%} of the requests failed: {kinds}.")
        if result.verdict is Verdict.OVERLOADED:
            notes.append(f"{model}: the server did not keep up with the offered rate.")
        metrics[model] = metrics_of(result, percentiles.get(model))
    return Measured(metrics, elapsed_s, tuple(notes))


def metrics_of(result: LevelResult, percentile: float | None) -> dict[str, Estimate]:
    """Return the metrics of a measurement, by name, in the units of the tables."""
    found = {Metric.THROUGHPUT.value: result.throughput}
    times = result.response_times
    found[Metric.LATENCY_AVG.value] = _mean(times)
    for metric, percent in _PERCENTILES.items():
        found[metric.value] = _percentile(times, percent)
    measured = Metric.LATENCY_AVG if percentile is None else _metric_at(percentile)
    if measured is not None:
        found[measured.value] = _scaled(result.latency, 1e-6)
    if result.resources is not None:
        found[Metric.CPU_USED_RAM.value] = _exact(result.resources.rss_bytes / 1e6)
        found[Metric.CPU_AVAILABLE_RAM.value] = _exact(psutil.virtual_memory().available / 1e6)
    return found | {metric.value: _exact(value) for metric, value in _gpu_metrics(result.gpus).items()}


def _gpu_metrics(gpus: tuple[Gpu, ...]) -> dict[Metric, float]:
    """Return the memory of all GPUs together, utilisation and power as their mean."""
    found: dict[Metric, float] = {}
    used = [gpu.memory_used_bytes for gpu in gpus if gpu.memory_used_bytes is not None]
    free = [
        gpu.memory_total_bytes - gpu.memory_used_bytes
        for gpu in gpus
        if gpu.memory_total_bytes is not None and gpu.memory_used_bytes is not None
    ]
    utilization = [gpu.utilization for gpu in gpus if gpu.utilization is not None]
    power = [gpu.power_watts for gpu in gpus if gpu.power_watts is not None]
    if used:
        found[Metric.GPU_USED_MEMORY] = sum(used) / 1e6
    if free:
        found[Metric.GPU_FREE_MEMORY] = sum(free) / 1e6
    if utilization:
        found[Metric.GPU_UTILIZATION] = sum(utilization) / len(utilization) * 100
    if power:
        found[Metric.GPU_POWER_USAGE] = sum(power) / len(power)
    return found


def _problem(model: str, result: LevelResult) -> str:
    samples = [sample for error in result.errors for sample in error.samples]
    first = f", the first: {samples[0]}" if samples else ""
    if result.verdict is Verdict.NO_REQUESTS or not result.request_count:
        return f"{model}: no request was answered{first}"
    if result.error_share > ERROR_SHARE_MAX:
        return f"{model}: {result.error_share:.0%} of the requests failed{first}"
    return ""


def _mean(times: LatencyHistogram) -> Estimate:
    if times.count < 2:
        return _exact(times.mean / 1e6)
    half = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * times.deviation / math.sqrt(times.count)
    return _scaled(Estimate(times.mean, max(0.0, times.mean - half), times.mean + half, CONFIDENCE), 1e-6)


def _percentile(times: LatencyHistogram, percent: float) -> Estimate:
    """Return a percentile with the interval of its rank; requests are taken as independent of one another."""
    value, share = float(times.percentile(percent)), percent / 100
    half = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * math.sqrt(share * (1 - share) / max(1, times.count))
    low, high = share - half, share + half
    if low <= 0 or high >= 1:
        return _exact(value / 1e6)
    bounds = times.percentile(low * 100), times.percentile(high * 100)
    return _scaled(Estimate(value, float(bounds[0]), float(bounds[1]), CONFIDENCE), 1e-6)


def _metric_at(percentile: float) -> Metric | None:
    return next((metric for metric, percent in _PERCENTILES.items() if percent == percentile), None)


def _scaled(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(estimate.value * factor, estimate.low * factor, estimate.high * factor, estimate.confidence)


def _exact(value: float) -> Estimate:
    return Estimate(value, value, value, 0.0)
