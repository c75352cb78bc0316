"""Tensors of Python models."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np

from ....channel import datatypes, dlpack
from ....channel.cuda_driver import CudaError
from ....channel.cuda_ipc import CapsuleArray
from ....channel.datatypes import TritonModelException
from .errors import ArgumentTypeError, checked_text

if TYPE_CHECKING:
    from typing import Any

    from ....channel.datatypes import Array


_OBJECT = np.dtype(object)


class Tensor:
    """A named tensor."""

    __slots__ = ("__weakref__", "_array", "_datatype", "_name")

    _name: str
    _array: Array
    """Elements; for BF16 their bits, as uint16."""
    _datatype: str

    def __init__(self, name: str, array: Array) -> None:
        if not isinstance(array, np.ndarray):
            raise ArgumentTypeError(f"Tensor '{name}': expected a numpy array, got {type(array).__name__}")
        datatype = "BYTES" if array.dtype is _OBJECT else datatypes.WIRE.get(array.dtype)
        if datatype is None:
            if array.dtype.kind in "SUT":
                array = array.astype(np.object_)
            elif array.dtype != np.object_:
                if array.dtype.newbyteorder("=") not in datatypes.WIRE:
                    raise TritonModelException(
                        f"Tensor '{name}': numpy dtype {array.dtype} is none of the tensor datatypes"
                    )
                array = array.astype(array.dtype.newbyteorder("="))
            datatype = datatypes.WIRE.get(array.dtype, "BYTES")
        self._name = name if type(name) is str and name else _name_of(name)
        self._array = array
        self._datatype = datatype

    def name(self) -> str:
        """Return the name."""
        return self._name

    def as_numpy(self) -> Array:
        """Return the elements; object arrays of bytes for strings."""
        if self._datatype == "BF16":
            raise TritonModelException(
                f"Tensor '{self._name}' is BF16, which numpy does not have; exchange it by dlpack or pass it on"
            )
        return self._array

    def triton_dtype(self) -> int:
        """Return the number of the datatype in model configurations."""
        return datatypes.NUMBERS["STRING" if self._datatype == "BYTES" else self._datatype]

    def shape(self) -> list[int]:
        """Return the shape."""
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        """Return whether the elements are in the memory of the CPU."""
        return True

    def to_dlpack(self) -> object:
        """Return the elements as a dlpack capsule, without a copy where they may be written to."""
        return self.__dlpack__()

    @staticmethod
    def from_dlpack(name: str, tensor: object) -> Tensor:
        """Return a tensor made from a dlpack capsule or from an object that offers one.

        What is in the memory of a GPU stays there until the model reads it, where the object can copy itself to
        the CPU then (`.cpu()`). A capsule needs a driver for that.
        """
        name = _name_of(name)
        if isinstance(tensor, GpuTensor):
            return GpuTensor(name, tensor._datatype, tensor._source)
        if dlpack.is_capsule(tensor) and dlpack.layout_of(tensor).device[0] == dlpack.CUDA:
            datatype = dlpack.datatype_of(tensor, name)
            with contextlib.suppress(CudaError):  # which is refused below
                return GpuTensor(name, datatype, CapsuleArray(tensor, datatype))
        if dlpack.is_out_of_reach(tensor):
            return GpuTensor(name, dlpack.datatype_of(tensor, name), tensor)
        array, datatype = dlpack.read(tensor, name)
        return received(name, datatype, array)

    def __dlpack__(
        self, *, stream: object = None, max_version: object = None, dl_device: object = None, copy: bool | None = None
    ) -> Any:
        if self._datatype == "BYTES":
            raise TritonModelException(f"Tensor '{self._name}': strings cannot be exchanged by dlpack")
        if dl_device not in (None, dlpack.CPU):
            raise BufferError(f"Tensor '{self._name}' is in the memory of the CPU, not of device {dl_device!r}")
        return dlpack.export(self._array.copy() if copy else self._array, self._datatype)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU


class GpuTensor(Tensor):
    """A tensor in the memory of a GPU."""

    __slots__ = ("_host", "_source")

    def __init__(self, name: str, datatype: str, source: Any) -> None:
        self._name = name
        self._datatype = datatype
        self._source = source
        self._host: Array | None = None

    @property
    def _array(self) -> Array:  # type: ignore[override]
        if self._host is None:
            host = self._source.cpu()
            self._host = host if isinstance(host, np.ndarray) else dlpack.read(host, self._name)[0]
        return self._host

    def shape(self) -> list[int]:
        """Return the shape."""
        return [int(size) for size in self._source.shape]

    def is_cpu(self) -> bool:
        """Return whether the elements are in the memory of the CPU."""
        return False

    def __dlpack__(
        self, *, stream: object = None, max_version: object = None, dl_device: object = None, copy: bool | None = None
    ) -> Any:
        if dl_device == dlpack.CPU:
            return super().__dlpack__(copy=copy)
        return self._source.__dlpack__(stream=stream) if stream is not None else self._source.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._source.__dlpack_device__()
        return device


def received(name: str, datatype: str, array: Array) -> Tensor:
    """Return a tensor of an array that is known to be right.

    Args:
        array: Elements; for BF16 their bits.
    """
    tensor = Tensor.__new__(Tensor)
    tensor._name = name
    tensor._datatype = datatype
    tensor._array = array
    return tensor


def _name_of(name: object) -> str:
    text = checked_text("Tensor", "name", name)
    if not text:
        raise TritonModelException("Tensor: expected a name, got an empty string")
    return text
