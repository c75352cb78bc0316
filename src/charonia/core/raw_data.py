"""Tensors read from the data files of a model's folder. Pure."""

import struct
from collections.abc import Sequence
from math import prod
from typing import Final

import numpy as np

from charonia.core.dtypes import DataType
from charonia.core.errors import invalid
from charonia.core.tensor import Array

_LENGTH: Final = struct.Struct("<I")


def from_file(content: bytes, datatype: DataType, dims: Sequence[int], subject: str) -> Array:
    """Return the elements that a file holds, as one row.

    Args:
        content: Elements in row-major order, little-endian; strings each follow their length as 4 bytes.
        datatype: Their datatype.
        dims: Dimensions that they fill.
        subject: What an error begins with.

    Raises:
        ServingError: INVALID_ARG: the file holds something else.
    """
    count = prod(dims)
    if datatype is DataType.BYTES:
        elements = _elements(content, subject)
        if len(elements) != count:
            raise invalid(f"{subject}: expected {count} strings for dims {list(dims)}, got {len(elements)}")
        strings = np.empty(count, np.object_)
        strings[:] = elements
        return strings
    expected = count * datatype.byte_size
    if len(content) < expected:  # more bytes are ignored, as by Triton
        raise invalid(f"{subject}: expected {expected} bytes for dims {list(dims)}, got {len(content)}")
    numbers: Array = np.frombuffer(content, datatype.numpy, count)
    return numbers


def zeros(datatype: DataType, shape: Sequence[int]) -> Array:
    """Return zeros, or empty strings."""
    if datatype is DataType.BYTES:
        strings: Array = np.full(tuple(shape), b"", np.object_)
        return strings
    return np.zeros(tuple(shape), datatype.numpy)


def _elements(content: bytes, subject: str) -> list[bytes]:
    elements: list[bytes] = []
    position = 0
    while position < len(content):
        if position + _LENGTH.size > len(content):
            raise invalid(f"{subject}: expected the length of a string as 4 bytes at {position}, got fewer")
        start = position + _LENGTH.size
        position = start + _LENGTH.unpack_from(content, position)[0]
        if position > len(content):
            raise invalid(f"{subject}: expected {position - start} bytes of a string at {start}, got fewer")
        elements.append(content[start:position])
    return elements
