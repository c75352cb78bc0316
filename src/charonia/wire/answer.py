"""The outcome of a request that a client's transport has sent."""

from array import array
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from charonia.core.errors import Code


class Failure(Enum):
    """The kinds of failure. The values are for messages and tables."""

    REFUSED = "connection refused"
    """No connection could be made: nothing listens, unknown host, no TLS."""

    RESET = "connection lost"
    """The connection ended after the request was sent."""

    TIMEOUT = "timeout"
    """There was no response in time."""

    STATUS = "error status"
    """The server responded with an error: `Answer.code`, `Answer.status` and `Answer.message` are its own."""

    GARBLED = "garbled answer"
    """The response does not follow the protocol."""

    OVERSIZE = "answer too large"
    """The response is larger than `WireOptions.response_bytes_max`."""

    EXHAUSTED = "no connection left"
    """All `WireOptions.connections_max` connections are busy, or `WireOptions.waiting_max` requests wait for one."""

    CLOSED = "client closed"
    """The transport was closed."""


class Answer:
    """The outcome of a request, or one response of several. Times are `time.monotonic_ns`, 0 for missing events.

    Attributes:
        failure: Why it failed, None for success.
        code: Kind of the error; `Code.UNKNOWN` for success.
        status: HTTP or gRPC status; 0 if the server sent none.
        message: What went wrong, "" for success.
        is_unexecuted: Whether no model has seen the request for certain: it was not sent, or the server reports so.
        final: Whether this is the last answer to its request.
        is_empty: Whether it only ends a stream and holds no response.
        sent_ns: When `send` was called.
        send_end_ns: When the last byte was passed to the operating system. Over gRPC, when the request was in frames:
            they are written together with frames of other calls.
        receive_ns: Duration from the first byte of this response to its last. Over gRPC, that of taking the message out
            of its frames.
        done_ns: When this answer was complete, or the request was abandoned.
        received_bytes: Size of the body, or of the gRPC message.
        json_bytes: Bytes of JSON at the start of `body`; -1 if all of it is JSON, or over gRPC.
        body: The body or the message, decompressed; b"" unless bodies are kept.
        arrivals: When the body came, if it is kept: the time of each part, and the size of the body with it. Over gRPC,
            where each response is a separate answer, and for a body that was compressed: None.
    """

    __slots__ = (
        "arrivals",
        "body",
        "code",
        "done_ns",
        "failure",
        "final",
        "is_empty",
        "is_unexecuted",
        "json_bytes",
        "message",
        "receive_ns",
        "received_bytes",
        "send_end_ns",
        "sent_ns",
        "status",
    )

    def __init__(self, sent_ns: int, send_end_ns: int = 0, receive_ns: int = 0, done_ns: int = 0) -> None:
        self.failure: Failure | None = None
        self.code = Code.UNKNOWN
        self.status = 0
        self.message = ""
        self.is_unexecuted = False
        self.final = True
        self.is_empty = False
        self.sent_ns = sent_ns
        self.send_end_ns = send_end_ns
        self.receive_ns = receive_ns
        self.done_ns = done_ns
        self.received_bytes = 0
        self.json_bytes = -1
        self.body: bytes | memoryview = b""
        self.arrivals: array[int] | None = None

    def __repr__(self) -> str:
        if self.failure is None:
            return f"Answer(ok, {self.received_bytes} bytes, final={self.final})"
        return f"Answer({self.failure.name}, {self.code.name}, {self.message!r}, final={self.final})"


OnAnswer = Callable[[Answer], None]
"""Takes the answers to one request, in order."""


class Handle(Protocol):
    """A sent request."""

    def cancel(self) -> None:
        """Cancel it: no answer follows. Does nothing after the final answer."""
