"""What the two transports for load, HTTP and gRPC, do alike."""

import asyncio
from typing import Any

import numpy as np
import pytest
from tests.support.client_servers import Answers, ask, identity_request, scripted, served

from charonia.core.errors import Code, ServingError
from charonia.tools.perf.worker import connect
from charonia.wire import grpc_codec, http_codec
from charonia.wire.answer import Answer, Failure
from charonia.wire.transport import Transport, WireOptions

pytestmark = pytest.mark.parametrize("scheme", ["http", "grpc"])


def transport_to(url: str, **options: Any) -> Transport:
    return connect(url, WireOptions(**options))


def output(scheme: str, answer: Answer) -> np.ndarray:
    response = (
        grpc_codec.decode_response(answer.body)
        if scheme == "grpc"
        else http_codec.decode_response(answer.body, answer.json_bytes)
    )
    return response.outputs[0].array


async def test_a_prepared_request_becomes_a_part_of_a_sequence(scheme: str) -> None:
    async with served() as server:
        transport = transport_to(server.urls[scheme])
        prepared = transport.prepare(identity_request(parameters={"custom": 1.5}, priority=2, timeout_us=9))
        answers = Answers()
        for part in (prepared.with_sequence(7, True, False), prepared.with_sequence("s", False, True), prepared):
            transport.send(part, answers.take)
            await answers.final()

        requests = [ticket.request for ticket in server.engine.tickets]
        assert [(r.correlation_id, r.flags, r.id) for r in requests] == [(7, 1, ""), ("s", 2, ""), (0, 0, "")]
        assert [(r.parameters, r.priority, r.timeout_us) for r in requests] == [({"custom": 1.5}, 2, 9)] * 3
        await transport.close()


async def test_an_error_of_the_server_comes_with_its_words(scheme: str) -> None:
    async with served() as server:
        transport = transport_to(server.urls[scheme])
        server.engine.errors["identity"] = ServingError(Code.NOT_FOUND, "100 % gone: über")

        answer = await ask(transport)

        assert (answer.failure, answer.code) == (Failure.STATUS, Code.NOT_FOUND)
        assert answer.status == {"http": 404, "grpc": 5}[scheme]
        assert answer.message == "100 % gone: über"
        assert transport.failures[Failure.STATUS] == 1
        await transport.close()


async def test_a_server_that_is_not_there_is_an_answer_and_not_a_storm(scheme: str) -> None:
    async with scripted(lambda reader, writer: asyncio.sleep(0), scheme) as url:
        pass
    transport = transport_to(url)

    begin = asyncio.get_running_loop().time()
    answers = [await ask(transport) for _ in range(5)]
    took_s = asyncio.get_running_loop().time() - begin

    assert {answer.failure for answer in answers} == {Failure.REFUSED}
    assert all(answer.message.startswith(f"no connection to {url}: ") for answer in answers)
    assert took_s > 0.1
    await transport.close()


async def test_a_transport_that_is_closed_answers_what_is_in_flight_and_what_comes_after(scheme: str) -> None:
    async with served() as server:
        server.engine.hold = True
        transport = transport_to(server.urls[scheme])
        await transport.open(1)
        answers = Answers()
        transport.send(transport.prepare(identity_request()), answers.take)  # written
        transport.send(transport.prepare(identity_request()), answers.take)  # over HTTP it waits for a connection
        while not server.engine.tickets:
            await asyncio.sleep(0)

        await transport.close()
        after = await ask(transport)

        assert [answer.failure for answer in answers.all] == [Failure.CLOSED] * 2
        assert after.failure is Failure.CLOSED


async def test_a_large_tensor_goes_there_and_back(scheme: str) -> None:
    async with served() as server:
        transport = transport_to(server.urls[scheme])

        answer = await ask(transport, identity_request(rows=200_000))

        array = output(scheme, answer)
        assert array.shape == (200_000, 16)
        assert np.array_equal(array.ravel(), np.arange(3_200_000, dtype=np.float32))
        assert answer.sent_ns < answer.send_end_ns < answer.done_ns
        await transport.close()
