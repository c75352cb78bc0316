"""HTTP for load: what becomes of requests, over real sockets."""

import asyncio
from typing import Any

import pytest
from tests.support.client_servers import Answers, ask, identity_request, read_request, scripted, served
from tests.support.ports import free_port

from charonia.client.http_transport import DIALING_MAX, HttpTransport
from charonia.core.errors import Code
from charonia.tools.perf.worker import connect
from charonia.wire.answer import Answer, Failure
from charonia.wire.http_codec import decode_response, error_message
from charonia.wire.transport import RequestForm, Transport, WireOptions

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


def http(url: str, **options: Any) -> Transport:
    return connect(url, WireOptions(**options))


def output(answer: Answer) -> list[float]:
    array = decode_response(answer.body, answer.json_bytes).outputs[0].array
    return [float(value) for value in array.ravel()]


@pytest.mark.parametrize(
    "form", [RequestForm(), RequestForm(json_inputs=True), RequestForm(json_outputs=True)], ids=repr
)
@pytest.mark.parametrize("coding", ["", "gzip", "deflate"])
async def test_a_request_of_any_form_is_answered(form: RequestForm, coding: str) -> None:
    async with served() as server:
        transport = http(server.urls["http"], request_compression=coding, response_compression=coding)

        answer = await ask(transport, identity_request(rows=40), form)

        assert output(answer) == list(range(640))
        assert 0 < answer.sent_ns <= answer.send_end_ns <= answer.done_ns - answer.receive_ns
        await transport.close()


async def test_requests_one_after_another_share_a_connection() -> None:
    connections = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            await read_request(reader)
            writer.write(OK)

    async with scripted(talk) as url:
        transport = http(url)
        answers = [await ask(transport) for _ in range(5)]

        assert [answer.body for answer in answers] == [b"{}"] * 5
        assert connections == 1
        await transport.close()


async def test_requests_at_the_same_time_each_have_a_connection() -> None:
    async with served() as server:
        server.engine.hold = True
        transport = http(server.urls["http"])
        assert await transport.open(2) == 2
        answers = Answers()
        prepared = transport.prepare(identity_request())

        for _ in range(4):
            transport.send(prepared, answers.take)
        while len(server.engine.tickets) < 4:
            await asyncio.sleep(0)
        for index in range(4):
            server.engine.release(index)
        while len(answers.all) < 4:
            await answers.final()

        assert [answer.failure for answer in answers.all] == [None] * 4
        await transport.close()


async def test_headers_of_the_options_are_sent() -> None:
    seen = b""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen = await read_request(reader)
        writer.write(OK)

    async with scripted(talk) as url:
        transport = http(url + "/prefix/", headers=(("Authorization", "Bearer x"), ("X-Tag", "a"), ("X-Tag", "b")))
        await ask(transport)

        assert seen.startswith(b"POST /prefix/v2/models/identity/infer HTTP/1.1\r\n")
        assert b"\r\nAuthorization: Bearer x\r\nX-Tag: a\r\nX-Tag: b\r\n" in seen
        await transport.close()


async def test_a_request_in_time_has_no_timeout_and_one_that_is_late_has_and_disturbs_no_other() -> None:
    async with served() as server:
        transport = http(server.urls["http"])
        assert (await ask(transport, timeout_s=200)).failure is None
        server.engine.hold = True

        late = await ask(transport, timeout_s=0.05)
        server.engine.hold = False
        after = await ask(transport)

        assert (late.failure, late.code) == (Failure.TIMEOUT, Code.UNAVAILABLE)
        assert late.message.endswith("did not respond within 0.05 s")
        assert after.failure is None
        await transport.close()


async def test_a_request_that_is_cancelled_gets_no_answer() -> None:
    async with served() as server:
        server.engine.hold = True
        transport = http(server.urls["http"])
        await transport.open(1)
        answers = Answers()

        sent = transport.send(transport.prepare(identity_request()), answers.take)
        waiting = transport.send(transport.prepare(identity_request()), answers.take)
        sent.cancel()
        waiting.cancel()
        server.engine.hold = False
        after = await ask(transport)

        assert after.failure is None
        assert answers.all == []
        await transport.close()


async def test_a_server_that_comes_back_is_used_again() -> None:
    async with served() as first:
        transport = http(first.urls["http"])
        assert (await ask(transport)).failure is None
    gone = await ask(transport)
    assert gone.failure in (Failure.REFUSED, Failure.RESET)
    await transport.close()


BROKEN = {
    "closes without a word": (b"", Failure.RESET, "before any response"),
    "ends in the head": (b"HTTP/1.1 200 OK\r\nCont", Failure.RESET, "in the middle of the response"),
    "ends in the body": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}",
        Failure.RESET,
        "after 2 of 9 bytes of the response",
    ),
    "ends in a chunk": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{}",
        Failure.RESET,
        "in the middle of the response",
    ),
    "speaks something else": (b"\x00\x00\x18\x04\x00\x00", Failure.GARBLED, "expected an HTTP response"),
    "sends too much": (OK + OK, Failure.GARBLED, "more than its response"),
    "claims too much": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 2000\r\n\r\n",
        Failure.OVERSIZE,
        "at most 1000 bytes, got one of 2000",
    ),
    "changes the protocol": (
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        Failure.GARBLED,
        "",
    ),
    "unrequested coding": (
        b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\nContent-Length: 2\r\n\r\n{}",
        Failure.GARBLED,
        "content coding 'br'",
    ),
    "codes wrongly": (
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
        Failure.GARBLED,
        "cannot be decompressed",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_a_server_that_answers_wrongly_is_an_answer_and_the_next_request_gets_a_new_connection(case: str) -> None:
    words, failure, message = BROKEN[case]

    is_broken = True

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(words if is_broken else OK)
            if is_broken and failure is Failure.RESET:
                return

    async with scripted(talk) as url:
        transport = http(url, response_bytes_max=1000)

        answer = await ask(transport, timeout_s=200)
        is_broken = False
        after = await ask(transport, timeout_s=200)

        assert answer.failure is failure
        assert message in answer.message
        assert transport.failures[failure] == 1
        assert after.failure is None
        await transport.close()


async def test_a_connection_that_the_server_closes_after_its_answer_is_not_used_again() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")

    async with scripted(talk) as url:
        transport = http(url)

        assert [(await ask(transport)).failure for _ in range(3)] == [None] * 3
        await transport.close()


async def test_connections_have_a_limit() -> None:
    async with served() as server:
        server.engine.hold = True
        transport = http(server.urls["http"], connections_max=2)
        held = Answers()
        for _ in range(2):
            transport.send(transport.prepare(identity_request()), held.take)

        answer = await ask(transport)

        assert (answer.failure, answer.code) == (Failure.EXHAUSTED, Code.UNAVAILABLE)
        assert "all 2 connections" in answer.message
        await transport.close()
        assert [answer.failure for answer in held.all] == [Failure.CLOSED] * 2


async def test_only_some_connections_are_opened_at_the_same_time_and_all_requests_get_one() -> None:
    async with served() as server:
        server.engine.hold = True
        transport = http(server.urls["http"])
        assert isinstance(transport, HttpTransport)
        answers = Answers()
        for _ in range(2 * DIALING_MAX):
            transport.send(transport.prepare(identity_request()), answers.take)

        assert transport.dialer.dialing == DIALING_MAX
        while len(server.engine.tickets) < 2 * DIALING_MAX:
            await asyncio.sleep(0.01)
        assert await transport.open(3 * DIALING_MAX) == 3 * DIALING_MAX
        await transport.close()


async def test_all_requests_that_wait_for_a_connection_fail_if_none_can_be_opened() -> None:
    transport = http(f"127.0.0.1:{free_port()}")
    answers = Answers()
    for _ in range(3 * DIALING_MAX):
        transport.send(transport.prepare(identity_request()), answers.take)

    while len(answers.all) < 3 * DIALING_MAX:
        await asyncio.sleep(0.01)

    assert {answer.failure for answer in answers.all} == {Failure.REFUSED}
    await transport.close()


async def test_a_callback_may_send_the_next_request() -> None:
    async with served() as server:
        transport = http(server.urls["http"])
        prepared = transport.prepare(identity_request())
        done = asyncio.get_running_loop().create_future()
        count = 0

        def next_one(answer: Answer) -> None:
            nonlocal count
            count += 1
            if count == 200:
                done.set_result(None)
            else:
                transport.send(prepared, next_one)

        transport.send(prepared, next_one)
        await done

        assert sum(transport.failures.values()) == 0
        await transport.close()


async def test_a_body_that_is_kept_comes_with_the_times_of_its_parts() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for part in (b"ab", b"cde"):
                await asyncio.sleep(0.02)
                writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await asyncio.sleep(0.02)
            writer.write(b"0\r\n\r\n")

    async with scripted(talk) as url:
        transport = http(url)
        answer = await ask(transport)

        assert answer.body == b"abcde"
        assert answer.arrivals is not None
        times, sizes = answer.arrivals[0::2].tolist(), answer.arrivals[1::2].tolist()
        assert sizes[0] == 2
        assert sizes[-1] == 5
        assert times == sorted(times)
        assert times[sizes.index(5)] - times[0] >= 10_000_000
        assert answer.sent_ns < times[0] <= times[-1] <= answer.done_ns
        await transport.close()


@pytest.mark.parametrize(
    "body",
    [
        b'{"error": "no such model"}',
        b'{"error": {"message": "no such model", "type": "invalid_request_error"}}',
        b'data: {"error": "no such model"}\n\n',
    ],
)
def test_the_message_of_an_error_is_read_in_every_form(body: bytes) -> None:
    assert error_message(body, 404) == "no such model"
