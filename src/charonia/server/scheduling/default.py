"""The scheduler of models without dynamic batching: every request runs alone, first come, first served. Pure.

A request may be a batch of its own; it is never merged with others. Of several idle instances the one that became idle
last is chosen: its code, weights and allocator are most likely to be in the caches.
"""

from typing import assert_never

from charonia.server.scheduling.api import (
    Cancel,
    CloseReason,
    Command,
    Drop,
    DropReason,
    Event,
    QueueLimits,
    Reschedule,
    Run,
    SetStateKey,
    SlotGone,
    SlotIdle,
    StateLost,
    Stop,
    StopNewSequences,
    Submit,
    Tick,
    state_line,
)
from charonia.server.scheduling.queue import RequestQueue
from charonia.server.scheduling.slots import IdleSlots


class DefaultScheduler:
    """One request per `Run`, with reason `FULL` as none can join it. Priorities and shape keys have no effect."""

    __slots__ = ("_idle", "_now_ns", "_queue", "_stopping")

    def __init__(self, limits: QueueLimits) -> None:
        self._queue = RequestQueue(limits)
        self._idle = IdleSlots()
        self._stopping = False
        self._now_ns = 0  # of the last event

    def __repr__(self) -> str:
        return state_line(self, self._idle, self._now_ns)

    @property
    def queued(self) -> int:
        """Number of requests that wait."""
        return len(self._queue.entries)

    def wake_at(self) -> int | None:
        """Return the time of the next queue timeout, or None."""
        return self._queue.next_deadline_ns() if self._queue.deadlines else None

    def slot_at_once(self) -> int | None:
        """Return the slot on which a request would run if it were submitted now, None if it would not."""
        return self._idle.next() if self._idle.by_instance and not self._stopping else None

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        """Take in one event at this monotonic time and return what follows from it, in order."""
        self._now_ns = now_ns
        commands: list[Command] = []
        expired = self._queue.expire(now_ns) if self._queue.deadlines else None
        if expired is not None:
            commands.extend(Drop(request_id, DropReason.TIMEOUT) for request_id in expired)
        match event:
            case Submit():
                self._submit(event, now_ns, commands)
            case SlotIdle():
                self._idle.add(event.slot, event.instance)
                if self._queue.entries:
                    first = self._queue.first()
                    self._queue.remove(first.id)
                    self._run(first.id, commands)
            case Cancel():
                self._queue.remove(event.id)
            case SlotGone():
                self._idle.remove(event.slot)
            case Stop():
                self._stopping = True
            case Tick() | Reschedule() | SetStateKey() | StopNewSequences() | StateLost():
                pass
            case _:
                assert_never(event)
        return commands

    def check_invariants(self) -> None:
        """Raise an AssertionError where the state contradicts itself."""
        self._idle.check_invariants()
        self._queue.check_invariants()
        assert not (self._idle.by_instance and self._queue.entries), "a request waits while a slot is idle"

    def _submit(self, request: Submit, now_ns: int, commands: list[Command]) -> None:
        if self._stopping:
            commands.append(Drop(request.id, DropReason.STOPPING))
        elif self._idle.by_instance:  # no request waits while a slot is idle
            self._run(request.id, commands)
        else:
            self._queue.add(request, 0, now_ns)
            if len(self._queue.entries) > self._queue.limit_min and self._queue.is_over_limit(request.id):
                self._queue.remove(request.id)
                commands.append(Drop(request.id, DropReason.QUEUE_FULL))

    def _run(self, id: int, commands: list[Command]) -> None:
        commands.append(Run(self._idle.take(), (id,), CloseReason.FULL))


class FailedScheduler:
    """Replaces a scheduler that raised an exception; drops every request."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<FailedScheduler>"

    @property
    def queued(self) -> int:
        """0: no request waits."""
        return 0

    def wake_at(self) -> None:
        """Return None: there are no timeouts."""

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        """Drop every request."""
        return [Drop(event.id, DropReason.SCHEDULER_FAILED)] if isinstance(event, Submit) else []

    def check_invariants(self) -> None:
        """Do nothing: there is no state."""
