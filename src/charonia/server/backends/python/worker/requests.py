"""Requests that a model gets and makes, their responses, and how a thread or a task waits for those of other models."""

from __future__ import annotations

import contextlib
import json
import threading
from functools import partial
from typing import TYPE_CHECKING, cast

from ....channel.datatypes import TritonModelException
from .errors import ArgumentTypeError, TritonError, checked_parameters, checked_text
from .host import Binding, ModelCall
from .tensor import Tensor

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Iterable, Mapping
    from typing import Any, ClassVar

    from .errors import Parameter
    from .host import Answer, Binding, Failure, Fields, Host, Inbox, ModelBatch, ModelCall, Outputs, Result


RELEASE_ALL = 1
RELEASE_RESCHEDULE = 2
"""Release flag of requests that are not rescheduled."""

MEMORY_GPU = 2
"""Type of memory that `PreferredMemory` may ask for."""

_FLAGS_MAX = 2**32 - 1
_UINT64_MAX = 2**64 - 1


class PreferredMemory:
    """Where the outputs of a called model should be.

    With `TRITONSERVER_MEMORY_GPU` they are where the called model left them on a GPU. Without, they are in the memory
    of the CPU.
    """

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class InferenceTrace:
    """The trace that a request belongs to."""

    __slots__ = ("_context",)

    def __init__(self, context: str = "") -> None:
        self._context = context

    def get_context(self) -> str | None:
        """Return the context as JSON text with `traceparent`, or None when no spans are made for the request."""
        return self._context if '"traceparent"' in self._context else None


class InferenceRequest:
    """A request: as `execute` gets it, or one of another model."""

    __slots__ = ("__weakref__", "_batch", "_fields", "_index", "_inputs", "_on_gpu", "_sender", "_target")

    _binding: ClassVar[Binding] = Binding(None)
    """Of the model that the class is for; see `bound_to`."""

    _fields: Fields
    _inputs: list[Tensor]
    _batch: ModelBatch | None
    _index: int
    _on_gpu: bool
    _sender: InferenceResponseSender | None
    _target: tuple[str, str]
    """Model and version of a request that the model makes; only those have it."""

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Iterable[Tensor] | None = None,
        requested_output_names: Iterable[str] | None = None,
        model_name: str | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        for name, value in (
            ("model_name", model_name),
            ("requested_output_names", requested_output_names),
            ("inputs", inputs),
        ):
            if value is None:
                raise ArgumentTypeError(f"InferenceRequest: argument '{name}' is missing")
        version = _integer("model_version", model_version, -1, 2**63 - 1)
        self._target = (
            checked_text("InferenceRequest", "model_name", model_name),
            "" if version < 0 else str(version),
        )
        self._inputs = _tensors(inputs)
        if preferred_memory is not None and not isinstance(preferred_memory, PreferredMemory):
            raise ArgumentTypeError(
                f"InferenceRequest: expected a PreferredMemory, got {type(preferred_memory).__name__}"
            )
        if trace is not None and not isinstance(trace, InferenceTrace):
            raise ArgumentTypeError(f"InferenceRequest: expected an InferenceTrace, got {type(trace).__name__}")
        self._fields = (
            checked_text("InferenceRequest", "request_id", request_id),
            _correlation_id(correlation_id),
            _integer("flags", flags, 0, _FLAGS_MAX),
            _integer("timeout", timeout, 0, _UINT64_MAX),
            0,
            json.dumps(checked_parameters("InferenceRequest", parameters)),
            _names(requested_output_names),
            "" if trace is None else trace._context,
        )
        self._on_gpu = preferred_memory is not None and preferred_memory.preferred_memory_type == MEMORY_GPU
        self._batch = None
        self._index = 0
        self._sender = None

    def inputs(self) -> list[Tensor]:
        """Return the input tensors."""
        return self._inputs

    def request_id(self) -> str:
        """Return the caller's request id, "" for none."""
        return self._fields[0]

    def correlation_id(self) -> int | str:
        """Return the sequence id, 0 for none."""
        return self._fields[1]

    def flags(self) -> int:
        """Return the sequence flags."""
        return self._fields[2]

    def set_flags(self, flags: int) -> None:
        """Set the sequence flags."""
        self._fields = (*self._fields[:2], _integer("flags", flags, 0, _FLAGS_MAX), *self._fields[3:])

    def timeout(self) -> int:
        """Return the queue timeout of the request, in us."""
        return self._fields[3]

    def priority(self) -> int:
        """Return the priority of the request."""
        return self._fields[4]

    def parameters(self) -> str:
        """Return the request parameters as JSON text."""
        return self._fields[5]

    def requested_output_names(self) -> list[str]:
        """Return the names of the requested outputs."""
        return list(self._fields[6])

    def trace(self) -> InferenceTrace:
        """Return the trace, to be handed to requests of other models."""
        return InferenceTrace(self._fields[7])

    def is_cancelled(self) -> bool:
        """Return whether the caller has gone."""
        if self._batch is None:
            return False
        self._binding.reach().poll()
        return self._index in self._batch.cancelled

    def get_response_sender(self) -> InferenceResponseSender:
        """Return where to send responses to; the same one every time."""
        if self._batch is None:
            raise TritonModelException("a request that the model itself has made has no response sender")
        sender = self._sender
        if sender is None:
            sender = self._sender = InferenceResponseSender(self._binding, self._batch, self._index, self._fields[6])
        return sender

    def set_release_flags(self, flags: int) -> None:
        """Set what happens to the request after `execute`: it is over, or it is given to the model again.

        For models of iterative sequences. To be called before `execute` returns, which must return None for a request
        that is rescheduled.
        """
        if flags not in (RELEASE_ALL, RELEASE_RESCHEDULE):
            raise TritonModelException(f"set_release_flags: unsupported flags {flags!r}")
        if self._batch is None:
            raise TritonModelException("a request that the model itself has made cannot be rescheduled")
        if flags == RELEASE_RESCHEDULE:
            self._batch.rescheduled.add(self._index)
        else:
            self._batch.rescheduled.discard(self._index)

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Run the request and return its response; with `decoupled` an iterator over any number of responses.

        A failure is a response with an error.
        """
        host = self._binding.calling()
        call = self._call(decoupled)
        host.begin(call)
        return ResponseIterator(host, call) if decoupled else first_of(host, call)

    def async_exec(self, decoupled: bool = False) -> Awaitable[InferenceResponse | ResponseIterator]:
        """Start the request at once; what is awaited is what `exec` returns.

        To be called in an `async def execute`, or in what it calls.
        """
        host = self._binding.calling()
        return first_of_async(host, self._call(decoupled))

    def _call(self, decoupled: bool) -> ModelCall:
        if self._batch is not None:
            raise TritonModelException(
                "a request that the model was given cannot be executed; make one with InferenceRequest(model_name=...)"
            )
        name, version = self._target
        call = ModelCall(self._binding.batch_of_caller(), name, version, bool(decoupled), self._fields, self._inputs)
        call.on_gpu = self._on_gpu
        return call


def _integer(what: str, value: object, lowest: int, highest: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentTypeError(f"InferenceRequest: expected an integer as {what}, got {type(value).__name__}")
    number = int(value.__index__())
    if not lowest <= number <= highest:
        raise TritonModelException(f"InferenceRequest: {what} {number} is not within {lowest} and {highest}")
    return number


def _correlation_id(value: object) -> int | str:
    if isinstance(value, (str, bytes)):
        return checked_text("InferenceRequest", "correlation_id", value)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TritonModelException(f"Correlation ID must be integer or string, got {type(value).__name__}")
    return _integer("correlation_id", value, 0, _UINT64_MAX)


def _tensors(inputs: object) -> list[Tensor]:
    if not hasattr(inputs, "__iter__") or isinstance(inputs, (str, bytes)):
        raise ArgumentTypeError(f"InferenceRequest: expected a list of inputs, got {type(inputs).__name__}")
    tensors = list(inputs)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ArgumentTypeError(f"InferenceRequest: expected Tensor objects as inputs, got {type(tensor).__name__}")
    return tensors


def _names(names: object) -> tuple[str, ...]:
    if not hasattr(names, "__iter__") or isinstance(names, (str, bytes)):
        raise ArgumentTypeError(
            f"InferenceRequest: expected a list as requested_output_names, got {type(names).__name__}"
        )
    return tuple(
        dict.fromkeys(checked_text("InferenceRequest", "the name of a requested output", name) for name in names)
    )


FINAL = 1
"""Flag of `send`: nothing more follows."""


class InferenceResponse:
    """The answer to one request."""

    __slots__ = ("__weakref__", "_error", "_outputs", "_parameters")

    def __init__(
        self,
        output_tensors: Iterable[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        self._outputs = list(output_tensors)
        for tensor in self._outputs:
            if not isinstance(tensor, Tensor):
                raise ArgumentTypeError(
                    f"InferenceResponse: expected Tensor objects as outputs, got {type(tensor).__name__}"
                )
        if error is not None and not isinstance(error, TritonError):
            raise ArgumentTypeError(f"InferenceResponse: expected a TritonError as error, got {type(error).__name__}")
        self._error = error
        self._parameters = checked_parameters("InferenceResponse", parameters) if parameters is not None else {}

    def output_tensors(self) -> list[Tensor]:
        """Return the output tensors."""
        return self._outputs

    def has_error(self) -> bool:
        """Return whether the response is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Return the error, or None."""
        return self._error

    def parameters(self) -> str:
        """Return the response parameters as JSON text."""
        return json.dumps(self._parameters)


def result_of(response: InferenceResponse, wanted: tuple[str, ...], binding: Binding) -> Result:
    """Return a response as the host takes it, with the wanted outputs only; the model may leave out some of them.

    Args:
        response: What the model returned.
        wanted: Names of the outputs that the request wants.
        binding: Knows the outputs of the configuration, and logs others once each.
    """
    error = response._error
    if error is not None:
        return (error._code, error._message)
    outputs = [tensor for tensor in response._outputs if tensor._name in wanted]
    if len(outputs) != len(response._outputs):
        binding.note_outputs([tensor._name for tensor in response._outputs])
    return (-1, outputs, response._parameters)


def response_of(result: Result) -> InferenceResponse:
    """Return the response that a host has received from another model."""
    if result[0] >= 0:
        code, text = cast("Failure", result)
        return InferenceResponse(error=TritonError(text, code))
    _, outputs, parameters = cast("Outputs", result)
    response = InferenceResponse(outputs)
    response._parameters = parameters
    return response


class InferenceResponseSender:
    """Sends the responses to one request, from any thread, also after `execute` has returned."""

    __slots__ = ("__weakref__", "_batch", "_binding", "_has_sent", "_index", "_is_closed", "_lock", "_wanted")

    def __init__(self, binding: Binding, batch: ModelBatch, index: int, wanted: tuple[str, ...]) -> None:
        self._binding = binding
        self._batch = batch
        self._index = index
        self._wanted = wanted
        self._lock = threading.Lock()
        self._has_sent = False
        self._is_closed = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response; with the flag `TRITONSERVER_RESPONSE_COMPLETE_FINAL` it, or what was before, is the last.

        Raises:
            TritonModelException: Nothing can be sent any more, or not this.
        """
        with self._lock:
            answer = self._answer(response, flags)
            if answer is not None:
                self._binding.reach().respond(*answer)

    def _answer(self, response: InferenceResponse | None, flags: int) -> Answer | None:
        """Return a response as hosts take it, with the lock, and note that it is sent; None for nothing to send."""
        if flags not in (0, FINAL):
            raise TritonModelException(f"Unable to send response. Unsupported flag provided: {flags!r}.")
        if response is None:
            if not flags:
                raise TritonModelException(
                    "Inference Response object must be provided when the response flags is set to zero."
                )
        elif not isinstance(response, InferenceResponse):
            raise TritonModelException(
                f"Unable to send response. Expected an InferenceResponse, got {type(response).__name__}."
            )
        if self._is_closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        final = bool(flags)
        self._binding.reach()
        if self._binding.is_decoupled:
            result = None if response is None else result_of(response, self._wanted, self._binding)
            self._is_closed = final
            return (self._batch, self._index, result, final)
        answer: Answer | None = None
        if response is None:
            if not self._has_sent:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
                )
        elif self._has_sent:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send more than one response."
            )
        else:
            # The only response is always the last, even without the flag, so that the caller does not wait for it.
            self._has_sent = True
            answer = (self._batch, self._index, result_of(response, self._wanted, self._binding), True)
        self._is_closed = final
        return answer

    def is_cancelled(self) -> bool:
        """Return whether the caller has gone."""
        self._binding.reach().poll()
        return self._index in self._batch.cancelled

    def when_cancelled(self, listener: Callable[[], None]) -> None:
        """Call `listener` once when the caller goes, in the thread that notices it; immediately if it has gone.

        It is noticed while `execute` is not running, or whenever the model waits for something of the server.
        """
        self._batch.listen(self._index, listener)

    def _is_open(self) -> bool:
        """Return whether the request has no final answer."""
        return not (self._is_closed or self._has_sent)

    def _close(self) -> bool:
        """Send nothing more; return whether the request had no final answer, which is now up to others."""
        with self._lock:
            is_open = self._is_open()
            self._is_closed = True
        return is_open

    def __del__(self) -> None:
        host = self._binding.host
        if self._is_open() and host is not None:
            host.later(partial(host.respond, self._batch, self._index, _DROPPED, True))


def send_together(responses: Iterable[tuple[InferenceResponseSender, InferenceResponse | None, int]]) -> None:
    """Send responses of any number of senders, each with its flags, at the cost of little more than one.

    Other threads may not use these senders meanwhile.

    Raises:
        TritonModelException: One of them cannot be sent; the others were.
    """
    answers: list[Answer] = []
    host: Host | None = None
    error: TritonModelException | None = None
    for sender, response, flags in responses:
        try:
            with sender._lock:
                answer = sender._answer(response, flags)
        except TritonModelException as refused:
            error = refused
            continue
        if answer is not None:
            host = sender._binding.reach()
            answers.append(answer)
    if host is not None:
        host.respond_together(answers)
    if error is not None:
        raise error


_DROPPED = (TritonError.INTERNAL, "the model dropped the response sender of the request without a final response")


class ResponseIterator:
    """The responses of a decoupled model to one request, in the order in which they were sent.

    The news that nothing more follows, where it comes without a response, is a last, empty one.
    """

    __slots__ = ("__weakref__", "_call", "_host", "_is_over", "_was_cancelled")

    def __init__(self, host: Host, call: ModelCall) -> None:
        self._host = host
        self._call = call
        self._is_over = False
        self._was_cancelled = False

    def __iter__(self) -> ResponseIterator:
        return self

    def __next__(self) -> InferenceResponse:
        if self._is_over:
            raise StopIteration
        return self._take()

    def __aiter__(self) -> ResponseIterator:
        return self

    async def __anext__(self) -> InferenceResponse:
        if self._is_over:
            raise StopAsyncIteration
        await arrival(self._host, self._call.inbox)
        return self._take()

    def cancel(self) -> None:
        """Cancel the request. A model that runs already decides whether it stops, and which responses still follow."""
        if not (self._is_over or self._was_cancelled):
            self._was_cancelled = True
            self._host.end(self._call, softly=True)

    def _take(self) -> InferenceResponse:
        items = self._call.inbox.items
        if not items:
            self._host.wait(self._call.inbox)
        result, self._is_over = items.popleft()
        return InferenceResponse() if result is None else response_of(result)

    def __del__(self) -> None:
        if not self._is_over:
            self._host.later(partial(self._host.end, self._call))


def first_of(host: Host, call: ModelCall) -> InferenceResponse:
    """Wait for the one response to a call that has begun."""
    try:
        if not call.inbox.items:
            host.wait(call.inbox)
    except BaseException:
        host.end(call)
        raise
    return _first(call)


def first_of_async(host: Host, call: ModelCall) -> Awaitable[InferenceResponse | ResponseIterator]:
    """Begin a call; return its only response, or for a decoupled call an iterator when the first response arrives."""
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise TritonModelException(
            "async_exec needs a running event loop: call it within 'async def execute', or use exec"
        ) from None
    host.begin(call)
    task = asyncio.ensure_future(_answer(host, call))
    task.add_done_callback(lambda task: host.end(call) if task.cancelled() else None)
    return task


async def _answer(host: Host, call: ModelCall) -> InferenceResponse | ResponseIterator:
    await arrival(host, call.inbox)
    if call.decoupled:
        return ResponseIterator(host, call)
    return _first(call)


async def arrival(host: Host, inbox: Inbox[Any]) -> None:
    """Return when the inbox holds something."""
    import asyncio

    while not inbox.items:
        loop = asyncio.get_running_loop()
        arrived = loop.create_future()
        inbox.listen(partial(_wake, loop, arrived))
        host.attach(loop)
        if not inbox.items:
            await arrived


def _wake(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed; the thread that reads must not fail for that
        loop.call_soon_threadsafe(_set, future)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _first(call: ModelCall) -> InferenceResponse:
    result, _ = call.inbox.items.popleft()
    if result is not None:
        return response_of(result)
    return InferenceResponse(error=TritonError(f"model '{call.model_name}' sent no response", TritonError.INTERNAL))
