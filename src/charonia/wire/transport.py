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

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from charonia.core.request import InferRequest
from charonia.wire.answer import Failure, Handle, OnAnswer


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

    @property
    def byte_size(self) -> int:
        """Approximate number of bytes sent."""


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
