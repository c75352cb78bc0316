import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from tests.support.grpc_memory import MemoryClient
from tests.support.idle_time import IdleTimeLoop
from tests.support.linked_engine import ServedFake, linked

from charonia.config.model import ModelConfig
from charonia.server.access_log import AccessLog
from charonia.server.facade import Engine
from charonia.server.grpc.frontend import GrpcFrontend, GrpcLimits

TEST_TIMEOUT_S = 10_000.0

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


Scenario = Callable[[Bench], Coroutine[Any, Any, None]]
Play = Callable[..., None]


@pytest.fixture
def is_linked() -> bool:
    """Whether the front end reaches the engine as from another process; see `BOTH_SHAPES`."""
    return False


@pytest.fixture
def play(is_linked: bool, tmp_path: Path) -> Play:
    """Run a scenario with a front end on an event loop of its own."""

    def run(scenario: Scenario, limits: GrpcLimits | None = None, log: StringIO | None = None) -> None:
        async def main() -> None:
            engine = ServedFake()
            async with AsyncExitStack() as stack:
                seen = await stack.enter_async_context(linked(engine, tmp_path)) if is_linked else engine
                bench = Bench(seen, engine, limits, log)
                await asyncio.wait_for(scenario(bench), TEST_TIMEOUT_S)
                await bench.frontend.close()

        with asyncio.Runner(loop_factory=IdleTimeLoop) as runner:
            runner.run(main())

    return run
