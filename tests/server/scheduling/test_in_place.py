"""When executions may run on the event loop."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.server.scheduling.in_place import (
    HANDING_OVER,
    HELD_UP_NS,
    IN_PLACE_NS_MAX,
    OWED_NS_MAX,
    OWED_NS_TOLERATED,
    PAUSE_MAX,
    PAUSE_MIN,
    PROBES,
    TRIAL,
    TRIAL_MISSES_MAX,
    TRIED_NS_MAX,
    UNEXPLAINED_NS_MAX,
    WAIT_NS_MIN,
    WAITS_FORGOTTEN,
    WAITS_MAX,
    WATCHED,
    InPlaceRule,
)

US, MS, S = 1_000, 1_000_000, 1_000_000_000
ENOUGH = OWED_NS_MAX // IN_PLACE_NS_MAX
"""Short executions that make up for whatever a model owes."""


def took(rule: InPlaceRule, duration_ns: int, cpu_ns: int | None = None, *, has_waited: bool | None = None) -> None:
    """One execution, where the rule says; it computes all the time unless said otherwise, else it waits."""
    cpu = duration_ns if cpu_ns is None else cpu_ns
    if rule.in_place:
        rule.ran_in_place(duration_ns, cpu, has_waited=cpu < duration_ns if has_waited is None else has_waited)
    else:
        rule.ran_in_thread(duration_ns, cpu)


def in_place_rule(durations_ns: Iterable[int] = (1,) * PROBES) -> InPlaceRule:
    rule = InPlaceRule()
    for duration in durations_ns:
        took(rule, duration)
    return rule


def unwatched_rule() -> InPlaceRule:
    rule = in_place_rule([1] * (PROBES + WATCHED))
    assert rule.in_place
    assert not rule.is_watched
    return rule


def executions_until_in_place(rule: InPlaceRule, duration_ns: int = IN_PLACE_NS_MAX) -> int:
    count = 0
    while not rule.in_place:
        took(rule, duration_ns)
        count += 1
    return count


def test_the_loop_runs_a_model_itself_after_enough_short_executions() -> None:
    assert not in_place_rule([IN_PLACE_NS_MAX] * (PROBES - 1)).in_place
    assert in_place_rule([IN_PLACE_NS_MAX] * PROBES).in_place


def test_a_longer_execution_in_the_thread_takes_as_many_short_ones_as_take_its_time() -> None:
    long = 3 * IN_PLACE_NS_MAX
    assert executions_until_in_place(in_place_rule([long])) == PROBES + 3


@pytest.mark.parametrize("first_ns", [10 * MS, 10 * S])
def test_first_executions_that_are_slow_delay_the_decision_by_a_few_hundred_short_ones(first_ns: int) -> None:
    assert executions_until_in_place(in_place_rule([first_ns] * 3)) <= ENOUGH


def test_a_model_between_the_two_limits_stays_where_it_is() -> None:
    between = (IN_PLACE_NS_MAX + HELD_UP_NS) // 2
    rule = in_place_rule()
    for _ in range(2_000):
        took(rule, between)
    assert rule.in_place

    rule, tried = InPlaceRule(), 0
    for _ in range(2_000):
        tried += rule.in_place
        took(rule, between)
    assert not rule.in_place
    assert tried <= 6 * (TRIAL_MISSES_MAX + 1)


def test_a_model_that_becomes_slow_goes_to_the_thread_and_one_that_becomes_fast_comes_back() -> None:
    rule = unwatched_rule()
    for _ in range(3):
        held_up_ns = 0
        while rule.in_place:
            took(rule, 5 * MS)
            held_up_ns += 5 * MS
        assert held_up_ns <= OWED_NS_TOLERATED + 2 * 5 * MS
        for _ in range(500):
            took(rule, 5 * MS)
            assert not rule.in_place
        assert executions_until_in_place(rule, 10 * US) <= ENOUGH


def test_single_long_executions_do_not_take_a_model_off_the_loop() -> None:
    rule = unwatched_rule()
    for _ in range(20):
        took(rule, UNEXPLAINED_NS_MAX)
        for _ in range(WATCHED):
            took(rule, 1)
        took(rule, OWED_NS_TOLERATED)
        for _ in range(WATCHED):
            took(rule, 1)
        assert rule.in_place


def test_an_execution_that_is_very_long_takes_the_model_off_the_loop_however_many_were_short() -> None:
    rule = unwatched_rule()
    took(rule, UNEXPLAINED_NS_MAX + 1)
    assert not rule.in_place


def test_a_core_that_is_taken_away_again_and_again_does_not_count() -> None:
    rule = in_place_rule()
    for _ in range(10_000):
        took(rule, 8 * MS, 50 * US, has_waited=False)
        assert rule.in_place


def test_waiting_for_the_interpreter_does_not_keep_a_short_model_in_the_thread() -> None:
    rule = InPlaceRule()
    for _ in range(PROBES - 1):
        took(rule, 5 * IN_PLACE_NS_MAX, IN_PLACE_NS_MAX)
    took(rule, IN_PLACE_NS_MAX, IN_PLACE_NS_MAX)
    assert rule.in_place


def test_a_model_that_waits_for_something_stays_in_the_thread() -> None:
    rule = InPlaceRule()
    for _ in range(2 * WAITS_FORGOTTEN):
        took(rule, IN_PLACE_NS_MAX + 1, 1)
    assert not rule.in_place


@pytest.mark.parametrize("short_ones", [1, PROBES, 40])
def test_a_model_that_waits_more_than_it_computes_holds_up_the_loop_twice_and_never_again(short_ones: int) -> None:
    rule, hold_ups = InPlaceRule(), 0
    for _ in range(3 * WAITS_FORGOTTEN // short_ones):
        for _ in range(short_ones):
            took(rule, 10 * US)
        hold_ups += rule.in_place
        took(rule, WAIT_NS_MIN, 10 * US)

    assert hold_ups == WAITS_MAX


def waiting_rule() -> InPlaceRule:
    rule = in_place_rule()
    for _ in range(WAITS_MAX):
        took(rule, WAIT_NS_MIN, 10 * US)
    assert not rule.in_place
    return rule


def test_a_model_that_waited_for_a_while_only_comes_back_to_the_loop() -> None:
    rule = waiting_rule()

    assert executions_until_in_place(rule) == WAITS_FORGOTTEN
    took(rule, WAIT_NS_MIN, 10 * US)
    assert not rule.in_place
    for _ in range(WAITS_FORGOTTEN):
        took(rule, WAIT_NS_MIN, 10 * US)
    assert executions_until_in_place(rule) <= 2 * WAITS_FORGOTTEN


def test_waits_are_forgotten_and_no_longer_looked_for_once_the_model_has_run_on_the_loop_for_long() -> None:
    rule = in_place_rule()
    for _ in range(5):
        took(rule, WAIT_NS_MIN, 10 * US)
        assert rule.is_watched
        for _ in range(WATCHED):
            took(rule, 1)
        assert rule.in_place
        assert not rule.is_watched
    took(rule, WAIT_NS_MIN)
    assert rule.in_place
    assert rule.is_watched


def test_an_instance_with_cores_of_its_own_never_runs_on_the_event_loop() -> None:
    rule = InPlaceRule(is_bound=True)
    for _ in range(2 * PROBES):
        rule.ran_in_thread(1, 1)
    assert not rule.in_place


def test_a_model_that_is_short_only_in_place_moves_there_for_good() -> None:
    rule = InPlaceRule()
    for _ in range(PAUSE_MIN):
        assert not rule.in_place
        took(rule, 3 * IN_PLACE_NS_MAX)
    for _ in range(TRIAL - TRIAL_MISSES_MAX):
        assert rule.is_tried
        took(rule, IN_PLACE_NS_MAX)
    for _ in range(TRIAL_MISSES_MAX):
        took(rule, 8 * MS, HELD_UP_NS, has_waited=False)
    for _ in range(2_000):
        assert rule.in_place
        assert not rule.is_tried
        took(rule, IN_PLACE_NS_MAX)


def test_what_is_short_in_a_trial_follows_the_cost_of_handing_over() -> None:
    took_ns = IN_PLACE_NS_MAX * 3 // 2
    enough_ns = took_ns // HANDING_OVER
    for passed_on_ns, stays in ((enough_ns * 11 // 10, True), (enough_ns * 9 // 10, False)):
        rule = InPlaceRule()
        while not rule.in_place:
            rule.ran_in_thread(2 * took_ns, 2 * took_ns, passed_on_ns)
        while rule.is_tried:
            took(rule, took_ns)
        assert rule.in_place is stays

    rule = InPlaceRule()
    while not rule.in_place:
        rule.ran_in_thread(TRIED_NS_MAX, TRIED_NS_MAX, 10 * MS)
    while rule.is_tried:
        took(rule, HELD_UP_NS + 1)
    assert not rule.in_place


@pytest.mark.parametrize("in_place_ns", [IN_PLACE_NS_MAX + 1, TRIED_NS_MAX + 1])
def test_trials_that_fail_become_rare(in_place_ns: int) -> None:
    rule = InPlaceRule()
    longest = TRIAL_MISSES_MAX + 1 if in_place_ns <= TRIED_NS_MAX else 1
    pauses = [0]
    for _ in range(15):
        while not rule.in_place:
            took(rule, TRIED_NS_MAX)
            pauses[-1] += 1
        for _ in range(longest):
            assert rule.in_place
            took(rule, in_place_ns)
        assert not rule.in_place
        pauses.append(0)
    assert pauses[:-1] == [min(PAUSE_MIN * 2**number, PAUSE_MAX) for number in range(15)]


def test_a_model_that_waits_or_is_slow_in_its_thread_is_not_tried() -> None:
    for duration, cpu in ((TRIED_NS_MAX + 1, TRIED_NS_MAX), (TRIED_NS_MAX + 1, IN_PLACE_NS_MAX + 1)):
        rule = InPlaceRule()
        for _ in range(PAUSE_MAX):
            took(rule, duration, cpu)
            assert not rule.in_place
    rule = InPlaceRule()
    for _ in range(PAUSE_MAX):
        took(rule, TRIED_NS_MAX)
        took(rule, 5 * MS)
        assert not rule.in_place


times = st.integers(0, 2 * HELD_UP_NS) | st.integers(0, 2 * OWED_NS_TOLERATED) | st.integers(0, 2 * UNEXPLAINED_NS_MAX)


@given(st.lists(st.tuples(times, times, st.booleans()), max_size=300))
def test_the_loop_is_entered_by_a_short_execution_and_left_by_a_long_one(
    executions: list[tuple[int, int, bool]],
) -> None:
    rule = InPlaceRule()
    for duration, cpu, has_waited in executions:
        was_in_place = rule.in_place
        was_tried = rule.is_tried
        took(rule, duration, min(cpu, duration), has_waited=has_waited)
        if rule.in_place and not was_in_place:
            assert min(cpu, duration) <= (TRIED_NS_MAX if rule.is_tried else IN_PLACE_NS_MAX)
        if was_in_place and not rule.in_place:
            assert duration > (IN_PLACE_NS_MAX if was_tried else HELD_UP_NS)


@dataclass(frozen=True)
class Machine:
    """What disturbs executions: how often each thing happens, as a probability."""

    taken: float = 0.0
    stolen: float = 0.0
    waits_for_gil: float = 0.0
    collects: float = 0.0
    slower_in_thread: float = 1.0
    passed_on_ns: int = 0

    def run(self, rule: InPlaceRule, random: Random, cpu_ns: int, *, waits_ns: int = 0) -> int:
        """Run one execution where the rule says, and return how long it took."""
        slower = 1.0 if rule.in_place else self.slower_in_thread
        cpu_ns = round(cpu_ns * slower * random.lognormvariate(0, 0.3))
        if random.random() < self.collects:
            cpu_ns += random.randrange(15 * MS)
        if random.random() < self.stolen:
            cpu_ns += random.randrange(4 * MS)
        wall_ns = cpu_ns + waits_ns
        is_taken = random.random() < self.taken
        if is_taken:
            wall_ns += random.randrange(8 * MS)
        if rule.in_place:
            rule.ran_in_place(wall_ns, cpu_ns, has_waited=waits_ns > 0 and not is_taken)
        else:
            if random.random() < self.waits_for_gil:
                wall_ns += random.randrange(5 * MS)
            rule.ran_in_thread(wall_ns, cpu_ns, self.passed_on_ns)
        return wall_ns


BETWEEN_NS = 100 * US
"""From one execution to the next: the server reads, encodes and writes."""

machines = st.builds(
    Machine,
    taken=st.sampled_from([0.0, 0.001, 0.02, 0.1]),
    stolen=st.sampled_from([0.0, 0.001, 0.01]),
    waits_for_gil=st.sampled_from([0.0, 0.2, 0.5]),
    collects=st.sampled_from([0.0, 0.0001]),
)
slow_threads = st.builds(
    replace, machines, slower_in_thread=st.floats(1, 5), passed_on_ns=st.sampled_from([20 * US, 80 * US])
)
seeds = st.integers(0, 2**32)


@settings(max_examples=25)
@given(slow_threads, seeds, st.integers(1 * US, 60 * US), st.sampled_from([0, 30 * MS, 500 * MS]))
def test_a_short_model_is_on_the_loop_within_a_second_and_stays_on_any_machine(
    machine: Machine, seed: int, cpu_ns: int, first_ns: int
) -> None:
    rule, random = InPlaceRule(), Random(seed)
    took(rule, first_ns)
    now_ns = 0
    while not rule.in_place or rule.is_tried:
        now_ns += BETWEEN_NS + machine.run(rule, random, cpu_ns)
    is_worst = machine.taken == 0.1 and machine.waits_for_gil == 0.5  # an execution takes twenty times its own time
    assert now_ns < (1.5 * S if is_worst else S)

    for _ in range(1500):
        machine.run(rule, random, cpu_ns)
        assert rule.in_place


@settings(max_examples=25)
@given(machines, seeds, st.integers(2 * TRIED_NS_MAX, 20 * MS))
def test_a_slow_model_stays_in_its_thread_on_any_machine(machine: Machine, seed: int, cpu_ns: int) -> None:
    rule, random = InPlaceRule(), Random(seed)
    for _ in range(1000):
        machine.run(rule, random, cpu_ns)
        assert not rule.in_place


@settings(max_examples=25)
@given(slow_threads, seeds, st.integers(2 * HELD_UP_NS, 20 * MS))
def test_a_model_that_is_not_short_runs_a_few_times_on_the_loop_at_most(
    machine: Machine, seed: int, cpu_ns: int
) -> None:
    rule, random, in_place, trials = InPlaceRule(), Random(seed), 0, 0
    for _ in range(10_000):
        was_tried = rule.is_tried
        in_place += rule.in_place
        machine.run(rule, random, cpu_ns)
        trials += rule.is_tried and not was_tried
    assert trials <= 8
    assert in_place <= trials * TRIAL


@settings(max_examples=25)
@given(machines, seeds, st.integers(1 * US, 60 * US), st.integers(600 * US, 20 * MS))
def test_a_model_whose_inputs_become_large_leaves_the_loop_on_any_machine(
    machine: Machine, seed: int, short_ns: int, long_ns: int
) -> None:
    rule, random = InPlaceRule(), Random(seed)
    for _ in range(1500):
        machine.run(rule, random, short_ns)
    now_ns = 0
    while rule.in_place:
        now_ns += machine.run(rule, random, long_ns)
    assert now_ns < S


@settings(max_examples=25)
@given(machines, seeds, st.integers(1 * US, 60 * US), st.integers(2 * MS, 20 * MS), st.integers(0, 30))
def test_a_model_that_waits_now_and_then_holds_up_the_loop_a_few_times_only(
    machine: Machine, seed: int, cpu_ns: int, waits_ns: int, short_ones: int
) -> None:
    rule, random, hold_ups = InPlaceRule(), Random(seed), 0
    for _ in range(WAITS_FORGOTTEN // (short_ones + 1)):
        for _ in range(short_ones):
            machine.run(rule, random, cpu_ns)
        hold_ups += rule.in_place
        machine.run(rule, random, cpu_ns, waits_ns=waits_ns)
    assert hold_ups <= 4 * WAITS_MAX  # a wait during which the core was taken away does not count
