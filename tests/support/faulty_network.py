"""A network between a client and a server on this machine: slow, silent, or cut in the middle of a message."""

import asyncio
import ctypes
import random
import socket
import ssl
import struct
import threading
from contextlib import closing, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

READ_BYTES = 65536
_SO_ATTACH_FILTER = 26
_RETURN = 0x06


@dataclass(frozen=True)
class Link:
    """One direction of a connection.

    Attributes:
        delay_s: Delay of each piece.
        jitter_s: Random delay in addition, at most this.
        bytes_per_s: Bandwidth, 0 for no limit.
        piece_bytes: Size of the pieces that are written, each of them by itself.
        passes: Bytes of a connection that pass, None for all of them.
        is_cut: Whether the connection ends after them; if not, the rest is swallowed.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = 0.0
    piece_bytes: int = READ_BYTES
    passes: int | None = None
    is_cut: bool = False


SLOW = {
    "delay and jitter": Link(delay_s=0.002, jitter_s=0.004),
    "bandwidth": Link(bytes_per_s=100_000.0, piece_bytes=1000),
    "one-byte writes": Link(piece_bytes=1),
}
SILENT = Link(passes=0)


def broken(passes: int) -> dict[str, Link]:
    """Return links that let so many bytes pass, which should be the beginning of a message."""
    return {"cut": Link(passes=passes, is_cut=True), "silent": Link(passes=passes)}


class FaultyNetwork:
    """Passes connections on to a port of this machine, in a thread. Links may change while connections are open.

    Args:
        port: The port of the server.
        to_client: How bytes travel to the client.
        to_server: How they travel to the server.
        tls: Clients speak TLS with this context, the server plain text.

    Attributes:
        port: The port that clients connect to.
        clients: The sockets of their connections, open and closed.
    """

    def __init__(
        self, port: int, to_client: Link = Link(), to_server: Link = Link(), tls: ssl.SSLContext | None = None
    ) -> None:
        self.port = 0
        self.clients: list[socket.socket] = []
        self._transports: list[asyncio.WriteTransport] = []
        self.to_client, self.to_server = to_client, to_server
        self._target, self._tls = port, tls
        self._random = random.Random(0)
        self._loop = asyncio.new_event_loop()
        self._is_up, self._is_over = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))

    def __enter__(self) -> Self:
        self._thread.start()
        self._is_up.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join()
        self._loop.close()

    def lose_clients(self) -> None:
        """Let the system drop all data of the connected clients from now on without acknowledgement (Linux)."""
        drop_all = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))
        program = struct.pack("HL", 1, ctypes.addressof(drop_all))
        for client in self.clients:
            client.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
        self.clients.clear()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=self._tls)
        self.port = server.sockets[0].getsockname()[1]
        self._is_up.set()
        await self._is_over.wait()
        server.close()
        await asyncio.sleep(0)  # what was accepted becomes a connection
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for transport in self._transports:  # closing waits for clients to read what is written
            transport.abort()
        await asyncio.sleep(0)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.clients.append(writer.get_extra_info("socket"))
        self._transports.append(writer.transport)
        with suppress(OSError, asyncio.CancelledError), closing(writer):
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
            self._transports.append(back.transport)
            with closing(back):
                ways = [self._pass(reader, back, "to_server"), self._pass(there, writer, "to_client")]
                tasks = [asyncio.create_task(way) for way in ways]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    task.cancel()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str) -> None:
        passed = 0
        with suppress(OSError):
            while data := memoryview(await reader.read(READ_BYTES)):
                while data:
                    link: Link = getattr(self, direction)
                    piece, data = data[: link.piece_bytes], data[link.piece_bytes :]
                    if link.passes is not None:
                        piece = piece[: max(link.passes - passed, 0)]
                    passed += len(piece)
                    transfer_s = len(piece) / link.bytes_per_s if link.bytes_per_s else 0.0
                    await asyncio.sleep(link.delay_s + link.jitter_s * self._random.random() + transfer_s)
                    writer.write(bytes(piece))
                    await writer.drain()
                    if link.is_cut and link.passes is not None and passed >= link.passes:
                        return
