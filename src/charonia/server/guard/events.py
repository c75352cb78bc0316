"""Events and commands of `restarts.py`. Pure."""

from dataclasses import dataclass
from enum import Enum


class ProcessRole(Enum):
    """The role of a process."""

    ENGINE = "engine"
    FRONT_END = "front_end"


@dataclass(frozen=True, slots=True)
class Spawned:
    """A process was started by `Start`."""

    name: str
    pid: int


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """A process could not be started."""

    name: str


@dataclass(frozen=True, slots=True)
class Ready:
    """A process is ready for requests."""

    name: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The event loop of a process turns."""

    name: str


@dataclass(frozen=True, slots=True)
class OverMemory:
    """An engine has more memory than it may have."""

    name: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A process has exited and was reaped. The status is negative for a signal; the reason is its text."""

    name: str
    status: int
    reason: str


@dataclass(frozen=True, slots=True)
class UpgradeAsked:
    """A new engine has to replace the running one.

    Attributes:
        name: Name of the new engine.
        stops_first: Whether the running engine stops before the new one starts.
        finish_ns: Time that the running engine has to finish after it has handed over.
    """

    name: str
    stops_first: bool
    finish_ns: int


@dataclass(frozen=True, slots=True)
class UpgradeCancelled:
    """The upgrade in progress is cancelled. It continues if the next engine is ready already."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The front ends of an engine send it no new requests."""

    name: str


@dataclass(frozen=True, slots=True)
class Left:
    """A front end accepts no more connections after a signal to stop; it completes its requests, and exits."""

    name: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The server has to stop."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. The first one starts the server."""


Event = (
    Spawned
    | SpawnFailed
    | Ready
    | Heartbeat
    | OverMemory
    | Exited
    | UpgradeAsked
    | UpgradeCancelled
    | HandedOver
    | Left
    | StopAsked
    | Tick
)


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process; `Spawned` or `SpawnFailed` follows."""

    name: str


@dataclass(frozen=True, slots=True)
class Succeed:
    """Let there be a process like another one, with the same sockets; `Start` follows.

    Attributes:
        name: Its name, which is new.
        former: The other one.
    """

    name: str
    former: str


@dataclass(frozen=True, slots=True)
class Forget:
    """A process has ended and is never started again."""

    name: str


@dataclass(frozen=True, slots=True)
class StopListening:
    """Let the sockets of a process refuse connections, until a process listens on them again."""

    name: str


@dataclass(frozen=True, slots=True)
class Terminate:
    """Tell a process to stop (SIGTERM). As the two below, this is for one that was spawned and has not exited.

    Attributes:
        name: The process.
        finish_ns: Time that a front end has for its connections, because another one accepts new ones; 0 where the
            server stops.
    """

    name: str
    finish_ns: int = 0


@dataclass(frozen=True, slots=True)
class Abort:
    """Let a process report where it hangs, and exit (SIGABRT)."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill a process (SIGKILL)."""

    name: str


@dataclass(frozen=True, slots=True)
class ReportReady:
    """The server has become ready, for the first time."""


@dataclass(frozen=True, slots=True)
class ReportReadyAgain:
    """A restarted process is ready."""

    name: str
    pid: int


@dataclass(frozen=True, slots=True)
class ReportEnd:
    """A process has exited.

    Attributes:
        pid: Its process id.
        reason: The reason of `Exited`, `HUNG` or `NOT_STARTED`.
        uptime_ns: How long it ran.
        again_ns: Time until its restart, None if it is not restarted.
    """

    name: str
    pid: int
    reason: str
    uptime_ns: int
    again_ns: int | None


@dataclass(frozen=True, slots=True)
class BeginHandOver:
    """Tell an engine to hand its front ends over to the next one; `HandedOver` follows.

    Attributes:
        name: The engine.
        next_name: The next one, "" where it is started after this one has stopped.
    """

    name: str
    next_name: str


class Stage(Enum):
    """How far an upgrade is."""

    LOADED = "the new engine is ready, and is the engine from now on"
    MOVED = "the previous engine gets no new requests"
    ENDED = "the previous engine has stopped"
    FAILED = "the new engine exited before it was ready, or before it had all front ends"
    RENEWED = "a new front end is ready, and the previous one accepts no more connections"
    NOT_RENEWED = "a new front end exited before it was ready; the previous one continues"
    SETTLED = "all previous front ends have stopped"


@dataclass(frozen=True, slots=True)
class ReportUpgrade:
    """An upgrade has come this far.

    Attributes:
        stage: How far.
        name: Name of the process that the stage is about.
        pid: Its number.
        reason: Why it has ended, "" while it runs.
    """

    stage: Stage
    name: str
    pid: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Finish:
    """All processes have ended: exit with this status."""

    status: int


Command = (
    Start
    | Succeed
    | Forget
    | StopListening
    | Terminate
    | Abort
    | Kill
    | BeginHandOver
    | ReportReady
    | ReportReadyAgain
    | ReportEnd
    | ReportUpgrade
    | Finish
)
