"""HTTP/1.1 requests from bytes, without I/O: no transport, no event loop, no clock.

`RequestParser` takes the bytes of a connection in chunks of any size and returns the events that they complete. The
events do not depend on the chunks, except that a read of at most `WHOLE_BYTES` with the end of a request may end
with a header that is already too long. llhttp (through httptools) parses requests and rejects ambiguous ones.

`ParserState` alone determines what may come next. One function changes it, and checks the change against `TRANSITIONS`;
a transition that is not listed is a bug of this module, never an error of the client:

                 .-------------------------------------------------------.
                 v                                                       |
    ENDED <--  IDLE  -->  HEADER  -->  BODY  ----------------------------+
                                        |--> DIRECT_BODY (large) --------+
                                        '--> REFUSED_BODY (too large) ---'

Every state but ENDED may change to CUT_OFF: after bytes that cannot be a request, or when a limit is exceeded.

A read may hold thousands of small requests. So `receive` stops behind the first one, and keeps the rest in `backlog`
for `resume`; only a read of at most `WHOLE_BYTES` is parsed whole.

Two optimisations make inference fast. A large body with a known length is received directly into its own buffer
(`vacant`), so that the kernel makes the only copy of a tensor; where the engine is another process, into memory that it
reads, too (`Lend`). And a header that equals the previous one byte for byte
is not parsed again (`HeaderCache`): clients repeat the header while only the body changes.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Final

import httptools

from charonia.core.errors import ServingError, invalid, unsupported
from charonia.server.http.limits import (
    CHUNKED_PIECE_BYTES,
    CHUNKS_AT_ONCE,
    DIRECT_BODY_BYTES,
    HEADER_PIECE_BYTES,
    JSON_SIZE,
    WHOLE_BYTES,
    HttpLimits,
    body_buffer,
    oversized,
)
from charonia.wire.browsers import PAGE_FIELDS
from charonia.wire.tensors import Lend

CACHED_BYTES_MAX: Final = 4096
"""Longest header that is cached."""

_MIB: Final = 2**20
_NOTHING: Final = memoryview(b"")
_END_OF_HEADER: Final = b"\r\n\r\n"
_HOST: Final = b"host"
_OFFERS: Final = (b"upgrade", b"expect")  # already handled when a request is parsed again
_NOT_CACHED: Final = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"connection", *PAGE_FIELDS})


class ParserState(Enum):
    """The phase of a request. The values appear in `repr`."""

    __hash__ = object.__hash__  # Enum's own is a function in Python

    IDLE = "idle"
    HEADER = "receiving header"
    BODY = "receiving body"
    DIRECT_BODY = "receiving body directly"
    REFUSED_BODY = "dropping body"
    ENDED = "ended"
    CUT_OFF = "cut off"


_IDLE: Final = ParserState.IDLE
_HEADER: Final = ParserState.HEADER
_BODY: Final = ParserState.BODY
_ENDED: Final = ParserState.ENDED
_CUT_OFF: Final = ParserState.CUT_OFF
_OVER: Final = frozenset({_ENDED, _CUT_OFF})

TRANSITIONS: Final[dict[ParserState, frozenset[ParserState]]] = {
    _IDLE: frozenset({_HEADER, _ENDED, _CUT_OFF}),
    _HEADER: frozenset({_BODY, _CUT_OFF}),
    _BODY: frozenset({_IDLE, ParserState.DIRECT_BODY, ParserState.REFUSED_BODY, _ENDED, _CUT_OFF}),
    ParserState.DIRECT_BODY: frozenset({_IDLE, _ENDED, _CUT_OFF}),
    ParserState.REFUSED_BODY: frozenset({_IDLE, _ENDED, _CUT_OFF}),
    _ENDED: frozenset(),
    _CUT_OFF: frozenset(),
}
"""The states that may follow each state."""

RECEIVING: Final = frozenset({_HEADER, _BODY, ParserState.DIRECT_BODY, ParserState.REFUSED_BODY})
"""States within a request."""


@dataclass(slots=True)
class Request:
    """Event: a request is complete, or refused.

    Attributes:
        url: Request target as sent.
        headers: Header fields by lower-case name; the last one of a name counts. Shared by requests: not to be changed.
        names: Original spelling of field names, by lower-case name; None where the parser does not keep it.
        keep_alive: Whether more requests may follow.
        knows_chunks: Whether the client supports chunked encoding, which HTTP/1.0 does not.
        refusal: Error to answer with instead of calling a handler: the body was dropped, or the request is invalid.
        refusal_status: HTTP status of that error; 0 for that of its code.
        by_page: Whether a browser sent it for a page.
        is_upgrade: Whether it asks for a WebSocket, which the parser was told to allow.
    """

    method: bytes
    url: bytes
    headers: dict[bytes, bytes]
    names: dict[bytes, bytes] | None = None
    body: bytes | memoryview = b""
    keep_alive: bool = True
    knows_chunks: bool = True
    refusal: ServingError | None = None
    refusal_status: int = 0
    by_page: bool = False
    is_upgrade: bool = False


class Expectation(Enum):
    """Event: the client expects an interim response before it sends its body."""

    CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


Event = Request | Expectation


class HeaderCache:
    """The last header of a connection and the size of the whole request.

    The same bytes always parse to the same request. So a request that arrives in one piece with the cached header is
    not parsed: most of the work on a small request is the parser's callbacks for header fields.
    """

    __slots__ = ("_arrived", "_header", "_parsed", "_request_size")

    def __init__(self) -> None:
        self._arrived: memoryview | None = None
        self._header = b""
        self._request_size = 0
        self._parsed: tuple[bytes, bytes, dict[bytes, bytes], dict[bytes, bytes] | None] = (b"", b"", {}, None)

    def find(self, arrived: memoryview) -> Request | None:
        """Return the request in bytes that arrived between requests, None unless it has the cached header and size."""
        if len(arrived) == self._request_size:
            data = bytes(arrived)
            if data.startswith(self._header):
                return Request(*self._parsed, data[len(self._header) :])
        self._arrived = arrived
        return None

    def skip(self) -> None:
        """Note that the bytes that arrive now do not begin with a request."""
        self._arrived = None

    def store(self, request: Request, body_size: int) -> None:
        """Cache the header of a parsed request.

        Args:
            body_size: The announced size of its body, 0 for none.
        """
        arrived, self._arrived = self._arrived, None
        if arrived is None or not body_size or not request.keep_alive:
            return
        size = len(arrived) - body_size
        if size > CACHED_BYTES_MAX or not _NOT_CACHED.isdisjoint(request.headers):
            return
        header = bytes(arrived[:size])
        # An empty line ends a header: if it is the first one, nothing preceded the request.
        if header.find(_END_OF_HEADER) == size - len(_END_OF_HEADER):
            self._header = header
            self._request_size = len(arrived)
            self._parsed = request.method, request.url, request.headers, request.names


class RequestParser:
    """The requests of one connection.

    Attributes:
        state: The phase of the current request.
        received: Bytes of the body in progress that have arrived.
        vacant: Buffer for the rest of a large body: the caller may fill it and call `filled`; None without such a body.
        backlog: Bytes that have arrived and are not parsed yet.
    """

    def __init__(
        self,
        limits: HttpLimits,
        *,
        keeps_names: bool = False,
        singular: Set[bytes] = frozenset({JSON_SIZE}),
        lend: Lend | None = None,
        allows_websockets: bool = False,
    ) -> None:
        """Create a parser.

        Args:
            limits: Limits of requests.
            keeps_names: Whether requests keep the original spelling of header names.
            singular: Fields, in lower case, that a request must not give twice with different values.
            lend: Lends memory for large bodies with tensors.
            allows_websockets: Whether a request for a WebSocket is one; if not, it is one of HTTP.
        """
        self._allows_websockets = allows_websockets
        self.state = _IDLE
        self._lend = lend
        self._limits = limits
        self._singular = singular
        self._keeps_names = keeps_names
        self._llhttp = httptools.HttpRequestParser(self)
        self._cache = HeaderCache()
        self._events: list[Event] = []
        self.backlog = _NOTHING
        self._header_bytes_fed = 0
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._names: dict[bytes, bytes] | None = {} if self._keeps_names else None
        self._header_count = 0
        self._header_bytes = 0
        self._chunk_count = 0
        self._length = 0
        self._parts: list[bytes] = []
        self._direct: memoryview | None = None
        self._refusal: ServingError | None = None
        self.received = 0
        self.vacant: memoryview | None = None

    def __str__(self) -> str:
        """Return the state in words, with the progress of a body."""
        text = self.state.value
        if self.state in (_BODY, ParserState.DIRECT_BODY, ParserState.REFUSED_BODY):
            unit, name = (_MIB, "MiB") if max(self._length, self.received) >= _MIB else (1, "bytes")
            total = f"/{self._length // unit}" if self._length else ""
            text = f"{text} {self.received // unit}{total} {name}"
        return text

    def __repr__(self) -> str:
        return f"<RequestParser [{self}]>"

    def receive(self, data: memoryview) -> Sequence[Event]:
        """Take bytes and return the events that they complete, or the first of them: the rest is `backlog`.

        Must not be called while there is a `vacant` buffer.
        """
        if self.backlog:
            data = memoryview(bytes(self.backlog) + data)
            self._cache.skip()
        elif self.state is _IDLE:
            cached = self._cache.find(data)
            if cached is not None:
                return (cached,)
        else:
            self._cache.skip()
        return self._parse(data)

    def resume(self) -> Sequence[Event]:
        """Parse more of `backlog` and return the events."""
        self._cache.skip()
        return self._parse(self.backlog)

    def _parse(self, data: memoryview) -> Sequence[Event]:
        rest, chunks = data, self._chunk_count + CHUNKS_AT_ONCE
        while rest and not self._events and self._chunk_count < chunks and self.state not in _OVER:
            piece = rest if len(rest) <= WHOLE_BYTES else rest[: self._piece_bytes(rest)]
            rest = rest[len(piece) :]
            again = self._feed(piece)
            if again is not None:
                rest = memoryview(bytes(again) + rest)
            elif self.vacant is not None and rest:
                size = min(len(rest), len(self.vacant))
                self.vacant[:size] = rest[:size]
                rest = rest[size:]
                self._fill(size)
        if rest and rest.obj is data.obj and data is not self.backlog:
            rest = memoryview(bytes(rest))  # the caller's buffer is used for the next read
        self.backlog = rest if self.state not in _OVER else _NOTHING
        events, self._events = self._events, []
        return events

    def _piece_bytes(self, data: memoryview) -> int:
        """Return how many bytes to parse next, of more than `WHOLE_BYTES`: up to the end of a header, or of a body."""
        if self.state is _IDLE or self.state is _HEADER:
            head = bytes(data[:HEADER_PIECE_BYTES])
            return (head.find(_END_OF_HEADER) + len(_END_OF_HEADER)) if _END_OF_HEADER in head else len(head)
        if self._length:
            return self._length - self.received
        return max(self.received // max(self._chunk_count, 1), CHUNKED_PIECE_BYTES)

    def filled(self, size: int) -> Sequence[Event]:
        """Note that `size` bytes of `vacant` have been filled, and return the events that they complete."""
        self._fill(size)
        events, self._events = self._events, []
        return events

    def _fill(self, size: int) -> None:
        if self.vacant is None:  # the connection has ended
            return
        self.received += size
        self.vacant = self.vacant[size:]
        if not self.vacant:
            request = self._request(self._direct or b"")
            self._llhttp = httptools.HttpRequestParser(self)  # the old one still waits for the body
            self._complete(request)

    def refuse(self, status: int, error: ServingError) -> Request:
        """End the connection within a request, and return a request that is answered with the error."""
        url = self._url[: self._limits.url_bytes_max]
        refused = Request(b"", url, {}, keep_alive=False, refusal=error, refusal_status=status)
        self._reset()
        self._move(_CUT_OFF)
        return refused

    def end(self) -> None:
        """Accept no more requests; drop the request in progress and the bytes behind it."""
        if self.state in RECEIVING or (self.state is _IDLE and self.backlog):
            self._move(_CUT_OFF)
        elif self.state is _IDLE:
            self._move(_ENDED)
        self.backlog = _NOTHING
        self._reset()  # llhttp and this are a reference cycle: release the body before it is collected

    def _move(self, state: ParserState) -> None:
        """Change the state. Nothing else does."""
        assert state in TRANSITIONS[self.state], f"from {self.state.name} to {state.name}"
        self.state = state

    def _feed(self, data: memoryview) -> memoryview | None:
        """Parse bytes; return those behind a protocol upgrade, which are still to be parsed."""
        if self.state is _IDLE or self.state is _HEADER:
            self._header_bytes_fed += len(data)
        try:
            self._llhttp.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            return self._decline(data[offer.args[0] :])
        except httptools.HttpParserCallbackError as refusal:
            cause = refusal.__context__
            if not isinstance(cause, _RefusedError):
                raise
            self._events.append(self.refuse(cause.status, cause.error))
        except httptools.HttpParserError as error:
            if self.state is not _ENDED:  # else it follows the last request of the connection
                problem = invalid(f"the request is not valid HTTP/1.1: {error}")
                self._events.append(self.refuse(400, problem))
        else:
            if self.state is _BODY:
                if self._length - self.received >= DIRECT_BODY_BYTES:
                    self._direct = body_buffer(self._headers, self._length, self._parts, self._lend)
                    self._parts.clear()
                    self.vacant = self._direct[self.received :]
                    self._move(ParserState.DIRECT_BODY)
            elif self._header_bytes_fed > self._limits.header_bytes_max + self._limits.url_bytes_max:
                self._events.append(self.refuse(431, _header_too_large(self._limits)))
        return None

    def _decline(self, rest: memoryview) -> memoryview:
        """Decline a protocol upgrade by answering in HTTP/1.1; return the bytes that are still to be parsed.

        A WebSocket may be allowed: then the request is the last one.
        """
        headers = self._headers
        is_websocket = self._llhttp.get_method() == b"GET" and headers.get(b"upgrade", b"").lower() == b"websocket"
        if self._allows_websockets and is_websocket and self.state is _BODY and not rest and not self._length:
            request = self._request(b"")
            request.keep_alive, request.is_upgrade = False, True
            self._complete(request)
            return rest
        if self.state in RECEIVING:  # llhttp has skipped the body: parse the request again without the upgrade
            fields = b"".join([b"%b: %b\r\n" % field for field in self._headers.items() if field[0] not in _OFFERS])
            version = self._llhttp.get_http_version().encode()
            head = b"%b %b HTTP/%b\r\n%b\r\n" % (self._llhttp.get_method(), self._url, version, fields)
            rest = memoryview(head + rest)
            self._reset()
            self._move(_IDLE)
        self._llhttp = httptools.HttpRequestParser(self)
        return rest

    # llhttp's calls.

    def on_message_begin(self) -> None:
        self._move(_HEADER)

    def on_url(self, url: bytes) -> None:
        """A part of the request target."""
        self._url += url
        if len(self._url) > self._limits.url_bytes_max:
            raise _RefusedError(414, invalid(f"the URL is longer than {self._limits.url_bytes_max} bytes"))

    def on_header(self, name: bytes, value: bytes | None) -> None:
        """A header field, or a field of the trailer."""
        if value is None:
            value = b""
        limits = self._limits
        self._header_count = count = self._header_count + 1
        self._header_bytes = size = self._header_bytes + len(name) + len(value)
        if count > limits.header_count_max or size > limits.header_bytes_max:
            raise _RefusedError(431, _header_too_large(limits))
        if self.state is _HEADER:  # a trailer must not change the header
            key, headers = name.lower(), self._headers
            value = value.rstrip(b" \t")  # llhttp strips it in front only
            if key in headers and (key == _HOST or (key in self._singular and headers[key] != value)):
                raise _RefusedError(400, invalid(f"the header has more than one '{key.decode('latin-1')}'"))
            headers[key] = value
            if self._names is not None:
                self._names[key] = name

    def on_headers_complete(self) -> None:
        """The header is complete."""
        self._move(_BODY)
        self._header_bytes_fed = 0
        headers = self._headers
        if not headers and self._llhttp.get_http_version() == "0.9":
            raise _RefusedError(505, invalid("the request is not HTTP/1.1 or HTTP/1.0"))
        if b"transfer-encoding" in headers and headers[b"transfer-encoding"].lower() != b"chunked":
            raise _RefusedError(501, unsupported("the only transfer encoding is 'chunked'"))
        if b"content-length" in headers:
            self._length = int(headers[b"content-length"])
            if self._length > self._limits.body_bytes_max:
                self._refuse_body(self._length)
        if b"expect" in headers:
            if headers[b"expect"].lower() != b"100-continue":
                raise _RefusedError(417, invalid("the only expectation that can be met is '100-continue'"))
            self._events.append(Expectation.CONTINUE)

    def on_chunk_header(self) -> None:
        self._chunk_count += 1

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self.received += len(body)
        if self._chunk_count > self._limits.chunk_count_max:  # the empty one at the end does not count: it has no body
            raise _RefusedError(
                400,
                invalid(
                    f"Chunked request body exceeds maximum of {self._limits.chunk_count_max} non-empty chunks. "
                    "Send fewer or larger HTTP chunks."
                ),
            )
        if self._refusal is not None or self.received > self._limits.body_bytes_max:
            self._refuse_body(self.received)
        else:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        """The request is complete, unless it has a protocol upgrade (`_decline`)."""
        if b"upgrade" in self._headers and self._llhttp.should_upgrade():
            return
        parts = self._parts
        request = self._request((parts[0] if len(parts) == 1 else b"".join(parts)) if parts else b"")
        if request.refusal is None:
            self._cache.store(request, self._length)
        self._complete(request)

    def _request(self, body: bytes | memoryview) -> Request:
        llhttp, headers = self._llhttp, self._headers
        keep_alive = llhttp.should_keep_alive()
        # With HTTP/1.0, keep-alive must be explicit.
        is_old = (not keep_alive or b"connection" in headers) and llhttp.get_http_version() == "1.0"
        return Request(
            llhttp.get_method(), self._url, headers, self._names, body, keep_alive, not is_old,
            self._refusal, 0, not PAGE_FIELDS.isdisjoint(headers),
        )  # fmt: skip

    def _complete(self, request: Request) -> None:
        self._events.append(request)
        self._reset()
        self._move(_IDLE if request.keep_alive else _ENDED)

    def _refuse_body(self, size: int) -> None:
        """Drop the body, so that the client can finish sending it and then read the error."""
        if self._refusal is None:
            self._parts.clear()
            self._move(ParserState.REFUSED_BODY)
        # Of a chunked body, each part changes the size.
        self._refusal = oversized(self._length or size, self._limits.body_bytes_max, JSON_SIZE in self._headers)
        if size > self._limits.discard_bytes_max or b"expect" in self._headers:
            raise _RefusedError(0, self._refusal)


class _RefusedError(Exception):
    """Ends parsing: the request exceeds a limit of the endpoint."""

    def __init__(self, status: int, error: ServingError) -> None:
        super().__init__(str(error))
        self.status = status
        self.error = error


def _header_too_large(limits: HttpLimits) -> ServingError:
    return invalid(
        f"the request header is larger than {limits.header_count_max} fields or {limits.header_bytes_max} bytes"
    )
