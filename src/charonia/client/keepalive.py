"""Noticing that the network has lost a connection without a word, as a NAT does that forgets it.

The system does this: TCP asks the other end whether it is there (keepalive), and gives up what was sent and is not
confirmed in time (user timeout). It does so for HTTP/1.1 as for HTTP/2, costs a request nothing, and the other end's
system answers, also while the server computes. Pings of HTTP/2 would find out the same; but servers of gRPC end
connections on which they come more often than every five minutes without data (GOAWAY, `too_many_pings`), by which time
most requests have been given up.
"""

import asyncio
import errno
import math
import socket
from contextlib import suppress

from charonia.client.endpoint import Endpoint
from charonia.core.errors import invalid

KEEPALIVE_S_MAX = 32_767
"""Longest time that can be given: the system's limit."""

PROBES = 4
"""How often the other end is asked before the connection is given up, as a packet may be lost on the way."""

_UNREACHABLE = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN})
_HINT = (
    "a NAT, a firewall or a load balancer may have forgotten it: a shorter keepalive_time_s keeps it in use; the next "
    "request makes a new connection"
)


class Keepalive:
    """Has the system watch connections.

    Args:
        time_s: Silence after which the other end is asked, in seconds; 0 to leave connections as they are.
        timeout_s: Time for its answer, in seconds.

    Raises:
        ServingError: INVALID_ARG for times that the system cannot keep.
    """

    def __init__(self, time_s: float, timeout_s: float) -> None:
        if not 0 <= time_s <= KEEPALIVE_S_MAX:
            raise invalid(f"keepalive_time_s: expected 0 to {KEEPALIVE_S_MAX} seconds, got {time_s:g}")
        if not 0 < timeout_s <= KEEPALIVE_S_MAX:
            raise invalid(
                f"keepalive_timeout_s: expected more than 0 and at most {KEEPALIVE_S_MAX} seconds, got {timeout_s:g}",
                hint="keepalive_time_s=0 turns keepalive off",
            )
        self._options = _socket_options(math.ceil(time_s), math.ceil(timeout_s)) if time_s else []

    def watch(self, transport: asyncio.BaseTransport) -> None:
        """Have the system watch a new connection."""
        connection = transport.get_extra_info("socket")
        with suppress(OSError):  # it is lost already, and is told of that next
            for level, option, value in self._options:
                connection.setsockopt(level, option, value)


def loss(endpoint: Endpoint, error: Exception | None, progress: str) -> str:
    """Return what happened to a connection that is gone.

    Args:
        endpoint: The server.
        error: What the transport says.
        progress: How far the answer had come.
    """
    if isinstance(error, OSError) and error.errno in _UNREACHABLE:
        return f"the connection to {endpoint} was lost {progress}: nothing reaches the server any more (hint: {_HINT})"
    return f"{endpoint} closed the connection {progress}"


def _socket_options(time_s: int, timeout_s: int) -> list[tuple[int, int, int]]:
    values = {
        "TCP_KEEPIDLE": time_s,
        "TCP_KEEPALIVE": time_s,  # the same by its name on macOS
        "TCP_KEEPINTVL": max(1, timeout_s // PROBES),
        "TCP_KEEPCNT": PROBES,
        # What is not confirmed counts, too: while there is any, nobody is asked. Where this is set it also ends the
        # asking, so it must not be shorter than silence and asking together.
        "TCP_USER_TIMEOUT": 1000 * (time_s + timeout_s),
    }
    known = [(getattr(socket, name), value) for name, value in values.items() if hasattr(socket, name)]
    return [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        *((socket.IPPROTO_TCP, option, value) for option, value in known),
    ]
