"""A process with the endpoints of a server whose engine is in another process.

The engine of a front end can be replaced while requests continue.

`connect_next` connects the next engine, `move` sends it everything new. The previous engine keeps its requests in
flight, its streams, and all requests of its open sequences, until it leaves.
"""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from charonia.busy_poll import SiblingProcesses, make_busy_poll
from charonia.core.errors import ServingError, unavailable
from charonia.core.metadata import ServerMetadata
from charonia.core.request import InferRequest
from charonia.core.response import Reply, Ticket
from charonia.server.app import SWITCH_INTERVAL_S
from charonia.server.backends.registry import installed_backends
from charonia.server.endpoints import Endpoints
from charonia.server.facade import LogControl
from charonia.server.front_ends.calls import CALLS
from charonia.server.front_ends.children import front_end_name, number_of
from charonia.server.front_ends.hand_over import SOCKET_NAME
from charonia.server.front_ends.link import Blobs
from charonia.server.front_ends.local_models import LocalModels, software_of
from charonia.server.front_ends.messages import MOVED, EngineState, plain
from charonia.server.front_ends.reconnect import Sequence
from charonia.server.front_ends.remote_engine import RemoteCalls, RemoteEngine, SharedLog, SharedRegions, services_of
from charonia.server.guard.notify import read_finish
from charonia.server.guard.restarts import FINISH_NS
from charonia.server.lifecycle.backends import Backends
from charonia.server.listening import GRACE_S
from charonia.server.machine.cores import usable_cores
from charonia.server.machine.memory import collect_less_often, trim_idle_memory
from charonia.server.options import ServerOptions
from charonia.wire.orca import Load

T = TypeVar("T")


class Engines(RemoteCalls):
    """An `Engine` that may be replaced.

    Args:
        make: Makes an engine that is not connected yet; its argument is called with the reason when the engine is gone.
        ended: Called with the reason when the present engine has gone; `connect` connects the next one.

    Attributes:
        current: The engine that gets new requests.
    """

    def __init__(self, make: Callable[[Callable[[str], None]], RemoteEngine], ended: Callable[[str], None]) -> None:
        self._make = make
        self._ended = ended
        self._next: RemoteEngine | None = None
        self._former: RemoteEngine | None = None
        self._draining: set[int | str] = set()  # ids of sequences of the previous engine
        self.current = self._new()

    @property
    def state(self) -> EngineState:  # type: ignore[override] # read only
        return self.current.state

    @property
    def load(self) -> Load:  # type: ignore[override] # read only
        return self.current.load

    def want_load(self) -> None:
        self.current.want_load()

    def lend(self, size: int) -> memoryview | None:
        return self.current.lend(size)

    def is_ready(self) -> bool:
        return self.current.is_ready()

    def is_exiting(self) -> bool:
        return self.current.is_exiting()

    def server_metadata(self) -> ServerMetadata:
        return self.current.server_metadata()

    async def ask(self, question: str, *arguments: object, blobs: Blobs = ()) -> Any:
        """Ask the engine; one that has been replaced before it began with the answer refers to the next one."""
        while True:
            engine = self.current
            try:
                return await engine.ask(question, *arguments, blobs=blobs)
            except ServingError as error:
                if error.message != MOVED or engine is self.current:
                    raise

    async def connect(self, sock: socket.socket) -> frozenset[str]:
        """Meet the engine. See `RemoteEngine.connect`."""
        return await self.current.connect(sock)

    async def connect_next(self, sock: socket.socket) -> None:
        """Meet the engine that comes next. Raises as `connect`."""
        engine = self._next = self._new()
        try:
            await engine.connect(sock)
        except BaseException:
            self._next = None
            raise

    def move(self, draining: Collection[int | str]) -> None:
        """Send new requests to the next engine.

        Args:
            draining: The ids of sequences whose requests stay with the present one.

        Raises:
            ServingError: UNAVAILABLE when the next engine has gone.
        """
        if self._next is None:
            raise unavailable("the next engine has gone")
        self._former, self.current, self._next = self.current, self._next, None
        self._draining = set(draining)

    def pause(self) -> None:
        """Hold new requests until `connect`; requests in flight continue. Open sequences are lost."""
        self.current.held.engine_lost()
        self.current.sequences.engine_ended()

    def sequence(self, id: int | str, is_there: bool) -> None:
        if is_there:
            self._draining.add(id)
        else:
            self._draining.discard(id)

    def part(self, lost: Collection[Sequence]) -> None:
        """Send no more requests to the previous engine."""
        self._draining = set()
        self.current.sequences.mark_lost(lost)

    def close(self) -> None:
        """Leave all engines: they cancel the requests in flight."""
        for engine in self._all():
            engine.close()

    def infer(self, request: InferRequest, reply: Reply) -> Ticket:
        if self._draining and self._former is not None and request.correlation_id in self._draining:
            return self._former.infer(request, reply)
        return self.current.infer(request, reply)

    def begin_exit(self, *, refuses: bool = True) -> None:
        for engine in self._all():
            engine.begin_exit(refuses=refuses)

    async def drained(self, timeout_s: float) -> bool:
        """Wait until every request is answered, up to a limit; return whether that was in time."""
        return all(await asyncio.gather(*(engine.drained(timeout_s) for engine in self._all())))

    def _all(self) -> list[RemoteEngine]:
        return [engine for engine in (self.current, self._former, self._next) if engine is not None]

    def _new(self) -> RemoteEngine:
        engine: RemoteEngine
        engine = self._make(lambda reason: self._gone(engine, reason))
        return engine

    def _gone(self, engine: RemoteEngine, reason: str) -> None:
        if engine is self._next:
            self._next = None
        elif engine is self._former:
            self._former, self._draining = None, set()
        else:
            self._ended(reason)


_log = logging.getLogger(__name__)

RECONNECT_S = 0.1
"""Pause between two attempts to connect to the engine. The guard starts it again."""


class FrontEnd:
    """The endpoints of this process, and their engine in another one. To be made on the event loop.

    Args:
        options: The server's options.
        log: The log of this process.
        folder: Folder of the engine's socket.
        number: Number of this process, from 1 on; the engine is process 0.
        leaving: Called when this process has left its listening sockets.

    Attributes:
        ended: Done when the engine has left, or the front end has; whether it ended well.
    """

    def __init__(
        self,
        options: ServerOptions,
        log: LogControl | None,
        folder: Path,
        number: int = 1,
        leaving: Callable[[], None] = lambda: None,
    ) -> None:
        self.endpoints = Endpoints(options)
        self.ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._options = options
        self._log = log
        self._folder = folder
        self._number = number
        self._tell_leaving = leaving
        self._local: LocalModels | None = None
        self._software = software_of(options)
        self._engine: Engines | None = None
        self._regions: SharedRegions | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._reconnecting: asyncio.Task[None] | None = None
        self._is_taken = True

    async def start(self) -> None:
        """Meet the engine, as soon as it listens, and listen.

        Raises:
            ServingError: The engine is gone, or an endpoint cannot be opened.
        """
        sock = await engine_socket(self._folder)
        self._neighbours = SiblingProcesses(self._folder, self._number, self._options.front_ends + 1, usable_cores())
        engine = self._engine = Engines(self._make_engine, self._engine_gone)
        self._local = self._local_models(engine)
        if self._options.client_shm:
            self._regions = SharedRegions(self._options.client_shm_bytes_max, engine)
        offers = await engine.connect(sock)
        self._run_models_of(engine.current)
        log = SharedLog(self._log, engine) if self._log is not None else None
        await self.endpoints.start(engine, services_of(engine, offers, self._regions, log))

    def leave(self, finish_s: float = 0.0) -> None:
        """Accept no more requests, finish the requests in flight, and exit.

        Args:
            finish_s: Time in which connections are served as before, because another process accepts new ones. 0 where
                the server stops.
        """
        if self._leaving is not None and not finish_s:
            self._leaving.cancel()
        if self._engine is not None and (self._leaving is None or not finish_s):
            self._leaving = asyncio.get_running_loop().create_task(self._leave(finish_s))

    async def close(self) -> None:
        if self._reconnecting is not None:
            self._reconnecting.cancel()
        await self.endpoints.close()
        if self._engine is not None:
            self._engine.close()
        if self._local is not None:
            await self._local.aclose()

    def _make_engine(self, ended: Callable[[str], None]) -> RemoteEngine:
        engine = RemoteEngine(take=self._take, ended=ended)
        engine.siblings = self._neighbours
        return engine

    def _run_models_of(self, engine: RemoteEngine) -> None:
        """Run the models that an engine offers, unless it has another release, other packages or other options."""
        local, is_alike = self._local, engine.software == self._software
        if local is None or (is_alike and engine.local is not None):
            return
        local.reset()
        engine.local = local if is_alike else None
        if is_alike:
            local.follow(engine.state.offers, engine.state.directory.configs)

    def _local_models(self, engine: Engines) -> LocalModels:
        """Return what runs the models that this process has itself."""
        options = self._options
        backends = Backends(
            installed_backends(),
            options.backends,
            verbose=options.log.verbose > 0,
            busy_poll=make_busy_poll(options.busy_poll_us, usable_cores(), self._neighbours),
        )
        return LocalModels(backends, engine.infer, summarizes=options.metrics.summary_latencies)

    async def _leave(self, finish_s: float) -> None:
        if finish_s:
            self.endpoints.release_sockets()
            self._tell_leaving()
            await self.endpoints.drain_gradually(finish_s)
        elif self._options.exit_delay_secs and self._engine is not None:
            self._engine.begin_exit(refuses=False)
            await self.endpoints.ask_to_reconnect(self._options.exit_delay_secs)
        self._stop()
        is_taken = await self._drain(self._options.exit_timeout_secs)
        if self._engine is not None:
            with suppress(ServingError):
                await self._engine.ask("collect")
        if not self.ended.done():
            self.ended.set_result(is_taken)

    def _stop(self) -> None:
        if self._engine is not None:
            self._engine.begin_exit()
        self.endpoints.stop_accepting()
        self._tell_leaving()

    async def _drain(self, timeout_s: float) -> bool:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        is_answered = self._engine is None or await self._engine.drained(timeout_s)
        if self._local is not None:
            is_answered &= await self._local.drained(max(end_s - loop.time(), 0))
        # The last answers have to be written, too, even after the exit timeout.
        is_taken = await self.endpoints.drain(max(end_s - loop.time(), GRACE_S))
        self._is_taken = is_answered and is_taken
        return self._is_taken

    async def _take(self, change: str, arguments: list[object]) -> object:
        match change:
            case "stop":
                self._stop()
            case "drain":
                return await self._drain(float(str(arguments[0])))
            case "traffic":
                return plain(await self.endpoints.collect(front_end_name(self._number)))
            case "result":
                http = self.endpoints.http
                return http.results.relayed(*map(str, arguments)) if http is not None else None
            case "meet" | "move" | "pause" | "sequence" | "part":
                await self._upgrade(change, arguments)
            case "LogControl.change" if self._log is not None:
                await self._log.change(*CALLS[change].read(arguments))
            case _ if self._regions is not None:
                await self._regions.take(change, arguments)
        return None

    async def _upgrade(self, change: str, arguments: list[Any]) -> None:
        engine = self._engine
        assert engine is not None
        match change:
            case "meet":
                sock = connected(self._folder / str(arguments[0]))
                if sock is None:
                    raise unavailable("the next engine has gone")
                await engine.connect_next(sock)
            case "move":
                former = engine.current
                engine.move(*arguments)
                former.local = None
                self._run_models_of(engine.current)
            case "pause":
                engine.pause()
                self._start_reconnecting()
            case "sequence":
                engine.sequence(*arguments)
            case _:
                engine.part([(model, key) for model, key in arguments[0]])

    def _engine_gone(self, reason: str) -> None:
        engine = self._engine
        if engine is not None and engine.is_exiting():
            if not self.ended.done():
                self.ended.set_result(self._is_taken)
            return
        _log.error("the engine has gone: %s", reason)
        self._start_reconnecting()

    def _start_reconnecting(self) -> None:
        self._reconnecting = asyncio.get_running_loop().create_task(self._reconnect())

    async def _reconnect(self) -> None:
        while self._engine is not None and self._engine.current.held.is_disconnected:
            sock = await engine_socket(self._folder)
            with suppress(ServingError):  # it has gone again
                await self._engine.connect(sock)
                self._run_models_of(self._engine.current)
        _log.info("the engine is back")


async def engine_socket(folder: Path) -> socket.socket:
    """Return a connection to the engine, as soon as it listens."""
    while (sock := connected(folder / SOCKET_NAME)) is None:
        await asyncio.sleep(RECONNECT_S)
    return sock


def connected(path: Path) -> socket.socket | None:
    """Return a connection to the engine that listens there, None if none does, or no descriptor is left for it."""
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:
        return None
    try:
        sock.connect(str(path))
    except OSError:
        sock.close()
        return None
    return sock


async def serve_front_end(
    options: ServerOptions,
    log: LogControl | None,
    folder: Path,
    name: str,
    ready: Callable[[], None],
    leaving: Callable[[], None],
) -> int:
    """Run the endpoints of a server until the engine ends or a signal arrives; return the exit status.

    Args:
        options: The server's options.
        log: The log of this process.
        folder: Folder of the engine's socket.
        name: Name of this process.
        ready: Called when the endpoints are open.
        leaving: Called when this process accepts no more connections.

    Raises:
        ServingError: The engine cannot be reached, or an endpoint not be opened.
    """
    loop = asyncio.get_running_loop()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    front_end = FrontEnd(options, log, folder, number_of(name), leaving)

    def leave() -> None:
        finish_s = read_finish(folder, name)
        front_end.leave(FINISH_NS / 1e9 if finish_s is None else finish_s)

    try:
        await front_end.start()
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(each, leave)
        collect_less_often()
        giving_back = asyncio.create_task(trim_idle_memory())
        ready()
        status = 0 if await front_end.ended else 1
        giving_back.cancel()
        return status
    finally:
        await front_end.close()
