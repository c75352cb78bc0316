"""The batcher: requests that arrive close together run together, or each alone, where `size_max` is 1. Pure.

Whenever a slot is idle and requests wait, a batch is formed as follows:

1. Requests are taken in order of service (see `queue`) as long as the next one has the shape key of the first and
   fits into `size_max`. A request is never split, and none is skipped: no request is overtaken by a later one of the
   same level, and no shape can starve another. The price is that alternating shapes make small batches.
2. If a preferred size was reached exactly on the way, the largest such is sent: `PREFERRED`.
3. Otherwise a batch that can no longer reach a preferred size does not wait: one that has passed the
   largest of them, or that the next request would take past it. It is sent up to there, `FULL`. Once its delay is over,
   and without a delay, it is sent whole, up to `size_max`.
4. Otherwise a batch that cannot grow is sent: `FULL` if it has `size_max` elements or the next request does not fit,
   `SHAPE` if the next request has another shape key. Waiting would only hold up the requests behind it.
5. Otherwise the batch contains all waiting requests. Without a delay, or while stopping, it is sent: `QUEUE_EMPTY`.
   With a delay, it is sent when its oldest request has waited `delay_ns`, to the nanosecond: `DELAY`.
6. With `adapt_delay` it is also sent when no other request is expected (see `ClosedLoop`): `QUEUE_EMPTY`. This can
   shorten the delay, never extend it.

A request of more than `size_max` elements runs alone: a model without dynamic batching has a `size_max` of 1, and a
request may be a whole batch. While all slots are busy no batch is formed, so the next one can use every request that
has arrived by then. Of several idle slots it chooses the latest idle one: its code, weights and allocator are most
likely to be in the caches. A request whose queue timeout does not exceed the delay can time out while it waits for
others, even when a slot is idle: the timeout is a promise, the delay only a permission.

With a batching strategy of the model (`BatchBuilder`), a request also needs the strategy's consent to join; one that it
keeps out closes the batch, `STRATEGY`, like one of another shape. A request on which the strategy fails is dropped.

While a batch waits for more requests it is kept, and each arrival extends it; an event that removes or reorders
requests discards it, and it is formed again from the queue.

`ClosedLoop` is an estimate of the number of closed-loop clients, which spares a single client the batching delay.

Most clients run a closed loop: each sends a request, waits for the response and sends the next one. The highest number
of requests in the system (queued or running) in the recent past is then the number of clients, and once that many are
queued, no other request will join by waiting. The rules:

1. A period lasts from one batch to the next. Its peak is the highest number of requests in the system.
2. The estimate is the highest peak of the last `RECENT_PERIODS` periods and the current one.
3. When at least that many requests are queued, all clients are waiting.
4. Until `RECENT_PERIODS` periods have passed there is no estimate, and more clients are expected.

For a single client all peaks are 1, so it waits `RECENT_PERIODS` times and never again. When a request arrives while
another one is queued or running, the peak becomes 2 immediately, and a single request waits again. A wrong estimate
costs little: if too high, a request waits for the configured delay, as it would without the rule; if too low, a batch
is smaller while requests hardly overlap. The rules use neither rates nor a clock, so an event log replays exactly.

While the batcher forms a batch, it asks the strategy (`BatchBuilder`) for each request in turn whether the request
joins. The first request always joins, since a batch cannot be empty. If the queue changes before the batch is sent, the
batcher may discard the batch and form it again, so a strategy must not keep totals across batches.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from typing import Final, Protocol, assert_never

from charonia.server.scheduling.api import (
    BatchPolicy,
    Cancel,
    CloseReason,
    Command,
    Drop,
    DropReason,
    Event,
    Reschedule,
    RowFree,
    RowTaken,
    Run,
    SetStateKey,
    SlotIdle,
    SlotRemoved,
    StateLost,
    Stop,
    StopNewSequences,
    Submit,
    Tick,
    state_line,
)
from charonia.server.scheduling.queue import QueuedRequest, RequestQueue
from charonia.server.scheduling.slots import IdleSlots


class JoinDecision(Enum):
    """Whether a request joins a batch."""

    JOINS = "joins"
    STAYS_OUT = "stays_out"
    FAILED = "failed"


class BatchBuilder(Protocol):
    """A batch while it is formed. No method raises."""

    def take(self, id: int) -> JoinDecision:
        """Decide whether a request joins; FAILED leads to its `Drop`."""

    def end(self) -> None:
        """The batch is sent or discarded. Called once."""


Strategy = Callable[[], BatchBuilder]
"""Starts a batch."""


def all_of(strategies: Sequence[Strategy]) -> Strategy | None:
    """Return a strategy that lets a request join if all of these do; None if there are none."""
    if len(strategies) < 2:
        return strategies[0] if strategies else None
    return lambda: _AllOf([begin() for begin in strategies])


class _AllOf:
    __slots__ = ("_builders",)

    def __init__(self, builders: Sequence[BatchBuilder]) -> None:
        self._builders = builders

    def take(self, id: int) -> JoinDecision:
        for builder in self._builders:
            decision = builder.take(id)
            if decision is not JoinDecision.JOINS:
                return decision
        return JoinDecision.JOINS

    def end(self) -> None:
        for builder in self._builders:
            builder.end()


RECENT_PERIODS: Final = 3
"""Number of recent periods that the estimate covers."""


class ClosedLoop:
    """Counts the requests in the system and keeps the recent peaks."""

    __slots__ = ("_inside", "_peak", "_recent", "_running")

    def __init__(self) -> None:
        self._inside = 0
        self._peak = 0
        self._recent: deque[int] = deque(maxlen=RECENT_PERIODS)
        self._running: dict[int, int] = {}  # requests by slot

    @property
    def inside(self) -> int:
        """Number of requests in the system: queued or running."""
        return self._inside

    @property
    def running(self) -> int:
        return sum(self._running.values())

    def arrived(self) -> None:
        """A request arrived."""
        self._inside += 1
        if self._inside > self._peak:
            self._peak = self._inside

    def left_queue(self, count: int) -> None:
        self._inside -= count

    def sent(self, slot: int, count: int) -> None:
        """A batch with this number of requests was sent to a slot: a period ends and the next one begins."""
        self._running[slot] = count
        self._recent.append(self._peak)
        self._peak = self._inside

    def slot_ended(self, slot: int) -> None:
        self._inside -= self._running.pop(slot, 0)

    def all_clients_queued(self, queued: int) -> bool:
        """Return whether no more requests are expected beyond those queued."""
        return len(self._recent) == RECENT_PERIODS and queued >= self._peak and queued >= max(self._recent)


class CandidateBatch:
    """Requests at the head of the queue that could run together.

    Attributes:
        ids: The requests, in order of service.
        size: Their batch elements.
        oldest_ns: When the oldest of them arrived.
        preferred_count: How many of them make up the largest preferred size that was reached, 0 for none.
        wanted_count: How many of them came before one that took the batch past the largest preferred size, 0 for none.
        closed: Why it cannot grow, None if it can.
        failed_id: The request on which the strategy failed, None if there is none.
    """

    __slots__ = (
        "_builder", "_shape_key", "closed", "failed_id", "ids", "oldest_ns", "preferred_count", "size",
        "wanted_count",
    )  # fmt: skip

    def __init__(self, first: QueuedRequest, policy: BatchPolicy, builder: BatchBuilder | None) -> None:
        self.ids = [first.id]
        self.size = first.batch_size
        self.oldest_ns = first.arrived_ns
        self.preferred_count = 0
        self.wanted_count = 0
        self.closed: CloseReason | None = None
        self.failed_id: int | None = None
        self._shape_key: Hashable = first.shape_key
        self._builder = builder
        self._mark(policy)
        if builder is not None:
            self._joins(first.id, builder)

    def extend(self, entry: QueuedRequest, policy: BatchPolicy) -> None:
        """Add the next entry of the queue, or close the batch because of it."""
        if entry.shape_key != self._shape_key:
            self.closed = CloseReason.SHAPE
        elif self.size + entry.batch_size > policy.size_max:
            self.closed = CloseReason.FULL
        elif self._builder is not None and not self._joins(entry.id, self._builder):
            self.closed = CloseReason.STRATEGY
        else:
            if not self.wanted_count and self.size + entry.batch_size > policy.wanted_size:
                self.wanted_count = len(self.ids)
            self.ids.append(entry.id)
            self.size += entry.batch_size
            if entry.arrived_ns < self.oldest_ns:
                self.oldest_ns = entry.arrived_ns
            self._mark(policy)

    def end(self) -> None:
        if self._builder is not None:
            self._builder.end()

    def _joins(self, id: int, builder: BatchBuilder) -> bool:
        decision = builder.take(id)
        if decision is JoinDecision.FAILED:
            self.failed_id = id
        return decision is JoinDecision.JOINS

    def _mark(self, policy: BatchPolicy) -> None:
        if self.size in policy.preferred_sizes:
            self.preferred_count = len(self.ids)
        if self.size >= policy.size_max:
            self.closed = CloseReason.FULL


class DynamicBatcher:
    """Merges requests into batches under a `BatchPolicy`."""

    __slots__ = (
        "_batch", "_due_ns", "_idle", "_loop", "_now_ns", "_policy", "_queue", "_runs_alone", "_stopping",
        "_strategy",
    )  # fmt: skip

    def __init__(self, policy: BatchPolicy, strategy: Strategy | None = None) -> None:
        self._policy = policy
        self._strategy = strategy
        self._runs_alone = policy.size_max == 1 and not (policy.preferred_sizes or policy.delay_ns or strategy)
        self._queue = RequestQueue(policy.limits, dict(policy.level_limits), policy.size_max)
        self._loop = ClosedLoop() if policy.adapt_delay and policy.delay_ns else None
        self._idle = IdleSlots()
        self._batch: CandidateBatch | None = None  # at the head of the queue, while it waits for more
        self._due_ns: int | None = None  # when it is sent at the latest
        self._stopping = False
        self._now_ns = 0  # of the last event

    def __repr__(self) -> str:
        return state_line(self, self._idle, self._now_ns)

    @property
    def queued(self) -> int:
        return len(self._queue.entries)

    def wake_at(self) -> int | None:
        """Return when the next delay ends or the next queue timeout comes, or None."""
        deadline_ns = self._queue.next_deadline_ns() if self._queue.deadlines else None
        if self._due_ns is None or (deadline_ns is not None and deadline_ns < self._due_ns):
            return deadline_ns
        return self._due_ns

    def slot_at_once(self) -> int | None:
        """Return the slot on which a request would run alone if it were submitted now, None if it would not."""
        if self._queue.entries or self._policy.delay_ns or self._strategy is not None or self._stopping:
            return None
        return self._idle.next() if self._idle.by_instance else None

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        self._now_ns = now_ns
        commands: list[Command] = []
        expired = self._queue.expire(now_ns) if self._queue.deadlines else None
        if expired is not None:
            self._discard(len(expired))
            commands.extend(Drop(request_id, DropReason.TIMEOUT) for request_id in expired)
        match event:
            case Submit():
                self._submit(event, now_ns, commands)
                return commands
            case SlotIdle():
                if self._loop is not None:
                    self._loop.slot_ended(event.slot)
                if self._queue.overloads:
                    self._queue.service_rate.ended(event.slot, now_ns)
                self._idle.add(event.slot, event.instance)
                if not self._queue.entries and self._due_ns is None:
                    return commands
            case Cancel():
                if self._queue.remove_abandoned(event.id, now_ns):
                    self._discard(1)
            case SlotRemoved():
                if self._loop is not None:
                    self._loop.slot_ended(event.slot)
                if self._queue.overloads:
                    self._queue.service_rate.ended(event.slot, now_ns)
                self._idle.remove(event.slot)
            case Stop():
                self._stopping = True
            case Tick() | Reschedule() | SetStateKey() | StopNewSequences() | StateLost() | RowTaken() | RowFree():
                pass
            case _:
                assert_never(event)
        self._send_due(now_ns, commands)
        return commands

    def check_invariants(self) -> None:
        self._idle.check_invariants()
        self._queue.check_invariants()
        waits = bool(self._idle.by_instance and self._queue.entries)
        assert waits == (self._due_ns is not None), "a batch waits with a slot idle if and only if it has a due time"
        assert waits == (self._batch is not None)
        if self._batch is not None:
            assert self._due_ns == self._batch.oldest_ns + self._policy.delay_ns
            head = [entry for entry, _ in zip(self._queue, self._batch.ids, strict=False)]
            assert [entry.id for entry in head] == self._batch.ids, "the batch is not at the head of the queue"
            assert self._batch.size == sum(entry.batch_size for entry in head)
        if self._loop is not None:
            assert self._loop.inside == len(self._queue.entries) + self._loop.running

    def _discard(self, count: int) -> None:
        """This number of requests was dropped or cancelled, or requests moved back: discard the batch."""
        self._discard_batch()
        if self._loop is not None:
            self._loop.left_queue(count)

    def _discard_batch(self) -> None:
        if self._batch is not None:
            self._batch.end()
            self._batch = None

    def _submit(self, request: Submit, now_ns: int, commands: list[Command]) -> None:
        if self._stopping:
            commands.append(Drop(request.id, DropReason.STOPPING))
            return
        if self._runs_alone and self._idle.by_instance and not self._queue.entries:
            self._send((request.id,), CloseReason.FULL, now_ns, commands)
            return
        policy = self._policy
        level = request.priority if 0 < request.priority <= policy.priority_levels else policy.default_level
        if self._queue.overloads and not self._idle.by_instance and self._queue.refuses(request, level, now_ns):
            commands.append(Drop(request.id, DropReason.OVERLOADED))
            return
        if self._loop is not None:
            self._loop.arrived()
        if self._idle.by_instance and not self._queue.entries and self._strategy is None:
            reason = self._reason_alone(request.batch_size, now_ns)
            if reason is not None:
                self._due_ns = None  # of a batch whose requests have just timed out
                self._send((request.id,), reason, now_ns, commands)
                return
        entry, is_last = self._queue.add(request, level, now_ns)
        if self._batch is not None and is_last:
            self._batch.extend(entry, policy)
        else:
            self._discard_batch()
        self._send_due(now_ns, commands)
        if len(self._queue.entries) > self._queue.limit_min:
            loser = self._queue.over_limit(request.id)
            if loser is not None:
                self._drop(loser, DropReason.QUEUE_FULL, commands)
                self._send_due(now_ns, commands)  # without the oldest request of a batch, its delay ends later

    def _send_due(self, now_ns: int, commands: list[Command]) -> None:
        """Send batches until no slot is idle, no request waits, or the next batch may wait for more requests."""
        self._due_ns = None
        queue = self._queue
        while self._idle.by_instance and queue.entries:
            if queue.overloads and (hopeless := queue.next_to_shed(now_ns)) is not None:
                self._drop(hopeless, DropReason.OVERLOADED, commands)
                continue
            if self._runs_alone:
                self._serve((queue.first().id,), CloseReason.FULL, now_ns, commands)
                continue
            batch = self._batch = self._batch or self._gather()
            if batch.failed_id is not None:
                self._drop(batch.failed_id, DropReason.STRATEGY_FAILED, commands)
                continue
            ids, reason = batch.ids, batch.closed
            if batch.preferred_count:
                ids, reason = ids[: batch.preferred_count], CloseReason.PREFERRED
            elif reason is None or batch.size >= self._policy.wanted_size:
                over = self._end_of_wait(batch.oldest_ns, len(queue.entries), now_ns)
                if over is None and batch.size >= self._policy.wanted_size:
                    ids, reason = ids[: batch.wanted_count or len(ids)], CloseReason.FULL
                reason = reason or over
            if reason is None:
                self._due_ns = batch.oldest_ns + self._policy.delay_ns
                return
            self._discard_batch()
            self._serve(tuple(ids), reason, now_ns, commands)
        self._discard_batch()

    def _gather(self) -> CandidateBatch:
        builder = self._strategy() if self._strategy is not None else None
        if len(self._queue.entries) == 1:
            return CandidateBatch(next(iter(self._queue.entries.values())), self._policy, builder)
        entries = iter(self._queue)
        batch = CandidateBatch(next(entries), self._policy, builder)
        while batch.closed is None and (entry := next(entries, None)) is not None:
            batch.extend(entry, self._policy)
        return batch

    def _reason_alone(self, batch_size: int, now_ns: int) -> CloseReason | None:
        """Return why a request that arrives at an empty queue is sent immediately, or None."""
        if batch_size in self._policy.preferred_sizes:
            return CloseReason.PREFERRED
        if batch_size >= self._policy.size_max:
            return CloseReason.FULL
        over = self._end_of_wait(now_ns, 1, now_ns)
        return CloseReason.FULL if over is None and batch_size >= self._policy.wanted_size else over

    def _end_of_wait(self, oldest_ns: int, queued: int, now_ns: int) -> CloseReason | None:
        """Return why a batch of all waiting requests, which could still grow, is sent, or None if it may wait."""
        delay_ns = self._policy.delay_ns
        if delay_ns == 0 or self._stopping:
            return CloseReason.QUEUE_EMPTY
        if now_ns >= oldest_ns + delay_ns:
            return CloseReason.DELAY
        if self._loop is not None and self._loop.all_clients_queued(queued):
            return CloseReason.QUEUE_EMPTY
        return None

    def _drop(self, id: int, reason: DropReason, commands: list[Command]) -> None:
        self._queue.remove(id)
        self._discard(1)
        commands.append(Drop(id, reason))

    def _serve(self, ids: tuple[int, ...], reason: CloseReason, now_ns: int, commands: list[Command]) -> None:
        for request_id in ids:
            self._queue.serve(request_id, now_ns)
        self._send(ids, reason, now_ns, commands, left=len(self._queue.entries))

    def _send(
        self, ids: tuple[int, ...], reason: CloseReason, now_ns: int, commands: list[Command], *, left: int = -1
    ) -> None:
        slot = self._idle.take()
        if self._queue.overloads:
            self._queue.service_rate.started(slot, len(ids), left, now_ns)
        if self._loop is not None:
            self._loop.sent(slot, len(ids))
        commands.append(Run(slot, ids, reason))
