"""The end of an HTTP endpoint whose clients are slow, in memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.support.fake_engine import FakeEngine
from tests.support.http_memory import MemoryClient, request
from tests.support.idle_time import IdleTimeLoop

from charonia.server.http.connection import LINGER_S
from charonia.server.http.frontend import NOTICE_S, HttpFrontend, HttpLimits
from charonia.server.listening import GRACE_S, QUIET_S

METADATA = request("/v2", method="GET")
PIECE_BYTES = 40


new_loop = IdleTimeLoop


@asynccontextmanager
async def playing() -> AsyncIterator[tuple[HttpFrontend, MemoryClient]]:
    frontend = HttpFrontend(FakeEngine(), HttpLimits())
    yield frontend, MemoryClient(frontend)


def ask(client: MemoryClient) -> None:
    client.transport.is_blocked = True
    client.send(METADATA)


async def until_closed(client: MemoryClient) -> None:
    while not client.transport.is_closed:
        await asyncio.sleep(0.01)
    client.leave()


async def test_a_client_that_reads_slowly_gets_its_whole_answer() -> None:
    async with playing() as (frontend, client):
        ask(client)
        rounds = -(-len(client.transport.pending) // PIECE_BYTES)
        leaving = asyncio.create_task(until_closed(client))
        draining = asyncio.create_task(frontend.drain(1000.0))
        for _ in range(rounds):
            await asyncio.sleep(GRACE_S * 0.9)
            assert (client.transport.is_half_closed, client.transport.is_closed) == (True, False)
            client.transport.let_through(PIECE_BYTES)
        assert await draining
        await leaving

        assert rounds > 3
        assert [response.status for response in client.responses] == [200]


async def test_an_idle_connection_is_closed_when_it_was_not_used_for_a_moment() -> None:
    async with playing() as (frontend, client):
        client.send(METADATA)
        leaving = asyncio.create_task(until_closed(client))
        draining = asyncio.create_task(frontend.drain(1000.0))
        await asyncio.sleep(NOTICE_S * 0.5)
        assert not client.transport.is_closed
        assert await draining
        await leaving


async def test_a_client_that_reads_nothing_is_given_up() -> None:
    async with playing() as (frontend, client):
        ask(client)
        leaving = asyncio.create_task(until_closed(client))
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        assert await frontend.drain(1000.0)
        await leaving

        assert GRACE_S <= loop.time() - begin_s < 2 * GRACE_S


async def test_a_client_that_is_still_reading_when_time_is_up_is_cut_off_and_told_of() -> None:
    async with playing() as (frontend, client):
        ask(client)
        leaving = asyncio.create_task(until_closed(client))
        draining = asyncio.create_task(frontend.drain(GRACE_S * 2))
        for _ in range(3):
            await asyncio.sleep(GRACE_S * 0.9)
            client.transport.let_through(1)

        assert not await draining
        await leaving


async def test_an_answer_that_comes_while_the_server_stops_is_delivered_before_the_connection_closes() -> None:
    async with playing() as (frontend, _):
        frontend.stop_accepting()
        reader = MemoryClient(frontend)
        ask(reader)
        assert (reader.transport.is_half_closed, reader.transport.is_closed) == (True, False)
        for _ in range(10):
            frontend.shared.now_s += LINGER_S * 0.9
            reader.connection.check_time(frontend.shared.now_s)
            reader.transport.let_through(1)
        assert not reader.transport.is_closed

        leaving = asyncio.create_task(until_closed(reader))
        assert await frontend.drain(1000.0)
        await leaving


async def test_the_sweep_leaves_it_to_the_drain_to_give_up_a_client_and_to_say_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def sweep(frontend: HttpFrontend, client: MemoryClient) -> None:
        while not client.transport.is_closed:
            await asyncio.sleep(GRACE_S * 0.3)
            frontend.shared.now_s += LINGER_S * 2
            client.connection.check_time(frontend.shared.now_s)

    async with playing() as (frontend, client):
        ask(client)
        leaving = asyncio.create_task(until_closed(client))
        sweeping = asyncio.create_task(sweep(frontend, client))
        assert await frontend.drain(1000.0)
        await asyncio.gather(leaving, sweeping)

    assert "closing connections whose clients have not read all answers: 1" in caplog.text


async def test_one_that_is_still_sending_is_waited_for_no_longer_than_before() -> None:
    async with playing() as (frontend, client):
        client.send(METADATA[:10])
        leaving = asyncio.create_task(until_closed(client))
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        assert await frontend.drain(1000.0)
        await leaving

        assert GRACE_S <= loop.time() - begin_s < 2 * GRACE_S


async def test_an_endpoint_that_hands_on_answers_once_more_on_each_connection_and_says_so() -> None:
    async with playing() as (frontend, client):
        quiet, late = MemoryClient(frontend), MemoryClient(frontend)
        handing = asyncio.create_task(frontend.drain_gradually(1000.0))
        closing = asyncio.gather(*map(until_closed, (client, quiet, late)))
        await asyncio.sleep(QUIET_S * 0.9)
        client.send(METADATA)
        late.send(METADATA[:-1])  # the rest of it comes later
        await asyncio.sleep(QUIET_S)
        assert (client.transport.is_closed, quiet.transport.is_closed, late.transport.is_closed) == (True, True, False)
        late.send(METADATA[-1:])
        await closing
        await handing

        for each in (client, late):
            (response,) = each.responses
            assert (response.status, response.headers["connection"]) == (200, "close")
        assert quiet.received == b""


async def test_what_is_in_flight_when_an_endpoint_hands_on_leaves_its_connection_open_for_one_more() -> None:
    async with playing() as (frontend, client):
        engine = FakeEngine()
        engine.hold = True
        frontend = HttpFrontend(engine, HttpLimits())
        client = MemoryClient(frontend)
        tensor = b'{"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "INT8", "data": [1]}]}'
        client.send(request("/v2/models/identity/infer", body=tensor))
        handing = asyncio.create_task(frontend.drain_gradually(1000.0))
        closing = asyncio.create_task(until_closed(client))
        await asyncio.sleep(10 * QUIET_S)
        engine.release(0)
        assert not client.transport.is_closed
        client.send(METADATA)
        await closing
        await handing

        assert [response.headers.get("connection") for response in client.responses] == [None, "close"]
