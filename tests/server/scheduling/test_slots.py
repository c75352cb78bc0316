"""How many batches an instance has at once, and which slot the next one goes to."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.server.scheduling.api import SlotIdle, SlotRemoved
from charonia.server.scheduling.slots import (
    CAPACITY_MAX,
    CAPACITY_MAX_BATCHED,
    SUPPLY_NS_MAX,
    CapacityRule,
    IdleSlots,
    SlotChange,
    Slots,
    capacity_limit,
)

SHORT = SUPPLY_NS_MAX // (4 * CAPACITY_MAX)
LONG = 100 * SUPPLY_NS_MAX


def idle(*slots: tuple[int, int]) -> IdleSlots:
    made = IdleSlots()
    for slot, instance in slots:
        made.add(slot, instance)
    return made


def test_of_idle_instances_the_one_used_last_is_next() -> None:
    slots = idle((0, 0), (1, 1), (2, 2))

    taken = [slots.take(), slots.take(), slots.take()]

    assert taken == [2, 1, 0]
    assert not slots.by_instance


def test_an_idle_instance_comes_before_the_queue_of_a_busy_one() -> None:
    slots = idle((0, 0), (1, 1), (2, 0), (3, 1))

    assert [slots.take() % 2 for _ in range(4)] == [1, 0, 1, 0]


def test_the_shorter_line_is_next_also_when_the_longer_one_got_a_slot_back() -> None:
    slots = idle((0, 0), (2, 0), (4, 0), (1, 1), (3, 1))
    first = [slots.take() for _ in range(4)]
    slots.add(3, 1)

    assert [slot % 2 for slot in first] == [1, 0, 1, 0]
    assert slots.take() == 3


def test_a_slot_that_is_gone_is_not_given_and_does_not_count_as_busy() -> None:
    slots = idle((0, 0), (1, 1), (2, 0))
    assert slots.take() == 2
    slots.remove(2)
    slots.remove(1)
    slots.remove(7)

    assert slots.take() == 0
    assert not slots.by_instance


@given(
    instances=st.integers(1, 4),
    capacity=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(["take", "back", "remove"]), st.integers(0, 15)), max_size=60),
)
def test_every_slot_is_idle_or_taken_and_lines_are_never_uneven_without_need(
    instances: int, capacity: int, steps: list[tuple[str, int]]
) -> None:
    slots = idle(*((slot, slot % instances) for slot in range(instances * capacity)))
    free, taken = set(range(instances * capacity)), list[int]()

    for action, number in steps:
        if action == "take" and free:
            lines = [sum(slot % instances == instance for slot in taken) for instance in range(instances)]
            slot = slots.take()
            assert slot in free
            assert lines[slot % instances] == min(lines[s % instances] for s in free)
            free.remove(slot)
            taken.append(slot)
        elif action == "back" and taken:
            slot = taken.pop(number % len(taken))
            slots.add(slot, slot % instances)
            free.add(slot)
        elif action == "remove":
            slots.remove(number)
            free.discard(number)
            taken = [slot for slot in taken if slot != number]
        assert bool(slots.by_instance) == bool(free)


def capacity_rule(durations_ns: Iterable[int]) -> CapacityRule:
    rule = CapacityRule()
    for duration in durations_ns:
        rule.record_duration(duration)
    return rule


def test_an_instance_is_not_handed_batches_ahead_before_its_executions_are_known_to_be_short() -> None:
    assert CapacityRule().capacity == 1
    assert capacity_rule([SHORT]).capacity == 1
    assert capacity_rule([SHORT] * 60).capacity == CAPACITY_MAX
    assert capacity_rule([LONG] * 60).capacity == 1


@pytest.mark.parametrize(("share", "capacity"), [(1, 1), (2, 2), (3, 2), (4, 4), (15, 8), (16, 16), (1000, 16)])
def test_what_is_handed_over_computes_no_longer_than_the_limit(share: int, capacity: int) -> None:
    assert capacity_rule([SUPPLY_NS_MAX // share - 1] * 100).capacity == capacity


def test_a_mean_between_two_limits_leaves_things_as_they_are() -> None:
    between = [SUPPLY_NS_MAX // CAPACITY_MAX * 3 // 2] * 50
    assert capacity_rule(between).capacity == CAPACITY_MAX // 2
    assert capacity_rule([SHORT] * 60 + between).capacity == CAPACITY_MAX


def test_one_execution_that_is_a_little_longer_changes_nothing_and_a_very_long_one_does() -> None:
    assert capacity_rule([SHORT] * 60 + [SUPPLY_NS_MAX // 2]).capacity == CAPACITY_MAX
    assert capacity_rule([SHORT] * 60 + [LONG]).capacity == 1


def test_a_limit_holds_regardless_of_measurements_and_is_never_raised() -> None:
    rule = capacity_rule([SHORT] * 60)
    depths = []
    for limit in (3, 8, 1, 16):
        rule.limit(limit)
        for _ in range(60):
            rule.record_duration(SHORT)
        depths.append(rule.capacity)
    assert depths == [3, 3, 1, 1]


@given(st.lists(st.integers(0, 10 * SUPPLY_NS_MAX), max_size=200), st.integers(0, SHORT))
def test_enough_short_executions_always_raise_the_capacity(durations_ns: list[int], short_ns: int) -> None:
    assert capacity_rule([*durations_ns, *[short_ns] * 100]).capacity == CAPACITY_MAX
    assert capacity_rule([*durations_ns, *[10 * SUPPLY_NS_MAX] * 100]).capacity == 1


def test_a_model_that_batches_keeps_its_lines_short_and_instances_share_a_number_of_batches() -> None:
    assert capacity_limit(1, batches=True) == CAPACITY_MAX_BATCHED
    assert [capacity_limit(n, batches=False) for n in (1, 2, 4, 8, 100)] == [16, 8, 4, 2, 2]


def run_once(slots: Slots, slot: int, compute_ns: int) -> SlotChange:
    slots.offer(slot)
    slots.begin(slot)
    return slots.end(slot, compute_ns)


def test_an_instance_of_capacity_one_has_its_slot_back_after_each_batch() -> None:
    slots = Slots([1, 1])

    assert slots.offer(1) == SlotIdle(1, 1)
    assert slots.offer(1) is None
    slots.begin(1)
    assert slots.running == 1
    assert slots.end(1, SHORT) == SlotChange((1,))
    assert slots.running == 0


def test_a_batch_for_a_slot_that_was_not_offered_is_the_schedulers_fault() -> None:
    slots = Slots([2, 2])
    slots.offer(1)
    slots.begin(1)

    for slot, state in ((0, "free"), (1, "running"), (2, "parked")):
        with pytest.raises(RuntimeError, match=f"slot {slot} was given a batch while it was {state}"):
            slots.begin(slot)


def test_slots_are_added_while_executions_are_short_and_taken_back_when_they_get_long() -> None:
    slots = Slots([4])
    changes = [run_once(slots, 0, SHORT) for _ in range(40)]
    assert [change.free for change in changes if change != SlotChange((0,))] == [(0, 1), (0, 2, 3)]
    assert slots.offer(2) == SlotIdle(2, 0)
    slots.offer(3)
    slots.begin(3)

    assert run_once(slots, 0, LONG) == SlotChange((0,), (SlotRemoved(1), SlotRemoved(2)))
    slots.check_invariants()
    assert slots.end(3, LONG) == SlotChange(gone=(SlotRemoved(3),))
    slots.check_invariants()


def test_a_limit_takes_back_what_does_not_run_and_the_rest_when_it_is_done() -> None:
    slots = Slots([4, 1])
    for _ in range(40):
        run_once(slots, 0, SHORT)
    slots.offer(2)
    slots.begin(2)

    assert slots.limit(1) == SlotChange(gone=(SlotRemoved(4), SlotRemoved(6)))
    assert slots.end(2, SHORT) == SlotChange(gone=(SlotRemoved(2),))
    assert repr(slots) == "<Slots [running 0 | idle 0 | capacity 1+1]>"


@given(
    limits=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    steps=st.lists(
        st.tuples(st.sampled_from(["offer", "begin", "end", "end", "limit"]), st.integers(0, 14), st.booleans()),
        max_size=200,
    ),
)
def test_the_scheduler_always_knows_which_slots_it_may_use(
    limits: list[int], steps: list[tuple[str, int, bool]]
) -> None:
    slots = Slots(limits)
    count = len(limits)
    free, known, running = set(range(count)), set[int](), list[int]()  # the same, as the scheduler and the shell see it

    def follow(change: SlotChange) -> None:
        assert not set(change.free) & (free | known | set(running))
        free.update(change.free)
        for event in change.gone:
            assert event.slot not in running
            free.discard(event.slot)
            known.discard(event.slot)

    for action, number, is_short in steps:
        if action == "offer" and free:
            slot = sorted(free)[number % len(free)]
            assert slots.offer(slot) == SlotIdle(slot, slot % count)
            free.remove(slot)
            known.add(slot)
        elif action == "begin" and known:
            slot = sorted(known)[number % len(known)]
            slots.begin(slot)
            known.remove(slot)
            running.append(slot)
        elif action == "end" and running:
            slot = running.pop(number % len(running))
            follow(slots.end(slot, SHORT if is_short else LONG))
        elif action == "limit" and number < 3:
            follow(slots.limit(number + 1))
        slots.check_invariants()
        assert slots.running == len(running)
        for instance, limit in enumerate(limits):
            assert 1 <= sum(slot % count == instance for slot in free | known | set(running)) <= limit


def test_an_instance_that_is_yet_to_come_has_no_slot_and_one_that_has_come_has() -> None:
    slots = Slots([2, 2, 2], absent=1)

    assert slots.offer(2) is None
    assert not slots.is_free(2)
    assert slots.add(2) == SlotChange((2,))
    assert slots.offer(2) == SlotIdle(2, 2)
    assert slots.is_free(2)
    assert slots.remove(2) == SlotChange(gone=(SlotRemoved(2),))
    slots.check_invariants()


def test_an_instance_that_is_removed_while_it_runs_is_gone_when_it_is_done() -> None:
    slots = Slots([1, 1])
    slots.offer(0)
    slots.begin(0)

    assert slots.remove(0) == SlotChange()
    assert not slots.is_free(0)
    assert slots.end(0, SHORT) == SlotChange(gone=(SlotRemoved(0),))
    slots.check_invariants()


def test_a_limit_holds_for_an_instance_that_comes_later() -> None:
    slots = Slots([4, 4], absent=1)
    slots.limit(1)
    slots.add(1)
    slots.offer(1)

    assert [run_once(slots, 1, SHORT) for _ in range(40)] == [SlotChange((1,))] * 40


@given(
    st.lists(st.sampled_from([1, 2, 8]), min_size=1, max_size=4),
    st.lists(
        st.tuples(st.sampled_from(["offer", "begin", "end", "add", "remove"]), st.integers(0, 14), st.booleans()),
        max_size=200,
    ),
)
def test_with_instances_that_come_and_go_the_scheduler_knows_which_slots_it_may_use(
    limits: list[int], steps: list[tuple[str, int, bool]]
) -> None:
    slots, count = Slots(limits), len(limits)
    there = set(range(count))
    free, known, running = set(range(count)), set[int](), list[int]()

    def follow(change: SlotChange) -> None:
        assert not set(change.free) & (free | known | set(running))
        free.update(change.free)
        for event in change.gone:
            assert event.slot not in running
            free.discard(event.slot)
            known.discard(event.slot)

    for action, number, is_short in steps:
        instance = number % count
        busy = {slot % count for slot in running}
        if action == "offer" and free:
            slot = sorted(free)[number % len(free)]
            assert slots.offer(slot) == SlotIdle(slot, slot % count)
            free.remove(slot)
            known.add(slot)
        elif action == "begin" and known:
            slot = sorted(known)[number % len(known)]
            slots.begin(slot)
            known.remove(slot)
            running.append(slot)
        elif action == "end" and running:
            slot = running.pop(number % len(running))
            follow(slots.end(slot, SHORT if is_short else LONG))
        elif action == "add" and instance not in there | busy:
            there.add(instance)
            follow(slots.add(instance))
        elif action == "remove" and instance in there:
            there.discard(instance)
            follow(slots.remove(instance))
        slots.check_invariants()
        assert {slot % count for slot in free | known} <= there
        for each in there:
            assert slots.is_free(each) == (each not in {slot % count for slot in running})
            assert any(slot % count == each for slot in free | known | set(running))
