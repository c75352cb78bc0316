"""How a server that starts beside another one gets copies of its listening sockets, and both accept from them.

The guard gives them to processes of its user, and of root, that connect to an abstract socket, whose name has the
number of its process. Nobody may shut such a socket down: that would end it for all. A process that accepts nothing
more closes its copy.
"""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence

from charonia.core.errors import invalid, not_found, unavailable
from charonia.server.guard.control import user_of

PREFIX = "charonia-sockets-"

CONNECTED = "CHARONIA_BESIDE_SOCKET"
"""Environment variable with a descriptor that is connected to the other server, for a process that cannot connect."""

SOCKETS_MAX = 253
"""Most descriptors that the system passes in one message (SCM_MAX_FD)."""

ANSWER_S_MAX = 10.0

_LABELS_BYTES_MAX = 2**16

EndpointSockets = Mapping[str, Sequence[socket.socket]]
"""The listening sockets of a front end by endpoint: "http", "grpc"."""


def offer_sockets(pid: int, front_ends: Sequence[EndpointSockets]) -> Callable[[], None]:
    """Give copies of listening sockets to those who ask for them, on the event loop; returns what ends that.

    Args:
        pid: Number of this process.
        front_ends: The sockets of each front end.

    Raises:
        OSError: A process of the same number does so already.
        ServingError: INVALID_ARG where there are too many sockets.
    """
    named = [(number, *one) for number, each in enumerate(front_ends) for one in _flat(each)]
    if len(named) > SOCKETS_MAX:
        raise invalid(f"--replica-port: expected at most {SOCKETS_MAX} listening sockets, got {len(named)}")
    labels = json.dumps([(number, endpoint) for number, endpoint, _ in named]).encode()
    loop, listener = asyncio.get_running_loop(), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def give() -> None:
        with contextlib.suppress(OSError):  # whoever has asked is gone
            asking, _ = listener.accept()
            with asking:
                if user_of(asking) in (0, os.getuid()):
                    asking.setblocking(False)
                    socket.send_fds(asking, [labels], [sock.fileno() for _, _, sock in named])

    def close() -> None:
        loop.remove_reader(listener)
        listener.close()

    try:
        listener.bind(f"\0{PREFIX}{pid}")
        listener.listen()
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    loop.add_reader(listener, give)
    return close


def sockets_beside(pid: int) -> list[dict[str, list[socket.socket]]]:
    """Return copies of the listening sockets of another server, of each of its front ends.

    Raises:
        ServingError: NOT_FOUND where no such server gives sockets; UNAVAILABLE where it belongs to another user, or
            does not answer.
    """
    connected = int(os.environ[CONNECTED]) if CONNECTED in os.environ else None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=connected) as asking:
        asking.settimeout(ANSWER_S_MAX)
        try:
            if CONNECTED not in os.environ:
                asking.connect(f"\0{PREFIX}{pid}")
        except OSError as error:
            raise not_found(
                f"--beside: process {pid} is no server that shares its listening sockets",
                hint="it has not started yet, has ended, or was started without --replica-port",
            ) from error
        if os.getuid() not in (0, user_of(asking)):
            raise unavailable(f"--beside: server {pid} belongs to another user")
        try:
            labels, descriptors, _, _ = socket.recv_fds(asking, _LABELS_BYTES_MAX, SOCKETS_MAX)
        except OSError as error:
            raise unavailable(f"--beside: server {pid} does not answer: {error}") from error
    found: dict[int, dict[str, list[socket.socket]]] = {}
    sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    if not sockets:
        raise unavailable(f"--beside: server {pid} has given no sockets")
    for (number, endpoint), sock in zip(json.loads(labels), sockets, strict=True):
        found.setdefault(number, {}).setdefault(endpoint, []).append(sock)
    return [found[number] for number in sorted(found)]


def _flat(sockets: EndpointSockets) -> list[tuple[str, socket.socket]]:
    return [(endpoint, sock) for endpoint, each in sockets.items() for sock in each]
