"""Requests: those that a model gets, and those that it makes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ....channel.datatypes import TritonModelException
from .calls import ResponseIterator, first_of, first_of_async
from .errors import ArgumentTypeError, checked_parameters, checked_text
from .host import Binding, ModelCall
from .responses import InferenceResponseSender
from .tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Mapping
    from typing import ClassVar

    from .errors import Parameter
    from .host import Fields, ModelBatch
    from .responses import InferenceResponse

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
        """Return the queue timeout that was asked for, in us."""
        return self._fields[3]

    def priority(self) -> int:
        """Return the priority that was asked for."""
        return self._fields[4]

    def parameters(self) -> str:
        """Return the request parameters as JSON text."""
        return self._fields[5]

    def requested_output_names(self) -> list[str]:
        """Return the names of the outputs that were asked for."""
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
