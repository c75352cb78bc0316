"""One instance of a Python model that runs in a thread of the server, for models that are trusted.

The model has the API that it has in a worker process. Tensors are handed over as they are: the model's inputs are views
that cannot be written to, of what the server holds, and the server holds the model's outputs. What the model does on
behalf of the event loop, which owns the state of the server, is told to the loop, in the order in which it was done.
"""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np

from charonia.core.calls import Outcome
from charonia.core.dtypes import BY_WIRE
from charonia.core.errors import ServingError, internal, unavailable
from charonia.core.request import DeviceRequest, InferRequest
from charonia.core.tensor import Array, DeviceTensor, Tensor
from charonia.server.backends.api import BatchSink, Outputs, Result
from charonia.server.backends.python.calls import Work
from charonia.server.backends.python.codec import decode_error, encode_error, made_request, request_fields
from charonia.server.backends.python.model_log import log_of_model
from charonia.server.backends.python.readiness import Readiness
from charonia.server.backends.python.services import ModelServices, Server
from charonia.server.backends.python.worker.charonia_errors import TritonError, TritonModelException, describe
from charonia.server.backends.python.worker.charonia_gpu import finish
from charonia.server.backends.python.worker.charonia_host import Batch, Call, Inbox
from charonia.server.backends.python.worker.charonia_responses import InferenceResponse
from charonia.server.backends.python.worker.charonia_runner import ModelRunner
from charonia.server.backends.python.worker.charonia_tensor import GpuTensor, received
from charonia.server.backends.python.worker.charonia_tensor import Tensor as ModelTensor
from charonia.server.machine.cores import bound_to

_log = logging.getLogger(__name__)

FINALIZE_S_MAX = 10.0
"""Time that a model has for `finalize`, and for what it still computes."""

RESPONSES_UNTAKEN_MAX = 1024
"""Responses through senders that the event loop has not taken; a thread that sends more waits."""

_GONE = "the server has gone"


class _Handed(Work):
    """A batch that was handed over, and that is not finished or has left requests open.

    Attributes:
        batch: It as the model's end knows it.
        over: Indices of requests that have their last response.
        is_done: Whether `execute` has returned.
    """

    __slots__ = ("batch", "is_done", "over")

    def __init__(self, sink: BatchSink, requests: Sequence[InferRequest], batch: Batch) -> None:
        super().__init__(sink, requests)
        self.batch = batch
        self.over: set[int] = set()
        self.is_done = False

    def is_open(self) -> bool:
        """Return whether somebody waits for a request without a last response."""
        return any(not (i in self.over or self.sink.is_cancelled(i)) for i in range(len(self.requests)))


class ThreadInstance:
    """An `AsyncInstance` in a thread.

    Args:
        name: Instance name.
        load: Path of the model's file, folders of version and model, and the arguments of `initialize`.
        output_names: All outputs of the model.
        start_s_max: Time that the model has to initialize, 0 for no limit.
        server: What the model may use of the server.
        is_decoupled: Whether a request may have any number of responses.
        cores: Cores that it runs on, empty for any.
        takes_gpu: Whether it gets tensors of GPUs as they are.
    """

    def __init__(
        self,
        name: str,
        load: tuple[str, str, str, dict[str, str]],
        *,
        output_names: tuple[str, ...],
        start_s_max: float,
        server: Server,
        is_decoupled: bool = False,
        cores: Sequence[int] = (),
        takes_gpu: bool = False,
    ) -> None:
        self.name = name
        self._cores = cores
        self._takes_gpu = takes_gpu
        self._load = load
        self._output_names = output_names
        self._start_s_max = start_s_max
        self._is_decoupled = is_decoupled
        self._loop = asyncio.get_running_loop()
        self._services = ModelServices(server)
        self._busy_poll = server.busy_poll
        self._runner = ModelRunner(_ThreadHost(self), shares_process=True)
        self._queue: SimpleQueue[_Handed | int | None] = SimpleQueue()  # a number asks whether the model is ready
        self._readiness = Readiness(name, self._queue.put)
        self._has_is_ready = False
        self._handed: dict[int, _Handed] = {}
        self._batches = 0
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    async def open(self) -> None:
        """Start the thread and wait until the model is initialized.

        Raises:
            ServingError: It could not be; the message says why.
        """
        with bound_to(self._cores):
            self._thread.start()
        try:
            async with asyncio.timeout(self._start_s_max or None):
                await asyncio.shield(self._started)
        except TimeoutError:
            self._close()
            raise internal(
                f"instance '{self.name}' failed to start: it did not initialize within {self._start_s_max:g} s",
                hint="its thread cannot be ended: it goes on until it returns, or until the server is started again",
            ) from None
        except BaseException:
            self._close()
            raise

    def start(self, requests: Sequence[InferRequest], sink: BatchSink) -> None:
        """Begin to run the requests as one batch."""
        if self._is_closed:
            now = time.monotonic_ns()
            sink.finish(now, now, unavailable(f"instance '{self.name}' is closed"))
            return
        self._batches += 1
        handed = _Handed(sink, requests, Batch(self._batches, len(requests)))
        self._handed[self._batches] = handed
        if self._busy_poll is not None:
            self._busy_poll.thread_runs()
        self._queue.put(handed)

    def cancel(self, sink: BatchSink, index: int) -> None:
        """Tell the model that the caller of a request has gone; what it calls for nobody is given up."""
        handed = next((h for h in self._handed.values() if h.sink is sink), None)
        if handed is None:
            return
        handed.batch.cancelled.add(index)
        if all(sink.is_cancelled(i) for i in range(len(handed.requests))):
            self._services.calls.cancel_batch(sink)
            self._forget_if_over(handed)

    async def aclose(self) -> None:
        """Let the model finalize and the thread end; one that does not return is left to itself."""
        self._close()
        await asyncio.wait([self._ended], timeout=FINALIZE_S_MAX)
        if not self._ended.done():
            _log.warning("%s did not finalize within %g s; its thread goes on", self.name, FINALIZE_S_MAX)
        self._services.ended()
        self._readiness.gone()

    async def is_ready(self) -> bool:
        """Return whether the model does not say that it is not ready."""
        if self._is_closed:
            return False
        return not self._has_is_ready or await self._readiness.ask()

    def tell(self, action: Callable[..., None], *arguments: object) -> None:
        """Have an action run on the event loop. Callable from any thread.

        Raises:
            TritonModelException: There is no event loop any more.
        """
        try:
            self._loop.call_soon_threadsafe(action, *arguments)
        except RuntimeError as error:  # closed, under a model that outlived the shutdown's time limit
            raise TritonModelException(_GONE) from error

    # On the event loop

    def begin(self, call: Call, request: InferRequest) -> None:
        """Make a call of the model."""
        handed = self._handed.get(call.batch)
        work = handed if handed is not None and not handed.is_done else None
        calls = self._services.calls

        def reply(outcome: Outcome, final: bool) -> None:
            overrun = "" if final else call.overrun()
            if overrun:
                calls.fail(call.number, unavailable(overrun))
            else:
                call.inbox.put((_response_of(outcome, call.on_gpu), final))

        trace = str(call.fields[7])
        calls.start(call.number, request, reply, work=work, trace=trace, allows_decoupled=call.decoupled)

    def end(self, number: int) -> None:
        """The model gives a call up."""
        self._services.calls.cancel(number)

    def control(
        self, action: str, name: str, options: dict[str, object], answer: Callable[[tuple[object, ...]], None]
    ) -> None:
        """Load or unload a model, or say whether it is ready, for the model."""
        self._services.control(action, name, options, answer, is_ready=True)

    def update(self, updates: Iterable[tuple[Any, ...]], answer: Callable[[tuple[object, ...]], None]) -> None:
        """Take updates of the model's metrics."""
        for update in updates:
            self._services.update(update, answer)

    def respond(self, number: int, index: int, result: Result | None, final: bool) -> None:
        """Take what the model sends to a request through its sender."""
        handed = self._handed.get(number)
        if handed is None:
            return
        if final or not self._is_decoupled:
            handed.over.add(index)
        handed.sink.respond(index, result, final)
        self._forget_if_over(handed)

    def _done(self, handed: _Handed, results: Sequence[Result | None], input_end: int, output_start: int) -> None:
        handed.is_done = True
        if self._busy_poll is not None:
            self._busy_poll.thread_done()
        for index, result in enumerate(results):
            if result is not None:
                handed.over.add(index)
                handed.sink.respond(index, result, True)
        self._forget_if_over(handed)
        handed.sink.finish(input_end, output_start, leaves_open=handed.batch.number in self._handed)

    def _forget_if_over(self, handed: _Handed) -> None:
        if handed.is_done and not handed.is_open():
            self._handed.pop(handed.batch.number, None)

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._queue.put(None)

    def _start_ended(self, started: Mapping[str, object] | ServingError) -> None:
        if self._started.done():
            return
        if isinstance(started, ServingError):
            self._started.set_exception(started)
        else:
            self._has_is_ready = bool(started.get("has_is_ready"))
            self._started.set_result(None)

    def _thread_ended(self) -> None:
        self._ended.set_result(None)

    # In the model's thread

    def _run(self) -> None:
        try:
            try:
                capabilities = self._runner.initialize(*self._load, self._is_decoupled)
            except BaseException as error:  # sys.exit must not end the server
                reason = internal(f"instance '{self.name}' failed to start: {describe(error)}")
                self.tell(self._start_ended, reason)
                return
            self.tell(self._start_ended, capabilities)
            while (task := self._queue.get()) is not None:
                if isinstance(task, int):
                    self._say_whether_ready(task)
                else:
                    self._execute(task)
                del task
            try:
                self._runner.finalize()
            except BaseException as error:
                _log.error("finalize of '%s' failed: %s", self.name, describe(error))
            self.tell(self._thread_ended)
        except TritonModelException:  # nobody waits for the end of a thread that the event loop did not see end
            _log.debug("'%s' ends after the server", self.name)

    def _execute(self, handed: _Handed) -> None:
        input_end = time.monotonic_ns()
        results: list[Result | None]
        try:
            sent = [
                (request_fields(request, self._output_names), self._inputs(handed.batch, index, request))
                for index, request in enumerate(handed.requests)
            ]
            given, output_start = self._runner.execute(handed.batch, sent)
            results = [result_of(result, self.name) for result in given]
        except BaseException as error:  # sys.exit must not end the server
            output_start = time.monotonic_ns()
            text = f"Failed to process the request(s) for model '{self.name}', message: {describe(error)}"
            results = [internal(text)] * len(handed.requests)
        self.tell(self._done, handed, results, input_end, output_start)

    def _inputs(self, batch: Batch, index: int, request: InferRequest) -> list[ModelTensor]:
        """Return the inputs of a request; one that cannot be had refuses the request."""
        try:
            return [_shown(tensor, self._takes_gpu) for tensor in request.inputs.values()]
        except ServingError as error:
            batch.refused = batch.refused or {}
            batch.refused[index] = encode_error(error)
            return []

    def _say_whether_ready(self, number: int) -> None:
        try:
            said = self._runner.readiness()
        except BaseException as error:  # sys.exit must not end the server
            said = describe(error)
        self.tell(self._readiness.answered, number, said)


class _ThreadHost:
    """The `Host` of a model in a thread."""

    def __init__(self, instance: ThreadInstance) -> None:
        self.name = instance.name
        self._instance = instance
        self._numbers = itertools.count(1)
        self._loop_thread = threading.get_ident()
        self._room = threading.Semaphore(RESPONSES_UNTAKEN_MAX)

    def log(self, level: int, message: str, file: str, line: int) -> None:
        log_of_model(self.name, level, message, file, line)

    def respond(self, batch: Batch, index: int, result: Any, final: bool) -> None:
        taken = result_of(result, self.name)
        waits = threading.get_ident() != self._loop_thread  # which sends for senders that were dropped
        if waits:
            self._room.acquire()
        self._instance.tell(self._take, batch.number, index, taken, final, waits)

    def _take(self, number: int, index: int, result: Result | None, final: bool, has_waited: bool) -> None:
        if has_waited:
            self._room.release()
        self._instance.respond(number, index, result, final)

    def poll(self) -> None:
        """Do nothing: the event loop notes cancellations itself."""

    def begin(self, call: Call) -> None:
        call.number = next(self._numbers)
        inputs = [_taken(tensor) for tensor in call.inputs]
        kind = DeviceRequest if call.on_gpu else InferRequest
        request = made_request((call.model_name, call.model_version), call.fields, inputs, kind)
        self._instance.tell(self._instance.begin, call, request)

    def end(self, call: Call) -> None:
        self._instance.tell(self._instance.end, call.number)

    def wait(self, inbox: Inbox[Any]) -> None:
        inbox.wait()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Do nothing: what arrives wakes the loop by itself."""

    def control(self, action: str, model_name: str, options: dict[str, object]) -> Any:
        answer: Inbox[tuple[Any, ...]] = Inbox()
        self._instance.tell(self._instance.control, action, model_name, options, answer.put)
        return _value(answer)

    def make_number(self) -> int:
        return next(self._numbers)

    def declare_family(self, number: int, name: str, description: str, kind: str) -> None:
        answer: Inbox[tuple[Any, ...]] = Inbox()
        self._instance.tell(self._instance.update, [("family", number, name, description, kind)], answer.put)
        _value(answer)

    def metrics(self, updates: list[tuple[object, ...]]) -> None:
        self._instance.tell(self._instance.update, updates, _ignore)

    def later(self, action: Callable[[], None]) -> None:
        try:
            self._instance.tell(action)
        except TritonModelException:  # the finalizer of something that outlives the server
            _log.debug("'%s' lets go of something after the server", self.name)


def result_of(result: tuple[Any, ...] | None, name: str) -> Result | None:
    """Return a result of a model as the engine takes it; None stays None."""
    if result is None:
        return None
    if result[0] >= 0:
        return decode_error(*result)
    try:
        return Outputs([_taken(tensor) for tensor in result[1]], result[2] or None)
    except Exception as error:  # elements of a string tensor may be anything
        return internal(f"a response of model '{name}' cannot be sent: {error}")


def _response_of(outcome: Outcome, on_gpu: bool) -> InferenceResponse | None:
    """Return the outcome of a call as the model reads it; `on_gpu`: tensors may stay in the memory of a GPU."""
    if outcome is None:
        return None
    try:
        if isinstance(outcome, ServingError):
            raise outcome
        outputs = [_shown(tensor, on_gpu) for tensor in outcome.outputs]
    except ServingError as error:
        code, text = encode_error(error)
        return InferenceResponse(error=TritonError(text, code))
    response = InferenceResponse(outputs)
    response._parameters = outcome.parameters or {}  # type: ignore[assignment] # as a worker gets them
    return response


def _value(answer: Inbox[tuple[Any, ...]]) -> Any:
    answer.wait()
    outcome = answer.items.popleft()
    if outcome[0] == "error":
        raise TritonModelException(str(outcome[2]))
    return outcome[1]


def _ignore(_: tuple[object, ...]) -> None:
    """Nobody waits for the answer."""


class _Produced:
    """What a model has in the memory of a GPU, for the server."""

    def __init__(self, tensor: GpuTensor) -> None:
        finish(tensor._source)  # in the model's thread: whoever takes it looks at it from another one
        self._tensor = tensor

    @property
    def native(self) -> object:
        return self._tensor._source

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._tensor.shape())

    def to_host(self) -> Array:
        return self._tensor._array


def _shown(tensor: Tensor, on_gpu: bool) -> ModelTensor:
    """Return a tensor of the server for the model, which others may look at too and nobody may write to."""
    if on_gpu and isinstance(tensor, DeviceTensor):
        return GpuTensor(tensor.name, tensor.datatype.wire, tensor.content.native)
    array = tensor.array.view()
    array.flags.writeable = False
    return received(tensor.name, tensor.datatype.wire, array)


def _taken(tensor: ModelTensor) -> Tensor:
    """Return a tensor of the model for the server."""
    if isinstance(tensor, GpuTensor):
        return DeviceTensor(tensor._name, BY_WIRE[tensor._datatype], _Produced(tensor))
    array = tensor._array
    if tensor._datatype == "BYTES":
        array = _as_bytes(array)
    elif not array.flags.c_contiguous:
        array = array.copy(order="C")
    return Tensor(tensor._name, BY_WIRE[tensor._datatype], array)


def _as_bytes(array: Array) -> Array:
    """Return a string tensor whose elements are bytes, as a worker would send them."""
    elements = array.ravel().tolist()
    if all(type(element) is bytes for element in elements):
        return array
    encoded = np.empty(len(elements), np.object_)
    for index, element in enumerate(elements):
        is_binary = isinstance(element, (bytes, bytearray, memoryview))
        encoded[index] = bytes(element) if is_binary else str(element).encode()
    return encoded.reshape(array.shape)
