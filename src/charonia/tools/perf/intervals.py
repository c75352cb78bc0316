"""Confidence intervals for autocorrelated measurements. Pure.

Consecutive requests share queues and stalls, so the textbook interval for independent samples is far too narrow. Here
samples are grouped into batches long enough that the batch means are almost uncorrelated; the correlation that is left
widens the interval.

Source: method of batch means (Law, Simulation Modeling and Analysis, chapter 9); warm-up by MSER-5 (White, 1997).

In `--measurement-mode adaptive`, the requests so far are analysed every quarter of a second, or more often in a shorter
measurement, without the warm-up at the start. The level is settled when the intervals of throughput and of the
stabilising latency are both tight, twice in a row.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from charonia.tools.perf.api import MeasurePlan
from charonia.tools.perf.samples import DONE, Rows, response_times, successes
from charonia.tools.results.records import Estimate, student

Floats = NDArray[np.float64]

BATCHES_MIN = 10
"""Fewest batches that give a usable variance."""

_BATCHES_MAX = 64
_CORRELATION_MAX = 0.15
_CORRELATION_COUNTED_MAX = 0.9
_WARMUP_GROUP = 5
_BEYOND_MIN = 5


def mean_interval(samples: Floats, confidence: float) -> Estimate:
    """Return the mean of samples, in the order of measurement, with its confidence interval."""
    if not samples.size:
        return Estimate.exact(0.0)
    mean = float(samples.mean())
    half = _half_width(samples, confidence)
    return Estimate.exact(mean) if half is None else Estimate(mean, max(0.0, mean - half), mean + half, confidence)


def percentile_interval(samples: Floats, percentile: float, confidence: float) -> Estimate:
    """Return a percentile of samples, in the order of measurement, with its confidence interval.

    The interval is that of the share of samples up to the percentile, mapped to the values at its ends.
    """
    if not samples.size:
        return Estimate.exact(0.0)
    ordered = np.sort(samples)
    value = _at(ordered, percentile / 100)
    beyond = samples.size * min(percentile, 100 - percentile) / 100
    half = _half_width((samples <= value).astype(np.float64), confidence)
    if half is None or beyond < _BEYOND_MIN:
        return Estimate.exact(value)
    low, high = percentile / 100 - half, percentile / 100 + half
    if low <= 0 or high >= 1:
        # Too few samples lie beyond the percentile to bound it.
        return Estimate(value, _at(ordered, max(low, 0.0)), float(ordered[-1]), 0.0)
    return Estimate(value, _at(ordered, low), _at(ordered, high), confidence)


def rate_interval(times_ns: NDArray[np.int64], begin_ns: int, end_ns: int, confidence: float) -> Estimate:
    """Return the events per second, with the confidence interval."""
    if end_ns <= begin_ns:
        return Estimate.exact(0.0)
    seconds = (end_ns - begin_ns) / 1e9
    rate = times_ns.size / seconds
    # As many slices of several events each as possible; correlated counts are grouped again.
    slices = min(512, times_ns.size // 4)
    if slices < BATCHES_MIN:
        return Estimate.exact(rate)
    counts = np.histogram(times_ns, bins=slices, range=(begin_ns, end_ns))[0].astype(np.float64)
    half = _half_width(counts, confidence)
    if half is None:
        return Estimate.exact(rate)
    half *= slices / seconds
    return Estimate(rate, max(0.0, rate - half), rate + half, confidence)


def warmup(samples: Floats) -> int:
    """Return how many samples at the start belong to a warm-up, at most half of them.

    Leaving them out minimises the standard error of the mean of the rest.
    """
    groups = samples.size // _WARMUP_GROUP
    if groups < 2 * BATCHES_MIN:
        return 0
    means = samples[: groups * _WARMUP_GROUP].reshape(groups, _WARMUP_GROUP).mean(axis=1)
    backwards = means[::-1]
    counts = np.arange(1, groups + 1)
    sums, squares = np.cumsum(backwards), np.cumsum(np.square(backwards))
    errors = ((squares - np.square(sums) / counts) / np.square(counts))[::-1]
    return int(np.argmin(errors[: groups // 2])) * _WARMUP_GROUP


def _half_width(samples: Floats, confidence: float) -> float | None:
    batches = _independent_batches(samples)
    if batches is None:
        return None
    count = batches.size
    left = min(max(_correlation(batches), 0.0), _CORRELATION_COUNTED_MAX)
    inflation = (1 + left) / (1 - left)
    error = float(np.sqrt(batches.var(ddof=1) / count * inflation))
    return student(confidence, count - 1) * error


def _independent_batches(samples: Floats) -> Floats | None:
    """Return means of equal batches: as many as are almost uncorrelated, at least `BATCHES_MIN`."""
    count = min(_BATCHES_MAX, samples.size // 2)
    if count < BATCHES_MIN:
        return None
    while True:
        size = samples.size // count
        batches: Floats = samples[samples.size - size * count :].reshape(count, size).mean(axis=1)
        if count // 2 < BATCHES_MIN or _correlation(batches) <= _CORRELATION_MAX:
            return batches
        count //= 2


def _correlation(values: Floats) -> float:
    """Return the correlation of each value with the next one."""
    apart = values - values.mean()
    spread = float(np.square(apart).sum())
    return float((apart[1:] * apart[:-1]).sum()) / spread if spread else 0.0


def _at(ordered: Floats, share: float) -> float:
    return float(ordered[int(min(max(share, 0.0), 1.0) * (ordered.size - 1) + 0.5)])


CHECK_NS = 250_000_000
"""Longest time between the first analyses."""

_LOOKS = 2
_LOOKS_MIN = 4
_GROWTH = 0.1
_REQUESTS_MIN = 40


@dataclass(frozen=True, slots=True)
class Look:
    """The estimates at one moment.

    Attributes:
        throughput: Requests a second.
        latency: Stabilising latency in nanoseconds.
    """

    begin_ns: int
    end_ns: int
    throughput: Estimate
    latency: Estimate

    def is_tight(self, precision: float) -> bool:
        """Whether the half-width of both intervals is at most this share of the value."""
        return max(self.throughput.relative_half_width, self.latency.relative_half_width) <= precision


def look(rows: Rows, begin_ns: int, end_ns: int, plan: MeasurePlan) -> Look:
    """Return the estimates from the requests of a level."""
    good = successes(rows)
    good = good[(good[:, DONE] >= begin_ns) & (good[:, DONE] < end_ns)]
    skipped = warmup(response_times(good).astype(np.float64))
    if skipped:
        begin_ns = int(good[skipped - 1, DONE])
        good = good[skipped:]
    return Look(
        begin_ns,
        end_ns,
        rate_interval(good[:, DONE], begin_ns, end_ns, plan.confidence),
        latency_interval(good, plan),
    )


def latency_interval(good: Rows, plan: MeasurePlan) -> Estimate:
    """Return the stabilising latency, with its interval, of successful requests in order of completion."""
    times = response_times(good).astype(np.float64)
    if plan.percentile is None:
        return mean_interval(times, plan.confidence)
    return percentile_interval(times, plan.percentile, plan.confidence)


class AdaptiveStop:
    """Decides when a level is settled."""

    def __init__(self, plan: MeasurePlan, begin_ns: int) -> None:
        self._plan = plan
        self._begin_ns = begin_ns
        self._end_ns = begin_ns + int(plan.time_max_s * 1e9)
        self._tight = 0

    def settled(self, seen: Look, request_count: int) -> bool:
        """Process the next estimates and return whether the level is settled."""
        long_enough = seen.end_ns - self._begin_ns >= self._plan.time_min_s * 1e9 and request_count >= _REQUESTS_MIN
        self._tight = self._tight + 1 if long_enough and seen.is_tight(self._plan.precision) else 0
        return self._tight >= _LOOKS

    def next_ns(self, at_ns: int) -> int:
        """Return the time of the analysis after one at this moment; the time between analyses grows."""
        step_ns = max(1, min(CHECK_NS, (self._end_ns - self._begin_ns) // _LOOKS_MIN))
        return min(at_ns + max(step_ns, int((at_ns - self._begin_ns) * _GROWTH)), self._end_ns)

    def out_of_time(self, now_ns: int) -> bool:
        return now_ns >= self._end_ns
