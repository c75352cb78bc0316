"""The counters of one model version, behind both the statistics extension and the metrics. Pure.

Summaries have quantiles of a window of one minute, which slides in five steps, as in Prometheus' client libraries.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from charonia.core.latency import LatencyHistogram, merged
from charonia.core.statistics import (
    BatchStatistics,
    Duration,
    ModelStatistics,
    ResponseKind,
    ResponseStatistics,
    TokenUsage,
)
from charonia.core.tensor import Array
from charonia.server.metrics.metric_families import Histogram, HistogramCounts
from charonia.server.metrics.tokens import TokenMetrics
from charonia.server.scheduling.api import CloseReason

SLOT_NS = 12_000_000_000
"""Length of a slot; all values of a slot are dropped together."""

SLOTS = 5
"""Slots of the window, including the one in progress."""

_NS_PER_US = 1000


@dataclass(frozen=True, slots=True)
class SummaryCounts:
    """The values of a summary.

    Attributes:
        count: Their number.
        total: Their sum.
        slots: Their histograms as numbers and lists, by slot.
    """

    count: int
    total: int
    slots: Mapping[int, Mapping[str, Any]]


class Summary:
    """The values of the last minute, and count and sum of all.

    Attributes:
        count: Number of values since the model was loaded.
        total: Their sum.
    """

    def __init__(self) -> None:
        self.count = 0
        self.total = 0
        self._slots: dict[int, LatencyHistogram] = {}

    def observe(self, values: NDArray[np.int64], ends_ns: NDArray[np.int64]) -> None:
        """Count every value.

        Args:
            values: Durations in ns.
            ends_ns: The end of each, monotonic time.
        """
        if not values.size:
            return
        self.count += values.size
        self.total += int(values.sum())
        slots = ends_ns // SLOT_NS
        for slot in np.unique(slots).tolist():
            self._slots.setdefault(slot, LatencyHistogram()).record(values[slots == slot])
        self._remove_old_slots()

    def take(self) -> SummaryCounts:
        """Return the values, and begin again without any."""
        taken = SummaryCounts(self.count, self.total, {slot: each.to_json() for slot, each in self._slots.items()})
        self.count, self.total, self._slots = 0, 0, {}
        return taken

    def merge(self, more: SummaryCounts) -> None:
        """Count the values of another summary of the same clock, too."""
        self.count += more.count
        self.total += more.total
        for slot, counted in more.slots.items():
            self._slots.setdefault(slot, LatencyHistogram()).add(LatencyHistogram.from_json(counted))
        self._remove_old_slots()

    def _remove_old_slots(self) -> None:
        for slot in [slot for slot in self._slots if slot <= max(self._slots) - SLOTS]:
            del self._slots[slot]

    def quantiles(self, quantiles: Iterable[float], now_ns: int) -> list[float]:
        """Return the quantiles of the last minute in ns, NaN without values."""
        oldest = now_ns // SLOT_NS - SLOTS + 1
        recent = merged(histogram for slot, histogram in self._slots.items() if slot >= oldest)
        return [recent.percentile(100 * q) if recent.count else math.nan for q in quantiles]


REQUEST_SUMMARY = "nv_inference_request_summary_us"

SUMMARIES = {
    REQUEST_SUMMARY: "Time of answered requests, arrival to answer, of the last minute",
    "nv_inference_queue_summary_us": "Time that requests waited, of the last minute",
    "nv_inference_compute_input_summary_us": "Time to put inputs in place, of the last minute",
    "nv_inference_compute_infer_summary_us": "Time that models computed, of the last minute",
    "nv_inference_compute_output_summary_us": "Time to take outputs, of the last minute",
}
"""Help text of each summary by the name of its family, in the order of the arguments of `Summaries.observe`."""

CACHE_HIT = "nv_cache_hit_summary_per_model"
CACHE_MISS = "nv_cache_miss_summary_per_model"

CACHE_SUMMARIES = {
    CACHE_HIT: "Time of hits of the response cache in microseconds, of the last minute",
    CACHE_MISS: "Time of misses of the response cache in microseconds, of the last minute",
}
"""The same for model versions behind a response cache."""


class Summaries:
    """The summaries of one model version."""

    def __init__(self) -> None:
        self._summaries = {name: Summary() for name in SUMMARIES}
        self._cached = {name: Summary() for name in CACHE_SUMMARIES}

    def observe(self, ends_ns: NDArray[np.int64], *durations: NDArray[np.int64]) -> None:
        """Count requests: their ends, and their durations in the order of `SUMMARIES`."""
        for summary, values in zip(self._summaries.values(), durations, strict=True):
            summary.observe(values, ends_ns)

    def take(self) -> dict[str, SummaryCounts]:
        """Return the values of executed requests by summary, and begin again without any."""
        return {name: summary.take() for name, summary in self._summaries.items()}

    def merge(self, more: Mapping[str, SummaryCounts]) -> None:
        """Count what `take` has returned elsewhere, too."""
        for name, counted in more.items():
            self._summaries[name].merge(counted)

    def cached(self, name: str, end_ns: int, duration_ns: int) -> None:
        """Count a hit or a miss, by the name of its summary."""
        self._cached[name].observe(np.array([duration_ns]), np.array([end_ns]))

    def lines(self, name: str, labels: str, quantiles: Sequence[float], now_ns: int) -> Iterator[str]:
        """Yield the lines of a summary on the metrics page."""
        summary = self._summaries.get(name) or self._cached[name]
        for quantile, ns in zip(quantiles, summary.quantiles(quantiles, now_ns), strict=True):
            value = "NaN" if math.isnan(ns) else f"{ns / _NS_PER_US:.9g}"
            yield f'{name}{{{labels},quantile="{quantile:g}"}} {value}'
        yield f"{name}_sum{{{labels}}} {summary.total / _NS_PER_US:.9g}"
        yield f"{name}_count{{{labels}}} {summary.count}"


_US = 1_000
_MS = 1_000_000
_S = 1_000_000_000

DURATION_BOUNDS_NS = (
    50 * _US, 100 * _US, 250 * _US, 500 * _US,
    1 * _MS, 5 * _MS // 2, 5 * _MS, 10 * _MS, 25 * _MS, 50 * _MS, 100 * _MS, 250 * _MS, 500 * _MS,
    1 * _S, 5 * _S // 2, 5 * _S, 10 * _S, 30 * _S,
)  # fmt: skip
"""Upper bounds of the latency histograms: 50 us to 30 s."""

BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Upper bounds of the histogram of executed batch sizes."""

FIRST_RESPONSE_BOUNDS_NS = (100 * _MS, 500 * _MS, 2 * _S, 5 * _S)
"""Upper bounds of the histogram of the time to the first response of decoupled models. Source: Triton's metrics."""

RESPONSES_COUNTED_MAX = 1024
"""Responses of a request that are counted by their index; later ones are counted together with the last of these."""

NOTES_MAX = 1024
"""Batches that are noted before they are added up: enough to make that cheap, few enough to keep it short."""

REQUEST_DURATION = "charonia_request_duration_seconds"
QUEUE_DURATION = "charonia_queue_duration_seconds"
COMPUTE_DURATION = "charonia_compute_duration_seconds"
BATCH_SIZE = "charonia_batch_size"
FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"


BatchNote = tuple[Sequence[int], int, int, CloseReason, tuple[int, int, int, int]]
"""An executed batch: the arguments of `ModelMetrics.batch_done` in their order, without the last."""


class FailureReason(Enum):
    """Why a request failed, as label values of the failure counter."""

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


@dataclass(frozen=True, slots=True)
class Increase:
    """The counts since the last increase, for a version whose requests have one response each and no cache.

    Attributes:
        statistics: The counters of the statistics extension.
        failures: Failed requests by reason.
        closes: Batches by the reason they were sent.
        histograms: Of requests, waiting, computing and batch sizes.
        summaries: Summaries of latencies by name; none where they are off.
    """

    statistics: ModelStatistics
    failures: Mapping[FailureReason, int]
    closes: Mapping[CloseReason, int]
    histograms: tuple[HistogramCounts, ...]
    summaries: Mapping[str, SummaryCounts]


class BatchCost:
    """How much of its instances' capacity a model uses.

    An instance that runs small batches one after another is always busy, and could do more: with more requests, its
    batches would be larger. The time of a batch is assumed to be a fixed part and a part for each element, fitted to
    the batches so far. If all had the same size, larger batches are assumed to save nothing.
    """

    def __init__(self, batch_max: int) -> None:
        self._batch_max = max(1, batch_max)
        self._sums = np.zeros(5)  # of 1, size, size squared, time, size times time

    def load_ns(self, sizes: Array, took_ns: Array) -> int:
        """Return the time that full batches would have needed for the elements of these batches."""
        total_ns = int(took_ns.sum())
        sums = self._sums
        sums += (len(sizes), sizes.sum(), int(np.dot(sizes, sizes)), total_ns, int(np.dot(sizes, took_ns)))
        spread = sums[0] * sums[2] - sums[1] ** 2
        if not spread or not total_ns:
            return total_ns
        each = max(0.0, (sums[0] * sums[4] - sums[1] * sums[3]) / spread)
        fixed = max(0.0, (sums[3] - each * sums[1]) / sums[0])
        elements = int(sizes.sum())
        full = elements / self._batch_max * (fixed + each * self._batch_max)
        return int(total_ns * min(1.0, full / (len(sizes) * fixed + each * elements)))


class ModelMetrics:
    """All counters of one model version. Only the event loop's thread calls it.

    `batch_done` is on the path of every request, so it only takes a note; the notes are added up together when there
    are `NOTES_MAX` of them or a counter is read.

    Attributes:
        is_cached: Whether the version is behind the response cache.
        collapsed: Requests that were answered with the response to an equal one in flight.
        first_response_ns: Histogram of the time from arrival to the first response, of decoupled models.
        failures: Failed requests by reason.
        load_seconds: Time it took to load the version.
        tokens: The tokens of a language model; None for any other, until some are counted.
        namespace: The model's namespace, "" without namespaces.
    """

    def __init__(
        self, name: str, version: str, buckets: Mapping[str, Sequence[int]] | None = None, batch_max: int = 0
    ) -> None:
        """Make counters that are all 0.

        Args:
            name: The model.
            version: The version, as text.
            buckets: Upper bounds by histogram, where they differ from the defaults.
            batch_max: Elements of a full batch, 0 or 1 for a model without batches.
        """
        chosen = buckets or {}
        self.failures = dict.fromkeys(FailureReason, 0)
        self.is_cached = False
        self.collapsed = 0
        self.load_seconds = 0.0
        self.namespace = ""
        self.tokens: TokenMetrics | None = None
        self.first_response_ns = Histogram(chosen.get(FIRST_RESPONSE, FIRST_RESPONSE_BOUNDS_NS))
        self._summaries: Summaries | None = None
        self._statistics = ModelStatistics(name, version)
        self._cost = BatchCost(batch_max)
        self._closes = dict.fromkeys(CloseReason, 0)
        self._request_ns = Histogram(chosen.get(REQUEST_DURATION, DURATION_BOUNDS_NS))
        self._queue_ns = Histogram(chosen.get(QUEUE_DURATION, DURATION_BOUNDS_NS))
        self._compute_ns = Histogram(chosen.get(COMPUTE_DURATION, DURATION_BOUNDS_NS))
        self._batch_size = Histogram(chosen.get(BATCH_SIZE, BATCH_BOUNDS))
        # Of executed batches and requests of ensembles; flat, as the garbage collector does not see integers.
        self._arrivals_ns: list[int] = []
        self._reasons: list[CloseReason] = []
        self._batches: list[int] = []
        self._composed: list[int] = []

    @property
    def statistics(self) -> ModelStatistics:
        """The counters of the statistics extension."""
        self._add_up()
        return self._statistics

    @property
    def closes(self) -> Mapping[CloseReason, int]:
        """Batches by the reason they were sent."""
        self._add_up()
        return self._closes

    @property
    def summaries(self) -> Summaries | None:
        """Summaries of latencies, None where they are off."""
        self._add_up()
        return self._summaries

    @property
    def request_ns(self) -> Histogram:
        """Histogram of the time from arrival to answer of successful requests."""
        self._add_up()
        return self._request_ns

    @property
    def queue_ns(self) -> Histogram:
        """Histogram of the time from arrival to execution of successful requests."""
        self._add_up()
        return self._queue_ns

    @property
    def compute_ns(self) -> Histogram:
        """Histogram of the time of an execution, counted for each request in it."""
        self._add_up()
        return self._compute_ns

    @property
    def batch_size(self) -> Histogram:
        """Histogram of the batch elements of an execution."""
        self._add_up()
        return self._batch_size

    def summarize(self) -> None:
        if self._summaries is None:
            self._summaries = Summaries()

    def take(self) -> Increase | None:
        """Return the counts since the last call, and reset them to 0; None if there are none."""
        self._add_up()
        statistics = self._statistics
        if not statistics.execution_count and not statistics.fail.count:
            return None
        taken = Increase(
            statistics,
            self.failures,
            self._closes,
            tuple(histogram.take() for histogram in self._histograms()),
            self._summaries.take() if self._summaries is not None else {},
        )
        self._statistics = ModelStatistics(statistics.name, statistics.version, memory=statistics.memory)
        self.failures = dict.fromkeys(FailureReason, 0)
        self._closes = dict.fromkeys(CloseReason, 0)
        return taken

    def merge(self, more: Increase) -> None:
        """Add the counts of the same version in another process."""
        self._add_up()
        self._statistics.merge(more.statistics)
        for failure, count in more.failures.items():
            self.failures[failure] += count
        for close, count in more.closes.items():
            self._closes[close] += count
        for histogram, counted in zip(self._histograms(), more.histograms, strict=True):
            histogram.merge(counted)
        if self._summaries is not None:
            self._summaries.merge(more.summaries)

    def _histograms(self) -> tuple[Histogram, ...]:
        return self._request_ns, self._queue_ns, self._compute_ns, self._batch_size

    def failed(self, reason: FailureReason, duration_ns: int) -> None:
        """Count a request that failed `duration_ns` after it arrived."""
        self.failures[reason] += 1
        self._statistics.fail.add(duration_ns)

    def request_done(
        self, arrival_ns: int, inferences: int, start_ns: int, marks_ns: tuple[int, int], end_ns: int
    ) -> None:
        """Count a successful request that was answered after the end of its batch. Until then it counts as computing.

        Args:
            inferences: Its batch elements.
            start_ns: Start of its batch.
            marks_ns: Times at which the batch's inputs were in place, and at which it was computed.
            end_ns: Last answer.
        """
        statistics = self.statistics
        statistics.inference_count += inferences
        statistics.success.add(self._request_ns.add(end_ns - arrival_ns))
        statistics.queue.add(self._queue_ns.add(start_ns - arrival_ns))
        self._compute_ns.add(end_ns - start_ns)
        statistics.compute_input.add(marks_ns[0] - start_ns)
        statistics.compute_infer.add(end_ns - marks_ns[0])
        statistics.compute_output.add(0)
        if self._summaries is not None:
            parts = (end_ns - arrival_ns, start_ns - arrival_ns, marks_ns[0] - start_ns, end_ns - marks_ns[0], 0)
            self._summaries.observe(np.array([end_ns]), *(np.array([part]) for part in parts))

    def cache_hit(self, *, end_ns: int, duration_ns: int, queue_ns: int, lookup_ns: int, wall_ms: int) -> None:
        """Count a request that was answered with a cached response.

        Args:
            end_ns: When it was answered.
            duration_ns: Time from arrival to answer.
            queue_ns: Time that it waited for an equal request in flight.
            lookup_ns: Time to look it up and to copy it.
            wall_ms: Wall-clock time in ms since the epoch.
        """
        self._statistics.last_inference_ms = wall_ms
        self._statistics.success.add(self._request_ns.add(duration_ns))
        self._statistics.queue.add(self._queue_ns.add(queue_ns))
        self._statistics.cache_hit.add(lookup_ns)
        if self._summaries is not None:
            self._summaries.cached(CACHE_HIT, end_ns, lookup_ns)

    def cache_miss(self, end_ns: int, duration_ns: int) -> None:
        """Count the look-up and the insertion, until `end_ns`, in addition to a request that was executed."""
        self._statistics.success.ns += duration_ns
        self._statistics.cache_miss.add(duration_ns)
        if self._summaries is not None:
            self._summaries.cached(CACHE_MISS, end_ns, duration_ns)

    def count_tokens(self, usage: TokenUsage) -> None:
        """Count the tokens of a request whose model does not report them."""
        if self.tokens is None:
            self.tokens = TokenMetrics()
        self.tokens.used(usage)

    def first_response(self, duration_ns: int) -> None:
        """Count the first response of a request of a decoupled model, `duration_ns` after it arrived."""
        self.first_response_ns.add(duration_ns)

    def response(self, index: int, kind: ResponseKind, duration_ns: int) -> None:
        """Count response `index` of a request of a decoupled model.

        Args:
            index: How many responses of the request came before it.
            kind: Its outcome.
            duration_ns: Time since the previous response, or since the batch started.
        """
        key = str(min(index, RESPONSES_COUNTED_MAX - 1))
        responses = self._statistics.responses
        counted = responses.get(key)
        if counted is None:
            counted = responses[key] = ResponseStatistics()
        duration: Duration = getattr(counted, kind.value)
        duration.add(duration_ns)
        if kind in (ResponseKind.SUCCESS, ResponseKind.FAIL):
            counted.compute_infer.add(duration_ns)
            counted.compute_output.add(0)

    def batch_done(
        self,
        *,
        arrivals_ns: Sequence[int],
        inferences: int,
        batch_size: int,
        reason: CloseReason,
        marks_ns: tuple[int, int, int, int],
        wall_ms: int,
    ) -> None:
        """Count an executed batch and its successful requests.

        Args:
            arrivals_ns: Arrival of each request that succeeded.
            inferences: Batch elements of those requests.
            batch_size: Batch elements of all requests in the batch.
            reason: Why the batch was sent.
            marks_ns: Times of start, inputs in place, computed, end.
            wall_ms: Wall-clock time in ms since the epoch.
        """
        self._statistics.last_inference_ms = wall_ms
        self._arrivals_ns += arrivals_ns
        self._reasons.append(reason)
        self._batches += (len(arrivals_ns), inferences, batch_size, *marks_ns)
        if len(self._reasons) >= NOTES_MAX:
            self._add_up()

    def batches_done(self, notes: Sequence[BatchNote], wall_ms: int) -> None:
        """Count executed batches as `batch_done` does, `wall_ms` after the epoch."""
        self._statistics.last_inference_ms = wall_ms
        for arrivals_ns, inferences, batch_size, reason, marks_ns in notes:
            self._arrivals_ns += arrivals_ns
            self._reasons.append(reason)
            self._batches += (len(arrivals_ns), inferences, batch_size, *marks_ns)
        if len(self._reasons) >= NOTES_MAX:
            self._add_up()

    def composed(
        self, *, duration_ns: int, inferences: int, queue_ns: int, compute_ns: int, end_ns: int, wall_ms: int
    ) -> None:
        """Count a successful request of an ensemble, whose batches were executed, and counted, by other models.

        Args:
            duration_ns: Time from arrival to answer.
            inferences: Batch elements of the request.
            queue_ns: Time that its steps waited, added up.
            compute_ns: Time that the batches of its steps took, added up.
            end_ns: When it was answered, monotonic time.
            wall_ms: Wall-clock time in ms since the epoch.
        """
        self._statistics.last_inference_ms = wall_ms
        self._composed += (duration_ns, inferences, queue_ns, compute_ns, end_ns)
        if len(self._composed) >= 5 * NOTES_MAX:
            self._add_up_composed()

    def _add_up_composed(self) -> None:
        if not self._composed:
            return
        statistics = self._statistics
        durations, inferences, queues, computes, ends = np.array(self._composed, np.int64).reshape(-1, 5).T
        self._composed.clear()
        count = len(ends)
        statistics.execution_count += count
        statistics.inference_count += int(inferences.sum())
        statistics.success.add(self._request_ns.observe(durations), count)
        statistics.queue.add(self._queue_ns.observe(queues), count)
        statistics.compute_infer.add(self._compute_ns.observe(computes), count)
        statistics.compute_input.add(0, count)
        statistics.compute_output.add(0, count)
        for size in set(inferences.tolist()):
            same = computes[inferences == size]
            batch = statistics.batches.setdefault(size, BatchStatistics())
            for duration, ns in zip(_phases(batch), (0, int(same.sum()), 0), strict=True):
                duration.add(ns, len(same))
        if self._summaries is not None:
            nothing = np.zeros_like(durations)
            self._summaries.observe(ends, durations, queues, nothing, computes, nothing)

    def _add_up(self) -> None:
        self._add_up_composed()
        if not self._reasons:
            return
        statistics = self._statistics
        arrivals = np.array(self._arrivals_ns, np.int64)
        batches = np.array(self._batches, np.int64).reshape(-1, 7)
        requests, inferences, sizes = batches[:, :3].T
        marks = batches[:, 3:]
        phases = np.diff(marks)  # a row a batch: input, infer, output
        count = len(arrivals)
        statistics.execution_count += len(batches)
        statistics.inference_count += int(inferences.sum())
        ends = np.repeat(marks[:, 3], requests)
        durations, waits = ends - arrivals, np.repeat(marks[:, 0], requests) - arrivals
        statistics.success.add(self._request_ns.observe(durations), count)
        statistics.queue.add(self._queue_ns.observe(waits), count)
        if self._summaries is not None:
            self._summaries.observe(ends, durations, waits, *np.repeat(phases, requests, axis=0).T)
        self._compute_ns.observe(np.repeat(marks[:, 3] - marks[:, 0], requests))
        self._batch_size.observe(sizes)
        statistics.load_ns += self._cost.load_ns(sizes, phases.sum(axis=1))
        shares = (phases * requests[:, None]).sum(axis=0).tolist()
        for duration, ns in zip(_phases(statistics), shares, strict=True):
            duration.add(ns, count)
        for size in set(sizes.tolist()):
            batch = statistics.batches.setdefault(size, BatchStatistics())
            rows = phases[sizes == size]
            for duration, ns in zip(_phases(batch), rows.sum(axis=0).tolist(), strict=True):
                duration.add(ns, len(rows))
        for reason in self._reasons:
            self._closes[reason] += 1
        for noted in (self._arrivals_ns, self._reasons, self._batches):
            noted.clear()

    def labels(self, tags: Mapping[str, str]) -> dict[str, str]:
        """Return the labels of this version's metrics: the tags of the configuration, model, version and namespace.

        Names of tags are prefixed with "_". The namespace is left out without namespaces.
        """
        statistics = self._statistics
        namespace = {"namespace": self.namespace} if self.namespace else {}
        own = {"model": statistics.name, "version": statistics.version, **namespace}
        return {f"_{name}": tags[name] for name in sorted(tags)} | own


def _phases(counted: ModelStatistics | BatchStatistics) -> tuple[Duration, Duration, Duration]:
    return counted.compute_input, counted.compute_infer, counted.compute_output
