"""A request of an ensemble in flight: each step is a request to the engine.

Invariants:

1. Every request gets exactly one final reply, from `EnsembleCall._end`.
2. A step is a request like any other: its model's scheduler, batches, limits and statistics apply. Its tensors are
   passed by reference; a batch dimension is added or removed, and `reshape` applied, as a view.
3. The first step that fails ends the request and cancels the other steps; so does a cancelled request.
4. A request keeps the plan it started with; a new plan applies to new requests.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol, assert_never

from charonia.clock import now_ns
from charonia.config.model import ModelConfig
from charonia.core.classification import classify
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, internal, unavailable
from charonia.core.metadata import name_of
from charonia.core.request import SEQUENCE_END, SEQUENCE_START, CallFrame, InferRequest, ParameterValue
from charonia.core.response import ExecutionRecord, InferResponse, Outcome, Reply, Ticket
from charonia.core.statistics import ResponseKind
from charonia.core.tensor import Array, DeviceTensor, Tensor
from charonia.server.ensembles.flow import (
    HELD_RESPONSES_MAX,
    Branch,
    Command,
    DataFlow,
    Finish,
    Overflow,
    Respond,
    StartStep,
)
from charonia.server.ensembles.plan import EnsemblePlan, Fit, StepRoute, TensorRoute
from charonia.server.execution.admission import Admission, with_request_id
from charonia.server.execution.tracing import begin
from charonia.server.metrics.metric_families import chosen_buckets
from charonia.server.metrics.model_metrics import FailureReason, ModelMetrics

_log = logging.getLogger(__name__)

Infer = Callable[[InferRequest, Reply], Ticket]
"""Runs a request of any model: `Engine.infer`."""

InferAtOnce = Callable[[InferRequest], InferResponse | ServingError | None]
"""Runs a request of any model to its end, where that is possible: `Engine.infer_at_once`."""


Read = Callable[[str], Tensor | None]
"""Returns an ensemble tensor, None where it is absent."""

Sequence = tuple[int | str, int]
"""Correlation id and flags."""


class _SequenceTensor(Tensor):
    """A tensor of a response that set the sequence of the steps that follow."""

    __slots__ = ("sequence",)

    def __init__(self, name: str, datatype: DataType, array: Array, sequence: Sequence) -> None:
        super().__init__(name, datatype, array)
        self.sequence = sequence


class EnsembleOwner(Protocol):
    """The runner, as its requests in flight see it.

    Attributes:
        version: The version, as text.
        infer: Runs a step.
        infer_at_once: Runs a step before it returns, where that is possible.
    """

    version: str
    metrics: ModelMetrics
    infer: Infer
    infer_at_once: InferAtOnce

    def succeeded(self, call: "EnsembleCall", queue_ns: int, compute_ns: int) -> None:
        """Count a request whose final response is about to be sent."""

    def ended(self, call: "EnsembleCall") -> None:
        """A request is over."""


class StepCall:
    """A step's request in flight."""

    __slots__ = ("branch", "call", "number", "record", "route", "sequence", "ticket")

    branch: Branch[Tensor]

    def __init__(self, call: "EnsembleCall", number: int, route: StepRoute) -> None:
        self.call = call
        self.number = number
        self.route = route
        self.sequence: Sequence | None = None
        self.ticket: Ticket | None = None
        self.record: ExecutionRecord | None = None

    def reply(self, outcome: Outcome, final: bool) -> None:
        self.call.arrived(self, outcome, final)


class EnsembleCall:
    """A request in flight; also the ticket that the front end holds."""

    __slots__ = (
        "_compute_ns", "_flow", "_frame", "_has_flow", "_inbox", "_is_busy", "_is_done", "_plan",
        "_queue_ns", "_reply", "_route", "_runner", "_running", "_sent", "_since_ns", "_unsent", "_values", "_walked",
        "arrival_ns", "batch_size", "request",
    )  # fmt: skip

    def __init__(
        self, runner: EnsembleOwner, plan: EnsemblePlan, request: InferRequest, reply: Reply, arrival_ns: int
    ) -> None:
        self.request = request
        self.arrival_ns = arrival_ns
        self.batch_size = 1
        self._runner = runner
        self._plan = plan
        self._reply = reply
        self._queue_ns = 0
        self._compute_ns = 0
        self._is_done = False
        self._is_busy = False
        self._has_flow = False
        self._inbox: deque[tuple[StepCall, Outcome, bool]] = deque()
        self._running: set[StepCall] = set()
        self._walked: dict[int, InferResponse | ServingError] = {}  # outcomes of steps that the flow has not seen
        self._values = dict(request.inputs)  # the tensors that there are, until there is a flow
        self._unsent: InferResponse | None = None
        self._sent = 0
        self._since_ns = arrival_ns

    def start(self, route: TensorRoute) -> None:
        """Start the first steps."""
        self._route = route
        self._frame = CallFrame(self._plan.config.name, self._runner.version, "", self.request.caller)
        self._work()

    def cancel(self) -> None:
        self.fail(ServingError(Code.CANCELLED, "the request was cancelled"), FailureReason.CANCELED)

    def fail(self, error: ServingError, reason: FailureReason) -> None:
        """Answer with an error, unless the request is over, and cancel running steps."""
        if not self._is_done:
            self._runner.metrics.failed(reason, now_ns() - self.arrival_ns)
            self._end(error)

    def arrived(self, step: StepCall, outcome: Outcome, final: bool) -> None:
        """A step has an outcome."""
        if self._is_done:
            return
        # A step that runs in place responds while it is being started; the inbox prevents recursion.
        self._inbox.append((step, outcome, final))
        if not self._is_busy:
            self._work()

    def _work(self) -> None:
        """Run until all steps wait, including steps that respond in the process."""
        self._is_busy = True
        commands: list[Command] = []
        try:
            if not self._has_flow:
                if self._walk():
                    return
                self._has_flow = True
                self._queue_ns = self._compute_ns = 0  # it counts the steps that were walked once more
                self._flow: DataFlow[Tensor] = DataFlow(self._route.plan, self._plan.branches_max)
                commands = self._flow.start(self.request.inputs)
            while True:
                for command in commands:
                    if self._is_done:
                        return
                    self._carry_out(command)
                if self._is_done or not self._inbox:
                    return
                commands = self._take(*self._inbox.popleft())
        except ServingError as error:  # a response that cannot be made as requested
            self.fail(error, FailureReason.OTHER)
        except Exception:
            _log.exception("a request of ensemble '%s' failed", self.request.model_name)
            self.fail(internal(f"in ensemble '{self.request.model_name}', an internal error"), FailureReason.OTHER)
        finally:
            self._is_busy = False
            if self._unsent is not None and not self._is_done:
                response, self._unsent = self._unsent, None
                self._deliver(response, False)

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, StartStep):
            self._run(command.step, command.branch)
        elif isinstance(command, Respond):
            response = self._response(partial(self._flow.read, command.branch))
            if self._unsent is not None:
                self._deliver(self._unsent, False)
            self._unsent = response
        elif isinstance(command, Finish):
            self._runner.succeeded(self, self._queue_ns, self._compute_ns)
            last, self._unsent = self._unsent, None
            self._end(last)
        elif isinstance(command, Overflow):
            error = unavailable(
                f"{HELD_RESPONSES_MAX} responses wait for the steps that follow",
                hint="raise max_inflight_requests of the ensemble, or let the model wait between responses",
            )
            self._fail_step(self._route.steps[command.step], error)
        else:
            assert_never(command)

    def _walk(self) -> bool:
        """Run the steps one after the other as long as each is done immediately, or is the only runnable one."""
        steps, order, walked, values = self._route.steps, self._route.order, self._walked, self._values
        if not order or self.request.trace is not None:
            return False
        for number in order[len(walked) :]:
            route = steps[number]
            outcome = None
            if not self._inbox:
                sent, _ = self._step_request(route, values.get)
                outcome = self._runner.infer_at_once(sent)
                if outcome is None:
                    if not self._route.is_chain:
                        return False
                    self._send(StepCall(self, number, route), sent)
                    if not self._inbox:
                        return True
            if outcome is None:
                outcome = self._answer()
            walked[number] = outcome
            if isinstance(outcome, ServingError) or outcome.parameters:
                return False
            for tensor in outcome.outputs:
                name = route.gives.get(tensor.name)
                if name is not None:
                    values[name] = tensor
            record = outcome.execution
            if record is not None:
                self._queue_ns += record.queue_ns
                self._compute_ns += record.compute_ns
        response = self._response(values.get)
        self._runner.succeeded(self, self._queue_ns, self._compute_ns)
        self._end(response)
        return True

    def _answer(self) -> InferResponse | ServingError:
        """Take in the outcome of the only step that runs."""
        step, outcome, final = self._inbox.popleft()
        if not final or outcome is None:
            return _partial_response()
        self._running.discard(step)
        step.ticket = None  # breaks a reference cycle
        return outcome

    def _run(self, number: int, branch: Branch[Tensor]) -> None:
        route = self._route.steps[number]
        step = StepCall(self, number, route)
        step.branch = branch
        outcome = self._walked.pop(number, None)
        if outcome is None:
            sent, step.sequence = self._step_request(route, partial(self._flow.read, branch))
            outcome = self._runner.infer_at_once(sent) if sent.trace is None else None
        if outcome is not None:
            self._inbox.append((step, outcome, True))
        else:
            self._send(step, sent)

    def _send(self, step: StepCall, sent: InferRequest) -> None:
        """Submit the request of a step that completes later."""
        self._running.add(step)
        ticket = self._runner.infer(sent, step.reply)
        if self._is_done:  # cancelled while the step was being started
            ticket.cancel()
        else:
            step.ticket = ticket

    def _step_request(self, route: StepRoute, read: Read) -> tuple[InferRequest, Sequence | None]:
        """Return the request of a step, and the sequence that an earlier step has set for it."""
        request = self.request
        inputs: dict[str, Tensor] = {}
        sequence: Sequence | None = None
        for name, tensor, fit in route.inputs:
            value = read(tensor)
            if value is None:
                continue
            inputs[name] = _passed(name, value, fit)
            if isinstance(value, _SequenceTensor):
                sequence = value.sequence
        correlation_id, flags = sequence or (request.correlation_id, request.flags)
        sent = InferRequest(
            route.model_name,
            inputs,
            model_version=route.model_version,
            id=request.id,
            outputs=route.outputs,
            parameters=request.parameters,
            correlation_id=correlation_id,
            flags=flags,
            priority=request.priority,
            timeout_us=request.timeout_us,
            deadline_ns=request.deadline_ns,
            caller=self._frame,
            trace=request.trace.child() if request.trace is not None else None,
            affinity=request.affinity,
            flow=request.flow,
        )
        return sent, sequence

    def _take(self, step: StepCall, outcome: Outcome, final: bool) -> list[Command]:
        if isinstance(outcome, ServingError):
            self._fail_step(step.route, outcome)
            return []
        if not final and not step.route.is_decoupled:
            self._fail_step(step.route, _partial_response())
            return []
        values: dict[str, Tensor] | None = None
        if outcome is not None:
            gives = step.route.gives
            values = {gives[tensor.name]: tensor for tensor in outcome.outputs if tensor.name in gives}
            step.record = outcome.execution
            if outcome.parameters or step.sequence is not None:
                values = self._with_sequence(values, outcome.parameters, step)
        if final:
            self._running.discard(step)
            step.ticket = None  # breaks a reference cycle: finished steps are freed without the garbage collector
            if step.record is not None:
                self._queue_ns += step.record.queue_ns
                self._compute_ns += step.record.compute_ns
        return self._flow.respond(step.branch, step.number, values, final)

    def _with_sequence(
        self, values: dict[str, Tensor], parameters: dict[str, ParameterValue], step: StepCall
    ) -> dict[str, Tensor]:
        """Attach the sequence that a response sets to its tensors."""
        correlation_id, flags = step.sequence or (self.request.correlation_id, self.request.flags)
        sequence_id = parameters.get("sequence_id", correlation_id)
        if isinstance(sequence_id, int | str):
            correlation_id = sequence_id
        for name, flag in (("sequence_start", SEQUENCE_START), ("sequence_end", SEQUENCE_END)):
            if name in parameters:
                flags = flags | flag if parameters[name] else flags & ~flag
        if step.sequence is None and (correlation_id, flags) == (self.request.correlation_id, self.request.flags):
            return values
        sequence = (correlation_id, flags)
        return {key: _SequenceTensor(t.name, t.datatype, t.array, sequence) for key, t in values.items()}

    def _response(self, read: Read) -> InferResponse:
        request, route = self.request, self._route
        sequence: Sequence = (request.correlation_id, request.flags)
        outputs: list[Tensor] = []
        for name, tensor, fit in route.outputs:
            value = read(tensor)
            if value is None:  # a model left it out
                continue
            if isinstance(value, _SequenceTensor):
                sequence = value.sequence
            outputs.append(_passed(name, value, fit))
        classes = {wanted.name: wanted.classification for wanted in request.outputs if wanted.classification}
        for index, output in enumerate(outputs if classes else ()):
            if output.name in classes:
                labels = self._plan.labels.get(output.name, ())
                outputs[index] = classify(output, classes[output.name], labels, batched=self._plan.batches)
        record = ExecutionRecord("", self.batch_size, self._queue_ns, self._compute_ns)
        parameters = _sequence_parameters(sequence) if outputs else {}
        return InferResponse(self._plan.config.name, self._runner.version, request.id, outputs, parameters, record)

    def _fail_step(self, route: StepRoute, error: ServingError) -> None:
        request = self.request
        message = error.message.removeprefix(f"[request id: {request.id or '<id_unknown>'}] ")
        name = name_of(route.model_name)
        step = "" if f"'{name}'" in message else f"step '{name}': "
        text = f"in ensemble '{self._plan.config.name}', {step}{message}"
        self.fail(ServingError(error.code, text, hint=error.hint), FailureReason.OTHER)

    def _end(self, outcome: Outcome) -> None:
        self._is_done = True
        self._inbox.clear()
        running, self._running = self._running, set()
        for step in running:
            ticket, step.ticket = step.ticket, None
            if ticket is not None:
                ticket.cancel()
        self._runner.ended(self)
        if self._unsent is not None:
            self._deliver(self._unsent, False)
        self._deliver(outcome, True)

    def _deliver(self, outcome: Outcome, final: bool) -> None:
        if self._plan.config.is_decoupled:
            self._count(outcome)
        try:
            self._reply(outcome, final)
        except Exception:  # a fault of a front end must not affect the step that has just responded
            _log.exception("the reply to request %r of ensemble %s failed", self.request.id, self.request.model_name)

    def _count(self, outcome: Outcome) -> None:
        now, metrics = now_ns(), self._runner.metrics
        kind = ResponseKind.SUCCESS
        if outcome is None:
            kind = ResponseKind.EMPTY_RESPONSE
        elif isinstance(outcome, ServingError):
            kind = ResponseKind.CANCEL if outcome.code is Code.CANCELLED else ResponseKind.FAIL
        if not self._sent:
            metrics.first_response(now - self.arrival_ns)
        metrics.response(self._sent, kind, now - self._since_ns)
        self._sent += 1
        self._since_ns = now


def _passed(name: str, value: Tensor, fit: Fit | None) -> Tensor:
    """Return a tensor as another model's, under the name that it has there."""
    if type(value) is DeviceTensor and fit is None:
        return value.renamed(name)
    return Tensor(name, value.datatype, value.array if fit is None else fit(value.array))


def _partial_response() -> ServingError:
    return internal("the model sent a partial response, and was not decoupled before")


def _sequence_parameters(sequence: Sequence) -> dict[str, ParameterValue]:
    """Return the parameters that identify a response's sequence: id 0 and False outside of sequences."""
    correlation_id, flags = sequence
    return {
        "sequence_id": correlation_id,
        "sequence_start": bool(flags & SEQUENCE_START),
        "sequence_end": bool(flags & SEQUENCE_END),
    }


def never_at_once(request: InferRequest) -> None:
    """Return None: every request is run by `Infer`."""


class EnsembleRunner:
    """One loaded version of an ensemble.

    Args:
        version: The version, as text.
        plan: Its steps.
        infer: Runs a step.
        infer_at_once: Runs a step before it returns, where that is possible.

    Attributes:
        config: The complete configuration.
        version: The version, as text.
        infer: Runs a step.
        infer_at_once: Runs a step before it returns, where that is possible.
    """

    def __init__(
        self, version: str, plan: EnsemblePlan, infer: Infer, infer_at_once: InferAtOnce = never_at_once
    ) -> None:
        self.version = version
        self.infer = infer
        self.infer_at_once = infer_at_once
        self.metrics = ModelMetrics(plan.config.name, version, chosen_buckets(plan.config))
        self._calls: set[EnsembleCall] = set()
        self._is_stopping = False
        self._idle: asyncio.Event | None = None
        self.replace_plan(plan)

    def replace_plan(self, plan: EnsemblePlan) -> None:
        """Use another plan for new requests: the models of the steps have changed."""
        self.config: ModelConfig = plan.config
        self._plan = plan
        self._admission = Admission(plan.config)

    @property
    def pending(self) -> None:
        """None: requests wait for the models of the steps, and are counted there."""

    @property
    def in_flight(self) -> int:
        return len(self._calls)

    def submit(self, request: InferRequest, reply: Reply) -> EnsembleCall:
        if request.trace is not None:
            reply = begin(request.trace, request, reply, (self.config.name, self.version))
        call = EnsembleCall(self, self._plan, request, reply, now_ns())
        try:
            if self._is_stopping:
                raise unavailable(f"ensemble '{self.config.name}' has stopped accepting new requests: it is unloaded")
            call.batch_size, _ = self._admission.check(request)
            try:
                route = self._plan.route(request)
            except ServingError as error:
                raise with_request_id(error, request) from error
        except ServingError as error:
            call.fail(error, FailureReason.OTHER)
            return call
        self._calls.add(call)
        call.start(route)
        return call

    def run_at_once(self, request: InferRequest) -> None:
        """Return None: one of its steps may have to wait."""

    def succeeded(self, call: EnsembleCall, queue_ns: int, compute_ns: int) -> None:
        now = now_ns()
        self.metrics.composed(
            duration_ns=now - call.arrival_ns,
            inferences=call.batch_size,
            queue_ns=queue_ns,
            compute_ns=compute_ns,
            end_ns=now,
            wall_ms=int(time.time() * 1000),
        )

    def ended(self, call: EnsembleCall) -> None:
        self._calls.discard(call)
        if self._idle is not None and not self._calls:
            self._idle.set()

    async def drain(self) -> None:
        self._is_stopping = True
        while self._calls:
            self._idle = asyncio.Event()
            await self._idle.wait()

    async def aclose(self) -> None:
        """Do nothing: the steps belong to other models."""

    def abandon(self, error: ServingError) -> None:
        """Answer all requests in flight with `error`: the time limit of the shutdown has passed."""
        for call in list(self._calls):
            call.fail(error, FailureReason.OTHER)
