"""A kept response as bytes and back. Pure.

Four bytes of a name, four of the length of a JSON head, the head, then the tensors: elements in row-major order,
little-endian; strings as their lengths, eight bytes each, followed by their bytes.
"""

import math
import struct
from math import prod
from typing import Any

import numpy as np
import orjson

from charonia.cache.api import KeptResponse
from charonia.core.dtypes import BY_WIRE, DataType
from charonia.core.tensor import Array, Tensor

MAGIC = b"CRC1"

_START = struct.Struct("<4sI")


def encode(response: KeptResponse) -> bytes | None:
    """Return the bytes of a response, None where it has a parameter that does not come back as it is."""
    if any(isinstance(value, float) and not math.isfinite(value) for value in response.parameters.values()):
        return None
    bodies = [_body(tensor) for tensor in response.outputs]
    head = {
        "model": response.model_name,
        "version": response.model_version,
        "parameters": response.parameters,
        "outputs": [
            [tensor.name, tensor.datatype.wire, list(tensor.array.shape), len(body)]
            for tensor, body in zip(response.outputs, bodies, strict=True)
        ],
    }
    try:
        text = orjson.dumps(head)
    except TypeError:  # an integer beyond 64 bits
        return None
    return b"".join([_START.pack(MAGIC, len(text)), text, *bodies])


def decode(data: bytes) -> KeptResponse:
    """Return the response.

    Raises:
        ValueError: These are not the bytes of one.
    """
    try:
        magic, size = _START.unpack_from(data)
        if magic != MAGIC:
            raise ValueError("it does not begin as a kept response does")
        position = _START.size + size
        head: dict[str, Any] = orjson.loads(data[_START.size : position])
        outputs = []
        for name, wire, shape, length in head["outputs"]:
            body = memoryview(data)[position : position + length]
            outputs.append(Tensor(str(name), BY_WIRE[wire], _array(BY_WIRE[wire], tuple(shape), body, length)))
            position += length
        if position != len(data):
            raise ValueError(f"expected {position} bytes, got {len(data)}")
        return KeptResponse(str(head["model"]), str(head["version"]), tuple(outputs), dict(head["parameters"]))
    except (struct.error, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _body(tensor: Tensor) -> bytes:
    if tensor.datatype is not DataType.BYTES:
        return tensor.array.tobytes()
    strings = tensor.array.reshape(-1).tolist()
    return np.fromiter(map(len, strings), "<u8", len(strings)).tobytes() + b"".join(strings)


def _array(datatype: DataType, shape: tuple[int, ...], body: memoryview, length: int) -> Array:
    if len(body) != length or any(dim < 0 for dim in shape):
        raise ValueError(f"expected {length} bytes for shape {list(shape)}, got {len(body)}")
    count = prod(shape)
    if datatype is not DataType.BYTES:
        if count * datatype.byte_size != length:
            raise ValueError(f"expected {count * datatype.byte_size} bytes for shape {list(shape)}, got {length}")
        return np.ndarray(shape, datatype.numpy, body)
    lengths = np.frombuffer(body, "<u8", count).tolist()
    strings = np.empty(count, np.object_)
    position = 8 * count
    for index, size in enumerate(lengths):
        strings[index] = bytes(body[position : position + size])
        position += size
    if position != length:
        raise ValueError(f"expected {position} bytes of strings, got {length}")
    strings.flags.writeable = False
    return strings.reshape(shape)
