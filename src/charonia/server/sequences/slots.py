"""Sequences, their slots, and the backlog in which they wait for one; which of them make the next batch. Pure."""

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterable
from heapq import heapify, heappop, heappush

from charonia.core.request import NO_FLOW
from charonia.server.scheduling.api import CloseReason, Submit
from charonia.server.scheduling.queue import Overload, ServiceRate, has_time, waits_ns
from charonia.server.sequences.api import (
    EndReason,
    SequenceEnd,
    SequenceKey,
    SequenceMember,
    SequencePolicy,
    SequencerView,
    SequenceView,
)

STALE_TIMEOUTS_MAX = 64
"""Stale timeouts tolerated beyond twice the number of sequences."""


class QueuedRequest:
    """One request of a sequence.

    Attributes:
        member: Its place in the sequence.
        ready_ns: When it became ready to run; before that, when it arrived.
        is_rescheduled: Whether it has to run again.
    """

    __slots__ = ("id", "is_rescheduled", "member", "ready_ns")

    def __init__(self, id: int, member: SequenceMember, now_ns: int) -> None:
        self.id = id
        self.member = member
        self.ready_ns = now_ns
        self.is_rescheduled = False


class Sequence:
    """A live sequence.

    Attributes:
        key: Its correlation id.
        queue: Its waiting requests, in order.
        running: Its running request, None if there is none.
        instance: The instance with its slot, None while it waits for one.
        row: The slot.
        end: Why it takes no more requests and ends after the last one; None while it takes some.
        predecessor: The sequence of the same key that must end first, None if there is none.
        successor: The sequence of the same key that waits for this one to end.
        state_key: Batch key of its states.
        since_ns: When it last had a request; in the backlog, when it joined that.
        expires_ns: When it is dropped from the backlog, 0 for never.
        executions: Number of executions of its requests.
        is_lost: Whether the instance has lost its state.
    """

    __slots__ = (
        "end",
        "executions",
        "expires_ns",
        "instance",
        "is_lost",
        "key",
        "number",
        "predecessor",
        "queue",
        "row",
        "running",
        "since_ns",
        "state_key",
        "successor",
    )

    def __init__(self, number: int, key: SequenceKey, now_ns: int) -> None:
        self.number = number
        self.key = key
        self.queue: deque[QueuedRequest] = deque()
        self.running: QueuedRequest | None = None
        self.instance: Instance | None = None
        self.row = 0
        self.end: EndReason | None = None
        self.predecessor: Sequence | None = None
        self.successor: Sequence | None = None
        self.state_key: Hashable = None
        self.since_ns = now_ns
        self.expires_ns = 0
        self.executions = 0
        self.is_lost = False

    @property
    def batch_key(self) -> Hashable:
        """Key of its next request and its states; sequences share a batch only if their keys are equal."""
        return (self.queue[0].member.shape_key, self.state_key)

    def view(self, now_ns: int) -> SequenceView:
        """Return it for display."""
        has_work = self.instance is not None and (self.running is not None or bool(self.queue))
        return SequenceView(
            self.key,
            self.row if self.instance is not None else None,
            len(self.queue),
            self.running is not None,
            0 if has_work else max(0, now_ns - self.since_ns),
            self.executions,
        )


class Instance:
    """An instance of the model and its slots.

    Attributes:
        slot: Its number.
        rows: The sequence in each slot, None where a slot is free.
        count: Sequences in slots.
        ready: Sequences whose next request can run, in the order in which they became ready.
        running: Sequences of the running batch, and the request of each.
        is_idle: Whether it can take a batch.
        due_ns: When the next batch is sent at the latest, None if there is none.
    """

    __slots__ = ("count", "due_ns", "is_idle", "ready", "rows", "running", "slot")

    def __init__(self, slot: int, rows: int) -> None:
        self.slot = slot
        self.rows: list[Sequence | None] = [None] * rows
        self.count = 0
        self.ready: dict[Sequence, None] = {}
        self.running: tuple[tuple[Sequence, QueuedRequest], ...] = ()
        self.is_idle = False
        self.due_ns: int | None = None

    def bind(self, sequence: Sequence, row: int | None = None) -> None:
        """Give a sequence this slot, or the lowest free one; it must be free."""
        sequence.row = self.rows.index(None) if row is None else row
        self.rows[sequence.row] = sequence
        self.count += 1
        sequence.instance = self

    def release(self, sequence: Sequence) -> None:
        """Free the slot of a sequence."""
        self.rows[sequence.row] = None
        self.count -= 1
        self.ready.pop(sequence, None)
        sequence.instance = None


class SequenceTable:
    """The live sequences, with a slot or waiting for one.

    Args:
        policy: The scheduler's policy.
        instances: Number of instances.

    Attributes:
        instances: The instances, by number.
        backlog: Sequences that wait for a slot, in order.
        idle: Sequences with a slot and no request, idle longest first.
        foreign: Stand for the sequences of another scheduler, by instance and slot.
    """

    __slots__ = (
        "_by_key",
        "_ended",
        "_ended_counts",
        "_numbers",
        "_overload",
        "_policy",
        "_service_rate",
        "_timeouts",
        "backlog",
        "foreign",
        "idle",
        "instances",
    )  # fmt: skip

    def __init__(self, policy: SequencePolicy, instances: int) -> None:
        self.instances = [Instance(slot, policy.rows) for slot in range(instances)]
        self.backlog: OrderedDict[Sequence, None] = OrderedDict()
        self.idle: OrderedDict[Sequence, None] = OrderedDict()
        self.foreign: dict[tuple[int, int], Sequence] = {}
        self._policy = policy
        self._by_key: dict[SequenceKey, Sequence] = {}  # the latest of each key
        self._numbers = 0
        self._timeouts: list[tuple[int, int, Sequence]] = []  # heap of (time, number, sequence), with stale ones
        self._ended: list[SequenceEnd] = []
        self._ended_counts: Counter[EndReason] = Counter()
        self._overload: Overload | None = None  # observations of clients that left the backlog
        self._service_rate = ServiceRate(1)  # of the backlog, while there is an overload

    @property
    def live(self) -> int:
        waiting = sum(1 for s in self._by_key.values() if s.instance is None)
        return waiting + sum(instance.count for instance in self.instances) - len(self.foreign)

    def get(self, key: SequenceKey) -> Sequence | None:
        """Return the latest sequence of a key, None if there is none."""
        return self._by_key.get(key)

    def begin(self, key: SequenceKey, now_ns: int) -> Sequence:
        """Return a new sequence, in a slot or in the backlog, or behind an earlier one of the same key."""
        before = self._by_key.get(key)
        self._numbers += 1
        sequence = self._by_key[key] = Sequence(self._numbers, key, now_ns)
        sequence.state_key = self._policy.state_key
        if before is None:
            self._enqueue(sequence, now_ns)
            return sequence
        if before.end is None:
            before.end = EndReason.REPLACED
        before.successor, sequence.predecessor = sequence, before
        self.end_if_over(before, now_ns)
        return sequence

    def refuses(self, request: Submit, now_ns: int) -> bool:
        """Return whether to refuse the first request of a sequence because of overload."""
        overload, pace = self._overload, self._service_rate
        if overload is None or min(each.count for each in self.instances) < self._policy.rows:
            return False
        if overload.is_over(now_ns):
            self._overload = None
            return False
        wait_ns = pace.wait_ns(len(self.backlog), now_ns)
        if not (overload.sheds(pace) and overload.is_too_long(pace, wait_ns, waits_ns(request, now_ns))):
            return False
        overload.refused(now_ns)
        return True

    def abandon(self, sequence: Sequence, now_ns: int) -> None:
        """The client of a sequence is leaving; if the sequence waits for a slot, overload is the reason."""
        waited_ns = now_ns - sequence.since_ns
        if not self._policy.adapts or sequence not in self.backlog or not has_time(waited_ns, self._service_rate):
            return
        if self._overload is None or self._overload.is_over(now_ns):
            self._overload, self._service_rate = Overload(), ServiceRate(1)
        self._overload.lost(NO_FLOW, waited_ns, now_ns)

    def make_ready(self, sequence: Sequence, now_ns: int) -> None:
        """The next request of a sequence can run."""
        self.idle.pop(sequence, None)
        sequence.queue[0].ready_ns = now_ns
        if sequence.instance is not None:
            sequence.instance.ready[sequence] = None

    def make_idle(self, sequence: Sequence, now_ns: int) -> None:
        """A sequence with a slot has no request from now on."""
        sequence.since_ns = now_ns
        self.idle[sequence] = None

    def end_if_over(self, sequence: Sequence, now_ns: int) -> None:
        """Remove a sequence without requests; the next one in the backlog gets its slot."""
        if sequence.queue or sequence.running is not None:
            return
        reason = sequence.end or EndReason.STOPPED
        sequence.end = reason
        self._ended.append(SequenceEnd(sequence.number, sequence.key, reason))
        self._ended_counts[reason] += 1
        self.idle.pop(sequence, None)
        self.backlog.pop(sequence, None)
        sequence.expires_ns = 0
        if self._by_key.get(sequence.key) is sequence:
            del self._by_key[sequence.key]
        self._unlink(sequence, now_ns)
        instance = sequence.instance
        if instance is not None:
            instance.release(sequence)
            self._next_in(instance, now_ns)

    def take_row(self, slot: int, row: int, now_ns: int) -> None:
        """A free slot is another scheduler's from now on."""
        stands = self.foreign[slot, row] = Sequence(0, "", now_ns)
        self.instances[slot].bind(stands, row)

    def free_row(self, slot: int, row: int, now_ns: int) -> None:
        """A slot is this scheduler's again."""
        instance = self.instances[slot]
        instance.release(self.foreign.pop((slot, row)))
        self._next_in(instance, now_ns)

    def _next_in(self, instance: Instance, now_ns: int) -> None:
        if self.backlog:
            self._bind(self.backlog.popitem(last=False)[0], instance, now_ns, waited=True)

    def end_idle(self, now_ns: int, *, all_of_them: bool = False) -> None:
        """End the sequences that were idle for too long, or all idle ones."""
        while self.idle:
            first = next(iter(self.idle))
            if not all_of_them:
                if first.since_ns + self._policy.idle_ns > now_ns:
                    return
                first.end = EndReason.IDLE
            self.end_if_over(first, now_ns)

    def set_timeout(self, sequence: Sequence, expires_ns: int) -> None:
        """Set the time at which a sequence is dropped from the backlog, unless it is earlier already."""
        if 0 < sequence.expires_ns <= expires_ns:
            return
        sequence.expires_ns = expires_ns
        if len(self._timeouts) > 2 * len(self._by_key) + STALE_TIMEOUTS_MAX:
            self._timeouts = [item for item in self._timeouts if item[2].expires_ns == item[0]]
            heapify(self._timeouts)
        heappush(self._timeouts, (expires_ns, sequence.number, sequence))

    def take_expired(self, now_ns: int) -> Sequence | None:
        """Return a sequence that has waited in the backlog for too long, None if there is none left."""
        while self._timeouts and self._timeouts[0][0] <= now_ns:
            expires_ns, _, sequence = heappop(self._timeouts)
            if sequence.expires_ns == expires_ns:
                return sequence
        return None

    def wake_at(self) -> int | None:
        times = [each.due_ns for each in self.instances if each.due_ns is not None]
        if self.idle:
            times.append(next(iter(self.idle)).since_ns + self._policy.idle_ns)
        while self._timeouts and self._timeouts[0][2].expires_ns != self._timeouts[0][0]:
            heappop(self._timeouts)
        if self._timeouts:
            times.append(self._timeouts[0][0])
        return min(times, default=None)

    def take_ended(self) -> list[SequenceEnd]:
        ended, self._ended = self._ended, []
        return ended

    def view(self, now_ns: int) -> SequencerView:
        blocked = [s for s in self._by_key.values() if s.predecessor is not None]
        return SequencerView(
            self._policy.rows,
            tuple(tuple(s.view(now_ns) for s in each.rows if s is not None and s.number) for each in self.instances),
            tuple(s.view(now_ns) for s in (*self.backlog, *blocked)),
            tuple(sorted(self._ended_counts.items(), key=lambda item: item[0].value)),
        )

    def check_invariants(self) -> None:
        """Raise an AssertionError where slots, backlog and idle sequences contradict each other."""
        for instance in self.instances:
            bound = [s for s in instance.rows if s is not None]
            assert len(bound) == instance.count
            assert all(s.instance is instance and instance.rows[s.row] is s for s in bound)
            for sequence in bound:
                is_ready = bool(sequence.queue) and sequence.running is None
                assert (sequence in instance.ready) == is_ready, f"sequence {sequence.key!r} is (not) ready"
            assert all(sequence.instance is instance for sequence in instance.ready)
        free = any(instance.count < self._policy.rows for instance in self.instances)
        assert not (self.backlog and free), "a sequence waits for a slot while one is free"
        assert all(s.instance is None and s.predecessor is None for s in self.backlog)
        for sequence in self.idle:
            assert (len(sequence.queue), sequence.running) == (0, None), f"sequence {sequence.key!r} is not idle"
            assert sequence.instance is not None, f"sequence {sequence.key!r} has no slot"

    def _enqueue(self, sequence: Sequence, now_ns: int) -> None:
        """Give a sequence a free slot, or add it to the backlog."""
        instance = min(self.instances, key=lambda each: each.count)
        if instance.count < self._policy.rows:
            self._bind(sequence, instance, now_ns)
        else:
            sequence.since_ns = now_ns
            self.backlog[sequence] = None

    def _bind(self, sequence: Sequence, instance: Instance, now_ns: int, *, waited: bool = False) -> None:
        if self._overload is not None:
            self._service_rate.started(instance.slot, 1, len(self.backlog) if waited else -1, now_ns)
            if waited:
                self._overload.served(now_ns - sequence.since_ns, now_ns)
        sequence.expires_ns = 0
        instance.bind(sequence)
        if sequence.queue:
            self.make_ready(sequence, now_ns)

    def _unlink(self, sequence: Sequence, now_ns: int) -> None:
        """Unlink a sequence that ended; its successor may now get a slot."""
        before, after = sequence.predecessor, sequence.successor
        sequence.predecessor = sequence.successor = None
        if before is not None:
            before.successor = after
            if after is None:
                self._by_key.setdefault(sequence.key, before)
        if after is not None:
            after.predecessor = before
            if before is None:
                if sequence.instance is not None:
                    self.backlog[after] = None  # behind sequences that already wait for the freed slot
                    after.since_ns = now_ns
                else:
                    self._enqueue(after, now_ns)


def next_batch(
    instance: Instance, policy: SequencePolicy, now_ns: int, *, waits: bool
) -> tuple[list[Sequence], CloseReason | None]:
    """Return the sequences of the next batch, and why it is sent, None if it may wait.

    Args:
        instance: An instance with ready sequences; its `due_ns` is set if the batch may wait.
        now_ns: The time.
        waits: Whether batches wait for more requests at all.
    """
    if policy.keeps_rows:
        chosen = _batchable(instance.ready, policy.rows)
        if len(chosen) == policy.rows:
            return chosen, CloseReason.FULL
        if not policy.utilization_min:
            return chosen, CloseReason.QUEUE_EMPTY
        if len(chosen) >= policy.utilization_min * policy.rows:
            return chosen, CloseReason.PREFERRED
    else:
        chosen = _batchable(instance.ready, policy.size_max)
        if len(chosen) == policy.size_max:
            return chosen, CloseReason.FULL
        preferred = max((size for size in policy.preferred_sizes if size <= len(chosen)), default=0)
        if preferred:
            return chosen[:preferred], CloseReason.PREFERRED
    return chosen, _end_of_wait(instance, policy, chosen[0], now_ns) if waits else CloseReason.QUEUE_EMPTY


def _end_of_wait(instance: Instance, policy: SequencePolicy, first: Sequence, now_ns: int) -> CloseReason | None:
    """Return why a batch that could still grow is sent, or None if it may wait, and set `due_ns`."""
    due_ns = first.queue[0].ready_ns + policy.delay_ns
    if not policy.delay_ns:
        return CloseReason.QUEUE_EMPTY
    if now_ns >= due_ns:
        return CloseReason.DELAY
    if policy.adapt_delay and len(instance.ready) == instance.count:
        return CloseReason.QUEUE_EMPTY
    instance.due_ns = due_ns
    return None


def _batchable(ready: Iterable[Sequence], count: int) -> list[Sequence]:
    """Return up to `count` sequences that share a batch with the first."""
    chosen: list[Sequence] = []
    for sequence in ready:
        if not chosen or sequence.batch_key == chosen[0].batch_key:
            chosen.append(sequence)
            if len(chosen) == count:
                break
    return chosen
