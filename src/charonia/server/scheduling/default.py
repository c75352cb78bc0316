"""The scheduler of models without batching by the server: every request runs alone, first come, first served. Pure.

A request may bring a batch of its own; it is never merged with others. Where several instances are idle, the one that
became idle last is taken: its code, weights and allocator are the likeliest to be warm in the caches.
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
    Run,
    RunAgain,
    ShareBy,
    SlotGone,
    SlotIdle,
    Stop,
    Submit,
    TakeNoNew,
    Tick,
    state_line,
)
from charonia.server.scheduling.queue import WaitingLine
from charonia.server.scheduling.slots import IdleSlots


class DefaultScheduler:
    """One request a `Run`, with reason `FULL` since nothing can join it. Priorities and shape keys have no effect."""

    __slots__ = ("_idle", "_line", "_now_ns", "_stopping")

    def __init__(self, limits: QueueLimits) -> None:
        self._line = WaitingLine(limits)
        self._idle = IdleSlots()
        self._stopping = False
        self._now_ns = 0  # of the last event

    def __repr__(self) -> str:
        return state_line(self, self._idle, self._now_ns)

    @property
    def queued(self) -> int:
        """Number of requests that wait."""
        return len(self._line.entries)

    def wake_at(self) -> int | None:
        """Return the time of the next queue timeout, or None."""
        return self._line.next_deadline_ns() if self._line.deadlines else None

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        """Take in one event at this monotonic time and return what follows from it, in order."""
        self._now_ns = now_ns
        commands: list[Command] = []
        expired = self._line.expire(now_ns) if self._line.deadlines else None
        if expired is not None:
            commands.extend(Drop(request_id, DropReason.TIMEOUT) for request_id in expired)
        match event:
            case Submit():
                self._submit(event, now_ns, commands)
            case SlotIdle():
                self._idle.add(event.slot, event.instance)
                if self._line.entries:
                    first = self._line.first()
                    self._line.remove(first.id)
                    self._run(first.id, commands)
            case Cancel():
                self._line.remove(event.id)
            case SlotGone():
                self._idle.remove(event.slot)
            case Stop():
                self._stopping = True
            case Tick() | RunAgain() | ShareBy() | TakeNoNew():
                pass
            case _:
                assert_never(event)
        return commands

    def check_invariants(self) -> None:
        """Raise an AssertionError where the state contradicts itself."""
        self._idle.check_invariants()
        self._line.check_invariants()
        assert not (self._idle.by_instance and self._line.entries), "a request waits while a slot is idle"

    def _submit(self, request: Submit, now_ns: int, commands: list[Command]) -> None:
        if self._stopping:
            commands.append(Drop(request.id, DropReason.STOPPING))
        elif self._idle.by_instance:  # no request waits while a slot is idle
            self._run(request.id, commands)
        else:
            self._line.add(request, 0, now_ns)
            if len(self._line.entries) > self._line.limit_min and self._line.is_over_limit(request.id):
                self._line.remove(request.id)
                commands.append(Drop(request.id, DropReason.QUEUE_FULL))

    def _run(self, id: int, commands: list[Command]) -> None:
        commands.append(Run(self._idle.take(), (id,), CloseReason.FULL))


class FailedScheduler:
    """Takes the place of a scheduler that failed: it refuses every request."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<FailedScheduler>"

    @property
    def queued(self) -> int:
        """Nothing waits."""
        return 0

    def wake_at(self) -> None:
        """Nothing is due."""

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        """Refuse what is submitted."""
        return [Drop(event.id, DropReason.SCHEDULER_FAILED)] if isinstance(event, Submit) else []

    def check_invariants(self) -> None:
        """There are none."""
