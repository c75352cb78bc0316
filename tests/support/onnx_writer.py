"""Writes ONNX models without the `onnx` package: just enough of the format for test models.

An ONNX file is one protobuf message; field numbers are those of onnx.proto (ONNX 1.17, IR version 8).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from charonia.core.dtypes import DataType

_ELEMENT_TYPES = {
    DataType.FP32: 1,
    DataType.UINT8: 2,
    DataType.INT8: 3,
    DataType.UINT16: 4,
    DataType.INT16: 5,
    DataType.INT32: 6,
    DataType.INT64: 7,
    DataType.BYTES: 8,
    DataType.BOOL: 9,
    DataType.FP16: 10,
    DataType.FP64: 11,
    DataType.UINT32: 12,
    DataType.UINT64: 13,
    DataType.BF16: 16,
}
"""TensorProto.DataType of each datatype."""

_IR_VERSION = 8
_OPSET = 17

Shape = Sequence[int | str] | None
"""Dimensions of a tensor: numbers, or names for variable ones; None for an unknown rank."""

Attribute = int | float | str | Sequence[int]


class GraphWriter:
    """Collects a graph and writes it as an ONNX model."""

    def __init__(self) -> None:
        self._nodes: list[bytes] = []
        self._weights: list[bytes] = []
        self._inputs: list[bytes] = []
        self._outputs: list[bytes] = []

    def input(self, name: str, datatype: DataType, shape: Shape) -> str:
        self._inputs.append(_value_info(name, datatype, shape))
        return name

    def output(self, name: str, datatype: DataType, shape: Shape) -> None:
        self._outputs.append(_value_info(name, datatype, shape))

    def weight(self, name: str, datatype: DataType, array: NDArray[np.generic]) -> str:
        """Add a constant and return its name. An input of the same name makes it that input's default."""
        dims = b"".join(_number(1, size) for size in array.shape)
        body = dims + _number(2, _ELEMENT_TYPES[datatype]) + _text(8, name) + _bytes(9, array.tobytes())
        self._weights.append(body)
        return name

    def node(self, operator: str, inputs: Sequence[str], output: str, **attributes: Attribute) -> str:
        body = b"".join(_text(1, name) for name in inputs) + _text(2, output) + _text(4, operator)
        body += b"".join(_bytes(5, _attribute(name, value)) for name, value in attributes.items())
        self._nodes.append(body)
        return output

    def model(self) -> bytes:
        graph = b"".join(_bytes(1, node) for node in self._nodes) + _text(2, "graph")
        for number, parts in ((5, self._weights), (11, self._inputs), (12, self._outputs)):
            graph += b"".join(_bytes(number, part) for part in parts)
        return _number(1, _IR_VERSION) + _text(2, "charonia") + _bytes(7, graph) + _bytes(8, _number(2, _OPSET))


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())


def _attribute(name: str, value: Attribute) -> bytes:
    """AttributeProto: the value's field, and the number of that kind of value in field 20."""
    if isinstance(value, int):
        return _text(1, name) + _number(3, value) + _number(20, 2)
    if isinstance(value, float):
        return _text(1, name) + _varint(2 << 3 | 5) + np.float32(value).tobytes() + _number(20, 1)
    if isinstance(value, str):
        return _text(1, name) + _text(4, value) + _number(20, 3)
    return _text(1, name) + b"".join(_number(8, item) for item in value) + _number(20, 7)


def _value_info(name: str, datatype: DataType, shape: Shape) -> bytes:
    tensor = _number(1, _ELEMENT_TYPES[datatype])
    if shape is not None:
        dims = (_number(1, size) if isinstance(size, int) else _text(2, size) for size in shape)
        tensor += _bytes(2, b"".join(_bytes(1, dim) for dim in dims))
    return _text(1, name) + _bytes(2, _bytes(1, tensor))
