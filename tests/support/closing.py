"""What a test that is a coroutine has opened is closed at its end, also when it fails."""

from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from contextvars import ContextVar

_stack: ContextVar[AsyncExitStack | None] = ContextVar("stack", default=None)


async def closed_after(test: Coroutine[object, object, None]) -> None:
    """Run a test, and then what `close_later` was called with, the last first."""
    async with AsyncExitStack() as stack:
        _stack.set(stack)
        await test


def close_later(close: Callable[[], Awaitable[None]]) -> None:
    """Call this at the end of the test, unless the test runs an event loop of its own."""
    stack = _stack.get()
    if stack is not None:
        stack.push_async_callback(close)
