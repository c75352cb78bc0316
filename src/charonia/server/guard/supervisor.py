"""Runs the processes of a server as `Restarts` decides: starts, watches, signals and reaps them.

A process reports that it is ready, and that its event loop turns, as a service reports to systemd (`notify`), over a
separate socket. It shares the output of this process, and exits with it in any case. As process 1 of a container, this
process also reaps adopted orphans.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from charonia.die_with_parent import with_parent_death_signal
from charonia.server.guard import notify
from charonia.server.guard.notify import RECORD_VARIABLE, write_finish, write_record
from charonia.server.guard.restarts import (
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
)
from charonia.server.machine.memory import MEMORY_S, memory_of

_log = logging.getLogger(__name__)

ORPHANS_S = 5.0
"""Pause between two looks for orphans that have ended."""

REPORT_S = 10.0
"""Time in which the report of a process that has ended for good is read."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """How to start a process.

    Attributes:
        name: Its name, unique, usable as a file name.
        command: A program and its arguments.
        environment: Its environment; the guard adds variables.
        sockets: Sockets that it inherits, to listen on them.
        shared_sockets: Inherited sockets on which other servers listen, too.
        memory_bytes_max: Most memory of an engine with its workers and the front ends, 0 for no limit.
    """

    name: str
    role: ProcessRole
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    sockets: Sequence[socket.socket] = ()
    shared_sockets: Sequence[socket.socket] = ()
    memory_bytes_max: int = 0

    def renamed(self, name: str) -> "ProcessSpec":
        """Return how to start the same process with another name, also in its command."""
        return replace(self, name=name, command=[name if word == self.name else word for word in self.command])


class Supervisor:
    """Keeps the processes of a server running. To be made on the event loop of the main thread.

    Args:
        folder: Private folder for sockets and the record.
        exit_timeout_s: Time that requests in flight have when the server stops, in seconds.
        heartbeat_s: Longest time between two heartbeats of a process, in seconds; 0 for no heartbeats.
        problem: Returns why a process has ended, by its own report; "" without a report.
        hand_over: Called with the names of an engine and the next one, "" for none, before SIGUSR2 makes the
            engine hand its front ends over; see `restarts.HandOver`.
        upgraded: Called with each stage of an upgrade.
        is_replica: Whether other servers have the same listening sockets.
        reaps_orphans: Whether processes whose parents have ended become children of this one; None to find out.

    Attributes:
        ended: Done when all processes have ended, with the exit status of the server.
    """

    def __init__(
        self,
        processes: Sequence[ProcessSpec],
        folder: Path,
        *,
        exit_timeout_s: float,
        heartbeat_s: float = 0.0,
        problem: Callable[[str], str] = lambda _: "",
        hand_over: Callable[[str, str], None] = lambda *_: None,
        upgraded: Callable[[ReportUpgrade], None] = lambda _: None,
        is_replica: bool = False,
        reaps_orphans: bool | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        self._is_ready: asyncio.Future[None] = self._loop.create_future()
        self._specs = {spec.name: spec for spec in processes}
        self._folder = folder
        self._heartbeat_s = heartbeat_s
        self._problem = problem
        self._hand_over = hand_over
        self._upgraded = upgraded
        self._reaps_orphans = os.getpid() == 1 if reaps_orphans is None else reaps_orphans
        self._restarts = Restarts(
            [(spec.name, spec.role) for spec in processes],
            exit_timeout_ns=round(exit_timeout_s * 1e9),
            heartbeat_ns=round(heartbeat_s * 1e9),
            is_replica=is_replica,
        )
        self._sockets: dict[str, socket.socket] = {}
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawning = 0
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> bool:
        """Start the server; return whether it is ready. If it is not, it has ended."""
        for name in self._specs:
            self._listen(name)
        if self._reaps_orphans:
            self._task(self._find_orphans())
        self._task(self._watch_memory())
        self._handle(Tick())
        outcomes: set[asyncio.Future[Any]] = {self._is_ready, self.ended}
        await asyncio.wait(outcomes, return_when=asyncio.FIRST_COMPLETED)
        return not self.ended.done()

    @property
    def may_upgrade(self) -> bool:
        return self._restarts.may_upgrade

    def pid(self) -> int:
        """Return the number of the engine's process, 0 while it does not run."""
        process = self._running.get(self._restarts.engine)
        return process.pid if process is not None else 0

    def upgrade(self, spec: ProcessSpec, *, stops_first: bool, finish_s: float) -> None:
        """Replace the running engine with a new one. `may_upgrade` must hold.

        Args:
            spec: The new engine, with a new name.
            stops_first: Whether the running engine stops before the new one starts.
            finish_s: Seconds that the running engine has to finish after it has handed over.
        """
        self._specs[spec.name] = spec
        self._listen(spec.name)
        self._handle(UpgradeRequested(spec.name, stops_first, round(finish_s * 1e9)))

    def cancel_upgrade(self) -> bool:
        """End the upgrade under way, and return whether that is possible: the next engine is not ready yet."""
        may_cancel = self._restarts.may_cancel
        if may_cancel:
            self._handle(UpgradeCancelled())
        return may_cancel

    def use_interpreter(self, python: str) -> None:
        """From now on, start front ends with this interpreter."""
        for name, spec in self._specs.items():
            if spec.role is ProcessRole.FRONT_END:
                self._specs[name] = replace(spec, command=[python, *spec.command[1:]])

    def respecify(self, spec: ProcessSpec) -> None:
        self._specs[spec.name] = spec

    def stop(self) -> None:
        """Stop the server: front ends first, then the engine. `ended` reports when it has stopped."""
        self._handle(StopRequested())

    def close(self) -> None:
        """Leave no process, timer or socket behind, whatever happened."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for name in list(self._sockets):
            self._close_socket(name)

    def _listen(self, name: str) -> None:
        """Open the socket on which a process reports its state."""
        heard = self._sockets[name] = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        heard.setblocking(False)
        heard.bind(str(self._folder / name))
        self._loop.add_reader(heard, self._read, name)

    def _close_socket(self, name: str) -> None:
        """Close the socket of a process that has ended for good."""
        heard = self._sockets.pop(name)
        (self._folder / name).unlink(missing_ok=True)
        self._loop.remove_reader(heard)
        heard.close()

    def _remove_files(self, name: str) -> None:
        """Remove what a process has left, unless another one has its name now."""
        if name not in self._sockets:
            for kind in ("finish", "report"):
                (self._folder / f"{name}.{kind}").unlink(missing_ok=True)

    def _read(self, name: str) -> None:
        """Read the messages of a process."""
        with contextlib.suppress(BlockingIOError):
            while True:
                message = self._sockets[name].recv(notify.MESSAGE_BYTES_MAX).decode(errors="replace")
                for line in message.split("\n"):
                    if line == notify.READY:
                        self._handle(Ready(name))
                    elif line == notify.WATCHDOG:
                        self._handle(Heartbeat(name))
                    elif line == notify.HANDED_OVER:
                        self._handle(HandOverDone(name))
                    elif line == notify.STOPPING:
                        self._handle(FrontEndDraining(name))

    def _handle(self, event: Event) -> None:
        now_ns = time.monotonic_ns()
        for command in self._restarts.handle(event, now_ns):
            self._carry_out(command)
        if not isinstance(event, Heartbeat):
            write_record(self._record, self._restarts.records())
        if self._timer is not None:
            self._timer.cancel()
        wake_at = self._restarts.wake_at()
        if wake_at is not None:
            delay_s = max(0, wake_at - now_ns) / 1e9
            self._timer = self._loop.call_later(delay_s, self._handle, Tick())

    def _carry_out(self, command: Command) -> None:
        match command:
            case Start(name):
                self._task(self._run_process(self._specs[name]))
            case Succeed(name, former):
                self._specs[name] = self._specs[former].renamed(name)
                self._listen(name)
            case Forget(name):
                self._close_socket(name)
                self._loop.call_later(REPORT_S, self._remove_files, name)
            case StopListening(name):
                for sock in self._specs[name].sockets:
                    stop_listening(sock)
            case Terminate(name, finish_ns):
                write_finish(self._folder, name, finish_ns / 1e9)
                self._signal(name, signal.SIGTERM)
            case Abort(name):
                _log.error("%s has sent no heartbeat for %g s", name, self._heartbeat_s)
                self._signal(name, signal.SIGABRT)
            case Kill(name):
                _log.error("%s does not exit: killing it", name)
                self._signal(name, signal.SIGKILL)
            case BeginHandOver(name, next_name):
                self._hand_over(name, next_name)
                self._signal(name, signal.SIGUSR2)
            case ReportUpgrade():
                self._upgraded(command)
            case ReportReady():
                self._is_ready.set_result(None)
            case ReportReadyAgain(name, pid):
                _log.info("%s (pid %d) is ready again", name, pid)
            case ReportEnd(name, pid, reason, uptime_ns, again_ns):
                again = f"; it restarts in {again_ns / 1e9:.3g} s" if again_ns is not None else ""
                level = logging.INFO if reason == exit_reason(0) else logging.ERROR
                why = f"{reason}: {problem}" if (problem := self._problem(name)) else reason
                _log.log(level, "%s (pid %d) ended after %.1f s: %s%s", name, pid, uptime_ns / 1e9, why, again)
            case Finish(status):
                self.ended.set_result(status)

    def _signal(self, name: str, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and its end is about to be handled
            self._running[name].send_signal(number)

    async def _run_process(self, spec: ProcessSpec) -> None:
        self._spawning += 1
        try:
            process = await asyncio.create_subprocess_exec(
                *with_parent_death_signal(spec.command),
                stdin=asyncio.subprocess.DEVNULL,
                env=self._environment(spec),
                pass_fds=[sock.fileno() for sock in (*spec.sockets, *spec.shared_sockets)],
                start_new_session=True,  # signals of a terminal reach this process, which forwards them
            )
        except OSError as error:
            _log.error("%s cannot be started: %s", spec.name, error)
            self._handle(SpawnFailed(spec.name))
            return
        finally:
            self._spawning -= 1
        self._running[spec.name] = process
        self._handle(Spawned(spec.name, process.pid))
        self._reap_orphans()
        status = await process.wait()
        del self._running[spec.name]
        self._read(spec.name)  # the last words of this process are not the first ones of the next
        self._handle(Exited(spec.name, status, exit_reason(status)))
        self._reap_orphans()

    def _environment(self, spec: ProcessSpec) -> dict[str, str]:
        added = {"NOTIFY_SOCKET": str(self._folder / spec.name), RECORD_VARIABLE: str(self._record)}
        if self._heartbeat_s:
            added["WATCHDOG_USEC"] = str(round(self._heartbeat_s * 1e6))
        return {**spec.environment, **added}

    @property
    def _record(self) -> Path:
        return self._folder / "processes.json"

    def _task(self, work: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.ended.done():
            self.ended.set_exception(error)

    async def _watch_memory(self) -> None:
        while True:
            await asyncio.sleep(MEMORY_S)
            pids = {name: process.pid for name, process in self._running.items()}
            limits = {name: most for name in pids if (most := self._specs[name].memory_bytes_max)}
            if limits:
                engines = [pid for name, pid in pids.items() if self._specs[name].role is ProcessRole.ENGINE]
                sizes = await asyncio.to_thread(memory_of, pids.values(), min(limits.values()))
                others = sum(size for pid, size in sizes.items() if pid not in engines)
                for name, most in limits.items():
                    self._limit_memory(name, pids[name], sizes[pids[name]] + others, most)

    def _limit_memory(self, name: str, pid: int, used: int, most: int) -> None:
        if used > most and name in self._running and self._running[name].pid == pid:
            mib = most / 2**20
            _log.error("%s has %.0f MiB of memory, more than --memory-limit-mib=%.0f", name, used / 2**20, mib)
            self._handle(MemoryExceeded(name))

    async def _find_orphans(self) -> None:
        while True:
            self._reap_orphans()
            await asyncio.sleep(ORPHANS_S)

    def _reap_orphans(self) -> None:
        """Reap ended processes that were started by others. Own ones are reaped where they are waited for."""
        own = {process.pid for process in self._running.values()}
        while self._reaps_orphans and not self._spawning:  # a process that is being started is not known yet
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid in own:
                return  # an own one hides others: this is called again when it has been reaped
            os.waitpid(ended.si_pid, 0)


def stop_listening(sock: socket.socket) -> None:
    """Let a listening socket refuse connections, and reset the waiting ones; it may listen again."""
    # After a shutdown of a socket that does not listen, connections that it accepts later end immediately.
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.shutdown(socket.SHUT_RDWR)


def exit_reason(status: int) -> str:
    """Return what ended a process, by its status, which is negative for a signal."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
