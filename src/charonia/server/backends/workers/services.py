"""Services of the server for a model: calls of other models, model control, and custom metrics.

Also the readiness check, a question of the server to the model, and the log of the exceptions of models.

A call of another model is an `InferRequest` and a `Reply`, wherever the model runs. Every call gets exactly one final
reply. It is cancelled by the model, when all callers of its batch have gone, when it times out, and when the instance
ends.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

from charonia.core.errors import Code, ServingError, internal, unavailable, unsupported
from charonia.core.request import NO_FLOW, CallFrame, DeviceRequest, InferRequest
from charonia.core.response import Outcome, Reply, Ticket
from charonia.core.trace import Trace
from charonia.server.backends.api import BackendSettings, BatchSink, BusyPolling, Models, Result
from charonia.server.backends.batch import ModelShapes
from charonia.server.backends.workers.codec import encode_error, encode_outcome, found_tensors, made_request
from charonia.server.backends.workers.process import WorkerLink
from charonia.server.channel.channel import Incoming
from charonia.server.channel.regions import ChannelError
from charonia.server.log_file import LINES
from charonia.server.metrics.custom import CustomMetrics, MetricHolder

CALLS_OPEN_MAX = 1024
"""Most unanswered calls of one instance."""


@runtime_checkable
class StoppableTicket(Protocol):
    """A ticket whose caller can leave the end of a running request to the model."""

    def ask_to_stop(self) -> None:
        """Tell the model that the caller wants no more; its responses are delivered nevertheless."""


class Work:
    """A batch of an instance that is not finished, or has left requests open, in the shapes of its model.

    Attributes:
        finished: Indices of requests that have their last response; None for none.
    """

    __slots__ = ("_shapes", "finished", "requests", "sink")

    def __init__(self, sink: BatchSink, requests: Sequence[InferRequest], shapes: ModelShapes | None = None) -> None:
        self.sink = sink
        self.requests = requests if shapes is None else list(map(shapes.in_model_shapes, requests))
        self.finished: set[int] | None = None
        self._shapes = shapes

    def answered(self, result: Result | None) -> Result | None:
        """Return an answer of the model in the shapes of the configuration."""
        return result if result is None or self._shapes is None else self._shapes.answered(result)

    def record_last_response(self, index: int) -> None:
        """Note that a request has its last response."""
        if self.finished is None:
            self.finished = set()
        self.finished.add(index)

    def open_requests(self) -> list[int]:
        """Return the indices of the requests without a last response."""
        return [index for index in range(len(self.requests)) if self.finished is None or index not in self.finished]

    def is_open(self) -> bool:
        """Return whether a caller still waits for a last response."""
        return any(not self.sink.is_cancelled(index) for index in self.open_requests())

    def deliver(self, results: Sequence[Result | None], instance: str) -> tuple[bool, ServingError | None]:
        """Answer the requests that have a result; return whether others stay open, and the error if this fails."""
        try:
            for index, result in enumerate(results):
                if result is not None:
                    self.sink.respond(index, self.answered(result), True)
        except Exception:
            _log.exception("the results of a batch of '%s' cannot be handed on", instance)
            return False, internal(f"the server met a fault of its own with the results of instance '{instance}'")
        if None not in results:
            return False, None
        for index, result in enumerate(results):
            if result is not None:
                self.record_last_response(index)
        return self.is_open(), None

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

    __slots__ = ("calls", "error", "is_over", "key", "reply", "sink", "ticket", "timer")

    def __init__(self, calls: "ModelCalls", key: int, reply: Reply, sink: BatchSink | None) -> None:
        self.calls = calls
        self.key = key
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

    def cancel(self, error: ServingError | None = None, *, softly: bool = False) -> None:
        self.error = error or self.error
        if softly and isinstance(self.ticket, StoppableTicket):
            self.ticket.ask_to_stop()
        elif self.ticket is not None:
            self.ticket.cancel()


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
        call = self._open[key] = _OpenCall(self, key, reply, work.sink if work is not None else None)
        now = time.monotonic_ns()
        deadline = work.deadline_ns() if work is not None else 0
        if request.timeout_us:
            own = now + request.timeout_us * 1000
            deadline = min(deadline, own) if deadline else own
            # Only for the call's own limit: an expired deadline of the caller ends the call anyway. If the call ended
            # first, the model could still answer its caller.
            expired = unavailable(f"Request timeout expired: model '{request.model_name}' has not answered in time")
            call.timer = asyncio.get_running_loop().call_later(request.timeout_us / 1e6, call.cancel, expired)
        request.deadline_ns = deadline
        ticket = models.infer(request, call.take)
        if not call.is_over:
            call.ticket = ticket
            if call.error is not None:
                call.cancel()

    def cancel(self, key: int, error: ServingError | None = None, *, softly: bool = False) -> None:
        """Cancel a call. Ignored for one that is over.

        Args:
            error: The call's last outcome, None for that of a cancelled request.
            softly: Only tell the called model that no more is wanted; it decides.
        """
        call = self._open.get(key)
        if call is not None:
            call.cancel(error, softly=softly)

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


_log = logging.getLogger(__name__)

EXCEPTIONS_MAX = 10
"""Exceptions of one model version that are logged within `WINDOW_S`; more are counted."""

WINDOW_S = 60.0

REQUESTS_LISTED_MAX = 8
"""Requests of a batch whose ids are logged."""


class ExceptionLog:
    """Logs the exceptions of one model version. Use it on the event loop's thread.

    Attributes:
        suppressed: Exceptions that were not logged since the window began.
    """

    def __init__(self) -> None:
        self.suppressed = 0
        self._logged = 0

    def note(self, model: CallFrame, instance: str, request_ids: Sequence[str], traceback: str) -> None:
        """Log an exception, or count it if there were many.

        Args:
            request_ids: Ids of the requests of the batch, "" for one without.
        """
        if not self._logged:
            asyncio.get_running_loop().call_later(WINDOW_S, self._end_window, model)
        if self._logged == EXCEPTIONS_MAX:
            self.suppressed += 1
            return
        self._logged += 1
        ids = ", ".join(repr(each) if each else "<id_unknown>" for each in request_ids[:REQUESTS_LISTED_MAX])
        more = len(request_ids) - REQUESTS_LISTED_MAX
        _log.error(
            "model '%s' version %s, instance '%s', request %s%s: execute raised an exception\n%s",
            model.model,
            model.version,
            instance,
            ids,
            f" and {more} more" if more > 0 else "",
            traceback.rstrip(),
            extra={"instance": instance, LINES: True},
        )

    def _end_window(self, model: CallFrame) -> None:
        if self.suppressed:
            _log.error(
                "model '%s' version %s: %d more exceptions within %g s were not logged",
                model.model,
                model.version,
                self.suppressed,
                WINDOW_S,
            )
        self._logged = self.suppressed = 0


CONTROLS_OPEN_MAX = 64
"""Most open control requests of one instance: loads, unloads, and readiness of models."""

IS_READY_S_MAX = 5.0
"""Time limit of `is_ready`, including the running batch before it; then the model counts as not ready."""

REPLIES_UNSENT_MAX = 65_536
"""Unsent buffers of a worker above which calls that get more responses are cancelled."""


@dataclass(frozen=True, slots=True)
class ServerServices:
    """Services of the server for a model.

    Attributes:
        caller: The caller of requests that belong to no batch: the model, without an instance.
        models: The other models, None where there are none.
        busy_poll: Busy polling, None where it is off.
    """

    caller: CallFrame
    models: Models | None = None
    metrics: CustomMetrics = field(default_factory=CustomMetrics)
    busy_poll: BusyPolling | None = None
    exceptions: ExceptionLog = field(default_factory=ExceptionLog)

    @classmethod
    def of(cls, name: str, version: int, settings: BackendSettings) -> "ServerServices":
        """Return the services for a version of a model."""
        metrics = settings.metrics if settings.metrics is not None else CustomMetrics()
        return cls(CallFrame(name, str(version)), settings.models, metrics, settings.busy_poll)


Answer = Callable[[tuple[object, ...]], None]
"""Takes the answer to a question: `("ok", value)` or `("error", number of the code in TritonError, text)`."""


class ModelServices:
    """Serves the model of one instance, in a process or a thread. Use it on the event loop's thread.

    Attributes:
        calls: The requests that the model makes.
    """

    def __init__(self, server: ServerServices) -> None:
        self.calls = ModelCalls(server.models, server.caller)
        self._models = server.models
        self._name = server.caller.model
        self._version = server.caller.version
        self._server = server
        self._all_metrics = server.metrics
        self._metrics = MetricHolder(server.metrics)
        self._tasks: set[asyncio.Task[None]] = set()

    def control(self, action: str, name: str, options: Mapping[str, Any], answer: Answer, *, is_ready: bool) -> None:
        """Load or unload a model, or check whether it is ready; the answer may come later.

        Args:
            action: "load", "unload" or "ready".
            options: "config" text or None, "files" bytes by path, "unload_dependents" bool, "version" text.
            is_ready: Whether the calling model is initialized; before that, it may not load or unload.
        """
        if action != "ready" and not is_ready:
            _refuse(answer, unavailable("models are loaded and unloaded in the 'execute' function only"))
        elif len(self._tasks) >= CONTROLS_OPEN_MAX:
            _refuse(answer, unavailable(f"{CONTROLS_OPEN_MAX} control requests are open already"))
        else:
            task = asyncio.get_running_loop().create_task(self._control(action, name, options, answer))
            self._tasks.add(task)  # the loop itself has only weak references to tasks
            task.add_done_callback(self._tasks.discard)

    def update(self, update: tuple[Any, ...], answer: Answer) -> None:
        """Apply an update of metrics; only the declaration of a family and the question for a value are answered.

        Raises:
            ValueError: Its kind is unknown.
        """
        kind, number, *arguments = update
        metrics = self._metrics
        match kind:
            case "add":
                metrics.increase(number, *arguments)
            case "set":
                metrics.set(number, *arguments)
            case "observe":
                metrics.observe(number, *arguments)
            case "merge":
                metrics.merge(number, *arguments)
            case "metric":
                try:
                    metrics.add(number, *arguments)
                except ServingError as error:  # the model does not wait for an answer; its value is not shown
                    _log.warning("model '%s': %s", self._name, error)
            case "family":
                _answer(answer, partial(metrics.declare, number, *arguments))
            case "value":
                _answer(answer, partial(metrics.value, *arguments))
            case "drop_family":
                metrics.drop_family(number)
            case _:
                raise ValueError(f"there is no update of metrics of kind {kind!r}")

    def raised(self, instance: str, request_ids: Sequence[str], traceback: str) -> None:
        """Log an exception of `execute`."""
        self._server.exceptions.note(self._server.caller, instance, request_ids, traceback)

    def ended(self) -> None:
        """The model has ended: cancel its calls and remove its metrics."""
        self.calls.cancel_all()
        self._metrics.drop_all()
        self._metrics = MetricHolder(self._all_metrics)

    async def _is_model_ready(self, name: str, version: str) -> bool:
        if self._models is None:
            return False
        if name == self._name and version in ("", self._version):
            return True  # it is running: its own `is_ready` could not run before this returns
        try:
            return await self._models.model_ready(name, version)
        except ServingError as error:
            if error.code is Code.NOT_FOUND:
                return False
            raise

    async def _control(self, action: str, name: str, options: Mapping[str, Any], answer: Answer) -> None:
        """Run a control request and answer it. It continues if the calling model ends."""
        value = None
        try:
            if action == "ready":
                value = await self._is_model_ready(name, options.get("version") or "")
            elif self._models is None:
                raise unsupported(f"model '{name}' cannot be controlled: there are no other models here")
            elif action == "load":
                await self._models.load_model(name, options.get("config"), options.get("files") or None)
            else:
                await self._models.unload_model(name, bool(options.get("unload_dependents")))
        except ServingError as error:
            _refuse(answer, error)
        except Exception as error:
            _log.exception("model '%s' failed to %s '%s'", self._name, action, name)
            _refuse(answer, internal(f"{action} of model '{name}' failed: {type(error).__name__}"))
        else:
            answer(("ok", value))


class WorkerServices(ModelServices):
    """Serves the worker of one instance.

    Args:
        work_of: Returns the running batch with a number, None if it does not run.
    """

    def __init__(self, server: ServerServices, work_of: Callable[[int], Work | None]) -> None:
        super().__init__(server)
        self._work_of = work_of

    def take(self, message: Incoming, link: WorkerLink, *, is_ready: bool) -> None:
        """Handle a message of the worker.

        Args:
            is_ready: Whether the model is initialized; before that, it may not call others.

        Raises:
            ChannelError: It is unknown or malformed. LookupError, TypeError, ValueError and ServingError mean the same.
        """
        header = message.header
        match header[0]:
            case "call":
                self._call(message, link, is_ready)
            case "call_cancel":
                self.calls.cancel(header[1])
            case "call_stop":
                self.calls.cancel(header[1], softly=True)
            case "release":
                link.handle_lists(header[1], header[2])
            case "control":
                _, number, action, name, options = header
                self.control(action, name, options, partial(_send_answer, link, number), is_ready=is_ready)
            case "metrics":
                for update in header[1]:
                    self.update(update, partial(_send_answer, link, update[1]))
            case kind:
                raise ChannelError(f"there is no message of kind {kind!r}")

    def _call(self, message: Incoming, link: WorkerLink, is_ready: bool) -> None:
        _, call, batch, model, version, allows_decoupled, on_gpu, fields, tensors, released, freed = message.header
        kind = DeviceRequest if on_gpu else InferRequest
        request = made_request((model, version), fields, found_tensors(tensors, message, link), kind)
        link.handle_lists(released, freed)

        def reply(outcome: Outcome, final: bool) -> None:
            if not final and link.process.unsent > REPLIES_UNSENT_MAX:
                self.calls.cancel(call, unavailable(f"the responses of model '{model}' were not read fast enough"))
            else:
                _send_outcome(link, call, outcome, final, on_gpu=bool(on_gpu))

        if not is_ready:
            reply(unavailable("BLS is only supported during the 'execute' function."), True)
            return
        work = self._work_of(batch)
        self.calls.start(call, request, reply, work=work, trace=str(fields[7]), allows_decoupled=bool(allows_decoupled))


class Readiness:
    """Asks the model of one instance whether it is ready. Concurrent callers share one question.

    Use it on the event loop's thread.

    Args:
        send: Sends a question with a number to the model.
    """

    def __init__(self, name: str, send: Callable[[int], None]) -> None:
        self._name = name
        self._send = send
        self._number = 0
        self._answer: asyncio.Future[bool | str] | None = None  # of the open question
        self._logged = ""

    async def ask(self) -> bool:
        """Return the model's answer; False after an error or timeout."""
        answer = self._answer
        if answer is None:
            self._number += 1
            answer = self._answer = asyncio.get_running_loop().create_future()
            self._send(self._number)
        try:
            async with asyncio.timeout(IS_READY_S_MAX):
                said = await asyncio.shield(answer)
        except TimeoutError:
            said = f"it has not answered within {IS_READY_S_MAX:g} s"
        reason = said if isinstance(said, str) else ""
        if reason and reason != self._logged:  # callers ask every few seconds
            _log.warning("is_ready of '%s': %s", self._name, reason)
        self._logged = reason
        return said is True

    def answered(self, number: int, said: bool | str) -> None:
        """Handle the model's answer: whether it is ready, or an error text."""
        if number == self._number:
            self._close(said)

    def gone(self) -> None:
        """Answer False: the model has ended."""
        self._close(False)

    def _close(self, said: bool | str) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.set_result(said)


def _send_outcome(link: WorkerLink, call: int, outcome: Outcome, final: bool, *, on_gpu: bool) -> None:
    if not link.is_open:
        return
    outgoing = link.outgoing()
    try:
        link.send(("reply", call, encode_outcome(outcome, outgoing, on_gpu), final), outgoing)
    except (ChannelError, OSError, TypeError, ValueError) as error:
        outgoing.withdraw()
        failure = internal(f"the response of the model cannot be handed to its caller: {error}")
        link.send(("reply", call, encode_error(failure), final))


def _send_answer(link: WorkerLink, number: int, value: tuple[object, ...]) -> None:
    if link.is_open:
        link.process.send(("answer", number, value))


def _answer(answer: Answer, work: Callable[[], float | None]) -> None:
    try:
        value = work()
    except ServingError as error:
        _refuse(answer, error)
    else:
        answer(("ok", value))


def _refuse(answer: Answer, error: ServingError) -> None:
    answer(("error", *encode_error(error)))
