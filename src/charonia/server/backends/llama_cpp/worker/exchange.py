"""Requests to llama.cpp's server, which listens on a Unix socket of this process."""

import asyncio
from collections.abc import Callable
from typing import Any

OK = 200

_HEAD_END = b"\r\n\r\n"
_EVENT_END = b"\n\n"


class ExchangeError(Exception):
    """The server has closed the connection before the end of its answer."""


async def ask(path: str, route: str, body: bytes, on_event: Callable[[bytes], None] | None = None) -> tuple[int, bytes]:
    """Send a request and return the status and the body of its answer. When cancelled, the server ends its work on it.

    Args:
        path: The socket.
        route: Path of the request.
        body: JSON; b"" to get the route.
        on_event: Called with each server-sent event of a good answer, without its end; the body is then empty.

    Raises:
        OSError: Nobody listens there.
        ExchangeError: There is no whole answer.
    """
    loop = asyncio.get_running_loop()
    head = f"{'POST' if body else 'GET'} {route} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += "Content-Type: application/json\r\n"
    transport, answer = await loop.create_unix_connection(lambda: _Answer(on_event), path)
    try:
        transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return await answer.done
    finally:
        transport.abort()


class _Answer(asyncio.Protocol):
    """Receives an answer."""

    def __init__(self, on_event: Callable[[bytes], None] | None) -> None:
        self.done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._on_event = on_event
        self._received = b""
        self._body = b""
        self._status = 0
        self._length = -1  # of the body, -1 while the head is missing or the body comes in chunks
        self._is_chunked = False

    def data_received(self, data: bytes) -> None:
        if self.done.done():
            return
        self._received += data
        try:
            if self._status or self._take_head():
                self._take_body()
        except Exception as error:
            self._end(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(ExchangeError(f"llama.cpp closed the connection{f': {error}' if error is not None else ''}"))

    def _take_head(self) -> bool:
        head, end, rest = self._received.partition(_HEAD_END)
        if not end:
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        fields: dict[str, Any] = {}
        for line in lines:
            name, _, value = line.partition(":")
            fields[name.lower()] = value.strip()
        self._is_chunked = fields.get("transfer-encoding") == "chunked"
        self._length = int(fields.get("content-length", 0))
        self._status = int(first.split()[1])
        if self._status != OK or not fields.get("content-type", "").startswith("text/event-stream"):
            self._on_event = None
        self._received = rest
        return True

    def _take_body(self) -> None:
        is_last = False
        if self._is_chunked:
            received, start = self._received, 0
            while not is_last:
                line_end = received.find(b"\r\n", start)
                if line_end < 0:
                    break
                size = int(received[start:line_end], 16)
                end = line_end + 2 + size
                if len(received) < end + 2:
                    break
                self._body += received[line_end + 2 : end]
                start = end + 2
                is_last = size == 0
            self._received = received[start:]
        else:
            self._body += self._received
            self._received = b""
            is_last = len(self._body) >= self._length
        if self._on_event is not None:
            *events, self._body = self._body.split(_EVENT_END)
            for event in events:
                if event.strip() and not event.startswith(b":"):  # a comment keeps the connection alive
                    self._on_event(event.lstrip(b"\n"))
        if is_last and not self.done.done():
            self.done.set_result((self._status, self._body))

    def _end(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
