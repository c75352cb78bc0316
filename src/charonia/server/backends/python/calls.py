"""The requests that one instance of a model makes of other models (business logic scripting).

This module does not depend on where the model runs: a call is an `InferRequest` and a `Reply`. Every call gets exactly
one final reply. A call is cancelled by the model, when all callers of its batch have gone, when it times out, and when
the instance ends. Everything happens on the event loop's thread.
"""

import asyncio
import time
from collections.abc import Sequence

from charonia.core.errors import ServingError, unavailable, unsupported
from charonia.core.request import NO_FLOW, CallFrame, InferRequest
from charonia.core.response import Outcome, Reply, Ticket
from charonia.core.trace import Trace
from charonia.server.backends.api import BatchSink, Models

CALLS_OPEN_MAX = 1024
"""Most unanswered calls of one instance."""


class Work:
    """The batch that an instance works on when it makes a call.

    Attributes:
        sink: The sink of the batch.
        requests: Its requests.
    """

    __slots__ = ("requests", "sink")

    def __init__(self, sink: BatchSink, requests: Sequence[InferRequest]) -> None:
        self.sink = sink
        self.requests = requests

    def deadline_ns(self) -> int:
        """Return the latest deadline of the requests as monotonic time, 0 where one has none."""
        if any(request.deadline_ns == 0 for request in self.requests):
            return 0
        return max(request.deadline_ns for request in self.requests)

    def child_trace(self, context: str) -> Trace | None:
        """Return the trace of a call, None where it is not traced.

        Args:
            context: Trace context of the request that causes the call; may be "" for a batch of one request.
        """
        for request in self.requests:
            trace = request.trace
            if trace is not None and (trace.context == context or (not context and len(self.requests) == 1)):
                return trace.child()
        return None


class _OpenCall:
    """A call in flight; `take` is its reply."""

    __slots__ = ("calls", "error", "is_over", "key", "reply", "request", "sink", "ticket", "timer")

    def __init__(
        self, calls: "ModelCalls", key: int, request: InferRequest, reply: Reply, sink: BatchSink | None
    ) -> None:
        self.calls = calls
        self.key = key
        self.request = request
        self.reply = reply
        self.sink = sink
        self.ticket: Ticket | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.is_over = False
        self.error: ServingError | None = None  # why it was cancelled

    def take(self, outcome: Outcome, final: bool) -> None:
        if self.is_over:
            return
        if final:
            self.is_over = True
            self.ticket = None
            self.calls._closed(self)
            if self.timer is not None:
                self.timer.cancel()
            if self.error is not None:
                outcome = self.error
        self.reply(outcome, final)

    def cancel(self) -> None:
        if self.ticket is not None:
            self.ticket.cancel()

    def fail(self, error: ServingError) -> None:
        self.error = error
        self.cancel()

    def expire(self) -> None:
        name = self.request.model_name
        self.fail(unavailable(f"Request timeout expired: model '{name}' has not answered in time"))


class ModelCalls:
    """Makes calls, and tracks the open ones.

    Args:
        models: The server's models, None where calls are not possible.
        caller: The caller of calls outside of batches: the model, without an instance.
    """

    def __init__(self, models: Models | None, caller: CallFrame) -> None:
        self._models = models
        self._caller = caller
        self._open: dict[int, _OpenCall] = {}

    def __len__(self) -> int:
        return len(self._open)

    def start(
        self,
        key: int,
        request: InferRequest,
        reply: Reply,
        *,
        work: Work | None = None,
        trace: str = "",
        allows_decoupled: bool = False,
    ) -> None:
        """Make a call. Its outcomes go to `reply`, perhaps before this returns.

        Args:
            key: Number of the call, for `cancel`; unique among open calls.
            request: The request; its caller and deadline are set here. `timeout_us` limits the whole call.
            reply: Gets every outcome.
            work: The running batch that makes the call; None for a thread of the model's own.
            trace: Trace context of the request that causes the call, "" for unknown.
            allows_decoupled: Whether the model accepts any number of responses.
        """
        try:
            models = self._admit(key, request, allows_decoupled)
        except ServingError as error:
            reply(error, True)
            return
        request.caller = work.sink.frame() if work is not None else self._caller
        request.flow = work.requests[0].flow if work is not None and work.requests else NO_FLOW
        request.trace = work.child_trace(trace) if work is not None else None
        call = self._open[key] = _OpenCall(self, key, request, reply, work.sink if work is not None else None)
        now = time.monotonic_ns()
        deadline = work.deadline_ns() if work is not None else 0
        if request.timeout_us:
            own = now + request.timeout_us * 1000
            deadline = min(deadline, own) if deadline else own
            # Only for the call's own limit: an expired deadline of the caller ends the call anyway. If the call ended
            # first, the model could still answer its caller.
            call.timer = asyncio.get_running_loop().call_later(request.timeout_us / 1e6, call.expire)
        request.deadline_ns = deadline
        ticket = models.infer(request, call.take)
        if not call.is_over:
            call.ticket = ticket
            if call.error is not None:
                call.cancel()

    def cancel(self, key: int) -> None:
        """Cancel a call. Ignored for one that is over."""
        call = self._open.get(key)
        if call is not None:
            call.cancel()

    def fail(self, key: int, error: ServingError) -> None:
        """Cancel a call; its last outcome is this error. Ignored for one that is over."""
        call = self._open.get(key)
        if call is not None:
            call.fail(error)

    def cancel_batch(self, sink: BatchSink) -> None:
        for call in [call for call in self._open.values() if call.sink is sink]:
            call.cancel()

    def cancel_all(self) -> None:
        """Cancel all calls: the instance has ended."""
        for call in list(self._open.values()):
            call.cancel()

    def _admit(self, key: int, request: InferRequest, allows_decoupled: bool) -> Models:
        """Return the models; raise a ServingError where the call is not possible."""
        name = request.model_name
        if self._models is None:
            raise unsupported(f"model '{name}' cannot be called: there are no other models here")
        if len(self._open) >= CALLS_OPEN_MAX or key in self._open:
            raise unavailable(
                f"model '{name}' is not called: {CALLS_OPEN_MAX} calls of this instance are not answered yet",
                hint="wait for some before making more",
            )
        try:
            config = self._models.model_config(name, request.model_version)
        except ServingError as error:
            if self._models.is_loadable(name):
                return self._models  # the request waits for the model, whose configuration is not known yet
            message = f"Failed for execute the inference request. Model '{name}' is not ready. {error.message}"
            raise ServingError(error.code, message, hint=error.hint) from error
        if config.is_decoupled and not allows_decoupled:
            raise unsupported(
                f"Model {name} is using the decoupled transaction policy, and this call takes one response only. "
                "Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled models."
            )
        return self._models

    def _closed(self, call: _OpenCall) -> None:
        self._open.pop(call.key, None)
