"""The sequence schedulers: all requests of a sequence go to the same slot, one after the other. Pure.

1. A sequence starts with a request that has the START flag, and gets the lowest free slot of the instance with the
   fewest sequences. It keeps the slot until the request that ends it has run, or it has been idle for too long. While
   all slots are taken, the sequence and its requests wait in the backlog, first come, first served.
2. Requests of a sequence run in order of arrival, at most one at a time.
3. A sequence is idle while it has a slot, but no waiting or running request: a long execution never ends a sequence.
   One in the backlog is not idle; it is dropped with all its requests when the queue timeout of one of them passes:
   `SEQUENCE_TIMEOUT`.
4. A START request whose key is taken starts a new sequence. The old one takes no more requests, and the new one joins
   the backlog when the old one is over: the two never run at the same time, and the new one overtakes no other.
5. A request that is cancelled while it waits would leave a gap, so its sequence ends with the running request: all its
   waiting requests are dropped, `CANCELLED`, and the slot is free. One that is cancelled while it runs leaves no gap.
6. A rescheduled request returns to the head of its sequence, and runs after sequences that were ready before.
7. Under overload (`scheduling/overload.py`), a request that would start a sequence is refused, `OVERLOADED`, if it
   would wait longer for a slot than clients do. Later requests of a sequence never are.
8. When an instance loses its state, the sequences that have run there are over: their waiting requests, or else the
   next one, are dropped, `STATE_LOST`.

Two schedulers may share an instance, while one phases out; each row then belongs to one of them (`RowTaken`).

Batches of the direct strategy (`keeps_rows`) have a row for each slot up to the highest with a request, even if that
waits for the next batch; rows without a request have the id `EMPTY_ROW`. Batches of the oldest strategy have the
requests that were ready first. In both, sequences whose `batch_key` differs from that of the first wait for the next
batch.
"""

from typing import assert_never

from charonia.server.scheduling.api import (
    EMPTY_ROW,
    Cancel,
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
from charonia.server.sequences.api import (
    BatchRow,
    EndReason,
    SequenceEnd,
    SequenceKey,
    SequenceMember,
    SequencePolicy,
    SequencerView,
)
from charonia.server.sequences.slots import Instance, QueuedRequest, Sequence, SequenceTable, next_batch

_NS_PER_US = 1000


class Sequencer:
    """The scheduler of a sequence model.

    Args:
        instances: Number of instances; their slots in events are 0 to `instances` - 1.
    """

    __slots__ = ("_is_stopped", "_now_ns", "_policy", "_running", "_table", "_takes_new", "_waiting")

    def __init__(self, policy: SequencePolicy, instances: int) -> None:
        self._policy = policy
        self._table = SequenceTable(policy, instances)
        self._waiting: dict[int, Sequence] = {}  # by id of a waiting request
        self._running: dict[int, tuple[Sequence, QueuedRequest]] = {}  # by id of a running request
        self._takes_new = True
        self._is_stopped = False
        self._now_ns = 0  # of the last event

    def __repr__(self) -> str:
        instances = self._table.instances
        idle = f"idle {sum(each.is_idle for each in instances)} of {len(instances)}"
        return state_line(self, f"{idle} | sequences {self.live} ({len(self._table.backlog)} wait)", self._now_ns)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def live(self) -> int:
        return self._table.live

    def holds(self, key: SequenceKey) -> bool:
        """Return whether a sequence of this key would take another request."""
        sequence = self._table.get(key)
        return sequence is not None and sequence.end is None

    def free_rows(self, slot: int) -> list[int]:
        """Return the rows of a slot without a sequence, here or elsewhere."""
        return [row for row, sequence in enumerate(self._table.instances[slot].rows) if sequence is None]

    def wants(self, slot: int) -> bool:
        return bool(self._table.instances[slot].ready)

    def place(self, id: int) -> BatchRow:
        """Return the sequence of a request that has just been sent in a `Run`.

        Raises:
            KeyError: The request does not run.
        """
        sequence, _ = self._running[id]
        return BatchRow(sequence.number, sequence.executions == 1)

    def is_running(self, id: int) -> bool:
        """Return whether a request was sent in a `Run` and its slot is not idle again."""
        return id in self._running

    def take_ended(self) -> list[SequenceEnd]:
        """Return the sequences that have ended since the last call."""
        return self._table.take_ended()

    def view(self, now_ns: int) -> SequencerView:
        return self._table.view(now_ns)

    def wake_at(self) -> int | None:
        """Return when the next delay, idle time or queue timeout ends, or None."""
        return self._table.wake_at()

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        """Take in one event at this monotonic time and return what follows from it, in order.

        Raises:
            KeyError: A request that does not run is rescheduled.
        """
        self._now_ns = now_ns
        if isinstance(event, Reschedule):  # nothing follows before its slot is idle
            self._running[event.id][1].is_rescheduled = True
            return []
        commands: list[Command] = []
        self._expire(now_ns, commands)
        match event:
            case Submit():
                self._submit(event, now_ns, commands)
                return commands
            case SlotIdle():
                self._slot_over(self._table.instances[event.slot], now_ns)
                self._table.instances[event.slot].is_idle = True
            case SlotRemoved():
                self._slot_over(self._table.instances[event.slot], now_ns)
                self._table.instances[event.slot].is_idle = False
            case Cancel():
                self._cancel(event.id, now_ns, commands)
            case SetStateKey():
                for sequence, _ in self._running.values():
                    if sequence.number == event.sequence:
                        sequence.state_key = event.key
            case StateLost():
                self._abandon(self._table.instances[event.slot], now_ns, commands)
            case RowTaken():
                self._table.take_row(event.slot, event.row, now_ns)
            case RowFree():
                self._table.free_row(event.slot, event.row, now_ns)
            case StopNewSequences():
                self._takes_new = False
            case Stop():
                self._takes_new, self._is_stopped = False, True
                self._table.end_idle(now_ns, all_of_them=True)
            case Tick():
                pass
            case _:
                assert_never(event)
        self._send_due(now_ns, commands)
        return commands

    def check_invariants(self) -> None:
        self._table.check_invariants()
        for request_id, sequence in self._waiting.items():
            assert sum(each.id == request_id for each in sequence.queue) == 1, f"{request_id} does not wait once"
        for sequence, request in self._running.values():
            assert sequence.running is request, f"request {request.id} does not run"
        for instance in self._table.instances:
            is_ready = instance.is_idle and bool(instance.ready)
            assert not is_ready or instance.due_ns is not None, "a request is ready, and nothing wakes its instance"
        ran = [request.id for instance in self._table.instances for _, request in instance.running]
        assert sorted(ran) == sorted(self._running), "the running requests are not the instances' requests"

    # Events

    def _submit(self, event: Submit, now_ns: int, commands: list[Command]) -> None:
        member = event.shape_key
        if not isinstance(member, SequenceMember):
            raise TypeError(f"request {event.id} of a sequence model came without a SequenceMember")
        sequence = self._table.get(member.key)
        goes_on = sequence is not None and sequence.end is None
        refusal: DropReason | None = None
        if self._is_stopped or (member.start and not self._takes_new):
            refusal = DropReason.STOPPING
        elif not member.start and not goes_on:
            refusal = DropReason.NO_SEQUENCE
        elif sequence is not None and sequence.is_lost and not member.start:
            self._cut(sequence, EndReason.LOST, DropReason.STATE_LOST, now_ns, commands)
            refusal = DropReason.STATE_LOST
        elif sequence is None and self._table.refuses(event, now_ns):
            refusal = DropReason.OVERLOADED
        if refusal is not None:
            commands.append(Drop(event.id, refusal))
            self._send_due(now_ns, commands)  # a sequence that has just ended may have left its slot to another
            return
        if member.start or sequence is None:
            sequence = self._table.begin(member.key, now_ns)
        request = QueuedRequest(event.id, member, now_ns)
        self._waiting[event.id] = sequence
        sequence.queue.append(request)
        if member.end:
            sequence.end = EndReason.ENDED
        if sequence.instance is None:
            if event.timeout_us:
                self._table.set_timeout(sequence, now_ns + event.timeout_us * _NS_PER_US)
        elif sequence.running is None and len(sequence.queue) == 1:
            self._table.make_ready(sequence, now_ns)
        self._send_due(now_ns, commands)
        if self._policy.queue_max and event.id in self._waiting and len(self._waiting) > self._policy.queue_max:
            self._refuse_last(sequence, now_ns, commands)

    def _refuse_last(self, sequence: Sequence, now_ns: int, commands: list[Command]) -> None:
        """Drop the latest request of a sequence: the queue is full."""
        request = sequence.queue.pop()
        del self._waiting[request.id]
        commands.append(Drop(request.id, DropReason.QUEUE_FULL))
        if request.member.start:
            sequence.end = EndReason.DROPPED
            self._table.end_if_over(sequence, now_ns)
            self._send_due(now_ns, commands)
            return
        if request.member.end:
            sequence.end = None
        if not sequence.queue and sequence.running is None and sequence.instance is not None:
            sequence.instance.ready.pop(sequence, None)
            self._table.make_idle(sequence, now_ns)

    # What ends

    def _cancel(self, id: int, now_ns: int, commands: list[Command]) -> None:
        sequence = self._waiting.get(id)
        if sequence is None:
            if id not in self._running or not self._running[id][1].is_rescheduled:
                return
            sequence, request = self._running[id]
            request.is_rescheduled = False
        self._table.abandon(sequence, now_ns)
        self._cut(sequence, EndReason.CANCELLED, DropReason.CANCELLED, now_ns, commands, spare=id)

    def _abandon(self, instance: Instance, now_ns: int, commands: list[Command]) -> None:
        for sequence in instance.rows:
            if sequence is None or not sequence.executions:
                continue
            sequence.is_lost = True
            if sequence.queue:
                self._cut(sequence, EndReason.LOST, DropReason.STATE_LOST, now_ns, commands)

    def _slot_over(self, instance: Instance, now_ns: int) -> None:
        """The batch of an instance is done."""
        finished, instance.running = instance.running, ()
        for sequence, request in finished:
            sequence.running = None
            del self._running[request.id]
            sequence.since_ns = now_ns
            if request.is_rescheduled:
                request.is_rescheduled = False
                sequence.queue.appendleft(request)
                self._waiting[request.id] = sequence
            if sequence.queue:
                self._table.make_ready(sequence, now_ns)
            elif sequence.end is None and not self._is_stopped:
                self._table.make_idle(sequence, now_ns)
            else:
                self._table.end_if_over(sequence, now_ns)

    def _cut(
        self,
        sequence: Sequence,
        why: EndReason,
        reason: DropReason,
        now_ns: int,
        commands: list[Command],
        spare: int = EMPTY_ROW,
    ) -> None:
        """End a sequence after its running request; drop its waiting requests, except the cancelled one."""
        sequence.end = why
        while sequence.queue:
            request = sequence.queue.popleft()
            del self._waiting[request.id]
            if request.id != spare:
                commands.append(Drop(request.id, reason))
        if sequence.instance is not None:
            sequence.instance.ready.pop(sequence, None)
        self._table.end_if_over(sequence, now_ns)

    def _expire(self, now_ns: int, commands: list[Command]) -> None:
        self._table.end_idle(now_ns)
        while (sequence := self._table.take_expired(now_ns)) is not None:
            self._cut(sequence, EndReason.DROPPED, DropReason.SEQUENCE_TIMEOUT, now_ns, commands)

    # What runs

    def _send_due(self, now_ns: int, commands: list[Command]) -> None:
        for instance in self._table.instances:
            instance.due_ns = None
            if not instance.is_idle or not instance.ready:
                continue
            chosen, reason = next_batch(instance, self._policy, now_ns, waits=not self._is_stopped)
            if reason is None:
                continue
            if self._policy.keeps_rows:
                ids = [EMPTY_ROW] * (1 + max(sequence.row for sequence in instance.ready))
                for sequence in chosen:
                    ids[sequence.row] = self._begin_run(sequence)
            else:
                ids = [self._begin_run(sequence) for sequence in chosen]
            instance.running = tuple(self._running[each] for each in ids if each != EMPTY_ROW)
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
