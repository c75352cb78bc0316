"""The end of a front end: clients have time to take their answers for as long as they take something.

How much a client has not taken is what waits in the server, and what the system still keeps because the other side has
not confirmed it: of a large answer over a slow link the last megabytes are there, and the transport knows nothing of
them.

What is said when an address cannot be listened on.
"""

import asyncio
import errno
import logging
import os
import socket
import struct
import sys
from collections.abc import Set
from typing import Protocol

from charonia.core.errors import ServingError, unavailable

_HINTS = {
    errno.EADDRINUSE: "another program listens there; --http-port, --grpc-port and --metrics-port take other ports",
    errno.EACCES: "ports below 1024 may need a privilege",
    errno.EADDRNOTAVAIL: "no network interface of this machine has that address; 0.0.0.0 stands for all of them",
}


def cannot_listen(host: str, port: int, error: OSError) -> ServingError:
    """Return the UNAVAILABLE error for `error`, which listening on `host` and `port` has met.

    The event loops put the address and a sentence of their own into the text of the error, so the system's is asked.
    """
    if isinstance(error, socket.gaierror) or not error.errno:
        reason = error.strerror or str(error)
    else:
        reason = os.strerror(error.errno)
    return unavailable(f"cannot listen on {host}:{port}: {reason}", hint=_HINTS.get(error.errno or 0, ""))


_log = logging.getLogger(__name__)

GRACE_S = 2.0
"""Time that a client of a server which stops may take nothing; then it is given up."""

LOOK_S = 0.02
"""How often connections are looked at."""


class Leaving(Protocol):
    """A connection of a front end that stops."""

    def untaken(self) -> tuple[int, int]:
        """Return how many bytes the client has not taken, and how often it was heard of since the last one was sent."""
        ...

    def wind_down(self) -> None:
        """End as soon as the client has what it waits for."""
        ...

    def abort(self) -> None:
        """Close now."""
        ...


async def drain(connections: Set[Leaving], timeout_s: float) -> bool:
    """Wait until all connections have ended. One whose client does nothing for `GRACE_S` is closed.

    Looks are counted rather than time, so that a pause of the whole machine is held against nobody.

    Args:
        connections: The front end's own set: whoever ends leaves it.
        timeout_s: Time after which those that are left are closed, too.

    Returns:
        Whether nobody was still taking an answer when time was up.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    seen: dict[Leaving, tuple[tuple[int, int], int]] = {}
    given_up = cut_off = 0
    while connections:
        is_over = loop.time() >= end_s
        now: dict[Leaving, tuple[tuple[int, int], int]] = {}
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
        _log.warning("%d connections are closed though their clients have not taken all of their answers", given_up)
    return not cut_off


def unsent_bytes(transport: asyncio.WriteTransport) -> int:
    """Return how much of what was written the client's side has not confirmed; without Linux, has not been sent."""
    size = transport.get_write_buffer_size()
    if sys.platform == "linux":
        import fcntl  # not on Windows
        import termios

        connection = transport.get_extra_info("socket")
        if connection is not None:
            try:
                size += struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
            except (OSError, ValueError):  # it was closed just now
                return size
    return size
