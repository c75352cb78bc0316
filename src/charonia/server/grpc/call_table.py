"""The open calls of a connection by HTTP/2 stream, and how their responses become frames.

It does no I/O: it adds frames to the HTTP/2 connection and requests a flush; the connection writes them.

Back-pressure on unary calls: they are deferred while their client does not read the responses of earlier ones.

They wait rather than fail, as requests over HTTP do: a client that requests more than its link can carry gets every
response, only later, and its deadlines still apply. The connection is still read, because window updates arrive on it;
the data of deferred calls is not acknowledged, so that it stays within the flow-control windows.
"""

import logging
from collections.abc import Callable

from charonia.core.request import NO_FLOW
from charonia.server.access.rules import METHODS
from charonia.server.access_log import AccessEntry
from charonia.server.grpc.calls import GrpcCall, Run, Service, Table, UnaryCall
from charonia.server.grpc.http2 import ErrorCode, ServerConnection
from charonia.server.grpc.methods import Method, unknown_method
from charonia.server.grpc.streams import StreamCall
from charonia.wire.grpc_framing import Buffer
from charonia.wire.grpc_headers import (
    NONE_SINGULAR,
    OK_TRAILERS,
    RESPONSE_HEAD,
    CallHead,
    Headers,
    NotGrpcError,
    error_head,
    error_trailers,
    parse_head,
)
from charonia.wire.grpc_status import REFUSED, RpcError, Status
from charonia.wire.orca import load_trailers

_log = logging.getLogger(__name__)


class DeferredCall(UnaryCall):
    """A call that begins when its client reads responses again."""

    __slots__ = ("_received",)

    def __init__(self, table: Table, stream_id: int, name: str, head: CallHead, run: Run) -> None:
        super().__init__(table, stream_id, name, head, run)
        self._received: list[tuple[bytes, bool]] | None = []

    def receive(self, data: bytes, end: bool) -> None:
        """Take bytes of the request, and keep them while the call is deferred."""
        if self._received is None:
            super().receive(data, end)
        else:
            self._received.append((data, end))

    def resume(self) -> None:
        """Begin, with the data that was kept."""
        received, self._received = self._received or [], None
        try:
            for data, end in received:
                if self.is_over:
                    self.table.consume(self, len(data))
                else:
                    super().receive(data, end)
        except Exception:  # the calls deferred behind it begin, too
            self.table.fault(self)

    def unfinished_bytes(self) -> int | None:
        # A client whose call is deferred may have to wait itself.
        return super().unfinished_bytes() if self._received is None else None

    def wind_down(self) -> None:
        """The server is shutting down: begin, which answers with that error."""
        self.resume()

    def drop(self) -> None:
        """Acknowledge the data that was kept, and cancel the inference."""
        received, self._received = self._received or [], None
        self.table.consume(self, sum(len(data) for data, _ in received))
        super().drop()


class BackPressure:
    """Defers calls while more bytes wait for a client's flow-control windows than the limit.

    Attributes:
        deferred: The deferred calls by stream, oldest first.
        unsent_bytes_max: Bytes of responses to unary calls that may wait for the client's windows.
    """

    def __init__(self, http2: ServerConnection, calls: dict[int, GrpcCall], unsent_bytes_max: int) -> None:
        self.deferred: dict[int, DeferredCall] = {}
        self.unsent_bytes_max = unsent_bytes_max
        self._http2 = http2
        self._calls = calls
        self._endings: set[int] = set()

    def applies(self) -> bool:
        """Return whether a new unary call must be deferred, behind calls that already are.

        Call this only when more than `unsent_bytes_max` waits on all streams together.
        """
        return bool(self.deferred) or self._is_above_limit()

    def defer(self, call: DeferredCall) -> DeferredCall:
        """Defer a call."""
        self.deferred[call.stream_id] = call
        return call

    def release(self) -> None:
        """Begin deferred calls as far as the limit permits."""
        while self.deferred and not (self._http2.waiting_bytes() > self.unsent_bytes_max and self._is_above_limit()):
            self.deferred.pop(next(iter(self.deferred))).resume()

    def stream_ended(self, stream_id: int) -> None:
        """Note that a streaming call has ended; its last responses may still wait for the client."""
        unsent_bytes = self._http2.unsent_bytes
        self._endings = {ending for ending in self._endings if unsent_bytes(ending)}
        self._endings.add(stream_id)

    def _is_above_limit(self) -> bool:
        """Return whether unary calls exceed the limit; call this only when all calls together do.

        Responses of streaming calls do not count: they have separate limits, and a caller may make another call
        before it continues to read.
        """
        unsent_bytes = self._http2.unsent_bytes
        streams = sum(unsent_bytes(call.stream_id) for call in self._calls.values() if call.is_begun)
        streams += sum(map(unsent_bytes, self._endings))
        return self._http2.waiting_bytes() - streams > self.unsent_bytes_max


class CallTable(Table):
    """The open calls by stream; the `Table` of its calls.

    Args:
        service: State that all calls share.
        methods: Methods by path.
        http2: The HTTP/2 connection.
        flush_soon: Called when there is something to write.

    Attributes:
        service: State that all calls share.
        sends: Number of sends on all streams.
        deferred: The unary calls deferred by back-pressure, by stream.
        paused: Streaming calls that wait until some of their response has been sent.
        rejected: Streams that were answered before the caller had sent everything.
    """

    def __init__(
        self,
        service: Service,
        methods: dict[bytes, Method],
        http2: ServerConnection,
        *,
        flush_soon: Callable[[], None],
    ) -> None:
        self.service = service
        self.flow = NO_FLOW
        self.sends = 0
        self.paused: list[GrpcCall] = []
        self.rejected: list[int] = []
        self._methods = methods
        self._http2 = http2
        self._flush_soon = flush_soon
        self._calls: dict[int, GrpcCall] = {}
        self._back_pressure = BackPressure(http2, self._calls, service.limits.unary_unsent_bytes_max)
        self.deferred = self._back_pressure.deferred
        self._last_headers: Headers = ()
        self._last_head = CallHead()

    def __len__(self) -> int:
        return len(self._calls)

    def __repr__(self) -> str:
        """Return e.g. `calls=3 deferred=1`."""
        return f"calls={len(self._calls)} deferred={len(self.deferred)}"

    # Called by the connection.

    def open(self, stream_id: int, headers: Headers, end: bool) -> None:
        """Open a call with the headers of a stream, or refuse it; `end` means that no data follows."""
        http2 = self._http2
        http2.last_stream_id = max(http2.last_stream_id, stream_id)
        gate = self.service.gate
        self.service.request_count += 1
        try:
            # Most clients send the same headers with every call.
            if headers != self._last_headers:
                singular = gate.singular if gate is not None else NONE_SINGULAR
                self._last_head = parse_head(headers, self.service.limits.header_list_bytes_max, singular)
                self._last_headers = headers
            head = self._last_head
            method = self._methods.get(head.path)
            if method is None:
                raise unknown_method(head.path)
            if gate is not None:
                refusal = gate.check(METHODS[method.name], head.header)
                if refusal is not None:
                    raise RpcError(REFUSED[refusal.kind], refusal.message)
        except RpcError as error:
            self._refuse(stream_id, headers, end, error_head(error), error.status.name)
            return
        except NotGrpcError as other:
            self._refuse(stream_id, headers, end, other.headers, other.status)
            return
        if head.load_format and self.service.load is not None:
            self.service.load.request_report()
        call: GrpcCall
        if method.run is None:
            assert method.make_handler is not None
            call = StreamCall(self, stream_id, method.name, head, method.make_handler)
        elif http2.waiting_bytes() > self._back_pressure.unsent_bytes_max and self._back_pressure.applies():
            call = self._back_pressure.defer(DeferredCall(self, stream_id, method.name, head, method.run))
        else:
            call = UnaryCall(self, stream_id, method.name, head, method.run)
        self._calls[stream_id] = call
        if end:
            self.receive(stream_id, b"", True)

    def receive(self, stream_id: int, data: bytes, end: bool) -> None:
        """Pass data of a stream to its call; `end` means that it is the last."""
        call = self._calls.get(stream_id)
        if call is None:
            self._http2.consume(stream_id, len(data))
            return
        call.is_received = end
        try:
            call.receive(data, end)
        except Exception:
            self.fault(call)

    def drop(self, stream_id: int) -> None:
        """Abandon the call of a closed stream, if it is still open."""
        call = self._calls.get(stream_id)
        if call is not None:
            call.abandon()
            self._remove(call)

    def resume(self) -> None:
        """Resume the calls that wait for the client to read."""
        paused, self.paused = self.paused, []
        for call in paused:
            try:
                call.resume()
            except Exception:
                self.fault(call)
        self._back_pressure.release()

    def reset_rejected(self) -> None:
        """Reset rejected streams whose response is sent, so that their clients stop sending."""
        for stream_id in self.rejected:
            if not self._http2.unsent_bytes(stream_id):
                self._http2.reset(stream_id, ErrorCode.NO_ERROR)
        self.rejected.clear()

    def uses(self) -> int | None:
        """Return a count that grows with each response, None while something is in flight."""
        return self.sends if all(call.is_idle() for call in self._calls.values()) else None

    def unfinished(self) -> dict[int, int]:
        """Return the calls whose clients owe the rest of a message, with the bytes of it that have come, by stream."""
        return {number: size for number, call in self._calls.items() if (size := call.unfinished_bytes()) is not None}

    def time_out(self, stream_id: int, limit_s: float) -> None:
        """End a call whose client takes too long to send the rest of a message."""
        self._calls[stream_id].fail(
            RpcError(Status.DEADLINE_EXCEEDED, f"the request did not arrive within {limit_s:.0f} s")
        )

    def wind_down(self) -> None:
        for call in list(self._calls.values()):
            call.wind_down()

    def recheck(self) -> None:
        gate = self.service.gate
        if gate is None:
            return
        for call in list(self._calls.values()):
            if isinstance(call, StreamCall):
                refusal = gate.check(METHODS[call.name], call.head.header)
                if refusal is not None:
                    call.fail(RpcError(REFUSED[refusal.kind], refusal.message))

    def close(self, error: RpcError | None = None) -> None:
        """End all calls: with an error, or without an answer because the client has gone."""
        calls = list(self._calls.values())
        if error is None:
            self._calls.clear()
            self._flush_soon = _nothing  # breaks a reference cycle
        self.paused.clear()
        self.deferred.clear()
        for call in calls:
            try:
                if error is None:
                    call.abandon()
                else:
                    call.fail(error)
            except Exception:  # the other calls must end, too
                _log.exception("%s: the call could not be ended", call.name)

    # Called by calls.

    def respond(self, call: GrpcCall, body: list[Buffer]) -> None:
        self.sends += 1
        self._http2.respond(call.stream_id, RESPONSE_HEAD[call.encoding], body, self._with_load(call, OK_TRAILERS))
        self._remove(call)

    def reject(self, call: GrpcCall, error: RpcError) -> None:
        self.sends += 1
        if call.is_begun:
            self._http2.send_trailers(call.stream_id, self._with_load(call, error_trailers(error)))
            self._back_pressure.stream_ended(call.stream_id)
        else:
            self._http2.send_head(call.stream_id, self._with_load(call, error_head(error)), end=True)
        if not call.is_received:
            self.rejected.append(call.stream_id)
        self._remove(call)

    def send(self, call: GrpcCall, body: list[Buffer]) -> None:
        self.sends += 1
        if not call.is_begun:
            call.is_begun = True
            self._http2.send_head(call.stream_id, RESPONSE_HEAD[call.encoding])
        self._http2.send_data(call.stream_id, body)
        self._flush_soon()

    def complete(self, call: GrpcCall) -> None:
        self.sends += 1
        if not call.is_begun:
            self._http2.send_head(call.stream_id, RESPONSE_HEAD[b"identity"])
        self._http2.send_trailers(call.stream_id, self._with_load(call, OK_TRAILERS))
        self._back_pressure.stream_ended(call.stream_id)
        self._remove(call)

    def _with_load(self, call: GrpcCall, trailers: Headers) -> Headers:
        load = self.service.load
        if not call.head.load_format or load is None:
            return trailers
        return (*trailers, *load_trailers(load.latest(), call.head.load_format))

    def fault(self, call: GrpcCall) -> None:
        _log.exception("%s: the call failed for a fault of the server", call.name)
        call.fail(server_fault(call.name))
        if call.stream_id in self._calls:  # it is over, but its end could not be sent
            self._http2.reset(call.stream_id, ErrorCode.INTERNAL_ERROR)
            self._remove(call)

    def consume(self, call: GrpcCall, amount: int) -> None:
        self._http2.consume(call.stream_id, amount)

    def unsent_bytes(self, call: GrpcCall) -> int:
        return self._http2.unsent_bytes(call.stream_id)

    def wait_until_sent(self, call: GrpcCall) -> None:
        self.paused.append(call)

    # Inside.

    def _refuse(self, stream_id: int, headers: Headers, end: bool, head: Headers, status: int | str) -> None:
        """Answer a request that does not become a call, stop its sender, and log the access."""
        self._http2.send_head(stream_id, head, end=True)
        if not end:
            self.rejected.append(stream_id)
        log = self.service.access_log
        if log is not None:
            path = next((value for name, value in headers if name == b":path"), b"")
            method = self._methods.get(path)
            log.write(AccessEntry("grpc", method.name if method is not None else path.decode("latin-1"), status))

    def _remove(self, call: GrpcCall) -> None:
        self._calls.pop(call.stream_id, None)
        if self.deferred:
            self.deferred.pop(call.stream_id, None)
        self._flush_soon()


def server_fault(what: str) -> RpcError:
    return RpcError(Status.INTERNAL, f"{what}: internal fault of the server; its log has the details")


def _nothing() -> None:
    """Replaces `flush_soon` once the connection is gone."""
