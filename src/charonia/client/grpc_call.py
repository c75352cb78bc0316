"""One gRPC call of the client: from the received frames of its stream to answers."""

import asyncio
import time
from typing import Protocol

from charonia.client.errors import failed
from charonia.client.http2 import ErrorCode
from charonia.core.errors import Code, ServingError
from charonia.wire.endpoint import Endpoint
from charonia.wire.grpc_codec import CODES, GrpcRequest, decode_status_message, stream_error
from charonia.wire.grpc_framing import ENCODINGS, PREFIX_BYTES, Buffer, MessageReader
from charonia.wire.grpc_headers import OK_TRAILERS, Headers
from charonia.wire.grpc_status import RpcError, Status
from charonia.wire.http_status import UNEXECUTED
from charonia.wire.transport import Answer, Failure, OnAnswer, WireOptions

_STATUS_DIGITS_MAX = 4

_now_ns = time.monotonic_ns


class CallOwner(Protocol):
    """The transport, as its calls see it.

    Attributes:
        endpoint: The server.
        options: Settings and limits.
        failures: Number of failures by kind.
    """

    endpoint: Endpoint
    options: WireOptions
    failures: dict[Failure, int]

    def send_again(self, call: "GrpcCall") -> None:
        """Resend a call that the server has not processed."""
        ...


class Carrier(Protocol):
    """The connection, as its calls see it."""

    def forget(self, call: "GrpcCall") -> None: ...


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

    def __init__(self, owner: CallOwner, request: GrpcRequest, on_answer: OnAnswer, keep_body: bool) -> None:
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
        self.connection: Carrier | None = None
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

    def break_off(self, failure: Failure, message: str) -> None:
        """Answer with a failure, and reset the stream."""
        if not self.is_over:
            self._leave()
            self.fail(failure, f"{self._owner.endpoint}: {message}")

    # What the connection received.

    def headers_received(self, headers: Headers) -> None:
        """The response starts."""
        self._has_begun = True
        fields = dict(headers)
        status = fields.get(b":status", b"")
        if status != b"200" or not fields.get(b"content-type", b"").startswith(b"application/grpc"):
            kind = fields.get(b"content-type", b"no type").decode("latin-1")
            text = status.decode("latin-1")
            self.break_off(Failure.GARBLED, f"expected a gRPC response, got HTTP status {text} with {kind:.60}")
            return
        encoding = fields.get(b"grpc-encoding", b"identity")
        if encoding not in ENCODINGS:
            self.break_off(Failure.GARBLED, f"grpc-encoding '{encoding.decode('latin-1'):.40}' was not requested")
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
            self.break_off(Failure.OVERSIZE if is_large else Failure.GARBLED, error.message)
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
                self.break_off(Failure.GARBLED, "the response ends without a status")
                return
            status = int(digits)
            text = fields.get(b"grpc-message", b"")
        if status:
            self._refused(status, decode_status_message(text), is_unexecuted=UNEXECUTED in headers)
            return
        is_stream = self.request.is_stream
        if self._reader is not None or (not is_stream and self._messages != 1):
            self.break_off(Failure.GARBLED, f"the response is truncated: {self._messages} complete messages")
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
                self.break_off(Failure.GARBLED, "expected one response, got several")
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
            self.break_off(Failure.GARBLED, problem.message)
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
            self.connection.forget(self)

    def _finish(self, answer: Answer) -> None:
        self._end()
        self._on_answer(answer)

    def _end(self) -> None:
        self.is_over = True
        if self.timer is not None:
            self.timer.cancel()
