"""Who may run when there is not enough for all."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.core.errors import Code, ServingError
from charonia.server.rate_limiter.options import ResourceLimit
from charonia.server.rate_limiter.resources import SERVER_WIDE, Arbiter, Member, MemberState, Need, ResourcePool

R = ResourcePool("R", 0)
Q = ResourcePool("Q", SERVER_WIDE)


def member(name: str, needs: dict[ResourcePool, int] | None = None, *, priority: int = 1, model: str = "") -> Member:
    found = tuple(Need(pool, count, f"path.{pool.name}") for pool, count in (needs or {}).items())
    return Member(model or name, "1", f"{name}_0", found, priority)


def arbiter_of(*members: Member, limits: tuple[ResourceLimit, ...] = ()) -> Arbiter:
    arbiter = Arbiter(limits)
    for each in members:
        arbiter.join([each])
    return arbiter


def test_an_instance_runs_when_its_resources_are_free_and_the_next_when_they_are_given_back() -> None:
    called: list[str] = []
    a, b = member("a", {R: 1}), member("b", {R: 1})
    b.granted = lambda: called.append("b")
    arbiter = arbiter_of(a, b)

    assert arbiter.request(a)
    assert not arbiter.request(b)
    assert (a.state, b.state) == (MemberState.RUNNING, MemberState.WAITING)
    assert arbiter.held == {R: 1}
    assert called == []

    arbiter.stop(a)

    assert (a.state, b.state) == (MemberState.IDLE, MemberState.RUNNING)
    assert called == ["b"]
    assert (a.executions, b.executions) == (1, 1)


def test_capacity_is_the_most_that_one_instance_needs_and_follows_who_is_there() -> None:
    small, large = member("small", {R: 2}), member("large", {R: 5})
    arbiter = arbiter_of(small, large)

    assert arbiter.capacity == {R: 5}
    assert not arbiter.is_explicit(R)
    arbiter.leave([large])
    assert arbiter.capacity == {R: 2}
    arbiter.leave([small])
    assert arbiter.capacity == {}


@pytest.mark.parametrize(
    ("limits", "pool", "capacity"),
    [
        ((ResourceLimit("R", 7),), R, 7),
        ((ResourceLimit("R", 7), ResourceLimit("R", 3, 0)), R, 3),
        ((ResourceLimit("R", 7), ResourceLimit("R", 3, 1)), R, 7),
        ((ResourceLimit("Q", 7, 2),), Q, 7),  # a device has no meaning for a resource of the whole server
        ((ResourceLimit("other", 7),), R, 2),
    ],
)
def test_an_explicit_capacity_counts(limits: tuple[ResourceLimit, ...], pool: ResourcePool, capacity: int) -> None:
    arbiter = arbiter_of(member("a", {pool: 2}), limits=limits)

    assert arbiter.capacity == {pool: capacity}
    assert arbiter.is_explicit(pool) is (capacity != 2)


def test_an_instance_that_needs_more_than_there_may_be_is_refused_with_path_and_numbers() -> None:
    arbiter = Arbiter([ResourceLimit("R", 3)])

    with pytest.raises(ServingError) as caught:
        arbiter.join([member("a", {Q: 1}), member("b", {R: 4}, model="a")])

    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message.startswith('path.R: Resource count for "R" is limited to 3 which will prevent')
    assert caught.value.message.endswith("the minimum required count is 4")
    assert arbiter.members == ()
    assert arbiter.capacity == {}


def test_a_resource_cannot_be_of_a_device_for_one_model_and_of_the_server_for_another() -> None:
    arbiter = arbiter_of(member("a", {R: 1}))

    with pytest.raises(ServingError, match=r'path\.R: Resource "R" is present as both global and device-specific'):
        arbiter.join([member("b", {ResourcePool("R", SERVER_WIDE): 1})])

    assert [m.model for m in arbiter.members] == ["a"]


def test_a_model_that_is_reloaded_may_change_the_kind_of_its_resource() -> None:
    arbiter = arbiter_of(member("a", {R: 1}))

    arbiter.join([member("a", {ResourcePool("R", SERVER_WIDE): 1})])

    assert arbiter.capacity == {R: 1, ResourcePool("R", SERVER_WIDE): 1}


def test_joining_without_members_changes_nothing() -> None:
    arbiter = Arbiter()

    arbiter.join([])

    assert arbiter.members == ()


def test_what_a_waiting_instance_needs_cannot_be_taken_by_those_behind_it_but_other_pools_can() -> None:
    holder, large, small, other = (
        member("holder", {R: 1}),
        member("large", {R: 2}),
        member("small", {R: 1}),
        member("other", {Q: 1}),
    )
    arbiter = arbiter_of(holder, large, small, other)
    arbiter.request(holder)
    arbiter.request(large)

    assert not arbiter.request(small)  # there is one left, and it would do
    assert arbiter.request(other)
    arbiter.stop(holder)

    assert large.state is MemberState.RUNNING
    assert small.state is MemberState.WAITING


def test_who_has_what_an_instance_waits_for_is_told_also_of_those_before_it_in_line() -> None:
    holder, large, small, other = (
        member("holder", {R: 1}),
        member("large", {R: 1, Q: 2}),
        member("small", {R: 1}),
        member("other", {Q: 1}),
    )
    arbiter = arbiter_of(holder, large, small, other)
    assert arbiter.waited_for([large, small]) == {}

    arbiter.request(holder)
    arbiter.request(large)
    arbiter.request(small)
    arbiter.request(other)  # there is enough of it, but the large one comes first

    assert arbiter.waited_for([large]) == {R: {holder}}
    assert arbiter.waited_for([other]) == {Q: {large}}
    assert arbiter.waited_for([small, other]) == {R: {holder}, Q: {large}}
    assert arbiter.waited_for([holder]) == {}


def test_devices_have_their_own_pools() -> None:
    a, b = member("a", {R: 1}), member("b", {ResourcePool("R", 1): 1})
    arbiter = arbiter_of(a, b)

    assert arbiter.request(a)
    assert arbiter.request(b)


def test_one_that_was_let_run_for_nothing_is_not_charged() -> None:
    a = member("a", {R: 1}, priority=3)
    arbiter = arbiter_of(a)
    arbiter.request(a)

    arbiter.stop(a, unused=True)

    assert (a.turn, a.executions, arbiter.held[R]) == (0, 0, 0)


def test_leaving_gives_up_what_is_held_and_what_is_waited_for() -> None:
    a, b, c = member("a", {R: 1}), member("b", {R: 1}), member("c", {R: 1})
    arbiter = arbiter_of(a, b, c)
    arbiter.request(a)
    arbiter.request(b)
    arbiter.request(c)

    arbiter.leave([b])
    arbiter.leave([a])
    arbiter.leave([a])

    assert c.state is MemberState.RUNNING
    assert arbiter.held == {R: 1}


def run_contended(members: list[Member], grants: int) -> Counter[str]:
    """Let all members always want to run, and release the oldest grant."""
    arbiter = arbiter_of(*members)
    running: list[Member] = []
    for each in members:
        each.granted = lambda each=each: running.append(each)  # type: ignore[misc] # bound now
    running += [each for each in members if arbiter.request(each)]
    counts: Counter[str] = Counter()
    for _ in range(grants):
        first = running.pop(0)
        counts[first.model] += 1
        if arbiter.request(first):
            running.append(first)
    return counts


def test_under_contention_priority_p_gets_one_pth_of_the_executions() -> None:
    counts = run_contended([member("one", {R: 1}), member("two", {R: 1}, priority=2)], 300)

    assert counts["one"] == pytest.approx(200, abs=3)
    assert counts["two"] == pytest.approx(100, abs=3)


def test_a_newcomer_does_not_make_up_for_the_time_before_it_came() -> None:
    old, new = member("old", {R: 1}), member("new", {R: 1})
    old.turn = 1_000_000
    counts = run_contended([old, new], 100)

    assert counts["old"] == pytest.approx(50, abs=3)


def test_what_is_held_by_some_may_be_out_of_reach_for_others() -> None:
    a, b, c = member("a", {R: 1}), member("b", {R: 2}), member("c", {Q: 1})
    arbiter = arbiter_of(a, b, c)

    assert arbiter.is_blocked_by(b, [a])
    assert not arbiter.is_blocked_by(a, [a])
    assert not arbiter.is_blocked_by(b, [c])
    arbiter.leave([b])
    assert arbiter.is_blocked_by(b, [])


POOLS = (ResourcePool("A", 0), ResourcePool("A", 1), ResourcePool("B", SERVER_WIDE))
NEEDS = st.dictionaries(st.sampled_from(POOLS), st.integers(1, 4), max_size=3)
ACTIONS = st.lists(st.tuples(st.sampled_from(["request", "stop", "unused", "leave"]), st.integers(0, 5)), max_size=60)


@settings(max_examples=150)
@given(st.lists(st.tuples(NEEDS, st.integers(1, 4)), min_size=1, max_size=6), ACTIONS)
def test_no_pool_is_ever_held_beyond_its_capacity_and_no_member_that_could_run_waits(
    wanted: list[tuple[dict[ResourcePool, int], int]], actions: list[tuple[str, int]]
) -> None:
    members = [member(f"m{i}", needs, priority=priority) for i, (needs, priority) in enumerate(wanted)]
    arbiter = arbiter_of(*members)
    for action, number in actions:
        chosen = members[number % len(members)]
        if chosen not in arbiter.members:
            continue
        if action == "request":
            assert arbiter.request(chosen) is (chosen.state is MemberState.RUNNING)
        elif action in ("stop", "unused"):
            arbiter.stop(chosen, unused=action == "unused" and chosen.executions > 0)
        elif action == "leave":
            arbiter.leave([chosen])

        held: Counter[ResourcePool] = Counter()
        for each in arbiter.members:
            if each.state is MemberState.RUNNING:
                held.update({need.pool: need.units for need in each.needs})
        assert {pool: held[pool] for pool in arbiter.capacity} == arbiter.held
        assert all(held[pool] <= capacity for pool, capacity in arbiter.capacity.items() if action != "leave")
        free = {pool: capacity - held[pool] for pool, capacity in arbiter.capacity.items()}
        waiting = [each for each in arbiter.members if each.state is MemberState.WAITING]
        if waiting:  # the first of them lacks something
            assert any(any(free[need.pool] < need.units for need in each.needs) for each in waiting)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(NEEDS.filter(bool), st.integers(1, 4)), min_size=2, max_size=6),
    st.lists(st.integers(0, 100), max_size=6),
)
def test_no_member_starves(wanted: list[tuple[dict[ResourcePool, int], int]], turns: list[int]) -> None:
    members = [member(f"m{i}", needs, priority=priority) for i, (needs, priority) in enumerate(wanted)]
    for each, turn in zip(members, turns, strict=False):
        each.turn = turn * 1000  # regardless of the past

    counts = run_contended(members, 40 * sum(priority for _, priority in wanted) * len(members))

    assert min(counts[each.model] for each in members) > 0
