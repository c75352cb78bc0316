"""Faults of the server in callbacks of the event loop: no client is left without an end of its calls."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.server.grpc.conftest import Bench
from tests.support.grpc_memory import MemoryClient
from tests.support.idle_time import IdleTimeLoop
from tritonclient.grpc import service_pb2

from charonia.server.grpc.call_table import CallTable
from charonia.server.grpc.calls import UnaryCall
from charonia.server.grpc.http2 import ErrorCode, ServerConnection
from charonia.wire.grpc_status import Status

new_loop = IdleTimeLoop


def infer_message() -> bytes:
    message = service_pb2.ModelInferRequest(model_name="identity")
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 16])
    message.raw_input_contents.append(np.zeros(16, "<f4").tobytes())
    data: bytes = message.SerializeToString()
    return data


def broken(*_: object, **__: object) -> Any:
    raise KeyError("a fault")


def broken_once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Have the next call of a method raise."""
    working: Callable[..., Any] = getattr(owner, name)

    def method(*arguments: Any, **more: Any) -> Any:
        monkeypatch.setattr(owner, name, working)
        raise KeyError("a fault")

    monkeypatch.setattr(owner, name, method)


async def waiting_call(bench: Any) -> tuple[MemoryClient, int]:
    bench.engine.hold = True
    client: MemoryClient = bench.client()
    stream_id = client.start("ModelInfer", infer_message())
    await client.settle()
    assert not client.responses[stream_id].is_closed
    return client, stream_id


@pytest.mark.pure_form
async def test_a_fault_while_events_are_handled_ends_the_calls_and_the_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, bench: Bench
) -> None:
    client, stream_id = await waiting_call(bench)
    broken_once(monkeypatch, CallTable, "open")
    client.start("ServerLive", b"")
    await client.settle()

    response = client.responses[stream_id]
    assert (response.status, response.is_closed) == (Status.INTERNAL, True)
    assert "internal fault of the server" in response.message
    assert [code for code, _ in client.goaways] == [ErrorCode.INTERNAL_ERROR]
    assert client.transport.is_closed
    assert bench.engine.tickets[0].cancelled
    assert "a fault" in caplog.text


@pytest.mark.parametrize("name", ["output", "events"])
@pytest.mark.pure_form
async def test_a_fault_while_answers_are_written_ends_the_calls_and_the_connection(
    monkeypatch: pytest.MonkeyPatch, name: str, bench: Bench
) -> None:
    client, stream_id = await waiting_call(bench)
    other = client.start("ModelInfer", infer_message())
    broken_once(monkeypatch, ServerConnection, name)
    bench.engine.release(1)  # which is written by a callback of the loop
    await client.settle()

    assert client.responses[stream_id].status == Status.INTERNAL
    assert client.responses[other].status == Status.OK
    assert client.transport.is_closed


@pytest.mark.pure_form
async def test_a_connection_whose_calls_cannot_be_ended_is_aborted(
    monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    client, _ = await waiting_call(bench)
    with monkeypatch.context() as patch:
        patch.setattr(ServerConnection, "receive", broken)
        patch.setattr(ServerConnection, "output", broken)
        client.http2.ping()
        client.exchange()
        await asyncio.sleep(0)

    assert client.transport.is_closed
    assert bench.engine.tickets[0].cancelled
    assert repr(client.protocol) == "<GrpcConnection closing calls=0 deferred=0>"


@pytest.mark.pure_form
async def test_a_call_that_cannot_be_given_up_keeps_no_other_in_flight(
    monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    client, _ = await waiting_call(bench)
    client.start("ModelInfer", infer_message())
    broken_once(monkeypatch, UnaryCall, "abandon")
    client.transport.abort()
    await asyncio.sleep(0)

    assert [ticket.cancelled for ticket in bench.engine.tickets] == [False, True]


@pytest.mark.parametrize("is_in_place", [True, False])
@pytest.mark.pure_form
async def test_a_response_that_cannot_be_sent_resets_its_stream_alone(
    monkeypatch: pytest.MonkeyPatch, is_in_place: bool, bench: Bench
) -> None:
    client, waiting = await waiting_call(bench)
    bench.engine.hold = not is_in_place
    broken_once(monkeypatch, ServerConnection, "respond")
    stream_id = client.start("ModelInfer", infer_message())
    if not is_in_place:
        bench.engine.release(1)
    await client.settle()
    bench.engine.release(0)
    await client.settle()

    assert client.responses[stream_id].reset_code == ErrorCode.INTERNAL_ERROR
    assert client.responses[waiting].status == Status.OK
    assert not client.transport.is_closed


async def test_a_connection_says_its_state_in_one_line(bench: Bench) -> None:
    client, _ = await waiting_call(bench)
    assert repr(client.protocol) == "<GrpcConnection open calls=1 deferred=0>"

    client.protocol.pause_writing()
    bench.frontend.stop_accepting()
    assert repr(client.protocol) == "<GrpcConnection draining calls=1 deferred=0 paused>"
