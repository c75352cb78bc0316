"""The interface of the client's transports, and its records.

A transport handles many requests per second from one thread. A request is encoded once and sent any number of times.
Sending raises nothing: the outcome of a request is an `Answer`, passed to a callback. Requests need no task and no
future.

Invariants:

1. Every `send` is answered: any number of answers that are not final, then exactly one final answer, even when the
   connection fails, the timeout expires, or the transport is closed. After `Handle.cancel` no answer follows.
2. The callback never runs inside `send`.
3. The transport resends only requests that certainly never reached the server.

`connect` in `charonia.tools.perf.worker` makes a transport for a URL. All methods run on the event loop's thread.
"""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from charonia.core.errors import Code
from charonia.core.request import InferRequest


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


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """The location of a tensor in registered shared memory.

    Attributes:
        region: Name of the registered region.
        offset: Offset in the region in bytes.
    """

    region: str
    byte_size: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class RequestForm:
    """The encoding of a request.

    Attributes:
        json_inputs: Inputs as JSON, not in binary form (HTTP only).
        json_outputs: Outputs as JSON (HTTP only).
        streaming: As a call of ModelStreamInfer, which sends any number of responses (gRPC only). Each request has its
            own stream, so that it can be cancelled alone.
        empty_final: Ask for an empty final response (`triton_enable_empty_final_response`); streams only.
        shared_inputs: Inputs by name whose elements are in shared memory and not sent.
        shared_outputs: Outputs by name that the server writes to shared memory.
    """

    json_inputs: bool = False
    json_outputs: bool = False
    streaming: bool = False
    empty_final: bool = False
    shared_inputs: Mapping[str, SharedTensor] = field(default_factory=dict)
    shared_outputs: Mapping[str, SharedTensor] = field(default_factory=dict)


DEFAULT_FORM = RequestForm()


class PreparedRequest(Protocol):
    """A request encoded for one transport, which can be sent any number of times. It is immutable."""

    def with_sequence(self, correlation_id: int | str, start: bool, end: bool) -> "PreparedRequest":
        """Return a copy as a part of a sequence. Costs a few microseconds: the tensors stay encoded."""

    def with_id(self, id: str) -> "PreparedRequest":
        """Return a copy with another request id. Costs a few microseconds: the tensors stay encoded."""

    @property
    def byte_size(self) -> int:
        """Approximate number of bytes sent."""


class Handle(Protocol):
    """A sent request."""

    def cancel(self) -> None:
        """Cancel it: no answer follows. Does nothing after the final answer."""


class Transport(Protocol):
    """Connections to one server.

    Attributes:
        failures: Number of failed connections and requests so far, by kind.
    """

    failures: dict[Failure, int]

    def prepare(self, request: InferRequest, form: RequestForm = DEFAULT_FORM) -> PreparedRequest:
        """Encode a request.

        Raises:
            ServingError: The protocol cannot carry it, e.g. FP16 as JSON, or streaming over HTTP.
        """

    def send(
        self, prepared: PreparedRequest, on_answer: OnAnswer, timeout_s: float = 0.0, *, keep_body: bool = False
    ) -> Handle:
        """Send a request; opens a connection if none is free.

        Args:
            prepared: The request, from this transport's own `prepare`.
            on_answer: Called with each answer.
            timeout_s: Time until the final answer, in seconds; 0 for `WireOptions.timeout_s`.
            keep_body: Whether answers contain the received body; otherwise its bytes are only counted.
        """

    async def open(self, connections: int) -> int:
        """Open connections up to this number in advance; return how many there are now.

        Failed attempts are counted in `failures`; more connections are opened on demand.
        """

    async def close(self) -> None:
        """Close all connections; requests in flight are answered with `Failure.CLOSED`."""


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """TLS settings of a client.

    Attributes:
        ca_file: Certificates to trust, PEM; "" for the system's.
        certificate_file: The client's certificate chain, PEM or DER; "" for none.
        certificate_is_der: Whether `certificate_file` is DER.
        key_is_der: Whether `key_file` is DER.
        verify_peer: Whether the server's certificate must be valid.
        verify_host: Whether it must match the host in the URL.
    """

    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    certificate_is_der: bool = False
    key_is_der: bool = False
    verify_peer: bool = True
    verify_host: bool = True


@dataclass(frozen=True, slots=True)
class WireOptions:
    """Settings and limits of a client's connections.

    Attributes:
        headers: Additional headers of every request; over gRPC, metadata. Names may be repeated.
        tls: TLS settings, for URLs that use TLS.
        request_compression: "gzip", "deflate" or "" for none.
        response_compression: The same, as requested from the server. Over gRPC the server chooses.
        timeout_s: Default timeout of a request, in seconds; 0 for no limit.
        connect_timeout_s: Time to open a connection, TLS included, in seconds.
        keepalive_time_s: Idle time of a connection before the first TCP keep-alive probe, in seconds, rounded up; 0 for
            never.
        keepalive_timeout_s: Time for a reply, in seconds, rounded up, after which the connection is lost. It is also
            lost if the server acknowledges none of the sent data for the sum of both times.
        connections_max: Limit of connections. Over HTTP each carries one request at a time.
        waiting_max: Limit of requests that wait for a connection.
        response_bytes_max: Largest body or message, received and decompressed.
    """

    headers: tuple[tuple[str, str], ...] = ()
    tls: TlsOptions = TlsOptions()
    request_compression: str = ""
    response_compression: str = ""
    timeout_s: float = 0.0
    connect_timeout_s: float = 10.0
    keepalive_time_s: float = 20.0
    keepalive_timeout_s: float = 20.0
    connections_max: int = 4096
    waiting_max: int = 65_536
    response_bytes_max: int = 2**31 - 1
