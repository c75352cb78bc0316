"""Requests of another HTTP server, answered without a connection: ASGI's requests in, its messages out.

Source: the HTTP part of the ASGI specification.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from charonia.core.errors import invalid
from charonia.core.request import NO_FLOW
from charonia.server.http.exchange import Exchange
from charonia.server.http.frontend import HttpFrontend
from charonia.server.http.limits import JSON_SIZE, oversized
from charonia.server.http.parser import Request
from charonia.wire.browsers import PAGE_FIELDS

Message = dict[str, Any]
"""An ASGI message."""

Send = Callable[[list[Message]], None]
"""Takes messages of a response, in order."""

_CONNECTION_FIELDS = (b"connection", b"transfer-encoding", b"content-length")
"""Fields of a streamed response that are for its connection."""

_END_OF_HEADER = b"\r\n\r\n"


class AsgiTransport:
    """The place of a connection: turns what an exchange writes into messages."""

    def __init__(self, send: Send) -> None:
        self.flow = NO_FLOW  # the other server knows the client
        self._send = send
        self._has_begun = False

    def answered(self, exchange: Exchange) -> None:
        self._write(exchange.response or [], more=False)

    def progressed(self, exchange: Exchange) -> None:
        self._write(exchange.take_unwritten(), more=True)

    def unsent_bytes(self) -> int:
        """Return 0: the other server takes everything."""
        return 0

    def _write(self, parts: Iterable[bytes | memoryview], more: bool) -> None:
        data = b"".join(parts)
        messages: list[Message] = []
        if not self._has_begun:
            head, _, data = data.partition(_END_OF_HEADER)
            messages.append(_start(head, is_stream=more))
            self._has_begun = True
        if data or not more:
            messages.append({"type": "http.response.body", "body": data, "more_body": more})
        if messages:
            self._send(messages)


def begin(http: HttpFrontend, scope: Mapping[str, Any], body: bytes, send: Send) -> Exchange:
    """Begin to answer a request, on the server's event loop; `abandon` the exchange when its client leaves.

    Args:
        http: The front end.
        scope: ASGI's scope of the request.
        body: Its whole body.
        send: Called on the event loop, perhaps before this returns, until a message without `more_body`.
    """
    fields = [(bytes(name).lower(), bytes(value)) for name, value in scope["headers"]]
    # Without chunks, the parts of a streamed response are its body.
    request = Request(
        scope["method"].encode(),
        _url(scope),
        dict(fields),
        {name: name for name, _ in fields} if http.shared.keeps_names else None,
        body,
        keep_alive=True,
        knows_chunks=False,
    )
    request.by_page = not PAGE_FIELDS.isdisjoint(request.headers)
    exchange = Exchange(AsgiTransport(send), request)
    limit = http.shared.limits.body_bytes_max
    http.shared.request_count += 1
    twice = [name for name in http.shared.singular if len({value for key, value in fields if key == name}) > 1]
    if len(body) > limit:
        exchange.fail(oversized(len(body), limit, JSON_SIZE in request.headers))
    elif twice:
        exchange.fail(invalid(f"the header has more than one '{twice[0].decode('latin-1')}'"))
    else:
        http.handle(exchange)
    return exchange


def _url(scope: Mapping[str, Any]) -> bytes:
    """Return path and query as the client sent them, without the prefix under which the other server has this one."""
    path: bytes = scope["raw_path"]
    path = path.removeprefix(scope.get("root_path", "").encode())
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path


def _start(head: bytes, is_stream: bool) -> Message:
    status, *lines = head.split(b"\r\n")
    fields = []
    for line in lines:
        name, _, value = line.partition(b": ")
        name = name.lower()
        if name != b"connection" and not (is_stream and name in _CONNECTION_FIELDS):
            fields.append((name, value))
    return {"type": "http.response.start", "status": int(status.split(b" ", 2)[1]), "headers": fields}
