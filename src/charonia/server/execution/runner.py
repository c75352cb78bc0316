"""Runs one loaded model version: requests in, scheduler, lanes, outcomes out.

The only shell around a scheduler. Invariants:

1. Every request that was submitted gets exactly one final reply, and nothing after it: from `answer`. Only `_deliver`
   calls a reply.
2. A request that is cancelled is answered at once and its batch goes on; what the batch later says of it is ignored.
3. A slot is idle, or runs one batch; it is offered to the scheduler again only when that batch has finished.
4. A batch may finish and leave requests open. They are in flight until their final reply: draining waits for them.
5. Only the event loop's thread is here.
"""

import asyncio
import logging
from collections.abc import Sequence

from charonia.config.model import ModelConfig
from charonia.core.caller import CallFrame
from charonia.core.calls import Outcome, Reply
from charonia.core.classification import classify
from charonia.core.errors import Code, ServingError, internal, unavailable
from charonia.core.request import InferRequest
from charonia.core.response import ExecutionRecord, InferResponse
from charonia.core.tensor import Tensor
from charonia.core.trace import Trace
from charonia.server.backends.api import Outputs
from charonia.server.execution.admission import Admission, RequestCheck, with_request_id
from charonia.server.execution.batches import DONE, QUEUED, RUNNING, Entry, RunningBatch, StreamingBatch
from charonia.server.execution.busy_poll import BusyPoll
from charonia.server.execution.calls import CallGraph, Pool
from charonia.server.execution.clock import WakeTimer, now_ns
from charonia.server.execution.lanes import PIPELINE_DEPTH, PIPELINE_DEPTH_BATCHED, AsyncLane, BlockingLane
from charonia.server.execution.meters import make_meter
from charonia.server.execution.ordering import HELD_RESPONSES_MAX, OrderedOutcomes
from charonia.server.execution.tracing import begin, traced_kind
from charonia.server.metrics.model_metrics import FailureReason
from charonia.server.rate_limiter.limiter import Claim
from charonia.server.scheduling.api import (
    Cancel,
    Command,
    Drop,
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
from charonia.server.sequences.api import PADDING

_log = logging.getLogger(__name__)


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
        calls: CallGraph | None = None,
        busy_poll: BusyPoll | None = None,
        claim: Claim | None = None,
    ) -> None:
        self.config = config
        self.version = version
        self.meter = make_meter(config, version)
        self._admission: RequestCheck = Admission(config)
        self._scheduler = scheduler
        self._lanes = lanes
        self._labels = labels
        self._loop = loop
        self._busy_poll = busy_poll
        self._entries: dict[int, Entry] = {}
        self._next_id = 0
        self._idle: asyncio.Event | None = None
        self._abandoned_for: ServingError | None = None
        self._timer = WakeTimer(loop, self._tick)
        self._armed: int | None = None
        dynamic = config.dynamic_batching
        keeps_order = dynamic is not None and dynamic.preserve_ordering
        self._order: OrderedOutcomes[Entry] | None = OrderedOutcomes() if keeps_order else None
        self._batch_type: type[RunningBatch] = StreamingBatch if config.is_decoupled else RunningBatch
        self._batch_types = (self._batch_type, traced_kind(self._batch_type))
        self._traced_count = 0
        self._calls = calls if calls is not None else CallGraph()
        self._pool = Pool(config.name, len(lanes), claim)
        # A slot whose model batches is offered again only after the loop has read what arrived meanwhile: requests that
        # come together then run together, without waiting for anything.
        self._gathers = dynamic is not None and config.max_batch_size > 1
        for lane in lanes:  # what waits here for its batch to grow would be alone in a lane's line
            lane.limit_depth(PIPELINE_DEPTH_BATCHED if self._gathers else max(2, PIPELINE_DEPTH // len(lanes)))
        self._running: set[int] = set()  # slots
        self._cancels = 0  # of requests that were in a batch
        self._depths = [1] * len(lanes)
        # Lane i has the slots i, i + n, i + 2n and so on. Those beyond the first are offered while the lane takes
        # several batches at once.
        self._lane_of_slot = list(lanes) * PIPELINE_DEPTH
        self._parked = set(range(len(lanes), len(lanes) * PIPELINE_DEPTH))
        if claim is not None:
            claim.wake(loop, lambda: self._handle(Tick(), now_ns()))
            for lane in lanes:  # what waits in an instance's own line would hold its resources, too
                lane.limit_depth(1)
        now = now_ns()
        for slot in range(len(lanes)):
            scheduler.handle(SlotIdle(slot, slot), now)

    @property
    def pending(self) -> int:
        """Number of requests that wait for an instance."""
        return self._scheduler.queued

    @property
    def in_flight(self) -> int:
        """Number of requests that wait or run."""
        return len(self._entries)

    def entry(self, id: int) -> Entry:
        """Return the request in flight with an id of the scheduler."""
        return self._entries[id]

    def slot_name(self, slot: int) -> str:
        """Return the name of an instance."""
        return self._lane_of_slot[slot].placement.name

    def submit(self, request: InferRequest, reply: Reply) -> Entry:
        """Take in a request; every outcome goes to `reply`."""
        if request.trace is not None:
            reply = self._traced(request, request.trace, reply)
        now = now_ns()
        entry = Entry(self, request, reply, now)
        try:
            batch_size, shape_key = self._admission.check(request)
        except ServingError as error:
            self.fail(entry, error, FailureReason.OTHER)
            return entry
        self._next_id = request_id = self._next_id + 1
        if request.caller is not None:
            try:
                entry.call = self._calls.submit(request.caller, self._pool)
            except ServingError as error:
                self.fail(entry, with_request_id(error, request), FailureReason.OTHER)
                return entry
        elif self._order is not None:
            # A request that one before it waits for must not wait for that one.
            self._order.submitted(request_id, entry)
        if self._busy_poll is not None and request.caller is None:
            self._busy_poll.submitted(now)
        entry.id = request_id
        entry.batch_size = batch_size
        self._entries[request_id] = entry
        self._handle(Submit(request_id, batch_size, shape_key, request.priority, request.timeout_us), now)
        return entry

    def cancel(self, entry: Entry) -> None:
        """The caller of an unanswered request has gone."""
        batch = entry.batch
        if entry.state == QUEUED:
            # Before the reply, which may submit anew: the scheduler must not start a request that was answered.
            self._handle(Cancel(entry.id), now_ns())
        if entry.state != DONE:
            self.fail(entry, ServingError(Code.CANCELLED, "the request was cancelled"), FailureReason.CANCELED)
        if batch is not None:
            self._cancels += 1
            batch.cancelled(entry.index)
            self._lane_of_slot[batch.slot].cancel(batch, entry.index)

    def fail(self, entry: Entry, outcome: Outcome, reason: FailureReason) -> None:
        """Answer a request with an error, or end it after one."""
        self.meter.failed(reason, now_ns() - entry.arrival_ns)
        self.answer(entry, outcome)

    def response(self, entry: Entry, outputs: Outputs, record: ExecutionRecord) -> InferResponse:
        """Return what the model computed as a response.

        Raises:
            ServingError: It cannot be made into one.
        """
        request = entry.request
        tensors = _selected(request, outputs.tensors, self.config, self._labels) if request.outputs else outputs.tensors
        return InferResponse(self.config.name, self.version, request.id, tensors, outputs.parameters, record)

    def stream(self, entry: Entry, outcome: Outcome) -> None:
        """Pass on a response of a request that is not its last."""
        if self._order is None or entry.call is not None:
            self._deliver(entry, outcome, False)
        elif self._order.is_full(entry.id):
            error = unavailable(
                f"the request has {HELD_RESPONSES_MAX} responses that wait for those of an earlier request",
                hint="turn off preserve_ordering of the model",
            )
            batch = entry.batch
            self.fail(entry, error, FailureReason.OTHER)
            if batch is not None:
                self._lane_of_slot[batch.slot].cancel(batch, entry.index)
        else:
            self._deliver_in_order(entry, outcome, False)

    def answer(self, entry: Entry, outcome: Outcome) -> None:
        """Give a request its final reply."""
        entry.state = DONE
        entry.batch = None
        if entry.call is not None:
            self._calls.end(entry.call)
            self._deliver(entry, outcome, True)
        elif self._order is not None and entry.id >= 0:
            self._deliver_in_order(entry, outcome, True)
        else:
            self._deliver(entry, outcome, True)

    def left_open(self, entry: Entry) -> None:
        """A request is not over although its batch is."""
        if entry.call is not None:
            self._calls.leave(entry.call)

    def frame_of(self, slot: int, parent: CallFrame | None, *, occupies: bool) -> CallFrame:
        """Return who makes the requests of a batch. From the first time on no instance has batches waiting in line.

        Args:
            slot: Where the batch runs.
            parent: Who made the request that the batch works on.
            occupies: Whether it still runs.
        """
        lane = slot % len(self._lanes)
        frame = CallFrame(self.config.name, self.version, self.slot_name(slot) if occupies else "", parent)
        if occupies:
            self._calls.occupy(frame, self._pool, lane)
            for index, each in enumerate(self._lanes):
                each.limit_depth(1)
                self._follow_depth(index, each.depth)
        return frame

    def vacate(self, frame: CallFrame) -> None:
        """A batch that made requests is over."""
        if frame.instance:
            self._calls.vacate(frame)

    def slot_done(self, slot: int, compute_ns: int) -> None:
        """A lane has finished a batch, which computed for `compute_ns`."""
        self._running.discard(slot)
        lane = self._lane_of_slot[slot]
        lane.took(compute_ns)
        depth = lane.depth
        if slot < len(self._lanes) * depth:
            self._offer_soon(slot)
        else:
            self._parked.add(slot)
            self._note_idle()
        index = slot % len(self._lanes)
        if depth != self._depths[index]:
            self._depths[index] = depth
            self._follow_depth(index, depth)

    def _traced(self, request: InferRequest, trace: Trace, reply: Reply) -> Reply:
        """Note what happens to a request from now on; batches do so until the last such request is over."""
        self._traced_count += 1
        self._batch_type = self._batch_types[1]
        return begin(trace, request, reply, (self.config.name, self.version), self._trace_ended)

    def _trace_ended(self) -> None:
        self._traced_count -= 1
        if not self._traced_count:
            self._batch_type = self._batch_types[0]

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
        self._abandoned_for = error
        for entry in list(self._entries.values()):
            if entry.state == QUEUED:  # or it would be started when a slot is idle again
                self._handle(Cancel(entry.id), now_ns())
            if entry.state != DONE:  # one that only waits for its turn in the order of arrival is
                self.fail(entry, error, FailureReason.OTHER)

    def _offer(self, slot: int) -> None:
        if slot not in self._parked:
            self._handle(SlotIdle(slot, slot % len(self._lanes)), now_ns())
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
        if len(commands) == 1 and isinstance(run := commands[0], Run):  # as nearly always
            batch = self._begin(run)
            self._lane_of_slot[batch.slot].run(batch)
            return
        # All batches are made before anybody is answered: who gets a reply may cancel requests that are in one of them.
        batches = [self._begin(command) for command in commands if isinstance(command, Run)]
        cancels = self._cancels
        if len(batches) < len(commands):
            for command in commands:
                if isinstance(command, Drop):
                    self._drop(command)
        for batch in batches:
            lane = self._lane_of_slot[batch.slot]
            if cancels == self._cancels:
                lane.run(batch)
            else:
                _run_in_part(lane, batch)

    def _drop(self, drop: Drop) -> None:
        entry = self._entries.get(drop.id)
        if entry is not None and entry.state == QUEUED:  # else the reply to another one has led to its being cancelled
            error = self._abandoned_for or self._drop_error(drop.reason, entry.request)
            self.fail(entry, error, FailureReason.REJECTED)

    def _begin(self, run: Run) -> RunningBatch:
        """Return a batch that is to be run now."""
        entries = list(map(self._entries.__getitem__, run.ids))
        batch = self._batch_type(self, entries, run.slot, run.reason)
        for index, entry in enumerate(entries):
            entry.state = RUNNING
            entry.batch = batch
            entry.index = index
            if entry.call is not None:
                self._calls.run(entry.call, run.slot % len(self._lanes))
        self._running.add(run.slot)
        return batch

    def _deliver_in_order(self, entry: Entry, outcome: Outcome, final: bool) -> None:
        if self._order is not None:
            self._order.pass_on(entry.id, outcome, final, self._deliver)

    def _deliver(self, entry: Entry, outcome: Outcome, final: bool) -> None:
        if final:
            is_known = self._entries.pop(entry.id, None) is not None
            if is_known and self._busy_poll is not None and entry.request.caller is None:
                self._busy_poll.answered()
        try:
            entry.reply(outcome, final)
        except Exception:  # a front end's own fault must not reach the rest of the batch
            _log.exception("the reply to request %r of model %s failed", entry.request.id, self.config.name)
        if final:
            self._note_idle()

    def _drop_error(self, reason: DropReason, request: InferRequest) -> ServingError:
        match reason:
            case DropReason.QUEUE_FULL:
                return unavailable(
                    f"Exceeds maximum queue size of model '{self.config.name}'",
                    hint="retry later, or raise max_queue_size or the number of instances",
                )
            case DropReason.STRATEGY_FAILED:
                return internal(
                    f"the batching strategy of model '{self.config.name}' failed on the request",
                    hint="the server's log says how",
                )
            case DropReason.TIMEOUT:
                return unavailable("Request timeout expired", hint="the request waited longer than its queue timeout")
            case _:
                return unavailable(
                    f"Server is stopping, scheduler for model '{self.config.name}' has stopped accepting new requests"
                )


def _run_in_part(lane: BlockingLane | AsyncLane, batch: RunningBatch) -> None:
    """Run a batch of which some may have been cancelled before its instance knew of it, and tell the instance."""
    gone = [index for index, entry in enumerate(batch.entries) if entry.state == DONE and entry.id != PADDING]
    lane.run(batch)
    for index in gone:
        lane.cancel(batch, index)


def _selected(
    request: InferRequest, tensors: list[Tensor], config: ModelConfig, labels_of: dict[str, tuple[str, ...]]
) -> list[Tensor]:
    """Return the outputs that were asked for, in that order, as they were asked for."""
    chosen = []
    for wanted in request.outputs:
        for tensor in tensors:
            if tensor.name == wanted.name:
                break
        else:
            raise with_request_id(
                internal(f"model '{config.name}' did not produce the requested output '{wanted.name}'"),
                request,
            )
        if wanted.classification:
            labels = labels_of.get(wanted.name, ())
            tensor = classify(tensor, wanted.classification, labels, batched=config.max_batch_size > 0)
        chosen.append(tensor)
    return chosen
