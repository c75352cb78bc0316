"""The load of this server, for balancers: queue, instances, and the cache of language models.

A report is made on demand, and reused for `AGE_NS`: requests without a report cost nothing, and the others share one.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from charonia.server.execution.runner import ModelRunner
from charonia.server.execution.version_runner import Runner
from charonia.server.metrics.custom import CustomFamily, CustomMetrics
from charonia.server.response_cache.runner import CachedRunner
from charonia.wire.orca import (
    BUSY,
    ERROR_RATE,
    IN_FLIGHT,
    INSTANCES,
    KV_CACHE,
    QUEUE_DEPTH,
    REQUEST_RATE,
    TOKENS_MAX,
    UTILIZATION,
    Load,
)

AGE_NS = 10_000_000
"""Time for which a report serves, in nanoseconds."""

RATE_NS_MIN = 1_000_000_000
RATE_NS_MAX = 60_000_000_000
"""Bounds of the time over which rates are taken: since a report before this one, in nanoseconds."""

_KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_KV_BLOCKS = "nv_trt_llm_kv_cache_block_metrics"
_BLOCK = "kv_cache_block_type"


class EngineLoad:
    """The load of the engine in this process.

    Args:
        chosen: Names of the metrics in a report, in order: `LOAD_METRICS`, and custom metrics of models, whose
            values are added up.
        runners: Returns the runners of all versions.
        now_ns: Returns the time.
    """

    def __init__(
        self,
        chosen: Iterable[str],
        runners: Callable[[], Iterable[Runner]],
        custom: CustomMetrics,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._chosen = tuple(chosen)
        self._runners = runners
        self._custom = custom
        self._now_ns = now_ns
        self._made_ns = 0
        self._counts = LoadCounts()
        self._rates = LoadRates()
        self._latest: Load = {}

    def request_report(self) -> None:
        """Do nothing: a report is made immediately."""

    def latest(self) -> Load:
        """Return a report that is not older than `AGE_NS`."""
        now_ns = self._now_ns()
        if not self._made_ns or now_ns - self._made_ns >= AGE_NS:
            self._latest = self._make(now_ns)
            self._made_ns = now_ns
        return self._latest

    async def report(self) -> Load:
        return self.latest()

    def _make(self, now_ns: int) -> Load:
        runners = tuple(self._runners())
        if now_ns - self._counts.at_ns >= RATE_NS_MIN:
            counts = counts_of(runners, now_ns)
            self._rates = rates_between(self._counts, counts)
            self._counts = counts
        values = load_of(runners, self._rates)
        families = {family.name: family for family in self._custom.families()}
        values.update(_cache_of(families))
        for name in self._chosen:
            if name not in values and name in families:
                values[name] = sum(metric.value for metric in families[name].metrics.values())
        return {name: float(values[name]) for name in self._chosen if name in values}


@dataclass(frozen=True, slots=True)
class LoadCounts:
    """Counters of versions.

    Attributes:
        versions: By the identity of a version's counters: its requests, its failed requests, its executions and
            their nanoseconds.
    """

    at_ns: int = 0
    versions: Mapping[int, tuple[int, int, int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadRates:
    """What happened in a second, on average.

    Attributes:
        values: Metrics of the server; empty where they are not known.
        busy: Busy instances of versions that have executed something, by the identity of their counters.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    busy: Mapping[int, float] = field(default_factory=dict)


def counts_of(runners: Iterable[Runner], now_ns: int) -> LoadCounts:
    """Return what runners have counted."""
    versions = {}
    for runner in runners:
        counted = runner.metrics.statistics
        requests = counted.success.count + counted.fail.count
        versions[id(runner.metrics)] = (requests, counted.fail.count, counted.execution_count, counted.busy_ns)
    return LoadCounts(now_ns, versions)


def rates_between(before: LoadCounts, now: LoadCounts) -> LoadRates:
    """Return the rates since `before`, none if that is too long ago."""
    took_ns = now.at_ns - before.at_ns
    if not before.at_ns or took_ns > RATE_NS_MAX:
        return LoadRates()
    requests = failures = 0
    busy = {}
    for key, counted in now.versions.items():
        more = [max(new - old, 0) for new, old in zip(counted, before.versions.get(key, (0, 0, 0, 0)), strict=True)]
        requests += more[0]
        failures += more[1]
        if more[2]:
            busy[key] = more[3] / took_ns
    return LoadRates({REQUEST_RATE: requests * 1e9 / took_ns, ERROR_RATE: failures * 1e9 / took_ns}, busy)


def load_of(runners: Iterable[Runner], rates: LoadRates) -> dict[str, float]:
    """Return what runners have to do. Ensembles have no queue; a request that one of its steps works on counts twice.

    The utilization is that of the model whose instances are busiest: on average, at the moment for one whose last
    executions have not ended.
    """
    queued = in_flight = instances = busy = 0
    highest = 0.0
    for runner in runners:
        queued += runner.pending or 0
        in_flight += runner.in_flight
        inner = runner.inner if isinstance(runner, CachedRunner) else runner
        if isinstance(inner, ModelRunner):
            count = len(inner.instances)
            working = count - len(inner.free_instances())
            instances += count
            busy += working
            average = rates.busy.get(id(runner.metrics), working)
            highest = max(highest, min(average / count, 1.0) if count else 0.0)
    return {
        UTILIZATION: highest,
        **rates.values,
        QUEUE_DEPTH: queued,
        IN_FLIGHT: in_flight,
        INSTANCES: instances,
        BUSY: busy,
    }


def _cache_of(families: Mapping[str, CustomFamily]) -> Iterator[tuple[str, float]]:
    """Return the share of the fullest cache of a language model, and the tokens that all have room for."""
    shares = [m.value for name in _KV_USAGE if name in families for m in families[name].metrics.values()]
    blocks: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for metric in families[_KV_BLOCKS].metrics.values() if _KV_BLOCKS in families else ():
        model = tuple(label for label in metric.labels if label[0] != _BLOCK)
        blocks.setdefault(model, {})[dict(metric.labels).get(_BLOCK, "")] = metric.value
    whole = [each for each in blocks.values() if {"used", "max", "tokens_per"} <= each.keys()]
    shares += [each["used"] / each["max"] if each["max"] else 0.0 for each in whole]
    if shares:
        yield KV_CACHE, max(shares)
    if whole:
        yield TOKENS_MAX, sum(each["max"] * each["tokens_per"] for each in whole)
