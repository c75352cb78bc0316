"""Tensors and results between the server and a model in the same process, without copies.

The model's inputs are read-only views of the server's arrays, and the server keeps the model's output arrays.
"""

from typing import Any

import numpy as np

from charonia.core.dtypes import BY_WIRE
from charonia.core.errors import ServingError, internal
from charonia.core.response import Outcome
from charonia.core.tensor import Array, DeviceTensor, Tensor
from charonia.server.backends.api import Outputs, Result
from charonia.server.backends.python.codec import decode_error, encode_error
from charonia.server.backends.python.worker.cuda_ipc import finish
from charonia.server.backends.python.worker.tensor import GpuTensor, received
from charonia.server.backends.python.worker.tensor import Tensor as ModelTensor


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


class _Produced:
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
        return DeviceTensor(tensor._name, BY_WIRE[tensor._datatype], _Produced(tensor))
    array = tensor._array
    if tensor._datatype == "BYTES":
        array = _as_bytes(array)
    elif not array.flags.c_contiguous:
        array = array.copy(order="C")
    return Tensor(tensor._name, BY_WIRE[tensor._datatype], array)


def _as_bytes(array: Array) -> Array:
    """Return a string tensor with elements of type bytes, as a worker would send it."""
    elements = array.ravel().tolist()
    if set(map(type, elements)) <= {bytes}:
        return array
    encoded = np.empty(len(elements), np.object_)
    for index, element in enumerate(elements):
        is_binary = isinstance(element, (bytes, bytearray, memoryview))
        encoded[index] = bytes(element) if is_binary else str(element).encode()
    return encoded.reshape(array.shape)
