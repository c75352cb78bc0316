"""Goodput and latency of an overloaded model, and of a light client beside a heavy one, with default settings.

A Python model sleeps 2.5 ms for each request. First its capacity is measured, with clients that wait for each response.
Then requests arrive at random times, at a multiple of the capacity, and each client leaves after its deadline: over
HTTP it closes the connection, over gRPC it sends its deadline. Goodput is the rate of responses in time, of requests
that were sent after the first seconds, in which the server learns how long clients wait.

python -m bench.overload --output bench/results/overload.json
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import uvloop

from bench.fairness import BODY, CALL
from bench.machine import machine
from bench.models import MODEL
from bench.servers import Server
from charonia.client.http2 import ClientConnection, ResponseReceived, TrailersReceived
from charonia.schema.pool import message_class
from charonia.wire.grpc_codec import timeout_header
from charonia.wire.grpc_framing import prefix

DEADLINE_S = 1.0
FACTORS = (1.0, 2.0, 5.0)
LIGHT_PER_S = 20.0
CLIENTS = 8
LEARNING_S = 3.0
HEADER = "x-client"
"""Names the client of a request, for the server's `--fairness-header`."""

GRPC_OK = (b"grpc-status", b"0")

Send = Callable[[str, float | None], Awaitable[bool]]
"""Sends a request of a client with a deadline in seconds; returns whether it was served. Raises TimeoutError."""


class Answer(NamedTuple):
    """What became of a request.

    Attributes:
        sent_s: When it was due.
        took_s: Time until the answer, or until the client left.
        outcome: "served", "refused" or "left".
    """

    sent_s: float
    took_s: float
    outcome: str


class HttpClient:
    """Sends requests on connections that are kept, and closes those on which it waits no longer."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(self, client: str, deadline_s: float | None) -> bool:
        """Send a request. As `Send`."""
        head = f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nHost: a\r\n{HEADER}: {client}\r\nContent-Length: {len(BODY)}"
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(deadline_s):
                reader, writer = (
                    self._idle.pop() if self._idle else await asyncio.open_connection(self._host, self._port)
                )
                writer.write(head.encode() + b"\r\n\r\n" + BODY)
                answer = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        except TimeoutError:
            if writer is not None:
                writer.close()
            raise
        self._idle.append((reader, writer))
        return answer.startswith(b"HTTP/1.1 200")


class GrpcConnection(asyncio.Protocol):
    """One HTTP/2 connection, whose calls cost the machine less than the server's work on them."""

    def __init__(self) -> None:
        self._http2 = ClientConnection()
        self._results: dict[int, asyncio.Future[bool]] = {}

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for event in self._http2.receive(data):
            if isinstance(event, TrailersReceived) or (isinstance(event, ResponseReceived) and event.end_stream):
                result = self._results.pop(event.stream_id, None)
                if result is not None and not result.done():
                    result.set_result(GRPC_OK in event.headers)
        self._transport.write(self._http2.output())

    async def call(self, headers: Sequence[tuple[bytes, bytes]], message: bytes, deadline_s: float | None) -> bool:
        """Call a method and return whether its status is OK. Raises TimeoutError."""
        stream = self._http2.request(headers, [message])
        result: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._results[stream] = result
        self._transport.write(self._http2.output())
        try:
            async with asyncio.timeout(deadline_s):
                return await result
        except TimeoutError:
            self._results.pop(stream, None)
            self._http2.reset(stream)
            self._transport.write(self._http2.output())
            raise


class GrpcClient:
    """Sends requests over a few connections, with their deadlines in the headers."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._connections: list[GrpcConnection] = []
        request: Any = message_class("inference.ModelInferRequest")(model_name=MODEL)
        request.inputs.add(name="INPUT0", datatype="FP32", shape=[16])
        request.raw_input_contents.append(np.full(16, 1.5, np.float32).tobytes())
        message = request.SerializeToString()
        self._message = prefix(len(message)) + message
        self._sent = 0

    async def send(self, client: str, deadline_s: float | None) -> bool:
        """Send a request. As `Send`."""
        self._sent += 1
        headers = [*CALL, (HEADER.encode(), client.encode())]
        if deadline_s is not None:
            headers.append(timeout_header(deadline_s))
        while len(self._connections) < CLIENTS:
            loop = asyncio.get_running_loop()
            self._connections.append((await loop.create_connection(GrpcConnection, self._host, self._port))[1])
        return await self._connections[self._sent % CLIENTS].call(headers, self._message, deadline_s)


async def closed_loop(send: Send, seconds: float) -> float:
    """Return the rate at which clients that wait for each response are served."""
    until_s, served = time.monotonic() + seconds, 0

    async def client() -> None:
        nonlocal served
        while time.monotonic() < until_s:
            is_served = await send("closed", None)
            served += is_served

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return served / seconds


async def open_loop(send: Send, client: str, per_s: float, seconds: float, deadline_s: float | None) -> list[Answer]:
    """Send requests at random times and return what became of them."""
    answers: list[Answer] = []
    chance, begin_s, due_s = random.Random(1), time.monotonic(), 0.0

    async def one(due_s: float) -> None:
        outcome = "left"
        with suppress(TimeoutError):
            outcome = "served" if await send(client, deadline_s) else "refused"
        answers.append(Answer(due_s, time.monotonic() - begin_s - due_s, outcome))

    async with asyncio.TaskGroup() as group:
        while (due_s := due_s + chance.expovariate(per_s)) < seconds:
            late_s = begin_s + due_s - time.monotonic()
            if late_s > 0:
                await asyncio.sleep(late_s)
            group.create_task(one(due_s))
    return answers


def summary(answers: Sequence[Answer], seconds: float, capacity: float) -> dict[str, float | int]:
    """Return the figures of the requests that were sent after the first seconds."""
    late = [each for each in answers if each.sent_s >= LEARNING_S]
    took = sorted(each.took_s for each in late if each.outcome == "served" and each.took_s <= DEADLINE_S)
    goodput = len(took) / (seconds - LEARNING_S)
    counts = {f"{kind}": sum(each.outcome == kind for each in late) for kind in ("served", "refused", "left")}
    return {
        "offered_per_s": round(len(late) / (seconds - LEARNING_S), 1),
        "goodput_per_s": round(goodput, 1),
        "goodput_of_capacity": round(goodput / capacity, 3),
        "p50_ms": round(1000 * took[len(took) // 2], 1) if took else 0,
        "p99_ms": round(1000 * took[int(0.99 * (len(took) - 1))], 1) if took else 0,
        **counts,
    }


async def measure(server: Server, seconds: float) -> dict[str, dict[str, float | int]]:
    """Measure everything over both protocols."""
    rows: dict[str, dict[str, float | int]] = {}

    def note(name: str, row: dict[str, float | int]) -> None:
        rows[name] = row
        print(f"{name:28}", " ".join(f"{key} {value}" for key, value in row.items()), flush=True)

    for protocol, client in (("http", HttpClient(server.http)), ("grpc", GrpcClient(server.grpc))):
        capacity = await closed_loop(client.send, seconds)
        note(f"{protocol} capacity", {"per_s": round(capacity, 1)})
        # Just below capacity, so that the queue does not grow without end.
        answers = await open_loop(client.send, "a", 0.98 * capacity, seconds, None)
        note(f"{protocol} 0.98x, no deadline", summary(answers, seconds, capacity))
        for factor in FACTORS:
            answers = await open_loop(client.send, "a", factor * capacity, seconds, DEADLINE_S)
            note(f"{protocol} {factor:g}x", summary(answers, seconds, capacity))
        light, heavy = await asyncio.gather(
            open_loop(client.send, "light", LIGHT_PER_S, seconds, DEADLINE_S),
            open_loop(client.send, "heavy", FACTORS[-1] * capacity, seconds, DEADLINE_S),
        )
        note(f"{protocol} light beside heavy", summary(light, seconds, capacity))
        note(f"{protocol} heavy beside light", summary(heavy, seconds, capacity))
        await asyncio.sleep(2 * DEADLINE_S)
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=13.0, help="of each measurement")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--flag", action="append", default=[], help="additional flag of the server")
    given = parser.parse_args()
    with Server("charonia:python_busy", [f"--fairness-header={HEADER}", *given.flag]) as server:
        rows = uvloop.run(measure(server, given.seconds))
    if given.output is not None:
        document = {"machine": machine(), "seconds": given.seconds, "deadline_s": DEADLINE_S, "rows": rows}
        given.output.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
