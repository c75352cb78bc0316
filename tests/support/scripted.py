"""What tests say step by step: instances that answer when they are told to, and numbers of traces."""

from collections.abc import Sequence
from itertools import count, repeat

from charonia.clock import now_ns
from charonia.core.errors import ServingError
from charonia.core.request import InferRequest
from charonia.core.tensor import Tensor
from charonia.server.backends.api import BatchSink, Outputs, Result


class ScriptedInstance:
    """An asynchronous instance that answers when the test says so."""

    def __init__(self) -> None:
        self.batches: list[tuple[Sequence[InferRequest], BatchSink]] = []
        self.cancelled: list[int] = []
        self.is_closed = False

    def start(self, requests: Sequence[InferRequest], sink: BatchSink) -> None:
        self.batches.append((list(requests), sink))

    def cancel(self, sink: BatchSink, index: int) -> None:
        assert sink.is_cancelled(index)
        self.cancelled.append(index)

    async def aclose(self) -> None:
        self.is_closed = True

    def finish(self, *results: Result | None, error: ServingError | None = None, duration_ns: int = 0) -> None:
        """Answer the oldest batch: with these, or each request with its input."""
        requests, sink = self.batches.pop(0)
        for index, request in enumerate(requests if error is None else ()):
            result = results[index] if results else echo(request)
            if result is not None:
                sink.respond(index, result, True)
        start = now_ns()
        sink.finish(start, start + duration_ns, error)

    def leave_open(self) -> BatchSink:
        """Take the oldest batch's execution for finished, its requests not."""
        _, sink = self.batches.pop(0)
        sink.finish(now_ns(), now_ns(), leaves_open=True)
        return sink


def echo(request: InferRequest, *more: Tensor) -> Outputs:
    """Return the request's input as output, and more."""
    given = request.inputs["IN"]
    return Outputs([Tensor("OUT", given.datatype, given.array), *more])


class TraceIds:
    """Numbers of traces from 1, and of spans from `spans`, or none."""

    def __init__(self, spans: int = 0) -> None:
        self._traces, self._spans = count(1), count(spans) if spans else repeat(0)

    def trace_id(self) -> int:
        return next(self._traces)

    def span_id(self) -> int:
        return next(self._spans)
