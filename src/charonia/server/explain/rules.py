"""The recent activity of a model, its bottleneck, and what to change: rules from facts to findings. Pure.

A rule is a function from the facts to a finding, or to None where it does not apply. The rules are in the order of
importance, so the first finding is the strongest limit. A finding explains the counters, and names the field to
change.

The facts are differences of counters, marked once a second. The counters exist for statistics and metrics anyway, and a
second without a request costs a comparison of three numbers.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from charonia.config.parameters import INSTANCES_MAX, InstanceBounds
from charonia.server.lifecycle.front_end_placement import ExecutionPlacement
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
class CounterSnapshot:
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
        self._marks: deque[CounterSnapshot] = deque(maxlen=MARKS_MAX)
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
        self._marks.append(CounterSnapshot(at_ns, counts, queued, idle_cores, shortage, taken_cores))

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


def _active_ns(pairs: Sequence[tuple[CounterSnapshot, CounterSnapshot]], is_active: Sequence[bool]) -> float:
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


BUSY = 0.85
"""Share of busy time from which instances count as the limit."""

AT_EASE = 0.5
"""Share of busy time up to which they do not: more efficient instances would gain nothing."""

MANY = 0.3
"""Share of batches or time that is worth a finding."""

DELAY_US_MAX = 10_000
DELAY_US_MIN = 50
TAKEN = 0.25
"""Cores that other programs take, from which on they come before the cure for too few cores."""

LONG_S = 10.0
"""Seconds of work that are enough to judge how busy instances are, even with few requests."""

_ALONE = 1.5
_NEARLY_BUSY = 0.7
_OFTEN = 0.01


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """How a model version is configured and where it runs.

    Attributes:
        instances: Number of instances, 0 for an ensemble; one a front end where it runs there.
        on_gpu: Whether they are on a GPU.
        threads: Configured threads of each instance, 0 for its share of the cores.
        batch_max: `max_batch_size`.
        batches: Whether there is dynamic batching.
        delay_us: `max_queue_delay_microseconds`.
        preferred: `preferred_batch_size`.
        where: Where its requests run, None for a server of one process.
        bounds: The fewest and the most instances, None where their number is fixed.
        scaling: How their number came about, in words, "" where it is fixed.
    """

    model: str
    version: str
    instances: int = 1
    on_gpu: bool = False
    threads: int = 0
    cores: int = 1
    batch_max: int = 0
    batches: bool = False
    delay_us: int = 0
    preferred: tuple[int, ...] = ()
    steps: tuple[str, ...] = ()
    placement: ExecutionPlacement | None = None
    bounds: InstanceBounds | None = None
    scaling: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a rule.

    Attributes:
        change: What to change, "" for nothing.
    """

    kind: str
    says: str
    change: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """The input of the rules.

    Attributes:
        busiest: The busiest step of an ensemble and its share of busy time, None for any other model.
        shortest: The step that waited most for resources of the rate limiter, and the share of time it did.
    """

    setup: ModelSetup
    activity: Activity
    busiest: tuple[str, float] | None = None
    shortest: tuple[str, float] | None = None

    @property
    def busy(self) -> float:
        return min(1.0, self.activity.occupancy(self.setup.instances))

    @property
    def is_short(self) -> bool:
        """Whether the rate limiter holds requests back."""
        return self.activity.short >= MANY

    @property
    def is_at_limit(self) -> bool:
        """Whether requests wait because no additional batch can run."""
        return self.busy >= BUSY or self.is_short

    @property
    def queue_ns(self) -> float:
        counts = self.activity.counts
        return counts.queue_ns / counts.success if counts.success else 0.0

    @property
    def batch_ns(self) -> float:
        """Mean time that a batch took at an instance, without the wait in its own queue."""
        count = self.activity.batch_count
        spent = self.activity.counts.infer_ns + self.activity.counts.moving_ns
        line = max(1.0, self.activity.occupancy(self.setup.instances))
        return spent / count / line if count else 0.0


Rule = Callable[[Facts], Finding | None]


def explain(facts: Facts) -> tuple[Finding, ...]:
    """Return the findings, the strongest limit first; at least one."""
    if facts.activity.seconds <= 0:
        return (Finding("starting", "Nothing is known yet: the model has been loaded for less than a second."),)
    if not facts.activity.counts.ended:
        return (_idle(facts),)
    if facts.activity.counts.ended < REQUESTS_MIN:
        rules = _TIMED if facts.activity.active_seconds >= LONG_S else _CERTAIN
        return tuple(finding for rule in rules if (finding := rule(facts)) is not None) or (_few(facts),)
    found = tuple(finding for rule in RULES if (finding := rule(facts)) is not None)
    return found if any(finding.kind not in _REMARKS for finding in found) else (_at_ease(facts), *found)


def _idle(facts: Facts) -> Finding:
    waiting = facts.activity.queued[-1] if facts.activity.queued else 0
    if waiting:
        return _short(facts) or Finding(
            "stuck", f"No request ended, and {waiting:,} wait: what runs takes longer than this."
        )
    return Finding("idle", "No request ended in this time: there is nothing to explain.", "send some load")


def _few(facts: Facts) -> Finding:
    ended = facts.activity.counts.ended
    return Finding(
        "few",
        f"{_requests(ended)} ended in this time: what limits the model is known from {REQUESTS_MIN} requests on.",
        "send more load",
    )


def _at_ease(facts: Facts) -> Finding:
    if facts.setup.steps:
        return Finding("at_ease", "Nothing limits this ensemble: none of its steps is busy all the time.")
    text = f"Nothing limits this model: its instances were busy {_percent(facts.busy)} of the time"
    return Finding("at_ease", f"{text}, and a request waited {_time(facts.queue_ns)}. It does what clients ask for.")


def _failed(facts: Facts) -> Finding | None:
    count = facts.activity.counts.failed.get(FailureReason.BACKEND, 0)
    if not count:
        return None
    share = count / facts.activity.counts.ended
    return Finding(
        "failing", f"{_requests(count)} ({_percent(share)}) failed in the model.", "the answers, and the log, say why"
    )


def _rejected(facts: Facts) -> Finding | None:
    count = facts.activity.counts.failed.get(FailureReason.REJECTED, 0)
    if not count:
        return None
    return Finding(
        "refused",
        f"{_requests(count)} ({_percent(count / facts.activity.counts.ended)}) refused: the queue was full or too "
        "long for clients that leave (overload), or a queue timeout has expired.",
        "more capacity (below), or longer queues: max_queue_size and default_timeout_microseconds of the queue policy",
    )


def _short_step(facts: Facts) -> Finding | None:
    if facts.shortest is None or facts.shortest[1] < MANY:
        return None
    name, share = facts.shortest
    return Finding(
        "step",
        f"Step '{name}' limits this ensemble: the rate limiter held its requests back {_percent(share)} of the time.",
        f"charonia explain {name} says for want of what, and who has it",
    )


def _short(facts: Facts) -> Finding | None:
    if not facts.is_short:
        return None
    activity = facts.activity
    names = _listed(activity.resources)
    own = facts.setup.model
    had = _listed([f"model '{each}'" if each != own else "its other instances" for each in activity.holders])
    return Finding(
        "resources",
        f"The rate limiter held requests back {_percent(activity.short)} of the time: instances waited for {names}"
        + (f", which {had} had." if had else "."),
        f"more of {names} with --rate-limit-resource, a smaller count of it in rate_limiter, or another priority there",
    )


def _steps(facts: Facts) -> Finding | None:
    short = _short_step(facts)
    if short is not None:
        return short
    if facts.busiest is None or facts.busiest[1] < BUSY:
        return None
    name, busy = facts.busiest
    return Finding(
        "step",
        f"Step '{name}' limits this ensemble: its instances were busy {_percent(busy)} of the time.",
        f"charonia explain {name} says what to change there",
    )


def _saturated(facts: Facts) -> Finding | None:
    setup, activity = facts.setup, facts.activity
    if facts.busy < BUSY or facts.is_short:
        return None
    which = "The instance was" if setup.instances == 1 else f"All {setup.instances} instances were"
    line = activity.occupancy(setup.instances)
    waits = f"requests waited {_time(facts.queue_ns)} for one"
    if line >= _ALONE:
        waits = f"{line:.1f} batches were at each at a time, of which all but one waited"
    says = f"{which} busy {_percent(facts.busy)} of the time, and {waits}."
    spare = math.floor(activity.idle_cores / max(1, setup.threads))
    if setup.on_gpu:
        return Finding("busy", says, "fill the batches first (below); another instance shares the same GPU")
    if spare < 1:
        says += f" The {setup.cores} cores had {activity.idle_cores:.1f} to spare."
        if activity.taken_cores >= TAKEN:
            says += f" Other programs, or the hypervisor, took {activity.taken_cores:.1f} cores of the machine."
            return Finding("taken", says, "run these elsewhere and look again; then larger batches or more cores")
        return Finding("cores", says, "larger batches (below), a cheaper model, or more cores")
    if setup.placement is not None and setup.placement.front_ends:
        return Finding("busy", says, f"try --front-ends {setup.placement.front_ends + 1}, each with an instance")
    count = setup.instances + min(spare, setup.instances)
    says += f" {activity.idle_cores:.1f} of {setup.cores} cores were idle."
    if setup.bounds is not None:
        is_most = setup.instances >= setup.bounds.most
        return Finding("busy", says, f"{INSTANCES_MAX}: {count} in place of {setup.bounds.most}" if is_most else "")
    return Finding("busy", says, f"try instance_group [ {{ count: {count} }} ] in place of {setup.instances}")


def _unbatched(facts: Facts) -> Finding | None:
    setup = facts.setup
    if setup.batches or setup.batch_max < 2 or not facts.is_at_limit or setup.steps:
        return None
    return Finding(
        "unbatched",
        f"Requests ran one by one, although the model accepts batches of {setup.batch_max}.",
        "add dynamic_batching { }: requests that wait then run together",
    )


def _full(facts: Facts) -> Finding | None:
    share = facts.activity.closed(CloseReason.FULL)
    if not facts.setup.batches or share < AT_EASE or not facts.is_at_limit:
        return None
    return Finding(
        "full",
        f"{_percent(share)} of the batches were full with {facts.setup.batch_max} elements, and more requests waited.",
        f"max_batch_size: {2 * facts.setup.batch_max}, where the model and the latency allow it",
    )


def _preferred(facts: Facts) -> Finding | None:
    share = facts.activity.closed(CloseReason.PREFERRED)
    largest = max(facts.setup.preferred, default=0)
    if share < MANY or not facts.is_at_limit or largest >= facts.setup.batch_max:
        return None
    return Finding(
        "preferred",
        f"{_percent(share)} of the batches were sent at a preferred size, although the model takes "
        f"{facts.setup.batch_max} elements and more requests waited.",
        f"add {facts.setup.batch_max} to preferred_batch_size, or take the field out",
    )


def _queue_empty(facts: Facts) -> Finding | None:
    setup, activity = facts.setup, facts.activity
    share = activity.closed(CloseReason.QUEUE_EMPTY)
    if not setup.batches or share < AT_EASE or activity.mean_batch > AT_EASE * setup.batch_max:
        return None
    if facts.busy <= AT_EASE:
        return None
    says = (
        f"{_percent(share)} of the batches were sent because no other request waited, with "
        f"{activity.mean_batch:.1f} of {setup.batch_max} elements on average."
    )
    delay_us = useful_delay_us(facts)
    if delay_us <= setup.delay_us:
        return Finding("queue_empty", says, "nothing here: larger batches need more requests at the same time")
    return Finding("queue_empty", says, f"max_queue_delay_microseconds: {delay_us} in place of {setup.delay_us}")


def _useless_delay(facts: Facts) -> Finding | None:
    setup, activity = facts.setup, facts.activity
    share = activity.closed(CloseReason.DELAY)
    if share < MANY or facts.busy > AT_EASE or facts.is_short:
        return None
    alone = activity.mean_batch < _ALONE
    says = (
        f"{_percent(share)} of the batches waited the whole delay of {_time(setup.delay_us * 1e3)} and went with "
        f"{activity.mean_batch:.1f} of {setup.batch_max} elements, while instances were busy only "
        f"{_percent(facts.busy)} of the time."
    )
    return Finding("delay", says, f"max_queue_delay_microseconds: {0 if alone else setup.delay_us // 2}")


def _shapes(facts: Facts) -> Finding | None:
    share = facts.activity.closed(CloseReason.SHAPE)
    if share < MANY:
        return None
    return Finding(
        "shapes",
        f"{_percent(share)} of the batches ended because the next request had another shape.",
        "let the model take ragged input (allow_ragged_batch), or pad to a few shapes, in clients or in the server",
    )


def _moving(facts: Facts) -> Finding | None:
    counts, line = facts.activity.counts, max(1.0, facts.activity.occupancy(facts.setup.instances))
    spent = (counts.infer_ns + counts.moving_ns) / line
    moving = max(0.0, spent - counts.infer_ns) / spent if spent else 0.0
    if moving < AT_EASE or facts.busy < AT_EASE:
        return None
    batches = "" if facts.setup.batches else " Dynamic batching would do so once for many requests."
    return Finding(
        "moving",
        f"{_percent(moving)} of an instance's time went into moving tensors to the model and back, not into computing."
        + batches,
        "several inferences in a request, larger batches, or fewer bytes",
    )


def _overcommitted(facts: Facts) -> Finding | None:
    setup = facts.setup
    threads = setup.instances * setup.threads
    if setup.on_gpu or threads <= setup.cores or facts.activity.idle_cores > AT_EASE or facts.busy < AT_EASE:
        return None
    return Finding(
        "threads",
        f"{setup.instances} instances with {setup.threads} threads each want {threads} cores; there are {setup.cores}.",
        f"instances x threads up to {setup.cores}",
    )


def _bursts(facts: Facts) -> Finding | None:
    p99_ns = facts.activity.wait_ns(0.99)
    if (
        p99_ns is None
        or facts.busy > _NEARLY_BUSY
        or facts.is_short
        or p99_ns < max(2 * facts.batch_ns, facts.setup.delay_us * 2e3, 1e6)
    ):
        return None
    return Finding(
        "bursts",
        f"Requests come in bursts: instances were busy {_percent(facts.busy)} of the time, and yet one request in a "
        f"hundred waited {_time(p99_ns)} or longer.",
        "more instances shorten such waits, a larger max_batch_size does so, too; or let clients spread their requests",
    )


def _cached(facts: Facts) -> Finding | None:
    hits = facts.activity.counts.hits
    share = hits / facts.activity.counts.ended
    if share < _OFTEN:
        return None
    return Finding("cache", f"{_percent(share)} of the requests were answered by the response cache.")


RULES: tuple[Rule, ...] = (
    _failed, _rejected, _steps, _short, _saturated, _unbatched, _full, _preferred, _queue_empty,
    _shapes, _moving, _overcommitted, _useless_delay, _bursts, _cached,
)  # fmt: skip
_CERTAIN: tuple[Rule, ...] = (_failed, _rejected, _short_step, _short)
"""Rules that hold from the first request on."""

_TIMED: tuple[Rule, ...] = (_failed, _rejected, _steps, _short, _saturated)
"""Rules that also apply to a few long requests."""

_REMARKS = frozenset({"cache", "failing"})


def useful_delay_us(facts: Facts) -> int:
    """Return the queue delay that fills batches at the rate of the requests, at most half as long as a batch takes."""
    setup, activity = facts.setup, facts.activity
    rate_us = activity.counts.inferences / (activity.active_seconds * 1e6)
    wanted = (setup.batch_max - activity.mean_batch) * setup.instances / rate_us if rate_us else math.inf
    most = min(facts.batch_ns / 2e3, DELAY_US_MAX)
    if most < DELAY_US_MIN:
        return 0
    return _rounded(max(DELAY_US_MIN, min(wanted, most)))


def _rounded(number: float) -> int:
    """Return a number rounded down to one significant digit."""
    unit = 10 ** math.floor(math.log10(number))
    return int(number // unit * unit)


def _listed(names: Sequence[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1]) if len(names) > 1 else names)


def _requests(count: int) -> str:
    return f"{count:,} request{'s' if count > 1 else ''}"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= _OFTEN or not share else "less than 1%"


def _time(ns: float) -> str:
    for unit, name in ((1e9, "s"), (1e6, "ms")):
        if ns >= unit:
            return f"{ns / unit:.3g} {name}"
    return f"{ns / 1e3:.0f} us"
