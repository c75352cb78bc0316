"""Streaming calls: ModelStreamInfer and server reflection.

`StreamCall` reads, applies the limits and ends the call; a `StreamHandler` handles the messages. Request data is not
acknowledged while the conversation has the maximum of requests in flight, or while too much of the response waits for
the caller: the flow-control window closes, and the caller waits.

ModelStreamInfer carries requests to any models, each with any number of responses. Responses of a model with one
response per request come in the order of the requests, responses of decoupled models when they are produced. An error
of a request is a separate response and leaves the stream intact, unless the caller requested gRPC errors: then the
first error ends the stream with its status. If a caller does not read, its requests fail once
`stream_response_bytes_max` of responses are waiting, since a model cannot be paused.

Source: Triton's gRPC extensions ("ModelStreamInfer", "decoupled models").
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from charonia.core.errors import Code, ServingError, unavailable
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse, Outcome, Ticket
from charonia.server.access_log import AccessEntry
from charonia.server.facade import first_error
from charonia.server.grpc.calls import GrpcCall, Table
from charonia.wire.grpc_framing import Buffer, MessageReader
from charonia.wire.grpc_headers import CallHead
from charonia.wire.grpc_infer import (
    decode_infer,
    decode_infer_identity,
    encode_stream_error,
    encode_stream_response,
)
from charonia.wire.grpc_reflection import answer
from charonia.wire.grpc_status import RpcError, Status, rpc_error
from charonia.wire.shared_memory import NO_PLACES


class StreamHandler(Protocol):
    """Handles the messages of a streaming call."""

    def start(self, message: Buffer) -> None:
        """Take a request.

        Raises:
            RpcError: The stream cannot continue.
        """

    def in_flight(self) -> int:
        """Return the number of unanswered requests."""

    def drop(self) -> None:
        """Cancel everything in flight."""


class StreamCall(GrpcCall):
    """A call on which both sides send any number of messages."""

    __slots__ = ("_is_ending", "_is_pumping", "_is_winding_down", "_reader", "_stream_handler", "_unconsumed_bytes")

    def __init__(self, table: Table, stream_id: int, name: str, head: CallHead, make_handler: "MakeHandler") -> None:
        super().__init__(table, stream_id, name, head)
        service = table.service
        self._reader = MessageReader(head.encoding, service.limits.message_bytes_max, service.services.lend)
        self._stream_handler = make_handler(self)
        self._unconsumed_bytes = 0
        self._is_ending = False
        self._is_pumping = False
        self._is_winding_down = False

    def receive(self, data: bytes, end: bool) -> None:
        """Take bytes of the requests."""
        self._unconsumed_bytes += len(data)
        self._is_ending = self._is_ending or end
        try:
            self._reader.feed(data)
        except RpcError as error:
            self.fail(error)
        self.resume()

    def resume(self) -> None:
        """Start the requests that may start, and end the call when everything is answered."""
        if self._is_pumping or self.is_over:
            return
        self._is_pumping = True
        try:
            is_held = self._pump()
            if self._is_ending and not is_held and not self.is_over:
                if self._reader.pending_bytes:
                    raise RpcError(Status.INTERNAL, f"{self.name}: the stream ended within a message")
                if self._stream_handler.in_flight() == 0:
                    self._close()
                    self.table.complete(self)
        except RpcError as error:
            self.fail(error)
        finally:
            self._is_pumping = False
        if self._is_winding_down:
            self.wind_down()

    def send(self, parts: list[Buffer]) -> None:
        if not self.is_over:
            self.table.send(self, self.framed(parts))

    def is_idle(self) -> bool:
        return self._stream_handler.in_flight() == 0 and not self._reader.pending_bytes

    def unfinished_bytes(self) -> int | None:
        # None between messages, and while one waits.
        return None if self._unconsumed_bytes else self._reader.pending_bytes or None

    def wind_down(self) -> None:
        """The server is shutting down: end when nothing is in flight."""
        self._is_winding_down = True
        if self._stream_handler.in_flight() == 0:
            self.fail(RpcError(Status.UNAVAILABLE, f"{self.name}: the server is shutting down"))

    def drop(self) -> None:
        """Cancel everything in flight, and release this call's part of the connection window."""
        self._stream_handler.drop()
        self._consume(self._unconsumed_bytes)

    def _pump(self) -> bool:
        """Start requests; return whether some have to wait."""
        limits = self.table.service.limits
        stream_handler = self._stream_handler
        while not self.is_over:
            if stream_handler.in_flight() >= limits.stream_inflight_max:
                break
            if self.table.unsent_bytes(self) > limits.stream_unsent_bytes_max:
                self.table.wait_until_sent(self)
                break
            message = self._reader.next_message()
            if message is None:
                # The rest of a partial message may need the whole window.
                self._consume(self._unconsumed_bytes)
                return False
            self.table.service.request_count += 1
            stream_handler.start(message)
        self._consume(self._unconsumed_bytes - self._reader.pending_bytes)
        return not self.is_over

    def _consume(self, amount: int) -> None:
        if amount > 0:
            self._unconsumed_bytes -= amount
            self.table.consume(self, amount)


MakeHandler = Callable[[StreamCall], StreamHandler]
"""Makes the handler of a call."""


class _StreamRequest:
    """A request of the stream, and its outcomes that wait for their turn."""

    __slots__ = (
        "bytes_in",
        "is_final",
        "is_given_up",
        "is_ordered",
        "places",
        "request",
        "started_ns",
        "stream",
        "ticket",
        "version",
        "waiting",
        "wants_empty_final",
    )

    def __init__(self, stream: "InferStream", request: InferRequest, wants_empty_final: bool, is_ordered: bool) -> None:
        self.stream = stream
        self.request = request
        self.wants_empty_final = wants_empty_final
        self.is_ordered = is_ordered
        self.is_final = False
        self.is_given_up = False  # before its last outcome
        self.places = NO_PLACES
        self.waiting: list[tuple[Outcome, bool]] = []
        self.ticket: Ticket | None = None
        self.version = request.model_version
        self.bytes_in = 0
        self.started_ns = 0

    def reply(self, outcome: Outcome, final: bool) -> None:
        if not self.is_final:
            self.is_final = final
            if final:
                self.ticket = None
            self.stream.deliver(self, outcome, final)


class InferStream:
    """One ModelStreamInfer call."""

    __slots__ = ("_call", "_in_order", "_open_requests")

    def __init__(self, call: StreamCall) -> None:
        self._call = call
        self._open_requests: set[_StreamRequest] = set()
        self._in_order: deque[_StreamRequest] = deque()

    def in_flight(self) -> int:
        return len(self._open_requests)

    def start(self, message: Buffer) -> None:
        """Take a request. Raises as `StreamHandler.start`."""
        call = self._call
        service = call.table.service
        received_ns = 0 if service.tracer is None else time.monotonic_ns()
        problem: ServingError | None = None
        try:
            request, wants_empty_final, places = decode_infer(message, service.regions)
        except ServingError as error:
            request, wants_empty_final, places = decode_infer_identity(message), False, NO_PLACES
            problem = first_error(service.engine, service.services, request.model_name, request.model_version, error)
        pending = _StreamRequest(self, request, wants_empty_final, not self._is_decoupled(request))
        pending.places = places
        if service.access_log is not None:
            pending.bytes_in = len(message)
            pending.started_ns = time.monotonic_ns()
        self._open_requests.add(pending)
        if pending.is_ordered:
            self._in_order.append(pending)
        if problem is not None:
            pending.reply(problem, True)
            return
        try:
            ticket = service.infer(call, request, pending.reply, received_ns)
        except ServingError as error:
            pending.reply(error, True)
            return
        if not pending.is_final:
            pending.ticket = ticket
        elif pending.is_given_up:
            ticket.cancel()

    def drop(self) -> None:
        open_requests = list(self._open_requests)
        self._open_requests.clear()
        self._in_order.clear()
        gone = ServingError(Code.CANCELLED, "the call has ended")
        for pending in open_requests:  # all before the first is cancelled: that may release the responses of the others
            pending.is_final = pending.is_given_up = True
        for pending in open_requests:
            self._log_access(pending, gone, 0)
            if pending.ticket is not None:
                pending.ticket.cancel()

    def deliver(self, pending: _StreamRequest, outcome: Outcome, final: bool) -> None:
        """Send an outcome, immediately or when it is its request's turn."""
        if pending.is_ordered and self._in_order[0] is not pending:
            pending.waiting.append((outcome, final))
            return
        self._send(pending, outcome, final)
        if pending.is_ordered and final:
            self._next_turn()
        if final:
            self._call.resume()

    def _next_turn(self) -> None:
        """Remove the first request in order, which is over, and send the waiting outcomes of the next ones."""
        while not self._call.is_over:  # an error may end the call
            self._in_order.popleft()
            if not self._in_order:
                return
            pending = self._in_order[0]
            waiting, pending.waiting = pending.waiting, []
            for outcome, final in waiting:
                self._send(pending, outcome, final)
            if not pending.is_final:
                return

    def _send(self, pending: _StreamRequest, outcome: Outcome, final: bool) -> None:
        call = self._call
        if call.is_over:
            return
        if not (final or pending.is_ordered):
            limit = call.table.service.limits.stream_response_bytes_max
            if call.table.unsent_bytes(call) > limit:
                self._stop(pending, limit)
                return
        if final:
            self._open_requests.discard(pending)
        if isinstance(outcome, ServingError):
            if call.head.wants_grpc_errors:
                self._log_access(pending, outcome, 0)
                call.fail(rpc_error(outcome))
                return
            parts = encode_stream_error(outcome, pending.request, final)
        elif outcome is not None:
            pending.version = outcome.model_version
            try:
                parts = encode_stream_response(outcome, final, pending.places)
            except ServingError as error:
                parts = encode_stream_error(error, pending.request, final)
            except Exception:  # the other requests of the batch must not fail
                call.table.fault(call)
                return
        elif pending.wants_empty_final:
            request = pending.request
            parts = encode_stream_response(InferResponse(request.model_name, pending.version, request.id, []), True)
        else:
            parts = []
        if parts:
            call.send(parts)
        if final:
            self._log_access(pending, outcome, sum(map(len, parts)))

    def _stop(self, pending: _StreamRequest, limit: int) -> None:
        """End a request whose responses the caller does not read."""
        ticket = pending.ticket
        pending.is_given_up = True
        error = unavailable(
            f"the request is aborted: more than {limit} bytes of responses wait for the caller to read them",
            hint="read the responses of the stream, or send fewer concurrent requests",
        )
        pending.reply(error, True)
        if ticket is not None:
            ticket.cancel()

    def _is_decoupled(self, request: InferRequest) -> bool:
        try:
            return self._call.table.service.engine.model_config(request.model_name, request.model_version).is_decoupled
        except ServingError:
            return False  # the engine will report the error

    def _log_access(self, pending: _StreamRequest, outcome: Outcome, bytes_out: int) -> None:
        log = self._call.table.service.access_log
        if log is not None:
            status = rpc_error(outcome).status.name if isinstance(outcome, ServingError) else "OK"
            entry = AccessEntry("grpc", self._call.name, status)
            entry.model, entry.version, entry.request_id = (
                pending.request.model_name,
                pending.version,
                pending.request.id,
            )
            entry.bytes_in, entry.bytes_out = pending.bytes_in, bytes_out
            entry.duration_ns = time.monotonic_ns() - pending.started_ns
            entry.execution = outcome.execution if isinstance(outcome, InferResponse) else None
            log.write(entry)


class ReflectionStream:
    """One reflection call: answers each query immediately."""

    __slots__ = ("_call",)

    def __init__(self, call: StreamCall) -> None:
        self._call = call

    def in_flight(self) -> int:
        """Return 0: no question waits."""
        return 0

    def start(self, message: Buffer) -> None:
        """Answer a question. Raises as `StreamHandler.start`."""
        self._call.send([answer(message)])

    def drop(self) -> None:
        """Nothing is in flight."""
