"""Addresses that a server listens on."""

import asyncio
import socket
from contextlib import ExitStack

import pytest
from tests.support.ports import free_port

from charonia.core.errors import ServingError
from charonia.server.front_ends.processes import bound_sockets
from charonia.server.listening import check_address, listen

FAMILIES = [("127.0.0.1", socket.AF_INET)]
if socket.has_ipv6:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
            FAMILIES.append(("::1", socket.AF_INET6))
        except OSError:
            pass


@pytest.mark.parametrize("host", ["*", "0.0.0.0"])
def test_a_star_is_every_address_of_both_families(host: str) -> None:
    async def scenario() -> list[str]:
        port = free_port()
        await check_address(host, port)
        servers = await listen(asyncio.Protocol, host, port)
        reached = []
        for address, _ in FAMILIES:
            try:
                _, writer = await asyncio.open_connection(address, port)
            except OSError:
                continue
            reached.append(address)
            writer.close()
        for server in servers:
            server.close()
        return reached

    expected = [address for address, _ in FAMILIES] if host == "*" else ["127.0.0.1"]
    assert asyncio.run(scenario()) == expected


def test_front_ends_get_sockets_of_both_families() -> None:

    async def scenario() -> set[int]:
        with ExitStack() as stack:
            bound = await bound_sockets("*", 0, 2, stack)
            return {sock.family for sockets in bound for sock in sockets}

    assert asyncio.run(scenario()) >= {family for _, family in FAMILIES}


async def test_an_address_belongs_to_the_first_server_before_it_listens() -> None:
    port = free_port()
    with ExitStack() as first, ExitStack() as second:
        await bound_sockets("127.0.0.1", port, 2, first)
        with pytest.raises(ServingError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            await bound_sockets("127.0.0.1", port, 2, second)
        first.close()
        await bound_sockets("127.0.0.1", port, 2, second)
