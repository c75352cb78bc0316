"""Shares counted resources among instances: which of them may run when there is not enough for all.

A pool is a resource of one device, or of the whole server. An instance holds the units that it needs of every pool from
the moment it may run until it is done. Its turn is its number of executions times its priority, so under contention an
instance of priority p runs 1/p as often as one of priority 1. The waiting instance with the lowest turn comes first.

1. A pool is never held beyond its capacity. An instance acquires all its units together, or none.
2. The pools that a waiting instance needs are reserved for it; instances behind it that need only others overtake it.
3. An instance that was idle gets no credit for that: it starts at the lowest turn of its rivals.
4. An instance that was overtaken `PASSED_FACTOR` times as often as its share explains comes first: none starves.

Source: Triton's rate limiter, whose order is executions times priority; 3 and 4 are additions. Pure.

`LimitedScheduler` wraps a scheduler and offers it only slots that may run. A slot requests its resources when requests
wait, and is offered when it holds them; so all requests wait in the inner scheduler, with its batches, priorities,
timeouts and limits. A slot that holds its resources and has nothing to run releases them. At most one slot is offered
and unused: the inner scheduler then waits for more requests, not for slots. Where requests are bound to slots, as in
sequences, each slot is offered separately.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from charonia.core.errors import ServingError, invalid
from charonia.server.rate_limiter.options import ResourceLimit
from charonia.server.scheduling.api import Command, Event, Run, Scheduler, SlotIdle, SlotRemoved

SERVER_WIDE = -1
"""Device of a pool that all devices share."""

PASSED_FACTOR = 2
"""How many times their share of grants the rivals of a waiting instance may get."""


class ResourcePool(NamedTuple):
    """A resource of one device, or of the server where `device` is `SERVER_WIDE`."""

    name: str
    device: int


class Need(NamedTuple):
    """The units that an instance needs of a pool; `path` is the place in its configuration."""

    pool: ResourcePool
    units: int
    path: str = ""


class MemberState(Enum):
    """State of a member."""

    IDLE = "idle"
    WAITING = "waiting"
    RUNNING = "running"


@dataclass(slots=True, eq=False)
class Member:
    """An instance that competes for resources.

    Attributes:
        version: The version, as text.
        instance: Its name.
        needs: The units that it holds while it runs; each pool at most once.
        priority: Weight of its executions, at least 1.
        granted: Called when another member's change lets it run; must not call the arbiter directly.
        turn: Executions times priority, plus the turn at which it joined.
        executions: Number of executions.
        passed: Grants to its rivals while it has been waiting.
    """

    model: str
    version: str
    instance: str
    needs: tuple[Need, ...] = ()
    priority: int = 1
    granted: Callable[[], None] = field(default=lambda: None, repr=False)
    state: MemberState = MemberState.IDLE
    turn: int = 0
    executions: int = 0
    passed: int = 0

    @property
    def start(self) -> int:
        """Its turn at the last grant, or its turn now if it is waiting."""
        return self.turn - self.priority if self.state is MemberState.RUNNING else self.turn

    @property
    def pools(self) -> frozenset[ResourcePool]:
        return frozenset(need.pool for need in self.needs)


class Arbiter:
    """Decides which member is next, and keeps account of the pools."""

    def __init__(self, limits: Iterable[ResourceLimit] = ()) -> None:
        self._limits = {(limit.name, limit.device): limit.count for limit in limits}
        self._members: dict[Member, frozenset[ResourcePool]] = {}
        self._competitors: dict[Member, tuple[Member, ...]] = {}
        self._waiting: dict[Member, None] = {}
        self._held: Counter[ResourcePool] = Counter()
        self._capacity: dict[ResourcePool, int] = {}

    @property
    def members(self) -> Sequence[Member]:
        """All members, in the order in which they joined."""
        return tuple(self._members)

    @property
    def capacity(self) -> Mapping[ResourcePool, int]:
        return self._capacity

    @property
    def held(self) -> Mapping[ResourcePool, int]:
        return {pool: self._held[pool] for pool in self._capacity}

    def is_explicit(self, pool: ResourcePool) -> bool:
        """Whether a pool's capacity was set; otherwise it is the most that an instance needs."""
        return self._limit(pool) is not None

    def join(self, members: Sequence[Member]) -> None:
        """Add instances: all of them or, on an error, none.

        Raises:
            ServingError: INVALID_ARG, beginning with the path: one could never run, or a resource is of one device for
                one model and of the server for another.
        """
        mine = {member.model for member in members}
        others = {pool for member, pools in self._members.items() if member.model not in mine for pool in pools}
        kinds: dict[str, set[bool]] = {}
        for pool in others.union(*(member.pools for member in members)):
            kinds.setdefault(pool.name, set()).add(pool.device == SERVER_WIDE)
        for need in (need for member in members for need in member.needs):
            if len(kinds[need.pool.name]) > 1:
                raise _ambiguous(need)
            limit = self._limit(need.pool)
            if limit is not None and limit < need.units:
                raise _too_small(need, limit)
        for member in members:
            self._members[member] = member.pools
        self._measure()
        self._grant()

    def leave(self, members: Iterable[Member]) -> None:
        """Remove instances, and release their resources."""
        for member in members:
            self.stop(member)
            self._members.pop(member, None)
        self._measure()
        self._grant()

    def request(self, member: Member) -> bool:
        """Request to run an instance; return whether it may run immediately.

        An instance that has just run releases its resources first and competes for them again.
        """
        if self._release(member) is MemberState.IDLE:
            starts = [rival.start for rival in self._competitors[member] if rival.state is not MemberState.IDLE]
            member.turn = max(member.turn, min(starts, default=0))
        member.state, member.passed = MemberState.WAITING, 0
        self._waiting[member] = None
        self._grant(asking=member)
        return member.state is MemberState.RUNNING

    def stop(self, member: Member, *, unused: bool = False) -> None:
        """An instance is done, or withdraws its request to run.

        Args:
            member: The instance, in any state.
            unused: Whether it had nothing to run: the execution does not count.
        """
        state = self._release(member)
        if unused and state is MemberState.RUNNING:
            member.turn -= member.priority
            member.executions -= 1
        if state is not MemberState.IDLE:
            self._grant()

    def waited_for(self, members: Collection[Member]) -> dict[ResourcePool, set[Member]]:
        """Return the pools for which these instances wait, and the holders of each, or else the members ahead."""
        found: dict[ResourcePool, set[Member]] = {}
        ahead: list[Member] = []
        for member in sorted(self._waiting, key=self._rank):
            if member in members:
                reserved = frozenset[ResourcePool]().union(*(self._members[other] for other in ahead))
                for pool in self._short_of(member) or self._members[member] & reserved:
                    users = {other for other, pools in self._members.items() if pool in pools}
                    holders = {other for other in users if other.state is MemberState.RUNNING}
                    found.setdefault(pool, set()).update(holders or users.intersection(ahead))
            ahead.append(member)
        return found

    def is_blocked_by(self, member: Member, holders: Iterable[Member]) -> bool:
        """Whether an instance cannot run while these hold their resources."""
        kept = Counter[ResourcePool]()
        for holder in holders:
            for need in holder.needs:
                kept[need.pool] += need.units
        return any(self._capacity.get(need.pool, 0) - kept[need.pool] < need.units for need in member.needs)

    def _release(self, member: Member) -> MemberState:
        """Make a member idle, and return its previous state."""
        state, member.state = member.state, MemberState.IDLE
        if state is MemberState.WAITING:
            del self._waiting[member]
        elif state is MemberState.RUNNING:
            for need in member.needs:
                self._held[need.pool] -= need.units
        return state

    def _grant(self, asking: Member | None = None) -> None:
        """Let all members run that can; call each of them but `asking`."""
        reserved: set[ResourcePool] = set()
        for member in sorted(self._waiting, key=self._rank):
            pools = self._members[member]
            if pools.isdisjoint(reserved) and not self._short_of(member):
                self._start(member)
                if member is not asking:
                    member.granted()
            else:
                reserved |= pools

    def _short_of(self, member: Member) -> set[ResourcePool]:
        return {need.pool for need in member.needs if self._capacity[need.pool] - self._held[need.pool] < need.units}

    def _start(self, member: Member) -> None:
        del self._waiting[member]
        for rival in self._competitors[member]:
            rival.passed += 1
        for need in member.needs:
            self._held[need.pool] += need.units
        member.state = MemberState.RUNNING
        member.turn += member.priority
        member.executions += 1

    def _rank(self, member: Member) -> tuple[bool, int]:
        is_overdue = member.passed > PASSED_FACTOR * member.priority * len(self._competitors[member])
        return not is_overdue, -member.passed if is_overdue else member.turn

    def _measure(self) -> None:
        """Determine rivals and capacities: the explicit limit, else the most that one instance needs."""
        members = self._members.items()
        self._competitors = {
            member: tuple(rival for rival, theirs in members if rival is not member and not pools.isdisjoint(theirs))
            for member, pools in members
        }
        most: Counter[ResourcePool] = Counter()
        for member in self._members:
            for need in member.needs:
                most[need.pool] = max(most[need.pool], need.units)
        self._capacity = {pool: self._limit(pool) or count for pool, count in most.items()}

    def _limit(self, pool: ResourcePool) -> int | None:
        if pool.device == SERVER_WIDE:  # the device of its limit has no meaning
            return next((count for (name, _), count in self._limits.items() if name == pool.name), None)
        return self._limits.get((pool.name, pool.device), self._limits.get((pool.name, None)))


def _too_small(need: Need, limit: int) -> ServingError:
    return invalid(
        f'{need.path}: Resource count for "{need.pool.name}" is limited to {limit} which will prevent scheduling of '
        f"one or more model instances, the minimum required count is {need.units}",
        hint=f"--rate-limit-resource={need.pool.name}:{need.units}",
    )


def _ambiguous(need: Need) -> ServingError:
    return invalid(
        f'{need.path}: Resource "{need.pool.name}" is present as both global and device-specific resource in the model '
        "configuration.",
        hint="give one of them another name",
    )


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
            self._note(self._inner.handle(SlotRemoved(event.slot), now_ns), commands)  # its batch is done
            self._idle[event.slot] = None
            self._finish(event.slot)
        elif isinstance(event, SlotRemoved):
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
            self._note(self._inner.handle(SlotRemoved(slot), now_ns), commands)
            self._arbiter.stop(self._members[slot], unused=True)
            self._idle[slot] = None

    def _note(self, found: list[Command], commands: list[Command]) -> None:
        for command in found:
            if isinstance(command, Run):
                self._offered.pop(command.slot, None)
        commands.extend(found)
