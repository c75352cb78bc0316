"""Connections that the network loses without a word."""

import asyncio
import errno
import math
import socket

import pytest
from tests.support.client_servers import Answers, ask, identity_request, served
from tests.support.faulty_network import FaultyNetwork
from tests.support.process import until

from charonia.client.dialing import KEEPALIVE_S_MAX, PROBES, Keepalive, loss
from charonia.core.errors import Code, ServingError
from charonia.tools.perf.worker import connect
from charonia.wire.answer import Failure
from charonia.wire.endpoint import parse_url
from charonia.wire.transport import WireOptions

needs_linux = pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="options and packet filters of Linux")


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
@pytest.mark.parametrize("is_waiting", [True, False])
async def test_a_request_on_a_lost_connection_fails_and_the_next_one_is_answered(
    protocol: str, is_waiting: bool
) -> None:
    async with served() as server:
        with FaultyNetwork(parse_url(server.urls[protocol]).port) as network:
            url = f"{protocol}://127.0.0.1:{network.port}"
            transport = connect(url, WireOptions(keepalive_time_s=1, keepalive_timeout_s=1))
            assert (await ask(transport)).failure is None

            server.engine.hold = is_waiting
            answers = Answers()
            if not is_waiting:
                network.lose_clients()
            transport.send(transport.prepare(identity_request()), answers.take)
            if is_waiting:  # the server has the request: only asking shows that it is out of reach
                await until(lambda: len(server.engine.tickets) >= 2)
                network.lose_clients()
            lost = await answers.final()
            server.engine.hold = False
            after = await ask(transport)
            await transport.close()

    assert (lost.failure, lost.code) == (Failure.RESET, Code.UNAVAILABLE)
    assert lost.message.startswith(f"the connection to {url} was lost before ")
    assert after.failure is None
