"""One HTTP/1.1 connection: reading and writing, in order, with limits on memory and time.

Received bytes go to the parser, and each request that it completes becomes an exchange. Responses are written in the
order of the requests, even if they are ready in another order (pipelining). Back-pressure works both ways: reading
pauses while too many requests are in flight or while the client does not read its responses.

Clients share the event loop fairly: of several requests that arrive together, a connection handles one immediately
and each of the others in its turn (`CallbackQueue`), and reads no more until it has handled all.

No request needs a task, a future or a timer here: the endpoint's sweep finds slow clients (`check_time`). An exception
in a callback of the loop is logged and closes the connection, so that its client does not wait for a response forever.

Turns of the connections that have more to do than what just arrived.

In each round of the event loop one of them works, besides all connections that had nothing waiting. So clients that
pipeline requests share the time of one client, however many they are.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from enum import Enum
from typing import Final, Protocol, cast

from charonia.core.errors import invalid, turned_away, unavailable
from charonia.core.request import NO_FLOW, flow_of_peer
from charonia.server.access.rules import Refusal
from charonia.server.http.exchange import Exchange
from charonia.server.http.limits import HttpLimits
from charonia.server.http.parser import RECEIVING, Event, Expectation, ParserState, Request, RequestParser
from charonia.server.listening import unsent_bytes
from charonia.wire.http_status import REFUSED
from charonia.wire.tensors import Lend

_log = logging.getLogger(__name__)

READ_BYTES: Final = 256 * 1024
"""Size of the read buffer that all connections of an endpoint share."""

LINGER_S: Final = 2.0
"""Longest time without progress while a client reads its last response and the server has half-closed."""

Callback = Callable[[], None]


class CallbackQueue:
    """Calls one waiting callback in each round of the event loop, first come, first served."""

    def __init__(self, call_soon: Callable[[Callback], object]) -> None:
        self._call_soon = call_soon
        self._waiting: deque[Callback] = deque()

    def wait(self, callback: Callback) -> None:
        """Call a function when its turn comes."""
        self._waiting.append(callback)
        if len(self._waiting) == 1:
            self._call_soon(self._next)

    def _next(self) -> None:
        callback = self._waiting.popleft()
        if self._waiting:
            self._call_soon(self._next)
        callback()


class EndpointState:
    """What the connections of an endpoint share.

    Attributes:
        limits: Limits of requests and connections.
        read_buffer: Read buffer of all connections: its content is consumed immediately.
        now_s: Monotonic time of the last sweep, in seconds.
        is_closing: Whether the endpoint is shutting down: connections close after their next response.
        is_logged: Whether exchanges record when they were received, and the owner's `finished` is called.
        is_traced: Whether exchanges record when they began to arrive.
        keeps_names: Whether requests keep the original spelling of header names.
        singular: Header fields that a request must not give twice with different values.
        callbacks: Turns of the connections with more requests than they handle in one round.
        lend: Lends memory for large bodies with tensors, None where connections use their own.
        allows_websockets: Whether some requests may change to a WebSocket.
        request_count: Requests received.
    """

    def __init__(self, limits: HttpLimits, singular: Set[bytes], *, is_logged: bool) -> None:
        self.limits = limits
        self.read_buffer = memoryview(bytearray(READ_BYTES))
        self.now_s = time.monotonic()
        self.is_closing = False
        self.is_logged = is_logged
        self.is_traced = False
        self.keeps_names = False
        self.singular: Set[bytes] = singular
        self.callbacks = CallbackQueue(_call_soon)
        self.lend: Lend | None = None
        self.allows_websockets = False
        self.request_count = 0


def _call_soon(callback: Callback) -> asyncio.Handle:
    return asyncio.get_running_loop().call_soon(callback)


class ConnectionOwner(Protocol):
    """The endpoint as a connection sees it."""

    shared: EndpointState

    def opened(self, connection: "HttpConnection") -> bool:
        """Register a connection; return False when there are too many."""

    def closed(self, connection: "HttpConnection") -> None: ...

    def handle(self, exchange: Exchange) -> None:
        """Answer a request, now or later. Never raises."""

    def finished(self, exchange: Exchange) -> None:
        """A response is about to be written, or its client has gone."""


class Phase(Enum):
    """Phase of the connection's life, in order; it never goes back. The values appear in `repr`."""

    OPEN = ""
    ENDING = "ending"
    """No more requests are accepted; the connection closes after the last response."""
    LINGERING = "lingering"
    """The last response is written; the client may still be sending, or reading."""


# Faster to look up than members of their classes.
_OPEN: Final = Phase.OPEN
_IDLE: Final = ParserState.IDLE
_CONTINUE: Final = Expectation.CONTINUE


class HttpConnection(asyncio.BufferedProtocol):
    """A client's connection. A client that half-closes counts as gone and gets no more responses."""

    def __init__(self, host: ConnectionOwner) -> None:
        self.flow = NO_FLOW
        shared = host.shared
        self._host = host
        self._shared = shared
        self._limits = shared.limits
        self._transport: asyncio.Transport | None = None
        self._parser = RequestParser(
            shared.limits,
            keeps_names=shared.keeps_names,
            singular=shared.singular,
            lend=shared.lend,
            allows_websockets=shared.allows_websockets,
        )
        self._exchanges: list[Exchange] = []  # in the order of their requests
        self._waiting: deque[Event] = deque()  # requests that have arrived and are not taken yet
        self._is_turn_due = False
        self._phase = Phase.OPEN
        self._reading_paused = False
        self._writing_paused = False
        self._since_s = shared.now_s  # start of the current wait: for a header, a body, the next request, or the client
        self._arrived_ns = 0  # time of the last read, with tracing
        self._begun_ns = 0  # when the current request began to arrive
        self._unsent = 0

    def __repr__(self) -> str:
        """Return peer and state, e.g. `<HttpConnection 127.0.0.1:5123 [idle | writing paused]>`."""
        transport = self._transport
        peer = transport.get_extra_info("peername") if transport is not None else None
        in_flight = len(self._exchanges)
        name = f"HttpConnection {peer[0]}:{peer[1]}" if peer else "HttpConnection"
        parts = [
            "closed" if transport is None else str(self._parser),
            f"{in_flight} exchange{'s' * (in_flight > 1)} in flight" if in_flight else "",
            self._phase.value,
            "reading paused" if self._reading_paused else "",
            "writing paused" if self._writing_paused else "",
        ]
        return f"<{name} [{' | '.join(part for part in parts if part)}]>"

    # The transport's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class, with the same methods
        self.flow = flow_of_peer(transport.get_extra_info("peername"))
        if transport.get_extra_info("sslcontext") is None:
            # Without a buffer, a response is sent immediately, not after the loop has handled everything received.
            self._transport.set_write_buffer_limits(0)
        if not self._host.opened(self):
            error = turned_away("the server has too many connections", hint="retry later")
            self._take(Request(b"", b"", {}, keep_alive=False, refusal=error))

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone: abandon its requests."""
        self._transport = None
        self._take_no_more()
        self._host.closed(self)
        self._abandon_exchanges()

    def pause_writing(self) -> None:
        """The client reads too slowly: accept no more requests from it."""
        self._writing_paused = True
        self._since_s = self._shared.now_s
        self._pace()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._writing_paused = False
        self._pace()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer to read into."""
        vacant = self._parser.vacant
        return self._shared.read_buffer if vacant is None else vacant

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have arrived in the buffer."""
        if self._phase is not _OPEN:
            if self._exchanges and (receive := self._exchanges[-1].receive) is not None:
                receive(bytes(self._shared.read_buffer[:nbytes]))
            return
        parser, shared = self._parser, self._shared
        state = parser.state
        if shared.is_traced:
            self._arrived_ns = time.monotonic_ns()
            if state is _IDLE:
                self._begun_ns = self._arrived_ns
        try:
            events = parser.receive(shared.read_buffer[:nbytes]) if parser.vacant is None else parser.filled(nbytes)
            if parser.state is not state or (state is not _IDLE and events):
                self._since_s = shared.now_s
            if len(events) == 1 and not (self._waiting or parser.backlog):
                self._take(events[0])
            elif events or parser.backlog:
                self._waiting += events
                if not self._is_turn_due:
                    self._take_turn()
        except Exception:
            self._fail()

    def _take_turn(self) -> None:
        """Handle one waiting request; the next one has to wait for its turn."""
        self._is_turn_due = False
        is_full = self._writing_paused or len(self._exchanges) >= self._limits.pipeline_max
        if self._phase is not _OPEN or is_full:
            return
        parser, waiting = self._parser, self._waiting
        try:
            if not waiting and parser.vacant is None:
                state = parser.state
                waiting += parser.resume()
                if parser.state is not state or waiting:
                    self._since_s = self._shared.now_s
            if waiting:
                self._take(waiting.popleft())
            self._pace()
        except Exception:
            self._fail()

    def _take(self, event: Event) -> None:
        """Handle an event of the parser: start an exchange, or send 100 Continue."""
        exchanges, shared = self._exchanges, self._shared
        if self._phase is not _OPEN:  # an earlier response is the last one
            return
        if event is _CONTINUE:
            if not exchanges and self._transport is not None:
                self._transport.write(event.value)
            return
        shared.request_count += 1
        exchange = Exchange(self, event)
        if shared.is_traced:
            exchange.begun_ns = self._begun_ns
            self._begun_ns = self._arrived_ns  # the next one was in the same read
        if shared.is_closing:
            exchange.end_connection()
        if not exchange.keep_alive:
            self._take_no_more()
        exchanges.append(exchange)
        if event.refusal is not None:
            exchange.fail(event.refusal, event.refusal_status)
        else:
            if shared.is_logged:
                exchange.received_ns = time.monotonic_ns()
            self._host.handle(exchange)
        if len(exchanges) >= self._limits.pipeline_max:
            self._pace()

    def _take_no_more(self) -> None:
        if self._phase is Phase.OPEN:
            self._phase = Phase.ENDING
        self._waiting.clear()
        self._parser.end()

    # The exchanges' calls.

    def answered(self, exchange: Exchange) -> None:
        """An exchange has its response: write it, and those behind it that are ready."""
        exchanges = self._exchanges
        if not exchanges or exchanges[0] is not exchange:
            return
        try:
            while exchanges and (response := exchanges[0].response) is not None:
                first = exchanges.pop(0)
                if self._shared.is_logged:
                    self._host.finished(first)
                self._write(response)
                if first.has_begun and not first.keep_alive:  # closing marks the end of the response
                    self._take_no_more()
                    self._abandon_exchanges()
            if exchanges:
                self.progressed(exchanges[0])
            if self._reading_paused:
                self._pace()
            if not exchanges:
                if self._phase is not _OPEN:
                    self._end()
                elif self._parser.state is _IDLE:
                    self._since_s = self._shared.now_s
        except Exception:
            self._fail()

    def progressed(self, exchange: Exchange) -> None:
        """An exchange has another part of its response: write it if no exchange is ahead."""
        if exchange.has_begun and self._exchanges and self._exchanges[0] is exchange:
            try:
                self._write(exchange.take_unwritten())
            except Exception:
                self._fail()

    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def _write(self, parts: Sequence[bytes | memoryview]) -> None:
        transport = self._transport
        if parts and transport is not None and not transport.is_closing():
            if len(parts) == 1:
                transport.write(parts[0])
            else:
                transport.writelines(parts)

    def _abandon_exchanges(self) -> None:
        """Abandon exchanges whose responses can no longer be sent."""
        abandoned = self._exchanges[:]
        self._exchanges.clear()
        for exchange in abandoned:
            exchange.abandon()
            if self._shared.is_logged:
                self._host.finished(exchange)

    def _fail(self) -> None:
        """Log the current exception, a bug, and close: the client would wait forever."""
        _log.exception("%r is closed after a fault", self)
        self.abort()

    def _end(self) -> None:
        """Close; if the client is still sending, linger so that it can read the error.

        During shutdown, linger also until everything is sent: data in the system's buffers may be lost with the
        server's container.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        has_to_wait = self._parser.state is ParserState.CUT_OFF or (
            self._shared.is_closing and unsent_bytes(transport) > 0
        )
        if not (has_to_wait and transport.can_write_eof()):
            transport.close()
        elif self._phase is not Phase.LINGERING:
            self._phase = Phase.LINGERING
            self._since_s = self._shared.now_s
            transport.write_eof()
            self._pace()  # drops later input

    def _pace(self) -> None:
        """Read from the client only while it keeps within its limits and none of its requests waits."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        is_full = self._writing_paused or len(self._exchanges) >= self._limits.pipeline_max
        is_behind = bool(self._waiting or self._parser.backlog)
        if is_behind and not (is_full or self._is_turn_due):
            self._is_turn_due = True
            self._shared.callbacks.wait(self._take_turn)
        if (is_full or is_behind) and not self._reading_paused:
            self._reading_paused = True
            transport.pause_reading()
        elif not (is_full or is_behind) and self._reading_paused:
            self._reading_paused = False
            self._since_s = self._shared.now_s
            transport.resume_reading()

    # The endpoint's calls.

    def uses(self) -> int | None:
        """Return 0, None while a request is here or arriving. With `is_closing`, another use ends the connection."""
        is_used = self._exchanges or self._waiting or self._parser.state in RECEIVING
        return None if is_used else 0

    def wind_down(self) -> None:
        """Accept no more requests; close when the client has the last response."""
        if self._exchanges:
            if self._exchanges[-1].receive is not None:  # it would not end by itself
                self.abort()
                return
            self._exchanges[-1].end_connection()
            self._take_no_more()
        elif self._parser.state not in RECEIVING:
            self._take_no_more()
            self._end()

    def recheck(self, refusal_of: Callable[[Request], Refusal | None]) -> None:
        """End the event streams that are no longer permitted."""
        for exchange in self._exchanges[:]:
            if exchange.stream is not None and (refusal := refusal_of(exchange.request)) is not None:
                exchange.stream.stop(invalid(refusal.message), REFUSED[refusal.kind])

    def untaken(self) -> tuple[int, int]:
        """Return the number of bytes that the client has not read; reads that it still sends do not count."""
        return (unsent_bytes(self._transport) if self._transport is not None else 0), 0

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def check_time(self, now_s: float) -> None:
        """End the connection if its client takes too long."""
        transport, limits, parser = self._transport, self._limits, self._parser
        if transport is None:
            return
        if self._phase is Phase.LINGERING and self._shared.is_closing:
            return  # `drain` abandons it, and reports it
        waited_s = now_s - self._since_s
        if self._writing_paused or self._phase is Phase.LINGERING:
            unsent = unsent_bytes(transport)
            if unsent != self._unsent:
                self._unsent = unsent
                self._since_s = now_s
            elif waited_s > (LINGER_S if self._phase is Phase.LINGERING else limits.write_timeout_s):
                transport.abort()
        elif parser.state in RECEIVING:
            if self._reading_paused:
                return
            limit_s = limits.header_timeout_s
            if parser.state is not ParserState.HEADER:
                limit_s = limits.body_timeout_s + parser.received / limits.body_bytes_per_s_min
            if waited_s > limit_s:
                error = unavailable(f"the request did not arrive within {limit_s:.0f} s")
                self._take(parser.refuse(408, error))
        elif not self._exchanges and waited_s > limits.idle_timeout_s:
            transport.abort()  # also one that is closing while its client reads nothing
