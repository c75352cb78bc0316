"""What a test that is a coroutine has opened is closed at its end, also when it fails."""

from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from contextvars import ContextVar
from typing import Any

_stack: ContextVar[AsyncExitStack | None] = ContextVar("stack", default=None)


class InLoop:
    """A fixture's value that is made in the event loop of the test; if it is a context manager, the test is within."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


async def closed_after(test: Callable[..., Coroutine[object, object, None]], arguments: dict[str, object]) -> None:
    """Run a test, and then what `close_later` was called with, the last first."""
    async with AsyncExitStack() as stack:
        _stack.set(stack)
        for name, value in arguments.items():
            if isinstance(value, InLoop):
                made = value.make()
                is_context = isinstance(made, AbstractAsyncContextManager)
                arguments[name] = await stack.enter_async_context(made) if is_context else made
        await test(**arguments)


def close_later(close: Callable[[], Awaitable[None]]) -> None:
    """Call this at the end of the test, unless the test runs an event loop of its own."""
    stack = _stack.get()
    if stack is not None:
        stack.push_async_callback(close)
