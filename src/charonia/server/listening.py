"""The start and the end of a front end: listening, and the drain of connections when it stops or hands on.

At shutdown a client keeps its connection while it makes progress with its answers. The bytes that it has not taken are
those in the transport's buffer and those in the kernel's send queue, which the peer has not acknowledged: over a slow
link, the last megabytes of a large answer are there, and the transport does not know of them.

A front end hands on when another process has its listening sockets: it serves the connections that it has until their
clients leave. HTTP/1.1 clients learn it from their next response. A request sent while its connection is being closed
would be lost, so only quiet connections are closed. With an exit delay, a server that stops does the same before it
refuses requests, and still accepts connections: some clients learn late.
"""

import asyncio
import errno
import fcntl
import logging
import os
import socket
import ssl as tls
import struct
import sys
import termios
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Protocol, TypeVar, cast

from charonia.core.errors import ServingError, unavailable

_log = logging.getLogger(__name__)

BACKLOG = 1024
"""Connections that may wait to be accepted."""

QUIET_S = 2.0
"""Time without a request after which a front end that hands on closes a connection over HTTP/1.1, and time in which it
still accepts calls over HTTP/2."""

GRACE_S = 2.0
"""Time without progress after which a client is cut off at shutdown."""

LOOK_S = 0.02
"""Pause between two checks of the connections."""

_HINTS = {
    errno.EADDRINUSE: "another program listens there; --port 9000 takes ports 9000 to 9002, and --http-port, "
    "--grpc-port and --metrics-port set one each",
    errno.EACCES: "ports below 1024 may need a privilege",
    errno.EADDRNOTAVAIL: "no network interface of this machine has that address; 0.0.0.0 stands for all of them",
}


def cannot_listen(host: str, port: int, error: OSError) -> ServingError:
    """Return the UNAVAILABLE error for an `error` of listening on `host` and `port`.

    Event loops add the address and a sentence to the text of the error, so the system's text is used.
    """
    if isinstance(error, socket.gaierror) or not error.errno:
        reason = error.strerror or str(error)
    else:
        reason = os.strerror(error.errno)
    return unavailable(f"cannot listen on {host}:{port}: {reason}", hint=_HINTS.get(error.errno or 0, ""))


def every(host: str) -> str | None:
    """Return an address as asyncio and the resolver take it: None for "*", all IPv4 and IPv6 addresses."""
    return None if host in ("", "*") else host


async def check_address(host: str, port: int, *, reuse_port: bool = False) -> None:
    """Check that a server could listen on an address now.

    Raises:
        ServingError: UNAVAILABLE when it could not.
    """
    loop = asyncio.get_running_loop()
    try:
        # Bound and closed again: nothing can connect before the server is ready.
        (
            await loop.create_server(asyncio.Protocol, every(host), port, reuse_port=reuse_port, start_serving=False)
        ).close()
    except OSError as error:
        raise cannot_listen(host, port, error) from error


async def listen(
    connect: Callable[[], asyncio.BaseProtocol],
    host: str,
    port: int,
    *,
    ssl: tls.SSLContext | None = None,
    reuse_port: bool = False,
    descriptors: Sequence[int] = (),
) -> list[asyncio.AbstractServer]:
    """Listen; `port` 0 takes a free one.

    Args:
        connect: Returns the protocol of a new connection.
        host: Address to listen on.
        ssl: TLS.
        reuse_port: Whether several processes may listen on the port.
        descriptors: Bound sockets to listen on in place of `host` and `port`. They are closed with the servers.

    Raises:
        ServingError: UNAVAILABLE when the address is not available.
    """
    create = partial(asyncio.get_running_loop().create_server, connect, ssl=ssl, backlog=BACKLOG)
    try:
        if descriptors:
            return [await create(sock=socket.socket(fileno=descriptor)) for descriptor in descriptors]
        return [await create(every(host), port, reuse_port=reuse_port)]
    except OSError as error:
        raise cannot_listen(host, port, error) from error


def port_of(server: asyncio.AbstractServer) -> int:
    """Return the port of a server."""
    port: int = cast(asyncio.Server, server).sockets[0].getsockname()[1]
    return port


class DrainingConnection(Protocol):
    """A connection of a front end that stops or hands on."""

    def untaken(self) -> tuple[int, int]:
        """Return how many bytes the client has not taken, and a count of its messages since the last byte was sent."""

    def wind_down(self) -> None:
        """Close as soon as the client has its answers."""

    def abort(self) -> None: ...


L = TypeVar("L", bound=DrainingConnection)


async def drain_gradually(
    connections: Set[L],
    ask_to_close: Callable[[L], int | None],
    quiet_s: float,
    timeout_s: float,
    *,
    least_s: float = QUIET_S,
) -> None:
    """Serve the connections until all have ended, or until a limit. Asks the clients of quiet ones to leave.

    Checks are counted as in `drain`.

    Args:
        connections: The front end's own set.
        ask_to_close: Asks the client of a connection to leave, again and again. Returns a count that grows with each
            use of the connection, None while something is in flight.
        quiet_s: Time without a use after which a connection is quiet.
        timeout_s: The limit.
        least_s: Time that it takes even without connections: one may be accepted and not be known yet.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    seen: dict[L, tuple[int | None, int]] = {}
    looks = 0
    while (connections or looks * LOOK_S < least_s) and loop.time() < end_s:
        looks += 1
        now: dict[L, tuple[int | None, int]] = {}
        for connection in list(connections):
            uses = ask_to_close(connection)
            before, quiet = seen.get(connection, (None, 0))
            quiet = quiet + 1 if uses is not None and uses == before else 0
            now[connection] = uses, quiet
            if quiet * LOOK_S >= quiet_s:
                connection.wind_down()
        seen = now
        await asyncio.sleep(LOOK_S)


async def drain(connections: Set[DrainingConnection], timeout_s: float) -> bool:
    """Wait until all connections have ended. A connection without progress for `GRACE_S` is closed.

    Checks are counted rather than time, so that a pause of the whole machine does not count against the clients.

    Args:
        connections: The front end's own set: a connection that ends leaves it.
        timeout_s: Time after which the remaining connections are closed, too.

    Returns:
        False if a client was still taking an answer at the timeout.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    seen: dict[DrainingConnection, tuple[tuple[int, int], int]] = {}
    given_up = cut_off = 0
    while connections:
        is_over = loop.time() >= end_s
        now: dict[DrainingConnection, tuple[tuple[int, int], int]] = {}
        for connection in list(connections):
            untaken = connection.untaken()
            before, looks = seen.get(connection, (untaken, -1))
            looks = looks + 1 if untaken == before else 0
            now[connection] = untaken, looks
            if is_over or looks * LOOK_S >= GRACE_S:
                given_up += untaken[0] > 0
                cut_off += is_over and untaken[0] > 0
                connection.abort()
            elif not untaken[0]:
                connection.wind_down()
        if is_over:
            break
        seen = now
        await asyncio.sleep(LOOK_S)
    if given_up:
        _log.warning("closing connections whose clients have not read all answers: %d", given_up)
    return not cut_off


def unsent_bytes(transport: asyncio.WriteTransport) -> int:
    """Return the written bytes that the peer has not acknowledged; on other systems than Linux, those not sent."""
    size = transport.get_write_buffer_size()
    if sys.platform == "linux":
        connection = transport.get_extra_info("socket")
        if connection is not None:
            try:
                size += struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
            except (OSError, ValueError):  # just closed
                return size
    return size
