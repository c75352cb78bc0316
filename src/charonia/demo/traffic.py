"""Requests to a server with the public client, what they carried, and how long they took."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from tritonclient import utils
from tritonclient.http import aio as http

Array = NDArray[Any]
Arrays = dict[str, Array]


class Client:
    """A connection to a server: arrays in, arrays out. Use it as an async context manager.

    Args:
        module: `tritonclient.http.aio` or `tritonclient.grpc.aio`; the two offer the same calls.
        address: `host:port`.

    Attributes:
        request_count: Requests so far.
        payload_bytes: Bytes of the tensors that were sent and received so far.
    """

    def __init__(self, module: ModuleType, address: str) -> None:
        self.request_count = 0
        self.payload_bytes = 0
        self._module = module
        self._client = module.InferenceServerClient(address)

    async def __aenter__(self) -> Self:
        """Return the client itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the connection."""
        await self._client.close()

    async def infer(self, model: str, inputs: Arrays, outputs: Sequence[str] = (), class_count: int = 0) -> Arrays:
        """Return the outputs of a model by name.

        Args:
            model: Its name.
            inputs: Its inputs by name; strings are object arrays of bytes.
            outputs: Names of the outputs wanted; all when empty.
            class_count: Ask for the best so many classes of each named output instead of its values; 0 for the values.

        Raises:
            tritonclient.utils.InferenceServerException: The request failed.
        """
        tensors = []
        for name, array in inputs.items():
            tensor = self._module.InferInput(name, list(array.shape), utils.np_to_triton_dtype(array.dtype))
            tensor.set_data_from_numpy(array)
            tensors.append(tensor)
        wanted = [self._module.InferRequestedOutput(name, class_count=class_count) for name in outputs]
        answer = await self._client.infer(model, tensors, outputs=wanted or None)
        response = answer.get_response()
        # HTTP answers are dictionaries, those of gRPC messages.
        described = response["outputs"] if isinstance(response, dict) else response.outputs
        names = [tensor["name"] if isinstance(tensor, dict) else tensor.name for tensor in described]
        answers = {name: answer.as_numpy(name) for name in names}
        self.request_count += 1
        self.payload_bytes += sum(map(_payload_bytes, [*inputs.values(), *answers.values()]))
        return answers


@dataclass(frozen=True)
class Answers:
    """What came back.

    Attributes:
        outputs: The outputs of each request by name, in the order of the requests.
        latencies_ms: Time from sending to answer of each request.
        elapsed_s: Time from the first request to the last answer.
    """

    outputs: list[Arrays]
    latencies_ms: list[float]
    elapsed_s: float

    def summary(self) -> str:
        """Return count, rate, median and 99th percentile as one line."""
        count = len(self.latencies_ms)
        p50, p99 = np.percentile(self.latencies_ms, [50, 99])
        rate = count / self.elapsed_s
        return f"{count} requests in {self.elapsed_s:.2f} s ({rate:.0f}/s), p50 {p50:.1f} ms, p99 {p99:.1f} ms"


@dataclass(frozen=True)
class Call:
    """What to ask of a model; the fields are those of `Client.infer`."""

    model: str
    outputs: Sequence[str] = ()
    class_count: int = 0


async def send(client: Client, call: Call, requests: Sequence[Arrays], concurrency: int) -> Answers:
    """Send each request, at most `concurrency` at a time, and wait for all answers.

    Args:
        client: Who sends.
        call: What is asked.
        requests: The inputs of each request by name.
        concurrency: Most requests in flight.

    Raises:
        tritonclient.utils.InferenceServerException: A request failed.
    """
    outputs: list[Arrays] = [{} for _ in requests]
    latencies_ms = [0.0] * len(requests)
    waiting = iter(range(len(requests)))

    async def lane() -> None:
        for index in waiting:
            begin = time.perf_counter()
            outputs[index] = await client.infer(call.model, requests[index], call.outputs, call.class_count)
            latencies_ms[index] = (time.perf_counter() - begin) * 1e3

    begin = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(concurrency)))
    return Answers(outputs, latencies_ms, time.perf_counter() - begin)


async def executed_batches(http_address: str, model: str) -> dict[int, int]:
    """Return how many batches of each size the server has executed for a model, from its statistics."""
    async with http.InferenceServerClient(http_address) as client:
        statistics = await client.get_inference_statistics(model)
    (entry,) = statistics["model_stats"]
    return {int(each["batch_size"]): int(each["compute_infer"]["count"]) for each in entry["batch_stats"]}


def _payload_bytes(array: Array) -> int:
    return sum(map(len, array.ravel())) if array.dtype == np.object_ else array.nbytes
