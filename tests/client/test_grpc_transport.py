"""gRPC for load: what becomes of calls, over real sockets."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ngh2
import pytest
from tests.support.client_servers import Answers, Talk, ask, identity_request, scripted, served

from charonia.client import grpc_transport
from charonia.client.grpc_transport import GrpcCall, GrpcTransport
from charonia.core.errors import Code, ServingError
from charonia.core.response import InferResponse
from charonia.server.grpc.limits import GrpcLimits
from charonia.tools.perf.worker import connect
from charonia.wire.answer import Answer, Failure
from charonia.wire.endpoint import parse_url
from charonia.wire.grpc_codec import GrpcRequest, decode_response, decode_stream_response
from charonia.wire.transport import RequestForm, Transport, WireOptions

STREAM = RequestForm(streaming=True)
HEAD = ((b":status", b"200"), (b"content-type", b"application/grpc"))
OK = ((b"grpc-status", b"0"),)
EMPTY_MESSAGE = bytes(5)


def grpc(url: str, **options: Any) -> Transport:
    return connect(url, WireOptions(**options))


def output(answer: Answer) -> list[float]:
    return [float(value) for value in decode_response(answer.body).outputs[0].array.ravel()]


@pytest.mark.parametrize("coding", ["", "gzip", "deflate"])
async def test_a_call_is_answered(coding: str) -> None:
    async with served() as server:
        transport = grpc(server.urls["grpc"], request_compression=coding, response_compression=coding)

        answer = await ask(transport, identity_request(rows=40))

        assert output(answer) == list(range(640))
        assert answer.final
        assert 0 < answer.sent_ns <= answer.send_end_ns <= answer.done_ns - answer.receive_ns
        await transport.close()


async def test_a_request_counts_as_sent_once_it_is_in_frames_whatever_is_written_first() -> None:
    async with served() as server:
        transport = GrpcTransport(parse_url(server.urls["grpc"]), WireOptions())
        await transport.open(1)
        answers = Answers()

        call = transport.send(transport.prepare(identity_request()), answers.take)
        sent_by_ns = time.monotonic_ns()  # before the loop wrote anything

        assert 0 < call.send_end_ns <= sent_by_ns
        assert (await answers.final()).send_end_ns == call.send_end_ns
        await transport.close()


async def test_waiting_for_the_rest_of_a_response_is_no_time_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 0
    monkeypatch.setattr(grpc_transport, "_now_ns", lambda: now_ns)
    answers = Answers()
    owner = GrpcTransport(parse_url("grpc://localhost:1"), WireOptions())
    call = GrpcCall(owner, GrpcRequest((), []), answers.take, keep_body=True)

    parts: list[Callable[[], None]] = [
        lambda: call.headers_received(HEAD),
        lambda: call.data_received(b"\0\0\0\0\4ab"),
        lambda: call.data_received(b"cd"),
        lambda: call.trailers_received(OK),
    ]
    for part in parts:
        now_ns += 1000
        part()

    (answer,) = answers.all
    assert (bytes(answer.body), answer.done_ns, answer.receive_ns) == (b"abcd", 4000, 0)


async def test_responses_that_the_server_compresses_are_read() -> None:
    async with served(replace(GrpcLimits(), compression_level=1)) as server:
        transport = grpc(server.urls["grpc"])

        assert output(await ask(transport, identity_request(rows=40))) == list(range(640))
        await transport.close()


async def test_many_calls_share_a_connection() -> None:
    async with served() as server:
        server.engine.hold = True
        transport = grpc(server.urls["grpc"])
        assert await transport.open(1) == 1
        answers = Answers()
        for _ in range(50):
            transport.send(transport.prepare(identity_request()), answers.take)
        while len(server.engine.tickets) < 50:
            await asyncio.sleep(0)

        for index in range(50):
            server.engine.release(index)
        while len(answers.all) < 50:
            await answers.final()

        assert {answer.failure for answer in answers.all} == {None}
        await transport.close()


async def test_more_calls_than_the_server_allows_wait_and_are_answered() -> None:
    async with served(replace(GrpcLimits(), streams_max=4)) as server:
        transport = grpc(server.urls["grpc"])
        answers = Answers()
        for _ in range(100):
            transport.send(transport.prepare(identity_request()), answers.take)
        while len(answers.all) < 100:
            await answers.final()

        assert {answer.failure for answer in answers.all} == {None}
        await transport.close()


async def test_a_stream_gives_each_response_and_then_its_end() -> None:
    async with served() as server:
        transport = grpc(server.urls["grpc"])
        responses = [InferResponse("identity", "1", str(number), []) for number in range(3)]
        server.engine.outcomes.append([(response, response is responses[-1]) for response in responses])
        answers = Answers()

        transport.send(transport.prepare(identity_request(), STREAM), answers.take, keep_body=True)
        end = await answers.final()

        assert [answer.final for answer in answers.all] == [False, False, False, True]
        assert end.is_empty
        ids = [decode_stream_response(answer.body) for answer in answers.all[:-1]]
        assert [response.id for response in ids if isinstance(response, InferResponse)] == ["0", "1", "2"]
        assert all(0 < answer.send_end_ns <= answer.done_ns - answer.receive_ns for answer in answers.all[:-1])
        await transport.close()


async def test_an_error_in_a_stream_is_an_answer_that_failed() -> None:
    async with served() as server:
        transport = grpc(server.urls["grpc"])
        server.engine.errors["identity"] = ServingError(Code.INTERNAL, "the model broke")
        answers = Answers()

        transport.send(transport.prepare(identity_request(), STREAM), answers.take)
        await answers.final()

        first = answers.all[0]
        assert (first.failure, first.message) == (Failure.STATUS, "the model broke")
        await transport.close()


@pytest.mark.parametrize("form", [RequestForm(), STREAM], ids=["unary", "stream"])
async def test_a_call_that_is_late_times_out_and_is_cancelled_at_the_server(form: RequestForm) -> None:
    async with served() as server:
        server.engine.hold = True
        transport = grpc(server.urls["grpc"])
        await transport.open(1)

        answers = []
        while not server.engine.tickets:  # a machine that stands still lets a call be late before it arrives
            answers.append(await ask(transport, form=form, timeout_s=0.05))
        while not server.engine.tickets[0].cancelled:
            await asyncio.sleep(0)

        assert {(answer.failure, answer.code) for answer in answers} == {(Failure.TIMEOUT, Code.UNAVAILABLE)}
        assert transport.failures[Failure.TIMEOUT] == len(answers)
        await transport.close()


@pytest.mark.parametrize("form", [RequestForm(), STREAM], ids=["unary", "stream"])
async def test_a_call_that_is_cancelled_is_cancelled_at_the_server_and_gets_no_answer(form: RequestForm) -> None:
    async with served() as server:
        server.engine.hold = True
        transport = grpc(server.urls["grpc"])
        answers = Answers()
        handle = transport.send(transport.prepare(identity_request(), form), answers.take)
        while not server.engine.tickets:
            await asyncio.sleep(0)

        handle.cancel()
        while not server.engine.tickets[0].cancelled:
            await asyncio.sleep(0)

        assert answers.all == []
        await transport.close()


async def test_a_connection_that_the_server_retires_is_replaced_without_a_failure() -> None:
    async with served(replace(GrpcLimits(), connection_age_max_s=0.02)) as server:
        transport = grpc(server.urls["grpc"])
        begin = asyncio.get_running_loop().time()
        count = 0

        while asyncio.get_running_loop().time() - begin < 0.5 or count < 100:
            answers = [ask(transport) for _ in range(8)]
            assert {answer.failure for answer in await asyncio.gather(*answers)} == {None}
            count += 8

        assert sum(transport.failures.values()) == 0
        await transport.close()


async def test_a_server_that_dies_in_the_middle_fails_what_is_in_flight() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(EMPTY_SETTINGS)
        while b"INPUT0" not in await reader.read(65536):
            pass

    async with scripted(talk, "grpc") as url:
        transport = grpc(url)

        answers = await asyncio.gather(*(ask(transport) for _ in range(3)))

        assert {answer.failure for answer in answers} == {Failure.RESET}
        assert {answer.is_unexecuted for answer in answers} == {False}
        await transport.close()


async def test_calls_wait_for_the_servers_greeting_and_none_is_sent_to_one_that_closes_before() -> None:
    received = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read(65536))

    async with scripted(talk, "grpc") as url:
        transport = grpc(url)

        answer = await ask(transport)

        assert answer.failure is Failure.REFUSED
        assert answer.is_unexecuted
        assert "closed the connection immediately" in answer.message
        assert b"INPUT0" not in b"".join(received)
        await transport.close()


EMPTY_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
"""The frame that a server of HTTP/2 begins with."""

Reply = Callable[[ngh2.Connection, int], None]


def speaking(*replies: Reply) -> Talk:
    """Return what a server does: reply to the n-th request with the n-th of these, or the last, on any connection."""
    left = list(replies)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        http2 = ngh2.Connection(ngh2.Role.SERVER)
        http2.initiate_connection()
        while True:
            writer.write(http2.data_to_send())
            data = await reader.read(65536)
            if not data:
                return
            http2.receive_data(data)
            for event in http2.events():
                if isinstance(event, ngh2.DataReceived) and event.end_stream:
                    (left.pop(0) if len(left) > 1 else left[0])(http2, event.stream_id)

    return talk


def respond(data: bytes = EMPTY_MESSAGE, head: Any = HEAD, trailers: Any = OK) -> Reply:
    def reply(http2: ngh2.Connection, stream_id: int) -> None:
        http2.send_response(stream_id, head)
        if data:
            http2.send_data(stream_id, data, end_stream=trailers is None)
        if trailers is not None:
            http2.send_trailers(stream_id, trailers)

    return reply


def only_head(*head: tuple[bytes, bytes]) -> Reply:
    return lambda http2, stream_id: http2.send_response(stream_id, head, end_stream=True)


def go_away(http2: ngh2.Connection, stream_id: int) -> None:
    http2.send_goaway(0, last_stream_id=stream_id - 2 if stream_id > 1 else 0)


def reset(code: ngh2.ErrorCode) -> Reply:
    return lambda http2, stream_id: http2.reset_stream(stream_id, code)


WRONG: dict[str, tuple[Reply, Failure, str]] = {
    "no status at the end": (respond(trailers=None), Failure.GARBLED, "without a status"),
    "a status that is none": (respond(trailers=((b"grpc-status", b"x"),)), Failure.GARBLED, ""),
    "no message": (respond(b""), Failure.GARBLED, "0 complete messages"),
    "two messages": (respond(bytes(10)), Failure.GARBLED, "got several"),
    "half a message": (respond(b"\0\0\0\0\x09ab"), Failure.GARBLED, "truncated"),
    "too large": (respond(b"\0\0\0\x10\0"), Failure.OVERSIZE, "at most 1000 bytes are accepted, got 4096"),
    "a flag that is none": (respond(b"\x07\0\0\0\0"), Failure.GARBLED, "compression flag 7"),
    "compressed garbage": (
        respond(b"\1\0\0\0\2ab", (*HEAD, (b"grpc-encoding", b"gzip"))),
        Failure.GARBLED,
        "cannot be decompressed",
    ),
    "an encoding that is unknown": (respond(head=(*HEAD, (b"grpc-encoding", b"br"))), Failure.GARBLED, "'br'"),
    "a page of a proxy": (
        respond(b"<html>", ((b":status", b"502"), (b"content-type", b"text/html"))),
        Failure.GARBLED,
        "got HTTP status 502 with text/html",
    ),
    "a head alone that is no gRPC": (only_head((b":status", b"404")), Failure.GARBLED, "got HTTP status 404"),
    "a reset": (reset(ngh2.ErrorCode.INTERNAL_ERROR), Failure.RESET, "HTTP/2 error code 2"),
    "refused for ever": (reset(ngh2.ErrorCode.REFUSED_STREAM), Failure.REFUSED, "refused the call 4 times"),
    "an error": (
        only_head(*HEAD, (b"grpc-status", b"8"), (b"grpc-message", b"full")),
        Failure.STATUS,
        "full",
    ),
}


@pytest.mark.parametrize("case", WRONG)
async def test_a_server_that_answers_wrongly_is_an_answer_and_the_next_call_is_served(case: str) -> None:
    wrong, failure, message = WRONG[case]

    tries = 4 if failure is Failure.REFUSED else 1
    async with scripted(speaking(*[wrong] * tries, respond()), "grpc") as url:
        transport = grpc(url, response_bytes_max=1000)

        answer = await ask(transport, timeout_s=200)
        after = await ask(transport, timeout_s=200)

        assert answer.failure is failure
        assert message in answer.message
        assert transport.failures[failure] == 1
        assert after.failure is None
        await transport.close()


@pytest.mark.parametrize("case", [go_away, reset(ngh2.ErrorCode.REFUSED_STREAM)], ids=["goaway", "refused"])
async def test_what_the_server_has_not_looked_at_is_sent_again(case: Reply) -> None:
    async with scripted(speaking(case, respond()), "grpc") as url:
        transport = grpc(url)

        answer = await ask(transport, timeout_s=200)

        assert answer.failure is None
        await transport.close()


async def test_a_server_that_speaks_http1_is_said_to() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await reader.read()

    async with scripted(talk, "grpc") as url:
        transport = grpc(url)

        answer = await ask(transport, timeout_s=200)

        assert answer.failure is Failure.GARBLED
        assert "expected HTTP/2" in answer.message
        assert "HTTP/1.1 400" in answer.message
        await transport.close()


async def test_a_server_that_says_nothing_times_out() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)

    async with scripted(talk, "grpc") as url:
        transport = grpc(url)

        assert (await ask(transport, timeout_s=0.05)).failure is Failure.TIMEOUT
        await transport.close()


async def test_calls_that_wait_for_a_connection_have_a_limit() -> None:
    async with served() as server:
        transport = grpc(server.urls["grpc"], waiting_max=2)

        answers = await asyncio.gather(*(ask(transport) for _ in range(3)))

        assert [answer.failure for answer in answers] == [None, None, Failure.EXHAUSTED]
        await transport.close()


async def test_metadata_of_the_options_is_sent_and_checked() -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        http2 = ngh2.Connection(ngh2.Role.SERVER)
        http2.initiate_connection()
        writer.write(http2.data_to_send())
        while not seen:
            http2.receive_data(await reader.read(65536))
            for event in http2.events():
                if isinstance(event, ngh2.RequestReceived):
                    seen.extend((bytes(name), bytes(value)) for name, value in event.headers)

    async with scripted(talk, "grpc") as url:
        transport = grpc(url, headers=(("X-Tag", "a"),))
        await ask(transport, timeout_s=30)

        assert (b"x-tag", b"a") in seen
        assert any(name == b"grpc-timeout" and value.endswith(b"u") for name, value in seen)
        await transport.close()
        with pytest.raises(ServingError, match="metadata 'grpc-x'"):
            grpc(url, headers=(("grpc-x", "a"),))
