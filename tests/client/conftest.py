import asyncio
import gc
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

TEST_TIMEOUT_S = 120.0

Play = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def play(request: pytest.FixtureRequest) -> Play:
    """Run a scenario on an event loop of its own; a socket that is left open fails the test."""

    def run(scenario: Coroutine[Any, Any, None]) -> None:
        factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

        async def main() -> None:
            await asyncio.wait_for(scenario, TEST_TIMEOUT_S)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ResourceWarning)
            with asyncio.Runner(loop_factory=factory) as runner:
                runner.run(main())
            gc.collect()
        assert [str(warning.message) for warning in caught if issubclass(warning.category, ResourceWarning)] == []

    return run
