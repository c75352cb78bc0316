"""For tests of the client: a fake engine behind real ports, a server of one function, and a receiver of answers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tests.support.fake_engine import FakeEngine, identity_config

from charonia.core.dtypes import DataType
from charonia.core.request import InferRequest
from charonia.core.tensor import Tensor
from charonia.server.grpc.frontend import GrpcFrontend, GrpcLimits
from charonia.server.http.frontend import HttpFrontend, HttpLimits
from charonia.wire.answer import Answer
from charonia.wire.transport import RequestForm, Transport

LOOPBACK = "127.0.0.1"

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
"""What a server does with a connection."""


@dataclass
class Served:
    """A fake engine behind real ports.

    Attributes:
        engine: The engine, with the models "identity" (FP32 [-1, 16]) and "text" (BYTES [-1, -1]).
        urls: URL by protocol, "http" and "grpc".
    """

    engine: FakeEngine
    urls: dict[str, str] = field(default_factory=dict)


@asynccontextmanager
async def served(grpc_limits: GrpcLimits | None = None) -> AsyncIterator[Served]:
    """Serve a fake engine over HTTP and gRPC."""
    engine = FakeEngine(models={"identity": identity_config(), "text": identity_config("text", DataType.BYTES, (-1,))})
    http, grpc = HttpFrontend(engine, HttpLimits()), GrpcFrontend(engine, grpc_limits)
    await http.start(LOOPBACK, 0)
    await grpc.start(LOOPBACK, 0)
    try:
        yield Served(engine, {"http": f"http://{LOOPBACK}:{http.port}", "grpc": f"grpc://{LOOPBACK}:{grpc.port}"})
    finally:
        await http.close()
        await grpc.close()


@asynccontextmanager
async def scripted(talk: Talk, scheme: str = "http") -> AsyncIterator[str]:
    """Serve each connection with a function; yield the URL. A connection is closed when the function returns."""
    tasks: set[asyncio.Task[None]] = set()
    transports: list[asyncio.WriteTransport] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await talk(reader, writer)
        finally:
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        transports.append(writer.transport)
        task = asyncio.get_running_loop().create_task(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, LOOPBACK, 0)
    try:
        yield f"{scheme}://{LOOPBACK}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        rest = tuple(tasks)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        for transport in transports:  # closing waits for clients to read what is written
            transport.abort()
        await server.wait_closed()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    lengths = [int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    return head + await reader.readexactly(sum(lengths))


def identity_request(rows: int = 1, **fields: Any) -> InferRequest:
    """Return a request to the model "identity" with the numbers from 0 up; `fields` are those of `InferRequest`."""
    array = np.arange(16 * rows, dtype=np.float32).reshape(rows, 16)
    return InferRequest("identity", {"INPUT0": Tensor("INPUT0", DataType.FP32, array)}, **fields)


class Answers:
    """Collects answers."""

    def __init__(self) -> None:
        self.all: list[Answer] = []
        self._final = asyncio.Event()

    def take(self, answer: Answer) -> None:
        self.all.append(answer)
        if answer.final:
            self._final.set()

    async def final(self) -> Answer:
        await self._final.wait()
        self._final.clear()
        return self.all[-1]


async def ask(
    transport: Transport, request: InferRequest | None = None, form: RequestForm | None = None, timeout_s: float = 0.0
) -> Answer:
    """Send a request, by default `identity_request()`, and return its final answer, with its body."""
    answers = Answers()
    transport.send(
        transport.prepare(request or identity_request(), form or RequestForm()), answers.take, timeout_s, keep_body=True
    )
    return await answers.final()
