"""A parser of HTTP/1.1 responses, one at a time, from arbitrarily split bytes. No I/O.

Servers often repeat the same response head, so heads are cached: a known one costs a look-up, and its body only a count
of bytes. llhttp parses new heads and chunked bodies.

Invariants, which a property test checks:

1. The result is the same response or the same error, however the bytes of a response are split.
2. The parser never buffers more than it received, and refuses a body over the limit as soon as its size is known.
"""

from typing import Final

import httptools

from charonia.wire.http_status import UNEXECUTED

HEAD_BYTES_MAX: Final = 64 * 1024
"""Longest response head."""

CACHED_HEADS_MAX: Final = 256
"""Limit of cached heads of a transport."""

CACHED_HEAD_BYTES_MAX: Final = 1024
"""Longest head that is cached."""

INTERIMS_MAX: Final = 16
"""Limit of interim responses (status 1xx) before the real one."""

ERROR_BODY_BYTES_MAX: Final = 64 * 1024
"""Limit of bytes kept of an error's body if bodies are otherwise not kept."""

_END: Final = b"\r\n\r\n"
_BODILESS: Final = (204, 304)
_DIGITS_MAX: Final = 18


class BadResponseError(Exception):
    """An invalid response, or one over a limit.

    Attributes:
        is_oversize: Whether a limit was exceeded.
    """

    def __init__(self, message: str, *, is_oversize: bool = False) -> None:
        super().__init__(message)
        self.is_oversize = is_oversize


class Head:
    """The head of a response.

    Attributes:
        status: HTTP status.
        length: Size of the body; -1 for a chunked body, -2 for one that ends with the connection.
        json_bytes: Bytes of JSON at the start of the body; -1 if unspecified.
        coding: Content coding of the body, "" for none.
        keep_alive: Whether the connection can be used again.
        is_unexecuted: Whether the server says that no model has seen the request.
    """

    __slots__ = ("coding", "is_unexecuted", "json_bytes", "keep_alive", "length", "status")

    def __init__(
        self,
        status: int,
        length: int,
        json_bytes: int,
        coding: str,
        keep_alive: bool,
        is_unexecuted: bool = False,
    ) -> None:
        self.status = status
        self.length = length
        self.json_bytes = json_bytes
        self.coding = coding
        self.keep_alive = keep_alive
        self.is_unexecuted = is_unexecuted


IN_CHUNKS: Final = -1
UNTIL_CLOSE: Final = -2

Heads = dict[bytes, Head]


class ResponseReader:
    """Reads the responses of one connection.

    Attributes:
        head: Head of the current response, None before it is complete.
        received: Bytes of its body so far, as sent.
        is_begun: Whether any byte of it has arrived.
    """

    def __init__(self, heads: Heads, limit: int) -> None:
        """Create a reader.

        Args:
            heads: Cache of heads; connections to the same server share it.
            limit: Largest body in bytes.
        """
        self._heads = heads
        self._limit = limit
        self.begin(keep_body=False)

    def begin(self, *, keep_body: bool) -> None:
        """Expect a new response. The bodies of errors are kept in any case, up to `ERROR_BODY_BYTES_MAX`."""
        self._keeps = keep_body
        self._buffer = b""
        self._chunks: _Chunks | None = None
        self._parts: list[bytes | memoryview] = []
        self._is_over = False
        self._interims = 0
        self.head: Head | None = None
        self.received = 0
        self.is_begun = False

    @property
    def body(self) -> bytes:
        """The body of a complete response, as far as it was kept."""
        parts = self._parts
        first = parts[0] if parts else b""
        return first if len(parts) < 2 and type(first) is bytes else b"".join(parts)

    def feed(self, data: bytes) -> bool:
        """Process bytes and return whether the response is complete.

        Raises:
            BadResponseError: They are not a valid response, continue after its end, or exceed a limit.
        """
        if self.head is not None:
            return self._take(data)
        if self._buffer:
            data = self._buffer + data
        self.is_begun = True
        end = data.find(_END) + 4
        if end == 3:
            return self._await_head(data)
        head = self._heads.get(data[:end])
        if head is None:
            return self._feed_new(data, end)
        self.head = head
        size = len(data) - end
        if size == head.length <= self._limit and not self._keeps and head.status == 200:
            self.received = size
            return True
        self._check_length(head)
        return self._take(data[end:])

    def feed_eof(self) -> bool:
        """Process the end of the connection and return whether it completes the response."""
        return self.head is not None and self.head.length == UNTIL_CLOSE

    def _await_head(self, data: bytes) -> bool:
        if len(data) > HEAD_BYTES_MAX:
            raise BadResponseError(f"the response head is larger than {HEAD_BYTES_MAX} bytes", is_oversize=True)
        if not b"HTTP/1.".startswith(data[:7]):
            raise BadResponseError(f"expected an HTTP response, got {data[:40]!r}")
        self._buffer = data
        return False

    def _feed_new(self, data: bytes, end: int) -> bool:
        """Parse a head that is not in the cache, and what follows."""
        if end > HEAD_BYTES_MAX:
            raise BadResponseError(f"the response head is larger than {HEAD_BYTES_MAX} bytes", is_oversize=True)
        text = data[:end]
        chunks = _Chunks(self)
        head = chunks.read_head(text)
        self._buffer = b""
        if head.status < 200:  # an interim response; the real one follows
            self._interims += 1
            if self._interims > INTERIMS_MAX:
                raise BadResponseError(f"more than {INTERIMS_MAX} interim responses")
            return self.feed(data[end:]) if len(data) > end else False
        self.head = head
        if head.length == IN_CHUNKS:
            self._chunks = chunks
        elif head.length >= 0 and len(text) <= CACHED_HEAD_BYTES_MAX:
            if len(self._heads) >= CACHED_HEADS_MAX:
                self._heads.clear()
            self._heads[text] = head
        self._check_length(head)
        return self._take(data[end:])

    def _check_length(self, head: Head) -> None:
        if head.length > self._limit:
            raise self._too_large(f"got one of {head.length}")

    def _take(self, data: bytes) -> bool:
        """Process a part of the body."""
        head = self.head
        if head is None or self._is_over:
            raise BadResponseError("the server sent more than its response")
        if self._chunks is not None:
            self._is_over = self._chunks.feed(data)
            return self._is_over
        self.add(data)
        if head.length == UNTIL_CLOSE:
            return False
        if self.received > head.length:
            raise BadResponseError(f"the server sent more than its response: {self.received - head.length} bytes")
        self._is_over = self.received == head.length
        return self._is_over

    def add(self, data: bytes) -> None:
        """Count and keep bytes of the body."""
        if not data:
            return
        self.received += len(data)
        if self.received > self._limit:
            raise self._too_large("got more")
        if self._keeps or (self.head is not None and self.head.status != 200 and self.received <= ERROR_BODY_BYTES_MAX):
            self._parts.append(data)

    def _too_large(self, got: str) -> BadResponseError:
        return BadResponseError(f"expected a response of at most {self._limit} bytes, {got}", is_oversize=True)


class _Chunks:
    """A wrapper around llhttp for heads and chunked bodies."""

    def __init__(self, reader: ResponseReader) -> None:
        self._reader = reader
        self._headers: dict[bytes, bytes] = {}
        self._is_complete = False
        self._parser = httptools.HttpResponseParser(self)

    def read_head(self, text: bytes) -> Head:
        try:
            self._parser.feed_data(text)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise _no_response(text, error) from error
        headers = self._headers
        status = self._parser.get_status_code()
        length_text = headers.get(b"content-length", b"")
        if len(length_text) > _DIGITS_MAX:
            raise BadResponseError(f"content-length of {len(length_text)} digits")
        if b"chunked" in headers.get(b"transfer-encoding", b"").lower():
            length = IN_CHUNKS
        elif status in _BODILESS or status < 200:
            length = 0
        else:
            length = int(length_text) if length_text else UNTIL_CLOSE
        json_text = headers.get(b"inference-header-content-length", b"")
        coding = headers.get(b"content-encoding", b"").decode("latin-1").strip().lower()
        return Head(
            status,
            length,
            int(json_text) if json_text.isdigit() and len(json_text) <= _DIGITS_MAX else -1,
            "" if coding == "identity" else coding,
            self._parser.should_keep_alive() and length != UNTIL_CLOSE,
            headers.get(UNEXECUTED[0]) == UNEXECUTED[1],
        )

    def feed(self, data: bytes) -> bool:
        if self._is_complete and data:
            raise BadResponseError("the server sent more than its response")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, BadResponseError):
                raise cause from None
            raise _no_response(data, error) from error
        return self._is_complete

    # Called by llhttp.

    def on_message_begin(self) -> None:
        if self._is_complete:
            raise BadResponseError("the server sent more than its response")

    def on_header(self, name: bytes, value: bytes | None) -> None:
        if self._reader.head is None:  # trailers must not change the head
            self._headers[name.lower()] = value or b""

    def on_body(self, body: bytes) -> None:
        self._reader.add(body)

    def on_message_complete(self) -> None:
        self._is_complete = True


def _no_response(data: bytes, error: Exception) -> BadResponseError:
    return BadResponseError(f"expected an HTTP response, got {data[:40]!r}: {error}")
