"""Decides the next step of the servers of a deployment on one machine. Pure.

A revision is applied server by server: each is upgraded in place, so none is ever missing, and the next one follows
when it has moved and is ready. The first server of a deployment starts alone, the others beside it. If one fails, the
revision has failed: upgraded servers roll back. A server of an established revision that exits is restarted with a
back-off, beside the remaining ones; if none remains, the reconciler decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

UNWELL_S_MAX = 20.0
"""A server that has not answered for this long is replaced instead of upgraded."""

BACK_OFF_S = 1.0
"""Pause before a server is restarted beside others; it doubles with each consecutive start."""

BACK_OFF_S_MAX = 60.0

LOST_STARTS_MAX = 5
"""Starts after which a server has failed that always exited before its process was known."""


@dataclass(frozen=True, slots=True)
class RolloutGoal:
    """The desired state.

    Attributes:
        revision: The revision of all servers, 0 for none at all.
        before: The revision to roll back to, 0 for none.
        is_reached: Whether the state has been reached: later failures do not count against the revision.
        failed: The revision that was abandoned because it failed, 0 for none.
    """

    revision: int = 0
    count: int = 1
    before: int = 0
    is_reached: bool = False
    failed: int = 0
    reason: str = ""


class ReplicaPhase(Enum):
    """State of a server."""

    GONE = "gone"
    STARTING = "starting"
    UP = "up"
    MOVING = "moving"
    """The next revision starts in it, and the previous one answers."""
    FINISHING = "finishing"
    """The next revision answers, and the previous one completes its requests."""
    ENDING = "ending"


RUNNING = (ReplicaPhase.UP, ReplicaPhase.MOVING, ReplicaPhase.FINISHING)
"""They answer, if they are healthy."""


@dataclass(frozen=True, slots=True)
class ServerState:
    """A server.

    Attributes:
        number: Its number, from 1 on.
        revision: The revision that answers, 0 for none.
        applying: The revision being applied, or one that has failed; 0 for none.
        made: Digest of the content of the revision that answers.
        is_ready: Whether it answers, with all models.
        failure: Why the applied revision has failed, "" if it has not.
        since_start_s: Seconds since the last start.
    """

    number: int
    phase: ReplicaPhase = ReplicaPhase.GONE
    revision: int = 0
    applying: int = 0
    made: str = ""
    is_ready: bool = False
    unwell_s: float = 0.0
    failure: str = ""
    starts: int = 0
    since_start_s: float = 0.0


class ActionKind(Enum):
    """Kinds of actions on a server."""

    START = "start"
    """On its own sockets, or beside another one."""
    UPGRADE = "upgrade"
    """In place, to the revision."""
    RETUNE = "retune"
    """Change its traffic split: the revisions do not differ otherwise."""
    END = "end"
    FORGET = "forget"
    """Remove the leftovers of an unwanted server that has exited."""
    CANCEL = "cancel"
    """Cancel an unwanted revision in it."""


class ServerAct(NamedTuple):
    """An action on a server; `beside` is the one that it is started beside, 0 for none."""

    kind: ActionKind
    number: int
    beside: int = 0


def judged(goal: RolloutGoal, servers: Sequence[ServerState]) -> RolloutGoal:
    """Return the goal, with the information whether it is reached or has failed."""
    if goal.is_reached or not goal.revision:
        return goal
    failures = [one for one in servers if one.failure and one.applying == goal.revision]
    if failures and goal.before != goal.revision:
        return abandoned(goal, failures[0].failure)
    there = [one for one in servers if one.phase in RUNNING and one.revision == goal.revision and one.is_ready]
    others = [one for one in servers if _applies_unwanted(one, goal)]
    others += [one for one in servers if one.phase in RUNNING and one.revision != goal.revision]
    return replace(goal, is_reached=True) if len(there) >= goal.count and not others else goal


def abandoned(goal: RolloutGoal, reason: str) -> RolloutGoal:
    """Return the goal after its revision has failed for a reason, or was cancelled ("")."""
    failed = goal.revision if reason else 0
    return RolloutGoal(goal.before, goal.count if goal.before else 0, goal.before, failed=failed, reason=reason)


def next_acts(goal: RolloutGoal, servers: Sequence[ServerState], made: str) -> list[ServerAct]:
    """Return what to do now.

    Args:
        goal: The goal, as `judged` returns it.
        servers: All servers, including exited ones.
        made: Digest of the content of the goal's revision.
    """
    kept, surplus = _chosen(goal, servers)
    acts: list[ServerAct] = [
        ServerAct(ActionKind.CANCEL, one.number) for one in servers if _applies_unwanted(one, goal)
    ]
    for one in surplus:
        if _applies_unwanted(one, goal):
            continue
        if one.phase is ReplicaPhase.GONE:
            acts.append(ServerAct(ActionKind.FORGET, one.number))
        elif one.phase is not ReplicaPhase.ENDING:
            acts.append(ServerAct(ActionKind.END, one.number))
    return acts + (_upgrades(goal, kept, made) or _starts(goal, kept, servers))


def answering(goal: RolloutGoal, servers: Sequence[ServerState]) -> int:
    """Return the revision that answers requests, 0 for none; of two, the previous one."""
    found = {one.revision for one in servers if one.phase in RUNNING and one.revision}
    if goal.is_reached or not found:
        return goal.revision if goal.revision in found else max(found, default=0)
    return goal.before if goal.before else 0


def back_off_s(starts: int) -> float:
    """Return the pause before a server that was started so often is started again."""
    return min(BACK_OFF_S * 2.0 ** min(max(0, starts - 1), 10), BACK_OFF_S_MAX)


def _applies_unwanted(one: ServerState, goal: RolloutGoal) -> bool:
    """Whether an unwanted revision is being applied in a server."""
    return one.phase in (ReplicaPhase.STARTING, ReplicaPhase.MOVING) and one.applying not in (0, goal.revision)


def _chosen(goal: RolloutGoal, servers: Sequence[ServerState]) -> tuple[list[ServerState], list[ServerState]]:
    """Return the servers to keep, and the surplus ones: of equal ones, the last."""
    by_worth = sorted(servers, key=lambda one: (one.phase is ReplicaPhase.ENDING, not one.is_ready, one.number))
    lasting = [one for one in by_worth if one.phase is not ReplicaPhase.ENDING]
    kept = lasting[: goal.count if goal.revision else 0]
    return kept, [one for one in by_worth if one not in kept]


def _upgrades(goal: RolloutGoal, kept: Sequence[ServerState], made: str) -> list[ServerAct]:
    """Return the next act on a server of another revision; none while an upgrade is under way."""
    if any(one.phase in (ReplicaPhase.MOVING, ReplicaPhase.FINISHING) for one in kept):
        return []
    others = [one for one in kept if one.phase is ReplicaPhase.UP and one.revision != goal.revision]
    if any(one.revision == goal.revision and not one.is_ready and one.phase is ReplicaPhase.UP for one in kept):
        return []  # it has just moved: it has to be ready before the next one
    for one in others:
        if one.is_ready and not (one.failure and one.applying == goal.revision):
            return [
                ServerAct(ActionKind.RETUNE, one.number)
                if one.made == made
                else ServerAct(ActionKind.UPGRADE, one.number)
            ]
    return [ServerAct(ActionKind.END, one.number) for one in others if one.unwell_s >= UNWELL_S_MAX or one.failure]


def _starts(goal: RolloutGoal, kept: Sequence[ServerState], servers: Sequence[ServerState]) -> list[ServerAct]:
    if not goal.revision or any(one.phase in RUNNING and one.revision != goal.revision for one in kept):
        return []  # the revision has to prove itself where there is one to go back to
    taken = {one.number for one in servers}
    free = [number for number in range(1, len(taken) + goal.count + 1) if number not in taken]
    gone = [one for one in kept if one.phase is ReplicaPhase.GONE]
    missing = goal.count - len(kept)
    up = [one.number for one in kept if one.phase in RUNNING]
    if not up:
        if goal.is_reached or any(one.phase is not ReplicaPhase.GONE for one in servers):
            return []
        if gone and gone[0].since_start_s < back_off_s(gone[0].starts):
            return []
        return [ServerAct(ActionKind.START, gone[0].number if gone else free[0])]
    due = [one.number for one in gone if one.since_start_s >= back_off_s(one.starts)]
    return [ServerAct(ActionKind.START, number, up[0]) for number in (*due, *free[:missing])]
