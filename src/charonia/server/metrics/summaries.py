"""Summaries of latencies: quantiles of the last minute, as Prometheus shows them. Pure.

A window of one minute slides in five steps, as in Prometheus' client libraries.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from charonia.core.latency import LatencyHistogram, merged

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

    __slots__ = ("_slots", "count", "total")

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
        self._forget()

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
        self._forget()

    def _forget(self) -> None:
        for slot in [slot for slot in self._slots if slot <= max(self._slots) - SLOTS]:
            del self._slots[slot]

    def quantiles(self, quantiles: Iterable[float], now_ns: int) -> list[float]:
        """Return the quantiles of the last minute in ns, NaN without values.

        Args:
            quantiles: From 0 to 1.
            now_ns: Monotonic time.
        """
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

    __slots__ = ("_cached", "_summaries")

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
        """Yield the lines of a summary on the metrics page.

        Args:
            name: Its family.
            labels: The labels of the model version, as text.
            quantiles: The quantiles to show.
            now_ns: Monotonic time.
        """
        summary = self._summaries.get(name) or self._cached[name]
        for quantile, ns in zip(quantiles, summary.quantiles(quantiles, now_ns), strict=True):
            value = "NaN" if math.isnan(ns) else f"{ns / _NS_PER_US:.9g}"
            yield f'{name}{{{labels},quantile="{quantile:g}"}} {value}'
        yield f"{name}_sum{{{labels}}} {summary.total / _NS_PER_US:.9g}"
        yield f"{name}_count{{{labels}}} {summary.count}"
