"""Runs the processes of a server as `Restarts` says: starts, watches, signals and reaps them.

A process tells that it is ready, and that its event loop turns, as a service tells systemd (`notify`), over a socket of
its own. Its output is that of this process. It ends with this process, however this one ends. As process 1 of a
container this one also reaps the orphans that the kernel hands to it.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from charonia.die_with_parent import with_parent_death_signal
from charonia.server.guard import notify
from charonia.server.guard.notify import Notifier
from charonia.server.guard.record_file import RECORD_VARIABLE, write_record
from charonia.server.guard.restarts import (
    Command,
    Event,
    Exited,
    Finish,
    Heartbeat,
    Ready,
    ReportEnd,
    ReportReady,
    ReportReadyAgain,
    Restarts,
    Role,
    Signal,
    Spawned,
    SpawnFailed,
    Start,
    StopAsked,
    Tick,
    exit_reason,
)

_log = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """How to start a process.

    Attributes:
        name: Its name, unique, usable as a file name.
        role: What it does.
        command: A program and its arguments.
        environment: Its environment; the guard adds variables of its own.
        pass_fds: Descriptors that it inherits.
    """

    name: str
    role: Role
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    pass_fds: Sequence[int] = ()


class Supervisor:
    """Keeps the processes of a server running. To be used on the event loop of the main thread, once.

    Args:
        processes: The processes.
        folder: Private folder for sockets and the record.
        exit_timeout_s: Time that requests in flight have when the server stops, in seconds.
        notifier: The one who started this process.
        reaps_orphans: Whether processes whose parents have ended become children of this one.
    """

    def __init__(
        self,
        processes: Sequence[ProcessSpec],
        folder: Path,
        *,
        exit_timeout_s: float,
        notifier: Notifier | None = None,
        reaps_orphans: bool | None = None,
    ) -> None:
        self._specs = {spec.name: spec for spec in processes}
        self._folder = folder
        self._notifier = notifier if notifier is not None else Notifier()
        self._reaps_orphans = os.getpid() == 1 if reaps_orphans is None else reaps_orphans
        self._restarts = Restarts(
            [(spec.name, spec.role) for spec in processes],
            exit_timeout_ns=round(exit_timeout_s * 1e9),
            heartbeat_ns=round(self._notifier.limit_s * 1e9),
        )
        self._sockets: dict[str, socket.socket] = {}
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawning = 0
        self._timer: asyncio.TimerHandle | None = None
        self._finished: asyncio.Future[int] | None = None

    async def run(self) -> int:
        """Run the server until a signal stops it or it cannot go on; return its exit status."""
        loop = asyncio.get_running_loop()
        self._finished = loop.create_future()
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self._kill_all)
            for name in self._specs:
                self._listen(name, cleanup)
            for number in _STOP_SIGNALS:
                loop.add_signal_handler(number, self._stop, number)
                cleanup.callback(loop.remove_signal_handler, number)
            if self._reaps_orphans:
                loop.add_signal_handler(signal.SIGCHLD, self._reap_orphans)
                cleanup.callback(loop.remove_signal_handler, signal.SIGCHLD)
            pings = asyncio.create_task(self._notifier.ping())
            cleanup.callback(pings.cancel)
            self._handle(Tick())
            return await self._finished

    def _listen(self, name: str, cleanup: contextlib.ExitStack) -> None:
        """Open the socket on which a process tells its state."""
        heard = cleanup.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        heard.setblocking(False)
        heard.bind(str(self._folder / name))
        loop = asyncio.get_running_loop()
        loop.add_reader(heard, self._read, name)
        cleanup.callback(loop.remove_reader, heard)
        self._sockets[name] = heard

    def _read(self, name: str) -> None:
        """Read what a process has told."""
        with contextlib.suppress(BlockingIOError):
            while True:
                message = self._sockets[name].recv(notify.MESSAGE_BYTES_MAX).decode(errors="replace")
                for line in message.split("\n"):
                    if line == notify.READY:
                        self._handle(Ready(name))
                    elif line == notify.WATCHDOG:
                        self._handle(Heartbeat(name))
                    elif line.startswith("STATUS=") and self._specs[name].role is Role.ENGINE:
                        self._notifier.send(line)

    def _stop(self, number: int) -> None:
        _log.info("%s: stopping the server's processes", signal.Signals(number).name)
        self._notifier.send(notify.STOPPING)
        self._handle(StopAsked())

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
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._handle, Tick())

    def _carry_out(self, command: Command) -> None:
        match command:
            case Start(name):
                task = asyncio.get_running_loop().create_task(self._run_process(self._specs[name]))
                self._tasks.add(task)
                task.add_done_callback(self._task_ended)
            case Signal(name, number):
                if name in self._running:
                    with contextlib.suppress(ProcessLookupError):
                        self._running[name].send_signal(number)
            case ReportReady():
                self._notifier.send(notify.READY)
            case ReportReadyAgain(name, pid):
                _log.info("%s (pid %d) is ready again", name, pid)
            case ReportEnd():
                self._report_end(command)
            case Finish(status):
                if self._finished is not None and not self._finished.done():
                    self._finished.set_result(status)

    def _report_end(self, end: ReportEnd) -> None:
        text = f"{end.name} (pid {end.pid}) ended after {end.uptime_ns / 1e9:.1f} s: {end.reason}"
        if end.again_ns is not None:
            text += f"; it is started again in {end.again_ns / 1e9:.3g} s"
        _log.log(logging.INFO if end.reason == exit_reason(0) else logging.ERROR, "%s", text)
        self._notifier.send(notify.status(text))

    async def _run_process(self, spec: ProcessSpec) -> None:
        self._spawning += 1
        try:
            process = await asyncio.create_subprocess_exec(
                *with_parent_death_signal(spec.command, signal.SIGKILL),
                stdin=asyncio.subprocess.DEVNULL,
                env=self._environment(spec),
                pass_fds=spec.pass_fds,
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
        self._handle(Exited(spec.name, status))
        self._reap_orphans()

    def _environment(self, spec: ProcessSpec) -> dict[str, str]:
        added = {"NOTIFY_SOCKET": str(self._folder / spec.name), RECORD_VARIABLE: str(self._record)}
        if self._notifier.limit_s:
            added["WATCHDOG_USEC"] = str(round(self._notifier.limit_s * 1e6))
        return {**spec.environment, **added}

    @property
    def _record(self) -> Path:
        return self._folder / "processes.json"

    def _task_ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and self._finished is not None:
            self._finished.set_exception(task.exception() or RuntimeError())

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

    def _kill_all(self) -> None:
        """Leave no process behind, whatever ended `run`."""
        if self._timer is not None:
            self._timer.cancel()
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
