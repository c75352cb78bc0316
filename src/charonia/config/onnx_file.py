"""Reads what an ONNX file says about other files and about shapes, without a library. Pure.

An ONNX file is one protobuf message; onnx.proto has the field numbers. Ambiguous encodings, which parsers could read
differently, are errors.
"""

from collections.abc import Container, Iterator, Mapping
from typing import BinaryIO

PARTS_MAX = 5_000_000
"""Fields of a file that are read; one that has more is not examined."""

_GRAPH, _INITIALIZER, _EXTERNAL_DATA, _KEY, _VALUE = 7, 5, 13, 1, 2

PARTS: Mapping[str, Mapping[int, str]] = {
    "ModelProto": {7: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto"},
    "TrainingInfoProto": {1: "GraphProto", 2: "GraphProto"},
    "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
    "GraphProto": {1: "NodeProto", 5: "TensorProto", 15: "SparseTensorProto"},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": dict.fromkeys((5, 10), "TensorProto")
    | dict.fromkeys((6, 11), "GraphProto")
    | dict.fromkeys((22, 23), "SparseTensorProto"),
    "SparseTensorProto": {1: "TensorProto", 2: "TensorProto"},
}
"""By message, the fields through which tensors are reached, and the messages there."""

_INPUT, _OUTPUT = 11, 12
_VALUE_NAME, _VALUE_TYPE, _TYPE_TENSOR, _TENSOR_SHAPE = 1, 2, 1, 2
_OP_TYPE = 4
_TEXT_BYTES_MAX = 64 * 1024
_BYTES_MAX = 2**31
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

Span = tuple[int, int]
"""Where a message begins and ends."""


class OnnxFile:
    """An ONNX file. Its methods raise ValueError for a file that is not one, or has more than `PARTS_MAX` fields.

    Args:
        file: The file.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._whole = (0, file.seek(0, 2))
        self._left = PARTS_MAX

    def weight_files(self) -> tuple[str, ...]:
        """Return the names of the files of the graph's external weights, each once, in the order of the model."""
        names: dict[str, None] = {}
        for _, graph in self._fields(self._whole, (_GRAPH,)):
            for _, tensor in self._fields(graph, (_INITIALIZER,)):
                names |= dict.fromkeys(self._locations(tensor))
        return tuple(names)

    def examined(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the names of the files of all tensors, wherever they are in the model, and of all operators."""
        files: set[str] = set()
        operators: set[str] = set()
        waiting = [("ModelProto", self._whole)]
        while waiting:
            kind, span = waiting.pop()
            if kind == "TensorProto":
                files |= set(self._locations(span))
                continue
            if kind == "NodeProto":
                operators |= {self._text(name) for _, name in self._fields(span, (_OP_TYPE,))}
            waiting += [(PARTS[kind][number], part) for number, part in self._fields(span, PARTS[kind])]
        return frozenset(files), frozenset(operators)

    def without_shape(self) -> frozenset[str]:
        """Return the names of the inputs and outputs without a shape: not even their rank is known."""
        names = set()
        for _, graph in self._fields(self._whole, (_GRAPH,)):
            for _, value in self._fields(graph, (_INPUT, _OUTPUT)):
                types = [
                    tensor
                    for _, kind in self._fields(value, (_VALUE_TYPE,))
                    for _, tensor in self._fields(kind, (_TYPE_TENSOR,))
                ]
                if any(not any(self._fields(tensor, (_TENSOR_SHAPE,))) for tensor in types):
                    names |= {self._text(name) for _, name in self._fields(value, (_VALUE_NAME,))}
        return frozenset(names)

    def _locations(self, tensor: Span) -> Iterator[str]:
        """Yield the files that a tensor names; of repeated fields, parsers take the last, so all count."""
        for _, entry in self._fields(tensor, (_EXTERNAL_DATA,)):
            if "location" in [self._text(key) for _, key in self._fields(entry, (_KEY,))]:
                yield from [self._text(value) for _, value in self._fields(entry, (_VALUE,))]

    def _fields(self, span: Span, wanted: Container[int]) -> Iterator[tuple[int, Span]]:
        """Yield number and place of each length-delimited field whose number is wanted, in the message at `span`."""
        place, end = span
        while place < end:
            self._left -= 1
            if self._left < 0:
                raise ValueError(f"more than {PARTS_MAX} fields")
            self._file.seek(place)
            tag = self._varint()
            kind = tag & 7
            if tag >= 2**32 or tag < 8:  # parsers cut it off, or stop
                raise ValueError(f"no tag of a field: {tag}")
            if kind == _VARINT:
                self._varint()
                place = self._file.tell()
            elif kind == _BYTES:
                size = self._varint()
                begin = self._file.tell()
                place = begin + size
                if place > end or size >= _BYTES_MAX:
                    raise ValueError("a part is longer than the whole")
                if tag >> 3 in wanted:
                    yield tag >> 3, (begin, place)
            elif kind in (_FIXED64, _FIXED32):
                place = self._file.tell() + (8 if kind == _FIXED64 else 4)
            else:
                raise ValueError(f"no wire type {kind}")

    def _text(self, span: Span) -> str:
        begin, end = span
        if end - begin > _TEXT_BYTES_MAX:
            raise ValueError("no name")
        self._file.seek(begin)
        return self._file.read(end - begin).decode()

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._file.read(1)
            if not byte:
                break
            value |= (byte[0] & 0x7F) << shift
            if byte[0] < 0x80:
                return value
        raise ValueError("no number")
