import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from tests.support.closing import InLoop
from tests.support.grpc_memory import MemoryClient
from tests.support.linked_engine import ServedFake, linked

from charonia.config.model import ModelConfig
from charonia.server.access_log import AccessLog
from charonia.server.facade import Engine
from charonia.server.grpc.frontend import GrpcFrontend, GrpcLimits

LINK_ROUNDS = 24
"""Rounds of the event loop in which a request goes over a link and its answer comes back, and some more."""


class Bench:
    """A front end on a fake engine, and clients to it in memory."""

    def __init__(self, seen: Engine, engine: ServedFake, limits: GrpcLimits | None, log: StringIO | None) -> None:
        self.engine = engine
        self.frontend = GrpcFrontend(seen, limits, access_log=AccessLog(log) if log is not None else None)
        self._rounds: dict[str, Any] = {"rounds": LINK_ROUNDS} if seen is not engine else {}

    def client(
        self, settings: dict[int, int] | None = None, *, opens_window: bool = True, **options: Any
    ) -> MemoryClient:
        return MemoryClient(self.frontend.connect(), settings, opens_window=opens_window, **self._rounds, **options)

    async def add_model(self, config: ModelConfig) -> None:
        """Let the engine have another model, and the front end know of it."""
        self.engine.models[config.name] = config
        self.engine.changed()
        for _ in range(LINK_ROUNDS):
            await asyncio.sleep(0)


Play = Callable[..., AbstractAsyncContextManager[Bench]]


@pytest.fixture
def is_linked() -> bool:
    """Whether the front end reaches the engine as from another process; see `BOTH_SHAPES`."""
    return False


@pytest.fixture
def play(is_linked: bool, tmp_path: Path) -> Play:
    """Return what makes a front end with these limits and this access log, as an asynchronous context manager."""

    @asynccontextmanager
    async def playing(limits: GrpcLimits | None = None, log: StringIO | None = None) -> AsyncIterator[Bench]:
        engine = ServedFake()
        async with AsyncExitStack() as stack:
            seen = await stack.enter_async_context(linked(engine, tmp_path)) if is_linked else engine
            bench = Bench(seen, engine, limits, log)
            yield bench
            await bench.frontend.close()

    return playing


@pytest.fixture
def bench(play: Play) -> InLoop:
    return InLoop(play)
