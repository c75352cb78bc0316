"""When the processes of a server are started, signalled and given up: each rule, and any order of events."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.server.guard.restarts import (
    BACK_SOON_NS_MAX,
    ENGINE_RESTART_DELAY_NS_MAX,
    ENGINE_START_FAILURES_MAX,
    ENGINE_STOP_MARGIN_NS,
    FINISH_NS,
    FRONT_END_RESTART_DELAY_NS_MAX,
    FRONT_END_STOP_MARGIN_NS,
    HAND_OVER_NS_MAX,
    HEALTHY_NS,
    HUNG,
    HUNG_KILL_NS,
    NOT_STARTED,
    OVER_MEMORY,
    RENEWED,
    RESTART_DELAY_NS,
    TERMINATED,
    Abort,
    BeginHandOver,
    Command,
    Event,
    Exited,
    Finish,
    Forget,
    FrontEndDraining,
    HandOverDone,
    Heartbeat,
    Kill,
    MemoryExceeded,
    ProcessRole,
    Ready,
    ReportEnd,
    ReportReady,
    ReportReadyAgain,
    ReportUpgrade,
    Restarts,
    ServerPhase,
    Spawned,
    SpawnFailed,
    Start,
    StopListening,
    StopRequested,
    Succeed,
    Terminate,
    Tick,
    UpgradeCancelled,
    UpgradeRequested,
    UpgradeStage,
)
from charonia.server.metrics.processes import ProcessRecord

S = 1_000_000_000
EXIT_TIMEOUT = 30 * S
KILLED, CRASHED = -9, -11
REASONS = {
    0: "exit status 0",
    1: "exit status 1",
    2: "exit status 2",
    3: "exit status 3",
    TERMINATED: "SIGTERM",
    KILLED: "SIGKILL",
    CRASHED: "SIGSEGV",
}
ENGINE, FRONT, OTHER = "engine", "front_end_0", "front_end_1"
NEXT = "engine_2"
FRONT_2, OTHER_2 = f"{FRONT}_2", f"{OTHER}_2"
FINISH = 60 * S


def exited(name: str, status: int) -> Exited:
    return Exited(name, status, REASONS[status])


def guard(heartbeat_ns: int = 0, *, is_replica: bool = False) -> Restarts:
    processes = [(ENGINE, ProcessRole.ENGINE), *((name, ProcessRole.FRONT_END) for name in (FRONT, OTHER))]
    return Restarts(
        processes,
        exit_timeout_ns=EXIT_TIMEOUT,
        heartbeat_ns=heartbeat_ns,
        is_replica=is_replica,
    )


def running(now_ns: int = 0, heartbeat_ns: int = 0, *, is_replica: bool = False) -> Restarts:
    """Return a guard whose processes are ready, with the process ids 1, 2 and 3."""
    machine = guard(heartbeat_ns, is_replica=is_replica)
    machine.handle(Tick(), now_ns)
    for pid, name in enumerate((ENGINE, FRONT, OTHER), 1):
        machine.handle(Spawned(name, pid), now_ns)
        machine.handle(Ready(name), now_ns)
    return machine


def restart(machine: Restarts, name: str, now_ns: int, *, is_ready: bool = True) -> int:
    """Let a process be killed, and start it again when the guard says so; return the time from then on."""
    end, *refusal = machine.handle(exited(name, KILLED), now_ns)
    assert isinstance(end, ReportEnd)
    assert refusal in ([], [StopListening(name)])
    assert end.again_ns is not None
    now_ns += end.again_ns
    assert machine.handle(Tick(), now_ns) == [Start(name)]
    machine.handle(Spawned(name, 9), now_ns)
    if is_ready:
        machine.handle(Ready(name), now_ns)
    return now_ns


def test_front_ends_start_when_the_engine_is_ready_and_the_server_is_ready_when_all_are() -> None:
    machine = guard()

    assert machine.handle(Tick(), 0) == [Start(ENGINE)]
    assert machine.handle(Spawned(ENGINE, 1), 0) == []
    assert machine.handle(Ready(ENGINE), 1) == [Start(FRONT), Start(OTHER)]
    assert machine.handle(Ready(FRONT), 2) == []
    assert machine.handle(Ready(OTHER), 3) == [ReportReady()]


@pytest.mark.parametrize(("status", "expected"), [(3, 3), (0, 1), (KILLED, 137)])
def test_an_engine_that_ends_before_it_is_ready_ends_the_server_with_its_status(status: int, expected: int) -> None:
    machine = guard()
    machine.handle(Tick(), 0)
    machine.handle(Spawned(ENGINE, 1), 0)

    commands = machine.handle(exited(ENGINE, status), 2 * S)

    assert commands == [ReportEnd(ENGINE, 1, REASONS[status], 2 * S, None), Finish(expected)]


def test_a_front_end_that_cannot_start_at_first_ends_the_server_with_its_status() -> None:
    machine = guard()
    machine.handle(Tick(), 0)
    machine.handle(Spawned(ENGINE, 1), 0)
    machine.handle(Ready(ENGINE), 0)
    machine.handle(Spawned(FRONT, 2), 0)
    machine.handle(SpawnFailed(OTHER), 0)  # ends it all, the other front end first

    assert machine.handle(exited(FRONT, 0), 1)[-1] == Terminate(ENGINE)
    assert machine.handle(exited(ENGINE, 0), 2)[-1] == Finish(1)
    assert {record.name: record.last_exit for record in machine.records()}[OTHER] == NOT_STARTED


def test_a_front_end_that_ends_is_started_again_within_a_second_and_nothing_else_happens() -> None:
    machine = running()

    commands = machine.handle(exited(FRONT, CRASHED), 5 * S)

    assert commands == [ReportEnd(FRONT, 2, "SIGSEGV", 5 * S, RESTART_DELAY_NS)]
    assert machine.wake_at() == 5 * S + RESTART_DELAY_NS
    assert machine.handle(Tick(), 5 * S + RESTART_DELAY_NS) == [Start(FRONT)]
    machine.handle(Spawned(FRONT, 7), 6 * S)
    assert machine.handle(Ready(FRONT), 6 * S) == [ReportReadyAgain(FRONT, 7)]


@pytest.mark.parametrize(
    ("name", "limit_ns"), [(ENGINE, ENGINE_RESTART_DELAY_NS_MAX), (FRONT, FRONT_END_RESTART_DELAY_NS_MAX)]
)
def test_the_back_off_doubles_up_to_its_limit(name: str, limit_ns: int) -> None:
    machine, now_ns = running(), 0
    delays = []
    for _ in range(12):
        before_ns = now_ns
        now_ns = restart(machine, name, now_ns)
        delays.append(now_ns - before_ns)

    assert delays == [min(RESTART_DELAY_NS * 2**n, limit_ns) for n in range(12)]


@pytest.mark.parametrize(("stretch_ns", "is_reset"), [(HEALTHY_NS - 1, False), (HEALTHY_NS, True)])
def test_a_healthy_stretch_ends_the_back_off(stretch_ns: int, is_reset: bool) -> None:
    machine, now_ns = running(), 0
    for _ in range(3):
        now_ns = restart(machine, ENGINE, now_ns)

    before_ns = now_ns + stretch_ns
    delay_ns = restart(machine, ENGINE, before_ns) - before_ns

    assert delay_ns == (RESTART_DELAY_NS if is_reset else RESTART_DELAY_NS * 8)


def test_an_engine_that_fails_to_start_again_and_again_is_given_up() -> None:
    machine = running()
    now_ns = restart(machine, ENGINE, 0, is_ready=False)
    for _ in range(ENGINE_START_FAILURES_MAX - 1):
        now_ns = restart(machine, ENGINE, now_ns, is_ready=False)

    end, refusal, *stops = machine.handle(exited(ENGINE, 1), now_ns)

    assert isinstance(end, ReportEnd)
    assert end.again_ns is None
    assert refusal == StopListening(ENGINE)
    assert stops == [Terminate(FRONT), Terminate(OTHER)]
    machine.handle(exited(FRONT, 0), now_ns)
    assert machine.handle(exited(OTHER, 0), now_ns)[-1] == Finish(1)


def test_a_front_end_that_fails_to_start_is_never_given_up() -> None:
    machine = running()
    now_ns = restart(machine, FRONT, 0, is_ready=False)

    for _ in range(3 * ENGINE_START_FAILURES_MAX):
        now_ns = restart(machine, FRONT, now_ns, is_ready=False)

    assert machine.phase is ServerPhase.RUNNING


def test_a_stop_drains_the_front_ends_before_the_engine() -> None:
    machine = running()

    assert machine.handle(StopRequested(), S) == [Terminate(FRONT), Terminate(OTHER)]
    assert machine.handle(FrontEndDraining(OTHER), S) == [StopListening(OTHER)]
    assert machine.handle(exited(OTHER, 0), 2 * S)[1:] == []
    assert machine.handle(exited(FRONT, 0), 3 * S)[1:] == [StopListening(FRONT), Terminate(ENGINE)]
    assert machine.handle(exited(ENGINE, 0), 4 * S)[1:] == [StopListening(ENGINE), Finish(0)]


def test_processes_that_do_not_stop_are_killed_and_the_status_says_so() -> None:
    machine = running()
    machine.handle(StopRequested(), 0)
    machine.handle(exited(OTHER, 0), S)

    due_ns = EXIT_TIMEOUT + FRONT_END_STOP_MARGIN_NS
    assert machine.wake_at() == due_ns
    assert machine.handle(Tick(), due_ns) == [Kill(FRONT)]
    assert machine.handle(exited(FRONT, KILLED), due_ns)[-1] == Terminate(ENGINE)
    assert machine.wake_at() == due_ns + ENGINE_STOP_MARGIN_NS
    assert machine.handle(Tick(), due_ns + ENGINE_STOP_MARGIN_NS) == [Kill(ENGINE)]
    assert machine.handle(exited(ENGINE, KILLED), due_ns + ENGINE_STOP_MARGIN_NS)[-1] == Finish(1)


def test_a_second_request_to_stop_changes_nothing() -> None:
    machine = running()
    machine.handle(StopRequested(), S)

    assert machine.handle(StopRequested(), 2 * S) == []
    assert machine.wake_at() == S + EXIT_TIMEOUT + FRONT_END_STOP_MARGIN_NS


def test_nothing_is_started_again_during_a_stop() -> None:
    machine = running()
    machine.handle(exited(FRONT, 1), 0)
    machine.handle(StopRequested(), 1)

    (end, _, stop) = machine.handle(exited(OTHER, 0), 10 * S)

    assert isinstance(end, ReportEnd)
    assert end.again_ns is None
    assert stop == Terminate(ENGINE)
    assert machine.handle(Tick(), 20 * S) == []


def test_a_process_that_was_being_started_when_the_stop_came_is_told_to_stop_too() -> None:
    machine = guard()
    machine.handle(Tick(), 0)
    assert machine.handle(StopRequested(), 1) == []

    assert machine.handle(Spawned(ENGINE, 4), 2) == [Terminate(ENGINE)]
    # It could not handle the signal yet.
    assert machine.handle(exited(ENGINE, TERMINATED), 3)[-1] == Finish(0)


def test_a_process_without_heartbeats_reports_where_it_hangs_and_is_killed() -> None:
    machine = running(heartbeat_ns=10 * S)
    for name in (FRONT, OTHER):
        machine.handle(Heartbeat(name), 9 * S)
    assert machine.wake_at() == 10 * S

    assert machine.handle(Tick(), 10 * S) == [Abort(ENGINE)]
    for name in (FRONT, OTHER):
        machine.handle(Heartbeat(name), 14 * S)
    assert machine.handle(Tick(), 10 * S + HUNG_KILL_NS) == [Kill(ENGINE)]
    end, _ = machine.handle(exited(ENGINE, KILLED), 16 * S)

    assert end == ReportEnd(ENGINE, 1, HUNG, 16 * S, RESTART_DELAY_NS)


def test_a_process_that_loads_models_owes_no_heartbeats() -> None:
    machine = guard(heartbeat_ns=S)
    machine.handle(Tick(), 0)
    machine.handle(Spawned(ENGINE, 1), 0)

    assert machine.wake_at() is None
    assert machine.handle(Tick(), 100 * S) == []


def test_the_record_counts_restarts_by_the_reason_of_the_end_before() -> None:
    machine = running()
    now_ns = restart(machine, ENGINE, 0)
    restart(machine, ENGINE, now_ns)
    machine.handle(exited(FRONT, 2), now_ns + 9 * S)  # ended, and not started again yet

    engine, front_end, other = machine.records()

    assert engine.restarts == {"SIGKILL": 2}
    assert front_end == ProcessRecord(FRONT, last_exit="exit status 2")
    assert other == ProcessRecord(OTHER, 3)


def upgrading(*, stops_first: bool = False, is_loaded: bool = True) -> Restarts:
    """Return a guard in an upgrade, whose next engine has process id 4, is ready, and has not got the front ends."""
    machine = running()
    first = BeginHandOver(ENGINE, "") if stops_first else Start(NEXT)
    assert machine.handle(UpgradeRequested(NEXT, stops_first, FINISH), 0) == [first]
    assert not machine.may_upgrade
    if not stops_first:
        machine.handle(Spawned(NEXT, 4), 0)
        if is_loaded:
            machine.handle(Ready(NEXT), S)
    return machine


def names(machine: Restarts) -> dict[str, int]:
    """Return the numbers of the processes by the name that they are shown with."""
    return {record.name: record.pid for record in machine.records()}


def test_an_upgrade_moves_when_the_next_engine_is_ready_and_ends_with_the_engine_before() -> None:
    machine = upgrading(is_loaded=False)
    assert names(machine) == {"engine": 1, FRONT: 2, OTHER: 3, "next_engine": 4}

    assert machine.handle(Ready(NEXT), S) == [ReportUpgrade(UpgradeStage.LOADED, NEXT, 4), BeginHandOver(ENGINE, NEXT)]
    assert machine.handle(HandOverDone(ENGINE), 2 * S) == [ReportUpgrade(UpgradeStage.MOVED, ENGINE, 1)]
    assert not machine.may_upgrade
    assert names(machine) == {"former_engine": 1, FRONT: 2, OTHER: 3, "engine": 4}
    assert machine.wake_at() == 2 * S + FINISH + EXIT_TIMEOUT + ENGINE_STOP_MARGIN_NS
    assert machine.handle(exited(ENGINE, 0), 3 * S) == [
        ReportEnd(ENGINE, 1, "exit status 0", 3 * S, None),
        Forget(ENGINE),
        ReportUpgrade(UpgradeStage.ENDED, ENGINE, 0),
        Succeed(FRONT_2, FRONT),
        Start(FRONT_2),
    ]
    assert names(machine) == {FRONT: 2, OTHER: 3, "engine": 4, f"next_{FRONT}": 0}
    assert machine.engine == NEXT
    assert not machine.may_upgrade


@pytest.mark.parametrize("is_loaded", [False, True], ids=["before it is ready", "before it has the front ends"])
def test_a_next_engine_that_fails_changes_nothing(is_loaded: bool) -> None:
    machine = upgrading(is_loaded=is_loaded)

    commands = machine.handle(exited(NEXT, 1), 5 * S)

    assert commands[-1] == ReportUpgrade(UpgradeStage.FAILED, NEXT, 4, "exit status 1")
    assert names(machine) == {"engine": 1, FRONT: 2, OTHER: 3}
    assert machine.may_upgrade
    assert is_loaded or machine.wake_at() is None


def test_an_upgrade_that_is_cancelled_ends_the_next_engine() -> None:
    machine = upgrading(is_loaded=False)
    assert machine.may_cancel

    assert machine.handle(UpgradeCancelled(), 2 * S) == [Kill(NEXT)]

    assert machine.handle(exited(NEXT, KILLED), 3 * S)[-1] == ReportUpgrade(UpgradeStage.FAILED, NEXT, 4, "SIGKILL")
    assert machine.may_upgrade
    assert not machine.may_cancel


def test_an_upgrade_that_is_cancelled_before_its_engine_has_a_process_ends_it_then() -> None:
    machine = running()
    machine.handle(UpgradeRequested(NEXT, False, FINISH), 0)

    assert machine.handle(UpgradeCancelled(), S) == []
    assert machine.handle(Spawned(NEXT, 4), 2 * S) == [Kill(NEXT)]


@pytest.mark.parametrize("stops_first", [False, True])
def test_an_upgrade_whose_engine_is_ready_or_that_ends_the_other_one_first_goes_on(stops_first: bool) -> None:
    machine = upgrading(stops_first=stops_first)

    assert not machine.may_cancel
    assert machine.handle(UpgradeCancelled(), 2 * S) == []


def test_after_that_it_is_started_again_like_any_engine() -> None:
    machine = upgrading()
    machine.handle(HandOverDone(ENGINE), 2 * S)

    assert restart(machine, NEXT, 5 * S) == 5 * S + RESTART_DELAY_NS
    assert names(machine)["former_engine"] == 1


def test_an_engine_that_crashes_while_the_next_one_loads_is_started_again_and_then_not_needed() -> None:
    machine = upgrading(is_loaded=False)
    now_ns = restart(machine, ENGINE, 5 * S, is_ready=False)

    assert machine.handle(Ready(NEXT), now_ns) == [ReportUpgrade(UpgradeStage.LOADED, NEXT, 4), Kill(ENGINE)]
    assert ReportUpgrade(UpgradeStage.ENDED, ENGINE, 0) in machine.handle(exited(ENGINE, KILLED), now_ns)
    assert {record.name: dict(record.restarts) for record in machine.records()}["engine"] == {"SIGKILL": 1}


def test_an_engine_that_does_not_hand_over_is_killed() -> None:
    machine = upgrading()

    assert machine.wake_at() == S + HAND_OVER_NS_MAX
    assert machine.handle(Tick(), S + HAND_OVER_NS_MAX) == [Kill(ENGINE)]
    assert ReportUpgrade(UpgradeStage.ENDED, ENGINE, 0) in machine.handle(exited(ENGINE, KILLED), S + HAND_OVER_NS_MAX)


@pytest.mark.parametrize("status", [0, CRASHED])
def test_an_engine_that_ends_first_makes_room_for_the_next_one(status: int) -> None:
    machine = upgrading(stops_first=True)
    assert machine.handle(HandOverDone(ENGINE), S)[0] == StopListening(ENGINE)

    assert machine.handle(exited(ENGINE, status), 2 * S)[-1] == Start(NEXT)
    machine.handle(Spawned(NEXT, 4), 2 * S)
    assert machine.handle(Ready(NEXT), 3 * S) == [
        ReportUpgrade(UpgradeStage.LOADED, NEXT, 4),
        Forget(ENGINE),
        ReportUpgrade(UpgradeStage.ENDED, ENGINE, 0),
        Succeed(FRONT_2, FRONT),
        Start(FRONT_2),
    ]


def test_an_engine_that_ended_first_comes_back_if_the_next_one_fails() -> None:
    machine = upgrading(stops_first=True)
    machine.handle(exited(ENGINE, 0), 2 * S)
    machine.handle(Spawned(NEXT, 4), 2 * S)

    assert machine.handle(exited(NEXT, 1), 3 * S)[-1] == ReportUpgrade(UpgradeStage.FAILED, NEXT, 4, "exit status 1")
    assert machine.handle(Tick(), 3 * S + RESTART_DELAY_NS) == [Start(ENGINE)]
    machine.handle(Spawned(ENGINE, 5), 4 * S)
    assert machine.handle(Ready(ENGINE), 4 * S) == [ReportReadyAgain(ENGINE, 5)]
    assert machine.may_upgrade


def test_a_stop_ends_both_engines_after_the_front_ends() -> None:
    machine = upgrading()

    assert machine.handle(StopRequested(), 2 * S) == [Terminate(FRONT), Terminate(OTHER)]
    machine.handle(exited(FRONT, 0), 3 * S)
    assert machine.handle(exited(OTHER, 0), 3 * S)[2:] == [Terminate(ENGINE), Terminate(NEXT)]
    machine.handle(exited(ENGINE, 0), 4 * S)
    assert machine.handle(exited(NEXT, 0), 4 * S)[-1] == Finish(0)


def test_only_one_upgrade_at_a_time_and_none_before_the_server_is_ready() -> None:
    assert guard().handle(UpgradeRequested(NEXT, False, FINISH), 0) == [Start(ENGINE)]
    assert upgrading().handle(UpgradeRequested("engine_3", False, FINISH), 0) == []


def renewing() -> Restarts:
    """Return a guard that renews its front ends since 3 s; `FRONT_2`, with process id 5, is not ready yet."""
    machine = upgrading()
    machine.handle(HandOverDone(ENGINE), 2 * S)
    machine.handle(exited(ENGINE, 0), 3 * S)
    machine.handle(Spawned(FRONT_2, 5), 3 * S)
    return machine


def test_front_ends_are_renewed_one_after_the_other_each_when_the_one_before_is_ready() -> None:
    machine = renewing()

    assert machine.handle(Ready(FRONT_2), 4 * S) == [
        ReportReadyAgain(FRONT_2, 5),
        Terminate(FRONT, FINISH),
        ReportUpgrade(UpgradeStage.RENEWED, FRONT_2, 5),
        Succeed(OTHER_2, OTHER),
        Start(OTHER_2),
    ]
    assert machine.handle(FrontEndDraining(FRONT), 4 * S) == []
    machine.handle(Spawned(OTHER_2, 6), 4 * S)
    assert names(machine) == {"engine": 4, f"former_{FRONT}": 2, FRONT: 5, OTHER: 3, f"next_{OTHER}": 6}
    machine.handle(Ready(OTHER_2), 5 * S)
    assert machine.handle(exited(OTHER, 0), 6 * S)[1:] == [Forget(OTHER)]
    assert not machine.may_upgrade
    assert machine.handle(exited(FRONT, 0), 7 * S)[1:] == [Forget(FRONT), ReportUpgrade(UpgradeStage.SETTLED, "", 0)]
    assert machine.may_upgrade
    assert {record.name: dict(record.restarts) for record in machine.records()} == {
        "engine": {},
        FRONT: {RENEWED: 1},
        OTHER: {RENEWED: 1},
    }


def test_a_front_end_that_was_renewed_is_started_again_and_renewed_again_like_any() -> None:
    machine = renewing()
    machine.handle(Ready(FRONT_2), 4 * S)
    machine.handle(exited(FRONT, 0), 5 * S)

    restart(machine, FRONT_2, 5 * S)
    assert {record.name: dict(record.restarts) for record in machine.records()}[FRONT] == {RENEWED: 1, "SIGKILL": 1}
    assert machine.handle(FrontEndDraining(FRONT_2), 9 * S) == [Succeed(f"{FRONT}_3", FRONT_2), Start(f"{FRONT}_3")]


def test_a_front_end_that_does_not_finish_in_time_is_killed() -> None:
    machine = renewing()
    machine.handle(Ready(FRONT_2), 4 * S)
    machine.handle(SpawnFailed(OTHER_2), 4 * S)

    due_ns = 4 * S + FINISH + EXIT_TIMEOUT + FRONT_END_STOP_MARGIN_NS
    assert machine.wake_at() == due_ns
    assert machine.handle(Tick(), due_ns) == [Kill(FRONT)]


def test_a_next_front_end_that_cannot_start_leaves_the_one_before_and_ends_the_renewal() -> None:
    machine = renewing()

    assert machine.handle(exited(FRONT_2, 1), 4 * S)[1:] == [
        Forget(FRONT_2),
        ReportUpgrade(UpgradeStage.NOT_RENEWED, FRONT_2, 5, "exit status 1"),
    ]
    assert names(machine) == {"engine": 4, FRONT: 2, OTHER: 3}
    assert machine.may_upgrade


def test_a_front_end_that_crashes_while_the_next_one_starts_is_not_started_again() -> None:
    machine = renewing()

    assert machine.handle(exited(FRONT, CRASHED), 4 * S)[1:] == [Forget(FRONT)]
    machine.handle(exited(FRONT_2, 1), 4 * S)  # nobody else has these sockets: it is started again like any
    assert machine.handle(Tick(), 4 * S + RESTART_DELAY_NS)[0] == Start(FRONT_2)


def test_a_renewal_waits_for_a_front_end_that_is_being_started_and_skips_one_that_will_be() -> None:
    machine = upgrading()
    machine.handle(HandOverDone(ENGINE), 2 * S)
    machine.handle(exited(FRONT, KILLED), 2 * S)
    machine.handle(Tick(), 2 * S + RESTART_DELAY_NS)  # with what was on the disk then, perhaps
    machine.handle(Spawned(FRONT, 7), 3 * S)
    machine.handle(exited(OTHER, KILLED), 3 * S)

    assert machine.handle(exited(ENGINE, 0), 3 * S)[-1] == ReportUpgrade(UpgradeStage.ENDED, ENGINE, 0)
    assert machine.handle(Ready(FRONT), 3 * S)[-1] == Start(FRONT_2)
    machine.handle(Spawned(FRONT_2, 8), 3 * S)
    machine.handle(Ready(FRONT_2), 3 * S)
    assert machine.handle(exited(FRONT, 0), 3 * S)[-1] == ReportUpgrade(UpgradeStage.SETTLED, "", 0)


def test_a_front_end_that_somebody_else_told_to_stop_is_succeeded_at_once() -> None:
    machine = running()

    assert machine.handle(FrontEndDraining(FRONT), 5 * S) == [Succeed(FRONT_2, FRONT), Start(FRONT_2)]
    machine.handle(Spawned(FRONT_2, 5), 5 * S)
    assert names(machine) == {"engine": 1, f"former_{FRONT}": 2, OTHER: 3, FRONT: 5}
    assert machine.handle(Ready(FRONT_2), 6 * S) == [ReportReadyAgain(FRONT_2, 5)]
    assert machine.wake_at() == 5 * S + FINISH_NS + EXIT_TIMEOUT + FRONT_END_STOP_MARGIN_NS
    assert machine.handle(exited(FRONT, 0), 7 * S)[1:] == [Forget(FRONT)]
    assert names(machine) == {"engine": 1, OTHER: 3, FRONT: 5}


def test_one_that_leaves_while_the_next_one_starts_has_no_third() -> None:
    machine = renewing()

    assert machine.handle(FrontEndDraining(FRONT), 4 * S) == []
    assert machine.handle(Ready(FRONT_2), 5 * S)[1] == ReportUpgrade(UpgradeStage.RENEWED, FRONT_2, 5)


def test_connections_wait_for_a_front_end_that_is_back_soon_and_are_refused_otherwise() -> None:
    machine = running()
    refused = []
    now_ns = 0
    for _ in range(6):
        end, *refusal = machine.handle(exited(FRONT, KILLED), now_ns)
        assert isinstance(end, ReportEnd)
        assert end.again_ns is not None
        refused.append((end.again_ns, refusal == [StopListening(FRONT)]))
        now_ns += end.again_ns
        machine.handle(Tick(), now_ns)
        machine.handle(Spawned(FRONT, 9), now_ns)
        machine.handle(Ready(FRONT), now_ns)

    assert [(delay_ns, delay_ns > BACK_SOON_NS_MAX) for delay_ns, _ in refused] == refused
    # One that cannot start, or that has no engine to meet, is not back soon.
    restart(machine, OTHER, now_ns, is_ready=False)
    assert StopListening(OTHER) in machine.handle(exited(OTHER, 1), now_ns)
    machine = running()
    assert StopListening(ENGINE) in machine.handle(exited(ENGINE, KILLED), 0)
    assert StopListening(FRONT) in machine.handle(exited(FRONT, KILLED), 0)


def test_the_front_ends_of_a_replica_leave_when_its_engine_ends_and_others_listen_when_it_is_back() -> None:
    machine = running(is_replica=True)

    end, *commands = machine.handle(exited(ENGINE, KILLED), S)

    assert end == ReportEnd(ENGINE, 1, "SIGKILL", S, RESTART_DELAY_NS)
    assert commands == [
        StopListening(ENGINE),
        *(Terminate(FRONT, FINISH_NS), Succeed(FRONT_2, FRONT), Start(FRONT_2)),
        *(Terminate(OTHER, FINISH_NS), Succeed(OTHER_2, OTHER), Start(OTHER_2)),
    ]
    machine.handle(Spawned(FRONT_2, 4), S)
    assert machine.handle(FrontEndDraining(FRONT), S) == [StopListening(FRONT)]  # and has a successor already
    assert machine.handle(Tick(), S + RESTART_DELAY_NS) == [Start(ENGINE)]
    machine.handle(Spawned(ENGINE, 5), 2 * S)
    machine.handle(Ready(ENGINE), 2 * S)
    assert machine.handle(Ready(FRONT_2), 2 * S) == [ReportReadyAgain(FRONT_2, 4)]
    assert machine.handle(exited(FRONT, 0), 3 * S)[-1] == Forget(FRONT)


def test_the_front_ends_of_a_replica_that_stops_serve_until_their_clients_have_left() -> None:
    machine = running(is_replica=True)

    assert machine.handle(StopRequested(), S) == [Terminate(FRONT, EXIT_TIMEOUT), Terminate(OTHER, EXIT_TIMEOUT)]
    machine.handle(exited(FRONT, 0), 2 * S)
    due_ns = S + 2 * EXIT_TIMEOUT + FRONT_END_STOP_MARGIN_NS
    assert machine.handle(Tick(), due_ns - 1) == []
    assert machine.handle(Tick(), due_ns) == [Kill(OTHER)]


def test_an_engine_over_its_memory_is_killed_and_started_again_and_its_end_says_why() -> None:
    machine = running()

    assert machine.handle(MemoryExceeded(ENGINE), S) == [Kill(ENGINE)]
    (end, *_) = machine.handle(exited(ENGINE, KILLED), S)

    assert end == ReportEnd(ENGINE, 1, OVER_MEMORY, S, RESTART_DELAY_NS)
    assert machine.handle(MemoryExceeded(ENGINE), S) == []  # it is measured while it ends
    machine.handle(Tick(), S + RESTART_DELAY_NS)
    machine.handle(Spawned(ENGINE, 4), 2 * S)
    machine.handle(Ready(ENGINE), 2 * S)
    assert machine.handle(exited(ENGINE, KILLED), 3 * S)[0].reason == "SIGKILL"  # type: ignore[union-attr]
    assert machine.records()[0].restarts == {OVER_MEMORY: 1}


STATUSES = st.sampled_from([0, 1, KILLED, CRASHED])


@dataclass
class World:
    """Processes as the system sees them, which obey SIGKILL only."""

    machine: Restarts = field(default_factory=lambda: guard(heartbeat_ns=20 * S))
    now_ns: int = 0
    starting: list[str] = field(default_factory=list)  # told to start, not yet spawned
    alive: dict[str, int] = field(default_factory=dict)
    killed: set[str] = field(default_factory=set)
    ready: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    reported: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    ended_ns: dict[str, int] = field(default_factory=dict)
    pid: int = 100

    def tell(self, event: Event) -> None:
        for command in self.machine.handle(event, self.now_ns):
            self.carry_out(command)
        wake_at = self.machine.wake_at()
        assert wake_at is None or wake_at > self.now_ns, "what is due has been done"

    def carry_out(self, command: Command) -> None:
        assert self.finished == [], "nothing follows the end"
        match command:
            case Start(name):
                assert name not in self.alive
                assert name not in self.starting
                if name in self.ended_ns:
                    is_engine = name.startswith(ENGINE)
                    limit_ns = ENGINE_RESTART_DELAY_NS_MAX if is_engine else FRONT_END_RESTART_DELAY_NS_MAX
                    assert RESTART_DELAY_NS <= self.now_ns - self.ended_ns[name] <= limit_ns
                self.starting.append(name)
            case Terminate(name) | Abort(name):
                assert name in self.alive
            case Succeed(name, former):
                assert name not in self.alive
                self.ended_ns.pop(name, None)  # it may have the name of one that could not start
                assert former in self.alive
            case Kill(name):
                assert name in self.alive
                self.killed.add(name)
            case ReportEnd(_, pid):
                self.reported.append(pid)
            case BeginHandOver(name, next_name):
                assert name in self.alive
                assert next_name in ("", *self.alive)
            case ReportUpgrade(UpgradeStage.FAILED):
                self.ended_ns.clear()  # an engine that ended first comes back after the new one, not after its own end
            case Finish(status):
                assert (self.alive, self.starting) == ({}, [])
                self.finished.append(status)

    def spawn(self, *, succeeds: bool = True) -> None:
        if self.starting:
            name = self.starting.pop(0)
            if not succeeds:
                self.ended_ns[name] = self.now_ns
                self.tell(SpawnFailed(name))
                return
            self.pid += 1
            self.alive[name] = self.pid
            self.tell(Spawned(name, self.pid))

    def exit(self, name: str, status: int) -> None:
        if name in self.alive:
            del self.alive[name]
            self.killed.discard(name)
            self.ended_ns[name] = self.now_ns
            self.tell(exited(name, status))

    def pass_time(self, ns: int) -> None:
        """Let time pass; the guard is woken when it asked to be."""
        end_ns = self.now_ns + ns
        while (wake_at := self.machine.wake_at()) is not None and wake_at <= end_ns:
            self.now_ns = max(self.now_ns, wake_at)
            self.tell(Tick())
        self.now_ns = end_ns


NAMES = st.sampled_from([ENGINE, NEXT, FRONT, OTHER, FRONT_2, OTHER_2])
STEPS = st.one_of(
    st.tuples(st.just("upgrade"), st.booleans()),
    st.tuples(st.just("handed over"), NAMES),
    st.tuples(st.just("spawn"), st.booleans()),
    st.tuples(st.just("ready"), NAMES),
    st.tuples(st.just("beat"), NAMES),
    st.tuples(st.just("exit"), NAMES, STATUSES),
    st.tuples(st.just("time"), st.integers(0, 70 * S)),
    st.tuples(st.just("left"), NAMES),
    st.tuples(st.just("over memory"), NAMES),
    st.tuples(st.just("stop")),
)


@settings(max_examples=300)
@given(is_up=st.booleans(), is_replica=st.booleans(), steps=st.lists(STEPS, max_size=60))
def test_in_any_order_nothing_runs_twice_every_process_is_reported_once_and_a_stop_ends(
    is_up: bool, is_replica: bool, steps: list[tuple[object, ...]]
) -> None:
    world, is_upgraded = World(guard(heartbeat_ns=20 * S, is_replica=is_replica)), False
    world.tell(Tick())
    for name in (ENGINE, FRONT, OTHER) if is_up else ():
        world.spawn()
        world.tell(Ready(name))
    for step in steps:
        if world.finished:
            break
        match step:
            case ("spawn", bool(succeeds)):
                world.spawn(succeeds=succeeds)
            case ("ready", str(name)) if name in world.alive:
                world.tell(Ready(name))
            case ("beat", str(name)) if name in world.alive:
                world.tell(Heartbeat(name))
            case ("upgrade", bool(stops_first)) if not is_upgraded:
                is_upgraded = world.machine.may_upgrade
                world.tell(UpgradeRequested(NEXT, stops_first, 60 * S))
            case ("handed over", str(name)) if name in world.alive:
                world.tell(HandOverDone(name))
            case ("left", str(name)) if name in world.alive and not name.startswith(ENGINE):
                world.tell(FrontEndDraining(name))
            case ("exit", str(name), int(status)):
                world.exit(name, status)
            case ("time", int(ns)):
                world.pass_time(ns)
            case ("over memory", str(name)) if name in world.alive and name.startswith(ENGINE):
                world.tell(MemoryExceeded(name))
            case ("stop",):
                world.tell(StopRequested())

    if not world.finished:
        world.tell(StopRequested())
    while world.starting:
        world.spawn()
    for _ in range(3):  # none obeys anything but SIGKILL
        world.pass_time(2 * EXIT_TIMEOUT + ENGINE_STOP_MARGIN_NS)
        for name in list(world.killed):
            world.exit(name, KILLED)
    assert len(world.finished) == 1
    spawned = [pid for pid in world.reported if pid]
    assert sorted(spawned) == list(range(101, world.pid + 1))
