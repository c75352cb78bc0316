"""Simulated processes of a server behind its own guard: they run the code of real ones, exit, hang and are killed."""

import asyncio
import contextvars
import fcntl
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.simulation.machine import MACHINE, PROCESS, SIGNALS, may_fail
from tests.simulation.workers import kill_workers

from charonia.cli import logs, serve_process
from charonia.server.app import InferenceServer
from charonia.server.front_ends import engine_port, front_end, processes
from charonia.server.guard import supervisor
from charonia.server.guard.notify import Notifier
from charonia.server.machine import private_folder
from charonia.server.options import ServerOptions

HEARTBEAT_S = 10.0

PROGRAM = "charonia.cli.serve_process"


class Process:
    """A process, with what the guard uses of `asyncio.subprocess.Process`.

    Attributes:
        process: Its name on the machine.
        server: Its engine, or its front end.
    """

    all: dict[str, "Process"]
    """Those that run, by the name that the guard gives them."""

    ended: Callable[["Process", int], None]
    """Called at the end of each, with its status."""

    started = 0

    starts_s = 0.5
    """Time that the longest start takes."""

    def __init__(self, name: str, folder: Path, further: list[str], address: str) -> None:
        self.loop: Any = asyncio.get_running_loop()
        Process.started += 1
        self.name, self.pid = name, Process.started
        self.process = f"{name} {self.pid}"
        self.server: Any = None
        self._status: asyncio.Future[int] = self.loop.create_future()
        self._notifier = Notifier(address, HEARTBEAT_S)
        self._outside = contextvars.copy_context()
        context = contextvars.copy_context()
        context.run(PROCESS.set, self.process)
        Process.all[name] = self
        delay_s = 0.01 + Process.starts_s * MACHINE.chance.random()
        self.loop.call_later(delay_s, self._start, name, folder, further, context=context)

    async def wait(self) -> int:
        return await asyncio.shield(self._status)

    def send_signal(self, number: int) -> None:
        self.loop.call_later(MACHINE.delay_s(1e-5, 1e-2), self._receive, number)

    def kill(self) -> None:
        self.exit(-signal.SIGKILL)

    def hang(self) -> None:
        """Send no heartbeats any more."""
        self._notifier.limit_s = 0.0

    def exit(self, status: int) -> None:
        if self._status.done():
            return
        self.loop.kill(self.process)
        kill_workers(self.process)
        if Process.all.get(self.name) is self:
            del Process.all[self.name]
        for key in [key for key in SIGNALS if key[0] == self.process]:
            del SIGNALS[key]
        for fd, inode in LOCKED.get(self.process, ()):
            with suppress(OSError):
                if os.stat(fd).st_ino == inode:  # or it has been closed
                    fcntl.flock(fd, fcntl.LOCK_UN)
        Process.ended(self, status)
        self._status.set_result(status)

    def _start(self, name: str, folder: Path, further: list[str]) -> None:
        task = self.loop.create_task(serve_process._run(name, folder, further, self._notifier))
        task.add_done_callback(self._returned, context=self._outside)

    def _returned(self, task: "asyncio.Task[int]") -> None:
        self.exit(1 if task.cancelled() or task.exception() is not None else task.result())

    def _receive(self, number: int) -> None:
        handler = SIGNALS.get((self.process, number))
        if self._status.done():
            return
        if handler is None:
            self.exit(-number)
        else:
            context, callback, args = handler
            self.loop.call_soon(callback, *args, context=context)


async def _create(*command: str, env: dict[str, str], **_: object) -> Process:
    may_fail("fork")
    index = command.index(PROGRAM) + 1
    return Process(command[index], Path(command[index + 1]), list(command[index + 2 :]), env["NOTIFY_SOCKET"])


def _kept(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **options: Any) -> Any:
        server = make(*args, **options)
        for each in Process.all.values():
            if each.process == PROCESS.get():
                each.server = server
        return server

    return made


LOCKED: dict[str, list[tuple[int, int]]] = {}
"""Descriptors and inodes of folders that processes have locked: their ends release them."""


def _flock(fd: int, operation: int) -> None:
    fcntl.flock(fd, operation)
    if operation == fcntl.LOCK_EX:
        LOCKED.setdefault(PROCESS.get(), []).append((fd, os.stat(fd).st_ino))


async def _idle() -> None:
    await asyncio.Event().wait()


def begin(options: ServerOptions, ended: Callable[[Process, int], None], starts_s: float) -> None:
    """Let a guard start simulated processes.

    Args:
        options: Those of an upgraded server.
        starts_s: Time that the longest start takes.
    """
    Process.starts_s = starts_s
    Process.all, Process.ended, Process.started = {}, staticmethod(ended), 0
    vars(serve_process)["parse_command"] = lambda command: options


asyncio.create_subprocess_exec = _create  # type: ignore[assignment]
vars(supervisor)["with_parent_death_signal"] = lambda command: command
vars(processes)["_check_memory"] = lambda pid: None
vars(private_folder)["fcntl"] = SimpleNamespace(**vars(fcntl) | {"flock": _flock})
vars(logs)["configure"] = lambda options: None
vars(engine_port)["InferenceServer"] = _kept(InferenceServer)
vars(front_end)["FrontEnd"] = _kept(front_end.FrontEnd)
for _module in (engine_port, front_end):
    vars(_module).update(collect_less_often=lambda: None, give_back_idle_memory=_idle)
vars(sys)["setswitchinterval"] = lambda seconds: None
