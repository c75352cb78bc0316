"""The values of the metrics page: histograms with fixed buckets, and families of gauges and counters. Pure."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class Histogram:
    """Counts of values by upper bound, and their sum.

    Attributes:
        bounds: Upper bounds of the buckets, ascending; a last bucket without bound follows.
        counts: Values of each bucket alone (not cumulative), one more than `bounds`.
        total: Sum of the values.
    """

    __slots__ = ("_bounds", "bounds", "counts", "total")

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
