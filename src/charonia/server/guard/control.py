"""How commands of this machine reach a running server: an abstract socket, named by its process id.

A client sends one line of JSON and gets lines of JSON until the server closes the connection. The kernel reports the
peer's user: users reach their own servers, root reaches all.

Over a second such socket, a server that starts beside another one gets copies of its listening sockets, and both accept
from them. The guard gives them to processes of its user and of root. No process may shut such a socket down: that would
end it for all. A process that accepts no more connections closes its copy.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path

from charonia.core.errors import invalid, not_found, unavailable

_log = logging.getLogger(__name__)

PREFIX = "charonia-server-"

LINE_BYTES_MAX = 2**20

_NAME = re.compile(rf"@{PREFIX}([0-9]+)$", re.M)

Message = Mapping[str, object]
"""A JSON object."""


async def serve_control(pid: int, answer: Callable[[Message], AsyncIterator[Message]]) -> asyncio.Server:
    """Listen for commands."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError), contextlib.closing(writer):
            if user_of(writer.get_extra_info("socket")) not in (0, os.getuid()):
                return
            asked = json.loads(await reader.readline())
            async for message in answer(asked):
                writer.write(json.dumps(message).encode() + b"\n")
                with contextlib.suppress(OSError):  # a client that leaves does not stop its command
                    await writer.drain()

    return await asyncio.start_unix_server(talk, path=f"\0{PREFIX}{pid}", limit=LINE_BYTES_MAX)


def running_servers(sockets: Path = Path("/proc/net/unix")) -> list[int]:
    try:
        return sorted(map(int, _NAME.findall(sockets.read_text(encoding="ascii", errors="replace"))))
    except OSError:
        return []


def command(pid: int, asked: Message) -> Iterator[Message]:
    """Send a command to a server and yield its answers.

    Raises:
        ServingError: NOT_FOUND when no such server listens; UNAVAILABLE when it refuses, or has gone.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(f"\0{PREFIX}{pid}")
        except OSError as error:
            raise not_found(f"process {pid} is not a server that accepts commands") from error
        if os.getuid() not in (0, user_of(sock)):
            raise unavailable(f"server {pid} belongs to another user", hint="run the command as that user, or as root")
        sock.sendall(json.dumps(asked).encode() + b"\n")
        lines = 0
        with sock.makefile("rb") as answers:
            while line := answers.readline(LINE_BYTES_MAX):
                lines += 1
                try:
                    answer = json.loads(line)
                except ValueError:
                    raise unavailable(f"server {pid} has sent a line that is not JSON") from None
                yield answer
    if not lines:
        raise unavailable(f"server {pid} has closed the connection")


def user_of(sock: socket.socket) -> int:
    """Return the user at the other end."""
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(user)


SOCKETS_PREFIX = "charonia-sockets-"

CONNECTED = "CHARONIA_BESIDE_SOCKET"
"""Environment variable with a descriptor that is connected to the other server, for a process that cannot connect."""

SOCKETS_MAX = 253
"""Most descriptors that the system passes in one message (SCM_MAX_FD)."""

ANSWER_S_MAX = 10.0

_LABELS_BYTES_MAX = 2**16

EndpointSockets = Mapping[str, Sequence[socket.socket]]
"""The listening sockets of a front end by endpoint: "http", "grpc"."""


def offer_sockets(pid: int, front_ends: Sequence[EndpointSockets]) -> Callable[[], None]:
    """Give copies of listening sockets to processes that connect, on the event loop; returns a function that stops it.

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
        with contextlib.suppress(OSError):  # the client is gone
            asking, _ = listener.accept()
            with asking:
                if user_of(asking) in (0, os.getuid()):
                    asking.setblocking(False)
                    socket.send_fds(asking, [labels], [sock.fileno() for _, _, sock in named])

    def close() -> None:
        loop.remove_reader(listener)
        listener.close()

    try:
        listener.bind(f"\0{SOCKETS_PREFIX}{pid}")
        listener.listen()
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    loop.add_reader(listener, give)
    return close


def copied_sockets(pid: int) -> list[dict[str, list[socket.socket]]]:
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
                asking.connect(f"\0{SOCKETS_PREFIX}{pid}")
        except OSError as error:
            raise not_found(
                f"--beside: process {pid} is not a server that shares its listening sockets",
                hint="it has not started yet, has exited, or was started without --replica-port",
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
