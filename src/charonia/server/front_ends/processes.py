"""The processes of a server with front ends apart: one for the engine, and one for each front end.

The parent reserves the ports and runs the guard, which starts the engine, then the front ends, and starts again what
ends. It holds no request. A child

- reads the server's options from the private folder;
- writes its report there, `EngineReport` or `FrontEndReport`, and then tells the guard that it is ready, or ends with
  status 1;
- finishes what is in flight on SIGTERM and then ends with status 0. The guard tells the front ends first. An engine
  that is told by itself takes its front ends along.

A front end may be started again at any time: it gets the state, the shared-memory regions and the settings of the log
when it connects. When the engine is started again, the front ends connect to it as if they were new.
"""

import asyncio
import logging
import marshal
import os
import pickle
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError, internal, unavailable
from charonia.core.metadata import ModelIndexEntry
from charonia.server.front_ends.messages import decode_error
from charonia.server.front_ends.records import plain, record
from charonia.server.guard.restarts import Role
from charonia.server.guard.supervisor import ProcessSpec, Supervisor
from charonia.server.listening import cannot_listen, check_address
from charonia.server.machine.cores import cores_beside, usable_cores
from charonia.server.options import ServerOptions

_log = logging.getLogger(__name__)

OPTIONS_NAME = "options"
"""File with the options for the children, in the private folder."""

ENGINE = "engine"
"""Name of the engine's process."""


class ErrorRecord(NamedTuple):
    """An error in a report, as `messages.encode_error` writes it."""

    code: str
    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What the engine reports when it has started, or failed to.

    Attributes:
        error: Why it cannot start, None when it has.
        models: Every model with the state of its versions.
        configs: Configuration of each model that is ready.
        metrics_port: Port of the metrics page, 0 for none.
    """

    error: ErrorRecord | None = None
    models: tuple[ModelIndexEntry, ...] = ()
    configs: Mapping[str, ModelConfig] = field(default_factory=dict)
    metrics_port: int = 0


@dataclass(frozen=True, slots=True)
class FrontEndReport:
    """What a front end reports when it listens, or failed to: `error` is None when it does."""

    error: ErrorRecord | None = None


Report = TypeVar("Report", EngineReport, FrontEndReport)


def process_specs(folder: Path, front_ends: int) -> list[ProcessSpec]:
    """Return the engine and the front ends of a server whose options are in `folder`."""

    def spec(name: str, role: Role) -> ProcessSpec:
        return ProcessSpec(name, role, (sys.executable, "-m", "charonia.cli.serve_process", name, str(folder)))

    return [spec(ENGINE, Role.ENGINE), *(spec(f"front_end_{i}", Role.FRONT_END) for i in range(1, front_ends + 1))]


def number_of(name: str) -> int:
    """Return the number of a process: 0 for the engine, from 1 on for front ends."""
    return 0 if name == ENGINE else int(name.rpartition("_")[2])


def write_report(folder: Path, name: str, report: EngineReport | FrontEndReport) -> None:
    """Write a child's report."""
    (folder / f"{name}.report").write_bytes(marshal.dumps(plain(report), 2))  # type: ignore[arg-type] # plain values


def forget_report(folder: Path, name: str) -> None:
    """Remove the report of the process that ran before under this name."""
    (folder / f"{name}.report").unlink(missing_ok=True)


def read_report(folder: Path, name: str, kind: type[Report]) -> Report | None:
    """Return the report of a child, None if it has written none."""
    try:
        return record(kind, marshal.loads((folder / f"{name}.report").read_bytes()))
    except FileNotFoundError:
        return None


def write_options(folder: Path, options: ServerOptions) -> None:
    """Write the options for the children."""
    new = folder / f"{OPTIONS_NAME}.new"
    new.write_bytes(pickle.dumps(options))
    new.replace(folder / OPTIONS_NAME)


def read_options(folder: Path) -> ServerOptions:
    """Return the options that the parent has written."""
    with (folder / OPTIONS_NAME).open("rb") as file:
        options: ServerOptions = pickle.load(file)
    return options


class Port(NamedTuple):
    """An endpoint of the children."""

    port: int


class ServerProcesses:
    """A server in several processes, as `charonia serve` runs it.

    Args:
        options: The server's options, with `front_ends` of at least 1.
        heartbeat_s: Longest time between two heartbeats of a process, in seconds; 0 for no heartbeats.

    Attributes:
        http: The HTTP endpoint, where it is on and started.
        grpc: The gRPC endpoint, where it is on and started.
        metrics: The metrics page, where it is on and started.
    """

    def __init__(self, options: ServerOptions, *, heartbeat_s: float = 0.0) -> None:
        self.http: Port | None = None
        self.grpc: Port | None = None
        self.metrics: Port | None = None
        self._options = options
        self._heartbeat_s = heartbeat_s
        self._report = EngineReport()
        self._guard: Supervisor | None = None
        self._watching: asyncio.Task[None] | None = None
        self._cleanup = ExitStack()

    async def start(self) -> None:
        """Start all processes; returns when every front end listens.

        Raises:
            ServingError: A model failed to load and `exit_on_error` is set, or an endpoint cannot be opened.
        """
        self._folder = folder = Path(self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="charonia-")))
        options = await self._with_ports(self._options)
        options = replace(options, cpu_cores=options.cpu_cores or cores_beside(usable_cores(), options.front_ends))
        write_options(folder, options)
        specs = process_specs(folder, options.front_ends)
        guard = self._guard = Supervisor(
            specs,
            folder,
            exit_timeout_s=options.exit_timeout_secs,
            heartbeat_s=self._heartbeat_s,
            problem=self._problem,
        )
        self._cleanup.callback(guard.close)
        if not await guard.start():
            self._report = read_report(folder, ENGINE, EngineReport) or EngineReport()
            raise self._failure(specs, guard.ended.result())
        self._watching = asyncio.create_task(self._watch(guard))
        report = self._report = read_report(folder, ENGINE, EngineReport) or EngineReport()
        # An engine that is started again keeps the port.
        write_options(folder, replace(options, metrics=replace(options.metrics, port=report.metrics_port)))
        self.http = Port(options.http.port) if options.http.enabled else None
        self.grpc = Port(options.grpc.port) if options.grpc.enabled else None
        self.metrics = Port(report.metrics_port) if options.metrics.enabled else None

    async def shutdown(self) -> bool:
        """Shut down gracefully; return whether all requests in flight were answered."""
        with self._cleanup:
            if self._watching is not None:
                self._watching.cancel()
            if self._guard is None:
                return True
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

    async def _watch(self, guard: Supervisor) -> None:
        """Let this process stop when the guard has given up."""
        await asyncio.wait({guard.ended})
        _log.error("the server's processes have ended")
        os.kill(os.getpid(), signal.SIGTERM)

    def _failure(self, specs: Sequence[ProcessSpec], status: int) -> ServingError:
        """Return why the server has not started."""
        for spec in specs:
            error = self._error(spec.name)
            if error is not None:
                return error
        return internal(f"a process of the server ended while starting, with status {status}", hint="the log says more")

    def _problem(self, name: str) -> str:
        """Return why a process could not start, "" if it had started."""
        error = self._error(name) if self._watching is not None else None
        return str(error) if error is not None else ""

    def _error(self, name: str) -> ServingError | None:
        report: EngineReport | FrontEndReport | None
        if name == ENGINE:
            report = read_report(self._folder, name, EngineReport)
        else:
            report = read_report(self._folder, name, FrontEndReport)
        return decode_error(tuple(report.error)) if report is not None and report.error is not None else None

    async def _with_ports(self, options: ServerOptions) -> ServerOptions:
        """Return options with the ports of all front ends, which this process keeps for them."""
        http = grpc = 0
        if options.http.enabled:
            http = await self._reserve(options.http.address, options.http.port, options.http.reuse_port)
        if options.grpc.enabled:
            grpc = await self._reserve(options.grpc.address, options.grpc.port, options.grpc.reuse_port)
        return replace(options, http=replace(options.http, port=http), grpc=replace(options.grpc, port=grpc))

    async def _reserve(self, address: str, port: int, is_shared: bool) -> int:
        """Bind a port without listening, so that it stays this server's while front ends come and go."""
        if port:
            await check_address(address, port, reuse_port=is_shared)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = self._cleanup.enter_context(socket.socket(family, socket.SOCK_STREAM))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            sock.bind((address, port))
        except OSError as error:
            raise cannot_listen(address, port, error) from error
        bound: int = sock.getsockname()[1]
        return bound
