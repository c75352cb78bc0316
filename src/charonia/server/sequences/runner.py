"""Runs one loaded version of a sequence model.

In addition to what every runner does: it checks the sequence flags and correlation id of a request and passes them to
the scheduler, gives the model its control inputs, states and padding, and stores the states that the model returns. A
runner that replaces another one forwards the requests of sequences that started there.
"""

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial

from charonia.busy_poll import BusyPoll
from charonia.clock import now_ns
from charonia.config.kinds import ControlKind
from charonia.config.model import ModelConfig
from charonia.config.sequence_tensors import control_type, controls
from charonia.core.dtypes import DataType
from charonia.core.errors import invalid
from charonia.core.request import SEQUENCE_END, SEQUENCE_START, InferRequest
from charonia.core.response import Outcome, Reply, Ticket
from charonia.server.backends.api import Outputs, Rescheduled, Result
from charonia.server.execution.admission import Admission
from charonia.server.execution.deadlock import DeadlockDetector
from charonia.server.execution.executor import Executor
from charonia.server.execution.in_flight import DONE, QUEUED, RUNNING, PendingRequest, RunningBatch
from charonia.server.execution.runner import ModelRunner
from charonia.server.execution.tracing import BatchKind
from charonia.server.rate_limiter.limiter import Claim
from charonia.server.scheduling.api import (
    EMPTY_ROW,
    Event,
    Reschedule,
    RowFree,
    RowTaken,
    Run,
    Scheduler,
    SetStateKey,
    StateLost,
    StopNewSequences,
)
from charonia.server.sequences.api import EndReason, SequenceKey, SequenceMember, SequencerView
from charonia.server.sequences.scheduler import Sequencer
from charonia.server.sequences.tensors import SequenceRequest, SequenceTensors, States

_log = logging.getLogger(__name__)

_RANGES = {
    DataType.UINT64: (0, 2**64 - 1),
    DataType.INT64: (-(2**63), 2**64 - 1),  # larger unsigned ids are passed as the negative number of the same bits
    DataType.UINT32: (0, 2**32 - 1),
    DataType.INT32: (-(2**31), 2**31 - 1),
}
"""Range of correlation ids that each datatype of the control input can hold."""


SURVIVES_RESTART = "SEQUENCES_SURVIVE_RESTART"
"""Parameter of a model that finds its sequences again when its process is replaced."""


def survives_restart(config: ModelConfig) -> bool:
    """Return whether the model itself keeps the state of sequences outside of its process."""
    text = config.parameters.get(SURVIVES_RESTART, "no")
    if text not in ("yes", "no"):
        raise invalid(f"model '{config.name}': parameter {SURVIVES_RESTART}: expected yes or no, got '{text}'")
    return text == "yes"


class SequenceAdmission:
    """The checks of requests to a sequence model, prepared once."""

    def __init__(self, config: ModelConfig, is_taken: Callable[[int], bool]) -> None:
        self._inner = Admission(config)
        self._model = config.name
        self._is_taken = is_taken
        self._is_iterative = config.sequence_batching is not None and config.sequence_batching.iterative_sequence
        self._generated = 0
        found = controls(config).get(ControlKind.CONTROL_SEQUENCE_CORRID)
        self._id_name = found[0].name if found else ""
        self._id_type = control_type(found[1]) if found else None

    def check(self, request: InferRequest) -> tuple[int, Hashable]:
        """Return batch size 1 and the request's `SequenceMember`. A request of an iterative model is a whole sequence.

        Raises:
            ServingError: INVALID_ARG.
        """
        batch_size, shape_key = self._inner.check(request)
        if batch_size != 1:
            raise invalid(
                f"inference request to model '{self._model}' must specify batch-size 1 due to requirements of sequence "
                f"batcher, got {batch_size}",
            )
        key = request.correlation_id
        if not key and not self._is_iterative:
            raise invalid(
                f"inference request to model '{self._model}' must specify a non-zero or non-empty correlation ID",
                hint="send sequence_id, and sequence_start with the first request of the sequence",
            )
        if not key:
            key = request.correlation_id = self._generate()
        self._check_type(request)
        if self._is_iterative:
            return 1, SequenceMember(key, True, True, shape_key)
        flags = request.flags
        return 1, SequenceMember(key, bool(flags & SEQUENCE_START), bool(flags & SEQUENCE_END), shape_key)

    def _generate(self) -> int:
        self._generated += 1
        while self._is_taken(self._generated):
            self._generated += 1
        return self._generated

    def _check_type(self, request: InferRequest) -> None:
        """Reject an id that the control input of the model cannot hold."""
        key, datatype = request.correlation_id, self._id_type
        if datatype is None or datatype is DataType.BYTES:
            return
        lowest, highest = _RANGES[datatype]
        if isinstance(key, str):
            raise invalid(
                f"sequence batching control '{self._id_name}' data-type is 'BYTES', but model '{self._model}' expects "
                f"'{datatype.wire}'",
                hint=f"send an id from {lowest} to {highest}",
            )
        if not lowest <= key <= highest:
            raise invalid(
                f"inference request for sequence {key} to model '{self._model}': the model takes correlation IDs as "
                f"{datatype.config}, from {lowest} to {highest}",
                hint=f"data_type of control input '{self._id_name}' in its configuration says so",
            )


class SequenceRunner(ModelRunner):
    """One loaded version of a sequence model.

    Args:
        config: The complete configuration.
        version: The version, as text.
        scheduler: The scheduler: `sequencer`, or a wrapper of it.
        sequencer: The scheduler of sequences.
        tensors: Controls and states.
        executors: The instances.
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
        sequencer: Sequencer,
        tensors: SequenceTensors,
        executors: Sequence[Executor],
        labels: dict[str, tuple[str, ...]],
        loop: asyncio.AbstractEventLoop,
        deadlocks: DeadlockDetector | None = None,
        busy_poll: BusyPoll | None = None,
        claim: Claim | None = None,
    ) -> None:
        self._sequencer = sequencer  # before the first event
        self._phased_out: asyncio.Event | None = None
        self._successor: SequenceRunner | None = None  # gets the rows of shared instances that become free
        super().__init__(
            config,
            version,
            scheduler=scheduler,
            executors=executors,
            labels=labels,
            loop=loop,
            deadlocks=deadlocks,
            busy_poll=busy_poll,
            claim=claim,
        )
        self._tensors = tensors
        self._admission = SequenceAdmission(config, sequencer.holds)
        self._states: dict[int, States] = {}  # by number of the sequence
        self._repeated: dict[int, SequenceRequest] = {}  # by number: the constant arguments of later executions
        self._batch_kind = BatchKind(_sequence_kind(self._batch_kind.current))
        batching = config.sequence_batching
        self._is_iterative = batching is not None and batching.iterative_sequence
        oldest = batching.oldest if batching is not None else None
        if oldest is not None and oldest.preserve_ordering:
            self._in_flight.keep_order()
        if not (self._tensors.has_states or survives_restart(config)):
            for slot, executor in enumerate(executors):
                executor.when_lost(partial(self._lost, slot))
        self._has_fixed_rows = oldest is None
        self._predecessors: list[SequenceRunner] = []
        self._is_followed = False
        self._is_closed = False

    def submit(self, request: InferRequest, reply: Reply) -> Ticket:
        """Take in a request, or forward it to the runner where its sequence started."""
        if self._predecessors and not request.flags & SEQUENCE_START:
            for runner in self._predecessors:
                if runner.holds(request.correlation_id) and not self._sequencer.holds(request.correlation_id):
                    return runner.submit(request, reply)
            self._predecessors = [runner for runner in self._predecessors if not runner._is_closed]
        return super().submit(request, reply)

    @property
    def live(self) -> int:
        return sum(runner._sequencer.live for runner in self.lineage())

    @property
    def is_iterative(self) -> bool:
        return self._is_iterative

    def lineage(self) -> "Iterator[SequenceRunner]":
        """Iterate over this runner and those that it has replaced: sequences live in all of them."""
        yield self
        for runner in self._predecessors:
            yield from runner.lineage()

    def holds(self, key: SequenceKey) -> bool:
        return any(runner._sequencer.holds(key) for runner in self.lineage())

    def follow(self, runner: "SequenceRunner") -> None:
        """Replace a runner; its live sequences continue there."""
        if runner is not self and runner not in self._predecessors:
            self._predecessors.append(runner)
            runner._is_followed = True
            shared = set(self._executors.values()) & set(runner._executors.values())
            if self._has_fixed_rows and shared:
                for slot, executor in self._executors.items():
                    for row in self._sequencer.free_rows(slot) if executor in shared else ():
                        self._handle(RowTaken(slot, row), now_ns())
                runner._successor = self
                runner._transfer_rows()

    def _transfer_rows(self) -> None:
        """Leave the free rows of shared instances to the heir."""
        heir = self._successor
        slots = {executor: slot for slot, executor in heir._executors.items()} if heir is not None else {}
        for slot, executor in self._executors.items():
            for row in self._sequencer.free_rows(slot) if executor in slots else ():
                super()._handle(RowTaken(slot, row), now_ns())
                if heir is not None:
                    heir._handle(RowFree(slots[executor], row), now_ns())

    def instance_name(self, slot: int) -> str:
        return self._executors[slot].placement.name

    def view(self) -> SequencerView:
        return self._sequencer.view(now_ns())

    def reschedule(self, entry: PendingRequest) -> bool:
        """The model reschedules a request; return whether it may."""
        if not self._is_iterative or (entry.state != DONE and not self._sequencer.is_running(entry.id)):
            return False
        if entry.state != DONE:
            entry.state = QUEUED
            entry.batch = None
            self._handle(Reschedule(entry.id), now_ns())
        return True

    def keep_states(self, request: InferRequest, outputs: Outputs) -> None:
        """Store the states that a model returned, for the next request of the sequence."""
        if not self._tensors.has_states or not isinstance(request, SequenceRequest):
            return
        states = self._states.get(request.sequence)
        self._tensors.take(outputs, states if states is not None else {})
        if states is not None and self._tensors.has_variable_states:
            self._handle(SetStateKey(request.sequence, self._tensors.shapes(states)), now_ns())

    async def drain(self) -> None:
        """Stop taking requests; if another runner has replaced this one, its live sequences end first.

        Sequences of a runner that this one has replaced end immediately, unless it runs another version that may stay.
        """
        self._end_predecessors(others=not self._is_followed)
        if self._is_followed and self._phased_out is None:
            self._handle(StopNewSequences(), now_ns())
            self._phased_out = asyncio.Event()
            if self._sequencer.live:
                await self._phased_out.wait()
        await super().drain()

    async def aclose(self) -> None:
        self._is_closed = True
        self._states.clear()
        self._repeated.clear()
        await super().aclose()

    def _arrived(self, request_id: int, entry: PendingRequest) -> None:
        """Do nothing: replies are in the order in which requests began to run."""

    def _lost(self, slot: int) -> None:
        """The process of an instance has exited, and the state of its sequences is lost."""
        self._handle(StateLost(slot), now_ns())
        for runner in self._predecessors:
            for earlier, executor in runner._executors.items():
                if executor is self._executors[slot]:
                    runner._lost(earlier)

    def _end_predecessors(self, *, others: bool) -> None:
        """Let runners that this one has replaced end: of its version, and with `others` of other versions."""
        for runner in self._predecessors:
            if others or runner.version == self.version:
                runner._end_phase_out(others=others)

    def _end_phase_out(self, *, others: bool) -> None:
        self._end_predecessors(others=others)
        if self._phased_out is not None:
            self._phased_out.set()

    def _handle(self, event: Event, now: int) -> None:
        super()._handle(event, now)
        if self._successor is not None:
            self._transfer_rows()
        for ended in self._sequencer.take_ended():
            self._states.pop(ended.sequence, None)
            self._repeated.pop(ended.sequence, None)
            if ended.reason is EndReason.REPLACED:
                _log.warning(
                    "sequence %s of model '%s' was restarted before it ended; its earlier requests are done",
                    ended.key,
                    self.config.name,
                )
            elif ended.reason is EndReason.IDLE:
                _log.info("sequence %s of model '%s' was idle for too long and has ended", ended.key, self.config.name)
        if self._phased_out is not None and not self._sequencer.live:
            self._phased_out.set()

    def _begin(self, run: Run) -> RunningBatch:
        """Return the batch to run, with controls, states and padding."""
        self._slots.begin(run.slot)
        requests = [self._complete(request_id) if request_id != EMPTY_ROW else None for request_id in run.ids]
        model = next(request for request in requests if request is not None)
        padded = [request or self._tensors.padding(model) for request in requests]
        entries = [
            self._in_flight.requests[request_id] if request_id != EMPTY_ROW else self._padding(request)
            for request_id, request in zip(run.ids, padded, strict=True)
        ]
        order = self._in_flight.order
        batch = self._batch_kind.current(self._in_flight, entries, run.slot, run.reason, self._executors[run.slot])
        batch.requests = padded
        for index, entry in enumerate(entries):
            entry.index = index
            if entry.id == EMPTY_ROW:
                continue
            entry.state = RUNNING
            entry.batch = batch
            if entry.wait is not None:
                self._deadlocks.run(entry.wait, run.slot)
            elif order is not None and not order.holds(entry.id):
                order.submitted(entry.id, entry)
        return batch

    def _complete(self, request_id: int) -> SequenceRequest:
        place = self._sequencer.place(request_id)
        repeated = self._repeated.get(place.sequence)
        if repeated is not None:
            return repeated
        request = self._in_flight.requests[request_id].request
        flags = request.flags
        if self._is_iterative:
            flags = SEQUENCE_START if place.is_first else 0
        states: States = {}
        if self._tensors.has_states:
            if place.is_first:
                self._states[place.sequence] = self._tensors.initial_states()
            states = self._states[place.sequence]
        completed = self._tensors.complete(request, flags & (SEQUENCE_START | SEQUENCE_END), states)
        completed.sequence = place.sequence
        if self._is_iterative and not (place.is_first or self._tensors.has_states):
            self._repeated[place.sequence] = completed
        return completed

    def _padding(self, request: InferRequest) -> PendingRequest:
        entry = PendingRequest(self, request, _no_reply, now_ns())
        entry.id = EMPTY_ROW
        entry.state = DONE
        return entry


class _SequenceBatch(RunningBatch):
    """A batch of requests of sequences."""

    __slots__ = ()
    _owner: SequenceRunner

    def respond(self, index: int, result: Result | None, final: bool) -> None:
        """Take in a response of an asynchronous instance, or of a decoupled model."""
        if not self._is_taken(index, result):
            super().respond(index, result, final)

    def _take(self, index: int, result: Result, end_ns: int) -> None:
        if not self._is_taken(index, result):
            super()._take(index, result, end_ns)

    def _is_taken(self, index: int, result: Result | None) -> bool:
        """Store the states, even if the request was cancelled; return whether the request was rescheduled."""
        if isinstance(result, Outputs):
            self._owner.keep_states(self.requests[index], result)
        return isinstance(result, Rescheduled) and self._owner.reschedule(self.entries[index])


def _sequence_kind(kind: type[RunningBatch]) -> type[RunningBatch]:
    return type(f"Sequence{kind.__name__}", (_SequenceBatch, kind), {"__slots__": ()})


def _no_reply(outcome: Outcome, final: bool) -> None:
    """No caller waits for padding."""
