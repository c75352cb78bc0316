"""Runs one loaded model version: a thin shell that passes events to a scheduler, and its commands to executors.

`slots` decides which slots the scheduler may use, the scheduler decides what runs where, and `in_flight` keeps the
requests and sends their replies. Invariants:

1. A slot is idle or runs one batch; it is offered to the scheduler again only when that batch has finished.
2. Draining waits for every request in flight, including requests that their batch left open.
3. A scheduler that raises is replaced: all requests in flight and all later ones fail.
4. All of this runs in the event loop's thread.
5. An instance is released only while it is idle, owes no response and no request waits.
"""

import asyncio
import logging
import sys
from collections.abc import Hashable, Mapping, Sequence
from typing import Final, cast

from charonia.busy_poll import BusyPoll
from charonia.clock import WakeTimer, now_ns
from charonia.config.model import ModelConfig
from charonia.config.parameters import bounds_of
from charonia.core.errors import Code, ServingError
from charonia.core.native import mypyc_attr
from charonia.core.request import CallFrame, InferRequest
from charonia.core.response import ANSWERED, ExecutionRecord, InferResponse, Reply, Ticket
from charonia.server.backends.api import Execution
from charonia.server.execution.admission import Admission, RequestCheck, with_request_id
from charonia.server.execution.deadlock import DeadlockDetector, InstancePool
from charonia.server.execution.executor import BlockingExecutor, Executor
from charonia.server.execution.in_flight import (
    COLLECTED,
    DONE,
    QUEUED,
    RUNNING,
    InFlight,
    PendingRequest,
    RunningBatch,
    StreamingBatch,
    drop_error,
    drop_failure,
)
from charonia.server.execution.tracing import BatchKind
from charonia.server.metrics.model_metrics import FailureReason
from charonia.server.rate_limiter.limiter import Claim
from charonia.server.scheduling.api import (
    EMPTY_ROW,
    Cancel,
    CloseReason,
    Command,
    Drop,
    DropReason,
    Event,
    Run,
    Scheduler,
    Stop,
    Submit,
    Tick,
)
from charonia.server.scheduling.dynamic import DynamicBatcher
from charonia.server.scheduling.schedulers import FailedScheduler
from charonia.server.scheduling.slots import SlotChange, Slots, capacity_limit

_log = logging.getLogger(__name__)

TOGETHER_NS_MAX = 500_000
"""Time for which batches run in place, one after the other, before the event loop continues."""

COLLECT_EVERY: Final = 256
"""Requests that run as soon as they are read until one waits for the end of the turn, with those read after it."""

LONE_TURNS: Final = 8
"""Turns with a single request, one after the other, after which requests run as soon as they are read again."""


@mypyc_attr(allow_interpreted_subclasses=True)
class ModelRunner:
    """One loaded model version.

    Args:
        config: The complete configuration.
        version: The version, as text.
        executors: The instances; where their number follows the load, the first ones.
        labels: Class labels by output.
        loop: The event loop.
        deadlocks: The deadlock detector.
        busy_poll: Keeps the event loop awake, None without busy polling.
        claim: The claim of the instances to resources.
    """

    def __init__(
        self,
        config: ModelConfig,
        version: str,
        *,
        scheduler: Scheduler,
        executors: Sequence[Executor],
        labels: dict[str, tuple[str, ...]],
        loop: asyncio.AbstractEventLoop,
        deadlocks: DeadlockDetector | None = None,
        busy_poll: BusyPoll | None = None,
        claim: Claim | None = None,
    ) -> None:
        self.config = config
        self.version = version
        self._admission: RequestCheck = Admission(config)
        self._scheduler = scheduler
        # Decides whether a request runs immediately; a wrapper of it has to see every event.
        self._plain = scheduler if isinstance(scheduler, DynamicBatcher) and not config.is_decoupled else None
        self._executors = dict(enumerate(executors))  # by number of the instance
        bounds = bounds_of(config)
        self._most = bounds.most if bounds is not None else len(executors)
        self._loop = loop
        self._busy_poll = busy_poll
        self._deadlocks = deadlocks if deadlocks is not None else DeadlockDetector()
        self._pool = InstancePool(config.name, len(executors), claim)
        self._in_flight = InFlight(config, version, labels, self, self._deadlocks, busy_poll)
        self.metrics = self._in_flight.metrics
        self._next_id = 0
        self._abandoned_for: ServingError | None = None
        self._timer = WakeTimer(loop, self._tick)
        self._armed: int | None = None
        self._batch_kind = BatchKind(StreamingBatch if config.is_decoupled else RunningBatch)
        self._cancels = 0  # number of cancelled requests that were in a batch
        # If the model batches, a slot is offered again only after the loop has read newly arrived requests, so that
        # requests that arrive together run together, without a delay; unless the waiting requests fill a batch.
        # A sequence continues when the states of its last request are stored, so there it is always later.
        dynamic, is_sequential = config.dynamic_batching, config.sequence_batching is not None
        self._gathers = is_sequential or (config.max_batch_size > 1 and dynamic is not None)
        self._enough = sys.maxsize if is_sequential else config.max_batch_size if self._gathers else 1
        if dynamic is not None and dynamic.preserve_ordering:
            self._in_flight.keep_order()
        limit = capacity_limit(self._most, batches=self._gathers)
        if claim is not None:
            limit = 1  # a batch in an instance's own queue would hold resources, too
            claim.wake(loop, lambda: self._handle(Tick(), now_ns()))
        elif config.sequence_batching is not None:
            limit = 1  # a sequence is bound to its instance, so another could not take its requests
        absent = self._most - len(executors)
        capacities = [executor.capacity_max for executor in executors]
        self._slots = Slots([min(limit, each) for each in capacities + capacities[-1:] * absent], absent)
        self._free: list[int] = []  # slots to offer in the next turn of the event loop
        self._is_turn_due = False
        # Requests that the loop reads in one turn, of any connection, run together at its end: what they need of the
        # processor's caches stays there. A lone caller would only wait longer.
        self._turn: list[PendingRequest] = []
        self._is_collecting = False
        self._lone_turns = 0
        self._until_collecting = sys.maxsize if self._gathers else COLLECT_EVERY
        for slot in self._executors:
            self._offer(slot)

    def __repr__(self) -> str:
        counts = f"in flight {self.in_flight} | {self._slots!r}"
        return f"<{type(self).__name__} {self.config.name} {self.version} [{counts} | {self._scheduler!r}]>"

    @property
    def pending(self) -> int:
        return self._scheduler.queued

    @property
    def in_flight(self) -> int:
        return len(self._in_flight.requests) + len(self._turn)

    @property
    def instances(self) -> Mapping[int, Executor]:
        return self._executors

    def free_instances(self) -> list[int]:
        """Return the numbers of the instances that run nothing and owe no response."""
        owing = {entry.batch.executor for entry in self._in_flight.requests.values() if entry.batch is not None}
        return [n for n, each in self._executors.items() if self._slots.is_free(n) and each not in owing]

    def waited_ns(self, now: int) -> int:
        """Return how long the oldest request that waits for an instance has waited, 0 where none waits."""
        waiting = (entry for entry in self._in_flight.requests.values() if entry.state == QUEUED)
        return max(1, now - oldest.arrival_ns) if (oldest := next(waiting, None)) is not None else 0

    def add_instance(self, number: int, executor: Executor) -> None:
        """Give batches to one more instance, with a number below the most that the configuration allows."""
        self._executors[number] = executor
        self._pool.instances.add(number)
        self._follow(self._slots.add(number))

    def remove_instance(self) -> Executor | None:
        """Give no more batches to the free instance with the highest number, and return it; None where none is free."""
        free = self.free_instances()
        if not free or self.pending:
            return None
        number = max(free)
        self._pool.instances.discard(number)
        self._follow(self._slots.remove(number))
        return self._executors.pop(number)

    @property
    def runs_in_place(self) -> bool:
        """Whether an instance computes on the event loop, because its executions are short; a trial does not count."""
        executors = (each for each in self._executors.values() if isinstance(each, BlockingExecutor))
        return any(each.rule.in_place and not each.rule.is_tried for each in executors)

    @property
    def has_short_requests(self) -> bool:
        """Whether an instance computes a request in microseconds, wherever it runs batches."""
        executors = (each for each in self._executors.values() if isinstance(each, BlockingExecutor))
        return self.runs_in_place or any(each.requests.are_short for each in executors)

    def begin_in_place(self) -> None:
        """Let every instance compute on the event loop from now on, as long as executions are short."""
        for executor in self._executors.values():
            if isinstance(executor, BlockingExecutor):
                executor.rule.begin()

    def entry(self, id: int) -> PendingRequest:
        return self._in_flight.requests[id]

    def submit(self, request: InferRequest, reply: Reply) -> Ticket:
        if request.trace is not None:
            reply = self._batch_kind.begin(request.trace, request, reply, (self.config.name, self.version))
        elif self._is_collecting and request.caller is None:
            entry = PendingRequest(self, request, reply, now_ns())
            self._collect(entry)
            return entry
        elif self._plain is not None and (outcome := self.run_at_once(request)) is not None:
            self._in_flight.deliver(request, reply, outcome, True)
            self._until_collecting -= 1
            if not self._until_collecting:
                self._is_collecting, self._lone_turns = True, LONE_TURNS - 1
            return ANSWERED
        now = now_ns()
        entry = PendingRequest(self, request, reply, now)
        self._enter(entry, now)
        return entry

    def _enter(self, entry: PendingRequest, now: int) -> None:
        """Check a request and pass it to the scheduler."""
        request, in_flight = entry.request, self._in_flight
        entry.state = QUEUED
        try:
            batch_size, shape_key = self._admission.check(request)
        except ServingError as error:
            in_flight.fail(entry, error, FailureReason.OTHER)
            return
        self._next_id = request_id = self._next_id + 1
        if request.caller is not None:
            try:
                entry.wait = self._deadlocks.submit(request.caller, self._pool)
            except ServingError as error:
                in_flight.fail(entry, with_request_id(error, request), FailureReason.OTHER)
                return
        else:
            if self._busy_poll is not None:
                self._busy_poll.submitted(now)
            if in_flight.order is not None:
                self._arrived(request_id, entry)
        entry.id = request_id
        entry.batch_size = batch_size
        in_flight.requests[request_id] = entry
        self._handle(_submission(request_id, batch_size, shape_key, request), now)

    def _collect(self, entry: PendingRequest) -> None:
        """Check a request and let it wait for the end of this turn of the event loop."""
        try:
            entry.batch_size, _ = self._admission.check(entry.request)
        except ServingError as error:
            self._in_flight.fail(entry, error, FailureReason.OTHER)
            return
        entry.state = COLLECTED
        self._turn.append(entry)
        if len(self._turn) == 1:
            self._loop.call_soon(self._run_turn)

    def _run_turn(self) -> None:
        """Run the collected requests, for a limited time; the others follow in the next turn."""
        turn = [entry for entry in self._turn if entry.state != DONE]  # else the caller has gone
        self._turn = []
        self._lone_turns = self._lone_turns + 1 if len(turn) == 1 else 0
        if self._lone_turns >= LONE_TURNS:
            self._is_collecting, self._until_collecting = False, COLLECT_EVERY
        arrivals_ns = [entry.arrival_ns for entry in turn]
        sizes = [entry.batch_size for entry in turn]
        outcomes = self._run_each([entry.request for entry in turn], sizes, arrivals_ns)
        for number, outcome in enumerate(outcomes):
            entry = turn[number]
            if entry.state != DONE:  # else the reply to another one has cancelled it
                entry.state = DONE
                self._in_flight.deliver(entry.request, entry.reply, outcome, True)
        if outcomes and len(outcomes) < len(turn):
            if not self._turn:
                self._loop.call_soon(self._run_turn)
            self._turn[:0] = turn[len(outcomes) :]
        elif not outcomes:  # they do not run in place any more
            self._is_collecting, self._until_collecting = False, COLLECT_EVERY
            for entry in turn:
                if entry.state != DONE:
                    self._enter(entry, now_ns())

    def run_at_once(self, request: InferRequest) -> InferResponse | ServingError | None:
        """Run a request that has no trace to its end before this returns, if it neither waits nor joins a batch.

        Checks, statistics and outcome are as in `submit`. Nothing else can happen in between, so there are no events.

        Returns:
            The outcome; None if nothing was done, and the caller has to submit the request.
        """
        scheduler, in_flight = self._plain, self._in_flight
        slot = scheduler.slot_at_once() if scheduler is not None else None
        if scheduler is None or slot is None or in_flight.order is not None:
            return None
        executor = self._executors[slot % self._most]
        if not isinstance(executor, BlockingExecutor) or not executor.rule.in_place:
            return None
        arrival_ns = now_ns()
        try:
            batch_size, shape_key = self._admission.check(request)
        except ServingError as error:
            self.metrics.failed(FailureReason.OTHER, now_ns() - arrival_ns)
            return error
        if self._busy_poll is not None and request.caller is None:
            self._busy_poll.ran_at_once(arrival_ns)
        reason = CloseReason.FULL
        if self._gathers:
            self._next_id += 1
            event = _submission(self._next_id, batch_size, shape_key, request)
            try:
                (run,) = scheduler.handle(event, arrival_ns)
            except Exception:  # a fault of the server: `submit` answers the request
                self._scheduler_failed()
                return None
            reason = cast("Run", run).reason
        # Without gathering, the slot is idle again before the next event, so the scheduler need not know.
        execution, start_ns, end_ns = executor.run_in_place((request,))
        if self._gathers:
            self._follow(self._slots.ran(slot, end_ns - start_ns))
        record = ExecutionRecord(executor.placement.name, batch_size, start_ns - arrival_ns, end_ns - start_ns)
        return in_flight.ran_alone(request, execution, record, reason, arrival_ns)

    def run_together(self, requests: Sequence[InferRequest]) -> list[InferResponse | ServingError]:
        """Run clients' requests that came together and have equal forms, each alone, as `run_at_once` does.

        What depends on the form only is done once. The form is everything but ids, deadlines and elements of tensors.

        Returns:
            The outcomes of the first requests; none if the caller has to submit them, fewer than all when time is over.
        """
        arrival_ns, count = now_ns(), len(requests)
        try:
            batch_size, _ = self._admission.check(requests[0])
        except ServingError:
            return []
        return self._run_each(requests, [batch_size] * count, [arrival_ns] * count)

    def _run_each(
        self, requests: Sequence[InferRequest], batch_sizes: Sequence[int], arrivals_ns: Sequence[int]
    ) -> list[InferResponse | ServingError]:
        scheduler, in_flight = self._plain, self._in_flight
        slot = scheduler.slot_at_once() if scheduler is not None and not self._gathers else None
        if slot is None or in_flight.order is not None or not requests:
            return []
        executor = self._executors[slot % self._most]
        if not isinstance(executor, BlockingExecutor):
            return []
        end_ns = now_ns()
        if self._busy_poll is not None:
            self._busy_poll.ran_at_once(end_ns, len(requests))
        rule, name, until_ns = executor.rule, executor.placement.name, end_ns + TOGETHER_NS_MAX
        runs: list[tuple[Execution | ServingError, int, int]] = []
        for request in requests:
            if not rule.in_place or end_ns > until_ns:
                break
            run = executor.run_in_place((request,))
            runs.append(run)
            end_ns = run[2]
        return in_flight.ran_together(requests, runs, name, batch_sizes, arrivals_ns)

    def cancel(self, entry: PendingRequest) -> None:
        batch = entry.batch
        if entry.state == QUEUED:
            # Before the reply, which may submit again: the scheduler must not start a request that was answered.
            self._handle(Cancel(entry.id), now_ns())
        if entry.state != DONE:
            error = ServingError(Code.CANCELLED, "the request was cancelled")
            self._in_flight.fail(entry, error, FailureReason.CANCELED)
        if batch is not None:
            self._cancels += 1
            batch.cancelled(entry.index)
            batch.executor.cancel(batch, entry.index)

    def frame_of(self, slot: int, parent: CallFrame | None, *, occupies: bool) -> CallFrame:
        """Return the call frame of requests that a batch makes. From the first one on, instances queue no batches.

        Args:
            slot: The slot of the batch.
            parent: The call frame of the request in the batch, None for a client's.
            occupies: Whether the batch still runs.
        """
        instance = self._slots.instance_of(slot)
        name = self._executors[instance].placement.name if occupies else ""
        frame = CallFrame(self.config.name, self.version, name, parent)
        if occupies:
            self._deadlocks.occupy(frame, self._pool, instance)
            self._follow(self._slots.limit(1))
        return frame

    def batch_ended(self, slot: int, compute_ns: int, frame: CallFrame | None) -> None:
        if frame is not None and frame.instance:
            self._deadlocks.batch_ended(frame)
        self._follow(self._slots.end(slot, compute_ns))
        if self._in_flight.idle is not None:
            self._in_flight.idle.set()

    async def drain(self) -> None:
        """Stop taking requests; return when every request in flight has been answered and every executor is idle."""
        while self._turn:
            self._run_turn()
        self._handle(Stop(), now_ns())
        while self._in_flight.requests or (self._slots.running and not isinstance(self._scheduler, FailedScheduler)):
            self._in_flight.idle = asyncio.Event()
            await self._in_flight.idle.wait()

    async def aclose(self) -> None:
        """Close every executor; to be called when drained."""
        self._timer.close()
        for executor in self._executors.values():
            await executor.aclose()

    def abandon(self, error: ServingError) -> None:
        self._abandoned_for = error
        for entry in (*self._turn, *self._in_flight.requests.values()):
            if entry.state == QUEUED:  # or it would start when a slot is idle again
                self._handle(Cancel(entry.id), now_ns())
            if entry.state != DONE:  # unless only its turn in the order of arrival is missing
                self._in_flight.fail(entry, error, FailureReason.OTHER)

    def _arrived(self, request_id: int, entry: PendingRequest) -> None:
        """A client's request arrived, and the model keeps replies in order of arrival.

        Requests of models are exempt: one for which an earlier request waits must not wait for that.
        """
        if self._in_flight.order is not None:
            self._in_flight.order.submitted(request_id, entry)

    def _follow(self, change: SlotChange) -> None:
        """Offer slots, now or soon, and tell the scheduler which ones are gone."""
        for slot in change.free:
            is_later = self._gathers
            if self._scheduler.queued >= self._enough:
                # A batch in place follows in the next turn, or in the loop of this one: not inside of the last batch.
                executor = self._executors[slot % self._most]
                is_later = isinstance(executor, BlockingExecutor) and executor.rule.in_place
            if not is_later:
                self._offer(slot)
                continue
            self._free.append(slot)
            if not self._is_turn_due:
                self._is_turn_due = True
                self._loop.call_soon(self._take_turn)
        for event in change.gone:
            self._handle(event, now_ns())

    def _take_turn(self) -> None:
        """Offer the free slots, and slots that become free again while enough requests wait, for a limited time."""
        until_ns = now_ns() + TOGETHER_NS_MAX
        while True:
            slots, self._free = self._free, []
            for slot in slots:
                self._offer(slot)
            if not self._free or self._scheduler.queued < self._enough or now_ns() > until_ns:
                break
        self._is_turn_due = bool(self._free)
        if self._is_turn_due:
            self._loop.call_soon(self._take_turn)

    def _offer(self, slot: int) -> None:
        event = self._slots.offer(slot)
        if event is not None:
            self._handle(event, now_ns())

    def _tick(self) -> None:
        # The timer may fire slightly early; pass the time that the scheduler requested, or this would spin.
        now = max(now_ns(), self._armed or 0)
        self._armed = None
        self._handle(Tick(), now)

    def _handle(self, event: Event, now: int) -> None:
        try:
            commands = self._scheduler.handle(event, now)
            if commands:
                self._carry_out(commands)
            wake = self._scheduler.wake_at()
        except Exception:  # a fault of the server: requests in flight must not wait forever
            self._scheduler_failed()
            wake = None
        if wake != self._armed:
            self._armed = wake
            self._timer.set(wake)

    def _scheduler_failed(self) -> None:
        """Answer all requests in flight, and drop all later ones."""
        _log.exception("the scheduler of model '%s' failed: %s", self.config.name, repr(self))
        self._scheduler = FailedScheduler()
        self._plain = None
        for entry in list(self._in_flight.requests.values()):
            if entry.state != DONE:
                error = drop_error(DropReason.SCHEDULER_FAILED, entry.request, self.config.name)
                self._in_flight.fail(entry, error, FailureReason.OTHER)

    def _carry_out(self, commands: Sequence[Command]) -> None:
        if len(commands) == 1 and isinstance(run := commands[0], Run):  # as nearly always
            batch = self._begin(run)
            batch.executor.run(batch)
            return
        # All batches are made before any request is answered: a reply may cancel requests in one of them.
        batches = [self._begin(command) for command in commands if isinstance(command, Run)]
        cancels = self._cancels
        if len(batches) < len(commands):
            for command in commands:
                if isinstance(command, Drop):
                    self._drop(command)
        for batch in batches:
            if cancels == self._cancels:
                batch.executor.run(batch)
            else:
                _run_in_part(batch)

    def _drop(self, drop: Drop) -> None:
        entry = self._in_flight.requests.get(drop.id)
        if entry is not None and entry.state == QUEUED:  # else the reply to another one has cancelled it
            error = self._abandoned_for or drop_error(drop.reason, entry.request, self.config.name)
            self._in_flight.fail(entry, error, drop_failure(drop.reason))

    def _begin(self, run: Run) -> RunningBatch:
        slot = run.slot
        self._slots.begin(slot)
        entries = list(map(self._in_flight.requests.__getitem__, run.ids))
        executor = self._executors[slot % self._most]
        batch = self._batch_kind.current(self._in_flight, entries, slot, run.reason, executor)
        for index, entry in enumerate(entries):
            entry.state = RUNNING
            entry.batch = batch
            entry.index = index
            if entry.wait is not None:
                self._deadlocks.run(entry.wait, slot % self._most)
        return batch


def _submission(id: int, batch_size: int, shape_key: Hashable, request: InferRequest) -> Submit:
    return Submit(id, batch_size, shape_key, request.priority, request.timeout_us, request.flow, request.deadline_ns)


def _run_in_part(batch: RunningBatch) -> None:
    """Run a batch, and tell its instance which of its requests were cancelled before it started."""
    gone = [index for index, entry in enumerate(batch.entries) if entry.state == DONE and entry.id != EMPTY_ROW]
    batch.executor.run(batch)
    for index in gone:
        batch.executor.cancel(batch, index)
