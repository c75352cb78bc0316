"""The requests in flight of one model version, their replies, and the batches in which they run.

Invariants:

1. Every request gets exactly one final reply, from `answer`, and none after it. Only `deliver` calls a reply.
2. A cancelled request is answered immediately, while its batch continues; the batch's later responses are ignored.
3. A batch may finish and leave requests open. They stay in flight until their final reply.
"""

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Final, Generic, Protocol, TypeVar

from charonia.busy_poll import BusyPoll
from charonia.clock import now_ns
from charonia.config.model import ModelConfig
from charonia.config.parameters import is_language_model, repeats_text
from charonia.core.classification import classify
from charonia.core.errors import Code, ServingError, internal, invalid, turned_away, unavailable
from charonia.core.native import mypyc_attr
from charonia.core.request import CallFrame, InferRequest
from charonia.core.response import ExecutionRecord, InferResponse, Outcome, Reply
from charonia.core.statistics import ResponseKind
from charonia.core.tensor import Tensor
from charonia.server.backends.api import Execution, Outputs, Result
from charonia.server.execution.admission import with_request_id
from charonia.server.execution.deadlock import DeadlockDetector, WaitingRequest
from charonia.server.execution.executor import Executor
from charonia.server.metrics.metric_families import chosen_buckets
from charonia.server.metrics.model_metrics import BatchNote, FailureReason, ModelMetrics
from charonia.server.metrics.tokens import TokenMetrics, TokenStream
from charonia.server.scheduling.api import CloseReason, DropReason

_NOT_REJECTED: Final = {
    DropReason.STOPPING: FailureReason.OTHER,
    DropReason.SCHEDULER_FAILED: FailureReason.OTHER,
    DropReason.NO_SEQUENCE: FailureReason.OTHER,
    DropReason.STRATEGY_FAILED: FailureReason.BACKEND,
    DropReason.STATE_LOST: FailureReason.BACKEND,
    DropReason.CANCELLED: FailureReason.CANCELED,
}
"""Drops for other reasons than capacity or time."""


def selected(
    request: InferRequest, tensors: Sequence[Tensor], config: ModelConfig, labels_of: Mapping[str, tuple[str, ...]]
) -> list[Tensor]:
    """Return the requested outputs that are there, in their form and in the order in which the model gave them."""
    wanted = {output.name: output for output in request.outputs}
    chosen = []
    for tensor in tensors:
        output = wanted.pop(tensor.name, None)
        if output is None:
            continue
        if output.classification:
            labels = labels_of.get(output.name, ())
            tensor = classify(tensor, output.classification, labels, batched=config.max_batch_size > 0)
        chosen.append(tensor)
    return chosen


def drop_failure(reason: DropReason) -> FailureReason:
    """Return how a dropped request is counted: REJECTED if there was no room or no time for it."""
    return _NOT_REJECTED.get(reason, FailureReason.REJECTED)


def drop_error(reason: DropReason, request: InferRequest, model: str) -> ServingError:
    """Return the error for a dropped request."""
    # A request that a model made is a part of one that has begun.
    refuse = turned_away if request.caller is None else unavailable
    match reason:
        case DropReason.QUEUE_FULL:
            return refuse(
                f"Exceeds maximum queue size of model '{model}'",
                hint="retry later, or raise max_queue_size or the number of instances",
            )
        case DropReason.OVERLOADED:
            return refuse(
                f"Model '{model}' is overloaded: the request would wait longer than clients of the model do",
                hint="retry later, or add instances; max_queue_size in the queue policy sets a fixed limit instead",
            )
        case DropReason.TIMEOUT:
            return refuse("Request timeout expired")
        case DropReason.STOPPING:
            return refuse(f"Server is stopping, scheduler for model '{model}' has stopped accepting new requests")
        case DropReason.STRATEGY_FAILED:
            return internal(
                f"the batching strategy of model '{model}' failed on the request", hint="the server's log says how"
            )
        case DropReason.SCHEDULER_FAILED:
            return internal(
                f"the scheduler of model '{model}' failed", hint="the server's log says how; load the model again"
            )
        case DropReason.NO_SEQUENCE:
            return invalid(
                f"inference request for sequence {request.correlation_id} to model '{model}' must specify the START "
                "flag on the first request of the sequence",
                hint="a sequence is over if it was idle for max_sequence_idle_microseconds, or if its engine has ended",
            )
        case DropReason.SEQUENCE_TIMEOUT:
            return unavailable(
                "timeout of the corresponding sequence has been expired",
                hint="no slot became free in time for the sequence",
            )
        case DropReason.STATE_LOST:
            error = internal(
                f"sequence {request.correlation_id} of model '{model}' is over: "
                "the process that remembered it has ended",
                hint="start it again; the server keeps states that `state` of sequence_batching declares",
            )
            return with_request_id(error, request)
        case DropReason.CANCELLED:
            return ServingError(Code.CANCELLED, "the request was cancelled: another one of its sequence was")


HELD_RESPONSES_MAX = 1024
"""Most responses of one request that are held back until its turn."""

_T = TypeVar("_T")


class OrderedOutcomes(Generic[_T]):
    """Holds outcomes back until every request that arrived earlier is over.

    Outcomes of the oldest request that is not over are delivered immediately. Every request, even if refused or
    cancelled, needs a final outcome, or the requests behind it wait forever. Requests are opaque, and known by an id.
    """

    __slots__ = ("_due", "_is_passing_on", "_open")

    def __init__(self) -> None:
        self._open: OrderedDict[int, tuple[_T, list[tuple[Outcome, bool]]]] = OrderedDict()  # with held-back outcomes
        self._due: deque[tuple[_T, Outcome, bool]] = deque()
        self._is_passing_on = False

    def submitted(self, id: int, request: _T) -> None:
        """Add a request that arrived. Ids may not repeat."""
        self._open[id] = (request, [])

    def holds(self, id: int) -> bool:
        """Return whether a request arrived and its final outcome is not due yet."""
        return id in self._open

    def is_full(self, id: int) -> bool:
        """Whether no more responses of a request can be held back."""
        return len(self._open[id][1]) >= HELD_RESPONSES_MAX

    def pass_on(self, id: int, outcome: Outcome, final: bool, deliver: Callable[[_T, Outcome, bool], None]) -> None:
        """Take in an outcome and deliver all due outcomes, in order: request, outcome, whether it is final.

        Outcomes that a delivery causes, such as of requests that it cancels, are delivered after the outcomes that
        were already due.

        Raises:
            KeyError: The request did not arrive, or had its final outcome.
        """
        self._open[id][1].append((outcome, final))
        self._collect_due()
        if self._is_passing_on:
            return
        self._is_passing_on = True
        try:
            while self._due:
                deliver(*self._due.popleft())
        finally:
            self._is_passing_on = False

    def _collect_due(self) -> None:
        while self._open:
            oldest, (request, held) = next(iter(self._open.items()))
            self._due.extend((request, outcome, final) for outcome, final in held)
            if not held or not held[-1][1]:
                held.clear()
                return
            del self._open[oldest]


_log = logging.getLogger(__name__)

QUEUED: Final = 0
RUNNING: Final = 1
DONE: Final = 2
COLLECTED: Final = 3
"""States of a request. One that its batch left open is still RUNNING; COLLECTED waits for the end of a loop's turn."""

# For `map`, which calls no Python for a batch; a comprehension is a call.
_request_of: Final["Callable[[PendingRequest], InferRequest]"] = attrgetter("request")
_batch_size_of: Final["Callable[[PendingRequest], int]"] = attrgetter("batch_size")
_arrival_ns_of: Final["Callable[[PendingRequest], int]"] = attrgetter("arrival_ns")


class BatchOwner(Protocol):
    """The runner, as its requests in flight and batches see it."""

    def cancel(self, entry: "PendingRequest") -> None:
        """The caller of an unanswered request has gone."""

    def frame_of(self, slot: int, parent: CallFrame | None, *, occupies: bool) -> CallFrame:
        """Return the call frame of the requests that a batch makes."""

    def batch_ended(self, slot: int, compute_ns: int, frame: CallFrame | None) -> None:
        """A batch is done; it computed for `compute_ns`, and made requests in `frame` unless that is None."""


class PendingRequest:
    """A request in flight; also the ticket that the front end holds."""

    __slots__ = ("arrival_ns", "batch", "batch_size", "id", "index", "owner", "reply", "request", "state", "wait")

    def __init__(self, owner: BatchOwner, request: InferRequest, reply: Reply, arrival_ns: int) -> None:
        self.owner = owner
        self.request = request
        self.reply = reply
        self.arrival_ns = arrival_ns
        self.state = QUEUED
        self.id = -1
        self.batch_size = 1
        self.batch: RunningBatch | None = None
        self.index = 0
        self.wait: WaitingRequest | None = None  # if a model made the request

    def cancel(self) -> None:
        if self.state != DONE:
            self.owner.cancel(self)

    def ask_to_stop(self) -> None:
        if self.state == RUNNING and self.batch is not None:
            self.batch.executor.cancel(self.batch, self.index)
        else:
            self.cancel()


class InFlight:
    """The requests in flight of one model version, and their replies.

    Args:
        config: The complete configuration.
        version: The version, as text.
        labels: Class labels by output.
        owner: The runner.
        deadlocks: The deadlock detector.
        busy_poll: Keeps the event loop awake, None without busy polling.

    Attributes:
        requests: The requests by id of the scheduler.
        metrics: The metrics of the version.
        order: Holds replies back to keep the order of requests; None if the model does not require it.
        idle: Set when no request is left; None while no task waits for that.
    """

    def __init__(
        self,
        config: ModelConfig,
        version: str,
        labels: Mapping[str, tuple[str, ...]],
        owner: BatchOwner,
        deadlocks: DeadlockDetector,
        busy_poll: BusyPoll | None,
    ) -> None:
        self.requests: dict[int, PendingRequest] = {}
        self.metrics = ModelMetrics(config.name, version, chosen_buckets(config), config.max_batch_size)
        if is_language_model(config):
            self.metrics.tokens = TokenMetrics(is_cumulative=repeats_text(config))
        self.order: OrderedOutcomes[PendingRequest] | None = None
        self.idle: asyncio.Event | None = None
        self.owner = owner
        self._config = config
        self._version = version
        self._labels = labels
        self._deadlocks = deadlocks
        self._busy_poll = busy_poll

    def keep_order(self) -> None:
        """Keep replies in order from now on; the caller adds each request concerned to `order`."""
        self.order = OrderedOutcomes()

    def fail(self, entry: PendingRequest, outcome: Outcome, reason: FailureReason) -> None:
        """Answer a request with an error, or end it after one was sent."""
        self.metrics.failed(reason, now_ns() - entry.arrival_ns)
        self.answer(entry, outcome)

    def response(self, request: InferRequest, outputs: Outputs, record: ExecutionRecord) -> InferResponse:
        """Return the outputs of the model as a response.

        Raises:
            ServingError: The outputs do not fit the request or the configuration.
        """
        config, tensors = self._config, outputs.tensors
        if request.outputs:
            try:
                tensors = selected(request, tensors, config, self._labels)
            except ServingError:
                raise
            except Exception as error:  # the outputs contradict the configuration: only this request fails
                _log.exception("the outputs of model '%s' are broken", config.name)
                raise internal(f"the outputs of model '{config.name}' are broken: {type(error).__name__}") from error
        return InferResponse(config.name, self._version, request.id, tensors, outputs.parameters, record)

    def ran_alone(
        self,
        request: InferRequest,
        execution: Execution | ServingError,
        record: ExecutionRecord,
        reason: CloseReason,
        arrival_ns: int,
    ) -> InferResponse | ServingError:
        """Count a request that ran immediately, and so was never in flight, and return its outcome."""
        start_ns = arrival_ns + record.queue_ns
        input_end_ns, output_start_ns = start_ns, start_ns + record.compute_ns
        outcome: InferResponse | ServingError
        if isinstance(execution, ServingError):
            outcome = execution
        else:
            input_end_ns, output_start_ns = execution.input_end_ns, execution.output_start_ns
            result = execution.results[0]
            try:
                outcome = result if isinstance(result, ServingError) else self.response(request, result, record)
            except ServingError as error:
                outcome = error
        has_failed = isinstance(outcome, ServingError)
        if isinstance(outcome, ServingError):
            self.metrics.failed(FailureReason.BACKEND, now_ns() - arrival_ns)
        elif self.metrics.tokens is not None:
            self.metrics.tokens.answered(outcome)
        self.metrics.batch_done(
            arrivals_ns=() if has_failed else (arrival_ns,),
            inferences=0 if has_failed else record.batch_size,
            batch_size=record.batch_size,
            reason=reason,
            marks_ns=(start_ns, input_end_ns, output_start_ns, start_ns + record.compute_ns),
            wall_ms=int(time.time() * 1000),
        )
        return outcome

    def ran_together(
        self,
        requests: Sequence[InferRequest],
        runs: Sequence[tuple[Execution | ServingError, int, int]],
        instance: str,
        batch_sizes: Sequence[int],
        arrivals_ns: Sequence[int],
    ) -> list[InferResponse | ServingError]:
        """Count requests that arrived together and ran one after the other, and return their outcomes.

        Args:
            requests: The requests, of which the last may not have run.
            runs: What came of each, when it began and when it ended.
            instance: Name of the instance that ran them.
            batch_sizes: Batch elements of each.
            arrivals_ns: When each arrived.
        """
        name, version, reason = self._config.name, self._version, CloseReason.FULL
        has_tokens = self.metrics.tokens is not None
        outcomes: list[InferResponse | ServingError] = []
        notes: list[BatchNote] = []
        for number, (execution, start_ns, end_ns) in enumerate(runs):
            request, batch_size, arrival_ns = requests[number], batch_sizes[number], arrivals_ns[number]
            record = ExecutionRecord(instance, batch_size, start_ns - arrival_ns, end_ns - start_ns)
            result = execution if isinstance(execution, ServingError) else execution.results[0]
            is_plain = not request.outputs and not has_tokens
            if isinstance(execution, ServingError) or isinstance(result, ServingError) or not is_plain:
                outcomes.append(self.ran_alone(request, execution, record, reason, arrival_ns))
                continue
            marks_ns = (start_ns, execution.input_end_ns, execution.output_start_ns, end_ns)
            notes.append(((arrival_ns,), batch_size, batch_size, reason, marks_ns))
            outcomes.append(InferResponse(name, version, request.id, result.tensors, result.parameters, record))
        self.metrics.batches_done(notes, int(time.time() * 1000))
        return outcomes

    def stream(self, entry: PendingRequest, outcome: Outcome) -> None:
        """Send a response that is not final."""
        order = self.order
        if order is None or not order.holds(entry.id):
            self._deliver(entry, outcome, False)
        elif not order.is_full(entry.id):
            order.pass_on(entry.id, outcome, False, self._deliver)
        else:
            error = unavailable(
                f"the request has {HELD_RESPONSES_MAX} responses that wait for an earlier request's",
                hint="turn off preserve_ordering of the model",
            )
            batch = entry.batch
            self.fail(entry, error, FailureReason.OTHER)
            if batch is not None:
                batch.executor.cancel(batch, entry.index)

    def answer(self, entry: PendingRequest, outcome: Outcome) -> None:
        """Give a request its final reply."""
        entry.state = DONE
        entry.batch = None
        if entry.wait is not None:
            self._deadlocks.end(entry.wait)
        if self.order is not None and self.order.holds(entry.id):
            self.order.pass_on(entry.id, outcome, True, self._deliver)
        else:
            self._deliver(entry, outcome, True)

    def left_open(self, entry: PendingRequest) -> None:
        """The batch of a request is over, and the request is not."""
        if entry.wait is not None:
            self._deadlocks.leave(entry.wait)

    def deliver(self, request: InferRequest, reply: Reply, outcome: Outcome, final: bool) -> None:
        try:
            reply(outcome, final)
        except Exception:  # a fault of a front end must not affect the rest of the batch
            _log.exception("the reply to request %r of model %s failed", request.id, self._config.name)

    def _deliver(self, entry: PendingRequest, outcome: Outcome, final: bool) -> None:
        if final:
            is_known = self.requests.pop(entry.id, None) is not None
            if is_known and self._busy_poll is not None and entry.request.caller is None:
                self._busy_poll.answered()
        self.deliver(entry.request, entry.reply, outcome, final)
        if self.idle is not None and not self.requests:
            self.idle.set()


@mypyc_attr(allow_interpreted_subclasses=True)
class RunningBatch:
    """A batch in an executor, and the sink of its responses.

    Attributes:
        entries: Its requests in flight.
        requests: The requests themselves.
        reason: Why it was sent.
        batch_size: Batch elements of all requests.
    """

    __slots__ = (
        "_frame",
        "_in_flight",
        "_marks_ns",
        "_owner",
        "_start_ns",
        "_succeeded",
        "batch_size",
        "entries",
        "executor",
        "reason",
        "requests",
        "slot",
    )

    def __init__(
        self, in_flight: InFlight, entries: list[PendingRequest], slot: int, reason: CloseReason, executor: Executor
    ) -> None:
        self._in_flight = in_flight
        self._owner = in_flight.owner
        self.executor = executor
        self.entries = entries
        self.requests: Sequence[InferRequest] = list(map(_request_of, entries))
        self.slot = slot
        self.reason = reason
        self.batch_size = sum(map(_batch_size_of, entries))
        self._start_ns = now_ns()
        self._marks_ns: tuple[int, int] | None = None  # start and end of computation, once that is done
        self._succeeded: list[PendingRequest] = []
        self._frame: CallFrame | None = None

    def executed(self, execution: Execution | ServingError, start_ns: int, end_ns: int) -> None:
        """A blocking instance ran the batch from `start_ns` to `end_ns`.

        The instance is free before any reply is sent: work that a reply triggers, such as the next step of an ensemble,
        must not delay its next batch.
        """
        self._start_ns = start_ns
        results: Sequence[Result] = ()
        error, input_end_ns, output_start_ns = None, start_ns, end_ns
        if isinstance(execution, ServingError):
            error = execution
        else:
            results = execution.results
            input_end_ns, output_start_ns = execution.input_end_ns, execution.output_start_ns
        self._owner.batch_ended(self.slot, output_start_ns - input_end_ns, self._frame)
        for index, result in enumerate(results):
            self._take(index, result, end_ns)
        self._end(input_end_ns, output_start_ns, end_ns, error, False)

    def respond(self, index: int, result: Result | None, final: bool) -> None:
        """An asynchronous instance responds to a request: the first response is final."""
        if result is not None:
            self._take(index, result, now_ns())
        elif final:
            self._take(index, _no_response(), now_ns())

    def finish(
        self, input_end_ns: int, output_start_ns: int, error: ServingError | None = None, *, leaves_open: bool = False
    ) -> None:
        """An asynchronous instance is idle again."""
        self._end(input_end_ns, output_start_ns, now_ns(), error, leaves_open)
        self._owner.batch_ended(self.slot, output_start_ns - input_end_ns, self._frame)

    def is_cancelled(self, index: int) -> bool:
        """Whether a request is over, so that no caller waits for it."""
        return self.entries[index].state == DONE

    def frame(self) -> CallFrame:
        """Return the call frame of requests that the model makes while it runs this batch."""
        if self._frame is None:
            parent = next((request.caller for request in self.requests if request.caller is not None), None)
            self._frame = self._owner.frame_of(self.slot, parent, occupies=self._marks_ns is None)
        return self._frame

    def cancelled(self, index: int) -> None:
        """The caller of a request has gone."""

    def _take(self, index: int, result: Result, end_ns: int) -> None:
        entry = self.entries[index]
        if entry.state == DONE:
            return
        in_flight = self._in_flight
        if isinstance(result, ServingError):
            in_flight.fail(entry, result, FailureReason.BACKEND)
            return
        try:
            response = in_flight.response(entry.request, result, self._record(entry, end_ns))
        except ServingError as error:
            in_flight.fail(entry, error, FailureReason.BACKEND)
            return
        if in_flight.metrics.tokens is not None:
            in_flight.metrics.tokens.answered(response)
        in_flight.answer(entry, response)
        self._succeed(entry, end_ns)

    def _succeed(self, entry: PendingRequest, end_ns: int) -> None:
        """Count a successful request, now or with the others when the batch ends."""
        if self._marks_ns is None:
            self._succeeded.append(entry)
        else:
            self._in_flight.metrics.request_done(
                entry.arrival_ns, entry.batch_size, self._start_ns, self._marks_ns, end_ns
            )

    def _record(self, entry: PendingRequest, end_ns: int) -> ExecutionRecord:
        start = self._start_ns
        return ExecutionRecord(self.executor.placement.name, self.batch_size, start - entry.arrival_ns, end_ns - start)

    def _end(
        self, input_end_ns: int, output_start_ns: int, end_ns: int, error: ServingError | None, leaves_open: bool
    ) -> None:
        in_flight = self._in_flight
        for entry in self.entries:
            if entry.state != RUNNING:
                continue
            if leaves_open:
                in_flight.left_open(entry)
            else:
                in_flight.fail(entry, error or _no_response(), FailureReason.BACKEND)
        self._marks_ns = (input_end_ns, output_start_ns)
        succeeded, self._succeeded = self._succeeded, []
        in_flight.metrics.batch_done(
            arrivals_ns=list(map(_arrival_ns_of, succeeded)),
            inferences=sum(map(_batch_size_of, succeeded)),
            batch_size=self.batch_size,
            reason=self.reason,
            marks_ns=(self._start_ns, input_end_ns, output_start_ns, end_ns),
            wall_ms=int(time.time() * 1000),
        )


@mypyc_attr(allow_interpreted_subclasses=True)
class StreamingBatch(RunningBatch):
    """A batch of a decoupled model: any number of responses for each request."""

    __slots__ = ("_failed", "_sent", "_since_ns", "_tokens")

    def __init__(
        self, in_flight: InFlight, entries: list[PendingRequest], slot: int, reason: CloseReason, executor: Executor
    ) -> None:
        super().__init__(in_flight, entries, slot, reason, executor)
        self._sent = [0] * len(entries)
        self._since_ns = [self._start_ns] * len(entries)
        self._failed: set[int] = set()
        tokens = in_flight.metrics.tokens
        self._tokens = [TokenStream(tokens, each.arrival_ns) for each in entries] if tokens is not None else None

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
                outcome = self._in_flight.response(entry.request, result, self._record(entry, end_ns))
            except ServingError as error:
                outcome = error
        elif not final:
            return
        self._count(index, outcome, end_ns)
        if self._tokens is not None:
            if isinstance(outcome, InferResponse):
                self._tokens[index].take(outcome, end_ns)
            if final:
                self._tokens[index].end()
        if not final:
            self._in_flight.stream(entry, outcome)
        elif index in self._failed:
            self._in_flight.fail(entry, outcome, FailureReason.BACKEND)
        else:
            self._in_flight.answer(entry, outcome)
            self._succeed(entry, end_ns)

    def cancelled(self, index: int) -> None:
        self._in_flight.metrics.response(self._sent[index], ResponseKind.CANCEL, 0)
        if self._tokens is not None:
            self._tokens[index].end()

    def _take(self, index: int, result: Result, end_ns: int) -> None:
        """A blocking instance responds to a request: with exactly one response."""
        self.respond(index, result, True)

    def _count(self, index: int, outcome: InferResponse | ServingError | None, end_ns: int) -> None:
        since, self._since_ns[index] = self._since_ns[index], end_ns
        kind = ResponseKind.EMPTY_RESPONSE
        if outcome is not None:
            kind = ResponseKind.SUCCESS
            if isinstance(outcome, ServingError):
                kind = ResponseKind.FAIL
                self._failed.add(index)
        metrics = self._in_flight.metrics
        if not self._sent[index]:
            metrics.first_response(end_ns - self.entries[index].arrival_ns)
        metrics.response(self._sent[index], kind, end_ns - since)
        self._sent[index] += 1


def _no_response() -> ServingError:
    return internal("the model sent no response for the request")
