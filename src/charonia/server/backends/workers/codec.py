"""Encoding of requests, responses, errors and log lines between the server and a model; tensors on GPUs by address."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

import orjson

from charonia.core.dtypes import BY_WIRE
from charonia.core.errors import Code, ServingError, unavailable
from charonia.core.request import InferRequest, RequestedOutput
from charonia.core.response import Outcome
from charonia.core.tensor import Array, DeviceContent, DeviceTensor, Tensor
from charonia.server.backends.api import Outputs, Rescheduled, Result
from charonia.server.backends.python.worker.errors import RESCHEDULED
from charonia.server.channel.channel import PLACE_LENGTH, Incoming, Outgoing
from charonia.server.channel.cuda_driver import CudaError
from charonia.server.channel.cuda_ipc import GpuArray, imported_array
from charonia.server.channel.regions import ChannelError
from charonia.server.channel.tensors import found, placed


class WorkerContent:
    """A worker's tensor in GPU memory, for the server."""

    def __init__(self, array: GpuArray) -> None:
        self.array = array

    @property
    def is_lost(self) -> bool:
        """Whether the worker has ended before its memory was opened here."""
        exporter = self.array.imported.exporter
        return exporter is not None and exporter.is_closed and not self.array.imported.is_open

    @property
    def native(self) -> object:
        """The elements, with open memory. Raises UNAVAILABLE when it cannot be opened."""
        self._check()
        try:
            self.array.imported.open()
        except CudaError as error:
            raise _out_of_reach(error) from error
        return self.array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def to_host(self) -> Array:
        """Return a copy in host memory. Raises UNAVAILABLE when the elements are lost."""
        self._check()
        try:
            return self.array.cpu()
        except CudaError as error:
            raise _out_of_reach(error) from error

    def _check(self) -> None:
        if self.is_lost:
            raise _gone()


def exported_place(tensor: DeviceTensor, outgoing: Outgoing) -> tuple[object, ...] | None:
    """Return the place of a tensor that is exported to a worker, None where it must be copied.

    Raises:
        ServingError: UNAVAILABLE when it is lost.
    """
    content = tensor.content
    if isinstance(content, WorkerContent):
        if content.is_lost:
            raise _gone()
        exporter = content.array.imported.exporter
        if exporter is not None and exporter.is_closed:
            return None  # open here only
        return outgoing.export(content.array, tensor.datatype.wire, content)
    return outgoing.export(content.native, tensor.datatype.wire, content, is_done=True)


def imported_tensor(entry: tuple[Any, ...], message: Incoming, release: Callable[[int], None]) -> DeviceTensor:
    """Return a tensor that a worker has exported, or sends back.

    Args:
        entry: Name, datatype, shape and place as received.
        release: Called from any thread with the id of an export without references.

    Raises:
        ChannelError: The message is invalid.
    """
    name, wire, shape, place = entry
    found = imported_array(place, shape, wire, message.ours, release)
    if not isinstance(name, str):
        raise ChannelError(f"the name of a tensor is malformed: {name!r}")
    content: DeviceContent = WorkerContent(found) if isinstance(found, GpuArray) else found
    return DeviceTensor(name, BY_WIRE[wire], content)


def _gone() -> ServingError:
    return unavailable("a tensor in the memory of a GPU is gone: the worker process that made it has ended")


def _out_of_reach(error: CudaError) -> ServingError:
    return unavailable(
        f"a tensor in the memory of a GPU cannot be reached: {error}",
        hint="the server must see the GPUs that its workers use: CUDA_VISIBLE_DEVICES",
    )


_CODES: Final = (
    Code.UNKNOWN,
    Code.INTERNAL,
    Code.NOT_FOUND,
    Code.INVALID_ARG,
    Code.UNAVAILABLE,
    Code.UNSUPPORTED,
    Code.ALREADY_EXISTS,
    Code.CANCELLED,
)
"""Code by its number in `TritonError`."""

_LEVELS: Final = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)
"""Level of the server's log by its number in `Logger` of the models' API."""

_log = logging.getLogger(__name__)

NO_TRACE: Final = ""
"""Trace context of a request that is not traced."""


class RegionReferences(Protocol):
    """References to memory of a worker. Thread-safe."""

    def release(self, region: int) -> None:
        """Drop the reference to a region."""

    def release_handle(self, export_id: int) -> None:
        """Drop the reference to an exported GPU tensor."""


def encode_requests(
    requests: Sequence[InferRequest], output_names: tuple[str, ...], outgoing: Outgoing
) -> list[tuple[object, ...]]:
    """Return the requests in the form of a message header; their tensors are placed in `outgoing`.

    Args:
        output_names: All outputs of the model, for requests that name none.
    """
    encoded: list[tuple[object, ...]] = []
    for request in requests:
        tensors = _placed(request.inputs.values(), outgoing, outgoing.pool.exports_gpu)
        fields = request_fields(request, output_names)
        encoded.append((fields, tensors))
    return encoded


def request_fields(request: InferRequest, output_names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the fields of a request for the model, without tensors; `output_names` are the default outputs.

    They are id, correlation id, flags, timeout in us, priority, parameters as JSON text, names of the wanted outputs,
    and the trace context.
    """
    wanted = tuple(o.name for o in request.outputs) or output_names
    parameters = orjson.dumps(request.parameters).decode() if request.parameters else "{}"
    return (
        request.id,
        request.correlation_id,
        request.flags,
        request.timeout_us,
        request.priority,
        parameters,
        wanted,
        NO_TRACE if request.trace is None else request.trace.context,
    )


def made_request(
    model: tuple[str, str],
    fields: tuple[Any, ...],
    inputs: Iterable[Tensor],
    kind: type[InferRequest] = InferRequest,
) -> InferRequest:
    """Return a request that a model makes: of another model and its version, with fields as in `request_fields`."""
    request_id, correlation_id, flags, timeout_us, priority, parameters, wanted, _ = fields
    return kind(
        model[0],
        {tensor.name: tensor for tensor in inputs},
        model_version=model[1],
        id=request_id,
        outputs=tuple(RequestedOutput(name) for name in wanted),
        parameters=orjson.loads(parameters),
        correlation_id=correlation_id,
        flags=flags,
        priority=priority,
        timeout_us=timeout_us,
    )


def decode_results(
    results: Sequence[tuple[Any, ...] | None], message: Incoming, references: RegionReferences
) -> list[Result | None]:
    """Return the results of a batch; None stays None.

    Args:
        references: Releases memory that is no longer in use.

    Raises:
        ChannelError: The message does not hold what its header says.
        ServingError: A tensor is not what its header says.
    """
    decoded: list[Result | None] = []
    for result in results:
        if result is None:
            decoded.append(None)
            continue
        code = int(result[0])
        if code >= 0:
            decoded.append(decode_error(code, result[1]))
            continue
        decoded.append(Outputs(found_tensors(result[1], message, references), result[2] or None))
    return decoded


def encode_outcome(outcome: Outcome, outgoing: Outgoing, on_gpu: bool = False) -> tuple[object, ...] | None:
    """Return the outcome of a request that the worker made; its tensors are placed in `outgoing`.

    Args:
        on_gpu: Whether tensors may stay in GPU memory.
    """
    if outcome is None:
        return None
    if isinstance(outcome, ServingError):
        return encode_error(outcome)
    return (-1, _placed(outcome.outputs, outgoing, on_gpu), outcome.parameters)


def decode_error(code: int, text: object) -> ServingError:
    """Return an error from the number of its code in `TritonError` and its text."""
    if code == RESCHEDULED:
        return Rescheduled()
    return ServingError(_CODES[code], str(text))


def encode_error(error: ServingError) -> tuple[int, str]:
    """Return an error as the worker reads it: number of the code in `TritonError`, and text."""
    return (_CODES.index(error.code), str(error))


def log_of_model(instance: str, level: int, text: str, file: str, line: int) -> None:
    """Log a message of a model, with its place in the code. Thread-safe."""
    _log.log(_LEVELS[level], "%s (%s:%d)", text, file, line, extra={"instance": instance})


def _placed(tensors: Iterable[Tensor], outgoing: Outgoing, on_gpu: bool) -> list[tuple[object, ...]]:
    return [
        placed(tensor, outgoing) if type(tensor) is not DeviceTensor else _placed_on_device(tensor, outgoing, on_gpu)
        for tensor in tensors
    ]


def _placed_on_device(tensor: DeviceTensor, outgoing: Outgoing, on_gpu: bool) -> tuple[object, ...]:
    """Place a tensor that may be lost; then the reason replaces its place, so that only its request fails."""
    name, wire = tensor.name, tensor.datatype.wire
    try:
        exported = exported_place(tensor, outgoing) if on_gpu else None
        if exported is not None:
            return (name, wire, tensor.shape, exported)
        return placed(tensor, outgoing)
    except ServingError as error:
        return (name, wire, (), encode_error(error))


def found_tensors(tensors: Iterable[tuple[Any, ...]], message: Incoming, references: RegionReferences) -> list[Tensor]:
    """Return the tensors of a message as the worker described them. Errors as in `decode_results`."""
    return [
        found(described, message, references.release)
        if type(described[3]) is bytes or len(described[3]) == PLACE_LENGTH
        else imported_tensor(
            (described[0], described[1], described[2], described[3]), message, references.release_handle
        )
        for described in tensors
    ]
