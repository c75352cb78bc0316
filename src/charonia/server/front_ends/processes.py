"""The processes of a server with front ends apart: one for the engine, and one for each front end.

The parent reserves the ports, starts the engine, starts the front ends when the models are loaded, and ends all when
one of them ends. It holds no request.

The seam to whatever starts and watches children is `ChildSpec`. A child

- is started with `command` followed by one argument, the number of a descriptor for its report;
- writes its report there when it is ready, or when it cannot start, and closes it (`EngineReport` of the engine, a
  `FrontEndReport` of a front end, as `channel` writes headers: plain values in `marshal` form); a descriptor
  that ends without a report means that the child has failed;
- finishes what is in flight on SIGTERM and then ends with status 0. The engine takes its front ends along: it tells
  them to stop, waits until clients have their answers, and closes the connections, on which they end with status 0;
- ends with status 1 when the other side of its connection has gone unexpectedly (a front end), and never otherwise.

A front end may be started again at any time while the engine runs: it gets the state, the shared-memory regions and the
settings of the log when it connects. When the engine is started again, the front ends have to be, too.
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
from typing import Any, NamedTuple

from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError, internal, unavailable
from charonia.core.metadata import ModelIndexEntry
from charonia.die_with_parent import with_parent_death_signal
from charonia.server.front_ends.messages import decode_error
from charonia.server.front_ends.records import plain, record
from charonia.server.listening import cannot_listen, check_address
from charonia.server.machine.cores import cores_beside, usable_cores
from charonia.server.options import ServerOptions

_log = logging.getLogger(__name__)

OPTIONS_NAME = "options"
"""File with the options for the children, in the private folder."""

END_S_MAX = 10.0
"""Time that front ends have to end after the engine; then they are killed."""


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


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How a child is started; the module's docstring says what it does.

    Attributes:
        name: What it is called in logs.
        command: Program and arguments; the number of the report's descriptor follows.
        environment: Variables beside those of this process.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def child_specs(folder: Path, front_ends: int) -> tuple[ChildSpec, tuple[ChildSpec, ...]]:
    """Return the engine and the front ends of a server whose options are in `folder`."""

    def spec(name: str, role: str) -> ChildSpec:
        return ChildSpec(name, (sys.executable, "-m", "charonia.cli.serve_process", role, str(folder)))

    return spec("engine", "engine"), tuple(spec(f"front end {i}", "front-end") for i in range(1, front_ends + 1))


def write_report(descriptor: int, report: EngineReport | FrontEndReport) -> None:
    """Write a child's report."""
    with open(descriptor, "wb") as pipe:
        pipe.write(marshal.dumps(plain(report), 2))  # type: ignore[arg-type] # plain values


def read_options(folder: Path) -> ServerOptions:
    """Return the options that the parent has written."""
    with (folder / OPTIONS_NAME).open("rb") as file:
        options: ServerOptions = pickle.load(file)
    return options


class Port(NamedTuple):
    """An endpoint of the children."""

    port: int


class Child:
    """A running child."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process, report: asyncio.StreamReader) -> None:
        self.spec = spec
        self._process = process
        self._report = report

    @classmethod
    async def start(cls, spec: ChildSpec) -> "Child":
        """Start a child."""
        reading, writing = os.pipe()
        command = with_parent_death_signal((*spec.command, str(writing)), signal.SIGKILL)
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, pass_fds=(writing,), env={**os.environ, **spec.environment}
            )
        finally:
            os.close(writing)
        report = asyncio.StreamReader()
        pipe = open(reading, "rb", 0)  # noqa: SIM115 # its transport closes it
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(report), pipe)
        return cls(spec, process, report)

    async def report(self) -> Any:
        """Return its report, in plain values.

        Raises:
            ServingError: INTERNAL when it ended without one.
        """
        data = await self._report.read()
        if not data:
            status = await self.wait()
            raise internal(f"the {self.spec.name} ended while starting, with status {status}", hint="its log says more")
        return marshal.loads(data)

    async def wait(self) -> int:
        """Wait for its end; return the exit status, negative for a signal."""
        return await self._process.wait()

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self._process.returncode is None:
            self._process.send_signal(number)


class ServerProcesses:
    """A server in several processes, as `charonia serve` runs it.

    Args:
        options: The server's options, with `front_ends` of at least 1.

    Attributes:
        http: The HTTP endpoint, where it is on and started.
        grpc: The gRPC endpoint, where it is on and started.
        metrics: The metrics page, where it is on and started.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.http: Port | None = None
        self.grpc: Port | None = None
        self.metrics: Port | None = None
        self._options = options
        self._report = EngineReport()
        self._children: list[Child] = []
        self._watching: list[asyncio.Task[int]] = []
        self._is_started = False
        self._is_stopping = False
        self._cleanup = ExitStack()

    async def start(self) -> None:
        """Start all processes; returns when every front end listens.

        Raises:
            ServingError: A model failed to load and `exit_on_error` is set, or an endpoint cannot be opened.
        """
        folder = Path(self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="charonia-")))
        options = await self._with_ports(self._options)
        cores = options.cpu_cores or cores_beside(usable_cores(), options.front_ends)
        with (folder / OPTIONS_NAME).open("wb") as file:
            pickle.dump(replace(options, cpu_cores=cores), file)
        engine, front_ends = child_specs(folder, options.front_ends)
        report = record(EngineReport, await (await self._begin(engine)).report())
        self._report = report
        _raise(report.error)
        listening = await asyncio.gather(*(self._begin(spec) for spec in front_ends))
        for child in listening:
            _raise(record(FrontEndReport, await child.report()).error)
        self.http = Port(options.http.port) if options.http.enabled else None
        self.grpc = Port(options.grpc.port) if options.grpc.enabled else None
        self.metrics = Port(report.metrics_port) if options.metrics.enabled else None
        self._is_started = True

    async def shutdown(self) -> bool:
        """Shut down gracefully; return whether all requests in flight were answered."""
        self._is_stopping = True
        for child in self._children[:1]:
            child.signal(signal.SIGTERM)
        if self._watching:
            await self._watching[0]
            await asyncio.wait(self._watching, timeout=END_S_MAX)
        for child in self._children:
            child.signal(signal.SIGKILL)
        statuses = await asyncio.gather(*self._watching)
        self._cleanup.close()
        return not any(statuses)

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

    async def _begin(self, spec: ChildSpec) -> Child:
        child = await Child.start(spec)
        self._children.append(child)
        self._watching.append(asyncio.create_task(self._watch(child)))
        return child

    async def _watch(self, child: Child) -> int:
        """Return the exit status of a child; when it ends unexpectedly, all others end, too."""
        status = await child.wait()
        if self._is_stopping and status == -signal.SIGTERM and child is not self._children[0]:
            return 0  # a front end that was done, and no longer or not yet minded the signal
        if not self._is_stopping and self._is_started:
            _log.error("the %s has ended with status %d: the server stops", child.spec.name, status)
            self._is_stopping = True
            os.kill(os.getpid(), signal.SIGTERM)
            return status or 1
        return status

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


def _raise(error: Sequence[str] | None) -> None:
    if error is not None:
        failure: ServingError = decode_error(tuple(error))
        raise failure
