"""One connection: bytes to events, events to the call table, and output of calls to bytes.

Output of calls is collected and written in one piece: after received data has been handled, or, for later replies,
after the loop has run all callbacks that are ready.

Clients share the event loop fairly: of a read with many events, a connection handles a few in each round of the loop
(`FrameReader`), and reads no more until it has handled all.

An exception in a callback of the event loop is a bug of the server. The connection then ends its calls with an error
and closes, so that no client waits for an answer that never comes.

The unhandled input of a connection: bytes, and events of parsed bytes.

Bytes are parsed in pieces, which grow while they have few events: a large tensor is parsed in a few steps, a flood of
small frames in many. Calls that begin and are cancelled within a piece never begin.

The time limits of a connection: keepalive and age have timers, all others are checked once in a while (`Timers.check`).
A check costs requests nothing. It limits the time for a frame, for a message, and without a call.
"""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, Protocol, cast

from charonia.core.request import flow_of_peer
from charonia.server.grpc.call_table import CallTable, server_fault
from charonia.server.grpc.calls import Service
from charonia.server.grpc.http2 import (
    PREFACE,
    SHUTDOWN_PING,
    ConnectionClosed,
    DataReceived,
    ErrorCode,
    Event,
    Http2Error,
    PingAcknowledged,
    PingReceived,
    RequestReceived,
    ServerConnection,
    SettingsReceived,
    StreamClosed,
    StreamReset,
    TrailersReceived,
    has_response,
)
from charonia.server.grpc.limits import AbuseLimits, AbusiveAddresses, GrpcLimits
from charonia.server.grpc.methods import Method
from charonia.server.listening import unsent_bytes

_log = logging.getLogger(__name__)

RETIRE_NOTICE_S: Final = 0.1
"""Time between asking the client to open no more streams and refusing new ones."""

TIMER_RESOLUTION_S: Final = 0.01
"""Timers may be early by less than this."""

_OTHERS: Final = frozenset(
    (TrailersReceived, StreamReset, SettingsReceived, PingReceived, PingAcknowledged, ConnectionClosed)
)
"""Events that do not belong to calls; the library handles others: windows, answers to settings and pings."""

HTTP1_ANSWER: Final = (
    b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-type: text/plain\r\ncontent-length: 52\r\n"
    b"connection: close\r\n\r\nthis port speaks gRPC over HTTP/2: grpc://HOST:PORT\n"
)

EVENTS_AT_ONCE: Final = 32
"""Events of a connection that are handled in one round; a call is two or more."""

EVENTS_PER_ROUND: Final = 8
"""Of more, this number is handled in each round of the event loop."""

PIECE_BYTES_MIN: Final = 4 * 1024
"""First size of a piece of bytes to parse, and the size after a piece with many events."""

PIECE_BYTES_MAX: Final = 1024 * 1024
"""Size of a piece of bytes to parse after several pieces with few events."""

AGE_JITTER: Final = 0.1
"""Random variation of the age limit, so that clients do not all reconnect together."""


_FRAME: Final = 0
"""In place of a stream: a frame that is not part of a call yet."""


class Timed(Protocol):
    """What timers do with their connection. See `GrpcConnection`."""

    def send_ping(self) -> None: ...

    def retire(self, grace_s: float) -> int | None:
        """Ask the client to reconnect, and close once its calls are done, or after `grace_s` (0: no limit)."""

    def abort(self) -> None:
        """Close now."""


class Timers:
    """The timers of one connection.

    Reads do not touch timers: they set the flag `active`, which each keepalive period checks.

    Attributes:
        active: Set whenever data is received.
        calls: The connection's calls.
    """

    __deletable__ = ("_connection",)  # for the compiled form

    calls: CallTable

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: GrpcLimits, connection: Timed) -> None:
        self._loop = loop
        self._limits = limits
        self._connection = connection
        self._handles: dict[str, asyncio.TimerHandle] = {}
        self._pings = 0
        self._sends = 0
        self._newest_stream = -1
        self._quiet_since_s = 0.0
        self._unfinished: dict[int, tuple[float, int]] = {}
        self.active = False

    def start(self) -> None:
        """Start keepalive and age: the client has begun its preface."""
        limits = self._limits
        self._arm("keepalive", limits.keepalive_time_s, self._keepalive)
        if limits.connection_age_max_s:
            jitter = random.uniform(1 - AGE_JITTER, 1 + AGE_JITTER)
            self._arm("age", limits.connection_age_max_s * jitter, self._too_old)

    def stop(self) -> None:
        """Cancel all timers."""
        for handle in self._handles.values():
            handle.cancel()
        self._handles.clear()
        del self._connection  # breaks a reference cycle

    def await_end(self, transport: asyncio.WriteTransport) -> None:
        """Start the time limit for closing: the client may have stopped reading the remaining output."""
        left = unsent_bytes(transport)
        self._arm("end", self._limits.keepalive_timeout_s, lambda: self._check_end(transport, left))

    def restart_timeout(self) -> None:
        """Begin again with the time for unfinished messages: the server does not read."""
        self._unfinished = {}

    def check(self, now_s: float, newest_stream: int, *, is_cut: bool) -> None:
        """End the calls and the connection of a client that takes too long.

        Args:
            now_s: Time of the event loop.
            newest_stream: The newest stream with a request.
            is_cut: Whether the received bytes end within a frame.
        """
        limits, calls, before = self._limits, self.calls, self._unfinished
        unfinished = calls.unfinished()
        if is_cut and not calls:
            unfinished[_FRAME] = 0
        self._unfinished = {}
        for stream_id, received in unfinished.items():
            since_s, earlier = before.get(stream_id, (now_s, received))
            if received < earlier:  # of another message
                since_s = now_s
            self._unfinished[stream_id] = since_s, received
            limit_s = limits.body_timeout_s + received / limits.body_bytes_per_s_min
            if stream_id == _FRAME and now_s - since_s > limits.header_timeout_s:
                self._connection.retire(limits.connection_age_grace_s)
            elif stream_id != _FRAME and now_s - since_s > limit_s:
                calls.time_out(stream_id, limit_s)
        if calls or newest_stream != self._newest_stream:
            self._newest_stream, self._quiet_since_s = newest_stream, now_s
        elif limits.connection_idle_max_s and now_s - self._quiet_since_s > limits.connection_idle_max_s:
            self._connection.retire(limits.connection_age_grace_s)

    def _arm(self, name: str, delay_s: float, callback: Callable[[], None]) -> None:
        self._handles[name] = self._loop.call_later(delay_s, callback)

    def _keepalive(self) -> None:
        limits = self._limits
        is_due = not self.active and (limits.keepalive_without_calls or len(self.calls) > 0)
        self.active = False
        if self.calls.sends != self._sends:
            self._sends = self.calls.sends
            self._pings = 0
        if is_due and (limits.pings_without_data_max == 0 or self._pings < limits.pings_without_data_max):
            self._pings += 1
            self._connection.send_ping()
            self._arm("keepalive", limits.keepalive_timeout_s, self._unanswered)
        else:
            self._arm("keepalive", limits.keepalive_time_s, self._keepalive)

    def _unanswered(self) -> None:
        if self.active:
            self._arm("keepalive", self._limits.keepalive_time_s, self._keepalive)
        else:
            self._connection.abort()

    def _check_end(self, transport: asyncio.WriteTransport, before: int) -> None:
        if unsent_bytes(transport) < before:
            self.await_end(transport)
        else:
            self._connection.abort()

    def _too_old(self) -> None:
        self._connection.retire(self._limits.connection_age_grace_s)


FRAME_HEAD_BYTES: Final = 9

_OF_HEADERS: Final = (b"\x01", b"\x09")
"""Types of frames: HEADERS and CONTINUATION."""


class FrameReader:
    """Turns the bytes of a connection into events, a few at a time.

    Attributes:
        has_more: Whether bytes or events wait.
        is_cut: Whether the last bytes that were parsed had no event, and end within a frame or within headers.
    """

    __slots__ = ("_events", "_http2", "_piece_bytes", "_unread", "has_more", "is_cut")

    def __init__(self, http2: ServerConnection) -> None:
        self._http2 = http2
        self._events: deque[Event] = deque()
        self._unread = b""
        self._piece_bytes = PIECE_BYTES_MIN
        self.has_more = False
        self.is_cut = False

    def add(self, data: bytes) -> None:
        """Append bytes."""
        self._unread = self._unread + data if self._unread else data
        self.has_more = True

    def clear(self) -> None:
        """Drop everything."""
        self._events.clear()
        self._unread = b""
        self.has_more = False

    def next_events(self, room: int, cancelled: Callable[[StreamReset], bool]) -> tuple[Sequence[Event], int]:
        """Return up to `room` events, in order, and the room that is left."""
        waiting = self._events
        if not waiting:
            size = self._piece_bytes
            data, self._unread = self._unread[:size], self._unread[size:]
            events = self._http2.receive(data)
            self.is_cut = not events and _ends_within(data)
            if len(events) <= room:
                if size < PIECE_BYTES_MAX:
                    self._piece_bytes = size * 2
                self.has_more = bool(self._unread)
                return events, room - max(len(events), 1)
            self._piece_bytes = PIECE_BYTES_MIN
            waiting += self._begun(events, cancelled)
            room = EVENTS_PER_ROUND
            left = 0
        else:
            left = max(room - len(waiting), 0)
        taken = [waiting.popleft() for _ in range(min(room, len(waiting)))]
        self.has_more = bool(waiting or self._unread)
        return taken, left

    def newest_stream(self) -> int:
        """Return the newest stream whose request waits, 0 if none does."""
        return max((event.stream_id for event in self._events if type(event) is RequestReceived), default=0)

    def _begun(self, events: Sequence[Event], cancelled: Callable[[StreamReset], bool]) -> list[Event]:
        """Drop the events of calls that begin and are cancelled within them."""
        begun = {event.stream_id for event in events if type(event) is RequestReceived}
        ended = {event.stream_id for event in events if type(event) is StreamReset} & begun
        found = []
        for event in events:
            if getattr(event, "stream_id", 0) not in ended:
                found.append(event)
            elif isinstance(event, DataReceived):
                self._http2.consume(event.stream_id, len(event.data))
            elif isinstance(event, StreamReset) and not cancelled(event):
                return []
        return found


def _ends_within(data: bytes) -> bool:
    """Return whether frames end within one, or with headers that continue in the next frame."""
    at, kind = 0, b""
    while at < len(data) <= PIECE_BYTES_MIN:
        kind = data[at + 3 : at + 4]
        at += FRAME_HEAD_BYTES + int.from_bytes(data[at : at + 3], "big")
    return at > len(data) or kind in _OF_HEADERS


class Owner(Protocol):
    """The front end, which keeps the set of connections.

    Attributes:
        abusers: Addresses whose connections were closed for abuse.
    """

    abusers: AbusiveAddresses

    def opened(self, connection: "GrpcConnection") -> None:
        """A connection has been accepted."""

    def closed(self, connection: "GrpcConnection") -> None: ...


class _Phase(Enum):
    OPEN = "open"
    DRAINING = "draining"  # the client has been asked to open no more streams
    REFUSING = "refusing streams"  # new streams are refused; the connection ends after the open ones
    CLOSING = "closing"


class GrpcConnection(asyncio.Protocol):
    """A client's connection. All methods run on the event loop's thread."""

    def __init__(self, service: Service, methods: dict[bytes, Method], owner: Owner) -> None:
        limits = service.limits
        self._loop = service.loop
        self._owner = owner
        self._abuse_limits = AbuseLimits(limits, owner.abusers)
        self._http2 = ServerConnection(limits.http2)
        self._timers = Timers(service.loop, limits, self)
        self._calls = self._timers.calls = CallTable(
            service,
            methods,
            self._http2,
            flush_soon=self._flush_soon,
        )
        self._transport: asyncio.Transport
        self._write_buffer_bytes = limits.write_buffer_bytes
        self._abuser_wait_s = limits.abuser_wait_s
        self._handshake_timeout_s = limits.handshake_timeout_s
        self._phase = _Phase.OPEN
        self._read_s = 0.0
        self._opened_s = self._loop.time()
        self._is_greeted = False
        self._is_flush_due = False
        self._sends_flushed = 0  # `sends` of the calls at the last flush
        self._is_paused = False
        self._late_reads = 0
        self._reader = FrameReader(self._http2)
        self._held_until_s = 0.0
        self._is_reading_paused = False
        self._is_turn_due = False

    def __repr__(self) -> str:
        """Return e.g. `<GrpcConnection draining calls=3 deferred=1 paused>`."""
        return f"<GrpcConnection {self._phase.value} {self._calls!r}{' paused' if self._is_paused else ''}>"

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(self._write_buffer_bytes)
        self._owner.opened(self)
        peer = transport.get_extra_info("peername")
        self._calls.flow = flow_of_peer(peer)
        address = peer[0] if isinstance(peer, tuple) else ""
        if self._abuse_limits.begin(address, time.monotonic_ns()):
            self._held_until_s = self._loop.time() + self._abuser_wait_s
            self._loop.call_at(self._held_until_s + TIMER_RESOLUTION_S, self._pace)
            self._loop.call_soon(self._pace)  # uvloop begins to read behind this call

    def connection_lost(self, exc: Exception | None) -> None:
        """Abandon every call."""
        self._phase = _Phase.CLOSING
        self._reader.clear()
        self._timers.stop()
        self._owner.closed(self)
        self._calls.close()

    def pause_writing(self) -> None:
        """Stop reading, too: more requests would only lead to more output."""
        self._is_paused = True
        self._pace()

    def resume_writing(self) -> None:
        """Resume reading."""
        self._is_paused = False
        self._pace()
        self._flush()

    def data_received(self, data: bytes) -> None:
        """Handle received data, and write the answers that are ready."""
        if self._phase is _Phase.CLOSING or not (self._is_greeted or self._greet(data)):
            self._late_reads += 1
            return
        self._timers.active = True
        is_behind = self._reader.has_more  # TLS may have more, though reading is paused
        self._reader.add(data)
        if not is_behind:
            self._work(EVENTS_AT_ONCE)

    def _take_turn(self) -> None:
        """Handle more of the input, in its round of the event loop."""
        self._is_turn_due = False
        if not (self._is_paused or self._phase is _Phase.CLOSING):
            self._work(EVENTS_PER_ROUND)

    def _work(self, room: int) -> None:
        """Handle up to `room` events of the input, and write the answers that are ready."""
        self._is_flush_due = True  # at the end of this
        calls, reader = self._calls, self._reader
        try:
            while room > 0 and reader.has_more:
                events, room = reader.next_events(room, self._cancelled)
                for event in events:
                    if type(event) is DataReceived:
                        calls.receive(event.stream_id, event.data, event.end_stream)
                    elif type(event) is RequestReceived:
                        calls.open(event.stream_id, event.headers, event.end_stream)
                    else:
                        self._control(event)
        except Http2Error as error:
            if error.is_abuse:
                self._abuse_limits.record_abuse(time.monotonic_ns())
            self._transport.write(error.last_words)
            self._close()
        except Exception:
            self._fail()
        else:
            self._flush()
        if reader.has_more or self._is_reading_paused:
            self._pace()

    # Called by timers and the front end.

    def check_time(self, now_s: float) -> None:
        """End calls, or the connection, if the client takes too long to complete a frame or message."""
        if self._phase is _Phase.CLOSING:
            return
        if self._is_reading_paused:
            self._timers.restart_timeout()
        elif self._abuse_limits.has_settings:
            self._timers.check(now_s, self._http2.last_stream_id, is_cut=self._reader.is_cut)
        elif now_s - self._opened_s > self._handshake_timeout_s:
            self.abort()

    def send_ping(self) -> None:
        """Send a keepalive ping."""
        self._http2.ping()
        self._flush()

    def retire(
        self, grace_s: float, notice_s: float = RETIRE_NOTICE_S, read_s: float = 0.0, first_call_s: float = 0.0
    ) -> int | None:
        """Ask the client to reconnect, and close once its calls are done, or after `grace_s` (0: no limit).

        New calls are served for `notice_s`, or for `read_s` after the client has read it. Nothing is done before the
        connection has had a call, or is `first_call_s` old. Returns `CallTable.uses`.
        """
        is_new = not self._http2.last_stream_id and self._loop.time() < self._opened_s + first_call_s
        if self._phase is _Phase.OPEN and not is_new:
            self._phase = _Phase.DRAINING
            self._read_s = read_s
            self._http2.announce_shutdown()
            self._flush()
            self._loop.call_later(notice_s, self._refuse_streams)
            if grace_s:
                self._loop.call_later(grace_s, self.abort)
        return self._calls.uses()

    def wind_down(self) -> None:
        """Retire because the server is shutting down: streams end as soon as they have nothing in flight."""
        self.retire(0.0)
        self._calls.wind_down()

    def recheck(self) -> None:
        """End the streaming calls that are no longer permitted: keys have changed."""
        self._calls.recheck()

    def untaken(self) -> tuple[int, int]:
        """Return the number of bytes that the client has not read, and of reads from it while the connection closes.

        A client that continues to read sends window updates, even for data that its system received long ago.
        """
        return self._http2.waiting_bytes() + unsent_bytes(self._transport), self._late_reads

    def abort(self) -> None:
        """Close now, even if the client has not read all output."""
        self._phase = _Phase.CLOSING
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

    def _pace(self) -> None:
        """Read while nothing that was read waits, and have a turn where something does."""
        is_behind = self._reader.has_more
        if is_behind and not (self._is_paused or self._is_turn_due or self._phase is _Phase.CLOSING):
            self._is_turn_due = True
            self._loop.call_soon(self._take_turn)
        should_pause = is_behind or self._is_paused or self._loop.time() < self._held_until_s
        if should_pause != self._is_reading_paused and not self._transport.is_closing():
            self._is_reading_paused = should_pause
            if should_pause:
                self._transport.pause_reading()
            else:  # also when half-closed
                self._transport.resume_reading()

    def _cancelled(self, event: StreamReset) -> bool:
        """Drop a call that its client has cancelled, and return whether the connection continues."""
        self._calls.drop(event.stream_id)
        if not self._abuse_limits.may_reset(time.monotonic_ns()):
            self._terminate(ErrorCode.ENHANCE_YOUR_CALM, b"too_many_resets")
        return self._phase is not _Phase.CLOSING

    def _control(self, event: Event) -> None:
        if type(event) is StreamClosed:  # the end of every call
            self._calls.drop(event.stream_id)
        elif type(event) not in _OTHERS:
            return
        elif isinstance(event, TrailersReceived):
            self._calls.receive(event.stream_id, b"", True)
        elif isinstance(event, StreamReset):
            self._cancelled(event)
        elif isinstance(event, SettingsReceived):
            if not self._abuse_limits.may_set(time.monotonic_ns()):
                self._terminate(ErrorCode.ENHANCE_YOUR_CALM, b"too_many_settings")
        elif isinstance(event, PingReceived):
            if not self._abuse_limits.may_ping(time.monotonic_ns(), self._calls.sends, has_calls=len(self._calls) > 0):
                self._terminate(ErrorCode.ENHANCE_YOUR_CALM, b"too_many_pings")
        elif isinstance(event, PingAcknowledged) and event.opaque_data == SHUTDOWN_PING and self._read_s:
            self._loop.call_later(self._read_s, self._refuse_streams)
        elif isinstance(event, ConnectionClosed):
            self._close(client_first=not event.error_code)

    def _flush_soon(self) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Write output, then do work that had to wait for that."""
        self._is_flush_due = False
        is_mute = self._is_paused or self._phase is _Phase.CLOSING
        if is_mute:
            return
        http2, calls = self._http2, self._calls
        try:
            is_new = calls.sends != self._sends_flushed
            if is_new or http2.has_output():
                output = http2.output()
                if not is_new and has_response(output):
                    calls.sends += 1  # more of a response that waited for the client's window
                self._sends_flushed = calls.sends
                self._transport.write(output)
                for event in http2.events():
                    self._control(event)
                if self._phase is _Phase.CLOSING:
                    return
            if calls.rejected:
                calls.reset_rejected()
                self._transport.write(http2.output())
            if calls.paused or calls.deferred:
                calls.resume()
                if not self._is_paused:  # window updates, since more of their requests has been read
                    self._transport.write(http2.output())
            if self._phase is _Phase.REFUSING and not (
                calls or self._reader.has_more or self._is_paused or http2.waiting_bytes()
            ):
                self._terminate(ErrorCode.NO_ERROR, client_first=True)
        except Exception:
            self._fail()

    def _refuse_streams(self) -> None:
        """Second step of retiring: refuse new streams; the connection ends after the open ones."""
        if self._phase is _Phase.DRAINING:
            self._phase = _Phase.REFUSING
            self._http2.last_stream_id = max(self._http2.last_stream_id, self._reader.newest_stream())
            self._http2.refuse_streams()
            self._flush()

    def _terminate(self, code: int, reason: bytes = b"", *, client_first: bool = False) -> None:
        """End the HTTP/2 connection with a code and its reason, and close. See `_close`."""
        if code == ErrorCode.ENHANCE_YOUR_CALM:
            self._abuse_limits.record_abuse(time.monotonic_ns())
        self._http2.terminate(code, reason)
        self._transport.write(self._http2.output())
        self._close(client_first=client_first)

    def _fail(self) -> None:
        """Close because of the current exception, a bug of the server; its calls end with an error."""
        _log.exception("%r is closed for a fault of the server", self)
        try:
            self._calls.close(server_fault("the connection is closed"))
            self._transport.write(self._http2.output())
            self._terminate(ErrorCode.INTERNAL_ERROR)
        except Exception:  # perhaps the HTTP/2 connection is broken, too
            _log.exception("the connection is aborted: it cannot end its calls")
            self.abort()

    def _close(self, *, client_first: bool = False) -> None:
        """Close after the output that has been written."""
        if self._phase is not _Phase.CLOSING:
            self._phase = _Phase.CLOSING
            self._reader.clear()
            if client_first and self._transport.can_write_eof():
                self._transport.write_eof()
            else:
                self._transport.close()
            self._timers.await_end(self._transport)
