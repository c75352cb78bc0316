"""How load is sent: the interface of the transports, and the records that cross it.

A wire is made for many requests a second from one thread. A request is encoded once and sent any number of times;
nothing is raised into whoever sends: whatever becomes of a request is an `Answer`, given to a callback. No task and no
future is made for a request.

Invariants:

1. Every `send` is answered: any number of answers that are not final, then exactly one that is, also when the
   connection fails, the time is over, or the wire is closed. After `Handle.cancel` none comes any more.
2. The callback never runs inside `send`.
3. Only what certainly never reached the server is sent again, and by the wire itself.

`connect` in `charonia.tools.perf.worker` makes a wire for a URL. All methods run on the event loop's thread.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from charonia.core.errors import Code
from charonia.core.request import InferRequest


class Failure(Enum):
    """Why there is no result. The values are for people and for tables."""

    REFUSED = "connection refused"
    """No connection could be made: nobody listens, no such host, no TLS."""

    RESET = "connection lost"
    """The connection ended after the request was sent."""

    TIMEOUT = "timeout"
    """There was no answer in time."""

    STATUS = "error status"
    """The server answered with an error: `Answer.code`, `Answer.status` and `Answer.message` are its own."""

    GARBLED = "garbled answer"
    """What came is not an answer of the protocol."""

    OVERSIZE = "answer too large"
    """The answer is larger than `WireOptions.response_bytes_max`."""

    EXHAUSTED = "no connection left"
    """All `WireOptions.connections_max` connections are busy, or `WireOptions.waiting_max` requests wait for one."""

    CLOSED = "client closed"
    """The wire was closed."""


class Answer:
    """What became of a request, or one response of several. Times are `time.monotonic_ns`, 0 for what never happened.

    Attributes:
        failure: Why it failed, None for success.
        code: Kind of the error; `Code.UNKNOWN` for success.
        status: HTTP or gRPC status; 0 where the server gave none.
        message: What went wrong, "" for success.
        final: Whether this is the last answer to its request.
        is_empty: Whether it only ends a stream: it holds no response.
        sent_ns: When `send` was called.
        send_end_ns: When the last byte was handed to the system.
        first_byte_ns: When the first byte of this answer arrived.
        done_ns: When this answer was complete, or was given up.
        received_bytes: Size of the body, or of the message of gRPC.
        json_bytes: Bytes of JSON at the start of `body`; -1 where all of it is JSON, or over gRPC.
        body: The body or the message, without compression; b"" unless it was to be kept.
    """

    __slots__ = (
        "body",
        "code",
        "done_ns",
        "failure",
        "final",
        "first_byte_ns",
        "is_empty",
        "json_bytes",
        "message",
        "received_bytes",
        "send_end_ns",
        "sent_ns",
        "status",
    )

    def __init__(self, sent_ns: int, send_end_ns: int = 0, first_byte_ns: int = 0, done_ns: int = 0) -> None:
        self.failure: Failure | None = None
        self.code = Code.UNKNOWN
        self.status = 0
        self.message = ""
        self.final = True
        self.is_empty = False
        self.sent_ns = sent_ns
        self.send_end_ns = send_end_ns
        self.first_byte_ns = first_byte_ns
        self.done_ns = done_ns
        self.received_bytes = 0
        self.json_bytes = -1
        self.body: bytes | memoryview = b""

    def __repr__(self) -> str:
        if self.failure is None:
            return f"Answer(ok, {self.received_bytes} bytes, final={self.final})"
        return f"Answer({self.failure.name}, {self.code.name}, {self.message!r}, final={self.final})"


OnAnswer = Callable[[Answer], None]
"""Takes the answers to one request, in order."""


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """Where a tensor lies in shared memory that is registered with the server.

    Attributes:
        region: Name of the registered region.
        byte_size: Size in bytes.
        offset: Offset in the region in bytes.
    """

    region: str
    byte_size: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class RequestForm:
    """How a request is put into bytes.

    Attributes:
        json_inputs: Inputs as JSON, not in binary form (HTTP only).
        json_outputs: Outputs as JSON (HTTP only).
        streaming: As a call of ModelStreamInfer, which gives any number of responses (gRPC only). Each request has a
            stream of its own, so that cancelling one cancels one.
        empty_final: Ask for an empty last response (`triton_enable_empty_final_response`); streams only.
        shared_inputs: Inputs by name whose elements are not sent because they lie in shared memory.
        shared_outputs: Outputs by name that the server is to write to shared memory.
    """

    json_inputs: bool = False
    json_outputs: bool = False
    streaming: bool = False
    empty_final: bool = False
    shared_inputs: Mapping[str, SharedTensor] = field(default_factory=dict)
    shared_outputs: Mapping[str, SharedTensor] = field(default_factory=dict)


DEFAULT_FORM = RequestForm()


class Prepared(Protocol):
    """A request in the bytes of one wire, to be sent any number of times. It does not change."""

    def with_sequence(self, correlation_id: int | str, start: bool, end: bool) -> "Prepared":
        """Return it as a part of a sequence. Costs a few microseconds: the tensors stay encoded."""
        ...

    def with_id(self, id: str) -> "Prepared":
        """Return it with another request id. Costs a few microseconds: the tensors stay encoded."""
        ...

    @property
    def byte_size(self) -> int:
        """Bytes that are sent for it, about."""
        ...


class Handle(Protocol):
    """A request that was sent."""

    def cancel(self) -> None:
        """Give it up: no answer comes any more. Nothing happens where the final one has come."""
        ...


class Wire(Protocol):
    """Connections to one server.

    Attributes:
        failures: How often connections and requests failed so far, by kind.
    """

    failures: dict[Failure, int]

    def prepare(self, request: InferRequest, form: RequestForm = DEFAULT_FORM) -> Prepared:
        """Encode a request.

        Raises:
            ServingError: The wire cannot carry it, e.g. FP16 as JSON, or streaming over HTTP.
        """
        ...

    def send(
        self, prepared: Prepared, on_answer: OnAnswer, timeout_s: float = 0.0, *, keep_body: bool = False
    ) -> Handle:
        """Send a request; a connection is made where none is free.

        Args:
            prepared: What to send, of this wire's own `prepare`.
            on_answer: Called with each answer.
            timeout_s: Time until the final answer, in seconds; 0 for `WireOptions.timeout_s`.
            keep_body: Whether answers carry what was received; else it is only counted.
        """
        ...

    async def open(self, connections: int) -> int:
        """Make connections up to this number ahead of time; return how many there are now.

        Those that fail are counted in `failures`; later ones are made when they are needed.
        """
        ...

    async def close(self) -> None:
        """Close all connections; what is in flight is answered with `Failure.CLOSED`."""
        ...


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """How a TLS connection is made.

    Attributes:
        ca_file: Certificates to trust, PEM; "" for those of the system.
        certificate_file: Our own certificate chain, PEM or DER; "" for none.
        key_file: Its key.
        certificate_is_der: Whether `certificate_file` is DER.
        key_is_der: Whether `key_file` is DER.
        verify_peer: Whether the server's certificate has to be valid.
        verify_host: Whether it has to be for the host in the URL.
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
    """Settings of a wire, and its limits.

    Attributes:
        headers: More headers of every request; over gRPC, metadata. A name may come more than once.
        tls: How a TLS connection is made, for URLs that ask for one.
        request_compression: "gzip", "deflate" or "" for none.
        response_compression: The same; what the server is asked for. Over gRPC the server chooses.
        timeout_s: Time for a request that names none, in seconds; 0 for no limit.
        connect_timeout_s: Time to make a connection, TLS included, in seconds.
        keepalive_time_s: Silence on a connection after which the server's system is asked whether it is still there, in
            seconds, rounded up; 0 for never.
        keepalive_timeout_s: Time for its answer, in seconds, rounded up, after which the connection is lost. One whose
            server confirms nothing of what was sent for both times together is, too.
        connections_max: Most connections. Over HTTP each carries one request at a time.
        waiting_max: Most requests that wait for a connection to be made.
        response_bytes_max: Largest body or message, as received and without compression.
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
