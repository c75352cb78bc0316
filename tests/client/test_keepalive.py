"""Connections that the network loses without a word."""

import asyncio
import ctypes
import errno
import math
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.support.client_servers import Answers, ask, identity_request, scripted, served

from charonia.client.dialing import KEEPALIVE_S_MAX, PROBES, Keepalive, loss
from charonia.core.errors import Code, ServingError
from charonia.tools.perf.worker import connect
from charonia.wire.endpoint import parse_url
from charonia.wire.transport import Failure, WireOptions

SO_ATTACH_FILTER = 26
RETURN = 0x06

needs_linux = pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="options and packet filters of Linux")


class Link:
    """Connections through a relay, which the network can lose."""

    def __init__(self) -> None:
        self.url = ""
        self._sockets: list[socket.socket] = []

    def add(self, writer: asyncio.StreamWriter) -> None:
        self._sockets.append(writer.get_extra_info("socket"))

    def lose(self) -> None:
        """Drop all further data of clients silently."""
        drop_all = ctypes.create_string_buffer(struct.pack("HBBI", RETURN, 0, 0, 0))
        program = struct.pack("HL", 1, ctypes.addressof(drop_all))
        for each in self._sockets:
            each.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
        self._sockets.clear()


@asynccontextmanager
async def relayed(url: str) -> AsyncIterator[Link]:
    target, link = parse_url(url), Link()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link.add(writer)
        from_server, to_server = await asyncio.open_connection(target.host, target.port)
        tasks = [asyncio.create_task(pump(reader, to_server)), asyncio.create_task(pump(from_server, writer))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            to_server.close()

    async with scripted(talk, target.protocol) as link.url:
        yield link


class OneSocket(asyncio.BaseTransport):
    def __init__(self, of: socket.socket) -> None:
        super().__init__({"socket": of})


def options_of(of: socket.socket) -> dict[str, int]:
    names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
    found = {name: of.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names}
    return {"SO_KEEPALIVE": of.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), **found}


@needs_linux
def test_the_system_asks_several_times_and_counts_what_is_not_confirmed_as_long_as_silence_and_asking_take() -> None:
    with socket.socket() as one:
        Keepalive(19.5, 8).watch(OneSocket(one))

        assert options_of(one) == {
            "SO_KEEPALIVE": 1,
            "TCP_KEEPIDLE": 20,
            "TCP_KEEPINTVL": 2,
            "TCP_KEEPCNT": PROBES,
            "TCP_USER_TIMEOUT": 28_000,
        }


@needs_linux
def test_without_a_time_connections_stay_as_they_are() -> None:
    with socket.socket() as one, socket.socket() as untouched:
        Keepalive(0, 20).watch(OneSocket(one))

        assert options_of(one) == options_of(untouched)


def test_a_connection_that_is_gone_at_once_is_no_error_here() -> None:
    one = socket.socket()
    one.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    Keepalive(20, 20).watch(OneSocket(one))

    assert one.fileno() == -1


@pytest.mark.parametrize(
    ("time_s", "timeout_s", "named"),
    [
        (-1, 20, "keepalive_time_s"),
        (KEEPALIVE_S_MAX + 1, 20, "keepalive_time_s"),
        (math.nan, 20, "keepalive_time_s"),
        (20, 0, "keepalive_timeout_s"),
        (20, -1, "keepalive_timeout_s"),
        (20, KEEPALIVE_S_MAX + 1, "keepalive_timeout_s"),
    ],
)
@pytest.mark.parametrize("url", ["http://localhost:1", "grpc://localhost:1"])
async def test_times_that_cannot_be_kept_are_refused(url: str, time_s: float, timeout_s: float, named: str) -> None:
    with pytest.raises(ServingError, match=f"^{named}: expected ") as caught:
        connect(url, WireOptions(keepalive_time_s=time_s, keepalive_timeout_s=timeout_s))
    assert caught.value.code is Code.INVALID_ARG


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH])
def test_a_server_out_of_reach_is_told_from_one_that_closes_the_connection(number: int) -> None:
    endpoint = parse_url("grpc://far:8001")

    lost = loss(endpoint, OSError(number, "it is"), "before any response")

    assert lost.startswith("the connection to grpc://far:8001 was lost before any response: the server is unreachable")
    assert "(hint: " in lost
    for closed in (None, ConnectionResetError(errno.ECONNRESET, "reset")):
        assert (
            loss(endpoint, closed, "before any response") == "grpc://far:8001 closed the connection before any response"
        )


@needs_linux
@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_a_request_that_waits_on_a_lost_connection_fails_and_the_next_one_is_answered(protocol: str) -> None:
    async with served() as server, relayed(server.urls[protocol]) as link:
        server.engine.hold = True
        transport = connect(link.url, WireOptions(keepalive_time_s=1, keepalive_timeout_s=1))
        answers = Answers()
        transport.send(transport.prepare(identity_request()), answers.take)
        while not server.engine.tickets:
            await asyncio.sleep(0.001)

        link.lose()  # the server has the request: only asking shows that it is out of reach
        lost = await answers.final()
        server.engine.hold = False
        after = await ask(transport)

        assert (lost.failure, lost.code) == (Failure.RESET, Code.UNAVAILABLE)
        assert lost.message.startswith(f"the connection to {link.url} was lost before ")
        assert after.failure is None
        await transport.close()


@needs_linux
async def test_a_request_on_a_connection_that_was_lost_before_fails_and_the_next_one_is_answered() -> None:
    async with served() as server, relayed(server.urls["grpc"]) as link:
        transport = connect(link.url, WireOptions(keepalive_time_s=1, keepalive_timeout_s=1))
        assert (await ask(transport)).failure is None

        link.lose()
        lost = await ask(transport)
        after = await ask(transport)

        assert (lost.failure, lost.code) == (Failure.RESET, Code.UNAVAILABLE)
        assert lost.message.startswith(f"the connection to {link.url} was lost before ")
        assert after.failure is None
        await transport.close()
