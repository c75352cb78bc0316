"""When the processes of a server are started, signalled and abandoned. Pure.

A server is an engine and its front ends. The engine starts first, the front ends when it is ready; the server is ready
when all are. A process that exits before that stops the server. Later it is restarted, with a back-off that doubles
with each exit and resets after a healthy stretch; the other processes stay. A stop drains the front ends first, because
the engine has to answer their requests.

An upgrade starts a second engine. When it is ready, it becomes the engine, and the previous one hands its front ends
over, completes its requests and exits. A second engine that exits before that changes nothing. Where there is no room
for two, the engine hands over to none and stops first; if the new one fails, it is replaced by one with the previous
arguments.

Then the front ends are renewed.

The guard has the listening sockets, too, so connections wait in them until the next process accepts. If none will
soon, the guard lets the sockets refuse.

A replica shares its listening sockets with other servers. When its engine exits, its front ends leave them to
the others, and their successors listen when the engine is back. When it stops, its front ends serve until their clients
have left.

A renewal replaces one after the other: it starts the successor, and when that is ready, it stops the previous one,
which accepts no more connections, completes its requests, and exits. A successor that cannot start changes nothing. A
front end that leaves without an order of the guard gets a successor immediately.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from charonia.server.metrics.processes import ProcessRecord


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
class MemoryExceeded:
    """An engine has more memory than it may have."""

    name: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A process has exited and was reaped. The status is negative for a signal; the reason is its text."""

    name: str
    status: int
    reason: str


@dataclass(frozen=True, slots=True)
class UpgradeRequested:
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
class HandOverDone:
    """The front ends of an engine send it no new requests."""

    name: str


@dataclass(frozen=True, slots=True)
class FrontEndDraining:
    """A front end accepts no more connections after a signal to stop; it completes its requests, and exits."""

    name: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The server has to stop."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. The first one starts the server."""


Event = (
    Spawned
    | SpawnFailed
    | Ready
    | Heartbeat
    | MemoryExceeded
    | Exited
    | UpgradeRequested
    | UpgradeCancelled
    | HandOverDone
    | FrontEndDraining
    | StopRequested
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
    """Tell an engine to hand its front ends over to the next one; `HandOverDone` follows.

    Attributes:
        name: The engine.
        next_name: The next one, "" where it is started after this one has stopped.
    """

    name: str
    next_name: str


class UpgradeStage(Enum):
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

    stage: UpgradeStage
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


NS_PER_S = 1_000_000_000

RESTART_DELAY_NS = NS_PER_S // 20
"""Back-off before the first restart."""

ENGINE_RESTART_DELAY_NS_MAX = 30 * NS_PER_S
FRONT_END_RESTART_DELAY_NS_MAX = NS_PER_S

HEALTHY_NS = 60 * NS_PER_S
"""A process that was ready for this long begins with the first back-off again."""


class State(Enum):
    """State of a process."""

    IDLE = "not started"
    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting to restart"
    DONE = "done"


class Child:
    """A process: its state, and its times in ns."""

    def __init__(self, name: str, role: ProcessRole, slot: str = "", number: int = 1) -> None:
        self.name = name
        self.role = role
        self.slot = slot or (ProcessRole.ENGINE.value if role is ProcessRole.ENGINE else name)
        self.number = number
        self.state = State.IDLE
        self.pid = 0  # while it runs
        self.started_ns = self.ready_ns = self.heartbeat_ns = self.again_ns = 0
        self.kill_ns: int | None = None
        self.ends = 0  # since the last healthy stretch
        self.start_failures = 0  # in a row
        self.is_hung = self.is_too_large = self.is_asked_to_stop = False
        self.is_leaving = False  # it accepts no more connections
        self.restarts: dict[str, int] = {}
        self.last_exit = ""

    @property
    def is_alive(self) -> bool:
        """Whether it was started and has not exited."""
        return self.state in (State.STARTING, State.READY)

    @property
    def accepts(self) -> bool:
        """Whether it accepts connections, or is about to."""
        return self.is_alive and not self.is_leaving

    def successor(self) -> "Child":
        """Return a front end for the same sockets."""
        number = self.number + 1
        made = Child(f"{self.slot}_{number}", self.role, self.slot, number)
        made.restarts, made.last_exit = self.restarts, self.last_exit
        return made

    def restart_delay_ns(self) -> int:
        """Return the back-off before its restart."""
        limit = ENGINE_RESTART_DELAY_NS_MAX if self.role is ProcessRole.ENGINE else FRONT_END_RESTART_DELAY_NS_MAX
        return min(RESTART_DELAY_NS << min(self.ends, 32), limit)

    def begin(self, now_ns: int) -> None:
        """It is about to be started."""
        if self.state is State.WAITING:
            self.restarts[self.last_exit] = self.restarts.get(self.last_exit, 0) + 1
        self.state = State.STARTING
        self.started_ns = now_ns
        self.is_hung = self.is_too_large = self.is_leaving = False

    def end(self, reason: str, now_ns: int) -> int:
        """It has ended; return its uptime."""
        was_ready = self.state is State.READY
        if was_ready and now_ns - self.ready_ns >= HEALTHY_NS:
            self.ends = 0
        self.start_failures = 0 if was_ready else self.start_failures + 1
        self.state = State.DONE
        self.pid = 0
        self.kill_ns = None
        self.last_exit = reason
        return now_ns - self.started_ns


FRONT_END_STOP_MARGIN_NS = 5 * NS_PER_S
"""Time beyond the exit timeout after which the guard kills a stopping front end."""

FINISH_NS = 300 * NS_PER_S
"""Default of the time that a replaced process has to complete its requests."""

FINISH_NS_MIN = 2 * NS_PER_S
"""Shortest time for a front end: clients have to learn that they must reconnect."""

RENEWED = "renewed"
"""Reason for which a front end was started in the place of another one."""


@dataclass(slots=True)
class _Replacement:
    """A renewal under way."""

    slots: list[str]  # those to come
    finish_ns: int


class FrontEndReplacements:
    """The front ends among the processes of a server."""

    def __init__(self, children: dict[str, Child], exit_timeout_ns: int) -> None:
        self._children = children
        self._slots = [child.slot for child in self.all()]
        self._exit_timeout_ns = exit_timeout_ns
        self._renewal: _Replacement | None = None

    @property
    def are_renewed(self) -> bool:
        return self._renewal is not None

    def all(self) -> list[Child]:
        return [child for child in self._children.values() if child.role is ProcessRole.FRONT_END]

    def renew(self, finish_ns: int) -> None:
        """Begin a renewal with the next `step`; the previous front ends have this time to finish."""
        self._renewal = _Replacement(list(self._slots), max(finish_ns, FINISH_NS_MIN))

    def step(self, now_ns: int) -> list[Command]:
        """Renew the next front end when all others are ready. One that is about to be started again is new then."""
        renewal, front_ends = self._renewal, self.all()
        if renewal is None or any(child.state is State.STARTING for child in front_ends):
            return []
        while renewal.slots:
            slot = renewal.slots.pop(0)
            for child in front_ends:
                if child.slot == slot and child.accepts:
                    return self._succeed(child, now_ns)
        if any(child.is_leaving for child in front_ends):
            return []
        self._renewal = None
        return [ReportUpgrade(UpgradeStage.SETTLED, "", 0)]

    def take_over(self, child: Child, now_ns: int) -> list[Command]:
        """Stop the previous front end: its successor is ready for the first time."""
        child.restarts[RENEWED] = child.restarts.get(RENEWED, 0) + 1
        child.last_exit = RENEWED
        finish_ns = self._renewal.finish_ns if self._renewal is not None else FINISH_NS
        commands: list[Command] = []
        for former in self._same_slot(child):
            if former.accepts:
                self._leaves(former, finish_ns, now_ns)
                commands.append(Terminate(former.name, finish_ns))
        if self._renewal is not None:
            commands.append(ReportUpgrade(UpgradeStage.RENEWED, child.name, child.pid))
        return commands

    def front_end_draining(self, child: Child, now_ns: int, *, may_succeed: bool) -> list[Command]:
        """A front end accepts no more connections without an order of the guard: it needs a successor."""
        if not may_succeed:  # the stop kills it in time
            child.is_leaving = True
            return []
        self._leaves(child, FINISH_NS, now_ns)
        return [] if self._is_succeeded(child) else self._succeed(child, now_ns)

    def stop_all(self, now_ns: int) -> list[Command]:
        """Stop all front ends that accept connections; their successors listen when there is an engine again."""
        commands: list[Command] = []
        for child in self.all():
            if child.accepts and child.state is State.READY:
                self._leaves(child, FINISH_NS, now_ns)
                commands.append(Terminate(child.name, FINISH_NS))
                if not self._is_succeeded(child):
                    commands += self._succeed(child, now_ns)
        return commands

    def ended(self, child: Child, pid: int) -> list[Command]:
        """Remove a front end that has exited beside its successor, or before it could take over.

        Returns:
            Nothing if it is neither, and has to be started again.
        """
        commands: list[Command] = [Forget(child.name)]
        if not self._is_succeeded(child):
            if not any(former.accepts for former in self._same_slot(child)):
                return []
            self._renewal = None
            commands.append(ReportUpgrade(UpgradeStage.NOT_RENEWED, child.name, pid, child.last_exit))
        del self._children[child.name]
        return commands

    def shown(self, child: Child) -> str:
        """Return the name of a front end in the record: that of the first one with its sockets, if it is the one."""
        if child.is_leaving and self._is_succeeded(child):
            return f"former_{child.name}"
        is_next = any(other.number < child.number and other.accepts for other in self._same_slot(child))
        return f"next_{child.slot}" if is_next else child.slot

    def _succeed(self, former: Child, now_ns: int) -> list[Command]:
        following = former.successor()
        self._children[following.name] = following
        following.begin(now_ns)
        return [Succeed(following.name, former.name), Start(following.name)]

    def _leaves(self, former: Child, finish_ns: int, now_ns: int) -> None:
        former.is_leaving = True
        former.kill_ns = now_ns + finish_ns + self._exit_timeout_ns + FRONT_END_STOP_MARGIN_NS

    def _is_succeeded(self, child: Child) -> bool:
        return any(other.number > child.number for other in self._same_slot(child))

    def _same_slot(self, child: Child) -> list[Child]:
        return [other for other in self.all() if other.slot == child.slot and other is not child]


ENGINE_START_FAILURES_MAX = 10
"""Starts of the engine in a row that may fail. Front ends have no limit: the others serve."""

ENGINE_STOP_MARGIN_NS = 15 * NS_PER_S
"""Time beyond the exit timeout after which the guard kills a stopping engine: models have 10 s to finalize."""

HUNG_KILL_NS = 5 * NS_PER_S
"""Time that a process without heartbeats has to report where it hangs (SIGABRT) before it is killed."""

BACK_SOON_NS_MAX = NS_PER_S // 2
"""Back-off up to which connections wait for a front end, rather than being refused."""

HAND_OVER_NS_MAX = 600 * NS_PER_S
"""Time in which an engine hands its front ends over; one that takes longer is killed."""

TERMINATED = -15
"""Status of a process that SIGTERM ended, because it could not handle it yet."""

HUNG = "hung"
"""Reason of the end of a process that sent no heartbeats."""

OVER_MEMORY = "memory limit"
"""Reason of the end of an engine that had more memory than it may have."""

NOT_STARTED = "not started"
"""Reason of the end of a process that could not be started."""


class ServerPhase(Enum):
    """Phase of the server."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(slots=True)
class _Upgrade:
    """An upgrade under way."""

    former: Child
    next: Child
    stops_first: bool
    finish_ns: int
    is_handed_over: bool = False

    def ends_with(self, child: Child, engine: Child) -> bool:
        """Whether the end of a process is a step of the upgrade. Others are started again as ever."""
        if child is self.former:
            return self.stops_first or engine is self.next
        return child is self.next and (self.stops_first or not self.is_handed_over)


class Restarts:
    """The processes of a server as one state machine.

    Args:
        processes: Name and role of each process: one engine and any number of front ends.
        exit_timeout_ns: Time that requests in flight have when the server stops.
        heartbeat_ns: Longest time between two heartbeats of a process that is ready, 0 if there are none.
        is_replica: Whether other servers have the same listening sockets.
    """

    def __init__(
        self,
        processes: Iterable[tuple[str, ProcessRole]],
        *,
        exit_timeout_ns: int,
        heartbeat_ns: int = 0,
        is_replica: bool = False,
    ) -> None:
        self.phase = ServerPhase.STARTING
        self._children = {name: Child(name, role) for name, role in processes}
        (self._engine,) = (child for child in self._children.values() if child.role is ProcessRole.ENGINE)
        self._upgrade: _Upgrade | None = None
        self._succession = FrontEndReplacements(self._children, exit_timeout_ns)
        self._is_replica = is_replica
        self._exit_timeout_ns = exit_timeout_ns
        self._heartbeat_ns = heartbeat_ns
        self._stop_ns = 0
        self._status = 0

    @property
    def may_upgrade(self) -> bool:
        """Whether an upgrade may begin: all is well, and none is under way."""
        is_idle = self._upgrade is None and not self._succession.are_renewed
        return self.phase is ServerPhase.RUNNING and is_idle and self._engine.state is State.READY

    @property
    def may_cancel(self) -> bool:
        """Whether an upgrade is under way that changes nothing if it ends now."""
        upgrade = self._upgrade
        return upgrade is not None and not upgrade.stops_first and upgrade.next.state is State.STARTING

    @property
    def engine(self) -> str:
        return self._engine.name

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        commands: list[Command] = []
        match event:
            case Spawned(name, pid):
                self._children[name].pid = pid
                if self._upgrade is not None and name == self._upgrade.former.name != self._engine.name:
                    commands.append(Kill(name))  # the next engine was ready before it was back
            case Ready(name):
                commands += self._ready(self._children[name], now_ns)
            case Heartbeat(name):
                self._children[name].heartbeat_ns = now_ns
            case MemoryExceeded(name):
                if (large := self._children[name]).pid:
                    large.is_too_large = True
                    commands.append(Kill(name))
            case Exited(name, status, reason):
                child = self._children[name]
                reason = HUNG if child.is_hung else OVER_MEMORY if child.is_too_large else reason
                commands += self._ended(child, reason, status, now_ns)
            case SpawnFailed(name):
                commands += self._ended(self._children[name], NOT_STARTED, 1, now_ns)
            case UpgradeRequested(name, stops_first, finish_ns) if self.may_upgrade:
                commands += self._begin_upgrade(name, stops_first, finish_ns, now_ns)
            case UpgradeCancelled() if self._upgrade is not None and self.may_cancel:
                self._upgrade.next.kill_ns = now_ns
            case HandOverDone(name) if self._upgrade is not None and name == self._upgrade.former.name:
                if self.phase is ServerPhase.RUNNING:
                    commands += self._handed_over(self._upgrade, now_ns)
            case FrontEndDraining(name) if not (left := self._children[name]).is_leaving:
                commands += self._succession.front_end_draining(
                    left, now_ns, may_succeed=self.phase is ServerPhase.RUNNING
                )
                commands += self._refusal(left)
            case FrontEndDraining(name) if self._is_replica and self._engine.state is not State.READY:
                commands.append(StopListening(name))  # the next ones listen again
            case StopRequested() if self.phase in (ServerPhase.STARTING, ServerPhase.RUNNING):
                self._begin_stop(0, now_ns)
            case (
                StopRequested() | Tick() | UpgradeRequested() | UpgradeCancelled() | HandOverDone() | FrontEndDraining()
            ):
                pass
        return commands + (self._stop_step(now_ns) if self.phase is ServerPhase.STOPPING else self._run_step(now_ns))

    def wake_at(self) -> int | None:
        if self.phase is ServerPhase.ENDED:
            return None
        moments = [child.kill_ns for child in self._children.values() if child.kill_ns is not None]
        if self.phase is not ServerPhase.STOPPING:
            moments += [child.again_ns for child in self._children.values() if child.state is State.WAITING]
            moments += [child.heartbeat_ns + self._heartbeat_ns for child in self._watched()]
        return min(moments, default=None)

    def records(self) -> tuple[ProcessRecord, ...]:
        return tuple(
            ProcessRecord(
                shown := self._shown(child),
                child.pid,
                child.started_ns if child.pid else 0,
                dict(child.restarts) if shown == child.slot else {},
                child.last_exit,
            )
            for child in self._children.values()
        )

    def _shown(self, child: Child) -> str:
        """Return the name of a process in the record: engine and front ends keep their own over upgrades."""
        if child.role is ProcessRole.ENGINE:
            if child is self._engine:
                return ProcessRole.ENGINE.value
            return "former_engine" if self._upgrade is not None and child is self._upgrade.former else "next_engine"
        return self._succession.shown(child)

    def _watched(self) -> list[Child]:
        """Return the processes whose heartbeats count."""
        if not self._heartbeat_ns:
            return []
        return [c for c in self._children.values() if c.state is State.READY and not c.is_hung]

    def _ready(self, child: Child, now_ns: int) -> list[Command]:
        if child.state is not State.STARTING:
            return []
        child.state = State.READY
        is_new = child.number > 1 and not child.ready_ns
        child.ready_ns = child.heartbeat_ns = now_ns
        child.start_failures = 0
        if self.phase is ServerPhase.RUNNING and self._upgrade is not None and child is self._upgrade.next:
            return self._is_loaded(self._upgrade, now_ns)
        if self.phase is ServerPhase.RUNNING:
            again: list[Command] = [ReportReadyAgain(child.name, child.pid)]
            return again + self._succession.take_over(child, now_ns) if is_new else again
        if self.phase is ServerPhase.STARTING and all(c.state is State.READY for c in self._children.values()):
            self.phase = ServerPhase.RUNNING
            return [ReportReady()]
        return []

    def _ended(self, child: Child, reason: str, status: int, now_ns: int) -> list[Command]:
        pid, again_ns = child.pid, None
        further: list[Command] = []
        uptime_ns = child.end(reason, now_ns)
        if self.phase is ServerPhase.STOPPING:
            if status not in (0, TERMINATED):
                self._status = self._status or 1
        elif self.phase is ServerPhase.STARTING:
            self._begin_stop(shell_status(status) or 1, now_ns)
            return [ReportEnd(child.name, pid, reason, uptime_ns, None)]
        elif self._upgrade is not None and self._upgrade.ends_with(child, self._engine):
            further = self._ended_in_upgrade(self._upgrade, child, pid, now_ns)
        elif child is self._engine and child.start_failures >= ENGINE_START_FAILURES_MAX:
            self._begin_stop(1, now_ns)
        elif not (further := self._succession.ended(child, pid)):
            again_ns = child.restart_delay_ns()
            child.ends += 1
            child.again_ns = now_ns + again_ns
            child.state = State.WAITING
            if self._is_replica and child is self._engine:
                further = self._succession.stop_all(now_ns)
        refusal = [] if child.is_leaving else self._refusal(child, again_ns)
        return [ReportEnd(child.name, pid, reason, uptime_ns, again_ns), *refusal, *further]

    def _refusal(self, child: Child, again_ns: int | None = None) -> list[Command]:
        """Let the sockets of a process refuse, unless it is back soon or another one accepts connections."""
        is_back_soon = again_ns is not None and again_ns <= BACK_SOON_NS_MAX and not child.start_failures
        if is_back_soon and self._engine.state is State.READY:
            return []
        for other in self._children.values():
            if other.role is child.role and other.slot == child.slot and other.accepts:
                return []
        return [StopListening(child.name)]

    def _begin_upgrade(self, name: str, stops_first: bool, finish_ns: int, now_ns: int) -> list[Command]:
        upgrade = self._upgrade = _Upgrade(self._engine, Child(name, ProcessRole.ENGINE), stops_first, finish_ns)
        if stops_first:
            upgrade.former.kill_ns = now_ns + HAND_OVER_NS_MAX
            return [BeginHandOver(upgrade.former.name, "")]
        return self._start_next(upgrade, now_ns)

    def _start_next(self, upgrade: "_Upgrade", now_ns: int) -> list[Command]:
        self._children[upgrade.next.name] = upgrade.next
        upgrade.next.begin(now_ns)
        return [Start(upgrade.next.name)]

    def _is_loaded(self, upgrade: "_Upgrade", now_ns: int) -> list[Command]:
        """The next engine is ready: it is the engine from now on."""
        former, following = upgrade.former, upgrade.next
        following.restarts, following.last_exit = former.restarts, former.last_exit
        self._engine = following
        commands: list[Command] = [ReportUpgrade(UpgradeStage.LOADED, following.name, following.pid)]
        if upgrade.stops_first or not former.is_alive:
            return [*commands, *self._end_upgrade(upgrade)]
        if former.state is not State.READY:  # it has crashed, is being started again, and holds nothing
            return [*commands, Kill(former.name)] if former.pid else commands
        former.kill_ns = now_ns + HAND_OVER_NS_MAX
        return [*commands, BeginHandOver(former.name, following.name)]

    def _handed_over(self, upgrade: "_Upgrade", now_ns: int) -> list[Command]:
        upgrade.is_handed_over = upgrade.former.is_leaving = True
        upgrade.former.kill_ns = now_ns + upgrade.finish_ns + self._exit_timeout_ns + ENGINE_STOP_MARGIN_NS
        moved = ReportUpgrade(UpgradeStage.MOVED, upgrade.former.name, upgrade.former.pid)
        return [*self._refusal(upgrade.former), moved]

    def _end_upgrade(self, upgrade: "_Upgrade") -> list[Command]:
        former = upgrade.former
        self._upgrade = None
        self._children.pop(former.name, None)
        self._succession.renew(upgrade.finish_ns)
        return [Forget(former.name), ReportUpgrade(UpgradeStage.ENDED, former.name, 0)]

    def _ended_in_upgrade(self, upgrade: "_Upgrade", child: Child, pid: int, now_ns: int) -> list[Command]:
        if child is upgrade.former:
            if self._engine is upgrade.next:
                return self._end_upgrade(upgrade)
            del self._children[child.name]
            self._engine = upgrade.next
            return self._start_next(upgrade, now_ns)
        # The next one has failed: the previous one continues, or is restarted.
        self._upgrade = None
        self._children.pop(child.name, None)
        self._engine = former = upgrade.former
        self._children[former.name] = former
        former.kill_ns = None
        if upgrade.stops_first:
            former.is_asked_to_stop = False
            former.state, former.again_ns = State.WAITING, now_ns + RESTART_DELAY_NS
        return [Forget(child.name), ReportUpgrade(UpgradeStage.FAILED, child.name, pid, child.last_exit)]

    def _run_step(self, now_ns: int) -> list[Command]:
        commands: list[Command] = []
        for child in self._children.values():
            is_first = child.state is State.IDLE and (child is self._engine or self._engine.state is State.READY)
            if is_first or (child.state is State.WAITING and child.again_ns <= now_ns):
                child.begin(now_ns)
                commands.append(Start(child.name))
        commands += self._succession.step(now_ns)
        for child in self._watched():
            if child.heartbeat_ns + self._heartbeat_ns <= now_ns:
                child.is_hung = True
                child.kill_ns = now_ns + HUNG_KILL_NS
                commands.append(Abort(child.name))
        return commands + self._kills(now_ns)

    def _begin_stop(self, status: int, now_ns: int) -> None:
        self.phase = ServerPhase.STOPPING
        self._stop_ns = now_ns
        self._status = status
        for child in self._children.values():
            if not child.is_alive:
                child.state = State.DONE

    def _stop_step(self, now_ns: int) -> list[Command]:
        commands: list[Command] = []
        front_ends = self._succession.all()
        has_front_ends = any(child.is_alive for child in front_ends)
        engines = [child for child in self._children.values() if child.role is ProcessRole.ENGINE]
        for child in front_ends if has_front_ends else engines:
            if child.pid and not child.is_asked_to_stop:
                child.is_asked_to_stop = True
                margin_ns = ENGINE_STOP_MARGIN_NS if child in engines else FRONT_END_STOP_MARGIN_NS
                hands_on = self._is_replica and child in front_ends and not child.is_leaving
                finish_ns = max(self._exit_timeout_ns, FINISH_NS_MIN) if hands_on else 0
                due_ns = max(self._stop_ns + self._exit_timeout_ns, now_ns) + finish_ns + margin_ns
                child.kill_ns = due_ns if child.kill_ns is None else min(child.kill_ns, due_ns)
                commands.append(Terminate(child.name, finish_ns))
        commands += self._kills(now_ns)
        if not any(child.is_alive for child in self._children.values()):
            self.phase = ServerPhase.ENDED
            commands.append(Finish(self._status))
        return commands

    def _kills(self, now_ns: int) -> list[Command]:
        due = [c for c in self._children.values() if c.pid and c.kill_ns is not None and c.kill_ns <= now_ns]
        for child in due:
            child.kill_ns = None
        return [Kill(child.name) for child in due]


def shell_status(status: int) -> int:
    """Return the exit status that stands for the end of another process: 128 and its number for a signal."""
    return status if status >= 0 else 128 - status
