"""Requests of Ray's proxies, answered by the server's front ends in the same process, and their gRPC services.

Bytes pass through unchanged: the front ends decode and encode them, as on connections of clients. All of it runs on the
event loop on which Ray runs the deployment's code, where the server runs, too.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Mapping
from typing import Any

import grpc

from charonia.server.grpc.detached import DetachedCall
from charonia.server.grpc.frontend import GrpcFrontend
from charonia.server.grpc.methods import Method, method_table
from charonia.server.http.asgi import Message, begin
from charonia.server.http.frontend import HttpFrontend
from charonia.wire.grpc_framing import PREFIX_BYTES
from charonia.wire.grpc_headers import Header
from charonia.wire.grpc_status import RpcError

METHODS: dict[str, Method] = {method.name: method for method in method_table().values()}
"""All methods by name. Ray's proxy calls the replica's method of that name."""

UNTAKEN_BYTES_MAX = 1024 * 1024
"""Bytes of a streaming call's messages that may wait in the server before no more are read from its caller."""

ANSWER_TURNS = 0 if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1" else 64
"""Turns of the event loop that an answer waits for others, so that Ray sends more of them to its proxy together:
most of the cost of a request is what proxy and replica do for each message. If the loop has nothing else to do, all
turns take 0.1 ms. Where HAProxy takes the place of that proxy, answers go straight to their connections."""


def add_grpc_services(servicer: object, server: Any) -> None:
    """Add the inference, health and reflection services to Ray's gRPC proxy (`grpc_servicer_functions`).

    Messages have no deserializer: the proxy passes them on as bytes.
    """
    by_service: dict[str, dict[str, Any]] = {}
    for path, method in method_table().items():
        _, service, name = path.decode().split("/")
        handler = grpc.unary_unary_rpc_method_handler if method.run else grpc.stream_stream_rpc_method_handler
        # Ray's proxy replaces this function by its own.
        by_service.setdefault(service, {})[name] = handler(servicer)
    for service, handlers in by_service.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


class _Last:
    """The end of a gRPC call."""

    def __init__(self, error: RpcError | None) -> None:
        self.error = error


async def answer_http(
    http: HttpFrontend, scope: Mapping[str, Any], body: bytes, send: Callable[[Message], Awaitable[None]]
) -> None:
    """Answer an HTTP request with ASGI messages; to be cancelled if the client leaves."""
    messages: list[Message] = []
    arrived = asyncio.Event()

    def take(more: list[Message]) -> None:
        messages.extend(more)
        arrived.set()

    exchange = begin(http, scope, body, take)
    is_open = True
    try:
        while is_open:
            await arrived.wait()
            arrived.clear()
            for _ in range(ANSWER_TURNS):
                await asyncio.sleep(0)
            sending, messages[:] = messages[:], ()
            for message in sending:
                await send(message)
            is_open = sending[-1].get("more_body", True)
    finally:
        if is_open:
            exchange.abandon()


async def answer_unary(service: GrpcFrontend, method: Method, metadata: Iterable[Header], message: bytes) -> bytes:
    """Return the response to a unary gRPC call.

    Raises:
        RpcError: The call failed.
    """
    responses: list[bytes] = []
    ended: asyncio.Future[RpcError | None] = asyncio.get_running_loop().create_future()

    def end(error: RpcError | None) -> None:
        if not ended.done():
            ended.set_result(error)

    call = DetachedCall(service, method, metadata, send=responses.append, end=end)
    try:
        call.receive(message)
        error = await ended
    finally:
        call.abandon()  # nothing, once it is over
    if error is not None:
        raise error
    return responses[0]


async def answer_stream(
    service: GrpcFrontend, method: Method, metadata: Iterable[Header], messages: AsyncIterable[bytes]
) -> AsyncGenerator[bytes, None]:
    """Yield the responses of a streaming gRPC call; to be closed if the caller leaves. Raises as `answer_unary`."""
    arrived: asyncio.Queue[bytes | _Last] = asyncio.Queue()
    untaken_bytes = 0
    has_room = asyncio.Event()

    def consumed(size: int) -> None:
        nonlocal untaken_bytes
        untaken_bytes -= size
        has_room.set()

    def end(error: RpcError | None) -> None:
        arrived.put_nowait(_Last(error))

    async def feed() -> None:
        nonlocal untaken_bytes
        try:
            async for message in messages:
                untaken_bytes += PREFIX_BYTES + len(message)
                call.receive(message, end=False)
                while untaken_bytes > UNTAKEN_BYTES_MAX:
                    has_room.clear()
                    await has_room.wait()
        finally:
            call.end()

    call = DetachedCall(service, method, metadata, send=arrived.put_nowait, end=end, consumed=consumed)
    feeding = asyncio.create_task(feed())
    try:
        while not isinstance(item := await arrived.get(), _Last):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        feeding.cancel()
        call.abandon()
