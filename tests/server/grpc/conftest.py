import asyncio
from collections.abc import Callable, Coroutine
from io import StringIO
from typing import Any

import pytest
from tests.support.fake_engine import FakeEngine
from tests.support.grpc_memory import MemoryClient
from tests.support.idle_time import IdleTimeLoop

from charonia.server.access_log import AccessLog
from charonia.server.grpc.frontend import GrpcFrontend, GrpcLimits

TEST_TIMEOUT_S = 20.0


class Bench:
    """A front end on a fake engine, and clients to it in memory."""

    def __init__(self, limits: GrpcLimits | None, log: StringIO | None) -> None:
        self.engine = FakeEngine()
        self.frontend = GrpcFrontend(self.engine, limits, access_log=AccessLog(log) if log is not None else None)

    def client(self, settings: dict[int, int] | None = None, *, opens_window: bool = True) -> MemoryClient:
        return MemoryClient(self.frontend.connect(), settings, opens_window=opens_window)


Scenario = Callable[[Bench], Coroutine[Any, Any, None]]
Play = Callable[..., None]


@pytest.fixture
def play() -> Play:
    """Run a scenario with a front end on an event loop of its own, where nobody has to wait."""

    def run(scenario: Scenario, limits: GrpcLimits | None = None, log: StringIO | None = None) -> None:
        async def main() -> None:
            bench = Bench(limits, log)
            await asyncio.wait_for(scenario(bench), TEST_TIMEOUT_S)
            await bench.frontend.close()

        with asyncio.Runner(loop_factory=IdleTimeLoop) as runner:
            runner.run(main())

    return run
