"""ModelStreamInfer: requests to any models on one stream, each with any number of responses.

Responses of a model with one response for each request come in the order of the requests, those of decoupled models as
they are made. An error of a request is a response of its own and leaves the stream intact, unless the caller asked
for gRPC errors: then the first error ends the stream with its status. A caller that does not read has its requests
failed once `stream_response_bytes_max` of their responses wait: a model cannot be made to wait.

Source: Triton's gRPC extensions ("ModelStreamInfer", "decoupled models").
"""

import time
from collections import deque

from charonia.core.calls import Outcome, Reply, Ticket
from charonia.core.errors import Code, ServingError, unavailable
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse
from charonia.server.access_log import AccessEntry
from charonia.server.grpc.calls import internal_error
from charonia.server.grpc.forwarding import forward_headers
from charonia.server.grpc.stream import StreamCall
from charonia.server.grpc.traced import begin
from charonia.wire.grpc_framing import Buffer
from charonia.wire.grpc_infer import (
    decode_infer,
    decode_infer_identity,
    encode_stream_error,
    encode_stream_response,
)
from charonia.wire.grpc_status import STATUS_BY_CODE, rpc_error
from charonia.wire.shared_memory import NO_PLACES


class _Turn:
    """A request of the stream and the outcomes that wait for their turn."""

    __slots__ = (
        "bytes_in",
        "is_final",
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
    """What is said on one ModelStreamInfer call."""

    __slots__ = ("_call", "_in_order", "_turns")

    def __init__(self, call: StreamCall) -> None:
        self._call = call
        self._turns: set[_Turn] = set()
        self._in_order: deque[_Turn] = deque()

    def in_flight(self) -> int:
        """Return the number of requests that are not answered yet."""
        return len(self._turns)

    def start(self, message: Buffer) -> None:
        """Take a request. Raises as `charonia.server.grpc.stream.Conversation.start`."""
        call = self._call
        engine = call.wire.service.engine
        tracer = call.wire.service.tracer
        received_ns = 0 if tracer is None else time.monotonic_ns()
        problem: ServingError | None = None
        services = call.wire.service.services
        try:
            request, wants_empty_final, places = decode_infer(message, services.regions)
            if services.grpc_headers is not None:
                forward_headers(services.grpc_headers, request, call.head)
        except ServingError as error:
            request, wants_empty_final, places = decode_infer_identity(message), False, NO_PLACES
            problem = error
        request.deadline_ns = call.deadline_ns
        turn = _Turn(self, request, wants_empty_final, not self._is_decoupled(request))
        turn.places = places
        if call.wire.service.access_log is not None:
            turn.bytes_in = len(message)
            turn.started_ns = time.monotonic_ns()
        self._turns.add(turn)
        if turn.is_ordered:
            self._in_order.append(turn)
        if problem is not None:
            turn.reply(problem, True)
            return
        reply: Reply = turn.reply
        if tracer is not None:
            reply = begin(tracer, request, reply, head=call.head, received_ns=received_ns)
        ticket = engine.infer(request, reply)
        if turn.is_final:
            ticket.cancel()
        else:
            turn.ticket = ticket

    def drop(self) -> None:
        """Cancel everything in flight."""
        turns = list(self._turns)
        self._turns.clear()
        self._in_order.clear()
        gone = ServingError(Code.CANCELLED, "the call has ended")
        for turn in turns:
            turn.is_final = True
            self._log_access(turn, gone, 0)
            if turn.ticket is not None:
                turn.ticket.cancel()

    def deliver(self, turn: _Turn, outcome: Outcome, final: bool) -> None:
        """Send an outcome, now or when it is its request's turn."""
        if turn.is_ordered and self._in_order[0] is not turn:
            turn.waiting.append((outcome, final))
            return
        self._send(turn, outcome, final)
        if turn.is_ordered and final:
            self._next_turn()
        if final:
            self._call.resume()

    def _next_turn(self) -> None:
        """Let go of the first request in order, which is over, and send what the next ones have waiting."""
        while not self._call.is_over:  # an error may end the call, and with it the order
            self._in_order.popleft()
            if not self._in_order:
                return
            turn = self._in_order[0]
            waiting, turn.waiting = turn.waiting, []
            for outcome, final in waiting:
                self._send(turn, outcome, final)
            if not turn.is_final:
                return

    def _send(self, turn: _Turn, outcome: Outcome, final: bool) -> None:
        """Send an outcome of a request whose turn it is."""
        call = self._call
        if call.is_over:
            return
        if not (final or turn.is_ordered):
            limit = call.wire.service.limits.stream_response_bytes_max
            if call.wire.unsent_bytes(call) > limit:
                self._stop(turn, limit)
                return
        if final:
            self._turns.discard(turn)
        if isinstance(outcome, ServingError):
            if call.head.wants_grpc_errors:
                self._log_access(turn, outcome, 0)
                call.fail(rpc_error(outcome))
                return
            parts = encode_stream_error(outcome, turn.request, final)
        elif outcome is not None:
            turn.version = outcome.model_version
            try:
                parts = encode_stream_response(outcome, final, turn.places)
            except ServingError as error:
                parts = encode_stream_error(error, turn.request, final)
            except Exception:  # the caller has other requests of the batch to answer
                call.fail(internal_error(call.name))
                return
        elif turn.wants_empty_final:
            request = turn.request
            parts = encode_stream_response(InferResponse(request.model_name, turn.version, request.id, []), True)
        else:
            parts = []
        if parts:
            call.send(parts)
        if final:
            self._log_access(turn, outcome, sum(map(len, parts)))

    def _stop(self, turn: _Turn, limit: int) -> None:
        """End a request whose responses the caller does not take."""
        ticket = turn.ticket
        error = unavailable(
            f"the request is given up: more than {limit} bytes of responses wait for the caller to read them",
            hint="read the responses of the stream, or send fewer requests at once",
        )
        turn.reply(error, True)
        if ticket is not None:
            ticket.cancel()

    def _is_decoupled(self, request: InferRequest) -> bool:
        try:
            return self._call.wire.service.engine.model_config(request.model_name, request.model_version).is_decoupled
        except ServingError:
            return False  # the engine will say what is wrong with the request

    def _log_access(self, turn: _Turn, outcome: Outcome, bytes_out: int) -> None:
        log = self._call.wire.service.access_log
        if log is not None:
            status = STATUS_BY_CODE[outcome.code].name if isinstance(outcome, ServingError) else "OK"
            entry = AccessEntry("grpc", self._call.name, status)
            entry.model, entry.version, entry.request_id = turn.request.model_name, turn.version, turn.request.id
            entry.bytes_in, entry.bytes_out = turn.bytes_in, bytes_out
            entry.duration_ns = time.monotonic_ns() - turn.started_ns
            entry.execution = outcome.execution if isinstance(outcome, InferResponse) else None
            log.write(entry)
