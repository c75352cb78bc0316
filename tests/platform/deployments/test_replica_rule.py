"""When a deployment gets one more server, and when one fewer: in simulated time."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.platform.deployments.replica_rule import (
    GROW_AFTER_S,
    SHRINK_AFTER_S,
    SHRINK_AFTER_S_MAX,
    ReplicaBounds,
    ReplicaRule,
    ReplicaSample,
)

LOOK_S = 5.0


class Simulated:
    """Servers that are there at once, each of which can do as much."""

    def __init__(self, least: int, most: int) -> None:
        self.rule = ReplicaRule(ReplicaBounds(least, most))
        self.count, self.now_s, self.is_steady = least, 0.0, True

    def run(self, seconds: float, load: float, *, room: int = 100) -> list[int]:
        """Let time pass with so many servers' worth of load, and return how many there were."""
        counts, end_s = [], self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += LOOK_S
            sample = ReplicaSample(self.now_s, max(0.0, load - self.count), min(1.0, load / self.count))
            wanted = self.rule.wanted(self.count, sample, self.now_s, is_steady=self.is_steady)
            if wanted > room:
                self.rule.refused("there is no room")
            else:
                self.count = wanted
            counts.append(self.count)
        return counts


def test_requests_that_wait_add_one_after_the_other_up_to_what_is_needed() -> None:
    servers = Simulated(1, 4)

    counts = servers.run(120, load=2.9)

    assert counts[: int(GROW_AFTER_S / LOOK_S)] == [1] * int(GROW_AFTER_S / LOOK_S)
    assert sorted(counts) == counts
    assert counts[-1] == 3
    assert servers.rule.story(3) == "3 of 1 to 4 servers; the last was added because requests waited"


def test_idle_servers_are_closed_one_after_the_other_down_to_the_fewest() -> None:
    servers = Simulated(2, 4)
    servers.count = 4

    counts = servers.run(4 * SHRINK_AFTER_S, load=0.1)

    assert sorted(counts, reverse=True) == counts
    assert counts[int(SHRINK_AFTER_S / LOOK_S) - 2] == 4
    assert counts[-1] == 2
    assert servers.rule.story(2).endswith("; one was closed because the others suffice")


def test_a_load_that_one_fewer_could_hardly_carry_closes_none() -> None:
    servers = Simulated(1, 4)
    servers.count = 3

    assert set(servers.run(1000, load=1.5)) == {3}


def test_a_short_wait_adds_none_and_a_short_pause_closes_none() -> None:
    servers = Simulated(1, 3)
    servers.count = 2

    for _ in range(20):
        servers.run(GROW_AFTER_S - LOOK_S, load=2.5)
        servers.run(SHRINK_AFTER_S - LOOK_S, load=0.0)

    assert servers.count == 2


def test_load_that_comes_and_goes_is_answered_more_and_more_patiently() -> None:
    servers = Simulated(1, 2)
    changes = 0
    for _ in range(60):
        before = servers.count
        counts = [*servers.run(60, load=1.8), *servers.run(150, load=0.0)]
        changes += sum(one != two for one, two in pairwise([before, *counts]))

    assert SHRINK_AFTER_S < servers.rule.idle_for_s <= SHRINK_AFTER_S_MAX
    assert changes < 10
    servers.run(5 * SHRINK_AFTER_S_MAX, load=0.0)
    assert servers.count == 1


def test_none_is_added_without_room_and_the_story_says_why() -> None:
    servers = Simulated(1, 3)

    assert set(servers.run(120, load=5.0, room=1)) == {1}
    assert servers.rule.story(1) == "1 of 1 to 3 servers; requests wait, and none is added: there is no room"
    servers.run(60, load=0.5)
    assert servers.rule.story(1) == "1 of 1 to 3 servers"
    assert servers.run(60, load=5.0)[-1] > 1


def test_nothing_changes_while_servers_start_and_old_samples_do_not_count() -> None:
    servers = Simulated(1, 3)
    servers.is_steady = False
    assert set(servers.run(120, load=5.0)) == {1}

    servers.is_steady = True
    sample = ReplicaSample(servers.now_s + 1.0, 5.0, 1.0)
    counts = {servers.rule.wanted(1, sample, servers.now_s + second, is_steady=True) for second in range(1, 100)}
    assert counts == {1}


@pytest.mark.parametrize(("count", "within"), [(1, 2), (9, 4)])
def test_new_bounds_hold_at_once(count: int, within: int) -> None:
    assert ReplicaRule(ReplicaBounds(2, 4)).wanted(count, None, 0.0, is_steady=False) == within


@given(loads=st.lists(st.tuples(st.floats(5, 500), st.floats(0, 8), st.booleans()), max_size=20))
def test_it_stays_within_the_bounds_and_changes_by_one(loads: list[tuple[float, float, bool]]) -> None:
    servers = Simulated(2, 5)
    for seconds, load, is_steady in loads:
        servers.is_steady = is_steady
        before = servers.count
        counts = [before, *servers.run(seconds, load)]
        assert all(2 <= count <= 5 for count in counts)
        assert all(abs(one - two) <= 1 for one, two in pairwise(counts))
