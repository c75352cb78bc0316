"""The `data` field: tensors as JSON arrays, flat or nested, in row-major order.

Every element is checked: a boolean is not a number, a number with a fraction is not an integer, and an integer must fit
its datatype. A number too large for its floating-point datatype becomes infinity.
"""

from array import array
from collections.abc import Sequence
from itertools import chain
from math import prod
from typing import Any

import numpy as np

from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, invalid
from charonia.core.tensor import Array, Tensor
from charonia.wire.json_text import NESTING_MAX
from charonia.wire.tensors import bytes_array

ARRAY_CODES = {
    DataType.UINT8: "B",
    DataType.UINT16: "H",
    DataType.UINT32: "I",
    DataType.UINT64: "Q",
    DataType.INT8: "b",
    DataType.INT16: "h",
    DataType.INT32: "i",
    DataType.INT64: "q",
    DataType.FP32: "f",
    DataType.FP64: "d",
}
"""Type code of `array.array`, whose conversion is strict and fast, for every numeric datatype that JSON can carry."""

_ELEMENT_TYPES: dict[DataType, frozenset[type]] = {
    DataType.BOOL: frozenset((bool,)),
    DataType.BYTES: frozenset((str,)),
    DataType.FP32: frozenset((int, float)),
    DataType.FP64: frozenset((int, float)),
}
_INTEGER = frozenset((int,))
_NO_JSON_FORM = (DataType.FP16, DataType.BF16)


def decode_data(name: str, datatype: DataType, shape: Sequence[int], data: object, bytes_max: int) -> Tensor:
    """Return the input that a `data` field holds.

    Args:
        name: Name of the input.
        datatype: Its datatype.
        shape: Its shape, without negative dimensions.
        data: The field's value as parsed.
        bytes_max: Largest size of the tensor in bytes.

    Raises:
        ServingError: INVALID_ARG when shape, datatype and data do not match.
    """
    if datatype in _NO_JSON_FORM:
        raise invalid(
            f"receiving {datatype.wire} data via JSON is not supported. Please use the binary data format for input "
            f"'{name}'"
        )
    count = prod(shape)
    # Checked before anything of that size is allocated; a string takes at least 4 bytes.
    if count * (datatype.byte_size or 4) > bytes_max:
        raise invalid(
            f"input '{name}': a {datatype.wire} tensor of shape {list(shape)} is larger than the maximum of "
            f"{bytes_max} bytes",
            hint="the limit is set by --http-max-input-size",
        )
    elements = _flat(name, data)
    if len(elements) != count:
        raise invalid(
            f"Unable to parse 'data': Shape does not match true shape of 'data' field: input '{name}' of shape "
            f"{list(shape)} has {count} elements, got {len(elements)}"
        )
    if not _ELEMENT_TYPES.get(datatype, _INTEGER).issuperset(map(type, elements)):
        raise _wrong_element(name, datatype)
    try:
        if datatype is DataType.BYTES:
            return Tensor(name, datatype, bytes_array(name, shape, [str.encode(e) for e in elements]))  # type: ignore[arg-type]
        return Tensor(name, datatype, _numbers(datatype, elements).reshape(tuple(shape)))
    except (ValueError, OverflowError) as error:
        raise _wrong_element(name, datatype) from error


def encode_data(tensor: Tensor) -> Array | list[str]:
    """Return an output's `data` field: a flat array, or the strings of a BYTES tensor.

    Raises:
        ServingError: INVALID_ARG when JSON cannot carry it.
    """
    if tensor.datatype in _NO_JSON_FORM:
        raise invalid(
            f"sending {tensor.datatype.wire} data via JSON is not supported. Please use the binary data format for "
            f"output '{tensor.name}'"
        )
    if tensor.datatype is not DataType.BYTES:
        return np.ascontiguousarray(tensor.array, tensor.datatype.numpy).reshape(-1)
    try:
        return [bytes.decode(e) for e in tensor.array.ravel().tolist()]
    except UnicodeDecodeError as error:
        raise invalid(
            f"output '{tensor.name}' holds bytes that are not UTF-8 text, which JSON cannot carry",
            hint="ask for it in binary form, 'binary_data': true",
        ) from error


def _flat(name: str, data: object) -> list[object]:
    level: list[object] = data if type(data) is list else [data]
    for _ in range(NESTING_MAX):
        if not level or type(level[0]) is not list:
            return level
        if any(type(item) is not list for item in level):
            raise invalid(f"Unable to parse 'data' of input '{name}': arrays and single elements are mixed")
        level = list(chain.from_iterable(level))  # type: ignore[arg-type]  # all are lists
    return level


def _numbers(datatype: DataType, elements: list[object]) -> Array:
    if datatype is DataType.BOOL or not elements:
        return np.array(elements, datatype.numpy)
    # Any, because annotations cannot express the preceding check of element types.
    numbers: list[Any] = elements
    return np.frombuffer(array(ARRAY_CODES[datatype], numbers), datatype.numpy)


def _wrong_element(name: str, datatype: DataType) -> ServingError:
    return invalid(f"Unable to parse 'data' of input '{name}': not every element is a valid {datatype.wire} value")
