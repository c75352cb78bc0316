"""Our clients and the stock ones behind a network that is slow, silent, or cut in the middle of a message."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tests.support.client_servers import served
from tests.support.faulty_network import SLOW, FaultyNetwork, Link, broken
from tests.support.stock_clients import infer_input

from charonia.client import Client
from charonia.wire.endpoint import parse_url

ROWS = np.arange(1600, dtype="f4").reshape(100, 16)
SAYS = {
    "cut": "closed|Incomplete|UNAVAILABLE|[Rr]eset",
    "silent": "did not respond within 0.5 s|Deadline Exceeded|timed out",
}
"""What our clients and the stock ones say, over both protocols."""


def ours(protocol: str, port: int, timeout_s: float) -> Any:
    with Client(f"{protocol}://127.0.0.1:{port}", timeout_s=timeout_s) as client:
        return client.infer("identity", {"INPUT0": ROWS})["OUTPUT0"]


def stock(protocol: str, port: int, timeout_s: float) -> Any:
    module, limit = (grpc_client, {}) if protocol == "grpc" else (http_client, {"network_timeout": timeout_s})
    with module.InferenceServerClient(f"127.0.0.1:{port}", **limit) as client:
        ask = partial(client.infer, client_timeout=timeout_s) if protocol == "grpc" else client.infer
        return ask("identity", [infer_input(module, "INPUT0", ROWS)]).as_numpy("OUTPUT0")


Ask = Callable[[str, int, float], Any]
clients = pytest.mark.parametrize("ask", [ours, stock])
protocols = pytest.mark.parametrize("protocol", ["http", "grpc"])


@clients
@protocols
@pytest.mark.parametrize("link", SLOW.values(), ids=SLOW)
async def test_a_slow_network_costs_time_only(ask: Ask, protocol: str, link: Link) -> None:
    async with served() as server:
        with FaultyNetwork(parse_url(server.urls[protocol]).port, to_client=link, to_server=link) as network:
            answer = await asyncio.to_thread(ask, protocol, network.port, 60.0)

    assert np.array_equal(answer, ROWS)


@clients
@protocols
@pytest.mark.parametrize("fault", ["cut", "silent"])
@pytest.mark.parametrize("direction", ["to_server", "to_client"])
async def test_a_broken_connection_costs_its_request_which_is_not_executed_twice(
    ask: Ask, protocol: str, direction: str, fault: str
) -> None:
    limit_s = 0.5 if fault == "silent" else 60.0
    async with served() as server:
        port = parse_url(server.urls[protocol]).port
        with FaultyNetwork(port) as network:
            setattr(network, direction, broken(1000)[fault])
            with pytest.raises(Exception, match=SAYS[fault]):
                await asyncio.to_thread(ask, protocol, network.port, limit_s)
            executed = len(server.engine.tickets)
        answer = await asyncio.to_thread(ask, protocol, port, 60.0)

    assert executed <= (direction == "to_client")
    assert np.array_equal(answer, ROWS)
