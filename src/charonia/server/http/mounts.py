"""Applications beside the models: requests below their paths go to the Unix socket of their worker, and back.

The front end has checked host, origin, key and size of a request as of any other. It passes on the request without the
fields of its own connection and of its own keys, and the response as it comes. A WebSocket is passed on as bytes from
its handshake on.

Source: RFC 9110, section 7.6.1 (Connection); RFC 6455, section 4 (opening handshake).
"""

import asyncio
from collections.abc import Mapping, Set
from functools import partial

import httptools

from charonia.core.errors import unavailable
from charonia.server.http.browsers import refuse_foreign
from charonia.server.http.exchange import Exchange, Tasks
from charonia.server.http.routes import Handler, RouteTarget

READ_BYTES = 64 * 1024

UNSENT_BYTES_MAX = 1024 * 1024
"""Bytes of a response that may wait for the client before no more are read from the application."""

UNREAD_BYTES_MAX = 32 * 1024 * 1024
"""Bytes of a WebSocket that may wait for the application; with more, the connection is closed."""

PAUSE_S = 0.01
"""Time between looks at a client that reads slowly."""

_METHODS = (b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS")
_OF_CONNECTION = frozenset(
    {
        b"connection", b"content-length", b"expect", b"keep-alive", b"proxy-authorization", b"proxy-connection", b"te",
        b"trailer", b"transfer-encoding", b"upgrade", b"x-forwarded-for", b"x-forwarded-prefix", b"x-forwarded-proto",
    }
)  # fmt: skip
_NO_BODY = (204, 304)


class Mounts:
    """The applications of a server.

    Args:
        sockets: Their sockets by path, such as "/ui".
        hidden: Header fields that authorize requests here.
        scheme: Scheme of the endpoint, "http" or "https".
        tasks: Runs the tasks that pass requests on.
    """

    def __init__(self, sockets: Mapping[str, str], hidden: Set[bytes], scheme: str, tasks: Tasks) -> None:
        self._sockets = sockets
        self._hidden = _OF_CONNECTION | hidden
        self._scheme = scheme.encode()
        self._tasks = tasks

    def at(self, path: str) -> dict[bytes, Handler]:
        """Return the handlers of a path, none where no application has it."""
        for own in self._sockets:
            if path == own or path.startswith(f"{own}/"):
                return dict.fromkeys(_METHODS, partial(self._pass_on, own))
        return {}

    def _pass_on(self, own: str, exchange: Exchange, target: RouteTarget) -> None:
        request = exchange.request
        url = request.url
        if not url.startswith(b"/"):  # the form for proxies
            url = b"/" + url.partition(b"://")[2].partition(b"/")[2]
        path, mark, query = url.partition(b"?")
        segments = path.split(b"/")[1 + own.count("/") :]
        if not segments and request.method in (b"GET", b"HEAD"):  # so that its relative links are below its path
            exchange.respond(307, [], extra=b"Location: %b/%b%b\r\n" % (own.encode(), mark, query))
            return
        if request.is_upgrade and refuse_foreign(exchange):  # what a WebSocket brings is no secret to its page
            return
        head = self._head(exchange, b"/" + b"/".join(segments) + mark + query)
        self._tasks.start(exchange, _ProxiedRequest(exchange, own, self._sockets[own]).run(head))

    def _head(self, exchange: Exchange, url: bytes) -> bytes:
        request = exchange.request
        proto = b"https" if request.headers.get(b"x-forwarded-proto") == b"https" else self._scheme
        lines = [b"%b %b HTTP/1.1" % (request.method, url)]
        lines += [b"%b: %b" % field for field in request.headers.items() if field[0] not in self._hidden]
        lines += [b"x-forwarded-for: %b" % exchange.peer.name.encode(), b"x-forwarded-proto: %b" % proto]
        if request.is_upgrade:
            lines += [b"connection: upgrade", b"upgrade: websocket"]
        else:
            lines += [b"connection: close", b"content-length: %d" % len(request.body)]
        return b"\r\n".join(lines) + b"\r\n\r\n"


class _ProxiedRequest:
    """The passage of one request."""

    def __init__(self, exchange: Exchange, own: str, socket: str) -> None:
        self._exchange = exchange
        self._own = own
        self._socket = socket
        self._parser = httptools.HttpResponseParser(self)
        self._fields: list[bytes] = []
        self._is_chunked = False
        self._is_over = False
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """End it: the client has gone."""
        if self._task is not None:
            self._task.cancel()

    async def run(self, head: bytes) -> None:
        exchange = self._exchange
        try:
            reader, self._writer = await asyncio.open_unix_connection(self._socket, limit=READ_BYTES)
        except OSError as error:
            raise unavailable(
                f"the application at {self._own} is not running: {error.strerror}",
                hint="the server's log has the reason",
            ) from error
        self._task = asyncio.current_task()
        exchange.ticket = self
        try:
            self._writer.writelines((head, exchange.request.body))
            if exchange.request.is_upgrade:
                exchange.receive = self._receive
                await self._tunnel(reader)
            else:
                await self._answer(reader)
        finally:
            self._writer.transport.abort()

    async def _tunnel(self, reader: asyncio.StreamReader) -> None:
        exchange, head = self._exchange, b""
        while data := await self._read(reader):
            if not exchange.has_begun:  # the status of the handshake, for the access log
                head += data
                status = head[9:12]
                if len(status) == 3:
                    exchange.forward(int(status) if status.isdigit() else 502, head)
            else:
                exchange.send(data)
        exchange.end()

    async def _answer(self, reader: asyncio.StreamReader) -> None:
        exchange = self._exchange
        while not self._is_over and (data := await self._read(reader)):
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserError:
                break
        if not exchange.has_begun:
            raise unavailable(f"the application at {self._own} closed the connection without a response")
        if not self._is_over:
            exchange.end_connection()  # the client must not take what is there for all of it
        exchange.end()

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        while self._exchange.has_begun and self._exchange.unsent_bytes > UNSENT_BYTES_MAX:
            await asyncio.sleep(PAUSE_S)
        try:
            return await reader.read(READ_BYTES)
        except OSError:
            return b""

    def _receive(self, data: bytes) -> None:
        """Pass on what the client sends in its WebSocket."""
        if self._writer is None or self._writer.transport.get_write_buffer_size() > UNREAD_BYTES_MAX:
            self.cancel()
            self._exchange.end()
        else:
            self._writer.write(data)

    # Calls of the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._is_chunked = self._is_chunked or name == b"transfer-encoding"
        if name == b"content-length" or name not in _OF_CONNECTION:
            self._fields.append(b"%b: %b\r\n" % (name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self._fields.clear()
            return
        has_length = any(field.startswith(b"content-length:") for field in self._fields)
        has_body = status not in _NO_BODY and self._exchange.request.method != b"HEAD"
        self._exchange.forward(status, b"".join(self._fields), is_chunked=has_body and not has_length)
        self._is_over = not has_body

    def on_body(self, body: bytes) -> None:
        self._exchange.send(body)

    def on_message_complete(self) -> None:
        self._is_over = self._exchange.has_begun
