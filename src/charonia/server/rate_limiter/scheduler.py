"""A scheduler whose slots need resources: it wraps another scheduler and offers it only slots that may run. Pure.

A slot requests its resources when requests wait, and is offered when it holds them; so all requests wait in the inner
scheduler, with its batches, priorities, timeouts and limits. A slot that holds its resources and has nothing to run
releases them. At most one slot is offered and unused: the inner scheduler then waits for more requests, not for slots.
Where requests are bound to slots, as in sequences, each slot is offered separately.
"""

from collections.abc import Callable, Mapping

from charonia.server.rate_limiter.resources import Arbiter, Member, MemberState
from charonia.server.scheduling.api import Command, Event, Run, Scheduler, SlotGone, SlotIdle


class LimitedScheduler:
    """A wrapper for any scheduler, whose slots hold resources while they run.

    Args:
        inner: The scheduler of requests.
        members: The members by slot.
        arbiter: Distributes the resources. When it lets a member run later, send a `Tick`.
        wants: Whether the inner scheduler has a request for a slot, if requests are bound to slots; None if they may
            run on any.
    """

    __slots__ = ("_arbiter", "_idle", "_inner", "_members", "_offered", "_short_ns", "_short_since_ns", "_wants")

    def __init__(
        self,
        inner: Scheduler,
        members: Mapping[int, Member],
        arbiter: Arbiter,
        *,
        wants: Callable[[int], bool] | None = None,
    ) -> None:
        self._inner = inner
        self._members = members
        self._arbiter = arbiter
        self._wants = wants
        self._idle: dict[int, None] = {}  # not offered to the inner scheduler
        self._offered: dict[int, None] = {}
        self._short_ns = 0
        self._short_since_ns: int | None = None

    @property
    def queued(self) -> int:
        return self._inner.queued

    def wake_at(self) -> int | None:
        return self._inner.wake_at()

    def short_ns(self, now_ns: int) -> int:
        """Return how long slots that requests needed have waited for their resources so far."""
        return self._short_ns + (now_ns - self._short_since_ns if self._short_since_ns is not None else 0)

    def __repr__(self) -> str:
        waiting = sum(member.state is MemberState.WAITING for member in self._members.values())
        counts = f"idle {len(self._idle)} | offered {len(self._offered)} | wait for resources {waiting}"
        return f"<LimitedScheduler [{counts} | {self._inner!r}]>"

    def check_invariants(self) -> None:
        """Raise an AssertionError where the state contradicts itself."""
        self._inner.check_invariants()
        assert not self._idle.keys() & self._offered.keys()
        for slot in self._offered:
            assert self._members[slot].state is MemberState.RUNNING, f"slot {slot} is offered without its resources"

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        commands: list[Command] = []
        if isinstance(event, SlotIdle):
            self._note(self._inner.handle(SlotGone(event.slot), now_ns), commands)  # its batch is done
            self._idle[event.slot] = None
            self._finish(event.slot)
        elif isinstance(event, SlotGone):
            self._note(self._inner.handle(event, now_ns), commands)  # its batch may be rescheduled
            self._arbiter.stop(self._members[event.slot])
            self._idle.pop(event.slot, None)
            self._offered.pop(event.slot, None)
        else:
            self._note(self._inner.handle(event, now_ns), commands)
        self._settle(now_ns, commands)
        self._short_ns = self.short_ns(now_ns)
        is_short = any(self._members[slot].state is MemberState.WAITING for slot in self._idle)
        self._short_since_ns = now_ns if is_short else None
        return commands

    def _settle(self, now_ns: int, commands: list[Command]) -> None:
        """Offer slots with resources, request resources for as many slots as requests wait, and release unused ones."""
        if self._wants is not None:
            self._settle_each(self._wants, now_ns, commands)
            return
        for slot in [slot for slot in self._idle if self._members[slot].state is MemberState.RUNNING]:
            self._offer(slot, now_ns, commands)
        waiting = [slot for slot in self._idle if self._members[slot].state is MemberState.WAITING]
        while len(waiting) > self._wanted():
            self._arbiter.stop(self._members[waiting.pop()])
        resting = sorted((s for s in self._idle if s not in waiting), key=lambda slot: self._members[slot].turn)
        for slot in resting:
            if len(waiting) >= self._wanted():
                break
            if self._arbiter.request(self._members[slot]):
                self._offer(slot, now_ns, commands)
            else:
                waiting.append(slot)
        if not self._inner.queued:
            for slot in tuple(self._offered):
                self._take_back(slot, now_ns, commands)

    def _settle_each(self, wants: Callable[[int], bool], now_ns: int, commands: list[Command]) -> None:
        """Do the same where requests are bound to slots: each is settled on its own."""
        for slot in tuple(self._offered):
            if not wants(slot):
                self._take_back(slot, now_ns, commands)
        for slot in tuple(self._idle):
            member = self._members[slot]
            if not wants(slot):
                self._arbiter.stop(member, unused=True)
            elif member.state is MemberState.RUNNING or (
                member.state is MemberState.IDLE and self._arbiter.request(member)
            ):
                self._offer(slot, now_ns, commands)

    def _finish(self, slot: int) -> None:
        """Release the resources of a slot; if more requests wait, it immediately competes for them again."""
        member = self._members[slot]
        if self._wants is not None:
            is_needed = self._wants(slot)
        else:
            waiting = sum(self._members[other].state is MemberState.WAITING for other in self._idle)
            is_needed = waiting < self._wanted()
        if is_needed:
            self._arbiter.request(member)
        else:
            self._arbiter.stop(member)

    def _wanted(self) -> int:
        return 0 if self._offered else self._inner.queued

    def _offer(self, slot: int, now_ns: int, commands: list[Command]) -> None:
        del self._idle[slot]
        self._offered[slot] = None
        self._note(self._inner.handle(SlotIdle(slot), now_ns), commands)

    def _take_back(self, slot: int, now_ns: int, commands: list[Command]) -> None:
        """Withdraw the offer of a slot and release its resources."""
        if slot in self._offered:
            del self._offered[slot]
            self._note(self._inner.handle(SlotGone(slot), now_ns), commands)
            self._arbiter.stop(self._members[slot], unused=True)
            self._idle[slot] = None

    def _note(self, found: list[Command], commands: list[Command]) -> None:
        for command in found:
            if isinstance(command, Run):
                self._offered.pop(command.slot, None)
        commands.extend(found)
