"""Reads from an ONNX file what ONNX Runtime does not report: files of external weights, and tensors without a shape.

ONNX Runtime maps external weights into memory for as long as the model is loaded. If the file is overwritten meanwhile
(`cp new.data model.data`), the served model changes its answers; if it is truncated, SIGBUS ends the whole process. A
copy in memory has neither problem, and its file may be a symbolic link that leads out of the folder.

An ONNX file is one protobuf message; the field numbers are those of onnx.proto.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import BinaryIO

COPIED_BYTES_MAX = 2 * 1024**3
"""Larger weights stay mapped: while a session is created, there are two copies."""

_MODEL_GRAPH = 7
_GRAPH_INITIALIZER, _GRAPH_INPUT, _GRAPH_OUTPUT = 5, 11, 12
_TENSOR_EXTERNAL_DATA = 13
_ENTRY_KEY, _ENTRY_VALUE = 1, 2
_VALUE_NAME, _VALUE_TYPE = 1, 2
_TYPE_TENSOR = 1
_TENSOR_SHAPE = 2
_TEXT_BYTES_MAX = 64 * 1024
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def read_external(path: Path) -> Mapping[str, bytes]:
    """Return the content of a model's files of external weights, by the names that the model has for them.

    Empty where the model has none, they are larger than `COPIED_BYTES_MAX`, or one cannot be read or lies outside the
    folder: ONNX Runtime then reports what is wrong. Blocks on disk I/O.
    """
    try:
        names = external_names(path)
        if any(PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts for name in names):
            return {}
        if sum((path.parent / name).stat().st_size for name in names) > COPIED_BYTES_MAX:
            return {}
        return {name: (path.parent / name).read_bytes() for name in names}
    except (OSError, ValueError):
        return {}


def external_names(path: Path) -> tuple[str, ...]:
    """Return the names of the files of external weights, each once, in the order of the model.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not an ONNX model.
    """
    names: dict[str, None] = {}
    with path.open("rb") as file:
        whole = (0, os.fstat(file.fileno()).st_size)
        for graph in _fields(file, whole, _MODEL_GRAPH):
            for tensor in _fields(file, graph, _GRAPH_INITIALIZER):
                for entry in _fields(file, tensor, _TENSOR_EXTERNAL_DATA):
                    key, value = (_text(file, entry, number) for number in (_ENTRY_KEY, _ENTRY_VALUE))
                    if key == "location":
                        names[value] = None
    return tuple(names)


def without_shape(path: Path) -> frozenset[str]:
    """Return the names of the inputs and outputs without a shape: not even their rank is known.

    Empty where the file cannot be read. Blocks on disk I/O.
    """
    names = set()
    try:
        with path.open("rb") as file:
            whole = (0, os.fstat(file.fileno()).st_size)
            for graph in _fields(file, whole, _MODEL_GRAPH):
                for value in (v for kind in (_GRAPH_INPUT, _GRAPH_OUTPUT) for v in _fields(file, graph, kind)):
                    types = (t for kind in _fields(file, value, _VALUE_TYPE) for t in _fields(file, kind, _TYPE_TENSOR))
                    if any(not any(_fields(file, tensor, _TENSOR_SHAPE)) for tensor in types):
                        names.add(_text(file, value, _VALUE_NAME))
    except (OSError, ValueError):
        return frozenset()
    return frozenset(names)


def _fields(file: BinaryIO, span: tuple[int, int], wanted: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each length-delimited field with the number `wanted`, in the message at `span`."""
    place, end = span
    while place < end:
        file.seek(place)
        tag = _varint(file)
        kind = tag & 7
        if kind == _VARINT:
            _varint(file)
            place = file.tell()
        elif kind == _BYTES:
            size = _varint(file)
            begin = file.tell()
            place = begin + size
            if place > end:
                raise ValueError("a part is longer than the whole")
            if tag >> 3 == wanted:
                yield begin, place
        elif kind in (_FIXED64, _FIXED32):
            place = file.tell() + (8 if kind == _FIXED64 else 4)
        else:
            raise ValueError(f"no wire type {kind}")


def _text(file: BinaryIO, span: tuple[int, int], number: int) -> str:
    for begin, end in _fields(file, span, number):
        if end - begin > _TEXT_BYTES_MAX:
            raise ValueError("no name")
        file.seek(begin)
        return file.read(end - begin).decode()
    return ""


def _varint(file: BinaryIO) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            break
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    raise ValueError("no number")
