"""Requests from Ray's event loop to the server, which has an event loop and a thread of its own, and their answers.

Bytes go through as they are: the server's own front ends decode and encode them.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from charonia.core.errors import ServingError
from charonia.server.app import InferenceServer
from charonia.server.embedding import Server
from charonia.server.grpc.detached import DetachedCall
from charonia.server.grpc.methods import Method
from charonia.server.http.asgi import Message, begin
from charonia.server.http.exchange import Exchange
from charonia.wire.grpc_framing import PREFIX_BYTES
from charonia.wire.grpc_headers import Header
from charonia.wire.grpc_status import RpcError

UNTAKEN_BYTES_MAX = 1024 * 1024
"""Bytes of a streaming call's messages that may wait in the server before no more are read from its caller."""

_Item = TypeVar("_Item")
_Begun = TypeVar("_Begun")


class _Last:
    """The end of a gRPC call."""

    def __init__(self, error: RpcError | None) -> None:
        self.error = error


async def answer_http(server: Server, scope: Mapping[str, Any], body: bytes) -> AsyncGenerator[list[Message], None]:
    """Yield the messages of the response to an HTTP request, as ASGI has them.

    Raises:
        ServingError: The server has stopped.
    """

    def start(parts: InferenceServer, send: Callable[[list[Message]], None]) -> Exchange:
        assert parts.http is not None
        return begin(parts.http, scope, body, send)

    def is_last(messages: list[Message]) -> bool:
        return not messages[-1].get("more_body", True)

    async for messages in _answers(server, start, Exchange.abandon, is_last):
        yield messages


async def answer_unary(server: Server, method: Method, metadata: Iterable[Header], message: bytes) -> bytes:
    """Return the response to a unary gRPC call.

    Raises:
        RpcError: The call failed.
        ServingError: The server has stopped.
    """

    def start(parts: InferenceServer, send: Callable[[bytes | _Last], None]) -> DetachedCall:
        assert parts.grpc is not None
        call = DetachedCall(parts.grpc, method, metadata, send=send, end=lambda error: send(_Last(error)))
        call.receive(message)
        return call

    response = b""
    async for item in _answers(server, start, DetachedCall.abandon, _is_last):
        if not isinstance(item, _Last):
            response = item
        elif item.error is not None:
            raise item.error
    return response


async def answer_stream(
    server: Server, method: Method, metadata: Iterable[Header], messages: AsyncIterable[bytes]
) -> AsyncGenerator[bytes, None]:
    """Yield the responses of a streaming gRPC call. Raises as `answer_unary`."""
    loop = asyncio.get_running_loop()
    call: list[DetachedCall] = []
    feeding: list[Future[None]] = []
    untaken_bytes = 0
    has_room = asyncio.Event()

    def taken(size: int) -> None:
        nonlocal untaken_bytes
        untaken_bytes -= size
        has_room.set()

    def consumed(size: int) -> None:
        loop.call_soon_threadsafe(taken, size)

    async def feed() -> None:
        nonlocal untaken_bytes
        try:
            async for message in messages:
                untaken_bytes += PREFIX_BYTES + len(message)
                server.call_soon(partial(_receive, call[0], message))
                while untaken_bytes > UNTAKEN_BYTES_MAX:
                    has_room.clear()
                    await has_room.wait()
        finally:
            server.call_soon(lambda _: call[0].end())

    def start(parts: InferenceServer, send: Callable[[bytes | _Last], None]) -> DetachedCall:
        assert parts.grpc is not None
        begun = DetachedCall(
            parts.grpc,
            method,
            metadata,
            send=send,
            end=lambda error: send(_Last(error)),
            consumed=consumed,
        )
        call.append(begun)
        feeding.append(asyncio.run_coroutine_threadsafe(feed(), loop))
        return begun

    try:
        async for item in _answers(server, start, DetachedCall.abandon, _is_last):
            if not isinstance(item, _Last):
                yield item
            elif item.error is not None:
                raise item.error
    finally:
        for task in feeding:
            task.cancel()


def _receive(call: DetachedCall, message: bytes, parts: InferenceServer) -> None:
    call.receive(message, end=False)


def _is_last(item: bytes | _Last) -> bool:
    return isinstance(item, _Last)


async def _answers(
    server: Server,
    start: Callable[[InferenceServer, Callable[[_Item], None]], _Begun],
    abandon: Callable[[_Begun], None],
    is_last: Callable[[_Item], bool],
) -> AsyncGenerator[_Item, None]:
    """Start something on the server's loop, and yield what it sends until the last item; abandon it if left before."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[_Item | Exception] = asyncio.Queue()
    begun: list[_Begun] = []

    def send(item: _Item | Exception) -> None:
        loop.call_soon_threadsafe(arrived.put_nowait, item)

    def run(parts: InferenceServer) -> None:
        try:
            begun.append(start(parts, send))
        except Exception as error:  # a bug: the caller would wait forever
            send(error)

    def leave(parts: InferenceServer) -> None:
        for each in begun:
            abandon(each)

    is_over = False
    try:
        server.call_soon(run)
        while not is_over:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            is_over = is_last(item)
            yield item
    finally:
        if not is_over:
            with suppress(ServingError):
                server.call_soon(leave)
