"""An inference request, as every front end hands it to the engine."""

from collections.abc import Mapping

from charonia.core.caller import CallFrame
from charonia.core.errors import invalid
from charonia.core.flow import NO_FLOW, Flow
from charonia.core.tensor import Tensor
from charonia.core.trace import Trace

ParameterValue = bool | int | float | str
"""A custom request or response parameter: JSON boolean, integer, number or string."""

SEQUENCE_START = 1
SEQUENCE_END = 2


def check_named(inputs: object) -> None:
    """Check that a caller's inputs have names.

    Raises:
        ServingError: INVALID_ARG when they are no mapping.
    """
    if not isinstance(inputs, Mapping):
        raise invalid(
            f"inputs: expected values by input name, got {type(inputs).__name__}",
            hint="write {'NAME': value}; the model's metadata has the names of its inputs",
        )


class RequestedOutput:
    """One requested output.

    Attributes:
        name: Output tensor name.
        classification: Number of top classes to return instead of the tensor; 0 for the tensor itself.
    """

    __slots__ = ("classification", "name")

    def __init__(self, name: str, classification: int = 0) -> None:
        self.name = name
        self.classification = classification

    def __repr__(self) -> str:
        return f"RequestedOutput({self.name!r}, classification={self.classification})"


class InferRequest:
    """A plain record without sockets, callbacks or references to the front end that made it.

    Attributes:
        model_name: Model to run.
        model_version: Version as text, "" for the version policy's choice (the highest that is ready).
        id: The caller's request id, "" for none.
        inputs: Input tensors by name, in the order they were sent.
        outputs: Requested outputs; empty means all of the model's.
        parameters: Custom parameters, except those that have a field here.
        correlation_id: Sequence id, 0 or "" for none.
        flags: `SEQUENCE_START | SEQUENCE_END`.
        priority: 0 for the model's default, else 1 (most urgent) and up.
        timeout_us: Requested queue timeout, in microseconds; 0 for none.
        deadline_ns: Monotonic time after which the caller no longer waits, in nanoseconds; 0 for none.
        caller: The model that made the request, None for a client.
        trace: The trace that records its events, None if it is not traced.
        affinity: What stands for the client, if the model's traffic keeps clients on a version by a header; "" if not.
        flow: Its client, with which others share a busy model fairly.
    """

    __slots__ = (
        "affinity",
        "caller",
        "correlation_id",
        "deadline_ns",
        "flags",
        "flow",
        "id",
        "inputs",
        "model_name",
        "model_version",
        "outputs",
        "parameters",
        "priority",
        "timeout_us",
        "trace",
    )

    def __init__(
        self,
        model_name: str,
        inputs: dict[str, Tensor],
        *,
        model_version: str = "",
        id: str = "",
        outputs: tuple[RequestedOutput, ...] = (),
        parameters: dict[str, ParameterValue] | None = None,
        correlation_id: int | str = 0,
        flags: int = 0,
        priority: int = 0,
        timeout_us: int = 0,
        deadline_ns: int = 0,
        caller: CallFrame | None = None,
        trace: Trace | None = None,
        affinity: str = "",
        flow: Flow = NO_FLOW,
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        self.id = id
        self.inputs = inputs
        self.outputs = outputs
        self.parameters: dict[str, ParameterValue] = parameters if parameters is not None else {}
        self.correlation_id = correlation_id
        self.flags = flags
        self.priority = priority
        self.timeout_us = timeout_us
        self.deadline_ns = deadline_ns
        self.caller = caller
        self.trace = trace
        self.affinity = affinity
        self.flow = flow

    def __repr__(self) -> str:
        version = f" v{self.model_version}" if self.model_version else ""
        return f"InferRequest({self.model_name!r}{version}, id={self.id!r}, inputs={list(self.inputs.values())})"


class DeviceRequest(InferRequest):
    """A request of a model that accepts outputs in GPU memory."""

    __slots__ = ()
