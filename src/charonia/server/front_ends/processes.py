"""The processes of a server with separate front ends: one for the engine, and one for each front end.

The parent binds the listening sockets and runs the guard, which starts the engine, then the front ends, and restarts
processes that exit. It holds no request. A child

- inherits its listening sockets, and reads the server's options from the private folder;
- writes its report there, `ProcessReport`, and then tells the guard that it is ready, or exits with
  status 1;
- finishes its requests on SIGTERM and then exits with status 0. When the server stops, the guard signals the front ends
  first. A signal to the engine alone also stops its front ends; a signal to a front end alone replaces it.

A front end may be restarted at any time: it gets the state, the shared-memory regions and the settings of the log when
it connects. When the engine is restarted, the front ends connect to it as if they were new.

`--front-ends auto`: front ends pay where the limit is the core that reads and writes requests. A request takes two to
five times as long in a front end as in the engine, so one engine feeds up to six of them, and more would wait for it.
But each takes a core from the models, which matters less on machines with many cores: so the rule adds one with each
doubling of the cores, and fewer where a model keeps the cores busy for milliseconds. Models that front ends run
themselves need no engine: then each core can have one. On few cores, forwarding a request costs more than the second
process adds.

`python -m bench.capacity` compares the rule's choice with the best number; docs/front_ends.md has the results.

The children inherit the listening sockets of the parent and listen on them. So when a process exits, the sockets stay,
with the connections that are not accepted yet.

In an upgrade, the guard decides the order of the steps (`guard/restarts.py`), and the running engine hands over
(`engine_port.py`). `Upgrades` checks the request, and reports the steps.
"""

import asyncio
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError, internal, invalid, unavailable
from charonia.core.metadata import ModelIndexEntry
from charonia.server.front_ends.children import (
    ENGINE,
    HandOverOrder,
    NewEngine,
    ProcessReport,
    ServeCommand,
    Sockets,
    error_of,
    new_engine_path,
    number_of,
    options_path,
    process_spec,
    process_specs,
    read_options,
    read_report,
    take_options,
    write_new_engine,
    write_options,
    write_order,
)
from charonia.server.front_ends.hand_over import SOCKET_NAME
from charonia.server.front_ends.messages import PROTOCOL
from charonia.server.guard import notify
from charonia.server.guard.control import Message, copied_sockets, offer_sockets, serve_control
from charonia.server.guard.notify import Notifier
from charonia.server.guard.restarts import FINISH_NS, ProcessRole, ReportUpgrade, UpgradeStage
from charonia.server.guard.supervisor import ProcessSpec, Supervisor
from charonia.server.lifecycle.placement_forecast import largest_bytes, reason_to_stay
from charonia.server.listening import cannot_listen, check_address, every
from charonia.server.machine.cores import cores_for_models, usable_cores
from charonia.server.machine.gpus import visible_gpus
from charonia.server.machine.memory import available_memory, tree_bytes
from charonia.server.machine.private_folder import PrivateFolder
from charonia.server.options import FRONT_ENDS_AUTO, FRONT_ENDS_MAX, REPLICA_HOST, ServerOptions
from charonia.version import __version__

FINISH_S = FINISH_NS / 1e9
"""Default of the time that requests, streams and sequences have to finish on the previous engine, and connections on
the previous front ends."""


@dataclass(frozen=True, slots=True)
class UpgradeRequest:
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
        self._wanted = UpgradeRequest()
        self._reports: asyncio.Queue[ReportUpgrade] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """Upgrade with the same arguments; the log has the result."""
        self._start(UpgradeRequest(), lambda _: None)

    async def answer(self, asked: Message) -> AsyncIterator[Message]:
        """Answer a command: yield its steps, then the result. The upgrade continues even if the command is gone."""
        yield {"version": __version__}
        if asked.get("cancel"):
            yield self._cancel()
            return
        arguments = asked.get("arguments")
        wanted = UpgradeRequest(
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
        if report.stage in (
            (UpgradeStage.LOADED,) if self._wanted.stops_first else (UpgradeStage.MOVED, UpgradeStage.ENDED)
        ):
            self._replace_engine()
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

    def _start(self, wanted: UpgradeRequest, tell: Callable[[Message], None]) -> None:
        task = asyncio.get_running_loop().create_task(self._run_and_tell(wanted, tell))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_and_tell(self, wanted: UpgradeRequest, tell: Callable[[Message], None]) -> None:
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

    async def _run(self, wanted: UpgradeRequest, step: Callable[[str], None]) -> None:
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

    async def _follow(self, wanted: UpgradeRequest, step: Callable[[str], None]) -> None:
        """Report the steps until the previous engine has stopped."""
        began_s = time.monotonic()
        while True:
            report = await self._reports.get()
            now_s = time.monotonic()
            after = f" ({now_s - began_s:.1f} s)"
            began_s = now_s
            match report.stage:
                case UpgradeStage.LOADED:
                    step(f"the new engine (release {self._version()}, pid {report.pid}) has loaded its models{after}")
                case UpgradeStage.MOVED if wanted.stops_first:
                    step("new requests wait")
                case UpgradeStage.MOVED:
                    step(f"new requests go to it{after}; the previous engine completes its requests")
                case UpgradeStage.ENDED if wanted.stops_first:
                    return
                case UpgradeStage.ENDED:
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
                case UpgradeStage.RENEWED:
                    name = f"front end {number_of(report.name)}"
                    step(f"{name} is renewed (pid {report.pid}){after}; the previous one completes its requests")
                case UpgradeStage.SETTLED:
                    step(f"the previous front ends have stopped{after}")
                    return
                case UpgradeStage.NOT_RENEWED:
                    error = error_of(self._folder, report.name)
                    raise invalid(
                        f"front end {number_of(report.name)} cannot be renewed: {error or report.reason}",
                        hint="the new engine serves through the previous front ends; the server's log has the details",
                    )

    def _failure(self, wanted: UpgradeRequest, report: ReportUpgrade) -> ServingError:
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

    def _replace_engine(self) -> None:
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


_log = logging.getLogger(__name__)

FEW_CORES = 3
"""With this many cores or fewer, front ends pay only if they run the models themselves."""

FED_BY_ENGINE = 6
"""Front ends that one engine keeps busy: three over HTTP with small requests, six over gRPC with large ones."""

LARGE_BYTES = 20 * 2**20
"""Size of the files of a model that computes for a millisecond or more: one core reads about as many bytes in that."""

CORES_BESIDE_LARGE = 8
"""Cores for each front end beside such a model."""

CLAIM_PREFIX = "charonia-address-"
"""Prefix of the abstract socket that a server holds for each address that it has bound."""

Address = tuple[int, Any]
"""Family and address as the system writes it: host, port, and fields of the family."""


async def bound_sockets(
    host: str, port: int, count: int, stack: ExitStack, *, shares: bool = False
) -> list[tuple[socket.socket, ...]]:
    """Bind the sockets of an endpoint.

    Args:
        shares: Whether other servers may listen on the port.
    """
    if port and not shares:
        await check_address(host, port)
    try:
        if port and not shares:
            stack.enter_context(_claimed(host, port))
        found = await asyncio.get_running_loop().getaddrinfo(
            every(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )  # fmt: skip
        addresses: list[Address] = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
        # A socket that listens again after a shutdown keeps its port only if it was bound to this port by number.
        with _bound(addresses[0], port) as first:
            number = first.getsockname()[1]
            return [tuple(stack.enter_context(_bound(address, number)) for address in addresses) for _ in range(count)]
    except OSError as error:
        raise cannot_listen(host, port, error) from error


def _claimed(host: str, port: int) -> socket.socket:
    """Claim an address: the system lets two servers of one user bind it until one of them listens.

    Raises:
        OSError: Another server has claimed it.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if sys.platform == "linux":  # elsewhere there are no names without a file
        try:
            claim.bind(f"\0{CLAIM_PREFIX}{host}:{port}")
        except OSError:
            claim.close()
            raise
    return claim


def _bound(address: Address, port: int) -> socket.socket:
    family, (host, _, *more) = address
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port, *more))
    except OSError:
        sock.close()
        raise
    return sock


class FrontEndCount(NamedTuple):
    """A number of front ends, 0 for one process, and why it was chosen."""

    number: int
    reason: str


def choose_front_ends(cores: int, stays: str, largest_bytes: int = 0) -> FrontEndCount:
    """Return the number of front ends for a machine and its models."""
    have = f"{cores} core{'s' if cores > 1 else ''}"
    if cores == 1:
        return FrontEndCount(0, have)
    if not stays:
        return FrontEndCount(min(cores, FRONT_ENDS_MAX), f"{have}, and every model may run in front ends")
    if cores <= FEW_CORES:
        return FrontEndCount(0, f"{have}, and {stays}")
    if largest_bytes >= LARGE_BYTES:
        number, stays = cores // CORES_BESIDE_LARGE, f"{stays}, and one of {largest_bytes >> 20} MiB needs the cores"
    else:
        number = cores.bit_length()
    return FrontEndCount(min(number, FED_BY_ENGINE), f"{have}; {stays}")


def with_number(options: ServerOptions) -> ServerOptions:
    """Return the options with the number of front ends, chosen and logged for "auto". Blocks on the disk."""
    if options.front_ends != FRONT_ENDS_AUTO:
        return options
    models = options.models
    gpus = visible_gpus()
    stays = reason_to_stay(models.repositories, config_name=models.config_name, gpu_count=gpus)
    chosen = choose_front_ends(
        usable_cores(options.cpu_cores), stays, 0 if gpus else largest_bytes(models.repositories)
    )
    _log.info("--front-ends=auto: %d (%s)", chosen.number, chosen.reason)
    return replace(options, front_ends=chosen.number)


class SharedPort(NamedTuple):
    """An endpoint of the children."""

    port: int


class ServerProcesses:
    """A server in several processes, as `charonia serve` runs it.

    Args:
        options: The server's options, with a number of front ends of at least 1.
        arguments: The arguments of `charonia serve` that the options come from; a new engine reads them again.
        notifier: The service manager, whose heartbeats the processes owe the guard, too.

    Attributes:
        http: The HTTP endpoint, where it is on and started.
        grpc: The gRPC endpoint, where it is on and started.
        metrics: The metrics page, where it is on and started.
    """

    def __init__(
        self, options: ServerOptions, *, arguments: Sequence[str] = (), notifier: Notifier | None = None
    ) -> None:
        self.http: SharedPort | None = None
        self.grpc: SharedPort | None = None
        self.metrics: SharedPort | None = None
        self._options = options
        self._arguments = arguments
        self._notifier = notifier or Notifier()
        self._upgrades: Upgrades | None = None
        self._report = ProcessReport()
        self._guard: Supervisor | None = None
        self._watching: asyncio.Task[None] | None = None
        self._cleanup = ExitStack()

    async def start(self) -> None:
        """Start all processes; returns when every front end listens.

        Raises:
            ServingError: A model failed to load and `exit_on_error` is set, or an endpoint cannot be opened.
        """
        self._folder = folder = self._cleanup.enter_context(PrivateFolder()).path
        options = self._options
        engine, front_ends, shared = await self._bind(options)
        options = replace(options, cpu_cores=options.cpu_cores or cores_for_models(usable_cores(), options.front_ends))
        write_options(folder, options)
        specs = process_specs(folder, engine, front_ends, shared)
        specs[0] = replace(specs[0], memory_bytes_max=options.memory_limit_mib * 2**20)
        upgrades = self._upgrades = Upgrades(folder, options, self._arguments, self._notifier, engine)
        guard = self._guard = upgrades.guard = Supervisor(
            specs,
            folder,
            exit_timeout_s=options.exit_delay_secs + options.exit_timeout_secs,
            heartbeat_s=self._notifier.limit_s,
            problem=self._problem,
            hand_over=upgrades.hand_over,
            upgraded=upgrades.reported,
            is_replica=bool(shared),
        )
        self._cleanup.callback(guard.close)
        if not await guard.start():
            self._report = read_report(folder, ENGINE) or ProcessReport()
            raise self._failure(specs, guard.ended.result())
        self._watching = asyncio.create_task(self._watch(guard))
        self._report = read_report(folder, ENGINE) or ProcessReport()
        self.http, self.grpc = (_port_of((shared or front_ends)[0], endpoint) for endpoint in ("http", "grpc"))
        self.metrics = _port_of(engine, "metrics")
        if shared:
            self._cleanup.callback(offer_sockets(os.getpid(), shared))
        await self._listen_for_commands(upgrades)

    async def shutdown(self) -> bool:
        """Shut down gracefully; return whether all requests in flight were answered."""
        with self._cleanup:
            if self._watching is not None:
                self._watching.cancel()
            if self._guard is None:
                return True
            if self._upgrades is not None:
                self._upgrades.close()
            self._guard.stop()
            return await self._guard.ended == 0

    def models(self) -> list[ModelIndexEntry]:
        """Return every model with the state of its versions, as it was when the engine had started."""
        return list(self._report.models)

    def model_config(self, name: str) -> ModelConfig:
        """Return the complete configuration of a model.

        Raises:
            ServingError: It was not ready when the engine had started.
        """
        config = self._report.configs.get(name)
        if config is None:
            raise unavailable(f"model '{name}' is not ready")
        return config

    async def _listen_for_commands(self, upgrades: Upgrades) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR2, upgrades.begin)
        self._cleanup.callback(loop.remove_signal_handler, signal.SIGUSR2)
        try:
            self._cleanup.callback((await serve_control(os.getpid(), upgrades.answer)).close)
        except OSError as error:  # of a process of the same number in another container, say
            _log.warning("`charonia upgrade` cannot reach this server, only SIGUSR2 can: %s", error)

    async def _watch(self, guard: Supervisor) -> None:
        await asyncio.wait({guard.ended})
        _log.error("the server's processes have ended")
        os.kill(os.getpid(), signal.SIGTERM)

    def _failure(self, specs: Sequence[ProcessSpec], status: int) -> ServingError:
        """Return why the server has not started."""
        for spec in specs:
            error = error_of(self._folder, spec.name)
            if error is not None:
                return error
        return internal(f"a process of the server ended while starting, with status {status}", hint="the log says more")

    def _problem(self, name: str) -> str:
        """Return why a process could not start, "" if it had started."""
        error = error_of(self._folder, name) if self._watching is not None else None
        return str(error) if error is not None else ""

    async def _bind(self, options: ServerOptions) -> tuple[Sockets, list[Sockets], list[Sockets]]:
        """Return the sockets of the engine, of each front end, and the ones shared with other servers."""
        engine = await self._bind_metrics(options)
        if not options.replica_port:
            return engine, await self._bind_endpoints(options), []
        shared = self._take_beside(options) if options.beside else await self._bind_endpoints(options)
        own = await bound_sockets(REPLICA_HOST, options.replica_port, options.front_ends, self._cleanup)
        return engine, [{"http": each} for each in own], shared

    def _take_beside(self, options: ServerOptions) -> list[Sockets]:
        found = copied_sockets(options.beside)
        for sock in (sock for each in found for sockets in each.values() for sock in sockets):
            self._cleanup.enter_context(sock)
        if len(found) != options.front_ends:
            raise invalid(f"--front-ends: server {options.beside} has {len(found)}, got {options.front_ends}")
        return list(found)

    async def _bind_endpoints(self, options: ServerOptions) -> list[Sockets]:
        count, stack, found = options.front_ends, self._cleanup, {}
        for endpoint, each in (("http", options.http), ("grpc", options.grpc)):
            if each.enabled:
                found[endpoint] = await bound_sockets(each.address, each.port, count, stack, shares=each.reuse_port)
        return [{endpoint: bound[number] for endpoint, bound in found.items()} for number in range(count)]

    async def _bind_metrics(self, options: ServerOptions) -> Sockets:
        if not options.metrics.enabled:
            return {}
        (sockets,) = await bound_sockets(options.metrics_address, options.metrics.port, 1, self._cleanup)
        return {"metrics": sockets}


def _port_of(sockets: Sockets, endpoint: str) -> SharedPort | None:
    return SharedPort(sockets[endpoint][0].getsockname()[1]) if endpoint in sockets else None
