"""Outcomes of requests: the requested outputs, or the error if the scheduler dropped the request."""

from collections.abc import Mapping, Sequence

from charonia.config.model import ModelConfig
from charonia.core.classification import classify
from charonia.core.errors import Code, ServingError, internal, invalid, turned_away, unavailable
from charonia.core.request import InferRequest
from charonia.core.tensor import Tensor
from charonia.server.execution.admission import with_request_id
from charonia.server.metrics.model_metrics import FailureReason
from charonia.server.scheduling.api import DropReason

_NOT_REJECTED = {
    DropReason.STOPPING: FailureReason.OTHER,
    DropReason.SCHEDULER_FAILED: FailureReason.OTHER,
    DropReason.NO_SEQUENCE: FailureReason.OTHER,
    DropReason.STRATEGY_FAILED: FailureReason.BACKEND,
    DropReason.STATE_LOST: FailureReason.BACKEND,
    DropReason.CANCELLED: FailureReason.CANCELED,
}
"""Drops for other reasons than capacity or time."""


def selected(
    request: InferRequest, tensors: Sequence[Tensor], config: ModelConfig, labels_of: Mapping[str, tuple[str, ...]]
) -> list[Tensor]:
    """Return the requested outputs that are there, in their form and in the order in which the model gave them."""
    wanted = {output.name: output for output in request.outputs}
    chosen = []
    for tensor in tensors:
        output = wanted.pop(tensor.name, None)
        if output is None:
            continue
        if output.classification:
            labels = labels_of.get(output.name, ())
            tensor = classify(tensor, output.classification, labels, batched=config.max_batch_size > 0)
        chosen.append(tensor)
    return chosen


def drop_failure(reason: DropReason) -> FailureReason:
    """Return how a dropped request is counted: REJECTED if there was no room or no time for it."""
    return _NOT_REJECTED.get(reason, FailureReason.REJECTED)


def drop_error(reason: DropReason, request: InferRequest, model: str) -> ServingError:
    """Return the error for a dropped request."""
    # A request that a model made is a part of one that has begun.
    refuse = turned_away if request.caller is None else unavailable
    match reason:
        case DropReason.QUEUE_FULL:
            return refuse(
                f"Exceeds maximum queue size of model '{model}'",
                hint="retry later, or raise max_queue_size or the number of instances",
            )
        case DropReason.OVERLOADED:
            return refuse(
                f"Model '{model}' is overloaded: the request would wait longer than clients of the model do",
                hint="retry later, or add instances; max_queue_size in the queue policy sets a fixed limit instead",
            )
        case DropReason.TIMEOUT:
            return refuse("Request timeout expired", hint="the request waited longer than its queue timeout")
        case DropReason.STOPPING:
            return refuse(f"Server is stopping, scheduler for model '{model}' has stopped accepting new requests")
        case DropReason.STRATEGY_FAILED:
            return internal(
                f"the batching strategy of model '{model}' failed on the request", hint="the server's log says how"
            )
        case DropReason.SCHEDULER_FAILED:
            return internal(
                f"the scheduler of model '{model}' failed", hint="the server's log says how; load the model again"
            )
        case DropReason.NO_SEQUENCE:
            return invalid(
                f"inference request for sequence {request.correlation_id} to model '{model}' must specify the START "
                "flag on the first request of the sequence",
                hint="a sequence is over if it was idle for max_sequence_idle_microseconds, or if its engine has ended",
            )
        case DropReason.SEQUENCE_TIMEOUT:
            return unavailable(
                "timeout of the corresponding sequence has been expired",
                hint="no slot became free in time for the sequence",
            )
        case DropReason.STATE_LOST:
            error = internal(
                f"sequence {request.correlation_id} of model '{model}' is over: "
                "the process that remembered it has ended",
                hint="start it again; the server keeps states that `state` of sequence_batching declares",
            )
            return with_request_id(error, request)
        case DropReason.CANCELLED:
            return ServingError(Code.CANCELLED, "the request was cancelled: another one of its sequence was")
