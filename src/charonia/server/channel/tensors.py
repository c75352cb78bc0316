"""Tensors in the messages of a channel: how they are described, and how they are found again."""

import marshal
import weakref
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np

from charonia.core.dtypes import BY_WIRE, DataType
from charonia.core.tensor import Array, Tensor
from charonia.server.channel.channel import Incoming, Outgoing
from charonia.server.channel.regions import ChannelError
from charonia.wire.tensors import bytes_array, decode_tensor, encode_tensor


def placed(tensor: Tensor, outgoing: Outgoing) -> tuple[object, ...]:
    """Place a tensor in a message and return its description: name, datatype, shape, place.

    Raises:
        ServingError: It is in GPU memory and is lost.
    """
    array = tensor.array
    data = marshal.dumps(array.ravel().tolist(), 2) if array.dtype.kind == "O" else encode_tensor(tensor)
    return (tensor.name, tensor.datatype.wire, array.shape, outgoing.place(data))


def found(described: tuple[Any, ...], message: Incoming, release: Callable[[int], None]) -> Tensor:
    """Return the next tensor of a message.

    Args:
        described: As by `placed` at the other end.
        message: The message.
        release: Drops the reference to a region of the other end; called when nothing refers to the tensor any more.

    Raises:
        ChannelError: The message does not hold what the description says.
        ServingError: The tensor is not what the description says.
    """
    name, datatype, shape, place = described
    if type(place) is bytes and datatype == "BYTES" and (shape == (1,) or prod(shape) == 1):
        array = np.empty(shape, object)
        array[...] = place
        return Tensor(name, DataType.BYTES, array)
    data = message.find(place)
    if datatype == "BYTES":
        tensor = Tensor(name, DataType.BYTES, bytes_array(name, shape, _strings_in(data)))
        if place[0] > 0:  # its elements were copied
            release(place[0])
        return tensor
    tensor = decode_tensor(name, BY_WIRE[datatype], shape, data)
    if place[0] > 0:  # our own regions count their references themselves
        tensor = Tensor(name, tensor.datatype, _counted(tensor.array, partial(release, place[0])))
    return tensor


def _strings_in(data: memoryview) -> list[bytes]:
    """Return the elements of a string tensor, which travel as a marshalled list."""
    try:
        elements = marshal.loads(data)
    except (ValueError, EOFError, TypeError) as error:
        raise ChannelError(f"the elements of a string tensor cannot be read: {error}") from error
    if type(elements) is not list or not set(map(type, elements)) <= {bytes}:
        raise ChannelError("the elements of a string tensor are not a list of bytes")
    return elements


def _counted(array: Array, release: Callable[[], None]) -> Array:
    """Return the same elements in an array that calls `release` when it and all views of it are gone."""
    # An array over a memoryview of its own: views of the array keep the array, and numpy does not look through it.
    holder = np.asarray(array.view(np.uint8).reshape(-1).data)
    weakref.finalize(holder, release).atexit = False
    return holder.view(array.dtype).reshape(array.shape)
