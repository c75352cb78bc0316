"""Calls: each handles the data of one stream.

A call ends exactly once: it is answered, failed (`fail`) or abandoned because its caller has gone (`abandon`).
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from charonia.core.errors import ServingError, turned_away, unsupported
from charonia.core.request import Flow, InferRequest
from charonia.core.response import InferResponse, Outcome, Reply, Ticket
from charonia.server.access_log import AccessEntry, AccessLog
from charonia.server.facade import Engine, Services, SingleResponse, first_error
from charonia.server.grpc.limits import GrpcLimits
from charonia.server.tracing.requests import EventNames, Tracing, begin
from charonia.wire.grpc_framing import Buffer, MessageReader, framed, sole_message
from charonia.wire.grpc_headers import CallHead
from charonia.wire.grpc_infer import decode_infer, decode_infer_identity, encode_response
from charonia.wire.grpc_status import RpcError, Status, rpc_error
from charonia.wire.shared_memory import NO_PLACES

TRACE_EVENTS: Final = EventNames("GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END")

_NOT_ONE: Final = unsupported(
    "ModelInfer RPC doesn't support models with decoupled transaction policy that send no response, or several",
    hint="use ModelStreamInfer",
)


class Service:
    """State that all calls of a front end share.

    Attributes:
        engine: The server's models.
        limits: Limits of connections and calls.
        access_log: The access log, None for none.
        services: Services besides the engine; the following ones are theirs, for the path of each request.
        gate: Permits or refuses calls, None where every client may make every call.
        headers: Headers that become request parameters.
        load: Reports of the server's load.
        regions: Shared memory of clients.
        request_log: Samples of requests with their answers.
        tracer: Traces requests, None where tracing is off.
        traffic: How requests without a version are split.
        names_flows: Whether more than their addresses distinguishes clients.
        loop: The event loop.
        request_count: Calls received, and messages of streams.
    """

    def __init__(self, engine: Engine, limits: GrpcLimits, access_log: AccessLog | None, services: Services) -> None:
        """Create the state. Must be called on the event loop."""
        self.engine = engine
        self.limits = limits
        self.access_log = access_log
        self.services = services
        self.gate = services.grpc_gate
        self.headers = services.grpc_headers
        self.load = services.load
        self.regions = services.regions
        self.request_log = services.request_log
        self.tracer: Tracing | None = services.tracer
        self.traffic = services.traffic
        self.names_flows = services.has_named_flows
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.request_count = 0

    def infer(self, call: "GrpcCall", request: InferRequest, reply: Reply, received_ns: int) -> Ticket:
        """Pass a request of a call on to the engine.

        Args:
            call: The call.
            request: The request.
            reply: Takes the outcomes.
            received_ns: When the request had arrived; 0 without tracing.

        Raises:
            ServingError: A header that becomes a parameter is invalid.
        """
        head = call.head
        if self.headers is not None:  # a header replaces a parameter of the same name
            request.parameters.update(self.headers.parameters(head.headers))
        if self.traffic is not None and self.traffic.sticky:
            request.affinity = self.services.affinity(request.model_name, head.header)
        request.deadline_ns = call.deadline_ns
        request.flow = call.flow()
        if self.request_log is not None:
            reply = self.request_log.begin("grpc", request, reply, head.header, self.headers)
        if self.tracer is not None:
            reply = begin(self.tracer, request, reply, names=TRACE_EVENTS, received_ns=received_ns, headers=head.header)
        return self.engine.infer(request, reply)


class Table:
    """The table of a connection's calls, as the calls see it.

    Attributes:
        service: State that all calls share.
        flow: The flow of the client's address.
    """

    service: Service
    flow: Flow

    def respond(self, call: "GrpcCall", body: list[Buffer]) -> None:
        """Send a whole response and remove the call."""
        raise NotImplementedError

    def reject(self, call: "GrpcCall", error: RpcError) -> None:
        """End the response with an error and remove the call."""
        raise NotImplementedError

    def send(self, call: "GrpcCall", body: list[Buffer]) -> None:
        """Send a part of the response."""
        raise NotImplementedError

    def complete(self, call: "GrpcCall") -> None:
        """End the response and remove the call."""
        raise NotImplementedError

    def fault(self, call: "GrpcCall") -> None:
        """Log the current exception, a bug of the server, and fail the call."""
        raise NotImplementedError

    def consume(self, call: "GrpcCall", amount: int) -> None:
        """Let the caller send `amount` more bytes."""
        raise NotImplementedError

    def unsent_bytes(self, call: "GrpcCall") -> int:
        """Return how much of the response waits for the caller's window."""
        raise NotImplementedError

    def wait_until_sent(self, call: "GrpcCall") -> None:
        """Call the call's `resume` once some of the response has been sent."""
        raise NotImplementedError


class GrpcCall:
    """One call from its headers to its status.

    Attributes:
        stream_id: The HTTP/2 stream.
        name: Name of the method.
        head: The parsed request headers.
        is_over: Whether it has ended.
        is_begun: Whether the response has begun.
        is_received: Whether the caller has finished sending.
        encoding: Encoding of response messages.
    """

    __slots__ = (
        "_timer",
        "deadline_ns",
        "encoding",
        "head",
        "is_begun",
        "is_over",
        "is_received",
        "name",
        "stream_id",
        "table",
    )

    def __init__(self, table: Table, stream_id: int, name: str, head: CallHead) -> None:
        self.table = table
        self.stream_id = stream_id
        self.name = name
        self.head = head
        self.is_over = False
        self.is_begun = False
        self.is_received = False
        self.encoding = b"identity"
        self.deadline_ns = 0
        self._timer: asyncio.TimerHandle | None = None
        service = table.service
        if service.limits.compression_level and head.accepts:
            self.encoding = next((name for name in (b"gzip", b"deflate") if name in head.accepts), b"identity")
        if head.timeout_ns:
            self.deadline_ns = time.monotonic_ns() + head.timeout_ns
            self._timer = service.loop.call_later(head.timeout_ns / 1e9, self._expire)

    def receive(self, data: bytes, end: bool) -> None:
        """Take bytes of the request; `end` means that they are the last."""
        raise NotImplementedError

    def resume(self) -> None:
        """Continue after some of the response has been sent."""

    def is_idle(self) -> bool:
        """Whether nothing is in flight, though the caller may send more."""
        return False

    def unfinished_bytes(self) -> int | None:
        """Return how much of a message has come whose rest the caller owes, None if it owes nothing."""
        return None

    def wind_down(self) -> None: ...

    def drop(self) -> None:
        """Cancel the requests in flight. Called once, when the call ends without success."""

    def fail(self, error: RpcError) -> None:
        if not self.is_over:
            self._close()
            self.drop()
            self.table.reject(self, error)

    def abandon(self) -> None:
        """End the call without an answer: the caller has gone."""
        if not self.is_over:
            self._close()
            self.drop()

    def flow(self) -> Flow:
        """Return the flow of requests in the call."""
        peer, service = self.table.flow, self.table.service
        return service.services.flow(peer, service.gate, self.head.header) if service.names_flows else peer

    def framed(self, parts: list[Buffer]) -> list[Buffer]:
        return framed(parts, self.encoding, self.table.service.limits.compression_level)

    def _close(self) -> None:
        self.is_over = True
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        self.fail(
            RpcError(Status.DEADLINE_EXCEEDED, f"Deadline Exceeded: {self.name} took longer than the caller waits")
        )


class UnaryCall(GrpcCall):
    """A call with one request and one response.

    Attributes:
        request: The inference request, if it is one.
    """

    __slots__ = ("_message_bytes", "_places", "_reader", "_run", "_sole", "_started_ns", "_ticket", "request")

    def __init__(self, table: Table, stream_id: int, name: str, head: CallHead, run: "Run") -> None:
        super().__init__(table, stream_id, name, head)
        self._run = run
        self._reader: MessageReader | None = None
        self._ticket: Ticket | None = None
        self._places = NO_PLACES
        self._sole: SingleResponse | None = None  # set by an outcome that is not a single, final response
        self._message_bytes = 0
        self._started_ns = 0
        self.request: InferRequest | None = None

    def receive(self, data: bytes, end: bool) -> None:
        """Take bytes of the request; the call runs when it is complete."""
        self.table.consume(self, len(data))
        limit = self.table.service.limits.message_bytes_max
        try:
            if end and self._reader is None and (message := sole_message(data, limit)) is not None:
                self._begin(message)
                return
            if self._reader is None:
                self._reader = MessageReader(self.head.encoding, limit, self.table.service.services.lend)
            self._reader.feed(data)
            if end:
                self._begin(self._only_message(self._reader))
        except RpcError as error:
            self.fail(error)

    def unfinished_bytes(self) -> int | None:
        if self.is_received or self.is_over:
            return None
        return self._reader.pending_bytes if self._reader is not None else 0

    def infer(self, message: Buffer) -> None:
        """Run an inference.

        Raises:
            RpcError: The message cannot be decoded.
            ServingError: The request is invalid.
        """
        service = self.table.service
        received_ns = 0 if service.tracer is None else time.monotonic_ns()
        if service.engine.is_exiting():
            raise turned_away("GRPC server is shutting down and has stopped accepting new requests.")
        try:
            request, _, self._places = decode_infer(message, service.regions)
        except ServingError as error:
            sent = decode_infer_identity(message)
            raise first_error(service.engine, service.services, sent.model_name, sent.model_version, error) from error
        self.request = request
        ticket = service.infer(self, request, self._reply, received_ns)
        if not self.is_over:
            self._ticket = ticket
        elif self._sole is not None:  # answered before the model's last response
            ticket.cancel()

    def answer(self, message: bytes) -> None:
        self._finish([message], None)

    def refuse(self, error: ServingError) -> None:
        """Fail the call with the status of a `ServingError`."""
        self.fail(rpc_error(error))

    def drop(self) -> None:
        if self._ticket is not None:
            self._ticket.cancel()

    def fail(self, error: RpcError) -> None:
        if not self.is_over and self.table.service.access_log is not None:
            self._log_access(error.status.name, 0, None)
        super().fail(error)

    def abandon(self) -> None:
        if not self.is_over:
            self._log_access(Status.CANCELLED.name, 0, None)
        super().abandon()

    def _begin(self, message: Buffer) -> None:
        if self.table.service.access_log is not None:
            self._started_ns = time.monotonic_ns()
            self._message_bytes = len(message)
        try:
            self._run(self, message)
        except ServingError as error:
            self.refuse(error)

    def _only_message(self, reader: MessageReader) -> Buffer:
        message = reader.next_message()
        if message is None or reader.pending_bytes:
            raise RpcError(Status.UNIMPLEMENTED, f"{self.name}: expected exactly one request message")
        return message

    def _reply(self, outcome: Outcome, final: bool) -> None:
        if self.is_over:
            return
        if final:
            self._ticket = None  # breaks a reference cycle, since it may refer to this method
        if not final or outcome is None or self._sole is not None:
            if self._sole is None:
                self._sole = SingleResponse(_NOT_ONE)
            outcome = self._sole.take(outcome, final)
        if outcome is None:
            return
        if isinstance(outcome, ServingError):
            self.refuse(outcome)
        else:
            try:
                self._finish(encode_response(outcome, places=self._places), outcome)
            except ServingError as error:
                self.refuse(error)
            except Exception:  # the other requests of the batch must not fail
                self.table.fault(self)

    def _finish(self, parts: list[Buffer], response: InferResponse | None) -> None:
        if not self.is_over:
            self._close()
            self.table.respond(self, self.framed(parts))
            if self.table.service.access_log is not None:
                self._log_access("OK", sum(map(len, parts)), response)

    def _log_access(self, status: str, bytes_out: int, response: InferResponse | None) -> None:
        log = self.table.service.access_log
        if log is not None:
            request = self.request
            entry = AccessEntry("grpc", self.name, status, bytes_in=self._message_bytes, bytes_out=bytes_out)
            entry.duration_ns = time.monotonic_ns() - self._started_ns if self._started_ns else 0
            if request is not None:
                entry.model, entry.version, entry.request_id = request.model_name, request.model_version, request.id
            if response is not None:
                entry.version, entry.execution = response.model_version, response.execution
            log.write(entry)


Run = Callable[[UnaryCall, Buffer], None]
