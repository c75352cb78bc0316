"""How many servers a deployment runs: in simulated time."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.platform.deployments.scaler import (
    GROW_AFTER_S,
    SHRINK_AFTER_S,
    SHRINK_EVERY_S,
    ReplicaRule,
    ReplicaSample,
)
from charonia.platform.deployments.spec import Replicas

LOOK_S = 5.0


class Simulated:
    """Servers that start immediately, each with the same capacity."""

    def __init__(self, least: int, most: int, count: int = 0) -> None:
        self.rule = ReplicaRule(Replicas(min=least, max=most))
        self.count, self.now_s, self.is_steady = count or least, 0.0, True

    def run(self, seconds: float, load: float, *, room: int = 100, waited: float | None = None) -> list[int]:
        """Let time pass with so many servers' worth of load, and return how many there were."""
        counts, end_s = [], self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += LOOK_S
            ratio = max(0.0, load - self.count) if waited is None else waited
            sample = ReplicaSample(self.now_s, ratio, min(1.0, load / self.count))
            wanted = self.rule.wanted(self.count, sample, self.now_s, is_steady=self.is_steady)
            if wanted > room:
                self.rule.refused("there is no room")
            else:
                self.count = wanted
            counts.append(self.count)
        return counts


def test_servers_are_added_in_proportion_to_the_busy_share_until_the_target_is_met() -> None:
    servers = Simulated(1, 8)

    counts = servers.run(300, load=2.8)

    assert counts[: int(GROW_AFTER_S / LOOK_S)] == [1] * int(GROW_AFTER_S / LOOK_S)
    assert sorted(counts) == counts
    assert counts[-1] == 4  # each is busy 70 % of the time
    assert (
        servers.rule.explanation(4)
        == "4 of 1 to 8 servers; the last was added because instances were busy 93% of the time"
    )


@pytest.mark.parametrize(("waited", "count"), [(1.05, 2), (1.5, 3), (50.0, 4)])
def test_waiting_adds_servers_and_at_most_doubles_them(waited: float, count: int) -> None:
    servers = Simulated(2, 8)

    servers.run(GROW_AFTER_S + LOOK_S, load=1.4, waited=waited)

    assert servers.count == count
    if count > 2:
        assert servers.rule.explanation(count).endswith("; the last was added because requests waited")


def test_waiting_that_is_short_keeps_no_server() -> None:
    servers = Simulated(1, 4, count=3)

    servers.run(2 * SHRINK_AFTER_S, load=0.5, waited=0.1)

    assert servers.count == 1


def test_idle_servers_are_closed_one_after_the_other_down_to_the_fewest() -> None:
    servers = Simulated(2, 4, count=4)

    counts = servers.run(SHRINK_AFTER_S + 3 * SHRINK_EVERY_S, load=0.1)

    assert sorted(counts, reverse=True) == counts
    assert counts[int(SHRINK_AFTER_S / LOOK_S) - 1] == 4
    assert counts.count(3) * LOOK_S >= SHRINK_EVERY_S
    assert counts[-1] == 2
    assert servers.rule.explanation(2).endswith("; one was closed because the others suffice")


def test_a_load_near_the_target_changes_nothing() -> None:
    servers = Simulated(1, 6, count=4)

    for _ in range(20):
        assert {*servers.run(100, load=2.6), *servers.run(100, load=3.0)} == {4}


def test_a_short_pause_closes_none() -> None:
    servers = Simulated(1, 4, count=3)

    for _ in range(20):
        servers.run(SHRINK_AFTER_S - 2 * LOOK_S - GROW_AFTER_S, load=0.0)
        servers.run(120, load=2.1)

    assert servers.count == 3


def test_none_is_added_without_room_and_the_story_says_why() -> None:
    servers = Simulated(1, 3)

    assert set(servers.run(120, load=5.0, room=1)) == {1}
    assert servers.rule.explanation(1) == "1 of 1 to 3 servers; more are needed, and none is added: there is no room"
    servers.run(120, load=0.5)
    assert servers.rule.explanation(1) == "1 of 1 to 3 servers"
    assert servers.run(120, load=5.0)[-1] > 1


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
    assert ReplicaRule(Replicas(min=2, max=4)).wanted(count, None, 0.0, is_steady=False) == within


@given(loads=st.lists(st.tuples(st.floats(5, 500), st.floats(0, 8), st.booleans()), max_size=20))
def test_it_stays_within_the_bounds_and_closes_one_at_a_time(loads: list[tuple[float, float, bool]]) -> None:
    servers = Simulated(2, 5)
    for seconds, load, is_steady in loads:
        servers.is_steady = is_steady
        counts = [servers.count, *servers.run(seconds, load)]
        assert all(2 <= count <= 5 for count in counts)
        assert all(two >= one - 1 for one, two in pairwise(counts))
