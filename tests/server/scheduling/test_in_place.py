"""When executions may run on the event loop."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.server.scheduling.in_place import (
    FORGIVEN_AFTER,
    FORGIVEN_NS_MAX,
    IN_PLACE_NS_MAX,
    IN_PLACE_PROBES,
    IN_PLACE_RETRY_MAX,
    WAITS_MAX,
    InPlaceRule,
)

HELD_UP = 10 * IN_PLACE_NS_MAX + 1


def took(rule: InPlaceRule, duration_ns: int, cpu_ns: int | None = None) -> None:
    """One execution, where the rule says; it computes all the time unless said otherwise, else it waits."""
    if rule.in_place and rule.is_watched:
        rule.ran_watched(duration_ns, has_waited=cpu_ns is not None and cpu_ns < duration_ns)
    elif rule.in_place:
        rule.ran_in_place(duration_ns)
    else:
        rule.ran_in_thread(duration_ns, duration_ns if cpu_ns is None else cpu_ns)


def in_place_rule(durations_ns: Iterable[int]) -> InPlaceRule:
    rule = InPlaceRule()
    for duration in durations_ns:
        took(rule, duration)
    return rule


def executions_until_in_place(rule: InPlaceRule, duration_ns: int = IN_PLACE_NS_MAX) -> int:
    count = 0
    while not rule.in_place:
        took(rule, duration_ns)
        count += 1
    return count


def test_the_loop_runs_a_model_itself_after_enough_short_executions_in_a_row() -> None:
    assert not in_place_rule([IN_PLACE_NS_MAX] * (IN_PLACE_PROBES - 1)).in_place
    assert in_place_rule([IN_PLACE_NS_MAX] * IN_PLACE_PROBES).in_place


def test_one_longer_execution_in_the_thread_starts_the_count_anew() -> None:
    almost = [IN_PLACE_NS_MAX] * (IN_PLACE_PROBES - 1)
    assert not in_place_rule([*almost, IN_PLACE_NS_MAX + 1, *almost]).in_place
    assert in_place_rule([*almost, IN_PLACE_NS_MAX + 1, *almost, 1]).in_place


def test_an_execution_that_is_a_little_longer_stays_on_the_loop() -> None:
    rule = in_place_rule([1] * IN_PLACE_PROBES)
    took(rule, HELD_UP - 1)
    assert rule.in_place


def test_each_time_the_loop_was_held_up_it_takes_twice_as_many_short_executions_up_to_a_limit() -> None:
    rule = InPlaceRule()
    needed = []
    for _ in range(12):
        needed.append(executions_until_in_place(rule))
        took(rule, HELD_UP)
    assert needed[:4] == [8, 16, 32, 64]
    assert needed[-2:] == [IN_PLACE_RETRY_MAX, IN_PLACE_RETRY_MAX]


def test_the_system_that_takes_the_core_away_now_and_then_does_not_take_the_model_off_the_loop() -> None:
    rule = in_place_rule([1] * IN_PLACE_PROBES)
    for _ in range(5):
        for _ in range(FORGIVEN_AFTER):
            took(rule, 1)
        took(rule, FORGIVEN_NS_MAX)
        assert rule.in_place
    took(rule, HELD_UP)
    assert not rule.in_place
    assert executions_until_in_place(rule) == 2 * IN_PLACE_PROBES


def test_an_execution_that_is_very_long_takes_the_model_off_the_loop_however_many_were_short() -> None:
    rule = in_place_rule([1] * (IN_PLACE_PROBES + FORGIVEN_AFTER))
    took(rule, FORGIVEN_NS_MAX + 1)
    assert not rule.in_place


def test_waiting_for_the_interpreter_does_not_keep_a_short_model_in_the_thread() -> None:
    rule = InPlaceRule()
    for _ in range(IN_PLACE_PROBES - 1):
        took(rule, 5 * IN_PLACE_NS_MAX, IN_PLACE_NS_MAX)
    took(rule, IN_PLACE_NS_MAX, IN_PLACE_NS_MAX)
    assert rule.in_place


def test_a_model_that_waits_for_something_stays_in_the_thread() -> None:
    rule = InPlaceRule()
    for _ in range(2 * IN_PLACE_RETRY_MAX):
        took(rule, IN_PLACE_NS_MAX + 1, 1)
    assert not rule.in_place


@pytest.mark.parametrize("short_ones", [1, IN_PLACE_PROBES, 40])
def test_a_model_that_waits_more_than_it_computes_holds_up_the_loop_twice_and_never_again(short_ones: int) -> None:
    rule, hold_ups = InPlaceRule(), 0
    for _ in range(3 * IN_PLACE_RETRY_MAX // short_ones):
        for _ in range(short_ones):
            took(rule, 10_000, 10_000)
        hold_ups += rule.in_place
        took(rule, HELD_UP, 10_000)

    assert hold_ups == WAITS_MAX


def test_a_model_that_waited_for_a_while_only_comes_back_to_the_loop() -> None:
    rule = InPlaceRule()
    for _ in range(WAITS_MAX):
        executions_until_in_place(rule)
        took(rule, HELD_UP, 10_000)

    assert executions_until_in_place(rule) == IN_PLACE_RETRY_MAX
    took(rule, HELD_UP, 10_000)
    for _ in range(IN_PLACE_RETRY_MAX):
        took(rule, HELD_UP, 10_000)
    assert executions_until_in_place(rule) <= 2 * IN_PLACE_RETRY_MAX


def test_waits_are_forgotten_and_no_longer_looked_for_once_the_model_has_run_on_the_loop_for_long() -> None:
    rule = in_place_rule([1] * IN_PLACE_PROBES)
    for _ in range(5):
        took(rule, HELD_UP, 10_000)
        executions_until_in_place(rule)
        assert rule.is_watched
        for _ in range(FORGIVEN_AFTER):
            took(rule, 1)
        assert rule.in_place
        assert not rule.is_watched
    took(rule, FORGIVEN_NS_MAX)
    assert rule.in_place
    assert rule.is_watched


def test_a_core_that_was_taken_away_is_not_taken_for_waiting() -> None:
    rule = InPlaceRule()
    for _ in range(WAITS_MAX + 1):
        needed = executions_until_in_place(rule)
        took(rule, HELD_UP)
    assert needed == 2**WAITS_MAX * IN_PLACE_PROBES


@given(st.lists(st.tuples(st.integers(0, 2 * HELD_UP), st.integers(0, 2 * IN_PLACE_NS_MAX)), max_size=300))
def test_the_loop_is_never_entered_by_a_long_execution_nor_soon_kept_by_one(times_ns: list[tuple[int, int]]) -> None:
    rule = InPlaceRule()
    for duration, cpu in times_ns:
        was_in_place = rule.in_place
        took(rule, duration, min(cpu, duration))
        if rule.in_place and not was_in_place:
            assert min(cpu, duration) <= IN_PLACE_NS_MAX
        if was_in_place and duration >= HELD_UP:
            assert not rule.in_place
