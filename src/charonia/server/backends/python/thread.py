"""One instance of a Python model that runs in a thread of the server, for models that are trusted.

The model has the same API as in a worker process; tensors are passed without copies. The actions of
the model are sent, in order, to the event loop, which owns the state of the server.
"""

import asyncio
import itertools
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from charonia.core.dtypes import BY_WIRE
from charonia.core.errors import ServingError, internal, unavailable
from charonia.core.request import DeviceRequest, InferRequest
from charonia.core.response import Outcome
from charonia.core.tensor import Array, DeviceTensor, Tensor
from charonia.server.backends.api import BatchSink, Outputs, Result
from charonia.server.backends.batch import ModelShapes
from charonia.server.backends.python.worker.errors import describe, traced
from charonia.server.backends.python.worker.host import Inbox, ModelBatch, ModelCall, value_of
from charonia.server.backends.python.worker.runner import PythonModelRunner
from charonia.server.backends.python.worker.tensor import GpuTensor, received
from charonia.server.backends.python.worker.tensor import Tensor as ModelTensor
from charonia.server.backends.workers.codec import (
    decode_error,
    encode_error,
    log_of_model,
    made_request,
    request_fields,
)
from charonia.server.backends.workers.services import ModelServices, Readiness, ServerServices, Work
from charonia.server.channel.cuda_ipc import finish
from charonia.server.channel.datatypes import TritonModelException, as_bytes
from charonia.server.machine.cores import bound_to


def result_of(result: tuple[Any, ...] | None, name: str) -> Result | None:
    """Return a result of a model for the engine; None stays None."""
    if result is None:
        return None
    if result[0] >= 0:
        return decode_error(*result)
    try:
        return Outputs([taken(tensor) for tensor in result[1]], result[2] or None)
    except Exception as error:  # elements of a string tensor may be anything
        return internal(f"a response of model '{name}' cannot be sent: {error}")


def received_from(outcome: Outcome, on_gpu: bool) -> tuple[Any, ...] | None:
    """Return the outcome of a call for the host; with `on_gpu`, tensors may stay in GPU memory."""
    if outcome is None:
        return None
    try:
        if isinstance(outcome, ServingError):
            raise outcome
        outputs = [shown(tensor, on_gpu) for tensor in outcome.outputs]
    except ServingError as error:
        return encode_error(error)
    return (-1, outputs, outcome.parameters or {})


class _OutputTensor:
    """A model's tensor in GPU memory, for the server."""

    def __init__(self, tensor: GpuTensor) -> None:
        finish(tensor._source)  # synchronize in the model's thread: other threads read it
        self._tensor = tensor

    @property
    def native(self) -> object:
        return self._tensor._source

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._tensor.shape())

    def to_host(self) -> Array:
        return self._tensor._array


def shown(tensor: Tensor, on_gpu: bool) -> ModelTensor:
    """Return a tensor of the server for the model: a read-only view, as it may have other readers."""
    if on_gpu and isinstance(tensor, DeviceTensor):
        return GpuTensor(tensor.name, tensor.datatype.wire, tensor.content.native)
    array = tensor.array.view()
    array.flags.writeable = False
    return received(tensor.name, tensor.datatype.wire, array)


def taken(tensor: ModelTensor) -> Tensor:
    """Return a tensor of the model for the server."""
    if isinstance(tensor, GpuTensor):
        return DeviceTensor(tensor._name, BY_WIRE[tensor._datatype], _OutputTensor(tensor))
    array = tensor._array
    if tensor._datatype == "BYTES":
        array = as_bytes(array)
    elif not array.flags.c_contiguous:
        array = array.copy(order="C")
    return Tensor(tensor._name, BY_WIRE[tensor._datatype], array)


_log = logging.getLogger(__name__)

FINALIZE_S_MAX = 10.0
"""Time limit for the running batch and `finalize`."""

RESPONSES_UNTAKEN_MAX = 1024
"""Responses through senders that may wait for the event loop; a thread that sends more blocks."""

_GONE = "the server has gone"


Tell = Callable[..., None]
"""Runs an action on the event loop with these arguments. Thread-safe."""


class _PendingBatch(Work):
    """A batch of a thread."""

    __slots__ = ("batch", "is_done")

    def __init__(
        self, sink: BatchSink, requests: Sequence[InferRequest], shapes: ModelShapes | None, batch: ModelBatch
    ) -> None:
        super().__init__(sink, requests, shapes)
        self.batch = batch
        self.is_done = False


class ThreadInstance:
    """An `AsyncInstance` in a thread.

    Args:
        load: Path of the model's file, folders of version and model, and the arguments of `initialize`.
        start_s_max: Time that the model has to initialize, 0 for no limit.
        is_decoupled: Whether a request may have any number of responses.
        cores: Cores that it runs on, empty for any.
        takes_gpu: Whether it gets tensors of GPUs as they are.
        shapes: `reshape` of the configuration, None without.
    """

    def __init__(
        self,
        name: str,
        load: tuple[str, str, str, dict[str, str]],
        *,
        output_names: tuple[str, ...],
        start_s_max: float,
        server: ServerServices,
        is_decoupled: bool = False,
        cores: Sequence[int] = (),
        takes_gpu: bool = False,
        shapes: ModelShapes | None = None,
    ) -> None:
        self.name = name
        self._shapes = shapes
        self._cores = cores
        self._start_s_max = start_s_max
        self._is_decoupled = is_decoupled
        self._load = load
        self._output_names = output_names
        self._takes_gpu = takes_gpu
        self.services = ModelServices(server)
        self._busy_poll = server.busy_poll
        self._pending: dict[int, _PendingBatch] = {}
        self._batches = 0
        loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._is_closed = False
        self._has_is_ready = False
        self._tell = tell = partial(_tell, loop)
        self._queue: Inbox[_PendingBatch | int | None] = Inbox()
        self._runner = PythonModelRunner(_ThreadHost(self, tell), shares_process=True)
        self._readiness = Readiness(name, self._queue.put)

    def __repr__(self) -> str:
        """Return e.g. `<ThreadInstance 'm_0_0' running batches=2>`."""
        state = "running" if self._started.done() else "starting"
        state = "ended" if self._ended.done() else "closing" if self._is_closed else state
        return f"<ThreadInstance '{self.name}' {state} batches={len(self._pending)}>"

    async def open(self) -> None:
        with bound_to(self._cores):
            threading.Thread(target=self._run, name=self.name, daemon=True).start()
        try:
            async with asyncio.timeout(self._start_s_max or None):
                await asyncio.shield(self._started)
        except TimeoutError:
            self._close()
            raise internal(
                f"instance '{self.name}' failed to start: it did not initialize within {self._start_s_max:g} s",
                hint="its thread cannot be ended: it continues until it returns, or until the server is restarted",
            ) from None
        except BaseException:
            self._close()
            raise

    def start(self, requests: Sequence[InferRequest], sink: BatchSink) -> None:
        if self._is_closed:
            now = time.monotonic_ns()
            sink.finish(now, now, unavailable(f"instance '{self.name}' is closed"))
            return
        self._batches += 1
        pending = _PendingBatch(sink, requests, self._shapes, ModelBatch(self._batches, len(requests)))
        self._pending[self._batches] = pending
        if self._busy_poll is not None:
            self._busy_poll.thread_runs()
        self._queue.put(pending)

    def cancel(self, sink: BatchSink, index: int) -> None:
        pending = next((h for h in self._pending.values() if h.sink is sink), None)
        if pending is None:
            return
        pending.batch.cancel(index)
        if all(sink.is_cancelled(i) for i in range(len(pending.requests))):
            self.services.calls.cancel_batch(sink)
            self._discard_if_finished(pending)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    async def aclose(self) -> None:
        """Let the model finalize and the thread end; a thread that does not return is abandoned."""
        self._close()
        await asyncio.wait([self._ended], timeout=FINALIZE_S_MAX)
        if not self._ended.done():
            _log.warning("%s did not finalize within %g s; its thread goes on", self.name, FINALIZE_S_MAX)
        self.services.ended()
        self._readiness.gone()

    async def is_ready(self) -> bool:
        """Return whether the model, if it has `is_ready`, reports that it is ready."""
        if self._is_closed:
            return False
        return not self._has_is_ready or await self._readiness.ask()

    # Actions of the thread and its host, on the event loop

    def begin(self, call: ModelCall, request: InferRequest) -> None:
        pending = self._pending.get(call.batch)
        work = pending if pending is not None and not pending.is_done else None
        calls = self.services.calls

        def reply(outcome: Outcome, final: bool) -> None:
            overrun = "" if final else call.overrun()
            if overrun:
                calls.cancel(call.number, unavailable(overrun))
            else:
                call.inbox.put((received_from(outcome, call.on_gpu), final))

        trace = str(call.fields[7])
        calls.start(call.number, request, reply, work=work, trace=trace, allows_decoupled=call.decoupled)

    def respond(self, number: int, index: int, result: Result | None, final: bool) -> None:
        """Handle a response that the model sends through a response sender."""
        pending = self._pending.get(number)
        if pending is None:
            return
        if final or not self._is_decoupled:
            pending.record_last_response(index)
        pending.sink.respond(index, pending.answered(result), final)
        self._discard_if_finished(pending)

    def _done(
        self, pending: _PendingBatch, results: Sequence[Result | None], input_end: int, output_start: int
    ) -> None:
        pending.is_done = True
        if self._busy_poll is not None:
            self._busy_poll.thread_done()
        is_open, error = pending.deliver(results, self.name)
        if not is_open:
            self._pending.pop(pending.batch.number, None)
        pending.sink.finish(input_end, output_start, error, leaves_open=is_open)

    def _record_start(self, started: Mapping[str, object] | ServingError) -> None:
        """Handle the capabilities of the initialized model, or why it failed to initialize."""
        if self._started.done():
            return
        if isinstance(started, ServingError):
            self._started.set_exception(started)
        else:
            self._has_is_ready = bool(started.get("has_is_ready"))
            self._started.set_result(None)

    def _discard_if_finished(self, pending: _PendingBatch) -> None:
        if pending.is_done and not pending.is_open():
            self._pending.pop(pending.batch.number, None)

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._queue.put(None)

    # In the thread: initializes the model, runs what is queued, finalizes it

    def _run(self) -> None:
        try:
            try:
                capabilities = self._runner.initialize(*self._load, self._is_decoupled)
            except BaseException as error:  # sys.exit must not end the server
                reason = internal(f"instance '{self.name}' failed to start: {describe(error)}")
                self._tell(self._record_start, reason)
                return
            self._tell(self._record_start, capabilities)
            while (task := self._next_task()) is not None:
                if isinstance(task, int):
                    self._report_readiness(task)
                else:
                    self._execute(task)
                del task
            try:
                self._runner.finalize()
            except BaseException as error:
                _log.error("finalize of '%s' failed: %s", self.name, describe(error))
            self._tell(self._ended.set_result, None)
        except TritonModelException:  # the event loop has ended before the thread
            _log.debug("'%s' ends after the server", self.name)

    def _next_task(self) -> _PendingBatch | int | None:
        while not self._queue.items:
            try:
                self._runner.wait(self._queue)
            except BaseException as error:  # sys.exit in a task of the model must not end the server
                _log.error("a task of '%s' interrupted its event loop: %s", self.name, describe(error))
                # The task keeps the traceback, whose frames keep the task, and would keep the senders of its requests.
                traceback.clear_frames(error.__traceback__)
        return self._queue.items.popleft()

    def _execute(self, pending: _PendingBatch) -> None:
        input_end = time.monotonic_ns()
        results: list[Result | None]
        try:
            sent = [
                (request_fields(request, self._output_names), self._inputs(pending.batch, index, request))
                for index, request in enumerate(pending.requests)
            ]
            returned, output_start = self._runner.execute(pending.batch, sent)
            results = [result_of(result, self.name) for result in returned]
        except BaseException as error:  # sys.exit must not end the server
            output_start = time.monotonic_ns()
            ids = [request.id for request in pending.requests]
            self._tell(self.services.raised, self.name, ids, traced(error))
            text = f"Failed to process the request(s) for model '{self.name}', message: {describe(error)}"
            results = [internal(text)] * len(pending.requests)
        self._tell(self._done, pending, results, input_end, output_start)

    def _inputs(self, batch: ModelBatch, index: int, request: InferRequest) -> list[ModelTensor]:
        """Return the inputs of a request; if one is lost, the request is refused."""
        try:
            return [shown(tensor, self._takes_gpu) for tensor in request.inputs.values()]
        except ServingError as error:
            batch.refused = batch.refused or {}
            batch.refused[index] = encode_error(error)
            return []

    def _report_readiness(self, number: int) -> None:
        try:
            readiness = self._runner.readiness()
        except BaseException as error:  # sys.exit must not end the server
            readiness = describe(error)
        self._tell(self._readiness.answered, number, readiness)


class _ThreadHost:
    """The `Host` of a model in a thread."""

    def __init__(self, instance: ThreadInstance, tell: Tell) -> None:
        self.name = instance.name
        self._instance = instance
        self._tell = tell
        self._numbers = itertools.count(1)
        self._loop_thread = threading.get_ident()
        self._untaken = threading.Semaphore(RESPONSES_UNTAKEN_MAX)

    def log(self, level: int, message: str, file: str, line: int) -> None:
        log_of_model(self.name, level, message, file, line)

    def raised(self, request_ids: list[str], traceback: str) -> None:
        self._tell(self._instance.services.raised, self.name, request_ids, traceback)

    def respond(self, batch: ModelBatch, index: int, result: Any, final: bool) -> None:
        taken = result_of(result, self.name)
        waits = threading.get_ident() != self._loop_thread  # which sends for dropped senders
        if waits:
            self._untaken.acquire()
        self._tell(self._take, batch.number, index, taken, final, waits)

    def respond_together(self, answers: Iterable[Any]) -> None:
        for answer in answers:
            self.respond(*answer)

    def _take(self, number: int, index: int, result: Result | None, final: bool, has_waited: bool) -> None:
        if has_waited:
            self._untaken.release()
        self._instance.respond(number, index, result, final)

    def poll(self) -> None:
        """Do nothing: the event loop notes cancellations itself."""

    def begin(self, call: ModelCall) -> None:
        call.number = next(self._numbers)
        inputs = [taken(tensor) for tensor in call.inputs]
        kind = DeviceRequest if call.on_gpu else InferRequest
        request = made_request((call.model_name, call.model_version), call.fields, inputs, kind)
        self._tell(self._instance.begin, call, request)

    def end(self, call: ModelCall, *, softly: bool = False) -> None:
        self._tell(partial(self._instance.services.calls.cancel, call.number, softly=softly))

    def wait(self, inbox: Inbox[Any]) -> None:
        inbox.wait()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Do nothing: arrivals wake the loop by themselves."""

    def control(self, action: str, model_name: str, options: dict[str, object]) -> Any:
        answer: Inbox[tuple[Any, ...]] = Inbox()
        self._tell(partial(self._instance.services.control, action, model_name, options, answer.put, is_ready=True))
        return _value(answer)

    def make_number(self) -> int:
        return next(self._numbers)

    def ask_metrics(self, update: tuple[Any, ...]) -> Any:
        answer: Inbox[tuple[Any, ...]] = Inbox()
        self._tell(self._instance.services.update, update, answer.put)
        return _value(answer)

    def metrics(self, updates: list[tuple[object, ...]]) -> None:
        for update in updates:
            self._tell(self._instance.services.update, update, lambda _: None)  # the model does not wait

    def later(self, action: Callable[[], None]) -> None:
        try:
            self._tell(action)
        except TritonModelException:  # the finalizer of something that outlives the server
            _log.debug("'%s' lets go of something after the server", self.name)


def _tell(loop: asyncio.AbstractEventLoop, action: Callable[..., None], *arguments: object) -> None:
    """Run an action on the event loop."""
    try:
        loop.call_soon_threadsafe(action, *arguments)
    except RuntimeError as error:  # closed, under a model that outlived the shutdown's time limit
        raise TritonModelException(_GONE) from error


def _value(answer: Inbox[tuple[Any, ...]]) -> Any:
    answer.wait()
    return value_of(answer.items.popleft())
