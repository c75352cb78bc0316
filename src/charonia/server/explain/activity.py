"""The recent activity of a model version: snapshots of its counters, one a second, and their differences. Pure.

The counters exist for statistics and metrics anyway, and a second without a request costs a comparison of three
numbers.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from charonia.server.metrics.model_metrics import FailureReason, ModelMetrics
from charonia.server.rate_limiter.limiter import NO_SHORTAGE, Shortage
from charonia.server.scheduling.api import CloseReason

T = TypeVar("T")

MARKS_MAX = 61
"""Snapshots that are kept: a minute, including both ends."""

REQUESTS_MIN = 20
"""Fewer requests do not allow conclusions on shares and distributions."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters of a model version since it was loaded; times in nanoseconds.

    Attributes:
        moving_ns: Time to move their inputs and outputs to and from the model, including the instance's own queue.
        waits: Answered requests by their waiting time: a count for each of the queue histogram's buckets.
    """

    success: int = 0
    hits: int = 0
    failed: dict[FailureReason, int] = field(default_factory=dict)
    inferences: int = 0
    batches: dict[int, int] = field(default_factory=dict)
    closes: dict[CloseReason, int] = field(default_factory=dict)
    request_ns: int = 0
    queue_ns: int = 0
    infer_ns: int = 0
    moving_ns: int = 0
    waits: tuple[int, ...] = ()

    @property
    def ended(self) -> int:
        return self.success + sum(self.failed.values())


@dataclass(frozen=True, slots=True)
class Mark:
    """A snapshot.

    Attributes:
        idle_cores: Idle cores of the server since the previous mark, on average.
        taken_cores: Cores that other programs and the hypervisor took since then.
    """

    at_ns: int
    counts: Counts
    queued: int
    idle_cores: float
    shortage: Shortage = NO_SHORTAGE
    taken_cores: float = 0.0


@dataclass(frozen=True, slots=True)
class Activity:
    """What happened between two marks.

    Attributes:
        active_seconds: Part of this time with work. A second in which work began or ended counts in part: its number
            of ended requests relative to that of the neighbouring second.
        wait_bounds_ns: Upper bounds of the buckets of `counts.waits`.
        idle_cores: Idle cores in the active seconds, on average.
        short: Share of the active seconds in which an instance waited for resources of the rate limiter.
        resources: These resources, the most often missing first; all that instances need where none was missing.
        taken_cores: Cores that other programs and the hypervisor took in the active seconds, on average.
    """

    seconds: float = 0.0
    active_seconds: float = 0.0
    counts: Counts = field(default_factory=Counts)
    wait_bounds_ns: tuple[int, ...] = ()
    queued: tuple[int, ...] = ()
    idle_cores: float = 0.0
    short: float = 0.0
    resources: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()
    taken_cores: float = 0.0

    @property
    def batch_count(self) -> int:
        return sum(self.counts.batches.values())

    @property
    def mean_batch(self) -> float:
        """Mean elements of a batch, 0 where none ran."""
        elements = sum(size * count for size, count in self.counts.batches.items())
        return elements / self.batch_count if self.batch_count else 0.0

    def occupancy(self, instances: int) -> float:
        """Return the mean number of batches at each of `instances` in the active seconds.

        Above 1, some waited in the instance's own queue.
        """
        spent_ns = self.counts.infer_ns + self.counts.moving_ns
        available_ns = self.active_seconds * 1e9 * instances
        return spent_ns / available_ns if available_ns else 0.0

    def closed(self, reason: CloseReason) -> float:
        """Return the share of batches that were sent for a reason."""
        total = sum(self.counts.closes.values())
        return self.counts.closes.get(reason, 0) / total if total else 0.0

    def wait_ns(self, share: float) -> float | None:
        """Return an estimate of this quantile of the waiting times of answered requests, None for too few of them.

        At least one request must lie beyond the quantile, and `REQUESTS_MIN` must have ended. Times are taken to be
        spread evenly within a bucket; in the last bucket, which has no bound, to lie at its lower end. The sum of all
        waiting times, which is exact, limits the estimate.
        """
        total = sum(self.counts.waits)
        if total < REQUESTS_MIN or round(total * (1 - share), 6) < 1:
            return None
        wanted, low = share * total, 0
        most = self.counts.queue_ns / (total - math.ceil(round(wanted, 6)) + 1)  # number that waited as long, or longer
        for bound, count in zip(self.wait_bounds_ns, self.counts.waits, strict=False):
            if count and wanted <= count:
                return min(most, low + (bound - low) * wanted / count)
            wanted, low = wanted - count, bound
        return min(most, float(low))


class History:
    """The latest marks of a model version."""

    def __init__(self) -> None:
        self._marks: deque[Mark] = deque(maxlen=MARKS_MAX)
        self._seen: tuple[int, int, int] | None = None
        self._wait_bounds_ns: tuple[int, ...] = ()

    def mark(
        self,
        metrics: ModelMetrics,
        at_ns: int,
        queued: int,
        idle_cores: float,
        shortage: Shortage = NO_SHORTAGE,
        taken_cores: float = 0.0,
    ) -> None:
        """Take a snapshot.

        Args:
            taken_cores: Cores that other programs and the hypervisor took since the previous mark, on average.
        """
        statistics = metrics.statistics
        seen = statistics.success.count, statistics.fail.count, statistics.execution_count
        counts = self._marks[-1].counts if seen == self._seen else counts_of(metrics)
        self._seen = seen
        self._wait_bounds_ns = metrics.queue_ns.bounds
        self._marks.append(Mark(at_ns, counts, queued, idle_cores, shortage, taken_cores))

    def activity(self) -> Activity:
        """Return what happened since the oldest mark."""
        if len(self._marks) < 2:
            return Activity(queued=tuple(mark.queued for mark in self._marks))
        marks = list(self._marks)
        pairs = list(pairwise(marks))
        is_active = [b.counts is not a.counts or bool(a.queued or b.queued) for a, b in pairs]
        active = [pair for pair, had_work in zip(pairs, is_active, strict=True) if had_work] or pairs
        active_ns = _active_ns(pairs, is_active)
        shortages = [mark.shortage for _, mark in active]
        short_ns = marks[-1].shortage.short_ns - marks[0].shortage.short_ns
        return Activity(
            (marks[-1].at_ns - marks[0].at_ns) / 1e9,
            active_ns / 1e9,
            _difference(marks[0].counts, marks[-1].counts),
            self._wait_bounds_ns,
            tuple(mark.queued for mark in marks[1:]),
            sum(mark.idle_cores for _, mark in active) / len(active),
            min(1.0, short_ns / active_ns) if active_ns else 0.0,
            _by_frequency(name for shortage in shortages for name in shortage.resources) or shortages[-1].needs,
            _by_frequency(name for shortage in shortages for name in shortage.holders),
            sum(mark.taken_cores for _, mark in active) / len(active),
        )


def _active_ns(pairs: Sequence[tuple[Mark, Mark]], is_active: Sequence[bool]) -> float:
    """Return the time with work, given pairs of neighbouring marks and whether there was work between them."""
    ended = [after.counts.ended - before.counts.ended for before, after in pairs]
    padded = [False, *is_active, False]
    total = 0.0
    for place, (before, after) in enumerate(pairs):
        if not is_active[place]:
            continue
        earlier, later = padded[place], padded[place + 2]
        part = 1.0
        if earlier != later and not (before.queued and after.queued):
            beside = ended[place - 1] if earlier else ended[place + 1]
            part = min(1.0, ended[place] / beside) if beside else 1.0
        total += part * (after.at_ns - before.at_ns)
    return total


def _by_frequency(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name, _ in Counter(names).most_common())


def counts_of(metrics: ModelMetrics) -> Counts:
    """Return the current counters of a model version."""
    statistics = metrics.statistics
    of_batches = list(statistics.batches.items())
    moved = [batch.compute_input.ns + batch.compute_output.ns for _, batch in of_batches]
    return Counts(
        success=statistics.success.count,
        hits=statistics.cache_hit.count,
        failed=dict(metrics.failures),
        inferences=statistics.inference_count,
        batches={size: batch.compute_infer.count for size, batch in of_batches},
        closes=dict(metrics.closes),
        request_ns=statistics.success.ns,
        queue_ns=statistics.queue.ns,
        infer_ns=sum(batch.compute_infer.ns for _, batch in of_batches),
        moving_ns=sum(moved),
        waits=tuple(metrics.queue_ns.counts),
    )


def _difference(before: Counts, after: Counts) -> Counts:
    waits = before.waits or (0,) * len(after.waits)
    numbers = {
        name: getattr(after, name) - getattr(before, name)
        for name in ("success", "hits", "inferences", "request_ns", "queue_ns", "infer_ns", "moving_ns")
    }
    return Counts(
        **numbers,
        failed=_more(before.failed, after.failed),
        batches=_more(before.batches, after.batches),
        closes=_more(before.closes, after.closes),
        waits=tuple(later - earlier for earlier, later in zip(waits, after.waits, strict=True)),
    )


def _more(before: dict[T, int], after: dict[T, int]) -> dict[T, int]:
    return {key: more for key, count in after.items() if (more := count - before.get(key, 0))}
