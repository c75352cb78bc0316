"""Exchange of arrays by dlpack, with the one datatype that numpy does not have, BF16, as the bits of uint16.

A capsule holds a C structure that begins with: address, device type, device number, number of dimensions, the datatype
as kind, bits and lanes, shape, strides, and an offset in bytes; its owner's context and deleter follow. See the
specification, https://dmlc.github.io/dlpack/latest/c_api.html.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from . import datatypes
from .datatypes import TritonModelException

if TYPE_CHECKING:
    from typing import Any

    from .datatypes import Array

CPU = (1, 0)
"""Device type and number of the memory of the CPU."""

CUDA = 2
"""Device type of the memory of NVIDIA GPUs."""

_DEVICES = {2: "a CUDA GPU", 10: "a ROCm GPU"}
_READABLE = (1, 3, 11)  # CPU, and memory of the CPU that is pinned for CUDA or ROCm
_UINT = 1
_BFLOAT = 4
_CAPSULE = b"dltensor"


_DATATYPES = {
    (4, 16): "BF16",
    (6, 8): "BOOL",
    **{(0, bits): f"INT{bits}" for bits in (8, 16, 32, 64)},
    **{(1, bits): f"UINT{bits}" for bits in (8, 16, 32, 64)},
    **{(2, bits): f"FP{bits}" for bits in (16, 32, 64)},
}
"""Datatype by kind and bits."""
_CODES = {datatype: code for code, datatype in _DATATYPES.items()}


class Layout(NamedTuple):
    """What a capsule says of its elements.

    Attributes:
        device: Device type and number.
        is_contiguous: Whether they follow each other in row-major order.
    """

    address: int
    device: tuple[int, int]
    shape: tuple[int, ...]
    is_contiguous: bool


class _Head(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("kind", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("head", _Head), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Exporter:
    """A capsule in the form in which `numpy.from_dlpack` takes it."""

    def __init__(self, capsule: object, device: tuple[int, int]) -> None:
        self._capsule = capsule
        self._device = device

    def __dlpack__(self, **_: object) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def export(array: Array, datatype: str) -> object:
    """Return a capsule of an array; a copy where the array is read-only, which a capsule cannot say."""
    if not array.flags.writeable:
        array = array.copy()
    capsule = array.__dlpack__()
    if datatype == "BF16":
        _head(capsule).kind = _BFLOAT
    return capsule


def read(source: Any, name: str) -> tuple[Array, str]:
    """Return the array of a capsule, or of an object that offers one, and its datatype.

    Raises:
        TritonModelException: There is none, it is out of reach, or its datatype is none of tensors.
    """
    if hasattr(source, "__dlpack__"):
        if hasattr(source, "__dlpack_device__") and source.__dlpack_device__()[0] not in _READABLE:
            if not hasattr(source, "cpu"):
                raise _out_of_reach(name, source.__dlpack_device__()[0])
            source = source.cpu()
        source = source.__dlpack__()
    elif not is_capsule(source):
        raise TritonModelException(
            f"Tensor '{name}': expected a dlpack capsule or an object with __dlpack__, got {type(source).__name__}"
        )
    head = _head(source)
    if head.device_type not in _READABLE:
        raise _out_of_reach(name, head.device_type)
    is_bfloat = head.kind == _BFLOAT and head.bits == 16
    if is_bfloat:
        head.kind = _UINT
    try:
        array = np.from_dlpack(_Exporter(source, (head.device_type, head.device_id)))
    except (BufferError, RuntimeError, TypeError) as error:
        raise TritonModelException(f"Tensor '{name}': numpy cannot read it by dlpack: {error}") from error
    if array.dtype not in datatypes.WIRE:
        raise TritonModelException(f"Tensor '{name}': datatype {array.dtype} is none of the tensor datatypes")
    return array, "BF16" if is_bfloat else datatypes.WIRE[array.dtype]


def is_capsule(source: object) -> bool:
    return type(source).__name__ == "PyCapsule"


def is_out_of_reach(source: Any) -> bool:
    """Return whether an object's elements are in memory that the CPU cannot read, though the object can copy them."""
    return (
        hasattr(source, "__dlpack_device__")
        and source.__dlpack_device__()[0] not in _READABLE
        and hasattr(source, "cpu")
        and hasattr(source, "shape")
    )


def datatype_of(source: Any, name: str) -> str:
    """Return the datatype of a capsule, or of an object that offers one, without a look at its elements."""
    head = _head(source.__dlpack__() if hasattr(source, "__dlpack__") else source)
    datatype = _DATATYPES.get((head.kind, head.bits))
    if datatype is None:
        raise TritonModelException(f"Tensor '{name}': its datatype is none of the tensor datatypes")
    return datatype


def layout_of(capsule: object) -> Layout:
    """Return where the elements of a capsule are, which is not read by that.

    Raises:
        TritonModelException: It has been read before.
    """
    head = _head(capsule)
    shape = tuple(head.shape[: head.ndim])
    is_contiguous = not head.strides or is_row_major(shape, tuple(head.strides[: head.ndim]))
    return Layout((head.data or 0) + head.byte_offset, (head.device_type, head.device_id), shape, is_contiguous)


def is_row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether elements follow each other in row-major order; strides are counted in elements."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def capsule_of(address: int, device: tuple[int, int], shape: tuple[int, ...], datatype: str, keep: object) -> object:
    """Return a capsule of elements in any memory.

    Args:
        address: Where they are, in row-major order.
        device: Device type and number.
        keep: Lives as long as the elements may be read.
    """
    count = len(shape)
    strides = [1] * count
    for index in range(count - 2, -1, -1):
        strides[index] = strides[index + 1] * shape[index + 1]
    numbers = (ctypes.c_int64 * (2 * count + 1))(*shape, *strides)
    first = ctypes.cast(numbers, ctypes.POINTER(ctypes.c_int64))
    second = ctypes.cast(ctypes.byref(numbers, 8 * count), ctypes.POINTER(ctypes.c_int64))
    kind, bits = _CODES[datatype]
    head = _Head(address, device[0], device[1], count, kind, bits, 1, first, second, 0)
    managed = _Managed(head, None, ctypes.cast(_deleter, ctypes.c_void_p).value)
    where = ctypes.addressof(managed)
    _given_out[where] = (managed, numbers, keep)
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return make(where, _CAPSULE, ctypes.cast(_destructor, ctypes.c_void_p))


_given_out: dict[int, tuple[object, ...]] = {}
"""What belongs to capsules that were made here, by the address of their structure, until their reader releases them."""


_is_unread = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_structure_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _done_with(managed: int, given_out: dict[int, tuple[object, ...]] = _given_out) -> None:
    """Called by the reader of a capsule, in any thread, when it needs the elements no more; also at the very end."""
    given_out.pop(managed, None)


def _gone(capsule: int) -> None:
    """Called with the address of a capsule that goes; one that was never read takes the structure with it."""
    if _is_unread(capsule, _CAPSULE):
        _given_out.pop(_structure_of(capsule, _CAPSULE), None)


_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_done_with)
_destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_gone)


def _head(capsule: object) -> _Head:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    try:
        return _Head.from_address(pointer(capsule, _CAPSULE))
    except ValueError:
        raise TritonModelException("a dlpack capsule can be read only once, and this one has been") from None


def _out_of_reach(name: str, device: int) -> TritonModelException:
    where = _DEVICES.get(device, f"device type {device}")
    return TritonModelException(
        f"Tensor '{name}': its elements are in the memory of {where}, which the server does not read; "
        "copy them to the CPU first"
    )
