"""Made-up runs of the load generator: records with plausible numbers, for tests of their readers."""

import shlex
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from charonia.core.latency import LatencyHistogram
from charonia.tools.results.records import (
    ClientTimes,
    ErrorKind,
    Estimate,
    LevelResult,
    LoadLevel,
    LoadMode,
    Machine,
    ModelInfo,
    OfferedLoad,
    PerfRun,
    Resources,
    ServerInfo,
    ServerModel,
    ServerSide,
    TimeBucket,
    Verdict,
    Window,
)

SECOND = 1_000_000_000
_BUCKET_NS = SECOND // 10


@dataclass(frozen=True, slots=True)
class FakeService:
    """A server as a synthetic run sees it.

    Attributes:
        median_ns: Median time of a request that does not wait for others.
        spread: Sigma of the log-normal distribution of times.
        wander: Sigma of a factor that all requests of a tenth of a second share, log-normal: the server's moods.
    """

    median_ns: int = 500_000
    parallel: int = 4
    spread: float = 0.25
    wander: float = 0.0


def synthetic_run(
    levels: tuple[LoadLevel, ...] = (),
    service: FakeService | None = None,
    *,
    seed: int = 0,
    duration_s: float = 3.0,
    error_share: float = 0.0,
    model: str = "identity",
    options: dict[str, str] | None = None,
) -> PerfRun:
    """Return a run that looks like one of a small model on a machine with few cores.

    Args:
        levels: What was measured; concurrency 1, 2, 4 and 8 where there are none.
        error_share: Share of requests that fail, from 0 to 1.
    """
    generator = np.random.default_rng(seed)
    chosen = levels or tuple(LoadLevel(LoadMode.CONCURRENCY, value) for value in (1, 2, 4, 8))
    results = [_level(level, service or FakeService(), generator, duration_s, error_share) for level in chosen]
    return PerfRun(
        tool="charonia perf 0.1.0",
        began_at="2026-01-02T03:04:05+00:00",
        duration_ns=sum(result.timeline[-1].end_ns for result in results),
        machine=Machine("host", "Linux 6.1", "A processor", 4, 16 * 2**30, "3.11.2"),
        server=ServerInfo("127.0.0.1:8000", "http", "charonia", "0.1.0", ("statistics",)),
        model=ModelInfo(model, "", "onnxruntime_onnx", 8, decoupled=False, sequence=False, cached=False),
        options=options if options is not None else {"--model-name": model, "--concurrency-range": "1:8"},
        batch_size=1,
        stabilising_percentile=None,
        levels=tuple(results),
        command=shlex.join(["charonia", "perf", "-m", model, "--concurrency-range", "1:8"]),
    )


def _level(
    level: LoadLevel, service: FakeService, generator: np.random.Generator, duration_s: float, error_share: float
) -> LevelResult:
    is_open = level.mode is LoadMode.REQUEST_RATE
    capacity = float(service.parallel * SECOND / (service.median_ns * np.exp(service.spread**2 / 2)))
    rate = min(level.value, capacity) if is_open else capacity * level.value / (level.value + service.parallel / 2)
    count = int(rate * duration_s)
    ends = np.sort(generator.uniform(0, duration_s * SECOND, count)).astype(np.int64)
    waiting = (rate / capacity) ** 3 if is_open else max(1.0, level.value * SECOND / rate / service.median_ns) - 1
    moods = generator.lognormal(0, service.wander, int(duration_s * 10) + 1)[ends // _BUCKET_NS]
    times = service.median_ns * (1 + waiting) * moods * generator.lognormal(0, service.spread, count)
    served: NDArray[np.int64] = times.astype(np.int64)
    delays = generator.exponential(0.2 * service.median_ns, count).astype(np.int64) if is_open else np.zeros_like(ends)
    response = LatencyHistogram.of(served + delays)
    failed = int(count * error_share)
    buckets = _timeline(ends, served + delays, int(duration_s * SECOND), failed)
    windows = _windows(ends, served + delays, int(duration_s * SECOND), failed)
    return LevelResult(
        level=level,
        verdict=Verdict.STABLE,
        reasons=(),
        duration_ns=windows[-1].end_ns - windows[0].begin_ns,
        request_count=count,
        throughput=Estimate(rate, rate * 0.98, rate * 1.02),
        latency=Estimate(response.mean, response.mean * 0.97, response.mean * 1.03),
        response_times=response,
        service_times=LatencyHistogram.of(served),
        first_response_times=None,
        response_count=count,
        sequence_count=0,
        errors=(ErrorKind("UNAVAILABLE", failed, ("queue of model is full",)),) if failed else (),
        over_latency_limit=False,
        windows=windows,
        timeline=buckets,
        client=ClientTimes(12_000.0, 9_000.0, 0.3, duration_s * 0.3, 1),
        server=ServerSide(_statistics(served, count), other_traffic=False),
        offered=OfferedLoad(level.value, level.value, rate, 0.01, 1, 2) if is_open else None,
        resources=Resources(duration_s * 1.5, 1.5, 150 * 2**20, 2),
    )


def _timeline(ends: NDArray[np.int64], times: NDArray[np.int64], until: int, failed: int) -> tuple[TimeBucket, ...]:
    buckets = []
    edges = range(0, until, _BUCKET_NS)
    for number, begin in enumerate(edges):
        inside = LatencyHistogram.of(times[(ends >= begin) & (ends < begin + _BUCKET_NS)])
        errors = failed * (number + 1) // len(edges) - failed * number // len(edges)
        quantiles = (inside.percentile(50), inside.percentile(99), inside.maximum)
        end = min(begin + _BUCKET_NS, until)
        buckets.append(TimeBucket(begin, end, inside.count + errors, inside.count, errors, *quantiles))
    return tuple(buckets)


def _windows(ends: NDArray[np.int64], times: NDArray[np.int64], until: int, failed: int) -> tuple[Window, ...]:
    windows = []
    for number in range(3):
        begin, end = until * number // 3, until * (number + 1) // 3
        inside = times[(ends >= begin) & (ends < end)]
        mean = float(inside.mean()) if inside.size else 0.0
        rate = inside.size * SECOND / (end - begin)
        windows.append(Window(begin, end, int(inside.size), failed // 3, rate, mean, used=True))
    return tuple(windows)


def _statistics(served: NDArray[np.int64], count: int) -> ServerModel:
    total = int(served.sum())
    queue, given, infer, taken = (total * share // 100 for share in (20, 8, 50, 6))
    return ServerModel("identity", "1", count, count, count, 0, total * 86 // 100, queue, given, infer, taken, count)
