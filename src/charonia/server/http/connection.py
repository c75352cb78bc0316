"""One HTTP/1.1 connection: bytes to exchanges and back, in order, within limits.

llhttp (by way of httptools) finds the parts of a request, and refuses what is ambiguous. Small bodies come through it;
the body of a request that announces a larger one is received straight into its own buffer, so that a tensor is copied
once, by the kernel. Responses are written in the order of the requests, whatever order they are ready in (pipelining).

Nothing here makes a task, a future or a timer for a request: the endpoint's sweep finds slow clients (`check_time`).
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol, cast

import httptools
import numpy as np

from charonia.core.errors import ServingError, invalid, unavailable, unsupported
from charonia.server.http.exchange import Exchange
from charonia.server.http.limits import HttpLimits
from charonia.server.http.repeated import HeadMemory
from charonia.server.listening import unsent_bytes

READ_BYTES = 256 * 1024
"""Size of the buffer that all connections of an endpoint read into."""

DIRECT_BODY_BYTES = 64 * 1024
"""A body with at least so many bytes still to come is received straight into its own buffer."""

ALIGNMENT_BYTES = 64
"""Alignment of the first tensor in such a buffer."""

LINGER_S = 2.0
"""Time in which a client may take nothing of its last answer where the connection ends on our side before its own."""

JSON_SIZE = b"inference-header-content-length"
"""Header field with the length of the JSON part of a body."""

DIGITS_MAX = 18
"""Longest number in a header field."""

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Host(Protocol):
    """What a connection needs of its endpoint.

    Attributes:
        limits: The endpoint's limits.
        read_buffer: Buffer to read into, shared by all connections: what is in it is used up at once.
        now_s: A coarse clock, in seconds.
        is_closing: Whether the endpoint is shutting down: connections close after their next response.
    """

    limits: HttpLimits
    read_buffer: memoryview
    now_s: float
    is_closing: bool

    def opened(self, connection: "HttpConnection") -> bool:
        """Take note of a connection; false when there are too many."""
        ...

    def closed(self, connection: "HttpConnection") -> None:
        """Forget a connection."""
        ...

    def handle(self, exchange: Exchange) -> None:
        """Answer a request, now or later. Never raises."""
        ...

    def finished(self, exchange: Exchange) -> None:
        """A response is about to be written, or its client has gone."""
        ...


class HttpConnection(asyncio.BufferedProtocol):
    """A client's connection.

    Attributes:
        remembers: Whether a header that comes again need not be parsed again.
    """

    remembers = True

    def __init__(self, host: Host) -> None:
        self._host = host
        self._limits = host.limits
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._exchanges: list[Exchange] = []
        self._since_s = host.now_s  # start of what is waited for: a header, a body, the next request, the client
        self._is_receiving = False  # from the first byte of a request to its last
        self._in_body = False
        self._is_paused = False
        self._write_is_paused = False
        self._unsent = 0
        self._lingers = False  # the last response is out, the client may still be sending
        self._ends = False  # no more requests are taken; closes when the last response is out
        self._head_bytes_fed = 0
        self._memory = HeadMemory() if self.remembers else None
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._header_count = 0
        self._header_bytes = 0
        self._chunk_count = 0
        self._length = 0
        self._parts: list[bytes] = []
        self._received = 0
        self._body: memoryview | None = None  # receives a large body directly
        self._refusal: ServingError | None = None  # the answer to a request whose body is dropped

    # The transport's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class, with the same methods
        if transport.get_extra_info("sslcontext") is None:
            # With room for nothing a response is sent at once, not when the loop has handled all that has arrived.
            self._transport.set_write_buffer_limits(0)
        if not self._host.opened(self):
            self._refuse(503, unavailable("the server has too many connections", hint="retry later"))

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone: nothing of it is worked on any longer."""
        self._transport = None
        self._ends = True
        self._reset()  # a body that was arriving: the parser and this hold each other until the collector comes
        self._host.closed(self)
        _give_up(self._host, self._exchanges)

    def eof_received(self) -> bool:
        """The client has gone; one that only ends its sending side looks the same, and gets no more answers."""
        return False

    def pause_writing(self) -> None:
        """The client reads more slowly than it is answered: take no more requests from it."""
        self._write_is_paused = True
        self._since_s = self._host.now_s
        self._pace()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._write_is_paused = False
        self._pace()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where to read into."""
        if self._body is not None:
            return self._body[self._received :]
        return self._host.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes have arrived."""
        if self._body is None:
            rest: memoryview | None = self._host.read_buffer[:nbytes]
            if rest and self._memory is not None:
                if self._is_receiving or self._ends or self._host.is_closing:
                    self._memory.pass_over()
                elif (exchange := self._memory.recall(self, rest)) is not None:
                    self._hand_over(exchange, None)
                    return
            while rest:
                rest = self._feed(rest)
            return
        self._received += nbytes
        if self._received == self._length:
            exchange = self._exchange()
            exchange.body = self._body
            self._parser = httptools.HttpRequestParser(self)  # the old one still waits for the body
            self._begin(exchange)

    def _feed(self, data: memoryview) -> memoryview | None:
        """Parse what has arrived; return what follows an offer to change protocols, which is still to be parsed."""
        if self._ends:
            return None
        if not self._in_body:
            self._head_bytes_fed += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            return self._decline(data[offer.args[0] :])
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if not isinstance(cause, _RefusedError):
                raise
            self._refuse(cause.status, cause.error)
        except httptools.HttpParserError as error:
            if not self._ends:  # else it was sent after the last request that is answered here
                self._refuse(400, invalid(f"the request is not valid HTTP/1.1: {error}"))
        else:
            if self._in_body:
                if self._length - self._received >= DIRECT_BODY_BYTES and self._refusal is None:
                    self._body = _direct_body(self._headers, self._length, self._parts)
                    self._parts.clear()
            elif self._head_bytes_fed > self._limits.header_bytes_max + self._limits.url_bytes_max:
                self._refuse(431, _header_too_large(self._limits))
        return None

    def _decline(self, rest: memoryview) -> memoryview:
        """Return what follows a request that offers to change protocols: the answer in HTTP/1.1 declines it."""
        if self._is_receiving:  # the parser has left out its body, so it gets the request again without the offer
            fields = b"".join([b"%b: %b\r\n" % field for field in self._headers.items() if field[0] != b"upgrade"])
            version = self._parser.get_http_version().encode()
            head = b"%b %b HTTP/%b\r\n%b\r\n" % (self._parser.get_method(), self._url, version, fields)
            rest = memoryview(head + rest)
        self._parser = httptools.HttpRequestParser(self)
        self._reset()
        self._in_body = False
        return rest

    # The parser's calls.

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self._is_receiving = True
        self._since_s = self._host.now_s

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
            raise _RefusedError(431, _header_too_large(self._limits))
        if not self._in_body:  # what comes after the body must not change what the request says
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """The header is complete."""
        self._in_body = True
        self._head_bytes_fed = 0
        self._since_s = self._host.now_s
        headers = self._headers
        if not headers and self._parser.get_http_version() == "0.9":
            raise _RefusedError(505, invalid("the request is not HTTP/1.1 or HTTP/1.0"))
        if b"transfer-encoding" in headers and headers[b"transfer-encoding"].lower().rstrip() != b"chunked":
            raise _RefusedError(501, unsupported("the only transfer encoding is 'chunked'"))
        if b"content-length" in headers:
            self._length = int(headers[b"content-length"])
            if self._length > self._limits.body_bytes_max:
                self._refuse_body(self._length)
        if b"expect" in headers and self._transport is not None:
            if headers[b"expect"].lower().rstrip() != b"100-continue":
                raise _RefusedError(417, invalid("the only expectation that can be met is '100-continue'"))
            if not self._exchanges:
                self._transport.write(_CONTINUE)

    def on_chunk_header(self) -> None:
        """A chunk of a chunked body begins."""
        self._chunk_count += 1
        if self._chunk_count > self._limits.chunk_count_max:
            raise _RefusedError(400, invalid(f"the request body has more than {self._limits.chunk_count_max} chunks"))

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._received += len(body)
        if self._refusal is not None or self._received > self._limits.body_bytes_max:
            self._refuse_body(self._received)
        else:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        """The request is complete, unless it offers to change the protocol (`_decline`)."""
        if b"upgrade" in self._headers and self._parser.should_upgrade():
            return
        exchange = self._exchange()
        parts = self._parts
        if parts:
            exchange.body = parts[0] if len(parts) == 1 else b"".join(parts)
        if self._memory is not None and self._refusal is None:
            self._memory.learn(exchange, self._length)
        self._begin(exchange)

    def _refuse_body(self, size: int) -> None:
        """Drop the body, so that the client, which is still sending it, can read the answer afterwards.

        Raises:
            _RefusedError: There is too much to drop, or the client waits for leave to send it.
        """
        if self._refusal is None:
            announced = f" of {self._length} bytes" if self._length else ""
            self._refusal = invalid(
                f"request body{announced} is larger than the maximum of {self._limits.body_bytes_max} bytes",
                hint="the limit is set by --http-max-input-size",
            )
            self._parts.clear()
        if size > self._limits.discard_bytes_max or b"expect" in self._headers:
            raise _RefusedError(400, self._refusal)

    # From a request to its response.

    def _exchange(self) -> Exchange:
        parser, headers = self._parser, self._headers
        exchange = Exchange(self, parser.get_method(), self._url, headers)
        if self._host.is_closing or not parser.should_keep_alive():
            exchange.end_connection()
            exchange.takes_chunks = parser.get_http_version() != "1.0"
        elif b"connection" in headers and parser.get_http_version() == "1.0":
            exchange.connection = b"Connection: keep-alive\r\n"
            exchange.takes_chunks = False
        return exchange

    def _begin(self, exchange: Exchange) -> None:
        refusal = self._refusal
        self._reset()
        self._is_receiving = False
        self._in_body = False
        if not exchange.keep_alive:
            self._ends = True
        self._hand_over(exchange, refusal)

    def _hand_over(self, exchange: Exchange, refusal: ServingError | None) -> None:
        self._exchanges.append(exchange)
        if refusal is None:
            self._host.handle(exchange)
        else:
            exchange.fail(refusal)
        if len(self._exchanges) >= self._limits.pipeline_max:
            self._pace()

    def answered(self, exchange: Exchange) -> None:
        """An exchange has its response: write it, and those behind it that waited for it."""
        exchanges = self._exchanges
        if not exchanges or exchanges[0] is not exchange:
            return
        transport = self._transport
        while exchanges and exchanges[0].response is not None:
            first = exchanges.pop(0)
            self._host.finished(first)
            if transport is not None and not transport.is_closing():
                _write(transport, first.response or [])
            if first.has_begun and not first.keep_alive:
                self._ends = True  # the end of the connection is that of the response: nothing can follow
                self._body = None
                _give_up(self._host, exchanges)
        if exchanges:
            self.progressed(exchanges[0])
        if self._is_paused:
            self._pace()
        if not exchanges:
            if self._ends:
                self._end()
            elif not self._is_receiving:
                self._since_s = self._host.now_s

    def progressed(self, exchange: Exchange) -> None:
        """An exchange has a further part of its response: write it if nothing is ahead of it."""
        if exchange.has_begun and self._exchanges and self._exchanges[0] is exchange:
            parts, transport = exchange.take_unwritten(), self._transport
            if parts and transport is not None and not transport.is_closing():
                _write(transport, parts)

    def unsent_bytes(self) -> int:
        """Return how much of what was written the client has not taken."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def _end(self) -> None:
        """Close; where the client is still sending, only after it has had time to read why.

        When the server stops, also not before the client has everything: what the system has yet to send may end with
        the server's container.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        has_to_wait = self._is_receiving or (self._host.is_closing and unsent_bytes(transport) > 0)
        if not (has_to_wait and transport.can_write_eof()):
            transport.close()
        elif not self._lingers:
            self._lingers = True
            self._since_s = self._host.now_s
            transport.write_eof()
            self._pace()  # what it still sends is dropped

    def _pace(self) -> None:
        """Read from the client only while it keeps within its limits."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        is_full = self._write_is_paused or len(self._exchanges) >= self._limits.pipeline_max
        if is_full and not self._is_paused:
            self._is_paused = True
            transport.pause_reading()
        elif not is_full and self._is_paused:
            self._is_paused = False
            self._since_s = self._host.now_s
            transport.resume_reading()

    def _refuse(self, status: int, error: ServingError) -> None:
        """Answer what cannot be an exchange, and end the connection: what follows cannot be understood."""
        exchange = Exchange(self, b"", self._url, {})
        exchange.end_connection()
        self._reset()
        self._ends = True
        self._exchanges.append(exchange)
        exchange.fail(error, status)

    # The endpoint's calls.

    def wind_down(self) -> None:
        """Take no more requests; close as soon as the client has the last response."""
        if self._exchanges:
            self._exchanges[-1].end_connection()
            self._ends = True
            self._body = None  # what is arriving is dropped
        elif not self._is_receiving:
            self._ends = True
            self._end()

    def untaken(self) -> tuple[int, int]:
        """Return how many bytes the client has not taken; that it still sends is no reason to wait for it."""
        return (unsent_bytes(self._transport) if self._transport is not None else 0), 0

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def check_time(self, now_s: float) -> None:
        """End the connection if its client takes too long."""
        transport, limits = self._transport, self._limits
        if transport is None:
            return
        waited_s = now_s - self._since_s
        if self._write_is_paused or self._lingers:
            unsent = unsent_bytes(transport)
            if unsent != self._unsent:
                self._unsent = unsent
                self._since_s = now_s
            elif waited_s > (LINGER_S if self._lingers else limits.write_timeout_s):
                transport.abort()
        elif self._is_receiving and not self._ends:
            if self._is_paused:
                return
            limit_s = limits.header_timeout_s
            if self._in_body:
                limit_s = limits.body_timeout_s + self._received / limits.body_bytes_per_s_min
            if waited_s > limit_s:
                self._refuse(408, unavailable(f"the request did not arrive within {limit_s:.0f} s"))
        elif not self._exchanges and waited_s > limits.idle_timeout_s:
            transport.abort()  # it may be closing already, and the client take nothing


def _direct_body(headers: dict[bytes, bytes], length: int, parts: list[bytes]) -> memoryview:
    """Return the buffer of a body in progress, filled as far as it was received."""
    json_size = headers.get(JSON_SIZE, b"")
    # Not a bytearray, which would be filled with zeros first.
    memory = np.empty(length + ALIGNMENT_BYTES, np.uint8)
    first_tensor = memory.ctypes.data + (int(json_size) if json_size.isdigit() and len(json_size) < DIGITS_MAX else 0)
    start = -first_tensor % ALIGNMENT_BYTES
    body = memory.data[start : start + length]
    received = b"".join(parts)
    body[: len(received)] = received
    return body


class _RefusedError(Exception):
    """Ends parsing: the request breaks a limit of the endpoint."""

    def __init__(self, status: int, error: ServingError) -> None:
        super().__init__(str(error))
        self.status = status
        self.error = error


def _header_too_large(limits: HttpLimits) -> ServingError:
    return invalid(
        f"the request header is larger than {limits.header_count_max} fields or {limits.header_bytes_max} bytes"
    )


def _give_up(host: Host, exchanges: list[Exchange]) -> None:
    """Abandon exchanges whose responses nobody will get, and forget them."""
    abandoned = exchanges[:]
    exchanges.clear()
    for exchange in abandoned:
        exchange.abandon()
        host.finished(exchange)


def _write(transport: asyncio.Transport, parts: Sequence[bytes | memoryview]) -> None:
    if len(parts) == 1:
        transport.write(parts[0])
    else:
        transport.writelines(parts)
