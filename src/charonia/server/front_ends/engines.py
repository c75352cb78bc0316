"""The engine of a front end, which another one may replace while requests go on.

`meet` connects the next engine, `move` sends it everything new. What the engine before has begun stays there: its
requests in flight, its streams, and all requests of its open sequences, until it leaves.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, TypeVar

from charonia.config.model import ModelConfig
from charonia.core.calls import Reply, Ticket
from charonia.core.errors import ServingError, unavailable
from charonia.core.metadata import ModelIndexEntry, ModelMetadata, ServerMetadata
from charonia.core.request import InferRequest
from charonia.core.statistics import ModelStatistics
from charonia.server.front_ends.messages import MOVED
from charonia.server.front_ends.reconnect import Sequence
from charonia.server.front_ends.remote_engine import RemoteEngine
from charonia.server.front_ends.state import EngineState
from charonia.wire.orca import Load

_log = logging.getLogger(__name__)

T = TypeVar("T")


class CurrentEngine:
    """What is asked of an engine that may be replaced, beside requests.

    Attributes:
        current: The engine that gets what is new.
    """

    current: RemoteEngine

    @property
    def state(self) -> EngineState:
        return self.current.state

    @property
    def load(self) -> Load:
        return self.current.load

    def want_load(self) -> None:
        self.current.want_load()

    def is_live(self) -> bool:
        return self.current.is_live()

    def is_ready(self) -> bool:
        return self.current.is_ready()

    def is_exiting(self) -> bool:
        return self.current.is_exiting()

    def server_metadata(self) -> ServerMetadata:
        return self.current.server_metadata()

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        return self.current.model_config(name, version)

    def model_metadata(self, name: str, version: str = "") -> ModelMetadata:
        return self.current.model_metadata(name, version)

    def lend(self, size: int) -> memoryview | None:
        return self.current.lend(size)

    async def ask(self, question: str, *arguments: object) -> Any:
        return await self._asked(lambda engine: engine.ask(question, *arguments))

    async def model_ready(self, name: str, version: str = "") -> bool:
        return await self._asked(lambda engine: engine.model_ready(name, version))

    async def model_statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        return await self._asked(lambda engine: engine.model_statistics(name, version))

    async def repository_index(self, ready_only: bool = False) -> list[ModelIndexEntry]:
        return await self._asked(lambda engine: engine.repository_index(ready_only))

    async def load_model(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        await self._asked(lambda engine: engine.load_model(name, config, files))

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        await self._asked(lambda engine: engine.unload_model(name, unload_dependents))

    async def _asked(self, ask: Callable[[RemoteEngine], Awaitable[T]]) -> T:
        """Ask the engine; one that has been replaced before it began with the answer refers to the next one."""
        while True:
            engine = self.current
            try:
                return await ask(engine)
            except ServingError as error:
                if error.message != MOVED or engine is self.current:
                    raise


class Engines(CurrentEngine):
    """An `Engine` that may be replaced.

    Args:
        make: Makes an engine that is not connected yet; it is given what to call with the reason when that has gone.
        ended: Called with the reason when the present engine has gone; `connect` meets the one that follows.
    """

    def __init__(self, make: Callable[[Callable[[str], None]], RemoteEngine], ended: Callable[[str], None]) -> None:
        self._make = make
        self._ended = ended
        self._next: RemoteEngine | None = None
        self._former: RemoteEngine | None = None
        self._staying: set[int | str] = set()  # ids of sequences of the engine before
        self.current = self._new()

    async def connect(self, sock: socket.socket) -> frozenset[str]:
        """Meet the engine. See `RemoteEngine.connect`."""
        return await self.current.connect(sock)

    async def meet(self, sock: socket.socket) -> None:
        """Meet the engine that comes next. Raises as `connect`."""
        self._next = self._new()
        await self._next.connect(sock)

    def move(self, staying: Collection[int | str]) -> None:
        """Send what is new to the next engine.

        Args:
            staying: The ids of sequences whose requests go to the present one.

        Raises:
            ServingError: UNAVAILABLE when the next engine has gone.
        """
        if self._next is None:
            raise unavailable("the next engine has gone")
        self._former, self.current, self._next = self.current, self._next, None
        self._staying = set(staying)

    def pause(self) -> None:
        """Hold what is new until `connect`; what is in flight goes on. Open sequences are lost."""
        self.current.held.engine_lost()
        self.current.sequences.engine_ended()

    def sequence(self, id: int | str, is_there: bool) -> None:
        if is_there:
            self._staying.add(id)
        else:
            self._staying.discard(id)

    def part(self, lost: Collection[Sequence]) -> None:
        """Send nothing more to the engine before.

        Args:
            lost: Its sequences that have not ended.
        """
        self._staying = set()
        self.current.sequences.lose(lost)

    def close(self) -> None:
        """Leave all engines: they cancel what is in flight."""
        for engine in self._all():
            engine.close()

    def infer(self, request: InferRequest, reply: Reply) -> Ticket:
        if self._staying and self._former is not None and request.correlation_id in self._staying:
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
            self._former, self._staying = None, set()
        else:
            self._ended(reason)
