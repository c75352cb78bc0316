"""An inference request, as every front end hands it to the engine."""

from collections.abc import Iterator, Mapping
from ipaddress import IPv6Address, ip_address
from typing import Final, NamedTuple

from charonia.core.errors import invalid
from charonia.core.native import mypyc_attr
from charonia.core.tensor import Tensor
from charonia.core.trace import Trace

ParameterValue = bool | int | float | str
"""A custom request or response parameter: JSON boolean, integer, number or string."""

SEQUENCE_START: Final = 1
SEQUENCE_END: Final = 2

FLOW_NAME_LENGTH_MAX: Final = 128
"""Longest name of a flow, in characters; what follows in a header is ignored."""

_SITE_BITS: Final = 64
"""Part of an IPv6 address that stands for a client, who can choose the rest."""


class Flow(NamedTuple):
    """The client of a request, as far as fairness is concerned.

    Attributes:
        name: Name of its API key, its address, or the value of a header.
        weight: Its share of a busy model, relative to the shares of other flows; at least 1.
        key: Name of the API key of the request, "" without one.
        requests_per_minute: Limit of the key, 0 for none.
        tokens_per_minute: Limit of the key for language models, 0 for none.
    """

    name: str = ""
    weight: int = 1
    key: str = ""
    requests_per_minute: int = 0
    tokens_per_minute: int = 0


NO_FLOW: Final = Flow()
"""The flow of requests of unknown clients."""


def flow_of_peer(peer: object) -> Flow:
    """Return the flow of a connection from an address as sockets give it."""
    if not isinstance(peer, tuple) or not peer:
        return NO_FLOW
    try:
        address = ip_address(str(peer[0]).partition("%")[0])
    except ValueError:  # a socket of another family
        return NO_FLOW
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return Flow(str(address.ipv4_mapped))
        address = IPv6Address(int(address) >> _SITE_BITS << _SITE_BITS)
    return Flow(str(address))


class CallFrame:
    """A model that makes a request while it executes one: a frame of a call stack across models.

    Frames are compared by identity.

    Attributes:
        model: Name of the model.
        version: Its version, as text.
        instance: Name of the instance that it occupies; "" for an ensemble, which occupies none.
        parent: The frame of the request that the model executes, None for a client's request.
    """

    __slots__ = ("instance", "model", "parent", "version")

    def __init__(self, model: str, version: str, instance: str = "", parent: "CallFrame | None" = None) -> None:
        self.model = model
        self.version = version
        self.instance = instance
        self.parent = parent

    def chain(self) -> Iterator["CallFrame"]:
        """Yield this frame and its callers, innermost first."""
        frame: CallFrame | None = self
        while frame is not None:
            yield frame
            frame = frame.parent

    def __repr__(self) -> str:
        return f"CallFrame({' <- '.join(f'{f.model} v{f.version} {f.instance}'.strip() for f in self.chain())})"


def check_named(inputs: object) -> None:
    """Check that a caller's inputs have names.

    Raises:
        ServingError: INVALID_ARG when they are not a mapping.
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


FIELDS: Final = (
    "affinity", "caller", "correlation_id", "deadline_ns", "flags", "flow", "id", "inputs", "model_name",
    "model_version", "outputs", "parameters", "priority", "timeout_us", "trace",
)  # fmt: skip
"""The fields of an `InferRequest`."""


@mypyc_attr(allow_interpreted_subclasses=True)
class InferRequest:
    """A plain record without sockets, callbacks or references to the front end that made it.

    Attributes:
        model_name: Model to run.
        model_version: Version as text, "" for the version policy's choice (the highest that is ready).
        id: The caller's request id, "" for none.
        inputs: Input tensors by name, in the order they were sent.
        outputs: Requested outputs; empty means all of the model's.
        parameters: Custom parameters, except those with a field here.
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

    __slots__ = FIELDS

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
