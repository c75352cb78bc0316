"""Requests to a server with the public client, and how long they took."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tritonclient import utils

Array = NDArray[Any]


@dataclass(frozen=True)
class Target:
    """What to call and how.

    Attributes:
        client: `tritonclient.http.aio` or `tritonclient.grpc.aio`; the two offer the same calls.
        address: `host:port`.
        model: Name of the model.
        class_count: Ask for the best so many classes of each output instead of its values; 0 for the values.
    """

    client: ModuleType
    address: str
    model: str
    class_count: int = 0


@dataclass(frozen=True)
class Answers:
    """What came back.

    Attributes:
        outputs: The outputs of each request by name, in the order of the requests.
        latencies_ms: Time from sending to answer of each request.
        elapsed_s: Time from the first request to the last answer.
    """

    outputs: list[dict[str, Array]]
    latencies_ms: list[float]
    elapsed_s: float

    def summary(self) -> str:
        """Return count, rate, median and 99th percentile as one line."""
        count = len(self.latencies_ms)
        p50, p99 = np.percentile(self.latencies_ms, [50, 99])
        rate = count / self.elapsed_s
        return f"{count} requests in {self.elapsed_s:.2f} s ({rate:.0f}/s), p50 {p50:.1f} ms, p99 {p99:.1f} ms"


async def send(target: Target, requests: Sequence[dict[str, Array]], concurrency: int) -> Answers:
    """Send each request, at most `concurrency` at a time, and wait for all answers.

    Args:
        target: What to call.
        requests: The inputs of each request by name.
        concurrency: Most requests in flight.

    Raises:
        tritonclient.utils.InferenceServerException: A request failed.
    """
    outputs: list[dict[str, Array]] = [{} for _ in requests]
    latencies_ms = [0.0] * len(requests)
    waiting = iter(range(len(requests)))

    async with target.client.InferenceServerClient(target.address) as client:
        names = [output["name"] for output in (await _metadata(client, target))["outputs"]]

        async def lane() -> None:
            for index in waiting:
                begin = time.perf_counter()
                answer = await client.infer(target.model, **_call(target, requests[index], names))
                latencies_ms[index] = (time.perf_counter() - begin) * 1e3
                outputs[index] = {name: answer.as_numpy(name) for name in names}

        begin = time.perf_counter()
        await asyncio.gather(*(lane() for _ in range(concurrency)))
        elapsed_s = time.perf_counter() - begin
    return Answers(outputs, latencies_ms, elapsed_s)


async def executed_batches(target: Target) -> dict[int, int]:
    """Return how many batches of each size the server has executed for the model, from its statistics over HTTP."""
    async with target.client.InferenceServerClient(target.address) as client:
        statistics = await client.get_inference_statistics(target.model)
    (model,) = statistics["model_stats"]
    return {int(entry["batch_size"]): int(entry["compute_infer"]["count"]) for entry in model["batch_stats"]}


async def _metadata(client: Any, target: Target) -> Any:
    if target.client.__name__.startswith("tritonclient.grpc"):
        return await client.get_model_metadata(target.model, as_json=True)
    return await client.get_model_metadata(target.model)


def _call(target: Target, request: dict[str, Array], names: list[str]) -> dict[str, Any]:
    inputs = []
    for name, array in request.items():
        tensor = target.client.InferInput(name, list(array.shape), utils.np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    outputs = [target.client.InferRequestedOutput(name, class_count=target.class_count) for name in names]
    return {"inputs": inputs, "outputs": outputs}
