"""One connection: bytes to events, events to calls, replies to bytes.

What calls send is collected, and written in one piece: at the end of what was received, or, for replies that come in
between, once the loop has run everything that is ready now.
"""

import asyncio
import time
from typing import Protocol, cast

from charonia.server.access_log import AccessEntry
from charonia.server.grpc.calls import Call, Service, internal_error
from charonia.server.grpc.conduct import Conduct
from charonia.server.grpc.guard import admit
from charonia.server.grpc.http2 import (
    PREFACE,
    ConnectionClosed,
    DataReceived,
    ErrorCode,
    Event,
    Http2Error,
    PingReceived,
    RequestReceived,
    ServerConnection,
    StreamClosed,
    StreamReset,
    TrailersReceived,
)
from charonia.server.grpc.methods import Method, unknown_method
from charonia.server.grpc.room import Room
from charonia.server.grpc.timers import Timers
from charonia.server.listening import unsent_bytes
from charonia.wire.grpc_framing import Buffer
from charonia.wire.grpc_headers import (
    OK_TRAILERS,
    RESPONSE_HEAD,
    CallHead,
    Headers,
    NotGrpcError,
    error_head,
    error_trailers,
    parse_head,
)
from charonia.wire.grpc_status import RpcError

RETIRE_NOTICE_S = 0.1
"""Time between asking the client to open no more streams and refusing those that it opens."""

HTTP1_ANSWER = (
    b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-type: text/plain\r\ncontent-length: 34\r\n"
    b"connection: close\r\n\r\nthis port speaks gRPC over HTTP/2\n"
)


class Owner(Protocol):
    """Who keeps the connections."""

    def opened(self, connection: "GrpcConnection") -> None:
        """A connection has been accepted."""
        ...

    def closed(self, connection: "GrpcConnection") -> None:
        """It is gone."""
        ...


class GrpcConnection(asyncio.Protocol):
    """A client's connection. All methods run on the event loop's thread.

    Attributes:
        service: What all calls share.
        sends: How often something was sent on a stream.
    """

    __slots__ = (
        "_calls",
        "_conduct",
        "_held",
        "_http2",
        "_is_closing",
        "_is_flush_due",
        "_is_greeted",
        "_is_paused",
        "_is_reading",
        "_is_refusing",
        "_is_retiring",
        "_last_head",
        "_last_headers",
        "_late_reads",
        "_methods",
        "_owner",
        "_room",
        "_timers",
        "_to_reset",
        "_transport",
        "_unsent",
        "sends",
        "service",
    )

    def __init__(self, service: Service, methods: dict[bytes, Method], owner: "Owner") -> None:
        """Make the protocol of a connection.

        Args:
            service: What all calls share.
            methods: Methods by path.
            owner: Who is told that the connection is open, and that it is not any more.
        """
        self.service = service
        self._methods = methods
        self._owner = owner
        self._calls: dict[int, Call] = {}
        self._conduct = Conduct(service.limits)
        self._http2 = ServerConnection(service.limits.http2)
        self._room = Room(self._http2, self._calls, service.limits.unary_unsent_bytes_max)
        self._held = self._room.held
        self._timers = Timers(service.loop, service.limits, self)
        self._transport: asyncio.Transport
        self._is_greeted = False
        self._is_closing = False
        self._is_flush_due = False
        self._is_paused = False
        self._is_reading = False
        self._is_refusing = False
        self._is_retiring = False
        self._late_reads = 0
        self.sends = 0
        self._last_headers: Headers = ()
        self._last_head = CallHead()
        self._to_reset: list[int] = []
        self._unsent: list[Call] = []

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(self.service.limits.write_buffer_bytes)
        self._timers.await_greeting()
        self._owner.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Give up every call."""
        self._is_closing = True
        self._timers.stop()
        self._owner.closed(self)
        calls = list(self._calls.values())
        self._calls.clear()
        self._unsent.clear()
        self._held.clear()
        for call in calls:
            call.give_up()

    def pause_writing(self) -> None:
        """Stop reading, too: what is received would only be answered."""
        self._is_paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Go on."""
        self._is_paused = False
        if not self._transport.is_closing():  # also where it only waits for the client's end
            self._transport.resume_reading()
        self._flush()

    def data_received(self, data: bytes) -> None:
        """Handle what the client sent, and answer what can be answered at once."""
        if self._is_closing or not (self._is_greeted or self._greet(data)):
            self._late_reads += 1
            return
        self._timers.active = True
        try:
            events = self._http2.receive(data)
        except Http2Error as error:
            self._transport.write(error.last_words)
            self._close()
            return
        self._is_reading = True
        calls = self._calls
        for event in events:
            if type(event) is DataReceived:
                call = calls.get(event.stream_id)
                if call is None:
                    self._http2.consume(event.stream_id, len(event.data))
                else:
                    self._receive(call, event.data, event.end_stream)
            elif type(event) is RequestReceived:
                self._open_call(event.stream_id, event.headers, event.end_stream)
            else:
                self._control(event)
        self._is_reading = False
        self._flush()

    # What calls do.

    def respond(self, call: Call, body: list[Buffer]) -> None:
        """Send a whole response and forget the call."""
        self.sends += 1
        self._http2.respond(call.stream_id, RESPONSE_HEAD[call.encoding], body, OK_TRAILERS)
        self._forget(call)

    def reject(self, call: Call, error: RpcError) -> None:
        """End the response with an error and forget the call."""
        self.sends += 1
        if call.is_begun:
            self._http2.send_trailers(call.stream_id, error_trailers(error))
            self._room.ended(call.stream_id)
        else:
            self._http2.send_head(call.stream_id, error_head(error), end=True)
        if not call.is_received:
            self._to_reset.append(call.stream_id)
        self._forget(call)

    def send(self, call: Call, body: list[Buffer]) -> None:
        """Send a part of the response."""
        self.sends += 1
        if not call.is_begun:
            call.is_begun = True
            self._http2.send_head(call.stream_id, RESPONSE_HEAD[call.encoding])
        self._http2.send_data(call.stream_id, body)
        self._schedule_flush()

    def complete(self, call: Call) -> None:
        """End the response and forget the call."""
        self.sends += 1
        if not call.is_begun:
            self._http2.send_head(call.stream_id, RESPONSE_HEAD[b"identity"])
        self._http2.send_trailers(call.stream_id, OK_TRAILERS)
        self._room.ended(call.stream_id)
        self._forget(call)

    def consume(self, call: Call, amount: int) -> None:
        """Let the caller send `amount` bytes more."""
        self._http2.consume(call.stream_id, amount)

    def unsent_bytes(self, call: Call) -> int:
        """Return how much of the response waits for the caller's window."""
        return self._http2.unsent_bytes(call.stream_id)

    def wait_until_sent(self, call: Call) -> None:
        """Call the call's `resume` once some of the response has been sent."""
        self._unsent.append(call)

    # What timers and the front end do.

    def has_calls(self) -> bool:
        """Whether a call is open."""
        return bool(self._calls)

    def send_ping(self) -> None:
        """Ask the client for a sign of life."""
        self._http2.ping()
        self._flush()

    def retire(self, grace_s: float) -> None:
        """Ask the client to go elsewhere, and close once its calls are done, or after `grace_s` (0: no limit)."""
        if self._is_retiring or self._is_closing:
            return
        self._is_retiring = True
        self._http2.announce_shutdown()
        self._flush()
        self.service.loop.call_later(RETIRE_NOTICE_S, self._refuse_streams)
        if grace_s:
            self.service.loop.call_later(grace_s, self.abort)

    def wind_down(self) -> None:
        """Retire because the server stops: streams end as soon as they have nothing in flight."""
        self.retire(0.0)
        for call in list(self._calls.values()):
            call.wind_down()

    def untaken(self) -> tuple[int, int]:
        """Return how many bytes the client has not taken, and how often it was heard of since the last one was sent.

        A client that reads on sends news of its windows, also of what its system has had for long.
        """
        return self._http2.waiting_bytes() + unsent_bytes(self._transport), self._late_reads

    def abort(self) -> None:
        """Close now, also where the client has not taken what was written."""
        self._is_closing = True
        self._transport.abort()

    # Inside.

    def _greet(self, data: bytes) -> bool:
        """Look at the first bytes; return whether they may begin an HTTP/2 connection."""
        if not PREFACE.startswith(data[: len(PREFACE)]):
            self._transport.write(HTTP1_ANSWER)
            self._close()
            return False
        self._is_greeted = True
        self._timers.start()
        return True

    def _open_call(self, stream_id: int, headers: Headers, end: bool) -> None:
        self._http2.last_stream_id = max(self._http2.last_stream_id, stream_id)
        try:
            # Most clients send the same headers with every call.
            if headers != self._last_headers:
                self._last_head = parse_head(headers, self.service.limits.header_list_bytes_max)
                self._last_headers = headers
            head = self._last_head
            method = self._methods.get(head.path)
            if method is None:
                raise unknown_method(head.path)
            gate = self.service.services.grpc_gate
            if gate is not None:
                admit(gate, method.name, head)
        except RpcError as error:
            self._http2.send_head(stream_id, error_head(error), end=True)
            self._refused(stream_id, headers, end, error.status.name)
            return
        except NotGrpcError as error:
            self._http2.send_head(stream_id, error.headers, end=True)
            self._refused(stream_id, headers, end, error.status)
            return
        if self._http2.waiting_bytes() > self._room.unsent_bytes_max and (self._held or self._room.is_full()):
            call = method.open(self, stream_id, head, self._room)
        else:
            call = method.open(self, stream_id, head)
        self._calls[stream_id] = call
        self._timers.call_count_changed()
        if end:
            self._receive(call, b"", True)

    def _refused(self, stream_id: int, headers: Headers, end: bool, status: int | str) -> None:
        """Finish with a request that did not become a call: stop its sender, and write the access log's line."""
        if not end:
            self._to_reset.append(stream_id)
        log = self.service.access_log
        if log is not None:
            path = next((value for name, value in headers if name == b":path"), b"")
            method = self._methods.get(path)
            log.write(AccessEntry("grpc", method.name if method is not None else path.decode("latin-1"), status))

    def _receive(self, call: Call, data: bytes, end: bool) -> None:
        call.is_received = end
        try:
            call.receive(data, end)
        except Exception:
            call.fail(internal_error(call.name))

    def _control(self, event: Event) -> None:
        if isinstance(event, TrailersReceived):
            if event.stream_id in self._calls:
                self._receive(self._calls[event.stream_id], b"", True)
        elif isinstance(event, StreamReset):
            self._drop_call(event.stream_id)
            if not self._conduct.may_reset(time.monotonic_ns()):
                self._terminate(b"too_many_resets")
        elif isinstance(event, StreamClosed):
            self._drop_call(event.stream_id)
        elif isinstance(event, PingReceived):
            if not self._conduct.may_ping(time.monotonic_ns(), self.sends, has_calls=bool(self._calls)):
                self._terminate(b"too_many_pings")
        elif isinstance(event, ConnectionClosed):
            self._close(client_first=not event.error_code)
        # The rest (settings, windows, answers to pings) is the library's business.

    def _drop_call(self, stream_id: int) -> None:
        call = self._calls.pop(stream_id, None)
        if call is not None:
            call.give_up()
            self._forget(call)

    def _forget(self, call: Call) -> None:
        self._calls.pop(call.stream_id, None)
        if self._held:
            self._held.pop(call.stream_id, None)
        self._timers.call_count_changed()
        self._schedule_flush()

    def _schedule_flush(self) -> None:
        if not (self._is_reading or self._is_flush_due):
            self._is_flush_due = True
            self.service.loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Write what there is to send, then do what had to wait for that."""
        self._is_flush_due = False
        if self._is_closing or self._is_paused:
            return
        data = self._http2.output()
        if data:
            self._transport.write(data)
            for event in self._http2.events():
                self._control(event)
            if self._is_closing:
                return
        if self._to_reset:
            self._reset_answered()
        if self._unsent or self._held:
            waiting, self._unsent = self._unsent, []
            for call in waiting:
                call.resume()
            self._room.release()
            if not self._is_paused:  # that their requests were read on opens windows, which somebody may wait for
                self._transport.write(self._http2.output())
        if self._is_refusing and not (self._calls or self._is_paused or self._http2.waiting_bytes()):
            self._http2.terminate(ErrorCode.NO_ERROR)
            self._transport.write(self._http2.output())
            self._close(client_first=True)

    def _reset_answered(self) -> None:
        """Tell clients that are still sending to stop: their answer is out."""
        for stream_id in self._to_reset:
            if not self._http2.unsent_bytes(stream_id):
                self._http2.reset(stream_id, ErrorCode.NO_ERROR)
        self._to_reset.clear()
        data = self._http2.output()
        if data:
            self._transport.write(data)

    def _refuse_streams(self) -> None:
        """Second step of retiring: new streams are refused, and without open ones the connection ends."""
        if not self._is_closing:
            self._is_refusing = True
            self._http2.refuse_streams()
            self._flush()

    def _terminate(self, reason: bytes) -> None:
        """End the connection of a client that misbehaves."""
        self._http2.terminate(ErrorCode.ENHANCE_YOUR_CALM, reason)
        self._transport.write(self._http2.output())
        self._close()

    def _close(self, *, client_first: bool = False) -> None:
        """Close after what has been written.

        Args:
            client_first: Whether the client is to close when it has everything: closing first, while the client still
                sends, could cost it what is on its way.
        """
        if not self._is_closing:
            self._is_closing = True
            if client_first and self._transport.can_write_eof():
                self._transport.write_eof()
            else:
                self._transport.close()
            self._timers.await_end(self._transport)
