"""The sequence schedulers: requests that belong together go to the same slot, one after the other. Pure.

1. A sequence begins with a request that says so and takes the first free slot: of the instance that has the fewest
   sequences, the lowest. It keeps it until the request that ends it has run, or it has been idle for too long. While
   all slots are taken it waits in the backlog, first come, first served; its requests wait with it.
2. Requests of a sequence run in the order in which they arrived, at most one at a time.
3. A sequence is idle while it has a slot, but no request that waits or runs: a model that computes for long ends
   nobody's sequence. One in the backlog never is; it leaves when a queue timeout that one of its requests asked for
   comes, with all of them: `SEQUENCE_TIMEOUT`.
4. A request that begins a sequence whose key is taken begins a new one. What was there takes no more requests, and
   the new one gets in line when that is over: the two never run at the same time, nor does the new one pass others.
5. A request that was cancelled while it waited leaves a hole, so the sequence is over with what runs: those that wait
   behind and before it are dropped, `CANCELLED`, and the slot is free. One that is cancelled while it runs leaves none.
6. A request that is to run again goes back to the head of its sequence, and runs behind those that were ready before.

Batches of the direct strategy (`keeps_rows`) have a row for each slot up to the highest with a request; in rows without
one stands `PADDING`. Those of the oldest strategy have the requests that were ready first. In both, sequences whose
`batch_key` differs from that of the oldest wait for the next batch.
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import assert_never

from charonia.server.scheduling.api import (
    Cancel,
    Command,
    Drop,
    DropReason,
    Event,
    Run,
    SlotGone,
    SlotIdle,
    Stop,
    Submit,
    Tick,
)
from charonia.server.sequences.api import (
    PADDING,
    Ended,
    EndReason,
    Place,
    SequenceKey,
    SequencePart,
    SequencePolicy,
    SequencerView,
)
from charonia.server.sequences.slots import Instance, Sequence, Waiting, next_batch

_NS_PER_US = 1000

STALE_TIMEOUTS_MAX = 64
"""Timeouts without effect that are kept beyond the number of requests that wait."""


class Sequencer:
    """The scheduler of one model that works on sequences.

    Args:
        policy: Its policy.
        instances: Number of instances; their slots in events are 0 to `instances` - 1.
    """

    __slots__ = (
        "_backlog",
        "_ended",
        "_ended_counts",
        "_idle",
        "_instances",
        "_is_stopped",
        "_numbers",
        "_policy",
        "_running",
        "_sequences",
        "_takes_new",
        "_timeouts",
        "_waiting",
    )

    def __init__(self, policy: SequencePolicy, instances: int) -> None:
        self._policy = policy
        self._instances = [Instance(slot, policy.rows) for slot in range(instances)]
        self._sequences: dict[SequenceKey, Sequence] = {}  # the latest of each key
        self._numbers = 0
        self._backlog: OrderedDict[Sequence, None] = OrderedDict()
        self._timeouts: list[tuple[int, int, Sequence]] = []  # heap of (time, number, sequence), with stale ones
        self._idle: OrderedDict[Sequence, None] = OrderedDict()  # that have a slot and no request, longest first
        self._waiting: dict[int, Sequence] = {}  # by id of a request that waits
        self._running: dict[int, tuple[Sequence, Waiting]] = {}  # by id of a request that runs
        self._ended: list[Ended] = []
        self._ended_counts: Counter[EndReason] = Counter()
        self._takes_new = True
        self._is_stopped = False

    @property
    def queued(self) -> int:
        """Number of requests that wait."""
        return len(self._waiting)

    @property
    def live(self) -> int:
        """Number of sequences that have a slot or wait for one."""
        waiting = sum(1 for s in self._sequences.values() if s.instance is None)
        return waiting + sum(instance.count for instance in self._instances)

    def holds(self, key: SequenceKey) -> bool:
        """Return whether a sequence of this key would take another request."""
        sequence = self._sequences.get(key)
        return sequence is not None and sequence.end is None

    def wants(self, slot: int) -> bool:
        """Return whether a request is ready to run on an instance."""
        return bool(self._instances[slot].ready)

    def place(self, id: int) -> Place:
        """Return where a request stands that was just handed out in a `Run`.

        Raises:
            KeyError: It does not run.
        """
        sequence, _ = self._running[id]
        return Place(sequence.number, sequence.executions == 1)

    def is_running(self, id: int) -> bool:
        """Return whether a request was handed out and its slot is not idle again."""
        return id in self._running

    def run_again(self, id: int) -> None:
        """Note that a request that runs is to run once more; to be told before its slot is idle again.

        Raises:
            KeyError: It does not run.
        """
        self._running[id][1].runs_again = True

    def share_by(self, sequence: int, key: Hashable) -> None:
        """Note what a sequence of which a request runs shares a batch by, besides the shapes of its requests."""
        for running, _ in self._running.values():
            if running.number == sequence:
                running.state_key = key

    def take_no_new(self) -> None:
        """Drop every later request that begins a sequence, `STOPPING`; sequences that live may go on."""
        self._takes_new = False

    def take_ended(self) -> list[Ended]:
        """Return the sequences that are over since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def view(self, now_ns: int) -> SequencerView:
        """Return the slots and the backlog as they are."""
        blocked = [s for s in self._sequences.values() if s.predecessor is not None]
        return SequencerView(
            self._policy.rows,
            tuple(tuple(s.view(now_ns) for s in each.rows if s is not None) for each in self._instances),
            tuple(s.view(now_ns) for s in (*self._backlog, *blocked)),
            tuple(sorted(self._ended_counts.items(), key=lambda item: item[0].value)),
        )

    def wake_at(self) -> int | None:
        """Return when the next delay, idle time or queue timeout ends, or None."""
        times = [each.due_ns for each in self._instances if each.due_ns is not None]
        if self._idle:
            times.append(next(iter(self._idle)).since_ns + self._policy.idle_ns)
        while self._timeouts and self._timeouts[0][2].expires_ns != self._timeouts[0][0]:
            heappop(self._timeouts)
        if self._timeouts:
            times.append(self._timeouts[0][0])
        return min(times, default=None)

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        """Take in one event at this monotonic time and return what follows from it, in order."""
        commands: list[Command] = []
        self._expire(now_ns, commands)
        match event:
            case Submit():
                self._submit(event, now_ns, commands)
                return commands
            case SlotIdle():
                self._slot_over(self._instances[event.slot], now_ns)
                self._instances[event.slot].is_idle = True
            case SlotGone():
                self._slot_over(self._instances[event.slot], now_ns)
                self._instances[event.slot].is_idle = False
            case Cancel():
                self._cancel(event.id, now_ns, commands)
            case Stop():
                self._stop(now_ns)
            case Tick():
                pass
            case _:
                assert_never(event)
        self._send_due(now_ns, commands)
        return commands

    # What arrives

    def _submit(self, event: Submit, now_ns: int, commands: list[Command]) -> None:
        part = event.shape_key
        if not isinstance(part, SequencePart):
            raise TypeError(f"request {event.id} of a sequence model came without a SequencePart")
        sequence = self._sequences.get(part.key)
        goes_on = sequence is not None and sequence.end is None
        refusal: DropReason | None = None
        if self._is_stopped or (part.start and not self._takes_new):
            refusal = DropReason.STOPPING
        elif not part.start and not goes_on:
            refusal = DropReason.NO_SEQUENCE
        if refusal is not None:
            commands.append(Drop(event.id, refusal))
            return
        if part.start or sequence is None:
            sequence = self._begin(part.key, sequence, now_ns)
        request = Waiting(event.id, part, now_ns)
        self._waiting[event.id] = sequence
        sequence.queue.append(request)
        if part.end:
            sequence.end = EndReason.ENDED
        if sequence.instance is None:
            self._note_timeout(sequence, event.timeout_us, now_ns)
        elif sequence.running is None and len(sequence.queue) == 1:
            self._make_ready(sequence, now_ns)
        self._send_due(now_ns, commands)
        if self._policy.queue_max and event.id in self._waiting and len(self._waiting) > self._policy.queue_max:
            self._refuse_last(sequence, now_ns, commands)

    def _begin(self, key: SequenceKey, before: Sequence | None, now_ns: int) -> Sequence:
        self._numbers += 1
        sequence = self._sequences[key] = Sequence(self._numbers, key, now_ns)
        sequence.state_key = self._policy.state_key
        if before is None:
            self._line_up(sequence, now_ns)
            return sequence
        if before.end is None:
            before.end = EndReason.REPLACED
        before.successor, sequence.predecessor = sequence, before
        self._end_if_over(before, now_ns)
        return sequence

    def _line_up(self, sequence: Sequence, now_ns: int) -> None:
        """Give a sequence a free slot, or a place in the backlog."""
        instance = min(self._instances, key=lambda each: each.count)
        if instance.count < self._policy.rows:
            self._bind(sequence, instance, now_ns)
        else:
            sequence.since_ns = now_ns
            self._backlog[sequence] = None

    def _bind(self, sequence: Sequence, instance: Instance, now_ns: int) -> None:
        sequence.expires_ns = 0
        instance.bind(sequence)
        if sequence.queue:
            self._make_ready(sequence, now_ns)

    def _make_ready(self, sequence: Sequence, now_ns: int) -> None:
        self._idle.pop(sequence, None)
        sequence.queue[0].ready_ns = now_ns
        if sequence.instance is not None:
            sequence.instance.ready[sequence] = None

    def _note_timeout(self, sequence: Sequence, timeout_us: int, now_ns: int) -> None:
        expires_ns = now_ns + timeout_us * _NS_PER_US
        if not timeout_us or 0 < sequence.expires_ns <= expires_ns:
            return
        sequence.expires_ns = expires_ns
        if len(self._timeouts) > 2 * len(self._waiting) + STALE_TIMEOUTS_MAX:
            self._timeouts = [item for item in self._timeouts if item[2].expires_ns == item[0]]
            heapify(self._timeouts)
        heappush(self._timeouts, (expires_ns, sequence.number, sequence))

    def _refuse_last(self, sequence: Sequence, now_ns: int, commands: list[Command]) -> None:
        """Take the newest request of a sequence back, for which there is no room."""
        request = sequence.queue.pop()
        del self._waiting[request.id]
        commands.append(Drop(request.id, DropReason.QUEUE_FULL))
        if request.part.start:
            sequence.end = EndReason.DROPPED
            self._end_if_over(sequence, now_ns)
            self._send_due(now_ns, commands)
            return
        if request.part.end:
            sequence.end = None
        if not sequence.queue and sequence.running is None and sequence.instance is not None:
            sequence.instance.ready.pop(sequence, None)
            sequence.since_ns = now_ns
            self._idle[sequence] = None

    # What ends

    def _cancel(self, id: int, now_ns: int, commands: list[Command]) -> None:
        sequence = self._waiting.get(id)
        if sequence is None:
            if id not in self._running or not self._running[id][1].runs_again:
                return
            sequence, request = self._running[id]
            request.runs_again = False
        self._cut(sequence, EndReason.CANCELLED, DropReason.CANCELLED, now_ns, commands, spare=id)

    def _slot_over(self, instance: Instance, now_ns: int) -> None:
        """What the instance ran is over."""
        finished, instance.running = instance.running, ()
        for sequence, request in finished:
            sequence.running = None
            del self._running[request.id]
            sequence.since_ns = now_ns
            if request.runs_again:
                request.runs_again = False
                sequence.queue.appendleft(request)
                self._waiting[request.id] = sequence
            if sequence.queue:
                self._make_ready(sequence, now_ns)
            elif sequence.end is None and not self._is_stopped:
                self._idle[sequence] = None
            else:
                self._end_if_over(sequence, now_ns)

    def _cut(
        self,
        sequence: Sequence,
        why: EndReason,
        reason: DropReason,
        now_ns: int,
        commands: list[Command],
        spare: int = PADDING,
    ) -> None:
        """End a sequence with what runs; drop what waits, but for one request that leaves by itself."""
        sequence.end = why
        while sequence.queue:
            request = sequence.queue.popleft()
            del self._waiting[request.id]
            if request.id != spare:
                commands.append(Drop(request.id, reason))
        if sequence.instance is not None:
            sequence.instance.ready.pop(sequence, None)
        self._end_if_over(sequence, now_ns)

    def _end_if_over(self, sequence: Sequence, now_ns: int) -> None:
        """Forget a sequence that has nothing left to do; its slot goes to the next."""
        if sequence.queue or sequence.running is not None:
            return
        reason = sequence.end or EndReason.STOPPED
        sequence.end = reason
        self._ended.append(Ended(sequence.number, sequence.key, reason))
        self._ended_counts[reason] += 1
        self._idle.pop(sequence, None)
        self._backlog.pop(sequence, None)
        sequence.expires_ns = 0
        if self._sequences.get(sequence.key) is sequence:
            del self._sequences[sequence.key]
        self._let_go(sequence, now_ns)
        instance = sequence.instance
        if instance is not None:
            instance.release(sequence)
            if self._backlog:
                self._bind(self._backlog.popitem(last=False)[0], instance, now_ns)

    def _let_go(self, sequence: Sequence, now_ns: int) -> None:
        """Let the one that waited for the end of this one get in line."""
        before, after = sequence.predecessor, sequence.successor
        sequence.predecessor = sequence.successor = None
        if before is not None:
            before.successor = after
            if after is None:
                self._sequences.setdefault(sequence.key, before)
        if after is not None:
            after.predecessor = before
            if before is None:
                if sequence.instance is not None:
                    self._backlog[after] = None  # behind those that wait for the slot that becomes free now
                    after.since_ns = now_ns
                else:
                    self._line_up(after, now_ns)

    def _stop(self, now_ns: int) -> None:
        """Take nothing any more: sequences without a request are over."""
        self._is_stopped = True
        self._takes_new = False
        while self._idle:
            self._end_if_over(self._idle.popitem()[0], now_ns)

    def _expire(self, now_ns: int, commands: list[Command]) -> None:
        while self._idle:
            first = next(iter(self._idle))
            if first.since_ns + self._policy.idle_ns > now_ns:
                break
            first.end = EndReason.IDLE
            self._end_if_over(first, now_ns)
        while self._timeouts and self._timeouts[0][0] <= now_ns:
            expires_ns, _, sequence = heappop(self._timeouts)
            if sequence.expires_ns == expires_ns:
                self._cut(sequence, EndReason.DROPPED, DropReason.SEQUENCE_TIMEOUT, now_ns, commands)

    # What runs

    def _send_due(self, now_ns: int, commands: list[Command]) -> None:
        for instance in self._instances:
            instance.due_ns = None
            if not instance.is_idle or not instance.ready:
                continue
            chosen, reason = next_batch(instance, self._policy, now_ns, waits=not self._is_stopped)
            if reason is None:
                continue
            if self._policy.keeps_rows:
                ids = [PADDING] * (1 + max(sequence.row for sequence in chosen))
                for sequence in chosen:
                    ids[sequence.row] = self._begin_run(sequence)
            else:
                ids = [self._begin_run(sequence) for sequence in chosen]
            instance.running = tuple(self._running[each] for each in ids if each != PADDING)
            instance.is_idle = False
            commands.append(Run(instance.slot, tuple(ids), reason))

    def _begin_run(self, sequence: Sequence) -> int:
        request = sequence.running = sequence.queue.popleft()
        sequence.executions += 1
        if sequence.instance is not None:
            del sequence.instance.ready[sequence]
        del self._waiting[request.id]
        self._running[request.id] = (sequence, request)
        return request.id
