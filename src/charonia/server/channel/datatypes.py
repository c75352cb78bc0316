"""Datatypes of tensors, and the wire form of strings, as numpy sees them in a worker."""

from __future__ import annotations

import marshal
import struct
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from typing import Any

    Array = np.ndarray[Any, np.dtype[Any]]

NUMPY_BY_TYPE: dict[str, type[np.generic]] = {
    "TYPE_BOOL": np.bool_,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}
NUMBERS = {
    name: number
    for number, name in enumerate(
        [
            "BOOL",
            "UINT8",
            "UINT16",
            "UINT32",
            "UINT64",
            "INT8",
            "INT16",
            "INT32",
            "INT64",
            "FP16",
            "FP32",
            "FP64",
            "STRING",
            "BF16",
        ],
        start=1,
    )
}
WIRE = {np.dtype(t): name[5:] for name, t in NUMPY_BY_TYPE.items() if name != "TYPE_STRING"}
DTYPES: dict[str, np.dtype[Any]] = {name: dtype for dtype, name in WIRE.items()}
"""Dtype of the arrays that hold a datatype's elements, by its name in the protocol. BF16 is held as its bits."""
DTYPES["BF16"] = np.dtype(np.uint16)
COPY_BYTES_MAX = 4096
"""Up to this size a copy of an array costs less than looking at it as bytes."""

_LENGTH = struct.Struct("<I")


class TritonModelException(Exception):
    """Raised for wrong use of `triton_python_backend_utils`, which exports it; a model may raise it too."""


def triton_string_to_numpy(triton_type: str) -> type[np.generic] | None:
    """Return the numpy type of a datatype of model configurations, e.g. "TYPE_FP32"."""
    return NUMPY_BY_TYPE.get(triton_type)


def triton_to_numpy_type(number: int) -> type[np.generic] | None:
    """Return the numpy type of a datatype's number."""
    return next((NUMPY_BY_TYPE.get("TYPE_" + name) for name, n in NUMBERS.items() if n == number), None)


def numpy_to_triton_type(numpy_type: Any) -> int:
    """Return the number of the datatype of a numpy type."""
    dtype = np.dtype(numpy_type)
    return NUMBERS["STRING" if is_string(dtype) else WIRE[dtype]]


def serialize_byte_tensor(array: Array) -> bytes:
    """Return the elements of a string tensor in wire form."""
    return b"".join([_LENGTH.pack(len(element)) + element for element in _elements_of(array)])


def array_of(datatype: str, shape: tuple[int, ...], data: memoryview) -> Array:
    """Return the elements of a tensor from the form of `bytes_of`; they lie in `data`, but for strings."""
    if datatype == "BYTES":
        return string_array(marshal.loads(data), shape)
    return np.ndarray(shape, DTYPES[datatype], data)


def bytes_of(datatype: str, array: Array) -> bytes | memoryview:
    """Return the bytes of a tensor as messages have them.

    Strings are marshalled, which takes a tenth of the time of their wire form.
    """
    if datatype == "BYTES":
        return marshal.dumps(_elements_of(array), 2)
    if array.nbytes <= COPY_BYTES_MAX:
        return array.tobytes()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def deserialize_bytes_tensor(encoded: Any) -> Array:
    """Return the elements of a string tensor from wire form."""
    data = bytes(encoded)
    elements = []
    position = 0
    while position < len(data):
        start = position + 4
        position = start + _LENGTH.unpack_from(data, position)[0]
        elements.append(data[start:position])
    return string_array(elements, (len(elements),))


def string_array(elements: list[bytes], shape: tuple[int, ...]) -> Array:
    """Return the array of a string tensor."""
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array.reshape(shape)


def as_bytes(array: Array) -> Array:
    """Return the array of a string tensor, or of other values as text, with elements of type bytes."""
    if array.dtype.kind == "O" and set(map(type, array.ravel().tolist())) <= {bytes}:
        return array
    return string_array(_elements_of(array), array.shape)


def is_string(dtype: np.dtype[Any]) -> bool:
    """Return whether an array of this dtype is a string tensor."""
    return dtype.kind in "OSUT"


def _elements_of(array: Array) -> list[bytes]:
    elements = array.ravel().tolist()
    kinds = set(map(type, elements))
    if kinds <= {bytes}:
        return elements
    if kinds == {str}:
        return list(map(str.encode, elements))
    return [element if type(element) is bytes else _encoded(element) for element in elements]


def _encoded(element: object) -> bytes:
    return bytes(element) if isinstance(element, (bytes, bytearray, memoryview)) else str(element).encode("utf-8")
