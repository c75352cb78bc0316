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
from typing import Any, NamedTuple

from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError, internal, invalid, unavailable
from charonia.core.metadata import ModelIndexEntry
from charonia.server.front_ends.children import (
    ENGINE,
    ProcessReport,
    Sockets,
    error_of,
    process_specs,
    read_report,
    write_options,
)
from charonia.server.front_ends.upgrades import Upgrades
from charonia.server.guard.control import offer_sockets, serve_control, sockets_beside
from charonia.server.guard.notify import Notifier
from charonia.server.guard.supervisor import ProcessSpec, Supervisor
from charonia.server.lifecycle.foreseen import largest_bytes, reason_to_stay
from charonia.server.listening import cannot_listen, check_address, every
from charonia.server.machine.cores import cores_beside, usable_cores
from charonia.server.machine.gpus import visible_gpus
from charonia.server.machine.private_folder import PrivateFolder
from charonia.server.options import FRONT_ENDS_AUTO, FRONT_ENDS_MAX, REPLICA_HOST, ServerOptions

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
    can_share = hasattr(socket, "SO_REUSEPORT")
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
            if not can_share:
                first.close()
            bound = [
                tuple(stack.enter_context(_bound(address, number)) for address in addresses)
                for _ in range(count if can_share else 1)
            ]
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    return bound if can_share else bound * count


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
        if hasattr(socket, "SO_REUSEPORT"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port, *more))
    except OSError:
        sock.close()
        raise
    return sock


class Chosen(NamedTuple):
    """A number of front ends, 0 for one process, and why it was chosen."""

    number: int
    reason: str


def how_many(cores: int, stays: str, largest_bytes: int = 0) -> Chosen:
    """Return the number of front ends for a machine and its models."""
    have = f"{cores} core{'s' if cores > 1 else ''}"
    if cores == 1:
        return Chosen(0, have)
    if not stays:
        return Chosen(min(cores, FRONT_ENDS_MAX), f"{have}, and every model may run in front ends")
    if cores <= FEW_CORES:
        return Chosen(0, f"{have}, and {stays}")
    if largest_bytes >= LARGE_BYTES:
        number, stays = cores // CORES_BESIDE_LARGE, f"{stays}, and one of {largest_bytes >> 20} MiB needs the cores"
    else:
        number = cores.bit_length()
    return Chosen(min(number, FED_BY_ENGINE), f"{have}; {stays}")


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
        chosen = how_many(usable_cores(options.cpu_cores), stays, 0 if gpus else largest_bytes(models.repositories))
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
        options = replace(options, cpu_cores=options.cpu_cores or cores_beside(usable_cores(), options.front_ends))
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
        found = sockets_beside(options.beside)
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
