"""How the servers of a deployment become what is wanted, whatever happens to them on the way."""

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.platform.targets.rollout import (
    RUNNING,
    UNWELL_S_MAX,
    ActionKind,
    ReplicaPhase,
    RolloutGoal,
    ServerAct,
    ServerState,
    abandoned,
    answering,
    back_off_s,
    judged,
    next_acts,
)

GONE, STARTING, UP, MOVING, ENDING = (
    ReplicaPhase.GONE,
    ReplicaPhase.STARTING,
    ReplicaPhase.UP,
    ReplicaPhase.MOVING,
    ReplicaPhase.ENDING,
)


def up(number: int, revision: int = 1, **more: object) -> ServerState:
    return replace(ServerState(number, UP, revision, made=f"rev {revision}", is_ready=True, starts=1), **more)  # type: ignore[arg-type]


def test_the_first_server_starts_alone_and_the_others_beside_it() -> None:
    goal = RolloutGoal(1, count=3)

    assert next_acts(goal, [], "rev 1") == [ServerAct(ActionKind.START, 1)]
    assert next_acts(goal, [ServerState(1, STARTING)], "rev 1") == []
    assert next_acts(goal, [up(1)], "rev 1") == [ServerAct(ActionKind.START, 2, 1), ServerAct(ActionKind.START, 3, 1)]


def test_servers_are_upgraded_one_after_the_other_and_only_when_the_one_before_is_ready() -> None:
    goal, one = RolloutGoal(2, count=2, before=1), up(1)

    assert next_acts(goal, [one, up(2)], "rev 2") == [ServerAct(ActionKind.UPGRADE, 1)]
    assert next_acts(goal, [replace(one, phase=MOVING, applying=2), up(2)], "rev 2") == []
    assert next_acts(goal, [up(1, 2, phase=ReplicaPhase.FINISHING), up(2)], "rev 2") == []
    assert next_acts(goal, [up(1, 2, is_ready=False), up(2)], "rev 2") == []
    assert next_acts(goal, [up(1, 2), up(2)], "rev 2") == [ServerAct(ActionKind.UPGRADE, 2)]
    assert judged(goal, [up(1, 2), up(2, 2)]) == replace(goal, is_reached=True)


def test_a_change_of_traffic_alone_does_not_upgrade() -> None:
    assert next_acts(RolloutGoal(2, before=1), [up(1)], "rev 1") == [ServerAct(ActionKind.RETUNE, 1)]


def test_a_revision_that_fails_in_one_server_goes_back_in_the_others() -> None:
    goal, servers = RolloutGoal(2, count=2, before=1), [up(1, 2), up(2, applying=2, failure="no memory")]

    back = judged(goal, servers)

    assert back == RolloutGoal(1, 2, 1, failed=2, reason="no memory")
    assert answering(goal, servers) == answering(back, servers) == 1
    assert next_acts(back, servers, "rev 1") == [ServerAct(ActionKind.UPGRADE, 1)]
    assert judged(back, [up(1), servers[1]]).is_reached


def test_a_first_revision_that_fails_leaves_nothing() -> None:
    servers = [up(1), ServerState(2, applying=1, failure="no memory", starts=1)]

    none = judged(RolloutGoal(1, count=2), servers)

    assert (none.revision, none.failed, none.reason) == (0, 1, "no memory")
    assert next_acts(none, servers, "") == [ServerAct(ActionKind.END, 1), ServerAct(ActionKind.FORGET, 2)]


def test_a_server_that_ends_is_started_again_beside_the_others_with_a_back_off() -> None:
    goal = RolloutGoal(1, count=2, is_reached=True)
    gone = ServerState(2, starts=4, since_start_s=back_off_s(4) - 0.1, failure="no memory", applying=1)

    assert judged(goal, [up(1), gone]) == goal
    assert next_acts(goal, [up(1), gone], "rev 1") == []
    assert next_acts(goal, [up(1), replace(gone, since_start_s=back_off_s(4))], "rev 1") == [
        ServerAct(ActionKind.START, 2, 1)
    ]
    assert next_acts(goal, [gone], "rev 1") == []  # none is left: the reconciler decides


def test_what_is_given_up_is_cancelled_until_it_has_ended_and_then_what_has_it_goes_back() -> None:
    goal, moving = RolloutGoal(2, count=2, before=1), replace(up(2), phase=MOVING, applying=2)
    servers = [up(1, 2), moving]

    back = abandoned(goal, "")

    assert next_acts(back, servers, "rev 1")[0] == ServerAct(ActionKind.CANCEL, 2)
    assert not judged(back, [up(1), moving]).is_reached
    assert next_acts(back, [up(1, 2), up(2, applying=2, failure="cancelled")], "rev 1") == [
        ServerAct(ActionKind.UPGRADE, 1)
    ]
    assert next_acts(abandoned(RolloutGoal(1), ""), [ServerState(1, STARTING, applying=1)], "") == [
        ServerAct(ActionKind.CANCEL, 1)
    ]


def test_the_servers_that_are_ready_are_kept() -> None:
    goal = RolloutGoal(1, count=1, is_reached=True)

    assert next_acts(goal, [ServerState(1), up(2), up(3)], "rev 1") == [
        ServerAct(ActionKind.END, 3),
        ServerAct(ActionKind.FORGET, 1),
    ]
    assert next_acts(goal, [up(1, phase=ENDING), up(2)], "rev 1") == []


def test_a_server_that_does_not_answer_is_replaced_when_that_lasts() -> None:
    goal, unwell = RolloutGoal(2, before=1), up(1, is_ready=False, unwell_s=UNWELL_S_MAX - 1)

    assert next_acts(goal, [unwell], "rev 2") == []
    assert next_acts(goal, [replace(unwell, unwell_s=UNWELL_S_MAX)], "rev 2") == [ServerAct(ActionKind.END, 1)]


def test_a_first_server_that_exits_again_and_again_is_started_with_a_back_off() -> None:
    goal = RolloutGoal(1, count=1)
    gone = ServerState(1, starts=4, since_start_s=back_off_s(4) - 0.1)

    assert next_acts(goal, [gone], "rev 1") == []
    assert next_acts(goal, [replace(gone, since_start_s=back_off_s(4))], "rev 1") == [ServerAct(ActionKind.START, 1)]


@dataclass
class Machine:
    """Servers that do as they are told, some seconds later, and what happens to them."""

    servers: dict[int, ServerState] = field(default_factory=dict)
    broken: set[int] = field(default_factory=set)
    goal: RolloutGoal = field(default_factory=RolloutGoal)

    def apply(self, revision: int) -> None:
        busy = any(one.phase in (MOVING, ReplicaPhase.FINISHING) for one in self.servers.values())
        alive = [one for one in self.servers.values() if one.phase is not GONE]
        if not busy and (not alive or self.goal.is_reached or self.goal.failed):
            self.goal = RolloutGoal(revision, max(1, self.goal.count), self.goal.revision if alive else 0)
            for number, one in self.servers.items():
                self.servers[number] = replace(one, applying=0, failure="")

    def look(self) -> None:
        self.goal = judged(self.goal, list(self.servers.values()))

    def step(self) -> None:
        self.look()
        for act in next_acts(self.goal, list(self.servers.values()), f"rev {self.goal.revision}"):
            one = self.servers.get(act.number, ServerState(act.number))
            match act.kind:
                case ActionKind.START:
                    number, beside = act.number, act.beside
                    assert one.phase is GONE
                    assert beside == 0 or self.servers[beside].phase in RUNNING
                    assert beside or all(each.phase is GONE for each in self.servers.values())
                    one = ServerState(number, STARTING, applying=self.goal.revision, starts=one.starts + 1)
                case ActionKind.UPGRADE:
                    assert one.phase is UP
                    assert not any(each.phase is MOVING for each in self.servers.values())
                    one = replace(one, phase=MOVING, applying=self.goal.revision, failure="")
                case ActionKind.CANCEL:
                    assert one.phase in (STARTING, MOVING)
                    assert one.applying != self.goal.revision
                    one = replace(one, phase=GONE if one.phase is STARTING else UP, applying=0)
                case ActionKind.END:
                    assert one.phase not in (GONE, ENDING)
                    one = replace(one, phase=ENDING, applying=0, failure="")
                case ActionKind.FORGET:
                    assert one.phase is GONE
                    del self.servers[act.number]
                    continue
            self.servers[act.number] = one

    def pass_time(self) -> None:
        for number, one in list(self.servers.items()):
            one = replace(one, since_start_s=one.since_start_s + 10.0)
            fails = one.applying in self.broken
            match one.phase:
                case ReplicaPhase.STARTING if fails:
                    one = replace(one, phase=GONE, failure="it is broken")
                case ReplicaPhase.STARTING:
                    one = up(number, one.applying, starts=one.starts)
                case ReplicaPhase.MOVING if fails:
                    one = replace(one, phase=UP, failure="it is broken")
                case ReplicaPhase.MOVING:
                    one = up(number, one.applying, phase=ReplicaPhase.FINISHING, starts=one.starts)
                case ReplicaPhase.FINISHING:
                    one = replace(one, phase=UP)
                case ReplicaPhase.ENDING:
                    one = ServerState(number)
            self.servers[number] = one

    def kill(self, number: int) -> None:
        if number in self.servers:
            one = self.servers[number]
            failure = "killed" if one.phase is STARTING else ""
            self.servers[number] = ServerState(number, applying=one.applying, failure=failure, starts=one.starts)

    def answers(self) -> bool:
        return any(one.phase in RUNNING and one.is_ready for one in self.servers.values())


STEPS = st.one_of(
    st.tuples(st.just("apply"), st.integers(1, 5)),
    st.tuples(st.just("count"), st.integers(1, 4)),
    st.tuples(st.just("kill"), st.integers(1, 4)),
    st.tuples(st.just("give up"), st.just(0)),
    st.tuples(st.just("step"), st.just(0)),
    st.tuples(st.just("time"), st.just(0)),
)


@settings(max_examples=400)
@given(broken=st.sets(st.integers(2, 5)), steps=st.lists(STEPS, max_size=60))
def test_whatever_happens_what_answers_goes_on_and_the_goal_is_reached(
    broken: set[int], steps: list[tuple[str, int]]
) -> None:
    machine = Machine(broken=broken)
    machine.apply(1)
    for step, number in steps:
        did_answer = machine.answers()
        machine.look()
        match step:
            case "apply":
                machine.apply(number)
            case "count" if machine.goal.is_reached:
                machine.goal = replace(machine.goal, count=number)
            case "kill":
                machine.kill(number)
                continue
            case "give up" if machine.goal.revision and not machine.goal.is_reached:
                machine.goal = abandoned(machine.goal, "")
            case "step":
                machine.step()
            case "time":
                machine.pass_time()
        is_given_up = not machine.goal.revision
        assert machine.answers() or not did_answer or is_given_up, "nothing that the platform does ends all servers"

    for _ in range(60):
        machine.step()
        machine.pass_time()
    if not any(one.phase is not GONE for one in machine.servers.values()):
        machine.apply(1)  # as the reconciler does
    for _ in range(60):
        machine.step()
        machine.pass_time()
    assert machine.goal.is_reached
    ready = [one for one in machine.servers.values() if one.phase is UP and one.revision == machine.goal.revision]
    assert len(ready) == len(machine.servers) == machine.goal.count
