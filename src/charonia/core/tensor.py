"""A named tensor."""

from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from charonia.core.dtypes import DataType

Array: TypeAlias = NDArray[np.generic]


class Tensor:
    """A named array with its protocol datatype.

    The array is often a read-only view of the received bytes: copy it before changing it.
    BYTES tensors hold an object array of `bytes`; BF16 tensors hold the bit patterns as uint16.

    Attributes:
        datatype: Protocol datatype.
        shape: Shape of the array, batch dimension included.
    """

    __slots__ = ("_array", "datatype", "name", "shape")

    def __init__(self, name: str, datatype: DataType, array: Array) -> None:
        self.name = name
        self.datatype = datatype
        self._array = array
        self.shape: tuple[int, ...] = array.shape

    @property  # compiled code reads a plain attribute where it lies, although a subclass has a property
    def array(self) -> Array:
        """The elements, in the tensor's own shape (with the batch dimension, if the model has one)."""
        return self._array

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.datatype.wire}, {list(self.array.shape)})"


class DeviceContent(Protocol):
    """Elements in GPU memory."""

    @property
    def native(self) -> object:
        """The framework's own tensor, with `__dlpack__`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def to_host(self) -> Array:
        """Return a copy in CPU memory."""


class DeviceTensor(Tensor):
    """A tensor in GPU memory. `array` is a copy in CPU memory, made on first use.

    Attributes:
        content: The elements.
    """

    __slots__ = ("_host", "_twin", "content")

    def __init__(self, name: str, datatype: DataType, content: DeviceContent) -> None:
        self.name = name
        self.datatype = datatype
        self.content = content
        self.shape = content.shape
        self._host: Array | None = None
        self._twin: DeviceTensor | None = None

    @property
    def array(self) -> Array:
        """The elements, copied."""
        if self._host is None:
            self._host = self.content.to_host() if self._twin is None else self._twin.array
        return self._host

    def renamed(self, name: str) -> "DeviceTensor":
        """Return the same elements under another name; both share one CPU copy."""
        renamed = DeviceTensor(name, self.datatype, self.content)
        renamed._twin = self
        return renamed

    def __repr__(self) -> str:
        return f"DeviceTensor({self.name!r}, {self.datatype.wire}, {list(self.shape)})"


def array_bytes(array: Array) -> int:
    """Return the size of the elements in bytes, of strings without their lengths."""
    return sum(map(len, array.reshape(-1).tolist())) if array.dtype.kind == "O" else array.nbytes


def to_bfloat16(array: Array) -> Array:
    """Return the bit patterns, as uint16, of numbers rounded to BF16 (to the nearest, ties to even)."""
    bits = np.asarray(array, np.float32, order="C").view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
    quiet_nan = (bits >> 16) | 0x40  # rounding could turn a NaN into infinity
    return np.where(np.isnan(array), quiet_nan, rounded).astype(np.uint16)


def from_bfloat16(bits: Array) -> Array:
    """Return the numbers, as float32, of BF16 bit patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
