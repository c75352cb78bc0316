"""When the processes of a server are started, signalled and given up. Pure.

A server is an engine and its front ends. The engine starts first, the front ends when it is ready; the server is ready
when all are. A process that ends before that ends the server. After that it is started again, with a back-off that
doubles with each end and falls back to the first after a healthy stretch; the other processes stay. A stop drains the
front ends first, because the engine has to answer what they have accepted.

An upgrade starts a second engine. When it is ready, it is the engine, and the one before is told to hand its front ends
over; it ends by itself when it has answered what it had. A second engine that ends before that changes nothing. Where
there is no room for two, the engine hands over to none and ends first; one that is started as it was before takes its
place if the new one fails.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from charonia.server.guard.events import (
    Abort,
    BeginHandOver,
    Command,
    Event,
    Exited,
    Finish,
    HandedOver,
    Heartbeat,
    Kill,
    ProcessRole,
    Ready,
    ReportEnd,
    ReportReady,
    ReportReadyAgain,
    ReportUpgrade,
    Spawned,
    SpawnFailed,
    Stage,
    Start,
    StopAsked,
    Terminate,
    Tick,
    UpgradeAsked,
)
from charonia.server.guard.record import ProcessRecord

NS_PER_S = 1_000_000_000

RESTART_DELAY_NS = NS_PER_S // 20
"""Back-off before the first restart."""

ENGINE_RESTART_DELAY_NS_MAX = 30 * NS_PER_S
FRONT_END_RESTART_DELAY_NS_MAX = NS_PER_S

HEALTHY_NS = 60 * NS_PER_S
"""A process that was ready for this long begins with the first back-off again."""

ENGINE_START_FAILURES_MAX = 10
"""Starts of the engine in a row that may fail. There is no such limit for a front end: the others serve."""

FRONT_END_STOP_MARGIN_NS = 5 * NS_PER_S
"""Time beyond the exit timeout after which a front end that was told to stop is killed."""

ENGINE_STOP_MARGIN_NS = 15 * NS_PER_S
"""The same for the engine: models have 10 s to finalize."""

HUNG_KILL_NS = 5 * NS_PER_S
"""Time that a process without heartbeats has to report where it hangs (SIGABRT) before it is killed."""

HAND_OVER_NS_MAX = 600 * NS_PER_S
"""Time in which an engine hands its front ends over; one that takes longer is killed."""

TERMINATED = -15
"""Status of a process that SIGTERM ended, because it could not handle it yet."""

HUNG = "hung"
"""Reason of the end of a process that sent no heartbeats."""

NOT_STARTED = "not started"
"""Reason of the end of a process that could not be started."""


class ServerPhase(Enum):
    """Phase of the server."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


class _State(Enum):
    IDLE = "not started"
    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting to restart"
    DONE = "done"


class _Child:
    """A process: its state, and its times in ns."""

    __slots__ = (
        "again_ns",
        "ends",
        "heartbeat_ns",
        "is_asked_to_stop",
        "is_hung",
        "kill_ns",
        "last_exit",
        "name",
        "pid",
        "ready_ns",
        "restarts",
        "role",
        "start_failures",
        "started_ns",
        "state",
    )

    def __init__(self, name: str, role: ProcessRole) -> None:
        self.name = name
        self.role = role
        self.state = _State.IDLE
        self.pid = 0  # while it runs
        self.started_ns = self.ready_ns = self.heartbeat_ns = self.again_ns = 0
        self.kill_ns: int | None = None
        self.ends = 0  # since the last healthy stretch
        self.start_failures = 0  # in a row
        self.is_hung = self.is_asked_to_stop = False
        self.restarts: dict[str, int] = {}
        self.last_exit = ""

    @property
    def is_alive(self) -> bool:
        return self.state in (_State.STARTING, _State.READY)

    def restart_delay_ns(self) -> int:
        limit = ENGINE_RESTART_DELAY_NS_MAX if self.role is ProcessRole.ENGINE else FRONT_END_RESTART_DELAY_NS_MAX
        return min(RESTART_DELAY_NS << min(self.ends, 32), limit)

    def begin(self, now_ns: int) -> None:
        """It is about to be started."""
        if self.state is _State.WAITING:
            self.restarts[self.last_exit] = self.restarts.get(self.last_exit, 0) + 1
        self.state = _State.STARTING
        self.started_ns = now_ns
        self.is_hung = False

    def end(self, reason: str, now_ns: int) -> int:
        """It has ended; return its uptime."""
        was_ready = self.state is _State.READY
        if was_ready and now_ns - self.ready_ns >= HEALTHY_NS:
            self.ends = 0
        self.start_failures = 0 if was_ready else self.start_failures + 1
        self.state = _State.DONE
        self.pid = 0
        self.kill_ns = None
        self.last_exit = reason
        return now_ns - self.started_ns


@dataclass(slots=True)
class _Upgrade:
    """An upgrade under way."""

    former: _Child
    next: _Child
    stops_first: bool
    finish_ns: int
    is_handed_over: bool = False

    def ends_with(self, child: _Child, engine: _Child) -> bool:
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
    """

    def __init__(
        self, processes: Iterable[tuple[str, ProcessRole]], *, exit_timeout_ns: int, heartbeat_ns: int = 0
    ) -> None:
        self.phase = ServerPhase.STARTING
        self._children = {name: _Child(name, role) for name, role in processes}
        (self._engine,) = (child for child in self._children.values() if child.role is ProcessRole.ENGINE)
        self._upgrade: _Upgrade | None = None
        self._front_ends = [child for child in self._children.values() if child.role is ProcessRole.FRONT_END]
        self._exit_timeout_ns = exit_timeout_ns
        self._heartbeat_ns = heartbeat_ns
        self._stop_ns = 0
        self._status = 0

    @property
    def may_upgrade(self) -> bool:
        """Whether an upgrade may begin: all is well, and none is under way."""
        return self.phase is ServerPhase.RUNNING and self._upgrade is None and self._engine.state is _State.READY

    @property
    def engine(self) -> str:
        """Name of the engine."""
        return self._engine.name

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        """Take an event and return what to do, in this order."""
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
            case Exited(name, status, reason):
                child = self._children[name]
                commands += self._ended(child, HUNG if child.is_hung else reason, status, now_ns)
            case SpawnFailed(name):
                commands += self._ended(self._children[name], NOT_STARTED, 1, now_ns)
            case UpgradeAsked(name, stops_first, finish_ns) if self.may_upgrade:
                commands += self._begin_upgrade(name, stops_first, finish_ns, now_ns)
            case HandedOver(name) if self._upgrade is not None and name == self._upgrade.former.name:
                if self.phase is ServerPhase.RUNNING:
                    commands += self._handed_over(self._upgrade, now_ns)
            case StopAsked() if self.phase in (ServerPhase.STARTING, ServerPhase.RUNNING):
                self._begin_stop(0, now_ns)
            case StopAsked() | Tick() | UpgradeAsked() | HandedOver():
                pass
        return commands + (self._stop_step(now_ns) if self.phase is ServerPhase.STOPPING else self._run_step(now_ns))

    def wake_at(self) -> int | None:
        """Return when to call `handle` with a `Tick` if nothing happens before."""
        if self.phase is ServerPhase.ENDED:
            return None
        moments = [child.kill_ns for child in self._children.values() if child.kill_ns is not None]
        if self.phase is not ServerPhase.STOPPING:
            moments += [child.again_ns for child in self._children.values() if child.state is _State.WAITING]
            moments += [child.heartbeat_ns + self._heartbeat_ns for child in self._watched()]
        return min(moments, default=None)

    def records(self) -> tuple[ProcessRecord, ...]:
        """Return what is known of each process."""
        return tuple(
            ProcessRecord(
                self._shown(child),
                child.pid,
                child.started_ns if child.pid else 0,
                dict(child.restarts),
                child.last_exit,
            )
            for child in self._children.values()
        )

    def _shown(self, child: _Child) -> str:
        """Return the name of a process in the record: the engine keeps its own over upgrades."""
        if child.role is ProcessRole.ENGINE:
            if child is self._engine:
                return ProcessRole.ENGINE.value
            return "former_engine" if self._upgrade is not None and child is self._upgrade.former else "next_engine"
        return child.name

    def _watched(self) -> list[_Child]:
        """Return the processes whose heartbeats count."""
        if not self._heartbeat_ns:
            return []
        return [c for c in self._children.values() if c.state is _State.READY and not c.is_hung]

    def _ready(self, child: _Child, now_ns: int) -> list[Command]:
        if child.state is not _State.STARTING:
            return []
        child.state = _State.READY
        child.ready_ns = child.heartbeat_ns = now_ns
        child.start_failures = 0
        if self.phase is ServerPhase.RUNNING and self._upgrade is not None and child is self._upgrade.next:
            return self._is_loaded(self._upgrade, now_ns)
        if self.phase is ServerPhase.RUNNING:
            return [ReportReadyAgain(child.name, child.pid)]
        if self.phase is ServerPhase.STARTING and all(c.state is _State.READY for c in self._children.values()):
            self.phase = ServerPhase.RUNNING
            return [ReportReady()]
        return []

    def _ended(self, child: _Child, reason: str, status: int, now_ns: int) -> list[Command]:
        pid, again_ns = child.pid, None
        uptime_ns = child.end(reason, now_ns)
        if self.phase is ServerPhase.STOPPING:
            if status not in (0, TERMINATED):
                self._status = self._status or 1
        elif self.phase is ServerPhase.STARTING:
            self._begin_stop(shell_status(status) or 1, now_ns)
        elif self._upgrade is not None and self._upgrade.ends_with(child, self._engine):
            end = ReportEnd(child.name, pid, reason, uptime_ns, None)
            return [end, *self._ended_in_upgrade(self._upgrade, child, pid, now_ns)]
        elif child is self._engine and child.start_failures >= ENGINE_START_FAILURES_MAX:
            self._begin_stop(1, now_ns)
        else:
            again_ns = child.restart_delay_ns()
            child.ends += 1
            child.again_ns = now_ns + again_ns
            child.state = _State.WAITING
        return [ReportEnd(child.name, pid, reason, uptime_ns, again_ns)]

    def _begin_upgrade(self, name: str, stops_first: bool, finish_ns: int, now_ns: int) -> list[Command]:
        upgrade = self._upgrade = _Upgrade(self._engine, _Child(name, ProcessRole.ENGINE), stops_first, finish_ns)
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
        commands: list[Command] = [ReportUpgrade(Stage.LOADED, following.name, following.pid)]
        if upgrade.stops_first or not former.is_alive:
            return [*commands, *self._end_upgrade(former)]
        if former.state is not _State.READY:  # it has crashed, is being started again, and holds nothing
            return [*commands, Kill(former.name)] if former.pid else commands
        former.kill_ns = now_ns + HAND_OVER_NS_MAX
        return [*commands, BeginHandOver(former.name, following.name)]

    def _handed_over(self, upgrade: "_Upgrade", now_ns: int) -> list[Command]:
        upgrade.is_handed_over = True
        upgrade.former.kill_ns = now_ns + upgrade.finish_ns + self._exit_timeout_ns + ENGINE_STOP_MARGIN_NS
        return [ReportUpgrade(Stage.MOVED, upgrade.former.name, upgrade.former.pid)]

    def _end_upgrade(self, former: _Child) -> list[Command]:
        self._upgrade = None
        self._children.pop(former.name, None)
        return [ReportUpgrade(Stage.ENDED, former.name, 0)]

    def _ended_in_upgrade(self, upgrade: "_Upgrade", child: _Child, pid: int, now_ns: int) -> list[Command]:
        if child is upgrade.former:
            if self._engine is upgrade.next:
                return self._end_upgrade(child)
            del self._children[child.name]
            self._engine = upgrade.next
            return self._start_next(upgrade, now_ns)
        # The next one has failed: the one before goes on, or is started again.
        self._upgrade = None
        self._children.pop(child.name, None)
        self._engine = former = upgrade.former
        self._children[former.name] = former
        former.kill_ns = None
        if upgrade.stops_first:
            former.is_asked_to_stop = False
            former.state, former.again_ns = _State.WAITING, now_ns + RESTART_DELAY_NS
        return [ReportUpgrade(Stage.FAILED, child.name, pid, child.last_exit)]

    def _run_step(self, now_ns: int) -> list[Command]:
        commands: list[Command] = []
        for child in self._children.values():
            is_first = child.state is _State.IDLE and (child is self._engine or self._engine.state is _State.READY)
            if is_first or (child.state is _State.WAITING and child.again_ns <= now_ns):
                child.begin(now_ns)
                commands.append(Start(child.name))
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
                child.state = _State.DONE

    def _stop_step(self, now_ns: int) -> list[Command]:
        commands: list[Command] = []
        has_front_ends = any(child.is_alive for child in self._front_ends)
        engines = [child for child in self._children.values() if child.role is ProcessRole.ENGINE]
        for child in self._front_ends if has_front_ends else engines:
            if child.pid and not child.is_asked_to_stop:
                child.is_asked_to_stop = True
                margin_ns = ENGINE_STOP_MARGIN_NS if child in engines else FRONT_END_STOP_MARGIN_NS
                due_ns = max(self._stop_ns + self._exit_timeout_ns, now_ns) + margin_ns
                child.kill_ns = due_ns if child.kill_ns is None else min(child.kill_ns, due_ns)
                commands.append(Terminate(child.name))
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
