"""Upgrades: a new engine beside the running one, or in its place, then new front ends on the same sockets.

The guard decides the order of the steps (`guard/restarts.py`), the running engine hands over (`engine_port.py`). This
module checks the request, and reports the steps.
"""

import asyncio
import logging
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from charonia.core.errors import ServingError, invalid, unavailable
from charonia.server.front_ends.children import (
    ENGINE,
    HandOverOrder,
    NewEngine,
    ServeCommand,
    Sockets,
    error_of,
    new_engine_path,
    number_of,
    options_path,
    process_spec,
    read_options,
    read_report,
    take_options,
    write_new_engine,
    write_order,
)
from charonia.server.front_ends.hand_over import SOCKET_NAME
from charonia.server.front_ends.messages import PROTOCOL
from charonia.server.guard import notify
from charonia.server.guard.control import Message
from charonia.server.guard.events import ProcessRole, ReportUpgrade, Stage
from charonia.server.guard.notify import Notifier
from charonia.server.guard.restarts import FINISH_NS
from charonia.server.guard.supervisor import Supervisor
from charonia.server.machine.memory import available_memory, tree_bytes
from charonia.server.options import ServerOptions
from charonia.version import __version__

_log = logging.getLogger(__name__)

FINISH_S = FINISH_NS / 1e9
"""Default of the time that requests, streams and sequences have to finish on the previous engine, and connections on
the previous front ends."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A requested upgrade.

    Attributes:
        command: Command line of `charonia serve` for the new engine; None for that of the running engine.
        stops_first: Whether that one ends before the new one starts.
        finish_s: Seconds that it then has to finish requests, streams and sequences.
        python: The interpreter of the new engine and the new front ends, "" for the current one.
    """

    command: ServeCommand | None = None
    stops_first: bool = False
    finish_s: float = FINISH_S
    python: str = ""


class Upgrades:
    """The upgrades of a server. Not thread-safe: use it on the event loop's thread.

    Args:
        folder: Private folder of the server.
        options: The options of the server, with its ports.
        arguments: The arguments that they come from.
        notifier: The service manager.
        sockets: The listening sockets of engines.

    Attributes:
        guard: Runs the processes. It calls `hand_over` and `reported` of this object.
    """

    guard: Supervisor

    def __init__(
        self, folder: Path, options: ServerOptions, arguments: Sequence[str], notifier: Notifier, sockets: Sockets
    ) -> None:
        self._folder = folder
        self._options = options
        self._command = ServeCommand(tuple(arguments))
        self._notifier = notifier
        self._sockets = sockets
        self._python = sys.executable
        self._is_cancelled = False
        self._count = 1
        self._name = ""
        self._wanted = Wanted()
        self._reports: asyncio.Queue[ReportUpgrade] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """Upgrade with the same arguments; the log has the result."""
        self._start(Wanted(), lambda _: None)

    async def answer(self, asked: Message) -> AsyncIterator[Message]:
        """Answer a command: yield its steps, then the result. The upgrade continues even if the command is gone."""
        yield {"version": __version__}
        if asked.get("cancel"):
            yield self._cancel()
            return
        arguments = asked.get("arguments")
        wanted = Wanted(
            ServeCommand(tuple(map(str, arguments)), str(asked.get("folder", "")))
            if isinstance(arguments, list)
            else None,
            bool(asked.get("stop_first")),
            float(str(asked.get("finish_s", FINISH_S))),
            str(asked.get("python", "")),
        )
        messages: asyncio.Queue[Message] = asyncio.Queue()
        self._start(wanted, messages.put_nowait)
        while True:
            message = await messages.get()
            yield message
            if "step" not in message:
                return

    def hand_over(self, _: str, following: str) -> None:
        """Write how an engine hands over. See `Supervisor`."""
        write_order(self._folder, HandOverOrder(_socket_of(following) if following else "", self._wanted.finish_s))

    def reported(self, report: ReportUpgrade) -> None:
        """Take note of a stage of the upgrade. See `Supervisor`."""
        if report.stage in ((Stage.LOADED,) if self._wanted.stops_first else (Stage.MOVED, Stage.ENDED)):
            self._take_place()
        self._reports.put_nowait(report)

    def close(self) -> None:
        """Cancel the upgrade: the server stops."""
        for task in self._tasks:
            task.cancel()

    def _cancel(self) -> Message:
        """End the upgrade under way, and return the answer."""
        if self.guard.cancel_upgrade():
            self._is_cancelled = True
            return {"done": "the upgrade is cancelled: the previous engine continues to serve"}
        return {
            "error": "no upgrade can be cancelled",
            "hint": "none is in progress, or its engine has loaded its models, or the previous one has already stopped",
        }

    def _start(self, wanted: Wanted, tell: Callable[[Message], None]) -> None:
        task = asyncio.get_running_loop().create_task(self._run_and_tell(wanted, tell))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_and_tell(self, wanted: Wanted, tell: Callable[[Message], None]) -> None:
        def step(text: str) -> None:
            _log.info("upgrade: %s", text)
            tell({"step": text})

        try:
            began_s = time.monotonic()
            await self._run(wanted, step)
            text = f"upgraded in {time.monotonic() - began_s:.1f} s"
            _log.info("upgrade: %s", text)
            tell({"done": text})
        except ServingError as error:
            _log.error("upgrade: %s", error)
            tell({"error": error.message, "hint": error.hint})
        except asyncio.CancelledError:
            tell({"error": "the server stops", "hint": ""})
            raise
        except Exception as error:  # a full disk, for example: the command would wait forever
            _log.exception("upgrade: it cannot continue")
            tell({"error": f"it cannot continue: {error}", "hint": "the log of the server has the details"})

    async def _run(self, wanted: Wanted, step: Callable[[str], None]) -> None:
        """Upgrade."""
        if not self.guard.may_upgrade:
            raise unavailable(
                "the server cannot be upgraded now: another upgrade is under way, or its processes are not ready",
                hint="`charonia explain` and the log show its processes; try again later",
            )
        if not wanted.stops_first:
            _check_memory(self.guard.pid())
        python = wanted.python or self._python
        if shutil.which(python) is None or not os.path.isabs(python):
            raise invalid(f"--python: expected the path of an interpreter that has charonia, got '{python}'")
        command = self._command if wanted.command is None else wanted.command
        self._count += 1
        self._is_cancelled = False
        self._wanted, self._name, self._reports = wanted, f"{ENGINE}_{self._count}", asyncio.Queue()
        write_new_engine(self._folder, self._name, self._order(command))
        socket = () if wanted.stops_first else (_socket_of(self._name),)
        self._notifier.send(*notify.reloading(time.monotonic_ns()), notify.status("upgrade: a new engine starts"))
        try:
            spec = process_spec(self._folder, self._name, ProcessRole.ENGINE, self._sockets, *socket, python=python)
            self.guard.upgrade(spec, stops_first=wanted.stops_first, finish_s=wanted.finish_s)
            step("a new engine starts" if not wanted.stops_first else "the engine stops, then a new one starts")
            await self._follow(wanted, step)
            self._command = command
            await self._follow_front_ends(step)
        except ServingError:
            self._notifier.send(notify.READY, notify.status("serving; the last upgrade failed, the log has the reason"))
            raise
        self._notifier.send(notify.READY, notify.status(f"serving; upgraded to release {self._version()}"))

    async def _follow(self, wanted: Wanted, step: Callable[[str], None]) -> None:
        """Report the steps until the previous engine has stopped."""
        began_s = time.monotonic()
        while True:
            report = await self._reports.get()
            now_s = time.monotonic()
            after = f" ({now_s - began_s:.1f} s)"
            began_s = now_s
            match report.stage:
                case Stage.LOADED:
                    step(f"the new engine (release {self._version()}, pid {report.pid}) has loaded its models{after}")
                case Stage.MOVED if wanted.stops_first:
                    step("new requests wait")
                case Stage.MOVED:
                    step(f"new requests go to it{after}; the previous engine completes its requests")
                case Stage.ENDED if wanted.stops_first:
                    return
                case Stage.ENDED:
                    step(f"the previous engine has stopped{after}")
                    return
                case _:
                    raise self._failure(wanted, report)

    async def _follow_front_ends(self, step: Callable[[str], None]) -> None:
        """Report the steps until the previous front ends have stopped."""
        began_s = time.monotonic()
        while True:
            report = await self._reports.get()
            now_s = time.monotonic()
            after = f" ({now_s - began_s:.1f} s)"
            began_s = now_s
            match report.stage:
                case Stage.RENEWED:
                    name = f"front end {number_of(report.name)}"
                    step(f"{name} is renewed (pid {report.pid}){after}; the previous one completes its requests")
                case Stage.SETTLED:
                    step(f"the previous front ends have stopped{after}")
                    return
                case Stage.NOT_RENEWED:
                    error = error_of(self._folder, report.name)
                    raise invalid(
                        f"front end {number_of(report.name)} cannot be renewed: {error or report.reason}",
                        hint="the new engine serves through the previous front ends; the server's log has the details",
                    )

    def _failure(self, wanted: Wanted, report: ReportUpgrade) -> ServingError:
        """Return why the new engine has failed."""
        folder, name = self._folder, self._name
        for path in (new_engine_path(folder, name), options_path(folder, name), folder / _socket_of(name)):
            path.unlink(missing_ok=True)
        error = error_of(self._folder, self._name)
        reason = error.message if error is not None else report.reason
        if self._is_cancelled:
            error, reason = None, "the upgrade was cancelled"
        if error is not None and error.hint:
            reason += f" ({error.hint})"
        before = "the previous engine is restarted" if wanted.stops_first else "the previous engine continues to serve"
        return invalid(f"the new engine cannot start: {reason}", hint=f"{before}; the server's log has the details")

    def _order(self, command: ServeCommand) -> NewEngine:
        options = read_options(self._folder)
        return NewEngine(
            protocol=PROTOCOL,
            command=command,
            command_before=self._command,
            repositories=options.models.repositories,
            cpu_cores=options.cpu_cores,
            front_ends=self._options.front_ends,
        )

    def _take_place(self) -> None:
        order = new_engine_path(self._folder, self._name)
        if order.exists():
            order.unlink()
            take_options(self._folder, self._name)
            self._python = self._wanted.python or self._python
            spec = process_spec(self._folder, self._name, ProcessRole.ENGINE, self._sockets, python=self._python)
            memory_bytes_max = read_options(self._folder).memory_limit_mib * 2**20
            self.guard.respecify(replace(spec, memory_bytes_max=memory_bytes_max))
            self.guard.use_interpreter(self._python)
            with suppress(FileNotFoundError):  # the previous engine has done so
                (self._folder / _socket_of(self._name)).replace(self._folder / SOCKET_NAME)

    def _version(self) -> str:
        report = read_report(self._folder, self._name)
        return report.version if report is not None else ""


def _socket_of(name: str) -> str:
    return f"{name}.sock"


def _check_memory(pid: int) -> None:
    """Check that there is room for a second engine."""
    needed, free = tree_bytes(pid), available_memory()
    if needed > free:
        raise unavailable(
            f"two engines do not fit into memory: the running engine uses {needed / 2**20:.0f} MiB with its workers, "
            f"{free / 2**20:.0f} MiB are available",
            hint="--stop-first stops it before the new one starts",
        )
