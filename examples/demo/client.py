"""Requests with Triton's client library, with their sizes and latencies."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import tritonclient.grpc.aio
import tritonclient.http.aio
from numpy.typing import NDArray
from tritonclient.utils import np_to_triton_dtype

from .server import HOST, Ports

Arrays = dict[str, NDArray[Any]]
"""Tensors by name; strings are object arrays of bytes."""


class Client:
    """Arrays in, arrays out, over either protocol: the two modules of `tritonclient` have the same names.

    Attributes:
        request_count: Requests so far.
        payload_bytes: Bytes of the tensors that were sent and received so far.
    """

    def __init__(self, module: ModuleType, connection: Any) -> None:
        self.request_count = 0
        self.payload_bytes = 0
        self._module = module
        self._connection = connection

    async def infer(self, model: str, inputs: Arrays, outputs: Sequence[str] = (), class_count: int = 0) -> Arrays:
        """Return all or the named outputs of a model; with `class_count`, the best classes instead of values."""
        tensors = []
        for name, array in inputs.items():
            tensor = self._module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
            tensor.set_data_from_numpy(array)
            tensors.append(tensor)
        wanted = [self._module.InferRequestedOutput(name, class_count=class_count) for name in outputs]
        answer = await self._connection.infer(model, tensors, outputs=wanted or None)
        response = answer.get_response()
        # A response is a dictionary over HTTP, and a message over gRPC.
        names = (
            [each["name"] for each in response["outputs"]]
            if isinstance(response, dict)
            else [each.name for each in response.outputs]
        )
        answers = {name: answer.as_numpy(name) for name in names}
        self.request_count += 1
        self.payload_bytes += sum(map(payload_bytes, [*inputs.values(), *answers.values()]))
        return answers


def payload_bytes(array: NDArray[Any]) -> int:
    return sum(map(len, array.ravel())) if array.dtype == np.object_ else array.nbytes


@asynccontextmanager
async def connected(ports: Ports) -> AsyncIterator[dict[str, Client]]:
    """Connect over both protocols; close the connections on exit."""
    async with (
        tritonclient.http.aio.InferenceServerClient(f"{HOST}:{ports.http}") as http,
        tritonclient.grpc.aio.InferenceServerClient(f"{HOST}:{ports.grpc}") as grpc,
    ):
        yield {"HTTP": Client(tritonclient.http.aio, http), "gRPC": Client(tritonclient.grpc.aio, grpc)}


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
    """Send requests with at most `concurrency` in flight; `options` are further arguments of `Client.infer`."""
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
