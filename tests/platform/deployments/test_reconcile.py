"""What the reconciler decides, and that it comes to the right end whatever happens on the way."""

import contextlib
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.platform.deployments.conftest import ADA, Stage
from tests.support.platform_models import add_version

from charonia.core.errors import ServingError
from charonia.platform.deployments.reconcile import HEALTHY_S, RETRY_S_MAX, DesiredState, Step, decide
from charonia.platform.targets.api import Observed, Replica, RevisionPhase

NOW = 1000.0
READY = RevisionPhase.READY
STARTING = RevisionPhase.STARTING
FAILED = RevisionPhase.FAILED
WELL = (Replica("one", is_ready=True),)


UNWELL = [Replica("pid 7", is_ready=False, reason="it does not answer")]
LATE = NOW - 61
IN_2 = DesiredState(revision=2, serving=1, begun_s=NOW - 5)


@pytest.mark.parametrize(
    ("wanted", "seen", "step", "state", "reason"),
    [
        (DesiredState(revision=1), Observed(), Step.APPLY, "starting", "it is being started"),
        # a failure of an attempt before does not count
        (DesiredState(revision=1), Observed(applying=1, phase=FAILED, reason="old"), Step.APPLY, "starting", ""),
        (IN_2, Observed(1, 2, STARTING, "it loads", replicas=WELL), Step.NONE, "updating", "it loads"),
        (DesiredState(revision=3, serving=1), Observed(1, 2, STARTING), Step.ABANDON, "updating", "is given up"),
        (DesiredState(revision=1, serving=1, ready_s=5.0), Observed(1, phase=READY, replicas=UNWELL), Step.NONE,
            "degraded", "pid 7: it does not answer"),
        (DesiredState(revision=1), Observed(phase=RevisionPhase.ENDING), Step.STOP, "starting", "the server ends"),
        (DesiredState(), Observed(1, phase=READY), Step.STOP, "stopping", ""),
        (DesiredState(), Observed(phase=RevisionPhase.ENDING), Step.STOP, "stopping", ""),
        (DesiredState(), Observed(), Step.NONE, "stopped", ""),
        (DesiredState(is_removed=True), Observed(1, phase=READY), Step.STOP, "stopping", ""),
        (DesiredState(is_removed=True), Observed(), Step.REMOVE, "stopped", ""),
    ],
)  # fmt: skip
def test_the_next_step(wanted: DesiredState, seen: Observed, step: Step, state: str, reason: str) -> None:
    found = decide(wanted, seen, NOW)

    assert (found.step, found.state, found.outcomes) == (step, state, {})
    assert reason in found.reason
    assert found.wanted.begun_s == (NOW if step is Step.APPLY else wanted.begun_s)


@pytest.mark.parametrize(
    ("wanted", "seen", "step", "state", "reason"),
    [
        (DesiredState(2, 1, begun_s=LATE, ready_within_s=60), Observed(1, 2, STARTING, replicas=WELL),
            Step.ABANDON, "ready", "it is not ready after 60 s"),
        (DesiredState(1, begun_s=LATE, ready_within_s=60), Observed(0, 1, STARTING, "it waits for a node"),
            Step.ABANDON, "failed", "it is not ready after 60 s: it waits for a node"),
        (DesiredState(1, begun_s=NOW - 5), Observed(0, 1, FAILED, reason="no such file"),
            Step.NONE, "failed", "no such file"),
    ],
)  # fmt: skip
def test_what_fails_or_is_late_is_given_up(
    wanted: DesiredState, seen: Observed, step: Step, state: str, reason: str
) -> None:
    found = decide(wanted, seen, NOW)

    assert (found.step, found.state, found.outcomes) == (step, state, {wanted.revision: reason})
    assert found.wanted.revision == (wanted.serving or wanted.revision)
    if not wanted.serving:
        assert decide(found.wanted, Observed(), NOW + 100).step is Step.NONE  # it is not tried again


def test_what_fails_leaves_the_one_before_and_says_why() -> None:
    seen = Observed(serving=1, applying=2, phase=FAILED, reason="no such file", replicas=WELL)

    found = decide(DesiredState(revision=2, serving=1, begun_s=NOW - 5), seen, NOW)
    after = decide(found.wanted, seen, NOW + 1)

    assert (found.step, found.outcomes) == (Step.NONE, {2: "no such file"})
    assert found.reason == "revision 2 has failed, and revision 1 stays: no such file"
    assert (after.step, after.state, after.wanted.revision) == (Step.NONE, "ready", 1)


def test_a_server_that_has_ended_is_started_again_with_pauses_that_grow_and_end_with_its_health() -> None:
    wanted, pauses, now_s = DesiredState(revision=1, serving=1, ready_s=NOW - 5), [], NOW
    for _ in range(9):
        begun_s = now_s
        while (found := decide(wanted, Observed(), now_s)).step is Step.NONE:
            now_s += 0.25
            assert found.state == "failed"
        pauses.append(now_s - begun_s)
        wanted = found.wanted
    served = decide(wanted, Observed(serving=1, phase=READY, replicas=WELL), now_s)
    healthy = decide(served.wanted, Observed(serving=1, phase=READY, replicas=WELL), now_s + HEALTHY_S)

    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, RETRY_S_MAX]
    assert served.wanted.attempts == 9
    assert healthy.wanted.attempts == 0


@given(
    wanted=st.builds(
        DesiredState,
        revision=st.integers(0, 3),
        serving=st.integers(0, 3),
        is_removed=st.booleans(),
        begun_s=st.sampled_from([0.0, NOW - 700.0, NOW - 5.0]),
        attempts=st.integers(0, 20),
        ready_s=st.sampled_from([0.0, NOW - 90.0]),
        failure=st.sampled_from(["", "no such file"]),
    ),
    seen=st.builds(
        Observed,
        serving=st.integers(0, 3),
        applying=st.integers(0, 3),
        phase=st.sampled_from(RevisionPhase),
        replicas=st.sampled_from([(), WELL]),
    ),
)
def test_whatever_is_seen_the_same_is_decided_again_after_a_crash(wanted: DesiredState, seen: Observed) -> None:
    found = decide(wanted, seen, NOW)

    assert decide(wanted, seen, NOW) == found
    if found.step is Step.APPLY:
        assert found.wanted.revision == wanted.revision != 0
        assert not wanted.is_removed
    if found.wanted.revision != wanted.revision:
        assert wanted.revision in found.outcomes
        assert found.wanted.revision in (seen.serving, wanted.serving)
    assert replace(found.wanted, revision=wanted.revision).is_removed == wanted.is_removed


ACTIONS = ("change", "change", "break", "stop", "start", "rollback", "crash", "away", "back", "kill", "lock")
HAPPENINGS = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.sampled_from([0.5, 1.0, 2.5, 6.0, 40.0])), min_size=1, max_size=12
)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@example(happenings=[("change", 1.0), ("stop", 0.5), ("break", 1.0)])
@given(happenings=HAPPENINGS)
def test_in_the_end_there_is_what_is_wanted_whatever_has_happened(
    happenings: list[tuple[str, float]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    stage = _stage(tmp_path_factory.mktemp("stage"))
    for number, (action, seconds) in enumerate(happenings, 1):
        _act(stage, action, number)
        before = stage.target.servers.get("default/reader")
        served = before.serving if before is not None and before.phase is not RevisionPhase.ENDING else 0
        stage.pass_s(seconds, is_locked=action == "lock")  # what is done and not written down: as a kill in between
        view = stage.deployments.reads.get(ADA, "default", "reader")
        after = stage.target.servers.get("default/reader")
        if action == "break" and served and view.wanted and after is not None:
            assert after.serving  # what served goes on
    stage.target.is_away = False
    stage.pass_s(250, step_s=2.0)

    view = stage.deployments.reads.get(ADA, "default", "reader")
    server = stage.target.servers.get("default/reader")
    running = server.serving if server is not None else 0
    assert running == (0 if view.state in ("stopped", "failed") else view.wanted), (view, server)
    assert view.state in ("ready", "stopped", "failed")
    assert view.state != "failed" or view.wanted in stage.target.broken
    stage.deployments.changes.remove(ADA, "default", "reader")
    stage.pass_s(10)
    assert stage.deployments.reads.list(ADA, "default")[1] == 0
    assert stage.target.servers == {}
    stage.deployments.close()
    stage.database.close()


def test_a_change_waits_while_another_process_writes_to_the_database(tmp_path: Path) -> None:
    stage = _stage(tmp_path)
    with ThreadPoolExecutor(1) as pool, contextlib.closing(sqlite3.connect(stage.data / "platform.sqlite")) as other:
        other.execute("BEGIN IMMEDIATE")
        changed = pool.submit(stage.deployments.changes.change, ADA, "default", stage.spec(versions=[2]))
        with pytest.raises(TimeoutError):
            changed.result(0.5)
        assert stage.deployments.reads.get(ADA, "default", "reader").revision == 1  # looking does not wait
        other.rollback()
        assert changed.result(200).revision == 2

    stage.pass_s(3)
    assert stage.deployments.reads.get(ADA, "default", "reader").serving == 2
    stage.deployments.close()
    stage.database.close()


def _stage(data: Path) -> Stage:
    stage = Stage(data)
    for content in (b"one", b"two"):
        add_version(stage.database, data, "echo", {"1/model": content})
    stage.deployments.changes.create(ADA, "default", stage.spec(versions=[1]))
    return stage


def _act(stage: Stage, action: str, number: int) -> None:
    changes = stage.deployments.changes
    match action:
        case "change" | "break":
            spec = stage.spec(versions=[1], ready_within_s=100.0 + number)
            if action == "break":
                latest = stage.deployments.reads.get(ADA, "default", "reader").revision
                stage.target.broken[latest + 1] = "no such file"
            changes.change(ADA, "default", spec)
        case "stop":
            changes.stop(ADA, "default", "reader")
        case "start":
            changes.start(ADA, "default", "reader")
        case "rollback":
            with contextlib.suppress(ServingError):  # there is none that served
                changes.rollback(ADA, "default", "reader")
        case "crash":
            if "default/reader" in stage.target.servers:
                stage.target.crash("default/reader")
        case "away" | "back":
            stage.target.is_away = action == "away"
        case "kill":
            stage.restart()
