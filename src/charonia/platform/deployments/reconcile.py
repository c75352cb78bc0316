"""Decides the next step of the reconciler for a deployment, from the wanted and the observed state. Pure.

The decision depends only on the stored and the observed state, and each step may be repeated, so the platform may exit
at any time: it decides the same again.

A revision that has never served and cannot be ready fails for good, and the previous serving one becomes wanted again.
One that has served is restarted whenever it ends, with a back-off.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from charonia.platform.targets.api import Observed, Replica, RevisionPhase

RETRY_S = 1.0
"""Pause before a revision that has served is applied again; it doubles each time."""

RETRY_S_MAX = 60.0

HEALTHY_S = 60.0
"""After a revision has been ready for this long, the next restart begins with the first pause again."""


class Step(Enum):
    """The action at the target."""

    NONE = "none"
    APPLY = "apply"
    ABANDON = "abandon"
    STOP = "stop"
    REMOVE = "remove"
    """Remove the leftovers there, then the records."""


@dataclass(frozen=True, slots=True)
class DesiredState:
    """The stored state of a deployment. Times are seconds of the same clock as `now_s`.

    Attributes:
        revision: The wanted revision, 0 for none.
        serving: The revision that served last, 0 for none.
        ready_within_s: Time limit for the wanted revision to become ready.
        begun_s: When it was applied, 0.0 if not yet, or if it has been ready since.
        attempts: How often it was restarted since it was last healthy.
        ready_s: Since when it is ready, 0.0 if it is not.
        failure: Why it has failed, "" if it has not.
    """

    revision: int = 0
    serving: int = 0
    is_removed: bool = False
    ready_within_s: float = 600.0
    begun_s: float = 0.0
    attempts: int = 0
    ready_s: float = 0.0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class NextStep:
    """An action, and the state to store afterwards.

    Attributes:
        state: State of the deployment: see `tables.DeploymentRow`.
        reason: The reason of that state, for display.
        outcomes: Revisions that serve or have failed from now on: "" or the reason.
    """

    step: Step
    state: str
    reason: str
    wanted: DesiredState
    outcomes: Mapping[int, str] = field(default_factory=dict)


def decide(wanted: DesiredState, seen: Observed, now_s: float) -> NextStep:
    """Return the next step."""
    applying = seen.applying if seen.phase is RevisionPhase.STARTING else 0
    if wanted.is_removed or not wanted.revision:
        return _end(wanted, seen)
    if seen.phase is RevisionPhase.ENDING:
        return NextStep(Step.STOP, "starting", "the server ends before it starts again", wanted)
    if applying not in (0, wanted.revision):
        return NextStep(Step.ABANDON, _working(seen), f"revision {applying} is given up", wanted)
    if applying == wanted.revision:
        return _waits(wanted, seen, now_s)
    if seen.serving == wanted.revision:
        return _serves(wanted, seen, now_s)
    if wanted.failure:
        return NextStep(Step.NONE, "failed", wanted.failure, wanted)
    if seen.applying == wanted.revision and seen.phase is RevisionPhase.FAILED and wanted.begun_s:
        return _failed(Step.NONE, wanted, seen, seen.reason, now_s)
    return _applies(wanted, seen, now_s)


def refused(wanted: DesiredState, seen: Observed, reason: str, now_s: float) -> NextStep:
    """Return the state to store if a revision cannot be applied at all."""
    return _failed(Step.NONE, wanted, seen, reason, now_s)


def _end(wanted: DesiredState, seen: Observed) -> NextStep:
    rest = replace(wanted, begun_s=0.0, attempts=0, ready_s=0.0)
    if seen.phase is not RevisionPhase.ABSENT or seen.serving:
        return NextStep(Step.STOP, "stopping", "requests in flight are finished", rest)
    return NextStep(Step.REMOVE if wanted.is_removed else Step.NONE, "stopped", "", rest)


def _serves(wanted: DesiredState, seen: Observed, now_s: float) -> NextStep:
    number = wanted.revision
    problems = [f"{replica.name}: {replica.reason or 'it is not ready'}" for replica in _unhealthy(seen)]
    if problems:
        return NextStep(Step.NONE, "degraded", "; ".join(problems), replace(wanted, serving=number, ready_s=0.0))
    ready_s = wanted.ready_s or now_s
    is_healthy = now_s - ready_s >= HEALTHY_S
    after = replace(
        wanted,
        serving=number,
        begun_s=0.0 if is_healthy or not wanted.attempts else wanted.begun_s,
        attempts=0 if is_healthy else wanted.attempts,
        ready_s=ready_s,
        failure="",
    )
    is_new = wanted.serving != number or not wanted.ready_s
    return NextStep(Step.NONE, "ready", "", after, {number: ""} if is_new else {})


def _waits(wanted: DesiredState, seen: Observed, now_s: float) -> NextStep:
    begun_s = wanted.begun_s or now_s
    waiting = replace(wanted, begun_s=begun_s, ready_s=0.0)
    if now_s - begun_s > wanted.ready_within_s:
        late = f"it is not ready after {wanted.ready_within_s:g} s" + (f": {seen.doing}" if seen.doing else "")
        return _failed(Step.ABANDON, waiting, seen, late, now_s)
    return NextStep(Step.NONE, _working(seen), seen.doing, waiting)


def _applies(wanted: DesiredState, seen: Observed, now_s: float) -> NextStep:
    has_served = wanted.serving == wanted.revision
    if not has_served:
        begun_s = wanted.begun_s or now_s
        if now_s - begun_s > wanted.ready_within_s:
            return _failed(Step.NONE, wanted, seen, f"it is not ready after {wanted.ready_within_s:g} s", now_s)
        return NextStep(Step.APPLY, _working(seen), "it is being started", replace(wanted, begun_s=begun_s))
    again_s = wanted.begun_s + _pause_s(wanted.attempts) if wanted.attempts else now_s
    if now_s < again_s:
        pause = f"the server has ended again; it is started after a pause of {_pause_s(wanted.attempts):g} s"
        return NextStep(Step.NONE, "failed", pause, wanted)
    after = replace(wanted, begun_s=now_s, attempts=wanted.attempts + 1, ready_s=0.0)
    return NextStep(Step.APPLY, _working(seen), "the server has ended; it is started again", after)


def _failed(step: Step, wanted: DesiredState, seen: Observed, reason: str, now_s: float) -> NextStep:
    """A revision cannot be ready: the previous one becomes wanted again, or it is retried if it was ready before."""
    number = wanted.revision
    if wanted.serving == number:
        again = _applies(wanted, seen, now_s)
        return replace(again, step=again.step if step is Step.NONE else step, reason=reason)
    before = seen.serving or wanted.serving
    if not before:
        return NextStep(step, "failed", reason, replace(wanted, begun_s=0.0, failure=reason), {number: reason})
    after = replace(wanted, revision=before, serving=before, begun_s=0.0, attempts=0, failure="")
    said = f"revision {number} has failed, and revision {before} stays: {reason}"
    return NextStep(step, "ready" if seen.serving else "starting", said, after, {number: reason})


def _working(seen: Observed) -> str:
    return "updating" if seen.serving else "starting"


def _unhealthy(seen: Observed) -> list[Replica]:
    return [replica for replica in seen.replicas if not replica.doing and (replica.reason or not replica.is_ready)]


def _pause_s(attempts: int) -> float:
    return min(RETRY_S * 2.0 ** min(attempts - 1, 10), RETRY_S_MAX)
