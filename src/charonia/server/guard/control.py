"""How commands of this machine reach a running server: an abstract socket, whose name has the number of its process.

A client sends one line of JSON and gets lines of JSON until the server closes the connection. The system tells who is
at the other end: users reach their own servers, and root those of everybody.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

from charonia.core.errors import not_found, unavailable

_log = logging.getLogger(__name__)

PREFIX = "charonia-server-"

LINE_BYTES_MAX = 2**20

_NAME = re.compile(rf"@{PREFIX}([0-9]+)$", re.M)

Message = Mapping[str, object]
"""A JSON object."""


async def serve_control(pid: int, answer: Callable[[Message], AsyncIterator[Message]]) -> asyncio.Server:
    """Listen for commands.

    Args:
        pid: Number of this process.
        answer: Yields the answers to a command.
    """

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError), contextlib.closing(writer):
            if user_of(writer.get_extra_info("socket")) not in (0, os.getuid()):
                return
            asked = json.loads(await reader.readline())
            async for message in answer(asked):
                writer.write(json.dumps(message).encode() + b"\n")
                with contextlib.suppress(OSError):  # a client that leaves does not end what it has begun
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
            raise not_found(f"process {pid} is no server that takes commands") from error
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
