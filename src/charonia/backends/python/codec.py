"""Requests and responses as messages of the channel."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import orjson

from charonia.backends.api import Outputs, Result
from charonia.backends.python.worker.charonia_channel import Incoming, Outgoing
from charonia.core.dtypes import BY_WIRE, DataType
from charonia.core.errors import Code, ServingError
from charonia.core.request import InferRequest
from charonia.core.tensor import Array, Tensor
from charonia.protocol.tensors import decode_tensor, encode_elements

_CODES = (
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


def encode_requests(
    requests: Sequence[InferRequest], output_names: tuple[str, ...], outgoing: Outgoing
) -> list[tuple[object, ...]]:
    """Return the requests in the form of a message header; their tensors are placed in `outgoing`.

    Args:
        requests: The requests of a batch.
        output_names: All outputs of the model, for requests that name none.
        outgoing: The message.
    """
    encoded: list[tuple[object, ...]] = []
    for request in requests:
        tensors = [
            (tensor.name, tensor.datatype.wire, tensor.array.shape, outgoing.place(_bytes_of(tensor)))
            for tensor in request.inputs.values()
        ]
        wanted = tuple(o.name for o in request.outputs) or output_names
        parameters = orjson.dumps(request.parameters).decode() if request.parameters else "{}"
        fields = (
            request.id,
            request.correlation_id,
            request.flags,
            request.timeout_us,
            request.priority,
            parameters,
            wanted,
        )
        encoded.append((fields, tensors))
    return encoded


def decode_results(
    results: Sequence[tuple[Any, ...]], message: Incoming, release: Callable[[int], None]
) -> list[Result]:
    """Return the results of a batch.

    Args:
        results: They as the worker sent them.
        message: The message that holds their tensors.
        release: Called with the id of a region when the last array in it is gone.

    Raises:
        ChannelError: The message does not hold what its header says.
        ServingError: A tensor is not what its header says.
    """
    decoded: list[Result] = []
    for result in results:
        code = int(result[0])
        if code >= 0:
            decoded.append(ServingError(_CODES[code], str(result[1])))
            continue
        tensors = []
        for name, datatype, shape, place in result[1]:
            tensor = decode_tensor(name, BY_WIRE[datatype], shape, message.find(place))
            if place[0]:
                tensor.array = _leased(tensor.array, partial(release, place[0]))
            tensors.append(tensor)
        decoded.append(Outputs(tensors, result[2] or None))
    return decoded


def _leased(array: Array, release: Callable[[], None]) -> Array:
    """Return the same elements in an array that calls `release` when it and everything made from it is gone."""
    if array.dtype.kind == "O":  # its elements were copied already
        release()
        return array
    # An array over a memoryview of its own: views of the array keep the array, and numpy does not look through it.
    holder = np.asarray(array.view(np.uint8).reshape(-1).data)
    weakref.finalize(holder, release).atexit = False
    return holder.view(array.dtype).reshape(array.shape)


def _bytes_of(tensor: Tensor) -> bytes | memoryview:
    if tensor.datatype is DataType.BYTES:
        return encode_elements(tensor.array.ravel().tolist())
    return np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8).data
