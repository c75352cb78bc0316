"""Requests with Charonia's client, with their sizes and latencies."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from charonia.client import AsyncClient

from .server import HOST, Ports

Arrays = dict[str, NDArray[Any]]
"""Tensors by name; strings are object arrays of bytes."""


class Client:
    """Arrays in, arrays out, over either protocol.

    Attributes:
        request_count: Requests so far.
        payload_bytes: Bytes of the tensors that were sent and received so far.
    """

    def __init__(self, connection: AsyncClient) -> None:
        self.connection = connection
        self.request_count = 0
        self.payload_bytes = 0

    async def infer(self, model: str, inputs: Arrays, outputs: Sequence[str] = (), class_count: int = 0) -> Arrays:
        """Return all or the named outputs of a model; with `class_count`, the best classes instead of values."""
        answer = await self.connection.infer(model, inputs, dict.fromkeys(outputs, class_count) or None)
        self.request_count += 1
        self.payload_bytes += sum(map(payload_bytes, [*inputs.values(), *answer.outputs.values()]))
        return answer.outputs


def payload_bytes(array: NDArray[Any]) -> int:
    return sum(map(len, array.ravel())) if array.dtype == np.object_ else array.nbytes


@asynccontextmanager
async def connected(ports: Ports) -> AsyncIterator[dict[str, Client]]:
    """Connect over both protocols; close the connections on exit."""
    async with AsyncClient(f"http://{HOST}:{ports.http}") as http, AsyncClient(f"grpc://{HOST}:{ports.grpc}") as grpc:
        yield {"HTTP": Client(http), "gRPC": Client(grpc)}


@dataclass(frozen=True)
class Answers:
    """The outputs of all requests, their latencies, and the total time."""

    outputs: list[Arrays]
    latencies_ms: list[float]
    elapsed_s: float

    def summary(self) -> str:
        count = len(self.latencies_ms)
        p50, p99 = np.percentile(self.latencies_ms, [50, 99])
        rate = count / self.elapsed_s
        return f"{count} requests in {self.elapsed_s:.2f} s ({rate:.0f}/s), p50 {p50:.1f} ms, p99 {p99:.1f} ms"


async def send(client: Client, model: str, requests: Sequence[Arrays], concurrency: int, **options: Any) -> Answers:
    """Send requests with at most `concurrency` in flight; `options` are additional arguments of `Client.infer`."""
    outputs: list[Arrays] = [{} for _ in requests]
    latencies_ms = [0.0] * len(requests)
    waiting = iter(range(len(requests)))

    async def send_one_by_one() -> None:
        for index in waiting:
            begin = time.perf_counter()
            outputs[index] = await client.infer(model, requests[index], **options)
            latencies_ms[index] = (time.perf_counter() - begin) * 1e3

    begin = time.perf_counter()
    await asyncio.gather(*(send_one_by_one() for _ in range(concurrency)))
    return Answers(outputs, latencies_ms, time.perf_counter() - begin)
