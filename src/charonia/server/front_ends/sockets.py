"""The listening sockets of a server of several processes.

The process that starts the others binds them, and the others inherit them and listen. So the sockets stay when a
process ends, with the connections that none has accepted yet.
"""

import asyncio
import socket
from contextlib import ExitStack
from typing import Any

from charonia.server.listening import cannot_listen

Address = tuple[int, Any]
"""Family and address as the system writes it: host, port, and what a family has more."""


async def bound_sockets(host: str, port: int, count: int, stack: ExitStack) -> list[tuple[socket.socket, ...]]:
    """Bind the sockets of an endpoint.

    Args:
        host: The address, or a name, which may stand for several.
        port: The port, 0 for any free one.
        count: Number of the processes that listen.
        stack: Closes the sockets.

    Returns:
        The sockets of each process: its own ones, among which the kernel distributes connections, or the same for all
        where the system does not let several sockets share a port.

    Raises:
        ServingError: UNAVAILABLE when the address is not available.
    """
    can_share = hasattr(socket, "SO_REUSEPORT")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            *(host or None, port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        addresses: list[Address] = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
        # A socket that listens again after a shutdown keeps its port only if it was bound to this port by number.
        with _bound(addresses[0], port) as first:
            number = first.getsockname()[1]
            if not can_share:
                first.close()
            bound = [
                tuple(stack.enter_context(_bound(address, number)) for address in addresses)
                for _ in range(count if can_share else 1)
            ]
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    return bound if can_share else bound * count


def _bound(address: Address, port: int) -> socket.socket:
    family, (host, _, *more) = address
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port, *more))
    except OSError:
        sock.close()
        raise
    return sock
