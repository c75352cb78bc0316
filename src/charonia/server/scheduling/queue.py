"""The queue that all schedulers share: priority levels, queue policies, timeouts, removal at any position. Pure.

Requests wait in lanes. Every level has two: one for requests in time, and behind it one for those whose timeout has
passed under the policy "delay". Lanes are served by rank, so the order of service is: level 1 in time, level 1 late,
level 2 in time, and so on; first come, first served within a lane.

1. Adding an entry and removing any entry cost O(1): a lane is a linked hash map.
2. Deadlines are kept in a heap that contains only requests with a timeout. The item of a request that leaves early
   becomes stale: it is skipped when it reaches the top, and swept out when stale items outnumber the entries.
3. At its deadline a request has timed out: it is not served at that very nanosecond.
"""

import sys
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush

from charonia.server.scheduling.api import BatchPolicy, QueueLimits, Submit

NS_PER_US = 1000

STALE_DEADLINES_MAX = 64
"""Stale heap items tolerated beyond the number of waiting requests."""

Lane = OrderedDict[int, "QueuedRequest"]


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


class RequestQueue:
    """The waiting requests, in order of service.

    Attributes:
        entries: The waiting requests, by id.
        limit_min: No level is full unless more requests than this wait.
        deadlines: Heap of (deadline, id), some of them stale. While it is empty, as it is for most models, there is
            nothing to `expire` and no `next_deadline_ns`.
    """

    __slots__ = ("_lanes", "_level_limits", "_limits", "_ranks", "deadlines", "entries", "limit_min")

    def __init__(self, limits: QueueLimits, level_limits: Mapping[int, QueueLimits] | None = None) -> None:
        self._limits = limits
        self._level_limits = level_limits or {}
        sizes = [each.size_max for each in (limits, *self._level_limits.values()) if each.size_max]
        self.limit_min = min(sizes, default=sys.maxsize)
        self.entries: dict[int, QueuedRequest] = {}
        self._lanes: dict[int, Lane] = {}
        self._ranks: list[int] = []  # of the lanes that are not empty, ascending
        self.deadlines: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[QueuedRequest]:
        """Iterate in order of service; the queue must not change meanwhile."""
        for rank in self._ranks:
            yield from self._lanes[rank].values()

    def first(self) -> QueuedRequest:
        """Return the entry that is served next; the queue must not be empty."""
        return next(iter(self._lanes[self._ranks[0]].values()))

    def add(self, request: Submit, level: int, now_ns: int) -> tuple[QueuedRequest, bool]:
        """Add a request, even if the queue is full.

        Returns:
            Its entry, and whether it is the last in order of service.
        """
        rank = 2 * level
        entry = QueuedRequest(request, level, now_ns, self._open_lane(rank))
        entry.lane[entry.id] = self.entries[entry.id] = entry
        timeout_ns = self._timeout_ns(level, request.timeout_us)
        if timeout_ns:
            self._sweep()
            heappush(self.deadlines, (now_ns + timeout_ns, entry.id))
        return entry, rank == self._ranks[-1]

    def remove(self, id: int) -> bool:
        """Remove a request at any position; return whether it was waiting."""
        entry = self.entries.pop(id, None)
        if entry is None:
            return False
        self._leave_lane(entry)
        return True

    def is_over_limit(self, id: int) -> bool:
        """Return whether this request waits in a level that is full without it."""
        entry = self.entries.get(id)
        if entry is None:
            return False
        size_max = self._limits_of(entry.level).size_max
        return bool(size_max) and self._waiting_at(entry.level) > size_max

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
        """Raise an AssertionError where a request is in no lane or in several, or a lane has no rank."""
        for entry in self.entries.values():
            assert entry.lane.get(entry.id) is entry, f"request {entry.id} is not in its lane"
        assert sum(map(len, self._lanes.values())) == len(self.entries)
        assert self._ranks == sorted(rank for rank, lane in self._lanes.items() if lane)

    def _limits_of(self, level: int) -> QueueLimits:
        return self._level_limits.get(level, self._limits)

    def _timeout_ns(self, level: int, asked_us: int) -> int:
        return _timeout_ns(self._limits_of(level), asked_us)

    def _waiting_at(self, level: int) -> int:
        return sum(len(self._lanes.get(rank, ())) for rank in (2 * level, 2 * level + 1))

    def _open_lane(self, rank: int) -> Lane:
        lane = self._lanes.get(rank)
        if lane is None:
            lane = self._lanes[rank] = OrderedDict()
        if not lane:
            insort(self._ranks, rank)
        return lane

    def _leave_lane(self, entry: QueuedRequest) -> None:
        del entry.lane[entry.id]
        if not entry.lane:
            rank = 2 * entry.level
            self._ranks.remove(rank if self._lanes[rank] is entry.lane else rank + 1)

    def _move_behind(self, entry: QueuedRequest) -> None:
        self._leave_lane(entry)
        entry.lane = self._open_lane(2 * entry.level + 1)
        entry.lane[entry.id] = entry

    def _sweep(self) -> None:
        if len(self.deadlines) > 2 * len(self.entries) + STALE_DEADLINES_MAX:
            self.deadlines = [item for item in self.deadlines if item[1] in self.entries]
            heapify(self.deadlines)


def queue_timeout_ns(policy: BatchPolicy, priority: int, asked_us: int) -> int:
    """Return how long a request may wait before it is dropped, in ns; 0 for no limit.

    Args:
        policy: The queue policy.
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
