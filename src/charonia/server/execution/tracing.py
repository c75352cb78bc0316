"""Traces of requests in the engine.

A runner makes traced batches only while a request with a trace is in flight; otherwise this code does not run.
"""

from collections.abc import Callable

from charonia.clock import now_ns
from charonia.core.errors import ServingError
from charonia.core.native import mypyc_attr
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse, Outcome, Reply
from charonia.core.statistics import usage_of
from charonia.core.trace import (
    COMPUTE_END,
    COMPUTE_INPUT_END,
    COMPUTE_OUTPUT_START,
    COMPUTE_START,
    INFER_RESPONSE_COMPLETE,
    QUEUE_START,
    REQUEST_END,
    REQUEST_START,
    TENSOR_BACKEND_OUTPUT,
    TENSOR_QUEUE_INPUT,
    Trace,
)
from charonia.server.execution.executor import Executor
from charonia.server.execution.in_flight import InFlight, PendingRequest, RunningBatch
from charonia.server.scheduling.api import CloseReason


def begin(
    trace: Trace, request: InferRequest, reply: Reply, model: tuple[str, str], ended: Callable[[], None] | None = None
) -> Reply:
    """Record the start of a request, and return a reply that records the rest.

    Args:
        trace: The request's trace.
        reply: The reply to wrap.
        model: Name and version of the model.
        ended: Called when the request is over.
    """
    trace.model_name, trace.model_version = model
    trace.request_id = request.id
    now = now_ns()
    trace.mark(REQUEST_START, now)
    trace.mark(QUEUE_START, now)
    trace.show(TENSOR_QUEUE_INPUT, request.inputs.values())
    trace.tree.hold()

    def traced(outcome: Outcome, final: bool) -> None:
        now = now_ns()
        if outcome is not None:
            trace.mark(INFER_RESPONSE_COMPLETE, now)
        if isinstance(outcome, InferResponse):
            trace.show(TENSOR_BACKEND_OUTPUT, outcome.outputs)
            if outcome.parameters:
                trace.usage = usage_of(outcome.parameters) or trace.usage
        if final:
            trace.answered_ns = now
            trace.mark(REQUEST_END, now)
        try:
            reply(outcome, final)
        finally:
            if final:
                if ended is not None:
                    ended()
                trace.tree.release()

    return traced


@mypyc_attr(allow_interpreted_subclasses=True)
class _TracedBatch(RunningBatch):
    """A batch that may contain requests with traces."""

    __slots__ = ()

    def __init__(
        self, in_flight: InFlight, entries: list[PendingRequest], slot: int, reason: CloseReason, executor: Executor
    ) -> None:
        super().__init__(in_flight, entries, slot, reason, executor)
        for trace in self._traces():
            trace.tree.hold()

    def _traces(self) -> list[Trace]:
        return [entry.request.trace for entry in self.entries if entry.request.trace is not None]

    def _end(
        self, input_end_ns: int, output_start_ns: int, end_ns: int, error: ServingError | None, leaves_open: bool
    ) -> None:
        traces = self._traces()
        marks = (
            (COMPUTE_START, self._start_ns),
            (COMPUTE_INPUT_END, input_end_ns),
            (COMPUTE_OUTPUT_START, output_start_ns),
            (COMPUTE_END, end_ns),
        )
        for trace in traces:
            # A response may be sent before the instance reports that it is idle.
            last = trace.answered_ns or end_ns
            for name, at_ns in marks:
                trace.mark(name, min(at_ns, last))
        super()._end(input_end_ns, output_start_ns, end_ns, error, leaves_open)
        for trace in traces:
            trace.tree.release()


class BatchKind:
    """The class of a runner's batches: while requests with traces are in flight, a subclass that records them.

    Attributes:
        current: The class of the next batch.
    """

    def __init__(self, kind: type[RunningBatch]) -> None:
        self._untraced = self.current = kind
        self._traced = type(f"Traced{kind.__name__}", (_TracedBatch, kind), {"__slots__": ()})
        self._traced_requests = 0

    def begin(self, trace: Trace, request: InferRequest, reply: Reply, model: tuple[str, str]) -> Reply:
        """Trace batches until the request is over. See the function `begin`."""
        self._traced_requests += 1
        self.current = self._traced
        return begin(trace, request, reply, model, self._ended)

    def _ended(self) -> None:
        self._traced_requests -= 1
        if not self._traced_requests:
            self.current = self._untraced
