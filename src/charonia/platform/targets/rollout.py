"""How the servers of a deployment on one machine become what is wanted: one step at a time. Pure.

A revision is brought about server by server: each is upgraded in place, so none is ever missing, and one that has moved
and is ready comes before the next. The first server of a deployment starts alone, the others beside it. If one fails,
the revision has failed: those that have it already go back. A server of a revision that has been brought about before,
and ends, is started again with a back-off, beside those that are left; if none is left, the reconciler decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

UNWELL_S_MAX = 20.0
"""A server that has not answered for so long is not upgraded but replaced."""

BACK_OFF_S = 1.0
"""Pause before a server is started again beside others; it doubles with each start that follows."""

BACK_OFF_S_MAX = 60.0

LOST_STARTS_MAX = 5
"""Starts after which a server has failed that has always exited before its process was known."""


@dataclass(frozen=True, slots=True)
class RolloutGoal:
    """What is to be.

    Attributes:
        revision: The revision of all servers, 0 for none at all.
        count: How many there are to be.
        before: The one that they go back to if this one fails, 0 for none.
        is_reached: Whether it has been so: what fails from then on does not count against the revision.
        failed: The revision that was given up because it failed, 0 for none.
        reason: Why.
    """

    revision: int = 0
    count: int = 1
    before: int = 0
    is_reached: bool = False
    failed: int = 0
    reason: str = ""


class ReplicaPhase(Enum):
    """What a server does."""

    GONE = "gone"
    STARTING = "starting"
    UP = "up"
    MOVING = "moving"
    """The next revision starts in it, and the one before answers."""
    FINISHING = "finishing"
    """The next revision answers, and the one before finishes what it has begun."""
    ENDING = "ending"


RUNNING = (ReplicaPhase.UP, ReplicaPhase.MOVING, ReplicaPhase.FINISHING)
"""They answer, if they are well."""


@dataclass(frozen=True, slots=True)
class ServerState:
    """A server.

    Attributes:
        number: Its number, from 1 on.
        phase: What it does.
        revision: The revision that answers, 0 for none.
        applying: The one that is being brought about, or has failed to be; 0 for none.
        made: What stands for the content of the one that answers.
        is_ready: Whether it answers, with all models.
        unwell_s: For how long it has not.
        failure: Why the one that was applied has failed, "" if it has not.
        starts: How often it was started.
        since_start_s: How long ago that was last.
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


@dataclass(frozen=True, slots=True)
class StartServer:
    """Start a server, on sockets of its own or beside another one (0 for none)."""

    number: int
    beside: int = 0


@dataclass(frozen=True, slots=True)
class UpgradeServer:
    """Let the revision take the place of the one that a server has."""

    number: int


@dataclass(frozen=True, slots=True)
class RetuneServer:
    """Change how a server splits its traffic: nothing else is different in the revision."""

    number: int


@dataclass(frozen=True, slots=True)
class EndServer:
    """Tell a server to end."""

    number: int


@dataclass(frozen=True, slots=True)
class ForgetServer:
    """Remove what is left of a server that has ended and is not wanted."""

    number: int


@dataclass(frozen=True, slots=True)
class CancelServer:
    """Give up what is being brought about in a server: it is not wanted any more."""

    number: int


Act = CancelServer | StartServer | UpgradeServer | RetuneServer | EndServer | ForgetServer


def judged(goal: RolloutGoal, servers: Sequence[ServerState]) -> RolloutGoal:
    """Return what is to be from now on: whether the goal is reached, or has to be given up."""
    if goal.is_reached or not goal.revision:
        return goal
    failures = [one for one in servers if one.failure and one.applying == goal.revision]
    if failures and goal.before != goal.revision:
        return given_up(goal, failures[0].failure)
    there = [one for one in servers if one.phase in RUNNING and one.revision == goal.revision and one.is_ready]
    others = [one for one in servers if _strays(one, goal)]
    others += [one for one in servers if one.phase in RUNNING and one.revision != goal.revision]
    return replace(goal, is_reached=True) if len(there) >= goal.count and not others else goal


def given_up(goal: RolloutGoal, reason: str) -> RolloutGoal:
    """Return the goal after a revision that was given up, for a reason or because somebody says so ("")."""
    failed = goal.revision if reason else 0
    return RolloutGoal(goal.before, goal.count if goal.before else 0, goal.before, failed=failed, reason=reason)


def next_acts(goal: RolloutGoal, servers: Sequence[ServerState], made: str) -> list[Act]:
    """Return what to do now.

    Args:
        goal: What is to be, as `judged` has it.
        servers: The servers that there are, also those that have ended.
        made: What stands for the content of the wanted revision.
    """
    kept, surplus = _chosen(goal, servers)
    acts: list[Act] = [CancelServer(one.number) for one in servers if _strays(one, goal)]
    for one in surplus:
        if _strays(one, goal):
            continue
        if one.phase is ReplicaPhase.GONE:
            acts.append(ForgetServer(one.number))
        elif one.phase is not ReplicaPhase.ENDING:
            acts.append(EndServer(one.number))
    return acts + (_upgrades(goal, kept, made) or _starts(goal, kept, servers))


def answering(goal: RolloutGoal, servers: Sequence[ServerState]) -> int:
    """Return the revision that answers requests, 0 for none: of two, the one before."""
    found = {one.revision for one in servers if one.phase in RUNNING and one.revision}
    if goal.is_reached or not found:
        return goal.revision if goal.revision in found else max(found, default=0)
    return goal.before if goal.before else 0


def back_off_s(starts: int) -> float:
    """Return the pause before a server that was started so often is started again."""
    return min(BACK_OFF_S * 2.0 ** min(max(0, starts - 1), 10), BACK_OFF_S_MAX)


def _strays(one: ServerState, goal: RolloutGoal) -> bool:
    """Whether a revision is being brought about in a server that is not wanted any more."""
    return one.phase in (ReplicaPhase.STARTING, ReplicaPhase.MOVING) and one.applying not in (0, goal.revision)


def _chosen(goal: RolloutGoal, servers: Sequence[ServerState]) -> tuple[list[ServerState], list[ServerState]]:
    """Return the servers that are kept, and those that are one too many: of equal ones, the last."""
    by_worth = sorted(servers, key=lambda one: (one.phase is ReplicaPhase.ENDING, not one.is_ready, one.number))
    lasting = [one for one in by_worth if one.phase is not ReplicaPhase.ENDING]
    kept = lasting[: goal.count if goal.revision else 0]
    return kept, [one for one in by_worth if one not in kept]


def _upgrades(goal: RolloutGoal, kept: Sequence[ServerState], made: str) -> list[Act]:
    """Return what is to be done with a server of another revision; nothing while one is on its way."""
    if any(one.phase in (ReplicaPhase.MOVING, ReplicaPhase.FINISHING) for one in kept):
        return []
    others = [one for one in kept if one.phase is ReplicaPhase.UP and one.revision != goal.revision]
    if any(one.revision == goal.revision and not one.is_ready and one.phase is ReplicaPhase.UP for one in kept):
        return []  # it has just moved: it has to be ready before the next one
    for one in others:
        if one.is_ready and not (one.failure and one.applying == goal.revision):
            return [RetuneServer(one.number) if one.made == made else UpgradeServer(one.number)]
    return [EndServer(one.number) for one in others if one.unwell_s >= UNWELL_S_MAX or one.failure]


def _starts(goal: RolloutGoal, kept: Sequence[ServerState], servers: Sequence[ServerState]) -> list[Act]:
    """Return the servers to start: the first alone, all others beside one that is up."""
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
        return [StartServer(gone[0].number if gone else free[0])]
    due = [one.number for one in gone if one.since_start_s >= back_off_s(one.starts)]
    return [StartServer(number, up[0]) for number in (*due, *free[:missing])]
