"""The `data` field: tensors as JSON arrays, flat or nested, in row-major order.

Every element is checked: a boolean is not a number, a number with a fraction is not an integer, and an integer must fit
its datatype. A number too large for its floating-point datatype becomes infinity.
"""

import json
from array import array
from collections.abc import Sequence
from itertools import chain
from math import prod
from typing import Any, Final

import numpy as np

from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, invalid
from charonia.core.tensor import Array, Tensor
from charonia.wire.compression import RAISE_THE_LIMIT
from charonia.wire.json_text import NESTING_MAX, kind_of
from charonia.wire.tensors import impossible_shape

ARRAY_CODES: Final = {
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

_ELEMENT_TYPES: Final[dict[DataType, frozenset[type]]] = {
    DataType.BOOL: frozenset((bool,)),
    DataType.BYTES: frozenset((str, bytes)),  # bytes: decoded from base64
    DataType.FP32: frozenset((int, float)),
    DataType.FP64: frozenset((int, float)),
}
SHOWN_MAX: Final = 40
"""Longest text of a wrong element in a message."""

_INTEGER: Final = frozenset((int,))
NO_JSON_FORM: Final = (DataType.FP16, DataType.BF16)


def decode_data(name: str, datatype: DataType, shape: Sequence[int], data: object, bytes_max: int) -> Tensor:
    """Return the input that a `data` field holds.

    Args:
        name: Name of the input.
        shape: Its shape, without negative dimensions.
        data: The field's value as parsed.
        bytes_max: Largest size of the tensor in bytes.

    Raises:
        ServingError: INVALID_ARG when shape, datatype and data do not match.
    """
    if datatype in NO_JSON_FORM:
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
            hint=RAISE_THE_LIMIT,
        )
    elements = _flat(name, data)
    if len(elements) != count:
        check_elements(name, datatype, elements)
        raise invalid(
            f"Unable to parse 'data': Shape does not match true shape of 'data' field: input '{name}' of shape "
            f"{list(shape)} has {count} elements, got {len(elements)}"
        )
    try:
        flat = _array(datatype, elements)
    except (TypeError, ValueError, OverflowError) as error:
        raise _wrong_element(name, datatype, elements) from error
    try:
        return Tensor(name, datatype, flat.reshape(tuple(shape)))
    except (ValueError, OverflowError) as unfit:
        raise impossible_shape(name, shape) from unfit


def has_literals(array: Array) -> bool:
    """Whether an array contains numbers that JSON has no text for."""
    return array.dtype.kind == "f" and not np.isfinite(array).all()


def encode_data(tensor: Tensor) -> Array | list[str]:
    """Return an output's `data` field: a flat array, or the strings of a BYTES tensor.

    Raises:
        ServingError: INVALID_ARG when JSON cannot carry it.
    """
    if tensor.datatype in NO_JSON_FORM:
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


def flat_and_nesting(name: str, datatype: DataType, value: object) -> tuple[list[object], tuple[int, ...]]:
    """Return the elements of nested arrays and the shape of their nesting, () for a value that is no array.

    Numbers such as 3.0 are integers where the datatype is one.

    Raises:
        ServingError: INVALID_ARG for arrays of different sizes side by side, or of arrays and elements.
    """
    level, shape = [value], list[int]()
    while level and any(type(each) is list for each in level):  # terminates, because the parser limits nesting
        sizes = {len(each) if type(each) is list else -1 for each in level}
        if -1 in sizes:
            raise invalid(f"input '{name}': arrays and single elements are mixed")
        if len(sizes) > 1:
            raise invalid(
                f"input '{name}': expected arrays of one size side by side, got {min(sizes)} and {max(sizes)}"
            )
        shape.append(len(level[0]))  # type: ignore[arg-type] # a list
        level = list(chain.from_iterable(level))  # type: ignore[arg-type] # all are lists
    assert prod(shape) == len(level)
    if datatype.numpy.kind in "iu":
        level = [int(each) if type(each) is float and each.is_integer() else each for each in level]
    return level, tuple(shape)


def _flat(name: str, data: object) -> list[object]:
    level: list[object] = data if type(data) is list else [data]
    for _ in range(NESTING_MAX):
        if not level or type(level[0]) is not list:
            return level
        if any(type(item) is not list for item in level):
            raise invalid(f"Unable to parse 'data' of input '{name}': arrays and single elements are mixed")
        level = list(chain.from_iterable(level))  # type: ignore[arg-type]  # all are lists
    return level


def _array(datatype: DataType, elements: list[object]) -> Array:
    """Return the flat array of elements; raise TypeError, ValueError or OverflowError if one is not of the datatype."""
    if not _ELEMENT_TYPES.get(datatype, _INTEGER).issuperset(map(type, elements)):
        raise TypeError
    valid: list[Any] = elements
    if datatype is DataType.BYTES:
        strings = np.empty(len(valid), object)
        strings[:] = [element if type(element) is bytes else str.encode(element) for element in valid]
        return strings
    if datatype is DataType.BOOL or not valid:
        return np.array(valid, datatype.numpy)
    return np.frombuffer(array(ARRAY_CODES[datatype], valid), datatype.numpy)


def check_elements(name: str, datatype: DataType, elements: list[object]) -> None:
    """Raise a ServingError if elements are not of the datatype: before their number is refused, which hides it."""
    if not _are_valid(datatype, elements):
        raise _wrong_element(name, datatype, elements)


def _wrong_element(name: str, datatype: DataType, elements: list[object]) -> ServingError:
    """Return the error of elements of which at least one is not of the datatype; bisection finds the first."""
    first, last = 0, len(elements) - 1
    while first < last:
        middle = (first + last + 1) // 2
        if _are_valid(datatype, elements[first:middle]):
            first = middle
        else:
            last = middle - 1
    return invalid(f"Unable to parse 'data' of input '{name}': {expected_and_got(datatype, elements, first)}")


def expected_and_got(datatype: DataType, elements: Sequence[object], index: int) -> str:
    """Return the words of an error about an element that is not of the datatype.

    Args:
        datatype: The datatype of all.
        elements: All elements, in row-major order.
        index: The wrong one.
    """
    place = f" at index {index}" if len(elements) > 1 else ""
    return f"expected {_expected(datatype)}, got {_shown(elements[index])}{place}"


def _are_valid(datatype: DataType, elements: list[object]) -> bool:
    try:
        _array(datatype, elements)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _expected(datatype: DataType) -> str:
    match datatype.numpy.kind:
        case "b":
            return "true or false (BOOL)"
        case "O":
            return "a string (BYTES)"
        case kind if kind == "f" or datatype is DataType.BF16:
            return f"a number ({datatype.wire})"
    limits = np.iinfo(datatype.numpy.name)
    return f"an integer from {limits.min} to {limits.max} ({datatype.wire})"


def _shown(element: object) -> str:
    """Return an element for a message: its JSON, or its type."""
    if element is not None and not isinstance(element, str | int | float):
        return kind_of(element)
    text = json.dumps(element[: SHOWN_MAX + 1] if isinstance(element, str) else element)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"
