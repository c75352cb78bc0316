"""Slots: how many concurrent batches the instances of a model may have, and where the next batch goes. Pure.

The *capacity* of an instance is the limit of its concurrent batches: the running one and the batches in its own queue.
A *slot* is the scheduler's unit of capacity: room for one batch on one instance. Of n instances, slot s belongs to
instance s % n: the first n slots are the first of each instance, the next n the second, and so on.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

from charonia.server.scheduling.api import SlotIdle, SlotRemoved

CAPACITY_MAX: Final = 16
"""Most concurrent batches of all instances of a model in other processes."""

CAPACITY_MAX_BATCHED: Final = 2
"""Most batches of an instance if the scheduler forms batches: the longer requests wait there, the larger the batch."""

SUPPLY_NS_MAX: Final = 1_000_000
"""Largest average total duration of the concurrent batches of an instance in another process."""


def capacity_limit(instances: int, *, batches: bool) -> int:
    """Return the highest capacity of each of this number of instances; `batches` if the scheduler forms batches."""
    return CAPACITY_MAX_BATCHED if batches else max(2, CAPACITY_MAX // instances)


class CapacityRule:
    """Decides the capacity of an instance from measured times.

    A batch in the instance's own queue cannot move to another instance that becomes free earlier, so the capacity is
    more than 1 only if an execution takes less time than sending the batch to a free instance.
    """

    __slots__ = ("_limit", "_mean_ns", "capacity")

    def __init__(self, limit: int = CAPACITY_MAX) -> None:
        self.capacity = min(1, limit)
        self._limit = limit
        self._mean_ns = SUPPLY_NS_MAX

    def limit(self, capacity: int) -> None:
        """Limit the capacity, regardless of measurements."""
        self._limit = min(capacity, self._limit)
        self.capacity = min(self.capacity, self._limit)

    def record_duration(self, duration_ns: int) -> None:
        """Take in the duration of an execution."""
        self._mean_ns = mean_ns = self._mean_ns + (duration_ns - self._mean_ns) // 8
        if 2 * self.capacity * mean_ns <= SUPPLY_NS_MAX:
            self.capacity = min(2 * self.capacity, self._limit)
        while self.capacity > 1 and self.capacity * mean_ns > 2 * SUPPLY_NS_MAX:
            self.capacity //= 2


class SlotState(Enum):
    """The state of a slot."""

    PARKED = "parked"  # beyond its instance's capacity
    FREE = "free"  # can be offered to the scheduler
    OFFERED = "offered"  # idle, and the scheduler knows
    RUNNING = "running"  # has a batch


class SlotChange(NamedTuple):
    """Changes of slots.

    Attributes:
        free: Slots to offer, now or soon.
        gone: Events to send to the scheduler immediately.
    """

    free: tuple[int, ...] = ()
    gone: tuple[SlotRemoved, ...] = ()


class Slots:
    """The slots of a model's instances, and which of them its scheduler may use.

    Invariants:

    1. A slot runs at most one batch, and only after it was offered.
    2. A slot within its instance's capacity is not parked; one beyond it is parked unless it runs.
    3. The scheduler gets an event for each slot that it loses.

    Args:
        limits: The highest capacity of each instance, also of instances yet to be added.
        absent: How many of them, the last ones, are yet to come (`add`).

    Attributes:
        running: Number of running slots.
    """

    __slots__ = ("_again", "_capacities", "_count", "_events", "_limits", "_rules", "_states", "running")

    def __init__(self, limits: Sequence[int], absent: int = 0) -> None:
        count = len(limits)
        slots = range(count * max(limits))
        self.running = 0
        self._count = count
        self._limits = list(limits)
        self._capacities = [1] * count
        self._rules = [CapacityRule(limit) if limit > 1 else None for limit in limits]
        self._events = [SlotIdle(slot, slot % count) for slot in slots]
        self._again = [SlotChange((slot,)) for slot in slots]
        self._states = [SlotState.FREE if slot < count else SlotState.PARKED for slot in slots]
        for instance in range(count - absent, count):
            self.remove(instance)

    def __repr__(self) -> str:
        idle = sum(state is SlotState.OFFERED for state in self._states)
        return f"<Slots [running {self.running} | idle {idle} | capacity {'+'.join(map(str, self._capacities))}]>"

    def instance_of(self, slot: int) -> int:
        return slot % self._count

    def offer(self, slot: int) -> SlotIdle | None:
        """Return the event for the scheduler that offers a free slot; None if it is no longer free."""
        if self._states[slot] is not SlotState.FREE:
            return None
        self._states[slot] = SlotState.OFFERED
        return self._events[slot]

    def begin(self, slot: int) -> None:
        """The scheduler sends a batch to a slot.

        Raises:
            RuntimeError: The slot was not offered: the scheduler is at fault.
        """
        if self._states[slot] is not SlotState.OFFERED:
            raise RuntimeError(f"slot {slot} was given a batch while it was {self._states[slot].value}")
        self._states[slot] = SlotState.RUNNING
        self.running += 1

    def end(self, slot: int, compute_ns: int) -> SlotChange:
        """The batch of a slot is done; it computed for `compute_ns`."""
        self.running -= 1
        instance = slot % self._count
        rule = self._rules[instance]
        self._states[slot] = SlotState.FREE
        if rule is None:
            return self._again[slot]
        rule.record_duration(compute_ns)
        if rule.capacity == self._capacities[instance]:
            if slot < self._count * rule.capacity:
                return self._again[slot]
            self._states[slot] = SlotState.PARKED
            return SlotChange(gone=(SlotRemoved(slot),))
        free, gone = self._resize(instance, rule.capacity)
        return SlotChange((slot, *free) if self._states[slot] is SlotState.FREE else free, gone)

    def ran(self, slot: int, compute_ns: int) -> SlotChange:
        """The scheduler sent a batch to a slot, and it is done already: `begin` and `end` in one."""
        self.begin(slot)
        return self.end(slot, compute_ns)

    def add(self, instance: int) -> SlotChange:
        """An instance that was absent can take batches."""
        limit = self._limits[instance]
        self._rules[instance] = CapacityRule(limit) if limit > 1 else None
        return self._resize(instance, 1)

    def remove(self, instance: int) -> SlotChange:
        """An instance takes no more batches; one that runs is finished."""
        self._rules[instance] = CapacityRule(0)
        return self._resize(instance, 0)

    def is_free(self, instance: int) -> bool:
        """Whether an instance is there and runs nothing."""
        states = self._states[instance :: self._count]
        return bool(self._capacities[instance]) and SlotState.RUNNING not in states

    def limit(self, capacity: int) -> SlotChange:
        """Limit the capacity of every instance from now on."""
        self._limits = [min(limit, capacity) for limit in self._limits]
        gone: list[SlotRemoved] = []
        for instance, rule in enumerate(self._rules):
            if rule is not None:
                rule.limit(capacity)
                gone += self._resize(instance, rule.capacity).gone
        return SlotChange(gone=tuple(gone))

    def check_invariants(self) -> None:
        """Raise an AssertionError where an invariant does not hold."""
        assert self.running == sum(state is SlotState.RUNNING for state in self._states)
        for slot, state in enumerate(self._states):
            if slot < self._count * self._capacities[slot % self._count]:
                assert state is not SlotState.PARKED, f"slot {slot} is parked within its instance's capacity"
            else:
                assert state in (SlotState.PARKED, SlotState.RUNNING), f"slot {slot} is beyond its instance's capacity"

    def _resize(self, instance: int, capacity: int) -> SlotChange:
        self._capacities[instance] = capacity
        free: list[int] = []
        gone: list[SlotRemoved] = []
        for slot in range(instance, len(self._states), self._count):
            state = self._states[slot]
            if slot < self._count * capacity:
                if state is SlotState.PARKED:
                    self._states[slot] = SlotState.FREE
                    free.append(slot)
            elif state is SlotState.FREE or state is SlotState.OFFERED:
                self._states[slot] = SlotState.PARKED
                gone.append(SlotRemoved(slot))
        return SlotChange(tuple(free), tuple(gone))


class IdleSlots:
    """The idle slots. A batch gets one of the instance with the fewest batches; of several, the last to become idle.

    A batch must not wait in the queue of one instance while another one is idle.

    Attributes:
        by_instance: Idle slots by instance; instances and slots that became idle last are last.
    """

    __slots__ = ("_busy", "by_instance")

    def __init__(self) -> None:
        self.by_instance: dict[int, dict[int, None]] = {}
        self._busy: dict[int, int] = {}  # instance by busy slot

    def __str__(self) -> str:
        count = self.count
        return f"idle {count} of {count + len(self._busy)}"

    @property
    def count(self) -> int:
        return sum(map(len, self.by_instance.values()))

    def add(self, slot: int, instance: int) -> None:
        """A slot of this instance became idle."""
        self._busy.pop(slot, None)
        slots = self.by_instance.pop(instance, None)
        if slots is None:
            slots = {}
        slots[slot] = None
        self.by_instance[instance] = slots

    def remove(self, slot: int) -> None:
        """A slot is gone, idle or not."""
        self._busy.pop(slot, None)
        for instance, slots in self.by_instance.items():
            if slot in slots:
                del slots[slot]
                if not slots:
                    del self.by_instance[instance]
                return

    def next(self) -> int:
        """Return the slot for the next batch; there must be one."""
        idle = self.by_instance
        return next(reversed(idle[self._instance() if len(idle) > 1 else next(iter(idle))]))

    def take(self) -> int:
        """Take the slot for the next batch; there must be one."""
        instance = self._instance()
        slots = self.by_instance[instance]
        slot, _ = slots.popitem()
        if not slots:
            del self.by_instance[instance]
        self._busy[slot] = instance
        return slot

    def _instance(self) -> int:
        idle = self.by_instance
        if len(idle) > 1 and self._busy:
            busy = list(self._busy.values())
            return min(reversed(idle), key=busy.count)
        return next(reversed(idle))

    def check_invariants(self) -> None:
        """Raise an AssertionError where a slot is idle and busy, or an instance is listed without an idle slot."""
        idle = [slot for slots in self.by_instance.values() for slot in slots]
        assert all(self.by_instance.values())
        assert len(idle) == len({*idle, *self._busy}) - len(self._busy)
