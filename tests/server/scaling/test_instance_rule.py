"""The rule for the number of instances, in simulated time."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.config.parameters import InstanceBounds
from charonia.server.scaling.rule import (
    BACK_OFF_NS,
    BACK_OFF_NS_MAX,
    GROW_AFTER_NS,
    SAMPLE_NS,
    SHRINK_AFTER_NS,
    SHRINK_AFTER_NS_MAX,
    START_FACTOR,
    STEADY_FACTOR,
    Change,
    ChangeReason,
    InstanceRule,
    InstanceSample,
)

S = 1_000_000_000


class Simulation:
    """A model under load: so many requests at a time want an instance each, as long as the test says.

    An instance that is added is there after `start_ns`, or fails with `failure`.
    """

    def __init__(self, least: int = 1, most: int = 4, *, start_ns: int = 0) -> None:
        self.rule = InstanceRule(InstanceBounds(least, most))
        self.now_ns = 0
        self.count = least
        self.start_ns = start_ns
        self.failure = ""
        self.obstacle = ""
        self.history = [(0, least)]
        self.attempts: list[int] = []
        self._ready_ns: int | None = None
        self._waits_since_ns: int | None = None

    def run(self, seconds: float, load: Callable[[float], int] | int) -> None:
        """Let time pass, with this load by the seconds since now."""
        begin_ns = self.now_ns
        while self.now_ns < begin_ns + int(seconds * S):
            wanted = load if isinstance(load, int) else load((self.now_ns - begin_ns) / S)
            self._step(wanted)
            self.rule.check_invariants()
            at_ns = self.rule.wake_at()
            assert at_ns == self.now_ns + SAMPLE_NS
            self.now_ns = at_ns

    def _step(self, wanted: int) -> None:
        if self._ready_ns is not None and self.now_ns >= self._ready_ns:
            self._ready_ns = None
            if self.failure:
                self.rule.failed(self.failure, self.now_ns)
            else:
                self._changed(self.count + 1)
                self.rule.started(self.start_ns, self.now_ns)
        waits = wanted > self.count
        self._waits_since_ns = (
            (self.now_ns if self._waits_since_ns is None else self._waits_since_ns) if waits else None
        )
        waited_ns = self.now_ns - self._waits_since_ns + 1 if self._waits_since_ns is not None else 0
        sample = InstanceSample(self.count, max(0, self.count - wanted), waited_ns, self.obstacle if waits else "")
        change = self.rule.decide(sample, self.now_ns)
        if change is Change.ADD:
            assert self._ready_ns is None, "two at a time"
            self.attempts.append(self.now_ns)
            self._ready_ns = self.now_ns + self.start_ns
        elif change is Change.CLOSE:
            self._changed(self.count - 1)
            self.rule.closed(self.now_ns)

    def _changed(self, count: int) -> None:
        self.count = count
        self.history.append((self.now_ns, count))

    @property
    def closings(self) -> int:
        return self.rule.changes[ChangeReason.IDLE]


def test_a_step_of_the_load_adds_one_instance_after_the_other_until_none_waits() -> None:
    model = Simulation()

    model.run(20, 3)

    assert [count for _, count in model.history] == [1, 2, 3]
    assert model.history[1][0] >= GROW_AFTER_NS
    assert model.history[2][0] - model.history[1][0] >= GROW_AFTER_NS


def test_the_times_are_those_that_the_documentation_says() -> None:
    seconds = [each / S for each in (SAMPLE_NS, GROW_AFTER_NS, SHRINK_AFTER_NS, SHRINK_AFTER_NS_MAX)]

    assert seconds == [0.25, 1, 10, 600]
    assert (START_FACTOR, STEADY_FACTOR, BACK_OFF_NS / S, BACK_OFF_NS_MAX / S) == (10, 4, 1, 300)


def test_there_are_never_more_than_the_most_nor_fewer_than_the_least() -> None:
    model = Simulation(2, 3)

    model.run(30, 50)
    model.run(120, 0)

    assert [count for _, count in model.history] == [2, 3, 2]


def test_a_burst_that_is_over_in_time_adds_nothing() -> None:
    model = Simulation()

    model.run(60, lambda s: 9 if s % 10 < 0.5 else 1)

    assert model.history == [(0, 1)]


def test_an_instance_is_closed_only_when_one_has_had_nothing_to_do_all_the_time() -> None:
    model = Simulation()
    model.run(10, 2)
    added_ns = model.now_ns

    model.run(8, 1)
    model.run(1, 2)
    model.run(9, 1)
    assert model.count == 2

    model.run(3, 1)
    assert model.count == 1
    assert model.history[-1][0] - added_ns >= 18 * S


def test_an_idle_model_goes_back_to_the_least_one_by_one() -> None:
    model = Simulation()
    model.run(20, 4)

    model.run(60, 0)

    closed = [at for at, count in model.history[-3:]]
    assert [count for _, count in model.history] == [1, 2, 3, 4, 3, 2, 1]
    assert model.rule.changes == {ChangeReason.WAITING: 3, ChangeReason.IDLE: 3}
    assert all(later - before >= SHRINK_AFTER_NS for before, later in itertools.pairwise(closed))


def test_a_load_that_comes_and_goes_closes_instances_less_and_less_often() -> None:
    model = Simulation()

    model.run(1800, lambda s: 2 if s % 24 < 12 else 1)  # longer than an instance is kept for at first

    assert 1 <= model.closings <= 3
    assert model.rule.idle_for_ns > SHRINK_AFTER_NS


def test_after_a_long_steady_time_instances_are_closed_as_early_as_at_first() -> None:
    model = Simulation()
    model.run(200, lambda s: 2 if s % 24 < 12 else 1)
    assert model.rule.idle_for_ns > SHRINK_AFTER_NS

    for _ in range(3):
        model.run(2000, 0)
        model.run(2000, 2)
    model.run(2000, 0)

    assert model.rule.idle_for_ns == SHRINK_AFTER_NS


def test_while_an_instance_starts_slowly_no_other_one_is_added_and_it_is_kept_for_longer() -> None:
    model = Simulation(start_ns=30 * S)

    model.run(45, 9)
    assert [count for _, count in model.history] == [1, 2]
    assert len(model.attempts) == 2

    model.run(30, 0)
    model.run(START_FACTOR * 30 - 40, 0)
    assert model.count == 3
    model.run(60, 0)
    assert model.count == 2


def test_a_machine_without_room_is_left_alone_and_the_reason_is_said() -> None:
    model = Simulation()
    model.obstacle = "0.1 of 2 cores are idle"

    model.run(30, 3)

    assert model.history == [(0, 1)]
    assert model.rule.explanation(model.now_ns) == (
        "1 of 1 to 4 instances; requests wait, and none is added: 0.1 of 2 cores are idle"
    )
    model.obstacle = ""
    model.run(1, 3)
    assert model.count == 2


def test_a_start_that_fails_is_tried_again_at_growing_distances_and_the_reason_is_said() -> None:
    model = Simulation()
    model.failure = "no memory"

    model.run(300, 3)

    gaps = [later - before for before, later in zip(model.attempts, model.attempts[1:], strict=False)]
    assert gaps == sorted(gaps)
    assert gaps[0] >= BACK_OFF_NS
    assert gaps[-1] >= 16 * gaps[0]
    assert model.rule.changes[ChangeReason.FAILED] == len(model.attempts)
    assert "; the last attempt to add one failed: no memory; not tried again for " in model.rule.explanation(
        model.now_ns
    )

    model.failure = ""
    model.run(BACK_OFF_NS_MAX / S + 2, 3)
    assert model.count == 3
    assert "failed" not in model.rule.explanation(model.now_ns)


def test_the_story_says_when_and_why_the_number_changed() -> None:
    model = Simulation(start_ns=4 * S)

    assert model.rule.explanation(0) == "1 of 1 to 4 instances"
    model.run(2, 2)
    assert model.rule.explanation(model.now_ns) == ("1 of 1 to 4 instances; another one has been starting for 1 s")
    model.run(15, 2)
    assert model.rule.explanation(model.now_ns) == (
        "2 of 1 to 4 instances; a second was added 12 s ago because requests waited 1 s"
    )
    model.run(60, 0)
    assert model.rule.explanation(model.now_ns) == (
        "1 of 1 to 4 instances; one was closed 20 s ago because it had had nothing to do for 40 s"
    )


def test_a_close_that_could_not_be_carried_out_is_asked_for_again() -> None:
    rule = InstanceRule(InstanceBounds(1, 2))
    answers = [rule.decide(InstanceSample(2, 1), at) for at in range(0, SHRINK_AFTER_NS + 3 * SAMPLE_NS, SAMPLE_NS)]

    assert answers[-3:] == [Change.CLOSE] * 3
    assert set(answers[:-3]) == {None}
    assert rule.changes[ChangeReason.IDLE] == 0


@pytest.mark.parametrize("least", [1, 3])
@given(
    loads=st.lists(
        st.tuples(st.floats(0.25, 40), st.integers(0, 8), st.sampled_from(["", "", "", "full"])), max_size=30
    ),
    start_s=st.sampled_from([0.0, 0.5, 5.0]),
    fails=st.lists(st.booleans(), min_size=1, max_size=4),
)
def test_under_any_load_the_bounds_hold_and_changes_are_apart(
    least: int, loads: list[tuple[float, int, str]], start_s: float, fails: list[bool]
) -> None:
    model = Simulation(least, 5, start_ns=int(start_s * S))
    for index, (seconds, wanted, obstacle) in enumerate(loads):
        model.failure = "broken" if fails[index % len(fails)] else ""
        model.obstacle = obstacle
        model.run(seconds, wanted)

    counts = [count for _, count in model.history]
    assert all(least <= count <= 5 for count in counts)
    for (before_ns, before), (after_ns, after) in zip(model.history[1:], model.history[2:], strict=False):
        assert abs(after - before) == 1
        assert after_ns - before_ns >= (GROW_AFTER_NS if after > before else SHRINK_AFTER_NS)
    assert model.rule.idle_for_ns <= max(SHRINK_AFTER_NS_MAX, START_FACTOR * model.start_ns)
