"""Requests of another HTTP server, answered without a connection."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from tests.support.fake_engine import FakeEngine, identity_config

from charonia.core.dtypes import DataType
from charonia.core.response import InferResponse
from charonia.core.tensor import Tensor
from charonia.server.access.rules import Gate, KeyRing, parse_keys
from charonia.server.facade import Services
from charonia.server.http.asgi import Message, begin
from charonia.server.http.frontend import HttpFrontend, HttpLimits

KEY = "0123456789abcdef0123456789abcdef"
GATE = Gate((), KeyRing(parse_keys(f"user infer {KEY}").keys, b"secret"), what="API")
INPUTS = {"inputs": [{"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}]}


def scope(method: str, path: str, *headers: tuple[bytes, bytes], query: bytes = b"", root: str = "") -> dict[str, Any]:
    return {
        "method": method,
        "raw_path": path.encode(),
        "root_path": root,
        "query_string": query,
        "headers": list(headers),
    }


def answer(
    engine: FakeEngine,
    given: dict[str, Any],
    body: bytes = b"",
    limits: HttpLimits | None = None,
    services: Services | None = None,
) -> tuple[int, dict[bytes, bytes], bytes]:
    async def run() -> list[Message]:
        messages: list[Message] = []
        begin(
            HttpFrontend(engine, limits or HttpLimits(), services=services or Services()), given, body, messages.extend
        )
        while not messages or messages[-1].get("more_body", True):
            await asyncio.sleep(0)
        return messages

    start, *parts = asyncio.run(run())
    return start["status"], dict(start["headers"]), b"".join(part["body"] for part in parts)


def test_an_inference_is_answered_with_status_header_and_body() -> None:
    status, headers, body = answer(
        FakeEngine(), scope("POST", "/v2/models/identity/infer"), json.dumps(INPUTS).encode()
    )

    assert status == 200
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"content-length"] == b"%d" % len(body)
    assert b"connection" not in headers
    assert json.loads(body)["outputs"][0]["data"] == [1.0, 2.0]


def test_binary_tensors_go_through_as_they_are() -> None:
    tensor = np.array([3.0, 4.0], "<f4").tobytes()
    inputs = [{"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    size = (b"Inference-Header-Content-Length", b"%d" % len(head))

    _, headers, body = answer(FakeEngine(), scope("POST", "/v2/models/identity/infer", size), head + tensor)

    assert body[int(headers[b"inference-header-content-length"]) :] == tensor


def test_the_prefix_of_the_other_server_is_not_part_of_the_path() -> None:
    status, _, body = answer(FakeEngine(), scope("GET", "/triton/v2/models/identity", root="/triton"))

    assert status == 200
    assert json.loads(body)["name"] == "identity"


def test_a_query_and_quoted_characters_reach_the_routes() -> None:
    status, _, _ = answer(FakeEngine(), scope("GET", "/v2/models/id%65ntity", query=b"a=b"))

    assert status == 200


def test_a_body_over_the_limit_is_refused() -> None:
    status, _, body = answer(
        FakeEngine(), scope("POST", "/v2/models/identity/infer"), bytes(11), HttpLimits(body_bytes_max=10)
    )

    assert status == 400
    assert b"request JSON size of 11 bytes exceeds the maximum allowed input size of 10 bytes" in body


@pytest.mark.parametrize(("key", "expected"), [(b"Bearer " + KEY.encode(), 200), (b"Bearer wrong", 401)])
def test_keys_are_asked_for_as_on_a_connection(key: bytes, expected: int) -> None:
    services = Services(http_gate=GATE)

    given = scope("POST", "/v2/models/identity/infer", (b"Authorization", key))
    status, _, _ = answer(FakeEngine(), given, json.dumps(INPUTS).encode(), services=services)

    assert status == expected


def test_the_parts_of_a_stream_are_events_without_chunks() -> None:
    responses = [InferResponse("identity", "1", "", [Tensor("OUTPUT0", DataType.FP32, np.ones(1, "f4"))])] * 2
    engine = FakeEngine(outcomes=[[(responses[0], False), (responses[1], True)]])
    accept = (b"Accept", b"text/event-stream")

    status, headers, body = answer(
        engine, scope("POST", "/v2/models/identity/infer", accept), json.dumps(INPUTS).encode()
    )

    assert (status, headers[b"content-type"]) == (200, b"text/event-stream; charset=utf-8")
    assert b"transfer-encoding" not in headers
    assert body.startswith(b"data: {")
    assert body.count(b"data: ") == 2


def test_the_inference_of_a_client_that_leaves_is_cancelled() -> None:
    async def run() -> FakeEngine:
        engine = FakeEngine(models={"identity": identity_config()}, hold=True)
        messages: list[Message] = []
        frontend = HttpFrontend(engine, HttpLimits())
        given = scope("POST", "/v2/models/identity/infer")
        begin(frontend, given, json.dumps(INPUTS).encode(), messages.extend).abandon()
        assert messages == []
        return engine

    assert asyncio.run(run()).tickets[0].cancelled


def test_a_key_that_is_there_twice_is_refused() -> None:
    headers = [(b"authorization", b"Bearer " + KEY.encode()), (b"Authorization", b"Bearer other")]

    status, _, body = answer(FakeEngine(), scope("GET", "/v2", *headers), services=Services(http_gate=GATE))

    assert status == 400
    assert b"more than one 'authorization'" in body
