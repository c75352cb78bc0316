"""Inference requests, outcomes and errors as messages between a front end and the engine. Pure.

Tensors are placed in the message as on the way to a Python worker: small ones inline, large ones in shared memory.

A record is a list: a dataclass or a named tuple becomes the list of its fields, an enumeration the name or the number
of its member. The type says how to read the values again: both ends run the same code, so that nothing else needs to be
in the message.

An engine sends its state as differences from the previous state.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from charonia.config.model import ModelConfig
from charonia.core.errors import Code, ServingError
from charonia.core.request import Flow, InferRequest, RequestedOutput
from charonia.core.response import ExecutionRecord, InferResponse, Outcome
from charonia.core.trace import RemoteParent, TraceTree
from charonia.server.channel.channel import Incoming, Outgoing
from charonia.server.channel.tensors import found, placed
from charonia.server.directory import Directory, ModelView, Target
from charonia.server.lifecycle.front_end_placement import Offer

PROTOCOL = 14
"""Version of the messages between front ends and engines, with the records in them: raise it with every
change. An upgrade puts an engine of another release behind front ends only if both have the same number."""

MOVED = "the engine has handed its front ends over to the next one"
"""The error message of an engine that no longer accepts changes. A front end then calls the next engine."""

Fields = tuple[Any, ...]
"""Plain values."""


def encode_request(request: InferRequest, outgoing: Outgoing) -> Fields:
    """Return a request for a message; its tensors are placed in `outgoing`. Its trace travels separately."""
    return (
        request.model_name,
        request.model_version,
        request.id,
        [placed(tensor, outgoing) for tensor in request.inputs.values()],
        [(output.name, output.classification) for output in request.outputs],
        request.parameters,
        request.correlation_id,
        request.flags,
        request.priority,
        request.timeout_us,
        request.deadline_ns,
        request.affinity,
        tuple(request.flow),
    )


def decode_request(fields: Fields, message: Incoming, release: Callable[[int], None]) -> InferRequest:
    """Return the request in a message.

    Args:
        fields: As by `encode_request`.
        message: The message with its tensors.
        release: Drops the reference to a region of the other end.

    Raises:
        ChannelError: The message does not match the fields.
    """
    name, version, number, tensors, outputs, parameters, correlation, flags, *rest = fields
    priority, timeout_us, deadline_ns, affinity, flow = rest
    inputs = {described[0]: found(described, message, release) for described in tensors}
    return InferRequest(
        name,
        inputs,
        model_version=version,
        id=number,
        outputs=tuple(RequestedOutput(*output) for output in outputs),
        parameters=parameters,
        correlation_id=correlation,
        flags=flags,
        priority=priority,
        timeout_us=timeout_us,
        deadline_ns=deadline_ns,
        affinity=affinity,
        flow=Flow(*flow),
    )


def encode_outcome(outcome: Outcome, outgoing: Outgoing) -> Fields | None:
    """Return an outcome for a message; its tensors are placed in `outgoing`.

    Raises:
        ServingError: A tensor in GPU memory is lost.
    """
    if outcome is None:
        return None
    if isinstance(outcome, ServingError):
        return encode_error(outcome)
    run = outcome.execution
    return (
        outcome.model_name,
        outcome.model_version,
        outcome.id,
        [placed(tensor, outgoing) for tensor in outcome.outputs],
        outcome.parameters,
        None if run is None else (run.instance, run.batch_size, run.queue_ns, run.compute_ns),
    )


def decode_outcome(fields: Fields | None, message: Incoming, release: Callable[[int], None]) -> Outcome:
    """Return the outcome in a message. Arguments and errors as in `decode_request`."""
    if fields is None:
        return None
    if len(fields) == ERROR_LENGTH:
        return decode_error(fields)
    name, version, number, tensors, parameters, run = fields
    outputs = [found(described, message, release) for described in tensors]
    return InferResponse(name, version, number, outputs, parameters, None if run is None else ExecutionRecord(*run))


ERROR_LENGTH = 5
"""Number of the fields of an error, which distinguishes it from a response."""


def encode_error(error: ServingError) -> Fields:
    return (error.code.value, error.message, error.hint, error.is_unexecuted, error.retry_after_s)


def decode_error(fields: Fields) -> ServingError:
    """Return the error in a message."""
    code, message, hint, is_unexecuted, retry_after_s = fields
    return ServingError(Code(code), message, hint=hint, is_unexecuted=is_unexecuted, retry_after_s=retry_after_s)


def encode_trace(tree: TraceTree) -> Fields:
    """Return the front end's part of the trace of a request: the events so far, and the span of the sender."""
    remote = tree.remote
    parent = None if remote is None else (remote.trace_id, remote.span_id, remote.state)
    return (take_events(tree), parent)


def decode_parent(fields: Fields) -> RemoteParent | None:
    """Return the span of the sender in a message, None if it is unknown."""
    return None if fields[1] is None else RemoteParent(*fields[1])


def take_events(tree: TraceTree) -> list[tuple[str, int]]:
    """Return the events of the front end since the last call."""
    events, tree.front = tree.front, []
    return events


T = TypeVar("T")


def plain(value: object) -> object:
    """Return a record as values that a message can hold."""
    if isinstance(value, Enum):
        return int(value) if isinstance(value, int) else value.name
    if is_dataclass(value):
        return [plain(getattr(value, each.name)) for each in fields(value)]
    if isinstance(value, Mapping):
        pairs = [(plain(key), plain(each)) for key, each in value.items()]
        return pairs if pairs and isinstance(pairs[0][0], list) else dict(pairs)  # a list cannot be a key
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


def record(kind: type[T], value: object) -> T:
    return cast(T, _read(kind, value))


def _read(kind: Any, value: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if NoneType in arguments:  # `X | None`
        return None if value is None else _read(next(each for each in arguments if each is not NoneType), value)
    if origin is None:
        if isinstance(kind, type) and issubclass(kind, Enum):
            return kind(value) if issubclass(kind, int) else kind[value]
        hints = _hints(kind)
        return kind(*map(_read, hints, value)) if hints else value
    if issubclass(origin, Mapping):
        of_key, of_value = arguments
        pairs = value.items() if isinstance(value, Mapping) else value
        return {_read(of_key, key): _read(of_value, each) for key, each in pairs}
    if issubclass(origin, tuple) and arguments[-1] is not ...:
        return tuple(map(_read, arguments, value))
    if issubclass(origin, Sequence):
        return (tuple if issubclass(origin, tuple) else list)(_read(arguments[0], each) for each in value)
    return value


@cache
def _hints(kind: Any) -> tuple[Any, ...]:
    """Return the types of the fields of a record, empty for other types."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return tuple(hints[each.name] for each in fields(kind))
    names = getattr(kind, "_fields", ())
    hints = get_type_hints(kind) if names else {}
    return tuple(hints[name] for name in names)


@dataclass(frozen=True, slots=True)
class ServerReadiness:
    """The state of the server.

    Attributes:
        is_live: Value of `Engine.is_live`.
        is_ready: Value of `Engine.is_ready`.
        is_exiting: Value of `Engine.is_exiting`.
        is_tracing: Whether requests may be picked to be traced.
    """

    is_live: bool = False
    is_ready: bool = False
    is_exiting: bool = False
    is_tracing: bool = False


@dataclass(frozen=True, slots=True)
class Difference:
    """How a state differs from the previous one.

    Attributes:
        readiness: The state of the server.
        unread: Why the repositories could not be read.
        configs: Configurations of versions that answer, if they are new.
        gone: Versions that answer no more.
        models: Models whose state has changed.
        offers: Versions that the front end loads, too, if they are new.
        withdrawn: Versions that it drops, unless there is a new one.
        sticky: By model, the headers that keep a client on a version.
    """

    readiness: ServerReadiness
    unread: str
    configs: Mapping[Target, ModelConfig]
    gone: tuple[Target, ...]
    models: Mapping[str, ModelView]
    offers: Mapping[Target, Offer]
    withdrawn: tuple[Target, ...]
    sticky: Mapping[str, tuple[bytes, ...]]


@dataclass(slots=True)
class EngineState:
    """The state of an engine.

    Attributes:
        readiness: The state of the server.
        directory: The models.
        offers: Versions that front ends load, too.
        sticky: By model, the headers that keep a client on a version.
    """

    readiness: ServerReadiness = field(default_factory=ServerReadiness)
    directory: Directory = field(default_factory=Directory)
    offers: dict[Target, Offer] = field(default_factory=dict)
    sticky: Mapping[str, tuple[bytes, ...]] = field(default_factory=dict)

    def difference(self, before: "EngineState") -> object:
        """Return the plain values of the difference from an earlier state, None for no difference."""
        now, old = self.directory, before.directory
        configs = {target: c for target, c in now.configs.items() if old.configs.get(target) is not c}
        gone = tuple(target for target in old.configs if target not in now.configs)
        models = {key: model for key, model in now.models.items() if old.models.get(key) != model}
        offers = {target: offer for target, offer in self.offers.items() if before.offers.get(target) != offer}
        withdrawn = tuple(target for target in before.offers if target not in self.offers)
        is_same = self.readiness == before.readiness and now.unread == old.unread and self.sticky == before.sticky
        if is_same and not (configs or gone or models or offers or withdrawn):
            return None
        return plain(Difference(self.readiness, now.unread, configs, gone, models, offers, withdrawn, self.sticky))

    def apply(self, difference: object) -> None:
        """Apply a difference."""
        change = record(Difference, difference)
        self.readiness = change.readiness
        directory = self.directory
        directory.unread = change.unread
        for target in change.gone:
            directory.configs.pop(target, None)
        directory.configs.update(change.configs)
        directory.models.update(change.models)
        for target in change.withdrawn:
            self.offers.pop(target, None)
        self.offers.update(change.offers)
        self.sticky = change.sticky
