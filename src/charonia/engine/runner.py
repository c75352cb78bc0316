"""Runs one loaded model version: requests in, scheduler, lanes, outcomes out.

The only shell around a scheduler. Invariants:

1. Every request that was submitted gets exactly one final reply: from `_answer`, the only place that calls a reply.
2. A request that is cancelled is answered at once and its batch goes on; what the batch later says of it is ignored.
3. A slot is idle, or runs one batch; it is offered to the scheduler again only when that batch has finished.
4. Only the event loop's thread is here.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

from charonia.backends.api import Execution, Outputs, Result
from charonia.config.model import ModelConfig
from charonia.core.calls import Outcome, Reply
from charonia.core.classification import classify
from charonia.core.errors import Code, ServingError, internal, unavailable
from charonia.core.request import InferRequest
from charonia.core.response import ExecutionRecord, InferResponse
from charonia.core.tensor import Tensor
from charonia.engine.admission import Admission, with_request_id
from charonia.engine.clock import WakeTimer, now_ns
from charonia.engine.lanes import PIPELINE_DEPTH, AsyncLane, BlockingLane
from charonia.sched.api import (
    Cancel,
    CloseReason,
    Command,
    DropReason,
    Event,
    Run,
    Scheduler,
    SlotGone,
    SlotIdle,
    Stop,
    Submit,
    Tick,
)
from charonia.sched.order import InOrderRelease
from charonia.stats.meter import FailureReason, Meter

_log = logging.getLogger(__name__)

_QUEUED, _RUNNING, _DONE = range(3)


class Entry:
    """A request in flight; also the ticket that the front end holds."""

    __slots__ = ("arrival_ns", "batch", "batch_size", "id", "index", "reply", "request", "runner", "state")

    def __init__(self, runner: "ModelRunner", request: InferRequest, reply: Reply, arrival_ns: int) -> None:
        self.runner = runner
        self.request = request
        self.reply = reply
        self.arrival_ns = arrival_ns
        self.state = _QUEUED
        self.id = -1
        self.batch_size = 1
        self.batch: RunningBatch | None = None
        self.index = 0

    def cancel(self) -> None:
        """The caller has gone."""
        if self.state != _DONE:
            self.runner.cancel(self)


class RunningBatch:
    """A batch on a lane, and the sink through which the lane reports."""

    __slots__ = ("_runner", "_start_ns", "_succeeded", "batch_size", "entries", "reason", "requests", "slot")

    def __init__(self, runner: "ModelRunner", entries: list[Entry], slot: int, reason: CloseReason) -> None:
        self._runner = runner
        self.entries = entries
        self.requests: Sequence[InferRequest] = [entry.request for entry in entries]
        self.slot = slot
        self.reason = reason
        self.batch_size = sum([entry.batch_size for entry in entries])
        self._start_ns = now_ns()
        self._succeeded: list[Entry] = []

    def executed(self, execution: Execution | ServingError, start_ns: int, end_ns: int) -> None:
        """A blocking instance ran the batch from `start_ns` to `end_ns`."""
        self._start_ns = start_ns
        if isinstance(execution, ServingError):
            self._end(start_ns, end_ns, end_ns, execution)
            return
        for index, result in enumerate(execution.results):
            self._take(index, result, end_ns)
        self._end(execution.input_end_ns, execution.output_start_ns, end_ns, None)

    def respond(self, index: int, result: Result | None, final: bool) -> None:
        """An asynchronous instance answers one request."""
        if not final or result is None:
            error = internal("the model sent a partial response although its transaction policy is not decoupled")
            self._take(index, error, now_ns())
        else:
            self._take(index, result, now_ns())

    def finish(self, input_end_ns: int, output_start_ns: int, error: ServingError | None = None) -> None:
        """An asynchronous instance is idle again."""
        self._end(input_end_ns, output_start_ns, now_ns(), error)

    def is_cancelled(self, index: int) -> bool:
        """Whether the caller of a request has gone."""
        return self.entries[index].state == _DONE

    def _take(self, index: int, result: Result, end_ns: int) -> None:
        entry = self.entries[index]
        if entry.state == _DONE:
            return
        if isinstance(result, ServingError):
            self._runner.fail(entry, result, FailureReason.BACKEND)
            return
        start = self._start_ns
        record = ExecutionRecord(
            self._runner.slot_name(self.slot), self.batch_size, start - entry.arrival_ns, end_ns - start
        )
        if self._runner.succeed(entry, result, record):
            self._succeeded.append(entry)

    def _end(self, input_end_ns: int, output_start_ns: int, end_ns: int, error: ServingError | None) -> None:
        for entry in self.entries:
            if entry.state != _DONE:
                self._runner.fail(
                    entry, error or internal("the model sent no response for the request"), FailureReason.BACKEND
                )
        succeeded = self._succeeded
        self._runner.meter.batch_done(
            arrivals_ns=[entry.arrival_ns for entry in succeeded],
            inferences=sum([entry.batch_size for entry in succeeded]),
            batch_size=self.batch_size,
            reason=self.reason,
            marks_ns=(self._start_ns, input_end_ns, output_start_ns, end_ns),
            wall_ms=int(time.time() * 1000),
        )
        self._runner.slot_done(self.slot, output_start_ns - input_end_ns)


class ModelRunner:
    """One loaded model version."""

    def __init__(
        self,
        config: ModelConfig,
        version: str,
        *,
        scheduler: Scheduler,
        lanes: Sequence[BlockingLane | AsyncLane],
        labels: dict[str, tuple[str, ...]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.config = config
        self.version = version
        self.meter = Meter(config.name, version)
        self._admission = Admission(config)
        self._scheduler = scheduler
        self._lanes = lanes
        self._labels = labels
        self._loop = loop
        self._entries: dict[int, Entry] = {}
        self._next_id = 0
        self._idle: asyncio.Event | None = None
        self._timer = WakeTimer(loop, self._tick)
        self._armed: int | None = None
        dynamic = config.dynamic_batching
        self._order = InOrderRelease() if dynamic is not None and dynamic.preserve_ordering else None
        self._held: dict[int, tuple[Entry, Outcome]] = {}
        # A slot whose model batches is offered again only after the loop has read what arrived meanwhile: requests that
        # come together then run together, without waiting for anything.
        self._gathers = dynamic is not None and config.max_batch_size > 1
        self._running: set[int] = set()  # slots
        # Lane i has the slots i, i + n, i + 2n and so on. Those beyond the first are offered while the lane takes
        # several batches at once.
        self._parked = set(range(len(lanes), len(lanes) * PIPELINE_DEPTH))
        now = now_ns()
        for slot in range(len(lanes)):
            scheduler.handle(SlotIdle(slot), now)

    @property
    def pending(self) -> int:
        """Number of requests that wait for an instance."""
        return self._scheduler.queued

    @property
    def in_flight(self) -> int:
        """Number of requests that wait or run."""
        return len(self._entries)

    def slot_name(self, slot: int) -> str:
        """Return the name of an instance."""
        return self._lane(slot).placement.name

    def submit(self, request: InferRequest, reply: Reply) -> Entry:
        """Take in a request; every outcome goes to `reply`."""
        now = now_ns()
        entry = Entry(self, request, reply, now)
        try:
            batch_size, shape_key = self._admission.check(request)
        except ServingError as error:
            self.fail(entry, error, FailureReason.OTHER)
            return entry
        self._next_id = entry.id = request_id = self._next_id + 1
        entry.batch_size = batch_size
        self._entries[request_id] = entry
        if self._order is not None:
            self._order.submitted(request_id)
        self._handle(Submit(request_id, batch_size, shape_key, request.priority, request.timeout_us), now)
        return entry

    def cancel(self, entry: Entry) -> None:
        """The caller of an unanswered request has gone."""
        batch = entry.batch
        if entry.state == _QUEUED:
            # Before the reply, which may submit anew: the scheduler must not start a request that was answered.
            self._handle(Cancel(entry.id), now_ns())
        elif batch is not None:
            self._lane(batch.slot).cancel(entry.index)
        if entry.state != _DONE:
            self.fail(entry, ServingError(Code.CANCELLED, "the request was cancelled"), FailureReason.CANCELED)

    def fail(self, entry: Entry, error: ServingError, reason: FailureReason) -> None:
        """Answer a request with an error."""
        self.meter.failed(reason, now_ns() - entry.arrival_ns)
        self._answer(entry, error)

    def succeed(self, entry: Entry, outputs: Outputs, record: ExecutionRecord) -> bool:
        """Answer a request with what the model computed; false when that cannot be made into a response."""
        request = entry.request
        tensors = outputs.tensors
        if request.outputs:
            try:
                tensors = self._select(request, tensors)
            except ServingError as error:
                self.fail(entry, error, FailureReason.BACKEND)
                return False
        response = InferResponse(self.config.name, self.version, request.id, tensors, outputs.parameters, record)
        self._answer(entry, response)
        return True

    def slot_done(self, slot: int, compute_ns: int) -> None:
        """A lane has finished a batch, which computed for `compute_ns`."""
        self._running.discard(slot)
        lane = self._lane(slot)
        lane.took(compute_ns)
        if slot < len(self._lanes) * lane.depth:
            self._offer_soon(slot)
        else:
            self._parked.add(slot)
            self._note_idle()
        self._follow_depth(slot % len(self._lanes), lane.depth)

    def _follow_depth(self, lane: int, depth: int) -> None:
        """Offer, or take back, the slots with which a lane is kept supplied ahead of time."""
        for slot in range(lane + len(self._lanes), len(self._lanes) * PIPELINE_DEPTH, len(self._lanes)):
            is_wanted = slot < len(self._lanes) * depth
            if is_wanted and slot in self._parked:
                self._parked.discard(slot)
                self._offer_soon(slot)
            elif not is_wanted and slot not in self._parked and slot not in self._running:
                self._parked.add(slot)
                self._handle(SlotGone(slot), now_ns())

    def _offer_soon(self, slot: int) -> None:
        if self._gathers or self._scheduler.queued:
            # Also keeps a long queue on an in-place lane from shutting everybody else out of the loop.
            self._loop.call_soon(self._offer, slot)
        else:
            self._offer(slot)

    def _lane(self, slot: int) -> BlockingLane | AsyncLane:
        return self._lanes[slot % len(self._lanes)]

    async def drain(self) -> None:
        """Stop taking requests; return when every request in flight has been answered and every lane is idle."""
        self._handle(Stop(), now_ns())
        while self._entries or self._running:
            self._idle = asyncio.Event()
            await self._idle.wait()

    async def aclose(self) -> None:
        """Close every lane; to be called when drained."""
        self._timer.close()
        for lane in self._lanes:
            await lane.aclose()

    def abandon(self, error: ServingError) -> None:
        """Answer everything in flight with `error`: the shutdown's time is up."""
        for entry in list(self._entries.values()):
            self.fail(entry, error, FailureReason.OTHER)

    def _offer(self, slot: int) -> None:
        if slot not in self._parked:
            self._handle(SlotIdle(slot), now_ns())
        self._note_idle()

    def _note_idle(self) -> None:
        if self._idle is not None and not self._running and not self._entries:
            self._idle.set()

    def _tick(self) -> None:
        # The timer may fire a hair early; tell the scheduler the time it asked for, or this would spin.
        now = max(now_ns(), self._armed or 0)
        self._armed = None
        self._handle(Tick(), now)

    def _handle(self, event: Event, now: int) -> None:
        commands = self._scheduler.handle(event, now)
        if commands:
            self._carry_out(commands)
        wake = self._scheduler.wake_at()
        if wake != self._armed:
            self._armed = wake
            self._timer.set(wake)

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Run):
                self._start(command)
            else:
                self.fail(self._entries[command.id], self._drop_error(command.reason), FailureReason.REJECTED)

    def _start(self, run: Run) -> None:
        entries = [self._entries[request_id] for request_id in run.ids]
        batch = RunningBatch(self, entries, run.slot, run.reason)
        for index, entry in enumerate(entries):
            entry.state = _RUNNING
            entry.batch = batch
            entry.index = index
        self._running.add(run.slot)
        self._lane(run.slot).run(batch)

    def _answer(self, entry: Entry, outcome: Outcome) -> None:
        entry.state = _DONE
        entry.batch = None
        if self._order is not None and entry.id >= 0:
            self._held[entry.id] = (entry, outcome)
            for request_id in self._order.done(entry.id):
                held, held_outcome = self._held.pop(request_id)
                self._deliver(held, held_outcome)
        else:
            self._deliver(entry, outcome)

    def _deliver(self, entry: Entry, outcome: Outcome) -> None:
        self._entries.pop(entry.id, None)
        try:
            entry.reply(outcome, True)
        except Exception:  # a front end's own fault must not reach the rest of the batch
            _log.exception("the reply to request %r of model %s failed", entry.request.id, self.config.name)
        self._note_idle()

    def _select(self, request: InferRequest, tensors: list[Tensor]) -> list[Tensor]:
        chosen = []
        for wanted in request.outputs:
            for tensor in tensors:
                if tensor.name == wanted.name:
                    break
            else:
                raise with_request_id(
                    internal(f"model '{self.config.name}' did not produce the requested output '{wanted.name}'"),
                    request,
                )
            if wanted.classification:
                labels = self._labels.get(wanted.name, ())
                tensor = classify(tensor, wanted.classification, labels, batched=self.config.max_batch_size > 0)
            chosen.append(tensor)
        return chosen

    def _drop_error(self, reason: DropReason) -> ServingError:
        match reason:
            case DropReason.QUEUE_FULL:
                return unavailable(
                    f"Exceeds maximum queue size of model '{self.config.name}'",
                    hint="retry later, or raise max_queue_size or the number of instances",
                )
            case DropReason.TIMEOUT:
                return unavailable("Request timeout expired", hint="the request waited longer than its queue timeout")
            case DropReason.STOPPING:
                return unavailable(
                    f"Server is stopping, scheduler for model '{self.config.name}' has stopped accepting new requests"
                )
