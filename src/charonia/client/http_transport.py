"""HTTP/1.1: keep-alive connections with one request in flight on each.

A request is written immediately if a connection is idle. Otherwise it waits while a connection is opened for it, and
uses the first connection that becomes free. A request that was written is never retried, because the server may have
seen it.
"""

import asyncio
import sys
import time
from array import array
from collections import deque
from typing import Final, cast

from charonia.client.dialing import Dialer, loss
from charonia.client.errors import failed
from charonia.core.errors import Code
from charonia.core.request import InferRequest
from charonia.wire.answer import Answer, Failure, OnAnswer
from charonia.wire.endpoint import Endpoint
from charonia.wire.grpc_framing import decompress
from charonia.wire.grpc_status import RpcError, Status
from charonia.wire.http_codec import CODES, HttpEncoder, HttpRequest, PreparedHttp, error_message
from charonia.wire.http_response import BadResponseError, Heads, ResponseReader
from charonia.wire.transport import DEFAULT_FORM, RequestForm, WireOptions

_now_ns = time.monotonic_ns

_PAUSES_AFTER_WRITELINES: Final = not (
    (3, 12) <= sys.version_info < (3, 12, 9) or (3, 13) <= sys.version_info < (3, 13, 2)
)
"""Whether asyncio reports that `writelines` has left bytes unsent: these releases do not (CVE-2024-12254)."""


DIALING_MAX: Final = 64
"""Limit of connections that are opened at the same time. Servers queue about a hundred until they accept them, and
the system repeats the others only after a second."""


class ClientExchange:
    """A request and its answer: the sender's handle."""

    __slots__ = (
        "arrivals",
        "connection",
        "first_byte_ns",
        "is_over",
        "keep_body",
        "on_answer",
        "owner",
        "request",
        "send_end_ns",
        "sent_ns",
        "timeout_s",
        "timer",
    )

    def __init__(self, owner: "HttpTransport", request: HttpRequest, on_answer: OnAnswer, keep_body: bool) -> None:
        self.sent_ns = _now_ns()
        self.owner = owner
        self.request = request
        self.on_answer = on_answer
        self.keep_body = keep_body
        self.arrivals = array("q") if keep_body else None
        self.connection: HttpClientConnection | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.timeout_s = 0.0
        self.is_over = False
        self.send_end_ns = 0
        self.first_byte_ns = 0

    def cancel(self) -> None:
        """Cancel it: no answer follows."""
        if not self.is_over:
            self._end()
            self._leave()

    def expire(self) -> None:
        if not self.is_over:
            self._leave()
            self.fail(Failure.TIMEOUT, f"{self.owner.endpoint} did not respond within {self.timeout_s:g} s")

    def fail(self, failure: Failure, message: str) -> None:
        if not self.is_over:
            self.owner.failures[failure] += 1
            self.answer(failed(Answer(self.sent_ns, self.send_end_ns), failure, message))

    def answer(self, answer: Answer) -> None:
        """Deliver the answer and end the exchange."""
        self._end()
        self.on_answer(answer)

    def _leave(self) -> None:
        # An outstanding response would be taken for the next one.
        if self.connection is not None:
            self.connection.abort()

    def _end(self) -> None:
        self.is_over = True
        if self.timer is not None:
            self.timer.cancel()


class HttpClientConnection(asyncio.Protocol):
    """One connection: idle, or with one exchange.

    Attributes:
        is_lost: Whether it is closed.
    """

    def __init__(self, owner: "HttpTransport") -> None:
        self._owner = owner
        self._reader = ResponseReader(owner.heads, owner.options.response_bytes_max)
        self._exchange: ClientExchange | None = None
        self._transport: asyncio.Transport
        self._is_paused = False
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(0)  # so that `pause_writing` reports all unsent bytes
        self._owner.dialer.opened(self, transport)

    async def ready(self) -> None:
        """Do nothing: a server of HTTP/1.1 does not speak first."""

    def start(self, exchange: ClientExchange) -> None:
        """Send a request on this idle connection."""
        self._exchange = exchange
        exchange.connection = self
        self._reader.begin(keep_body=exchange.keep_body)
        pieces = exchange.request.pieces
        if len(pieces) > 1 and _PAUSES_AFTER_WRITELINES:
            self._transport.writelines(pieces)
        else:
            for piece in pieces:
                self._transport.write(piece)
        if not self._is_paused:
            exchange.send_end_ns = _now_ns()

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        """The whole request was sent."""
        self._is_paused = False
        if self._exchange is not None:
            self._exchange.send_end_ns = _now_ns()

    def data_received(self, data: bytes) -> None:
        """Process a part of the response."""
        exchange = self._exchange
        if exchange is None:
            self.abort()  # unsolicited data, which would be taken for the next response
            return
        now_ns = _now_ns()
        if not exchange.first_byte_ns:
            exchange.first_byte_ns = now_ns
        reader = self._reader
        try:
            is_complete = reader.feed(data)
        except BadResponseError as error:
            self._garbled(exchange, error)
            return
        if exchange.arrivals is not None and reader.received:
            exchange.arrivals.extend((now_ns, reader.received))
        if is_complete:
            self._complete(exchange)

    def eof_received(self) -> None:
        """The server has closed its side: accept no more requests. The transport closes itself."""
        self._owner.lost(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the request in flight, unless the end of the connection completes its response."""
        self.is_lost = True
        exchange, self._exchange = self._exchange, None
        self._owner.dialer.closed(self)
        self._owner.lost(self)
        if exchange is None or exchange.is_over:
            return
        if exc is None and self._reader.feed_eof():
            exchange.answer(self._answer(exchange))
            return
        reader = self._reader
        progress = "before any response"
        if reader.head is not None and reader.head.length >= 0:
            progress = f"after {reader.received} of {reader.head.length} bytes of the response"
        elif reader.is_begun:
            progress = "in the middle of the response"
        exchange.fail(Failure.RESET, loss(self._owner.endpoint, exc, progress))

    def abort(self) -> None:
        """Abort the connection; the transport only learns that it is lost."""
        self._exchange = None
        self._owner.lost(self)
        self._transport.abort()

    def finish(self) -> None:
        """Close an idle connection, or fail the request in flight and abort."""
        exchange = self._exchange
        if exchange is None:
            self._transport.close()
        else:
            self.abort()
            exchange.fail(Failure.CLOSED, "the client was closed")

    def _garbled(self, exchange: ClientExchange, error: BadResponseError) -> None:
        self.abort()
        if not exchange.is_over:
            failure = Failure.OVERSIZE if error.is_oversize else Failure.GARBLED
            exchange.fail(failure, f"{self._owner.endpoint}: {error}")

    def _complete(self, exchange: ClientExchange) -> None:
        head = self._reader.head
        answer = self._answer(exchange)
        self._exchange = None
        # Free the connection first, because the callback probably sends the next request.
        if head is not None and head.keep_alive:
            self._owner.freed(self)
        else:
            self._owner.lost(self)
            self._transport.close()
        exchange.answer(answer)

    def _answer(self, exchange: ClientExchange) -> Answer:
        now_ns = _now_ns()
        answer = Answer(exchange.sent_ns, exchange.send_end_ns, now_ns - exchange.first_byte_ns, now_ns)
        reader = self._reader
        answer.received_bytes = reader.received
        head = reader.head
        if head is None:
            return answer
        answer.status = head.status
        if head.status == 200 and not exchange.keep_body:
            return answer
        answer.json_bytes = head.json_bytes
        try:
            body = _plain(reader.body, head.coding, self._owner.options.response_bytes_max)
        except RpcError as error:
            failure = Failure.OVERSIZE if error.status is Status.RESOURCE_EXHAUSTED else Failure.GARBLED
            self._owner.failures[failure] += 1
            return failed(answer, failure, f"{self._owner.endpoint}: {error.message}")
        if exchange.keep_body:
            answer.body = body
            answer.arrivals = None if head.coding else exchange.arrivals
        if head.status != 200:
            self._owner.failures[Failure.STATUS] += 1
            answer.failure = Failure.STATUS
            answer.code = CODES.get(head.status, Code.UNKNOWN)
            answer.message = error_message(body, head.status)
            answer.is_unexecuted = head.is_unexecuted
        return answer


def _plain(body: bytes, coding: str, limit: int) -> bytes:
    """Return a body without its content coding.

    Raises:
        RpcError: RESOURCE_EXHAUSTED for a body over the limit, INTERNAL for one that is not in its coding.
    """
    if not coding:
        return body
    if coding not in ("gzip", "deflate"):
        raise RpcError(Status.INTERNAL, f"the response has content coding '{coding:.40}', which was not requested")
    return decompress(body, coding.encode(), limit)


class HttpTransport:
    """Connections to an HTTP server. The interface is `charonia.wire.transport.Transport`."""

    def __init__(self, endpoint: Endpoint, options: WireOptions) -> None:
        """Create a transport without connections; call it on the event loop. Raises INVALID_ARG for invalid options."""
        self.endpoint = endpoint
        self.options = options
        self.encoder = HttpEncoder(endpoint, options)
        self.dialer = Dialer(endpoint, options, http2=False)
        self.failures = self.dialer.failures
        self.heads: Heads = {}
        self._loop = asyncio.get_running_loop()
        self._connections: set[HttpClientConnection] = set()
        self._idle: list[HttpClientConnection] = []
        self._waiting: deque[ClientExchange] = deque()
        self._is_closed = False

    def prepare(self, request: InferRequest, form: RequestForm = DEFAULT_FORM) -> PreparedHttp:
        return self.encoder.infer(request, form)

    def send(
        self, prepared: HttpRequest, on_answer: OnAnswer, timeout_s: float = 0.0, *, keep_body: bool = False
    ) -> ClientExchange:
        exchange = ClientExchange(self, prepared, on_answer, keep_body)
        timeout_s = timeout_s or self.options.timeout_s
        if timeout_s:
            exchange.timeout_s = timeout_s
            exchange.timer = self._loop.call_later(timeout_s, exchange.expire)
        idle = self._idle
        if idle:
            idle.pop().start(exchange)
        else:
            self._await_connection(exchange)
        return exchange

    async def open(self, connections: int) -> int:
        wanted = min(connections, self.options.connections_max)
        before = -1
        while before < len(self._connections) < wanted:
            before = len(self._connections)
            for _ in range(min(wanted - before, DIALING_MAX) - self.dialer.dialing):
                self._dial()
            await self.dialer.settle()
        return len(self._connections)

    async def close(self) -> None:
        self._is_closed = True
        for exchange in self._waiting:
            exchange.fail(Failure.CLOSED, "the client was closed")
        self._waiting.clear()
        for connection in tuple(self._connections):
            connection.finish()
        await self.dialer.close()

    # Called by connections and exchanges.

    def freed(self, connection: HttpClientConnection) -> None:
        """A connection is free for a request."""
        if self._is_closed:
            connection.finish()
            return
        exchange = self._next_waiting()
        if exchange is not None:
            connection.start(exchange)
        else:
            self._idle.append(connection)

    def lost(self, connection: HttpClientConnection) -> None:
        """A connection accepts no more requests."""
        self._connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    # Making connections.

    def _await_connection(self, exchange: ClientExchange) -> None:
        options, waiting = self.options, self._waiting
        if self._is_closed:
            self._refuse(exchange, Failure.CLOSED, "the client was closed")
            return
        waiting.append(exchange)
        if self.dialer.dialing >= len(waiting):
            return
        if len(waiting) > options.waiting_max or len(self._connections) + len(waiting) > options.connections_max:
            waiting.pop()
            self._refuse(
                exchange, Failure.EXHAUSTED, f"all {options.connections_max} connections to {self.endpoint} are busy"
            )
            return
        self._dial_for_waiting()

    def _refuse(self, exchange: ClientExchange, failure: Failure, message: str) -> None:
        self._loop.call_soon(exchange.fail, failure, message)

    def _dial_for_waiting(self) -> None:
        """Open a connection if there are fewer attempts than waiting requests."""
        if self.dialer.dialing < min(len(self._waiting), DIALING_MAX):
            self._dial()

    def _dial(self) -> None:
        self.dialer.dial(lambda: HttpClientConnection(self), self._connection_made, self._connect_failure)

    def _connection_made(self, connection: HttpClientConnection) -> None:
        if not connection.is_lost:
            self._connections.add(connection)
            self.freed(connection)
            self._dial_for_waiting()
        else:
            self._connect_failure(f"{self.endpoint} closed the connection immediately")

    def _connect_failure(self, message: str) -> None:
        exchange = self._next_waiting()
        if exchange is None:
            self.failures[Failure.REFUSED] += 1
        while exchange is not None:
            exchange.fail(Failure.REFUSED, message)
            # Those for which there was no attempt yet fail, too.
            exchange = self._next_waiting() if len(self._waiting) > self.dialer.dialing else None

    def _next_waiting(self) -> ClientExchange | None:
        """Return the longest-waiting request that has not been cancelled."""
        waiting = self._waiting
        while waiting:
            exchange = waiting.popleft()
            if not exchange.is_over:
                return exchange
        return None
