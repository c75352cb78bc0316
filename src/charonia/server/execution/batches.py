"""Requests in flight and the batches in which they run, of one `ModelRunner`."""

import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from charonia.core.caller import CallFrame
from charonia.core.calls import Reply
from charonia.core.errors import ServingError, internal
from charonia.core.request import InferRequest
from charonia.core.response import ExecutionRecord, InferResponse
from charonia.core.statistics import ResponseKind
from charonia.server.backends.api import Execution, Result
from charonia.server.execution.calls import Call
from charonia.server.execution.clock import now_ns
from charonia.server.metrics.model_metrics import FailureReason
from charonia.server.scheduling.api import CloseReason

if TYPE_CHECKING:
    from charonia.server.execution.runner import ModelRunner

QUEUED, RUNNING, DONE = range(3)
"""Where a request is. One that its batch left open is still RUNNING."""

# For `map`, which calls no Python for a batch; a comprehension is a call.
_request_of: "Callable[[Entry], InferRequest]" = attrgetter("request")
_batch_size_of: "Callable[[Entry], int]" = attrgetter("batch_size")
_arrival_ns_of: "Callable[[Entry], int]" = attrgetter("arrival_ns")


class Entry:
    """A request in flight; also the ticket that the front end holds."""

    __slots__ = ("arrival_ns", "batch", "batch_size", "call", "id", "index", "reply", "request", "runner", "state")

    def __init__(self, runner: "ModelRunner", request: InferRequest, reply: Reply, arrival_ns: int) -> None:
        self.runner = runner
        self.request = request
        self.reply = reply
        self.arrival_ns = arrival_ns
        self.state = QUEUED
        self.id = -1
        self.batch_size = 1
        self.batch: RunningBatch | None = None
        self.index = 0
        self.call: Call | None = None  # where another model made the request

    def cancel(self) -> None:
        """The caller has gone."""
        if self.state != DONE:
            self.runner.cancel(self)


class RunningBatch:
    """A batch on a lane, and the sink through which the lane reports.

    Attributes:
        entries: Its requests in flight.
        requests: The requests themselves.
        slot: Where it runs.
        reason: Why it was sent.
        batch_size: Batch elements of all requests.
    """

    __slots__ = (
        "_frame",
        "_marks_ns",
        "_runner",
        "_start_ns",
        "_succeeded",
        "batch_size",
        "entries",
        "reason",
        "requests",
        "slot",
    )

    def __init__(self, runner: "ModelRunner", entries: list[Entry], slot: int, reason: CloseReason) -> None:
        self._runner = runner
        self.entries = entries
        self.requests: Sequence[InferRequest] = list(map(_request_of, entries))
        self.slot = slot
        self.reason = reason
        self.batch_size = sum(map(_batch_size_of, entries))
        self._start_ns = now_ns()
        self._marks_ns: tuple[int, int] | None = None  # begin and end of computing, once that is over
        self._succeeded: list[Entry] = []
        self._frame: CallFrame | None = None

    def executed(self, execution: Execution | ServingError, start_ns: int, end_ns: int) -> None:
        """A blocking instance ran the batch from `start_ns` to `end_ns`."""
        self._start_ns = start_ns
        if isinstance(execution, ServingError):
            self._end(start_ns, end_ns, end_ns, execution, False)
            return
        for index, result in enumerate(execution.results):
            self._take(index, result, end_ns)
        self._end(execution.input_end_ns, execution.output_start_ns, end_ns, None, False)

    def respond(self, index: int, result: Result | None, final: bool) -> None:
        """An asynchronous instance answers one request: the first that comes is the answer."""
        if result is not None:
            self._take(index, result, now_ns())
        elif final:
            self._take(index, _no_response(), now_ns())

    def finish(
        self, input_end_ns: int, output_start_ns: int, error: ServingError | None = None, *, leaves_open: bool = False
    ) -> None:
        """An asynchronous instance is idle again."""
        self._end(input_end_ns, output_start_ns, now_ns(), error, leaves_open)

    def is_cancelled(self, index: int) -> bool:
        """Whether nobody waits for a request any more."""
        return self.entries[index].state == DONE

    def frame(self) -> CallFrame:
        """Return who makes the requests that the model makes while it runs this batch."""
        if self._frame is None:
            parent = next((request.caller for request in self.requests if request.caller is not None), None)
            self._frame = self._runner.frame_of(self.slot, parent, occupies=self._marks_ns is None)
        return self._frame

    def cancelled(self, index: int) -> None:
        """The caller of a request has gone."""

    def _take(self, index: int, result: Result, end_ns: int) -> None:
        entry = self.entries[index]
        if entry.state == DONE:
            return
        runner = self._runner
        if isinstance(result, ServingError):
            runner.fail(entry, result, FailureReason.BACKEND)
            return
        try:
            response = runner.response(entry, result, self._record(entry, end_ns))
        except ServingError as error:
            runner.fail(entry, error, FailureReason.BACKEND)
            return
        runner.answer(entry, response)
        self._succeed(entry, end_ns)

    def _succeed(self, entry: Entry, end_ns: int) -> None:
        """Count a request that was answered well, now or with the others when the batch ends."""
        if self._marks_ns is None:
            self._succeeded.append(entry)
        else:
            self._runner.meter.request_done(entry.arrival_ns, entry.batch_size, self._start_ns, self._marks_ns, end_ns)

    def _record(self, entry: Entry, end_ns: int) -> ExecutionRecord:
        start = self._start_ns
        return ExecutionRecord(
            self._runner.slot_name(self.slot), self.batch_size, start - entry.arrival_ns, end_ns - start
        )

    def _end(
        self, input_end_ns: int, output_start_ns: int, end_ns: int, error: ServingError | None, leaves_open: bool
    ) -> None:
        runner = self._runner
        for entry in self.entries:
            if entry.state != RUNNING:
                continue
            if leaves_open:
                runner.left_open(entry)
            else:
                runner.fail(entry, error or _no_response(), FailureReason.BACKEND)
        self._marks_ns = (input_end_ns, output_start_ns)
        succeeded, self._succeeded = self._succeeded, []
        runner.meter.batch_done(
            arrivals_ns=list(map(_arrival_ns_of, succeeded)),
            inferences=sum(map(_batch_size_of, succeeded)),
            batch_size=self.batch_size,
            reason=self.reason,
            marks_ns=(self._start_ns, input_end_ns, output_start_ns, end_ns),
            wall_ms=int(time.time() * 1000),
        )
        if self._frame is not None:
            runner.vacate(self._frame)
        runner.slot_done(self.slot, output_start_ns - input_end_ns)


class StreamingBatch(RunningBatch):
    """A batch of a decoupled model: any number of responses for each request."""

    __slots__ = ("_failed", "_sent", "_since_ns")

    def __init__(self, runner: "ModelRunner", entries: list[Entry], slot: int, reason: CloseReason) -> None:
        super().__init__(runner, entries, slot, reason)
        self._sent = [0] * len(entries)
        self._since_ns = [self._start_ns] * len(entries)
        self._failed: set[int] = set()

    def respond(self, index: int, result: Result | None, final: bool) -> None:
        """The instance sends a response of one request."""
        entry = self.entries[index]
        if entry.state == DONE:
            return
        end_ns = now_ns()
        outcome: InferResponse | ServingError | None = None
        if isinstance(result, ServingError):
            outcome = result
        elif result is not None:
            try:
                outcome = self._runner.response(entry, result, self._record(entry, end_ns))
            except ServingError as error:
                outcome = error
        elif not final:
            return
        self._count(index, outcome, end_ns)
        if not final:
            self._runner.stream(entry, outcome)
        elif index in self._failed:
            self._runner.fail(entry, outcome, FailureReason.BACKEND)
        else:
            self._runner.answer(entry, outcome)
            self._succeed(entry, end_ns)

    def cancelled(self, index: int) -> None:
        """The caller of a request has gone."""
        self._runner.meter.response(self._sent[index], ResponseKind.CANCEL, 0)

    def _take(self, index: int, result: Result, end_ns: int) -> None:
        """A blocking instance has answered one request: once is any number of times, too."""
        self.respond(index, result, True)

    def _count(self, index: int, outcome: InferResponse | ServingError | None, end_ns: int) -> None:
        since, self._since_ns[index] = self._since_ns[index], end_ns
        kind = ResponseKind.EMPTY_RESPONSE
        if outcome is not None:
            kind = ResponseKind.SUCCESS
            if isinstance(outcome, ServingError):
                kind = ResponseKind.FAIL
                self._failed.add(index)
        meter = self._runner.meter
        if not self._sent[index]:
            meter.first_response(end_ns - self.entries[index].arrival_ns)
        meter.response(self._sent[index], kind, end_ns - since)
        self._sent[index] += 1


def _no_response() -> ServingError:
    return internal("the model sent no response for the request")
