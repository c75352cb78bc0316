"""The queue of the batcher: priority levels, queue policies, timeouts, fairness between flows, overload. Pure.

Every level has two ranks: one for requests in time, and behind it one for those whose timeout has passed under the
policy "delay". So the order of service is: level 1 in time, level 1 late, level 2 in time, and so on. In a rank, each
flow (`core/request.py`) has a lane: first come, first served.

1. Lanes take turns by self-clocked fair queueing: a lane has a tag, the lane with the smallest tag is served, and a tag
   grows by the batch elements served, divided by the weight. A flow that begins to wait gets the tag that it would have
   if it had just been served. So a flow needs no memory while it does not wait, and with a single flow there is nothing
   to choose; when a second one joins it, both begin alike.
2. When a level is full, the flow that has most waiting requests for its weight loses its last one.
3. Adding an entry and removing any entry cost O(1) with one flow: a lane is a linked hash map. With several, choosing
   the next one costs O(log n).
4. Deadlines are kept in a heap that contains only requests with a timeout. The item of a request that leaves early
   becomes stale: it is skipped when it reaches the top, and swept out when stale items outnumber the entries.
5. At its deadline a request has timed out: it is not served at that very nanosecond.
6. A level without a configured limit or timeout sheds requests under overload (`Overload`). A flow is spared if
   its oldest request has waited for twice the patience of clients that left, or if `MANY` of its requests wait and
   fewer were lost: so a patient client keeps its requests beside impatient ones.

Overload: when clients leave before their requests run, newcomers that would share their fate are refused.

A queue that only grows helps no one: if clients wait for a second and the queue is longer than that, every request that
runs is one whose client is about to leave. Clients rarely state how long they wait, but they show it: they leave. So:

1. Nothing is refused before requests were *lost*: cancelled while they waited, although there was time to run them.
   Patient clients lose nothing, however many requests they send.
2. Time is divided into slices. A slice is bad if a request was lost in it for every `SERVED_PER_LOST` that ran, and
   more were lost than ran after a longer wait. After `BAD_SLICES` more bad slices than good ones, the queue *sheds*.
   So a single client that leaves, even one with a thousand concurrent requests, changes nothing.
3. The patience of clients is the moving average of the times after which requests were lost. The rest of it after
   the time that a batch runs can be spent in the queue.
4. While the queue sheds, a request is refused on arrival if it would wait longer than an eighth of that time, or than
   for the next batch, or than `QUEUED_MIN` others take; in any case if it would wait longer than 5/8 of that time. One
   that has waited for 7/8 of it is dropped when its turn comes.
5. A client that demonstrably waits longer is spared; see `RequestQueue`.
6. Shedding ends when nothing was lost or refused for `QUIET` times the patience.
"""

import sys
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

from charonia.core.request import Flow
from charonia.server.scheduling.api import BatchPolicy, QueueLimits, Submit

NS_PER_US: Final = 1000

STALE_MAX: Final = 64
"""Stale items of a heap that are tolerated beyond the number of waiting requests, or of lanes."""

MANY: Final = 8
"""A flow with this number of waiting requests, and fewer lost ones, has patient clients."""

OTHERS: Final = Flow("others")
"""The flow of the lane that all other flows share."""

FLOWS_MAX: Final = 256
"""Flows of a level with separate lanes."""

PATIENCE_MIN_NS: Final = 20_000_000
"""A request that is cancelled earlier was not lost to overload: its client may have asked elsewhere, too."""

SLICE_MIN_NS: Final = 20_000_000
"""Shortest slice."""

SLICES_PER_PATIENCE: Final = 32
"""Slices in the time that clients wait, where that is longer than their shortest length."""

BAD_SLICES: Final = 8
"""More bad slices than good ones with which shedding begins."""

SERVED_PER_LOST: Final = 64
"""Requests that run in a good slice for each one that is lost, and at least."""

QUEUED_MIN: Final = 16
"""Requests that may wait even if they take longer than an eighth of the patience."""

QUIET: Final = 10
"""Shedding ends after this multiple of the patience without a reason for it."""

RUNS_AVERAGED: Final = 16
"""Runs after which the weight of earlier ones is halved."""


class ServiceRate:
    """How fast a busy model takes requests from its queue.

    Attributes:
        service_ns: How long a batch runs, averaged; 0 before that of one is known.
        run_ns: Time from one batch to the next, averaged; 0 before it is known.
        batch: Requests of a batch while there are enough.
    """

    __slots__ = ("_last_ns", "_runs", "_started_ns", "batch", "run_ns", "service_ns")

    def __init__(self, batch: int) -> None:
        self.service_ns = 0
        self.run_ns = 0.0
        self.batch = float(batch)
        self._runs = 0
        self._started_ns: dict[int, int] = {}  # by slot
        self._last_ns = 0

    def started(self, slot: int, count: int, left: int, now_ns: int) -> None:
        """A batch starts.

        Args:
            count: Its requests.
            left: Requests that still wait; -1 if the batch's requests have not waited: perhaps a slot was idle.
            now_ns: The time.
        """
        if left >= 0 and self._last_ns:
            self._runs = min(self._runs + 1, RUNS_AVERAGED)
            self.run_ns += (now_ns - self._last_ns - self.run_ns) / self._runs
            if left:
                self.batch += (count - self.batch) / self._runs
        self._last_ns = self._started_ns[slot] = now_ns

    def ended(self, slot: int, now_ns: int) -> None:
        """The batch of a slot is done."""
        started_ns = self._started_ns.pop(slot, None)
        if started_ns is not None:
            took_ns = now_ns - started_ns
            self.service_ns += (took_ns - self.service_ns) // (8 if self.service_ns else 1)

    def wait_ns(self, ahead: float, now_ns: int) -> float:
        return (1 + ahead // self.batch) * self.run_ns - (now_ns - self._last_ns)


class Overload:
    """Observations of clients that left the queue of a priority level.

    Attributes:
        patience_ns: How long clients wait, averaged over the ones that left.
        losses: Lost requests by flow.
    """

    __slots__ = (
        "_bad", "_is_shedding", "_late", "_lost", "_reason_ns", "_served", "_slice_ends_ns", "losses",
        "patience_ns",
    )  # fmt: skip

    def __init__(self) -> None:
        self.patience_ns = 0
        self.losses: Counter[Flow] = Counter()
        self._is_shedding = False
        self._bad = 0  # bad slices minus good slices
        self._lost = self._served = self._late = 0  # in this slice
        self._slice_ends_ns = 0
        self._reason_ns = 0  # when a request was lost or refused

    def is_over(self, now_ns: int) -> bool:
        return now_ns - self._reason_ns > QUIET * self.patience_ns

    def sheds(self, service_rate: ServiceRate) -> bool:
        """Return whether to refuse requests that would wait too long."""
        return self._is_shedding and has_time(self.patience_ns, service_rate)

    def lost(self, flow: Flow, waited_ns: int, now_ns: int) -> None:
        """A request was cancelled after this waiting time."""
        self._judge(now_ns)
        if flow in self.losses or len(self.losses) < FLOWS_MAX:
            self.losses[flow] += 1
        self.patience_ns += (waited_ns - self.patience_ns) // (8 if self.patience_ns else 1)
        self._lost += 1
        self._reason_ns = now_ns

    def served(self, waited_ns: int, now_ns: int) -> None:
        """A request starts after this waiting time."""
        self._judge(now_ns)
        self._served += 1
        self._late += 4 * waited_ns > 5 * self.patience_ns

    def refused(self, now_ns: int) -> None:
        """A request was refused or dropped because of overload."""
        self._reason_ns = now_ns

    def is_too_long(self, service_rate: ServiceRate, wait_ns: float, patience_ns: int) -> bool:
        """Return whether to refuse a request with this expected waiting time.

        Args:
            service_rate: The pace of the model.
            wait_ns: The expected wait.
            patience_ns: How long the client of this very request waits at most, 0 if that is unknown.
        """
        spare_ns = min(patience_ns or self.patience_ns, self.patience_ns) - service_rate.service_ns
        needed_ns = max(1.0, QUEUED_MIN / service_rate.batch) * service_rate.run_ns
        return wait_ns > min(spare_ns * 5 / 8, max(spare_ns / 8, needed_ns))

    def should_shed(self, service_rate: ServiceRate, waited_ns: int) -> bool:
        """Return whether to drop a request whose turn has come."""
        return (self.patience_ns - service_rate.service_ns) * 7 / 8 < waited_ns < 2 * self.patience_ns

    def _judge(self, now_ns: int) -> None:
        """Judge the slice if it is over, and begin the next one."""
        lost, served = self._lost, self._served
        if now_ns < self._slice_ends_ns or (not lost and served < SERVED_PER_LOST):
            return
        is_bad = lost * SERVED_PER_LOST > served and lost > self._late
        self._bad = self._bad + 1 if is_bad else max(0, self._bad - 1)
        self._is_shedding = self._is_shedding or self._bad >= BAD_SLICES
        self._lost = self._served = self._late = 0
        self._slice_ends_ns = now_ns + max(SLICE_MIN_NS, self.patience_ns // SLICES_PER_PATIENCE)


def waits_ns(request: Submit, now_ns: int) -> int:
    """Return how long the client of a request waits at most, 0 if that is unknown."""
    left_ns = request.timeout_us * NS_PER_US
    return min(left_ns or sys.maxsize, max(1, request.deadline_ns - now_ns)) if request.deadline_ns else left_ns


def has_time(patience_ns: int, service_rate: ServiceRate) -> bool:
    """Return whether a client with this patience is served if the queue is short, and not only occasionally."""
    return patience_ns >= PATIENCE_MIN_NS and 2 * patience_ns >= 3 * service_rate.service_ns


class Lane:
    """The waiting requests of a flow.

    Attributes:
        requests: The requests, by id, in order of arrival.
        tag: When it is served, in units of work of the rank.
        number: Distinguishes lanes with equal tags.
    """

    __slots__ = ("flow", "number", "rank", "requests", "tag")

    def __init__(self, flow: Flow, rank: "Rank", number: int, tag: float) -> None:
        self.flow = flow
        self.rank = rank
        self.number = number
        self.tag = tag
        self.requests: OrderedDict[int, QueuedRequest] = OrderedDict()


class QueuedRequest:
    """One waiting request.

    Attributes:
        id: The request's id.
        batch_size: Its batch elements.
        shape_key: Equal for requests that may share a batch.
        level: Its priority level.
        arrived_ns: When it was submitted.
        lane: The lane in which it waits.
    """

    __slots__ = ("arrived_ns", "batch_size", "id", "lane", "level", "shape_key")

    def __init__(self, request: Submit, level: int, arrived_ns: int, lane: Lane) -> None:
        self.id = request.id
        self.batch_size = request.batch_size
        self.shape_key = request.shape_key
        self.level = level
        self.arrived_ns = arrived_ns
        self.lane = lane


class Rank:
    """The lanes of a rank, which is never empty.

    Attributes:
        number: Its number; lower ones are served first.
        lanes: The lanes by flow, none of them empty.
        count: Number of requests.
    """

    __slots__ = ("_heap", "_numbered", "_tag", "_weight", "count", "lanes", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.lanes: dict[Flow, Lane] = {}
        self.count = 0
        self._heap: list[tuple[float, int, Lane]] = []  # of several lanes; items of lanes that have moved are stale
        self._numbered = 0
        self._tag = 0.0  # of the request that was served last
        self._weight = 0  # of all lanes

    def __iter__(self) -> Iterator[QueuedRequest]:
        """Iterate in order of service."""
        if len(self.lanes) == 1:
            (lane,) = self.lanes.values()
            yield from lane.requests.values()
            return
        heap = [(lane.tag, lane.number, lane.flow.weight, iter(lane.requests.values())) for lane in self.lanes.values()]
        heapify(heap)
        while heap:
            tag, number, weight, rest = heap[0]
            entry = next(rest, None)
            if entry is None:
                heappop(heap)
            else:
                yield entry
                heapreplace(heap, (tag + entry.batch_size / weight, number, weight, rest))

    def first(self) -> QueuedRequest:
        """Return the entry that is served next, of several lanes."""
        heap = self._heap
        while not _is_current(heap[0]):
            heappop(heap)
        return next(iter(heap[0][2].requests.values()))

    def lane(self, flow: Flow, batch_size: int) -> Lane:
        """Return the lane of a flow, for a request of this size that is added next."""
        lane = self.lanes.get(flow)
        if lane is not None:
            return lane
        if len(self.lanes) >= FLOWS_MAX and flow != OTHERS:
            return self.lane(OTHERS, batch_size)
        self._numbered += 1
        lane = self.lanes[flow] = Lane(flow, self, self._numbered, self._tag + batch_size / flow.weight)
        self._weight += flow.weight
        if len(self.lanes) == 2:
            other = next(iter(self.lanes.values()))
            other.tag = self._tag + next(iter(other.requests.values())).batch_size / other.flow.weight
            self._heap = [(each.tag, each.number, each) for each in self.lanes.values()]
            heapify(self._heap)
        elif len(self.lanes) > 2:
            self._push(lane)
        return lane

    def charge(self, entry: QueuedRequest) -> None:
        """An entry, which is still there, runs: the turn of its flow, one of several, is over."""
        lane = entry.lane
        self._tag = lane.tag
        lane.tag += entry.batch_size / lane.flow.weight
        self._push(lane)

    def close(self, lane: Lane) -> None:
        """Remove a lane that has become empty."""
        del self.lanes[lane.flow]
        self._weight -= lane.flow.weight

    def turns(self, flow: Flow) -> float:
        """Return how many requests are served before the next one that arrives of a flow, by its share alone."""
        lane = self.lanes.get(flow)
        own = len(lane.requests) if lane is not None else 0
        others = self._weight - flow.weight if own else self._weight
        return own + (own + 1) * others / flow.weight

    def check_invariants(self) -> None:
        assert self.lanes
        assert self.count == sum(len(lane.requests) for lane in self.lanes.values())
        for flow, lane in self.lanes.items():
            assert lane.requests, f"the lane of {flow} is empty"
            assert lane.flow == flow
            assert all(each.lane is lane for each in lane.requests.values())
            assert len(self.lanes) == 1 or (lane.tag, lane.number, lane) in self._heap
        assert self._weight == sum(flow.weight for flow in self.lanes)

    def _push(self, lane: Lane) -> None:
        if len(self._heap) > 2 * len(self.lanes) + STALE_MAX:
            self._heap = [item for item in self._heap if _is_current(item)]
            heapify(self._heap)
        heappush(self._heap, (lane.tag, lane.number, lane))


class RequestQueue:
    """The waiting requests, in order of service.

    Attributes:
        entries: The waiting requests, by id.
        limit_min: No level is full unless more requests than this wait.
        deadlines: Heap of (deadline, id), some of them stale. While it is empty, as for most models, there is
            nothing to `expire` and no `next_deadline_ns`.
        overloads: Observations of clients that left, by level. While it is empty, there is nothing to shed.
        service_rate: The pace of the model, measured while there are `overloads`.
    """

    __slots__ = (
        "_batch_max", "_level_limits", "_limits", "_order", "_ranks",
        "deadlines", "entries", "limit_min", "overloads", "service_rate",
    )  # fmt: skip

    def __init__(
        self, limits: QueueLimits, level_limits: Mapping[int, QueueLimits] | None = None, batch_max: int = 1
    ) -> None:
        self._limits = limits
        self._level_limits = level_limits or {}
        sizes = [each.size_max for each in (limits, *self._level_limits.values()) if each.size_max]
        self.limit_min = min(sizes, default=sys.maxsize)
        self.entries: dict[int, QueuedRequest] = {}
        self._ranks: dict[int, Rank] = {}
        self._order: list[int] = []  # the numbers of the ranks, ascending
        self.deadlines: list[tuple[int, int]] = []
        self.overloads: dict[int, Overload] = {}
        self.service_rate = ServiceRate(batch_max)
        self._batch_max = batch_max

    def __iter__(self) -> Iterator[QueuedRequest]:
        """Iterate in order of service; the queue must not change during the iteration."""
        for number in self._order:
            yield from self._ranks[number]

    def first(self) -> QueuedRequest:
        """Return the entry that is served next; the queue must not be empty."""
        rank = self._ranks[self._order[0]]
        if len(rank.lanes) > 1:
            return rank.first()
        (lane,) = rank.lanes.values()
        return next(iter(lane.requests.values()))

    def add(self, request: Submit, level: int, now_ns: int) -> tuple[QueuedRequest, bool]:
        """Add a request, even if the queue is full.

        Returns:
            Its entry, and whether it is known to be the last in order of service.
        """
        rank = self._ranks.get(2 * level) or self._open(2 * level)
        lane = rank.lanes.get(request.flow) or rank.lane(request.flow, request.batch_size)
        entry = self.entries[request.id] = lane.requests[request.id] = QueuedRequest(request, level, now_ns, lane)
        rank.count += 1
        timeout_ns = _timeout_ns(self._level_limits.get(level, self._limits), request.timeout_us)
        if timeout_ns:
            self._sweep()
            heappush(self.deadlines, (now_ns + timeout_ns, entry.id))
        return entry, rank.number == self._order[-1] and len(rank.lanes) == 1

    def remove(self, id: int) -> bool:
        """Remove a request at any position; return whether it was waiting."""
        entry = self.entries.pop(id, None)
        if entry is None:
            return False
        self._take_out(entry)
        return True

    def serve(self, id: int, now_ns: int) -> None:
        """Remove a request that runs; it must be the next in order of service."""
        entry = self.entries.pop(id)
        rank = entry.lane.rank
        if len(rank.lanes) > 1:
            rank.charge(entry)
        self._take_out(entry)
        if self.overloads and (overload := self.overloads.get(entry.level)) is not None:
            overload.served(now_ns - entry.arrived_ns, now_ns)

    def remove_abandoned(self, id: int, now_ns: int) -> bool:
        """Remove a request whose client has left; return whether it was waiting."""
        entry = self.entries.get(id)
        if entry is None:
            return False
        waited_ns = now_ns - entry.arrived_ns
        if not self.overloads:
            self.service_rate = ServiceRate(self._batch_max)
        if has_time(waited_ns, self.service_rate) and self._limits_of(entry.level).adapts:
            overload = self.overloads.get(entry.level)
            if overload is None or overload.is_over(now_ns):
                overload = self.overloads[entry.level] = Overload()
            overload.lost(entry.lane.flow, waited_ns, now_ns)
        return self.remove(id)

    def refuses(self, request: Submit, level: int, now_ns: int) -> bool:
        """Return whether to refuse a request that finds no idle slot, because of overload."""
        overload = self._shedding(level, now_ns)
        if overload is None:
            return False
        rank, ahead = self._ranks.get(2 * level), 0.0
        if rank is not None:
            lane = rank.lanes.get(request.flow)
            if lane is not None and _is_exempt(lane, overload, now_ns):
                return False
            ahead = min(rank.count, rank.turns(request.flow))
        ahead += sum(self._ranks[number].count for number in self._order if number < 2 * level)
        if not overload.is_too_long(
            self.service_rate, self.service_rate.wait_ns(ahead, now_ns), waits_ns(request, now_ns)
        ):
            return False
        overload.refused(now_ns)
        return True

    def next_to_shed(self, now_ns: int) -> int | None:
        """Return the next request in order of service if overload requires to drop it."""
        entry = self.first()
        overload = self._shedding(entry.level, now_ns)
        if overload is None or not overload.should_shed(self.service_rate, now_ns - entry.arrived_ns):
            return None
        if _is_exempt(entry.lane, overload, now_ns):
            return None
        overload.refused(now_ns)
        return entry.id

    def over_limit(self, id: int) -> int | None:
        """Return the request to drop if this one waits in a level that is full without it, None if it does not."""
        entry = self.entries.get(id)
        if entry is None:
            return None
        size_max = self._limits_of(entry.level).size_max
        ranks = [rank for number in (2 * entry.level, 2 * entry.level + 1) if (rank := self._ranks.get(number))]
        if not size_max or sum(rank.count for rank in ranks) <= size_max:
            return None
        lanes = [lane for rank in ranks for lane in rank.lanes.values()]
        if len(lanes) == 1:
            return id
        lengths: Counter[Flow] = Counter()
        for lane in lanes:
            lengths[lane.flow] += len(lane.requests)
        longest = max(lengths, key=lambda flow: lengths[flow] / flow.weight)
        own = entry.lane.flow
        if lengths[longest] / longest.weight <= lengths[own] / own.weight:
            return id
        return next(reversed(next(lane for lane in reversed(lanes) if lane.flow == longest).requests))

    def expire(self, now_ns: int) -> tuple[int, ...] | None:
        """Apply the queue policy to the requests whose deadline has passed.

        Returns:
            The ids that were removed, to be dropped; empty if requests only moved back. None if no deadline has passed.
        """
        if not self.deadlines or self.deadlines[0][0] > now_ns:
            return None
        dropped = []
        while self.deadlines and self.deadlines[0][0] <= now_ns:
            entry = self.entries.get(heappop(self.deadlines)[1])
            if entry is None:
                continue
            if self._limits_of(entry.level).delay_expired:
                self._move_behind(entry)
            else:
                self.remove(entry.id)
                dropped.append(entry.id)
        return tuple(dropped)

    def next_deadline_ns(self) -> int | None:
        """Return the earliest deadline of a waiting request, or None."""
        deadlines = self.deadlines
        while deadlines and deadlines[0][1] not in self.entries:
            heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def check_invariants(self) -> None:
        """Raise an AssertionError where a request is in no lane or in several, or the ranks are out of order."""
        for entry in self.entries.values():
            assert entry.lane.requests.get(entry.id) is entry, f"request {entry.id} is not in its lane"
        assert sum(rank.count for rank in self._ranks.values()) == len(self.entries)
        assert self._order == sorted(self._ranks)
        for rank in self._ranks.values():
            rank.check_invariants()

    def _limits_of(self, level: int) -> QueueLimits:
        return self._level_limits.get(level, self._limits)

    def _open(self, number: int) -> Rank:
        rank = self._ranks.get(number)
        if rank is None:
            rank = self._ranks[number] = Rank(number)
            insort(self._order, number)
        return rank

    def _take_out(self, entry: QueuedRequest) -> None:
        lane = entry.lane
        rank = lane.rank
        del lane.requests[entry.id]
        rank.count -= 1
        if not lane.requests:
            rank.close(lane)
            if not rank.count:
                del self._ranks[rank.number]
                self._order.remove(rank.number)

    def _move_behind(self, entry: QueuedRequest) -> None:
        flow = entry.lane.flow
        self._take_out(entry)
        rank = self._open(2 * entry.level + 1)
        entry.lane = rank.lane(flow, entry.batch_size)
        entry.lane.requests[entry.id] = entry
        rank.count += 1

    def _shedding(self, level: int, now_ns: int) -> Overload | None:
        overload = self.overloads.get(level)
        if overload is not None and overload.is_over(now_ns):
            del self.overloads[level]
            return None
        return overload if overload is not None and overload.sheds(self.service_rate) else None

    def _sweep(self) -> None:
        if len(self.deadlines) > 2 * len(self.entries) + STALE_MAX:
            self.deadlines = [item for item in self.deadlines if item[1] in self.entries]
            heapify(self.deadlines)


def _is_current(item: tuple[float, int, Lane]) -> bool:
    tag, _, lane = item
    return bool(lane.requests) and lane.tag == tag


def _is_exempt(lane: Lane, overload: Overload, now_ns: int) -> bool:
    """Return whether the clients of a flow wait longer than clients that left."""
    if len(lane.requests) >= MANY and overload.losses[lane.flow] < MANY:
        return True
    return now_ns - next(iter(lane.requests.values())).arrived_ns >= 2 * overload.patience_ns


def queue_timeout_ns(policy: BatchPolicy, priority: int, asked_us: int) -> int:
    """Return how long a request may wait before it is dropped, in ns; 0 for no limit.

    Args:
        priority: Requested priority level, 0 for the default.
        asked_us: Requested timeout, 0 for none.
    """
    level = priority if 0 < priority <= policy.priority_levels else policy.default_level
    limits = dict(policy.level_limits).get(level, policy.limits)
    return 0 if limits.delay_expired else _timeout_ns(limits, asked_us)


def _timeout_ns(limits: QueueLimits, asked_us: int) -> int:
    if not (asked_us and limits.timeout_override):
        return limits.timeout_ns
    asked_ns = asked_us * NS_PER_US
    return min(asked_ns, limits.timeout_ns) if limits.timeout_ns else asked_ns
