"""Which slot a batch goes to."""

from hypothesis import given
from hypothesis import strategies as st

from charonia.server.scheduling.slots import IdleSlots


def idle(*slots: tuple[int, int]) -> IdleSlots:
    made = IdleSlots()
    for slot, lane in slots:
        made.add(slot, lane)
    return made


def test_of_idle_lanes_the_one_that_was_used_last_is_next() -> None:
    slots = idle((0, 0), (1, 1), (2, 2))

    taken = [slots.take(), slots.take(), slots.take()]

    assert taken == [2, 1, 0]
    assert not slots


def test_an_idle_lane_comes_before_the_line_of_a_busy_one() -> None:
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
    assert not slots


@given(
    lanes=st.integers(1, 4),
    depth=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(["take", "back", "remove"]), st.integers(0, 15)), max_size=60),
)
def test_every_slot_is_idle_or_taken_and_lines_are_never_uneven_without_need(
    lanes: int, depth: int, steps: list[tuple[str, int]]
) -> None:
    slots = idle(*((slot, slot % lanes) for slot in range(lanes * depth)))
    free, taken = set(range(lanes * depth)), list[int]()

    for action, number in steps:
        if action == "take" and free:
            lines = [sum(slot % lanes == lane for slot in taken) for lane in range(lanes)]
            slot = slots.take()
            assert slot in free
            assert lines[slot % lanes] == min(lines[s % lanes] for s in free)
            free.remove(slot)
            taken.append(slot)
        elif action == "back" and taken:
            slot = taken.pop(number % len(taken))
            slots.add(slot, slot % lanes)
            free.add(slot)
        elif action == "remove":
            slots.remove(number)
            free.discard(number)
            taken = [slot for slot in taken if slot != number]
        assert bool(slots) == bool(free)
