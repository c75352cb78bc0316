"""Measuring until it is precise enough: `--measurement-mode adaptive`. Pure.

The requests so far are analysed every quarter of a second, or more often in a shorter measurement. The warm-up at the
start is left out. The level is settled when the confidence intervals of throughput and of the stabilising latency are
both tight, twice in a row.
"""

from dataclasses import dataclass

import numpy as np

from charonia.tools.perf import intervals
from charonia.tools.perf.api import MeasurePlan
from charonia.tools.perf.samples import DONE, Rows, response_times, successes
from charonia.tools.results.records import Estimate

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
    skipped = intervals.warmup(response_times(good).astype(np.float64))
    if skipped:
        begin_ns = int(good[skipped - 1, DONE])
        good = good[skipped:]
    return Look(
        begin_ns,
        end_ns,
        intervals.rate_interval(good[:, DONE], begin_ns, end_ns, plan.confidence),
        latency_interval(good, plan),
    )


def latency_interval(good: Rows, plan: MeasurePlan) -> Estimate:
    """Return the stabilising latency, with its interval, of successful requests in order of completion."""
    times = response_times(good).astype(np.float64)
    if plan.percentile is None:
        return intervals.mean_interval(times, plan.confidence)
    return intervals.percentile_interval(times, plan.percentile, plan.confidence)


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
