"""Calls with one request whose client does not take its answers, over a connection in memory."""

import asyncio
from typing import Any

import numpy as np
import pytest
from tests.server.grpc.conftest import Bench
from tests.support.closing import InLoop
from tests.support.grpc_memory import MemoryClient, MemoryResponse, frame, request_headers
from tests.support.idle_time import IdleTimeLoop
from tritonclient.grpc import service_pb2

from charonia.server.grpc.frontend import GrpcLimits
from charonia.wire.grpc_status import Status

INITIAL_WINDOW_SIZE = 4
CANCEL = 8
LIMITS = GrpcLimits(unary_unsent_bytes_max=1000)
COUNT = 30
IN_FLIGHT = 9
"""Requests that fit: each answer is larger than 100 bytes, and one more goes beyond the limit."""

new_loop = IdleTimeLoop


def infer_message(id: str = "", values: int = 32) -> bytes:
    message = service_pb2.ModelInferRequest(model_name="identity", id=id)
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, values])
    message.raw_input_contents.append(np.zeros(values, "<f4").tobytes())
    data: bytes = message.SerializeToString()
    return data


def reluctant(bench: Any) -> MemoryClient:
    """Return a client that takes nothing until it says so."""
    client: MemoryClient = bench.client({INITIAL_WINDOW_SIZE: 0}, opens_window=False)
    return client


def window_update(stream_id: int, amount: int) -> bytes:
    return b"\0\0\4\10\0" + stream_id.to_bytes(4, "big") + amount.to_bytes(4, "big")


async def read_on(client: MemoryClient, window: int = 65_535) -> None:
    client.http2.update_settings({INITIAL_WINDOW_SIZE: window})
    client.exchange()
    await client.settle(COUNT)


def ask(client: MemoryClient, count: int = COUNT) -> list[int]:
    return [client.start("ModelInfer", infer_message(str(number))) for number in range(count)]


def statuses(client: MemoryClient, streams: list[int]) -> set[int | None]:
    return {client.responses[stream_id].status for stream_id in streams}


@pytest.fixture
def bench(play: Any) -> InLoop:
    return InLoop(lambda: play(LIMITS))


async def test_a_client_that_takes_no_answers_has_its_next_calls_wait_until_it_does(bench: Bench) -> None:
    client = reluctant(bench)
    streams = ask(client)
    await client.settle()
    assert 0 < len(bench.engine.tickets) <= IN_FLIGHT
    await read_on(client)

    assert statuses(client, streams) == {Status.OK}
    ids = [ticket.request.id for ticket in bench.engine.tickets]
    assert ids == [str(number) for number in range(COUNT)]


async def test_as_many_calls_begin_as_there_is_room_for(bench: Bench) -> None:
    client = reluctant(bench)
    streams = ask(client)
    before = len(bench.engine.tickets)
    for stream_id in streams[:2]:
        client.feed(window_update(stream_id, 1000))
    await client.settle()

    assert before < len(bench.engine.tickets) <= before + 3


async def test_calls_that_all_came_in_one_piece_wait_too(bench: Bench) -> None:
    client = reluctant(bench)
    data = b""
    for number in range(COUNT):
        stream_id = client.http2.send_request(request_headers("ModelInfer"))
        client.responses[stream_id] = MemoryResponse()
        client.http2.send_data(stream_id, frame(infer_message(str(number))), end_stream=True)
        data += client.http2.data_to_send()
    client.feed(data)
    await client.settle()
    assert len(bench.engine.tickets) <= IN_FLIGHT
    await read_on(client)

    assert statuses(client, list(client.responses)) == {Status.OK}


async def test_answers_that_the_client_does_not_want_any_more_make_room(bench: Bench) -> None:
    client = reluctant(bench)
    streams = ask(client)
    before = len(bench.engine.tickets)
    for stream_id in streams[:before]:
        client.http2.reset_stream(stream_id, CANCEL)
    client.exchange()
    await client.settle()

    assert len(bench.engine.tickets) == 2 * before


async def test_a_deadline_holds_for_a_call_that_waits(bench: Bench) -> None:
    client = reluctant(bench)
    ask(client)
    before = len(bench.engine.tickets)
    late = client.start("ModelInfer", infer_message("late"), (b"grpc-timeout", b"20m"))
    await asyncio.sleep(0.1)
    await client.settle()
    assert client.responses[late].status == Status.DEADLINE_EXCEEDED
    await read_on(client)

    assert len(bench.engine.tickets) > before
    assert "late" not in [ticket.request.id for ticket in bench.engine.tickets]


async def test_what_a_waiting_call_has_sent_does_not_use_up_the_window_when_it_is_cancelled(play: Any) -> None:
    async with play(GrpcLimits(unary_unsent_bytes_max=1000, connection_window_bytes=65_535)) as bench:
        client = reluctant(bench)
        ask(client)
        for _ in range(40):
            stream_id = client.start("ModelInfer", infer_message(values=1000))
            client.http2.reset_stream(stream_id, CANCEL)
            client.exchange()
        await read_on(client)

        assert client.http2.remote_window_size > 16_000
        assert len(bench.engine.tickets) == COUNT


async def test_a_waiting_request_that_is_larger_than_the_window_comes_through(play: Any) -> None:
    async with play(GrpcLimits(unary_unsent_bytes_max=1000, stream_window_bytes=4096)) as bench:
        client = reluctant(bench)
        ask(client)
        large = client.start("ModelInfer", infer_message("large", values=5000))
        await client.settle()
        assert client.http2.queued_body_size(large) > 0
        await read_on(client)

        assert client.responses[large].status == Status.OK


@pytest.mark.parametrize("has_ended", [False, True])
async def test_a_stream_that_is_not_read_makes_no_other_call_wait(has_ended: bool, bench: Bench) -> None:
    client = bench.client({INITIAL_WINDOW_SIZE: 1000}, opens_window=False)
    stream_id = client.start("ModelStreamInfer")
    client.http2.send_data(stream_id, frame(infer_message()) * COUNT, end_stream=has_ended)
    client.exchange()
    await client.settle()
    assert bench.engine.tickets
    bench.engine.tickets.clear()
    answers = [await client.call("ModelInfer", infer_message()) for _ in range(COUNT)]

    assert {answer.status for answer in answers} == {Status.OK}
    assert client.responses[stream_id].status is None


async def test_a_stream_goes_on_while_calls_wait(bench: Bench) -> None:
    client = reluctant(bench)
    ask(client)
    bench.engine.tickets.clear()
    client.start("ModelStreamInfer", infer_message("streamed"))
    await client.settle()

    assert [ticket.request.id for ticket in bench.engine.tickets] == ["streamed"]


async def test_when_the_server_stops_calls_that_wait_are_told_so(bench: Bench) -> None:
    client = reluctant(bench)
    streams = ask(client)
    before = len(bench.engine.tickets)
    bench.engine.exiting = True
    bench.frontend.stop_accepting()
    await client.settle()
    assert statuses(client, streams[before:]) == {Status.UNAVAILABLE}
    await read_on(client)

    assert statuses(client, streams[:before]) == {Status.OK}


async def test_a_fault_in_a_call_that_waited_hurts_no_other(play: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with play(LIMITS) as bench:
        client = reluctant(bench)
        streams = ask(client)
        infer = bench.engine.infer

        def broken(request: Any, reply: Any) -> Any:
            if request.id == "20":
                raise RuntimeError("boom")
            return infer(request, reply)

        bench.engine.infer = broken
        await read_on(client)

        assert client.responses[streams.pop(20)].status == Status.INTERNAL
        assert statuses(client, streams) == {Status.OK}
    assert "boom" in caplog.text


async def test_a_client_that_leaves_takes_its_waiting_calls_with_it(bench: Bench) -> None:
    client = reluctant(bench)
    ask(client)
    before = len(bench.engine.tickets)
    client.transport.abort()
    await asyncio.sleep(0.1)

    assert len(bench.engine.tickets) == before
