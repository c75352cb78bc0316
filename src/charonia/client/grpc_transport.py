"""gRPC: many calls on each of a few HTTP/2 connections.

Outgoing data of calls is collected and written together: after processing received data, or, for calls that start in
between, once the loop has run all ready callbacks.

A call is resent if HTTP/2 guarantees that the server has not processed it: its stream is after the last one that a
GOAWAY names, or was refused. Every other call ends with a failure.
"""

import asyncio
import time
from collections import deque
from typing import Final, cast

from charonia.client.dialing import Dialer, loss
from charonia.client.errors import failed
from charonia.client.http2 import (
    ClientConnection,
    ConnectionClosed,
    DataReceived,
    ErrorCode,
    Event,
    GoAwayReceived,
    Http2Error,
    ResponseReceived,
    StreamClosed,
    StreamReset,
    TrailersReceived,
    is_greeting,
)
from charonia.core.errors import Code, ServingError
from charonia.core.request import InferRequest
from charonia.wire.answer import Answer, Failure, OnAnswer
from charonia.wire.endpoint import Endpoint
from charonia.wire.grpc_codec import (
    CODES,
    GrpcEncoder,
    GrpcRequest,
    PreparedGrpc,
    decode_status_message,
    stream_error,
    timeout_header,
)
from charonia.wire.grpc_framing import ENCODINGS, PREFIX_BYTES, Buffer, MessageReader
from charonia.wire.grpc_headers import OK_TRAILERS, Headers
from charonia.wire.grpc_status import RpcError, Status
from charonia.wire.http_status import UNEXECUTED
from charonia.wire.transport import DEFAULT_FORM, RequestForm, WireOptions

_STATUS_DIGITS_MAX: Final = 4


class GrpcCall:
    """A request and its answers: the sender's handle."""

    __slots__ = (
        "_encoding",
        "_has_begun",
        "_messages",
        "_on_answer",
        "_owner",
        "_reader",
        "_receive_ns",
        "_received",
        "_sent_ns",
        "_unary",
        "connection",
        "deadline_s",
        "is_over",
        "keep_body",
        "request",
        "send_end_ns",
        "stream_id",
        "timeout_s",
        "timer",
        "tries",
    )

    def __init__(self, owner: "GrpcTransport", request: GrpcRequest, on_answer: OnAnswer, keep_body: bool) -> None:
        self._sent_ns = _now_ns()
        self._owner = owner
        self._on_answer = on_answer
        self._reader: MessageReader | None = None
        self._encoding = b"identity"
        self._has_begun = False
        self._messages = 0
        self._receive_ns = 0
        self._received = 0
        self._unary: Buffer = b""
        self.request = request
        self.keep_body = keep_body
        self.connection: GrpcClientConnection | None = None
        self.stream_id = 0
        self.timeout_s = 0.0
        self.deadline_s = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self.is_over = False
        self.send_end_ns = 0
        self.tries = 0

    def cancel(self) -> None:
        if not self.is_over:
            self._end()
            self._leave()

    def expire(self) -> None:
        if not self.is_over:
            self._leave()
            self.fail(Failure.TIMEOUT, f"{self._owner.endpoint} did not respond within {self.timeout_s:g} s")

    def fail(self, failure: Failure, message: str) -> None:
        if not self.is_over:
            self._owner.failures[failure] += 1
            self._finish(failed(self._new_answer(), failure, message))

    def reset_stream(self, failure: Failure, message: str) -> None:
        """Answer with a failure, and reset the stream."""
        if not self.is_over:
            self._leave()
            self.fail(failure, f"{self._owner.endpoint}: {message}")

    # Events of the connection.

    def headers_received(self, headers: Headers) -> None:
        """The response starts."""
        self._has_begun = True
        fields = dict(headers)
        status = fields.get(b":status", b"")
        if status != b"200" or not fields.get(b"content-type", b"").startswith(b"application/grpc"):
            kind = fields.get(b"content-type", b"no type").decode("latin-1")
            text = status.decode("latin-1")
            self.reset_stream(Failure.GARBLED, f"expected a gRPC response, got HTTP status {text} with {kind:.60}")
            return
        encoding = fields.get(b"grpc-encoding", b"identity")
        if encoding not in ENCODINGS:
            self.reset_stream(Failure.GARBLED, f"grpc-encoding '{encoding.decode('latin-1'):.40}' was not requested")
        else:
            self._encoding = encoding

    def data_received(self, data: bytes) -> None:
        """A part of the response."""
        begin_ns = _now_ns()
        reader = self._reader
        if reader is None:
            size = len(data) - PREFIX_BYTES
            if (
                size >= 0
                and not data[0]
                and int.from_bytes(data[1:PREFIX_BYTES], "big") == size <= self._owner.options.response_bytes_max
            ):
                self._message_received(size, memoryview(data)[PREFIX_BYTES:], begin_ns)
                return
            reader = self._reader = MessageReader(self._encoding, self._owner.options.response_bytes_max)
        try:
            reader.feed(data)
            while not self.is_over:
                message = reader.next_message()
                if message is None:
                    break
                self._message_received(len(message), message, begin_ns)
                begin_ns = _now_ns()
        except RpcError as error:
            is_large = error.status is Status.RESOURCE_EXHAUSTED
            self.reset_stream(Failure.OVERSIZE if is_large else Failure.GARBLED, error.message)
            return
        if not reader.pending_bytes:
            self._reader = None

    def trailers_received(self, headers: Headers) -> None:
        """The response ends, with its status."""
        if headers == OK_TRAILERS:
            status = 0
            text = b""
        else:
            fields = dict(headers)
            digits = fields.get(b"grpc-status", b"")
            if not digits.isdigit() or len(digits) > _STATUS_DIGITS_MAX:
                self.headers_received(headers)  # possibly the response of something other than a gRPC server
                self.reset_stream(Failure.GARBLED, "the response ends without a status")
                return
            status = int(digits)
            text = fields.get(b"grpc-message", b"")
        if status:
            self._refused(status, decode_status_message(text), is_unexecuted=UNEXECUTED in headers)
            return
        is_stream = self.request.is_stream
        if self._reader is not None or (not is_stream and self._messages != 1):
            self.reset_stream(Failure.GARBLED, f"the response is truncated: {self._messages} complete messages")
            return
        answer = self._new_answer()
        answer.done_ns = _now_ns()
        answer.is_empty = is_stream
        if not is_stream:
            answer.received_bytes = self._received
            answer.body = self._unary
        self._finish(answer)

    def stream_closed(self, code: int) -> None:
        """The stream is closed; an incomplete response stays incomplete."""
        if self.is_over:
            return
        # The code of streams that the server refuses, that a GOAWAY excludes, and that were never sent.
        if code == ErrorCode.REFUSED_STREAM and not self._has_begun:
            self.connection = None
            self._owner.send_again(self)
        elif code == ErrorCode.NO_ERROR:
            self.fail(Failure.GARBLED, f"{self._owner.endpoint}: the response ends without a status")
        else:
            self.fail(Failure.RESET, f"{self._owner.endpoint} reset the call, HTTP/2 error code {code}")

    def _message_received(self, size: int, message: Buffer, begin_ns: int) -> None:
        self._messages += 1
        self._received += size
        done_ns = _now_ns()
        self._receive_ns = done_ns - begin_ns
        if not self.request.is_stream:
            if self._messages > 1:
                self.reset_stream(Failure.GARBLED, "expected one response, got several")
            elif self.keep_body:
                self._unary = message
            return
        answer = self._new_answer()
        answer.done_ns = done_ns
        answer.final = False
        answer.received_bytes = size
        try:
            error = stream_error(message)
        except ServingError as problem:
            self.reset_stream(Failure.GARBLED, problem.message)
            return
        if error:
            self._owner.failures[Failure.STATUS] += 1
            answer.failure = Failure.STATUS
            answer.message = error
        if self.keep_body:
            answer.body = message
        self._on_answer(answer)

    def _refused(self, status: int, message: str, is_unexecuted: bool) -> None:
        if status == Status.DEADLINE_EXCEEDED and self.deadline_s:
            self.fail(Failure.TIMEOUT, f"{self._owner.endpoint} did not respond in time: {message}")
            return
        self._owner.failures[Failure.STATUS] += 1
        answer = self._new_answer()
        answer.done_ns = _now_ns()
        answer.failure = Failure.STATUS
        answer.status = status
        answer.is_unexecuted = is_unexecuted
        answer.code = CODES.get(status, Code.UNKNOWN)
        answer.message = message or f"gRPC status {status}"
        self._finish(answer)

    def _new_answer(self) -> Answer:
        return Answer(self._sent_ns, self.send_end_ns, self._receive_ns)

    def _leave(self) -> None:
        if self.connection is not None:
            self.connection.remove(self)

    def _finish(self, answer: Answer) -> None:
        self._end()
        self._on_answer(answer)

    def _end(self) -> None:
        self.is_over = True
        if self.timer is not None:
            self.timer.cancel()


TRIES_MAX: Final = 4
"""Limit of attempts to send a call that no server processes."""

_now_ns = time.monotonic_ns


class GrpcClientConnection(asyncio.Protocol):
    """One connection and its calls.

    Attributes:
        is_lost: Whether it is closed.
        problem: Why the other end is not a gRPC server, "" if it is.
    """

    def __init__(self, owner: "GrpcTransport") -> None:
        self._owner = owner
        self._http2 = ClientConnection()
        self._calls: dict[int, GrpcCall] = {}
        self._transport: asyncio.Transport
        self._flush_is_due = False
        self._is_greeted = False
        self._greeting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_paused = False
        self._is_reading = False
        self._is_retired = False
        self.is_lost = False
        self.problem = ""

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the connection preface."""
        self._transport = cast(asyncio.Transport, transport)
        self._owner.dialer.opened(self, transport)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail every call."""
        self.is_lost = True
        self._owner.dialer.closed(self)
        if not self._greeting.done():
            self._greeting.set_result(None)
        self._fail_all(Failure.RESET, loss(self._owner.endpoint, exc, "before the answer was complete"))

    def pause_writing(self) -> None:
        """Buffer outgoing data until the operating system has room."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """Resume writing."""
        self._is_paused = False
        self._flush()

    def data_received(self, data: bytes) -> None:
        """Process received data, and send the resulting output."""
        if not self._is_greeted:
            self._is_greeted = True
            if not is_greeting(data):
                message = f"expected HTTP/2 of {self._owner.endpoint}, got {data[:40]!r}"
                self.problem = message
                self._garbled(message)
                if not self._greeting.done():
                    self._greeting.set_result(None)
                return
            if not self._greeting.done():
                self._greeting.set_result(None)
        try:
            events = self._http2.receive(data)
        except Http2Error as error:
            self._garbled(f"{self._owner.endpoint} breaks the rules of HTTP/2: {error}")
            return
        self._is_reading = True
        calls = self._calls
        for event in events:
            kind = type(event)
            if kind is DataReceived:
                call = calls.get(event.stream_id)  # type: ignore[attr-defined]
                if call is not None:
                    call.data_received(event.data)  # type: ignore[attr-defined]
            elif kind is TrailersReceived:
                call = calls.pop(event.stream_id, None)  # type: ignore[attr-defined]
                if call is not None:
                    self._ended(call, event.headers)  # type: ignore[attr-defined]
            else:
                self._control(event)
        self._is_reading = False
        self._flush()

    # Called by calls.

    async def ready(self) -> None:
        """Wait for the server's greeting: calls that are sent before may reach a server that never reads them."""
        await self._greeting
        if not self._is_greeted:
            raise ConnectionResetError("the server closed the connection immediately")

    def start(self, call: GrpcCall) -> bool:
        """Send a call; return whether this connection accepted it."""
        request = call.request
        headers = request.headers
        if call.deadline_s:
            headers = (*headers, timeout_header(call.deadline_s - self._owner.now_s()))
        try:
            stream_id = self._http2.request(headers, request.pieces)
        except Http2Error:
            self._retire()
            return False
        call.connection = self
        call.stream_id = stream_id
        call.send_end_ns = _now_ns()
        self._calls[stream_id] = call
        self._schedule_flush()
        return True

    def remove(self, call: GrpcCall) -> None:
        if self._calls.pop(call.stream_id, None) is not None:
            self._http2.reset(call.stream_id)
            self._schedule_flush()
            self._close_if_done()

    def finish(self) -> None:
        """Fail the calls in flight and close."""
        self._fail_all(Failure.CLOSED, "the client was closed")
        self._http2.terminate()
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def _ended(self, call: GrpcCall, trailers: Headers) -> None:
        if self._http2.unsent_bytes(call.stream_id):  # the server does not want the rest of the request
            self._http2.reset(call.stream_id)
        call.trailers_received(trailers)

    def _control(self, event: Event) -> None:
        match event:
            case ResponseReceived():
                call = self._calls.get(event.stream_id)
                if call is None:
                    return
                if event.end_stream:
                    del self._calls[event.stream_id]
                    self._ended(call, event.headers)
                else:
                    call.headers_received(event.headers)
            case StreamReset() | StreamClosed():
                call = self._calls.pop(event.stream_id, None)
                if call is not None:
                    call.stream_closed(event.error_code)
                self._close_if_done()
            case GoAwayReceived():
                self._retire()
            case ConnectionClosed() if event.error_code:
                reason = event.debug_data.decode("latin-1") or f"HTTP/2 error code {event.error_code}"
                self._garbled(f"{self._owner.endpoint} breaks the rules of HTTP/2: {reason:.100}")

    def _garbled(self, message: str) -> None:
        self._fail_all(Failure.GARBLED, message)
        self._transport.abort()

    def _retire(self) -> None:
        """Accept no more calls, and close when the last one has ended."""
        self._is_retired = True
        self._owner.lost(self)
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._is_retired and not self._calls:
            self._transport.close()

    def _fail_all(self, failure: Failure, message: str) -> None:
        self._is_retired = True
        self._owner.lost(self)
        calls = tuple(self._calls.values())
        self._calls.clear()
        for call in calls:
            call.fail(failure, message)

    def _schedule_flush(self) -> None:
        if not (self._flush_is_due or self._is_reading):
            self._flush_is_due = True
            self._owner.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        if self._is_paused or self.is_lost:
            return
        output = self._http2.output()
        if output:
            self._transport.write(output)
        for event in self._http2.events():
            self._control(event)


class GrpcTransport:
    """Connections to a gRPC server. The interface is `charonia.wire.transport.Transport`."""

    def __init__(self, endpoint: Endpoint, options: WireOptions) -> None:
        """Create a transport without connections; call it on the event loop. Raises INVALID_ARG for invalid options."""
        self.endpoint = endpoint
        self.options = options
        self.encoder = GrpcEncoder(endpoint, options)
        self.dialer = Dialer(endpoint, options, http2=True)
        self.failures = self.dialer.failures
        loop = asyncio.get_running_loop()
        self.call_soon = loop.call_soon
        self.now_s = loop.time
        self._call_later = loop.call_later
        self._connections: list[GrpcClientConnection] = []
        self._next = 0
        self._wanted = 1
        self._waiting: deque[GrpcCall] = deque()
        self._is_closed = False

    def prepare(self, request: InferRequest, form: RequestForm = DEFAULT_FORM) -> PreparedGrpc:
        return self.encoder.infer(request, form)

    def send(
        self, prepared: GrpcRequest, on_answer: OnAnswer, timeout_s: float = 0.0, *, keep_body: bool = False
    ) -> GrpcCall:
        """Send a request, of `prepare` or of `encoder`."""
        call = GrpcCall(self, prepared, on_answer, keep_body)
        timeout_s = timeout_s or self.options.timeout_s
        if timeout_s:
            call.timeout_s = timeout_s
            call.deadline_s = self.now_s() + timeout_s
            call.timer = self._call_later(timeout_s, call.expire)
        self._start(call)
        return call

    async def open(self, connections: int) -> int:
        """Open connections up to this number in advance."""
        self._wanted = max(min(connections, self.options.connections_max), 1)
        for _ in range(self._wanted - len(self._connections) - self.dialer.dialing):
            self._dial()
        await self.dialer.settle()
        return len(self._connections)

    async def close(self) -> None:
        self._is_closed = True
        self._fail_waiting(Failure.CLOSED, "the client was closed")
        for connection in tuple(self._connections):
            connection.finish()
        await self.dialer.close()

    # Called by connections and calls.

    def send_again(self, call: GrpcCall) -> None:
        """Resend a call that the server has not processed."""
        call.tries += 1
        if call.tries >= TRIES_MAX:
            call.fail(Failure.REFUSED, f"{self.endpoint} refused the call {TRIES_MAX} times")
        else:
            self._start(call)

    def lost(self, connection: GrpcClientConnection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)

    def _start(self, call: GrpcCall) -> None:
        connections = self._connections
        if len(connections) < self._wanted and not self.dialer.dialing and not self._is_closed:
            self._dial()
        while connections:
            self._next = (self._next + 1) % len(connections)
            if connections[self._next].start(call):
                return
        if self._is_closed:
            self.call_soon(call.fail, Failure.CLOSED, "the client was closed")
        elif len(self._waiting) >= self.options.waiting_max:
            text = f"{self.options.waiting_max} calls wait for a connection to {self.endpoint}"
            self.call_soon(call.fail, Failure.EXHAUSTED, text)
        else:
            self._waiting.append(call)
            if not self.dialer.dialing:
                self._dial()

    def _dial(self) -> None:
        self.dialer.dial(lambda: GrpcClientConnection(self), self._connection_made, self._connect_failure)

    def _connection_made(self, connection: GrpcClientConnection) -> None:
        if connection.problem:
            self._fail_waiting(Failure.GARBLED, connection.problem)
            return
        if connection.is_lost:
            self._connect_failure(f"{self.endpoint} closed the connection immediately")
            return
        self._connections.append(connection)
        waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            if not call.is_over:
                self._start(call)

    def _connect_failure(self, message: str) -> None:
        if not self._waiting:
            self.failures[Failure.REFUSED] += 1
        elif not self._connections and not self.dialer.dialing:
            self._fail_waiting(Failure.REFUSED, message)

    def _fail_waiting(self, failure: Failure, message: str) -> None:
        waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            call.fail(failure, message)
