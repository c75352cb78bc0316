"""Calls of other models: how a thread or a task waits for their outcomes."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from ....channel.datatypes import TritonModelException
from .errors import TritonError
from .responses import InferenceResponse, response_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable
    from typing import Any

    from .host import Host, Inbox, ModelCall


class ResponseIterator:
    """The responses of a decoupled model to one request, in the order in which they were sent.

    The news that nothing more follows, where it comes without a response, is a last, empty one.
    """

    __slots__ = ("__weakref__", "_call", "_host", "_is_over", "_was_cancelled")

    def __init__(self, host: Host, call: ModelCall) -> None:
        self._host = host
        self._call = call
        self._is_over = False
        self._was_cancelled = False

    def __iter__(self) -> ResponseIterator:
        return self

    def __next__(self) -> InferenceResponse:
        response = None if self._is_over else self._take_cancelled() or self._take()
        if response is None:
            raise StopIteration
        return response

    def __aiter__(self) -> ResponseIterator:
        return self

    async def __anext__(self) -> InferenceResponse:
        if not (self._is_over or self._was_cancelled):
            await arrival(self._host, self._call.inbox)
        response = None if self._is_over else self._take_cancelled() or self._take()
        if response is None:
            raise StopAsyncIteration
        return response

    def cancel(self) -> None:
        """Cancel the request. Unless all responses have arrived, the next one is an error of code CANCELLED."""
        if not (self._is_over or self._was_cancelled):
            self._was_cancelled = True
            self._host.end(self._call)

    def _take_cancelled(self) -> InferenceResponse | None:
        if not self._was_cancelled:
            return None
        self._is_over = True
        return InferenceResponse(error=TritonError("the request was cancelled by the model", TritonError.CANCELLED))

    def _take(self) -> InferenceResponse:
        items = self._call.inbox.items
        if not items:
            self._host.wait(self._call.inbox)
        result, self._is_over = items.popleft()
        return InferenceResponse() if result is None else response_of(result)

    def __del__(self) -> None:
        if not (self._is_over or self._was_cancelled):
            self._host.later(partial(self._host.end, self._call))


def first_of(host: Host, call: ModelCall) -> InferenceResponse:
    """Wait for the one response to a call that has begun."""
    try:
        if not call.inbox.items:
            host.wait(call.inbox)
    except BaseException:
        host.end(call)
        raise
    return _first(call)


def first_of_async(host: Host, call: ModelCall) -> Awaitable[InferenceResponse | ResponseIterator]:
    """Begin a call; return its only response, or for a decoupled call an iterator when the first response arrives."""
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise TritonModelException(
            "async_exec needs a running event loop: call it within 'async def execute', or use exec"
        ) from None
    host.begin(call)
    task = asyncio.ensure_future(_answer(host, call))
    task.add_done_callback(partial(_given_up, host, call))
    return task


async def _answer(host: Host, call: ModelCall) -> InferenceResponse | ResponseIterator:
    await arrival(host, call.inbox)
    if call.decoupled:
        return ResponseIterator(host, call)
    return _first(call)


def _given_up(host: Host, call: ModelCall, task: asyncio.Future[InferenceResponse | ResponseIterator]) -> None:
    if task.cancelled():
        host.end(call)


async def arrival(host: Host, inbox: Inbox[Any]) -> None:
    """Return when the inbox holds something."""
    import asyncio

    while not inbox.items:
        loop = asyncio.get_running_loop()
        arrived = loop.create_future()
        inbox.listen(partial(_wake, loop, arrived))
        host.attach(loop)
        if not inbox.items:
            await arrived


def _wake(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed; the thread that reads must not fail for that
        loop.call_soon_threadsafe(_set, future)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _first(call: ModelCall) -> InferenceResponse:
    result, _ = call.inbox.items.popleft()
    if result is not None:
        return response_of(result)
    return InferenceResponse(error=TritonError(f"model '{call.model_name}' sent no response", TritonError.INTERNAL))
