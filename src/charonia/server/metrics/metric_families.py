"""The values of the metrics page: histograms with fixed buckets, and families of gauges and counters. Pure."""

import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from charonia.config.model import ModelConfig
from charonia.config.problems import Problem


class Histogram:
    """Counts of values by upper bound, and their sum.

    Attributes:
        bounds: Upper bounds of the buckets, ascending; a last bucket without bound follows.
        counts: Values of each bucket alone (not cumulative), one more than `bounds`.
        total: Sum of the values.
    """

    def __init__(self, bounds: Sequence[int]) -> None:
        if not bounds or list(bounds) != sorted(set(bounds)):
            raise ValueError(f"histogram bounds: expected at least one, ascending, got {list(bounds)}")
        self.bounds = tuple(bounds)
        self._bounds = np.array(self.bounds, np.int64)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0

    def observe(self, values: NDArray[np.int64]) -> int:
        """Count every value, and return their sum."""
        found = np.bincount(np.searchsorted(self._bounds, values), minlength=len(self.counts))
        self.counts = [before + more for before, more in zip(self.counts, found.tolist(), strict=True)]
        total = int(values.sum())
        self.total += total
        return total

    def add(self, value: int) -> int:
        """Count one value, and return it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
        return value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def take(self) -> "HistogramCounts":
        """Return the counts, and reset them to 0."""
        taken = HistogramCounts(tuple(self.counts), self.total)
        self.counts, self.total = [0] * len(self.counts), 0
        return taken

    def merge(self, more: "HistogramCounts") -> None:
        """Add the counts of a histogram with the same bounds."""
        self.counts = [before + counted for before, counted in zip(self.counts, more.counts, strict=True)]
        self.total += more.total


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """The counts of a histogram: see its attributes."""

    counts: tuple[int, ...]
    total: int


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One value of a family."""

    value: float
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Family:
    """A metric with its values.

    Attributes:
        kind: "gauge" or "counter".
        help: One sentence without a full stop.
        samples: Its values.
    """

    name: str
    kind: str
    help: str
    samples: tuple[MetricSample, ...]


def family(name: str, kind: str, help: str, *samples: tuple[float, Mapping[str, str]]) -> Family:
    return Family(name, kind, help, tuple(MetricSample(value, labels) for value, labels in samples))


HISTOGRAM_UNITS = {
    "nv_inference_first_response_histogram_ms": 1_000_000,
    "charonia_request_duration_seconds": 1_000_000_000,
    "charonia_queue_duration_seconds": 1_000_000_000,
    "charonia_compute_duration_seconds": 1_000_000_000,
    "charonia_batch_size": 1,
}
"""Histograms whose buckets a model may choose, with the factor to their internal unit: ns, or batch elements."""

BUCKETS_MAX = 256
"""Limit of buckets of a histogram."""

_TAG = re.compile(r"[a-zA-Z0-9_]+")


def tag_problems(config: ModelConfig) -> Iterator[Problem]:
    """Yield tags that are not valid names of labels."""
    for tag in config.metric_tags:
        if not _TAG.fullmatch(tag):
            message = f"the key of a metric tag takes letters, digits and '_', got '{tag}'"
            yield Problem(f"metric_tags[{tag}]", message)


def bucket_problems(config: ModelConfig) -> Iterator[Problem]:
    for index, control in enumerate(config.model_metrics.metric_control if config.model_metrics else ()):
        path = f"model_metrics.metric_control[{index}]"
        buckets = control.histogram_options.buckets if control.histogram_options is not None else ()
        if len(buckets) > BUCKETS_MAX:
            message = f"at most {BUCKETS_MAX} buckets are counted, got {len(buckets)}"
            yield Problem(f"{path}.histogram_options.buckets", message)
        elif buckets and math.isinf(buckets[0]):
            yield Problem(f"{path}.histogram_options.buckets", "at least one bucket must have a finite bound")


def unknown_families(config: ModelConfig) -> list[str]:
    """Return the families that the configuration controls and the server does not have; they are left out."""
    controls = config.model_metrics.metric_control if config.model_metrics else ()
    families = [control.metric_identifier.family for control in controls if control.metric_identifier is not None]
    return [family for family in families if family and family not in HISTOGRAM_UNITS]


def chosen_buckets(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the upper bounds that a valid configuration chooses, by histogram, in the internal unit."""
    chosen = {}
    for control in config.model_metrics.metric_control if config.model_metrics else ():
        if control.metric_identifier is not None and control.histogram_options is not None:
            unit = HISTOGRAM_UNITS.get(control.metric_identifier.family)
            if unit is None:
                continue
            finite = [bound for bound in control.histogram_options.buckets if math.isfinite(bound)]
            chosen[control.metric_identifier.family] = tuple(sorted({round(bound * unit) for bound in finite}))
    return chosen
