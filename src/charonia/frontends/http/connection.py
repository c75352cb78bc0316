"""One HTTP/1.1 connection: bytes to exchanges and back, in order, within limits.

llhttp (by way of httptools) finds the parts of a request. Small bodies come through it; the body of a request that
announces a larger one is received straight into its own buffer, so that a tensor is copied once, by the kernel.
Responses are written in the order of the requests, whatever order they are ready in (pipelining).
"""

import asyncio
from typing import Protocol, cast

import httptools
import numpy as np

from charonia.core.errors import Code, ServingError, invalid, unavailable
from charonia.frontends.http.exchange import JSON_TYPE, Exchange
from charonia.frontends.http.limits import HttpLimits
from charonia.protocol.http_status import REASONS
from charonia.protocol.v2_json import encode_error

READ_BYTES = 256 * 1024
"""Size of the buffer that all connections of an endpoint read into."""

DIRECT_BODY_BYTES = 64 * 1024
"""A body with at least so many bytes still to come is received straight into its own buffer."""

JOIN_BELOW_BYTES = 16 * 1024
"""Responses up to this size are written in one piece."""

LINGER_S = 2.0
"""Time that a client, which was refused while it was still sending, has to read the answer."""

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
        """Answer a request, now or later."""
        ...

    def finished(self, exchange: Exchange) -> None:
        """A response is about to be written."""
        ...


class HttpConnection(asyncio.BufferedProtocol):
    """A client's connection."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._exchanges: list[Exchange] = []
        self._since_s = host.now_s
        self._is_receiving = False
        self._in_body = False
        self._is_paused = False
        self._write_is_paused = False
        self._lingers = False  # the last response is out, the client may still be sending
        self._ends = False  # no more requests are taken; closes when the last response is out
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
        self._refusal: ServingError | None = None
        self._discards = False

    # The transport's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class, with the same methods
        if not self._host.opened(self):
            self._refuse(503, unavailable("the server has too many connections", hint="retry later"))

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone: nothing of it is worked on any longer."""
        self._transport = None
        self._ends = True
        self._host.closed(self)
        for exchange in self._exchanges:
            if exchange.ticket is not None and exchange.response is None:
                exchange.ticket.cancel()
        self._exchanges.clear()

    def eof_received(self) -> bool:
        """The client sends no more; it may still read."""
        self._ends = True
        return bool(self._exchanges)

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
        if self._body is not None:
            self._received += nbytes
            self._since_s = self._host.now_s
            if self._received == self._length:
                self._end_direct_body(self._body)
            return
        self._feed(self._host.read_buffer[:nbytes])

    def _feed(self, data: memoryview) -> None:
        if self._ends:
            return
        if not self._is_receiving:
            self._is_receiving = True
            self._since_s = self._host.now_s
        elif self._in_body:
            self._since_s = self._host.now_s
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, invalid("this endpoint speaks HTTP/1.1 only; it cannot upgrade the connection"))
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if isinstance(cause, _RefusedError):
                self._refuse(cause.status, cause.error)
            else:
                raise
        except httptools.HttpParserError as error:
            self._refuse(400, invalid(f"the request is not valid HTTP/1.1: {error}"))
        else:
            if self._in_body and self._length - self._received >= DIRECT_BODY_BYTES and not self._discards:
                self._start_direct_body()

    def _start_direct_body(self) -> None:
        # Not a bytearray, which would be filled with zeros first.
        body = np.empty(self._length, np.uint8).data
        received = 0
        for part in self._parts:
            body[received : received + len(part)] = part
            received += len(part)
        self._parts.clear()
        self._body = body

    def _end_direct_body(self, body: memoryview) -> None:
        # The old parser still waits for the body.
        exchange = self._exchange(self._parser.get_method())
        exchange.body = body
        self._parser = httptools.HttpRequestParser(self)
        self._reset()
        self._begin(exchange, None)

    # The parser's calls.

    def on_url(self, url: bytes) -> None:
        """A part of the request target."""
        self._url += url
        if len(self._url) > self._host.limits.url_bytes_max:
            raise _RefusedError(414, invalid(f"the URL is longer than {self._host.limits.url_bytes_max} bytes"))

    def on_header(self, name: bytes, value: bytes | None) -> None:
        """A header field."""
        value = value or b""
        self._header_count += 1
        self._header_bytes += len(name) + len(value)
        limits = self._host.limits
        if self._header_count > limits.header_count_max or self._header_bytes > limits.header_bytes_max:
            raise _RefusedError(
                431,
                invalid(
                    f"the request header is larger than {limits.header_count_max} fields or "
                    f"{limits.header_bytes_max} bytes"
                ),
            )
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """The header is complete."""
        self._in_body = True
        self._since_s = self._host.now_s
        headers = self._headers
        length = headers.get(b"content-length")
        if length is not None:
            self._length = int(length)
            self._check_size(self._length)
        expect = headers.get(b"expect")
        if expect is not None and self._refusal is None and self._transport is not None:
            if expect.lower() != b"100-continue":
                raise _RefusedError(417, invalid(f"expectation {expect!r} cannot be met"))
            if not self._exchanges:
                self._transport.write(_CONTINUE)

    def on_chunk_header(self) -> None:
        """A chunk of a chunked body begins."""
        self._chunk_count += 1
        if self._chunk_count > self._host.limits.chunk_count_max:
            raise _RefusedError(
                400, invalid(f"the request body has more than {self._host.limits.chunk_count_max} chunks")
            )

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._received += len(body)
        if self._discards:
            return
        if self._received > self._host.limits.body_bytes_max:
            self._check_size(self._received)
            return
        self._parts.append(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        exchange = self._exchange(self._parser.get_method())
        parts = self._parts
        if parts:
            exchange.body = parts[0] if len(parts) == 1 else b"".join(parts)
        refusal = self._refusal
        self._reset()
        self._begin(exchange, refusal)

    # From a request to its response.

    def _exchange(self, method: bytes) -> Exchange:
        keep_alive = self._parser.should_keep_alive() and not self._host.is_closing
        return Exchange(self, method, self._url, self._headers, keep_alive)

    def _check_size(self, size: int) -> None:
        limits = self._host.limits
        if size <= limits.body_bytes_max:
            return
        error = invalid(
            f"request body of {size} bytes is larger than the maximum of {limits.body_bytes_max} bytes",
            hint="the limit is set by --http-max-input-size",
        )
        # The rest of it is dropped so that the client, which is still sending, can read the answer.
        if self._length > limits.discard_bytes_max or b"expect" in self._headers:
            raise _RefusedError(400, error)
        if self._received > limits.discard_bytes_max:
            raise _RefusedError(400, error)
        self._refusal = error
        self._discards = True
        self._parts.clear()

    def _begin(self, exchange: Exchange, refusal: ServingError | None) -> None:
        self._is_receiving = False
        self._in_body = False
        self._since_s = self._host.now_s
        if not exchange.keep_alive:
            self._ends = True
        self._exchanges.append(exchange)
        if refusal is not None:
            exchange.fail(refusal)
        else:
            self._host.handle(exchange)
        if len(self._exchanges) >= self._host.limits.pipeline_max:
            self._pace()

    def answered(self, exchange: Exchange) -> None:
        """An exchange has its response: write it, and those behind it that waited for it."""
        exchanges = self._exchanges
        if not exchanges or exchanges[0] is not exchange:
            return
        while exchanges and exchanges[0].response is not None:
            self._write(exchanges.pop(0))
        if self._is_paused:
            self._pace()
        if self._ends and not exchanges:
            self._end()

    def _end(self) -> None:
        """Close; where the client is still sending, only after it has had time to read why."""
        transport = self._transport
        if transport is None:
            return
        if self._is_receiving and transport.can_write_eof():
            self._lingers = True
            self._since_s = self._host.now_s
            transport.write_eof()
        else:
            transport.close()

    def _write(self, exchange: Exchange) -> None:
        self._host.finished(exchange)
        transport, parts = self._transport, exchange.response
        if transport is None or parts is None or transport.is_closing():
            return
        if len(parts) == 1:
            transport.write(parts[0])
        elif sum([len(part) for part in parts]) <= JOIN_BELOW_BYTES:
            transport.write(b"".join(parts))
        else:
            transport.writelines(parts)

    def _pace(self) -> None:
        """Read from the client only while it keeps within its limits."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        wanted = self._write_is_paused or len(self._exchanges) >= self._host.limits.pipeline_max
        if wanted and not self._is_paused:
            self._is_paused = True
            transport.pause_reading()
        elif not wanted and self._is_paused:
            self._is_paused = False
            transport.resume_reading()

    def _refuse(self, status: int, error: ServingError) -> None:
        """Answer something that cannot be an exchange, and end the connection: what follows cannot be understood."""
        self._body = None
        exchange = Exchange(self, b"", self._url[:100], {}, keep_alive=False)
        self._ends = True
        self._exchanges.append(exchange)
        exchange.respond(status, [encode_error(error)], JSON_TYPE)

    # The endpoint's calls.

    @property
    def is_idle(self) -> bool:
        """Whether no request is being received or answered."""
        return not self._exchanges and not self._is_receiving

    def close_when_idle(self) -> None:
        """Take no more requests; close as soon as the last response is out."""
        if self._transport is not None and self.is_idle:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def check_time(self, now_s: float) -> None:
        """End the connection if its client takes too long."""
        limits = self._host.limits
        waited = now_s - self._since_s
        if self._transport is None:
            return
        if self._write_is_paused:
            if waited > limits.body_timeout_s:
                self._transport.abort()
        elif self._lingers:
            if waited > LINGER_S:
                self._transport.abort()
        elif self._is_receiving and not self._is_paused:
            limit = limits.body_timeout_s if self._in_body else limits.header_timeout_s
            if waited > limit:
                self._refuse(408, ServingError(Code.UNAVAILABLE, f"the request did not arrive within {limit:g} s"))
        elif not self._exchanges and waited > limits.idle_timeout_s:
            self._transport.close()


class _RefusedError(Exception):
    """Ends parsing: the request breaks a limit of the endpoint."""

    def __init__(self, status: int, error: ServingError) -> None:
        super().__init__(str(error))
        if status not in REASONS:
            raise ValueError(f"status {status} has no reason phrase")
        self.status = status
        self.error = error
