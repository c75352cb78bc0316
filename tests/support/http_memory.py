"""An HTTP/1.1 client that talks to an endpoint's connection in memory: no socket, every byte in the test's hands."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import httptools

from charonia.server.http.connection import CallbackQueue
from charonia.server.http.frontend import HttpEndpoint

_DUE: WeakKeyDictionary[HttpEndpoint, list[Callable[[], None]]] = WeakKeyDictionary()
"""What the connections of an endpoint want to be called for in the next round of the event loop."""


@dataclass
class Response:
    """A response as received.

    Attributes:
        headers: Header fields by lower-case name.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class MemoryTransport(asyncio.Transport):
    """What a connection writes to.

    Attributes:
        is_blocked: Whether what is written stays in the transport's buffer, as of a client that does not read.
        is_closed: Whether the connection was closed from the server's side.
        is_half_closed: Whether the server has ended its sending side.
        is_paused: Whether the connection wants no more bytes.
        peername: Address and port of the client, None for none.
    """

    def __init__(self, client: "MemoryClient") -> None:
        super().__init__()
        self.peername: tuple[str, int] | None = None
        self.client = client
        self.is_blocked = False
        self.is_closed = False
        self.is_half_closed = False
        self.is_paused = False
        self.pending = bytearray()

    def get_extra_info(self, name: str, default: object = None) -> object:
        """Return the client's address where it is asked for."""
        return self.peername if name == "peername" else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.is_blocked:
            if not self.pending:
                self.client.connection.pause_writing()
            self.pending += data
        else:
            self.client.take(bytes(data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Ignore: the test decides when writing pauses."""

    def unblock(self) -> None:
        """Let the client read again."""
        self.is_blocked = False
        if self.pending:
            data, self.pending = bytes(self.pending), bytearray()
            self.client.take(data)
            self.client.connection.resume_writing()

    def let_through(self, size: int) -> None:
        """Let the client read so many bytes of what waits, and block again."""
        data = bytes(self.pending[:size])
        del self.pending[:size]
        self.client.take(data)
        if not self.pending:
            self.client.connection.resume_writing()

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that the client has not taken."""
        return len(self.pending)

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False
        self.client.feed()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.is_half_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        """Close; the connection learns of it when the client does (`MemoryClient.leave`)."""
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True


class MemoryClient:
    """A connected client.

    Attributes:
        responses: Complete responses, in order.
        waits_for_rounds: Whether what is due in the next round of the event loop waits for `run_round`.
    """

    def __init__(self, endpoint: HttpEndpoint, peername: tuple[str, int] | None = None) -> None:
        """Connect."""
        self.received = b""
        self.responses: list[Response] = []
        self._current = Response()
        self._held = b""
        self._is_feeding = False
        if endpoint not in _DUE:
            _DUE[endpoint] = []
            endpoint.shared.callbacks = CallbackQueue(_DUE[endpoint].append)
        self._due = _DUE[endpoint]
        self.waits_for_rounds = False
        self._parser = httptools.HttpResponseParser(self)
        self.connection = endpoint.connect()
        self.transport = MemoryTransport(self)
        self.transport.peername = peername
        self.connection.connection_made(self.transport)

    def send(self, data: bytes, piece: int = 0) -> list[Response]:
        """Send bytes, in pieces of a size where it is not 0, and return all responses so far."""
        if not piece:
            self._held += data
            self.feed()
            return self.responses
        for start in range(0, len(data), piece):
            self._held += data[start : start + piece]
            self.feed()
        return self.responses

    def feed(self) -> None:
        """Hand over what was sent, as far as the connection wants it."""
        if self._is_feeding:
            return
        self._is_feeding = True
        while self._held and not self.transport.is_paused and not self.transport.is_closed:
            buffer = self.connection.get_buffer(-1)
            size = min(len(buffer), len(self._held))
            buffer[:size] = self._held[:size]
            self._held = self._held[size:]
            self.connection.buffer_updated(size)
            while self._due and not self.waits_for_rounds:
                self.run_round()
        self._is_feeding = False

    def run_round(self) -> None:
        """Do what is due on all connections of the endpoint in the next round of the event loop."""
        due = self._due[:]
        self._due.clear()
        for callback in due:
            callback()

    def leave(self) -> None:
        """Close the connection from the client's side, or take note that the server closed it."""
        if not self.transport.is_closed and self.connection.eof_received():
            raise RuntimeError("the connection stays open for a client that has gone")
        self.transport.is_closed = True
        self.connection.connection_lost(None)

    def take(self, data: bytes) -> None:
        """Read what the server wrote.

        Raises:
            HttpParserError: It is not HTTP/1.1.
        """
        self.received += data
        self._parser.feed_data(data)

    # The parser's calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._current.headers[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        self._current.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._current.body += data

    def on_message_complete(self) -> None:
        """The end of a response; interim ones are not kept."""
        if self._current.status >= 200:
            self.responses.append(self._current)
        self._current = Response()


def request(
    url: str, *, method: str = "POST", body: bytes = b"", version: str = "1.1", headers: dict[str, str] | None = None
) -> bytes:
    """Return a request with its Content-Length, which `headers` may override."""
    fields = {"Host": "localhost", "Content-Length": str(len(body))} | (headers or {})
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {url} HTTP/{version}\r\n{lines}\r\n".encode("latin-1") + body
