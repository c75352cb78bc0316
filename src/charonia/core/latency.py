"""Histograms of durations with a bounded relative error, from one nanosecond to hours.

Buckets are log-linear, as in HdrHistogram: every octave is cut into 128 of equal width, so the middle of a bucket is
within 0.4 % of every value in it. Two histograms always have the same buckets, so they add up without loss.

Source: Gil Tene, HdrHistogram.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

RELATIVE_ERROR_MAX = 1 / 256
"""How far a percentile may lie from the exact value, as a share of it."""

_SUB_BITS = 7
_SUB_COUNT = 1 << _SUB_BITS
_VALUE_BITS_MAX = 45
_VALUE_MAX = (1 << _VALUE_BITS_MAX) - 1
_BUCKETS = (_VALUE_BITS_MAX - _SUB_BITS + 1) * _SUB_COUNT


class LatencyHistogram:
    """How often each duration was seen, in nanoseconds.

    Negative durations count as 0, those beyond 2**45 - 1 ns (9.7 hours) as that. Mean, minimum and maximum are exact.

    Attributes:
        count: Number of values.
        total: Their sum.
        minimum: Smallest value, 0 when there is none.
        maximum: Largest value, 0 when there is none.
    """

    __slots__ = ("_counts", "_deviations", "count", "maximum", "minimum", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0
        self.minimum = 0
        self.maximum = 0
        self._deviations = 0.0  # sum of squared distances from the mean
        self._counts = np.zeros(_BUCKETS, np.int64)

    @classmethod
    def of(cls, values: NDArray[np.int64] | Iterable[int]) -> Self:
        """Return the histogram of these values."""
        histogram = cls()
        histogram.record(np.asarray(values if isinstance(values, np.ndarray) else list(values), np.int64))
        return histogram

    def record(self, values: NDArray[np.int64]) -> None:
        """Count every value."""
        if not values.size:
            return
        values = np.clip(values, 0, _VALUE_MAX)
        self._counts += np.bincount(_bucket_of(values), minlength=_BUCKETS)
        deviations = float(np.square(values - values.mean()).sum())
        self._grow(values.size, int(values.sum()), deviations, int(values.min()), int(values.max()))

    def add(self, other: "LatencyHistogram") -> None:
        if other.count:
            self._counts += other._counts
            self._grow(other.count, other.total, other._deviations, other.minimum, other.maximum)

    @property
    def mean(self) -> float:
        """Mean value, 0 when there is none."""
        return self.total / self.count if self.count else 0.0

    @property
    def deviation(self) -> float:
        """Sample standard deviation, 0 for fewer than two values."""
        return float((self._deviations / (self.count - 1)) ** 0.5) if self.count > 1 else 0.0

    def percentile(self, percent: float) -> int:
        """Return the value at a percentile, by the nearest rank; 0 when there is none.

        Args:
            percent: From 0 to 100, any fraction.
        """
        if not 0 <= percent <= 100:
            raise ValueError(f"percentile: expected 0 to 100, got {percent}")
        if not self.count:
            return 0
        rank = int(percent / 100 * (self.count - 1) + 0.5)
        if rank == 0:
            return self.minimum
        if rank == self.count - 1:
            return self.maximum
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank, side="right"))
        return min(max(_middle(bucket), self.minimum), self.maximum)

    def buckets(self) -> list[tuple[int, int, int]]:
        """Return lower bound, upper bound (exclusive) and count of every bucket that holds a value, ascending."""
        return [(_lower(int(i)), _lower(int(i) + 1), int(self._counts[i])) for i in np.flatnonzero(self._counts)]

    def to_json(self) -> dict[str, Any]:
        """Return numbers and lists only; `from_json` takes them."""
        filled = np.flatnonzero(self._counts)
        return {
            "count": self.count,
            "total": self.total,
            "minimum": self.minimum,
            "maximum": self.maximum,
            "squared_deviations": self._deviations,
            "buckets": filled.tolist(),
            "counts": self._counts[filled].tolist(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the histogram that `to_json` described.

        Raises:
            ValueError: A bucket is not one of ours, or its counts do not add up.
        """
        histogram = cls()
        indices = np.asarray(data["buckets"], np.int64)
        counts = np.asarray(data["counts"], np.int64)
        if indices.shape != counts.shape or (indices.size and not 0 <= indices.min() <= indices.max() < _BUCKETS):
            raise ValueError(f"histogram: expected buckets from 0 to {_BUCKETS - 1}, each with a count")
        if int(counts.sum()) != data["count"]:
            raise ValueError(f"histogram: counts add up to {int(counts.sum())}, expected {data['count']}")
        histogram._counts[indices] = counts
        histogram.count, histogram.total = int(data["count"]), int(data["total"])
        histogram.minimum, histogram.maximum = int(data["minimum"]), int(data["maximum"])
        histogram._deviations = float(data["squared_deviations"])
        return histogram

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LatencyHistogram) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"LatencyHistogram(count={self.count}, mean={self.mean:.0f}, maximum={self.maximum})"

    def _grow(self, count: int, total: int, deviations: float, minimum: int, maximum: int) -> None:
        if self.count:
            # Chan, Golub and LeVeque: sums of squares are joined without ever squaring a large number.
            apart = total / count - self.mean
            self._deviations += deviations + apart * apart * self.count * count / (self.count + count)
            self.minimum, self.maximum = min(self.minimum, minimum), max(self.maximum, maximum)
        else:
            self._deviations, self.minimum, self.maximum = deviations, minimum, maximum
        self.count += count
        self.total += total


def merged(histograms: Iterable[LatencyHistogram]) -> LatencyHistogram:
    """Return the histogram of all values of these histograms."""
    result = LatencyHistogram()
    for histogram in histograms:
        result.add(histogram)
    return result


def _bucket_of(values: NDArray[np.int64]) -> NDArray[np.int64]:
    # frexp is exact up to 2**53: a value has `exponent` bits.
    octave = np.maximum(np.frexp(values.astype(np.float64))[1].astype(np.int64) - 1 - _SUB_BITS, 0)
    found: NDArray[np.int64] = octave * _SUB_COUNT + (values >> octave)
    return found


def _lower(bucket: int) -> int:
    octave = max(bucket // _SUB_COUNT - 1, 0)
    return (bucket - octave * _SUB_COUNT) << octave


def _middle(bucket: int) -> int:
    return (_lower(bucket) + _lower(bucket + 1) - 1) // 2
