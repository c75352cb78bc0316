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
    SlotGone,
    SlotIdle,
    Stop,
    Submit,
    Tick,
)
from charonia.server.scheduling.queue import WaitingLine
from charonia.server.scheduling.slots import IdleSlots


class DefaultScheduler:
    """One request a `Run`, with reason `FULL` since nothing can join it. Priorities and shape keys have no effect."""

    __slots__ = ("_idle", "_line", "_stopping")

    def __init__(self, limits: QueueLimits) -> None:
        self._line = WaitingLine(limits)
        self._idle = IdleSlots()
        self._stopping = False

    @property
    def queued(self) -> int:
        """Number of requests that wait."""
        return len(self._line)

    def wake_at(self) -> int | None:
        """Return the time of the next queue timeout, or None."""
        return self._line.next_deadline_ns() if self._line.deadlines else None

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        """Take in one event at this monotonic time and return what follows from it, in order."""
        commands: list[Command] = []
        expired = self._line.expire(now_ns) if self._line.deadlines else None
        if expired is not None:
            commands.extend(Drop(request_id, DropReason.TIMEOUT) for request_id in expired)
        match event:
            case Submit():
                self._submit(event, now_ns, commands)
            case SlotIdle():
                self._idle.add(event.slot, event.lane)
                if self._line:
                    first = self._line.first()
                    self._line.remove(first.id)
                    self._run(first.id, commands)
            case Cancel():
                self._line.remove(event.id)
            case SlotGone():
                self._idle.remove(event.slot)
            case Stop():
                self._stopping = True
            case Tick():
                pass
            case _:
                assert_never(event)
        return commands

    def _submit(self, request: Submit, now_ns: int, commands: list[Command]) -> None:
        if self._stopping:
            commands.append(Drop(request.id, DropReason.STOPPING))
        elif self._idle:  # nobody waits while a slot is idle
            self._run(request.id, commands)
        else:
            self._line.add(request, 0, now_ns)
            if self._line.is_over_limit(request.id):
                self._line.remove(request.id)
                commands.append(Drop(request.id, DropReason.QUEUE_FULL))

    def _run(self, id: int, commands: list[Command]) -> None:
        commands.append(Run(self._idle.take(), (id,), CloseReason.FULL))
