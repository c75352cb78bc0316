"""Inference requests, outcomes and errors as messages between a front end and the engine. Pure.

Tensors are placed in the message as on the way to a Python worker: small ones inline, large ones in shared memory.
"""

from collections.abc import Callable
from typing import Any

from charonia.core.errors import Code, ServingError
from charonia.core.request import Flow, InferRequest, RequestedOutput
from charonia.core.response import ExecutionRecord, InferResponse, Outcome
from charonia.core.trace import RemoteParent, TraceTree
from charonia.server.channel.channel import Incoming, Outgoing
from charonia.server.channel.tensors import found, placed

PROTOCOL = 11
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


ERROR_LENGTH = 4
"""Number of the fields of an error, which distinguishes it from a response."""


def encode_error(error: ServingError) -> Fields:
    return (error.code.value, error.message, error.hint, error.is_unexecuted)


def decode_error(fields: Fields) -> ServingError:
    """Return the error in a message."""
    code, message, hint, is_unexecuted = fields
    return ServingError(Code(code), message, hint=hint, is_unexecuted=is_unexecuted)


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
