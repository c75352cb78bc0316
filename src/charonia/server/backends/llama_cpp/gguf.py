"""The header of a GGUF file: the model's context, and how long the file must be.

Source: the GGUF specification, versions 2 and 3; ggml's table of types.
"""

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

MAGIC = b"GGUF"

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32, _STRING, _ARRAY = 4, 8, 9
_ALIGNMENT_BYTES = 32

_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 20: (32, 18),
    23: (256, 136), 30: (1, 2),
}  # fmt: skip
"""Elements and bytes of a block, by type of tensor; a tensor of another type counts as empty."""


class GgufHeader(NamedTuple):
    """What the header of a file says.

    Attributes:
        context_tokens: Tokens of context that the model was trained for, 0 where it is not given.
        size_bytes: Size that the file must have at least.
    """

    context_tokens: int
    size_bytes: int


def read_header(path: Path) -> GgufHeader:
    """Return the header of a file. Blocks on disk I/O.

    Raises:
        EOFError: The file ends within its header.
        ValueError: It is not a GGUF file.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[: len(MAGIC)] != MAGIC:
            raise ValueError
        try:
            return _Reader(data).header()
        except (struct.error, IndexError):
            raise EOFError from None


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = len(MAGIC)

    def header(self) -> GgufHeader:
        self._number("I")
        tensors, pairs = self._number("Q"), self._number("Q")
        context, alignment = 0, _ALIGNMENT_BYTES
        for _ in range(pairs):
            key = self._text()
            value = self._value(self._number("I"))
            if key.endswith(b".context_length"):
                context = value
            elif key == b"general.alignment":
                alignment = value or alignment
        end = 0
        for _ in range(tensors):
            self._text()
            elements = 1
            for _ in range(self._number("I")):
                elements *= self._number("Q")
            count, size = _BLOCKS.get(self._number("I"), (1, 0))
            end = max(end, self._number("Q") + elements // count * size)
        return GgufHeader(context, -(-self._at // alignment) * alignment + end)

    def _number(self, form: str) -> int:
        found: int
        (found,) = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return found

    def _text(self) -> bytes:
        length = self._number("Q")
        self._at += length
        return self._data[self._at - length : self._at]

    def _value(self, kind: int) -> int:
        """Skip a value, and return it if it is a number of 32 bits without sign, else 0."""
        if kind == _UINT32:
            return self._number("I")
        if kind == _STRING:
            self._text()
        elif kind == _ARRAY:
            element, count = self._number("I"), self._number("Q")
            if element in _SIZES:
                self._at += count * _SIZES[element]
            else:
                for _ in range(count):
                    self._value(element)
        else:
            self._at += _SIZES[kind]
        if self._at > len(self._data):
            raise IndexError
        return 0
