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
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError, internal, unavailable
from charonia.core.metadata import ModelIndexEntry
from charonia.server.front_ends.children import (
    ENGINE,
    EngineReport,
    error_of,
    process_specs,
    read_report,
    write_options,
)
from charonia.server.front_ends.how_many import Chosen, how_many
from charonia.server.front_ends.upgrades import Upgrades
from charonia.server.guard.control import serve_control
from charonia.server.guard.notify import Notifier
from charonia.server.guard.supervisor import ProcessSpec, Supervisor
from charonia.server.lifecycle.foreseen import largest_bytes, reason_to_stay
from charonia.server.lifecycle.repository.private_folder import PrivateFolder
from charonia.server.listening import cannot_listen, check_address
from charonia.server.machine.cores import cores_beside, usable_cores
from charonia.server.machine.gpus import visible_gpus
from charonia.server.options import FRONT_ENDS_AUTO, ServerOptions

_log = logging.getLogger(__name__)


def with_number(options: ServerOptions) -> ServerOptions:
    """Return the options with the number of front ends, chosen and logged for "auto". Blocks on the disk."""
    if options.front_ends != FRONT_ENDS_AUTO:
        return options
    if sys.platform == "win32":
        chosen = Chosen(0, "this system cannot share a port among processes")
    else:
        models = options.models
        gpus = visible_gpus()
        stays = reason_to_stay(models.repositories, config_name=models.config_name, gpu_count=gpus)
        chosen = how_many(usable_cores(), stays, 0 if gpus else largest_bytes(models.repositories))
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
        self._report = EngineReport()
        self._guard: Supervisor | None = None
        self._watching: asyncio.Task[None] | None = None
        self._cleanup = ExitStack()

    async def start(self) -> None:
        """Start all processes; returns when every front end listens.

        Raises:
            ServingError: A model failed to load and `exit_on_error` is set, or an endpoint cannot be opened.
        """
        self._folder = folder = self._cleanup.enter_context(PrivateFolder()).path
        options = await self._with_ports(self._options)
        options = replace(options, cpu_cores=options.cpu_cores or cores_beside(usable_cores(), options.front_ends))
        write_options(folder, options)
        specs = process_specs(folder, options.front_ends)
        upgrades = self._upgrades = Upgrades(folder, options, self._arguments, self._notifier)
        guard = self._guard = upgrades.guard = Supervisor(
            specs,
            folder,
            exit_timeout_s=options.exit_timeout_secs,
            heartbeat_s=self._notifier.limit_s,
            problem=self._problem,
            hand_over=upgrades.hand_over,
            upgraded=upgrades.reported,
        )
        self._cleanup.callback(guard.close)
        if not await guard.start():
            self._report = read_report(folder, ENGINE, EngineReport) or EngineReport()
            raise self._failure(specs, guard.ended.result())
        self._watching = asyncio.create_task(self._watch(guard))
        self._report = read_report(folder, ENGINE, EngineReport) or EngineReport()
        self.http = SharedPort(options.http.port) if options.http.enabled else None
        self.grpc = SharedPort(options.grpc.port) if options.grpc.enabled else None
        self.metrics = SharedPort(options.metrics.port) if options.metrics.enabled else None
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
        """Let this process stop when the guard has given up."""
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

    async def _with_ports(self, options: ServerOptions) -> ServerOptions:
        """Return options with the ports of all front ends, which this process keeps for them."""
        http = grpc = metrics = 0
        if options.http.enabled:
            http = await self._reserve(options.http.address, options.http.port, options.http.reuse_port)
        if options.grpc.enabled:
            grpc = await self._reserve(options.grpc.address, options.grpc.port, options.grpc.reuse_port)
        if options.metrics.enabled:
            metrics = await self._reserve(options.metrics_address, options.metrics.port, is_shared=False)
        return replace(
            options,
            http=replace(options.http, port=http),
            grpc=replace(options.grpc, port=grpc),
            metrics=replace(options.metrics, port=metrics, reuse_port=True),
        )

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
