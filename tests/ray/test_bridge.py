"""Requests of Ray's proxies, answered by the front ends of a server on the same event loop, without Ray."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.gate import Gate, gated
from tests.support.models import PYTHON_IDENTITY, identity_pbtxt, write_model
from tritonclient.grpc import service_pb2

from charonia.ray import AppOptions, replica
from charonia.ray.replica import METHODS, answer_http, answer_stream, answer_unary
from charonia.server.app import InferenceServer
from charonia.server.grpc.frontend import GrpcFrontend
from charonia.server.http.frontend import HttpFrontend
from charonia.wire.grpc_status import RpcError, Status

STREAM_INFLIGHT_MAX = 2
SLEEPING = PYTHON_IDENTITY.replace("responses = []", "import time; time.sleep(0.5); responses = []")
HTTP: dict[str, Any] = {"method": "POST", "root_path": "", "query_string": b"", "headers": []}
BODY = json.dumps({"inputs": [{"name": "INPUT0", "shape": [2], "datatype": "FP32", "data": [1.0, 2.0]}]}).encode()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_model(root, "identity", b"", config=identity_pbtxt("identity", dims=(-1,), max_batch_size=0))
    write_model(root, "sleeping", SLEEPING, config=identity_pbtxt("python", dims=(-1,), max_batch_size=0))
    write_model(root, "gated", gated(PYTHON_IDENTITY), config=identity_pbtxt("python", dims=(-1,), max_batch_size=0))
    return root


@asynccontextmanager
async def serving(models: Path) -> AsyncIterator[tuple[HttpFrontend, GrpcFrontend]]:
    """Run a server that a replica would have."""
    server = InferenceServer(AppOptions(repository=str(models)).server_options())
    try:
        await server.start()
        assert server.http is not None
        assert server.grpc is not None
        yield server.http, server.grpc
    finally:
        await server.shutdown()


def http_request(model: str) -> dict[str, Any]:
    return HTTP | {"raw_path": f"/v2/models/{model}/infer".encode()}


def into(sent: list[dict[str, Any]]) -> Callable[[dict[str, Any]], Coroutine[Any, Any, None]]:
    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    return send


def grpc_message(id: str = "", model: str = "identity", elements: int = 2) -> bytes:
    message = service_pb2.ModelInferRequest(model_name=model, id=id)
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[elements])
    message.raw_input_contents.append(np.zeros(elements, "<f4").tobytes())
    data: bytes = message.SerializeToString()
    return data


async def test_an_http_request_is_answered(models: Path) -> None:
    sent: list[dict[str, Any]] = []
    async with serving(models) as (http, _):
        await answer_http(http, http_request("identity"), BODY, into(sent))

    start, *parts = sent
    assert start["status"] == 200
    assert json.loads(b"".join(part["body"] for part in parts))["outputs"][0]["data"] == [1.0, 2.0]


async def test_a_client_that_leaves_cancels_its_request(models: Path) -> None:
    gate = Gate(models / "gated" / "1")

    async def answered(http: HttpFrontend) -> None:
        await answer_http(http, http_request("gated"), BODY, into([]))

    async def in_flight(http: HttpFrontend) -> int:
        sent: list[dict[str, Any]] = []
        await answer_http(http, HTTP | {"method": "GET", "raw_path": b"/v2/load"}, b"", into(sent))
        return int(json.loads(b"".join(part["body"] for part in sent[1:]))["named_metrics"]["requests_in_flight"])

    async with serving(models) as (http, _):
        with gate.closed():
            first, left, last = (asyncio.create_task(answered(http)) for _ in range(3))
            while await in_flight(http) < 3:
                await asyncio.sleep(0.01)
            left.cancel()  # it is queued behind the first
        await asyncio.gather(first, last)

    assert gate.runs == 2


async def test_a_unary_call_is_answered_or_fails_with_its_status(models: Path) -> None:
    async with serving(models) as (_, grpc):
        with pytest.raises(RpcError, match="unknown model: 'nope'") as refused:
            await answer_unary(grpc, METHODS["ModelInfer"], [], grpc_message(model="nope"))
        assert refused.value.status is Status.NOT_FOUND
        answer = await answer_unary(grpc, METHODS["ModelInfer"], [], grpc_message("7"))

    assert service_pb2.ModelInferResponse.FromString(answer).id == "7"


async def test_a_stream_takes_no_more_messages_than_its_limit_ahead(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "UNTAKEN_BYTES_MAX", 0)
    message, sent = grpc_message(model="sleeping"), []

    async def messages() -> AsyncIterator[bytes]:
        for number in range(STREAM_INFLIGHT_MAX + 3):
            sent.append(number)
            yield message

    async with serving(models) as (_, grpc):
        grpc.service.limits = replace(grpc.service.limits, stream_inflight_max=STREAM_INFLIGHT_MAX)
        async with aclosing(answer_stream(grpc, METHODS["ModelStreamInfer"], [], messages())) as responses:
            await anext(responses)

    # Those in flight, one that waits for its turn, and one in the place of the answered one.
    assert len(sent) <= STREAM_INFLIGHT_MAX + 2


async def test_a_stream_is_answered_to_its_end(models: Path) -> None:
    async def messages() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield grpc_message()

    async with serving(models) as (_, grpc):
        stream = answer_stream(grpc, METHODS["ModelStreamInfer"], [], messages())
        assert len([response async for response in stream]) == 5
