"""A fake CUDA driver for several processes: memory of the GPUs is files that all of them map.

A process that calls `install` finds this driver in place of NVIDIA's library. It really allocates memory, opens it by
its handle in another process, copies and frees it. A handle cannot be opened by the process that made it, nor after
that process has ended, nor if the GPU is hidden; opened memory has no handle of its own. Every relevant call is
recorded in a file that all processes share.
"""

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from charonia.core.tensor import Array

GPUS = (b"GPU-0".ljust(16, b"."), b"GPU-1".ljust(16, b"."))
"""UUIDs of the GPUs that there are."""

LIBRARY = "libcuda.so.1"
INVALID_VALUE = 1
INVALID_CONTEXT = 201
NO_DEVICE = 101
MAP_FAILED = 205

_CPU, _CUDA = 1, 2
_CAPSULE = b"dltensor"
_POINTER_CONTEXT = 1
_NOTED = ("cuCtxSynchronize", "cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2")


class _Memory:
    """A file that is mapped.

    Attributes:
        name: Name of the file, which tells the process that has allocated it.
    """

    def __init__(self, path: Path, device: int, *, is_own: bool, has_handle: bool = True) -> None:
        self.name = path.name
        self.device = device
        self.is_own = is_own
        self.has_handle = has_handle
        with path.open("r+b") as file:
            self.mapped = mmap.mmap(file.fileno(), 0)
        self.size = len(self.mapped)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapped))


class PretendedCuda:
    """The library of the driver, as `ctypes` has it.

    Args:
        gpus: UUIDs of those that this process sees.

    Attributes:
        compute_mode: 0 for GPUs that several processes may use at a time, 3 for one process only.
    """

    def __init__(self, folder: Path, gpus: Sequence[bytes] = GPUS[:1]) -> None:
        self.compute_mode = 0
        self._folder = folder
        self._gpus = gpus
        self._memory: dict[int, _Memory] = {}
        self._count = 0
        self._depth = threading.local()

    def __getattr__(self, name: str) -> Callable[..., int]:
        act: Callable[..., int | None] = getattr(type(self), f"_{name}", lambda *_: None)

        def call(*arguments: Any) -> int:
            if name in _NOTED:
                self.note(name)
            return act(self, *arguments) or 0

        return call

    # What models do with it

    def put(self, array: Array, *, device: int = 0, has_handle: bool = True) -> "OnGpu":
        self._count += 1
        path = self._folder / f"{os.getpid()}-{self._count}"
        path.write_bytes(array.tobytes() + bytes(64))
        memory = _Memory(path, device, is_own=True, has_handle=has_handle)
        self._memory[memory.address] = memory
        elements = np.frombuffer(memory.mapped, array.dtype, array.size).reshape(array.shape)
        weakref.finalize(elements.base, self._free, memory.address)
        return OnGpu(self, elements, device)

    def adopt(self, source: Any) -> "OnGpu":
        """Return what offers dlpack as a framework would: the same memory."""
        kind, device = source.__dlpack_device__()
        assert kind == _CUDA, "it is not on a GPU"
        capsule = source.__dlpack__()
        _set_device(capsule, _CPU, 0)
        read = np.from_dlpack(_Exporter(capsule))
        buffer: Any = (ctypes.c_char * read.nbytes).from_address(read.__array_interface__["data"][0])
        buffer.keep = read  # which numpy takes for one that cannot be written to
        return OnGpu(self, np.frombuffer(buffer, read.dtype).reshape(read.shape), device)

    def note(self, what: str) -> None:
        with (self._folder / "log").open("a") as log:
            log.write(f"{os.getpid()} {what}\n")

    def noted(self, what: str, pid: int = 0) -> int:
        """Return how often something was noted, by all processes or by one."""
        path = self._folder / "log"
        lines = [line.split(" ", 1) for line in path.read_text().splitlines()] if path.exists() else []
        return sum(found == what and pid in (0, int(by)) for by, found in lines)

    def files(self) -> set[str]:
        """Return the names of all memory that is allocated, by any process."""
        return {path.name for path in self._folder.iterdir()} - {"log"}

    def opened(self) -> set[str]:
        """Return the names of the memory of others that this process has open."""
        return {memory.name for memory in list(self._memory.values()) if not memory.is_own}

    def depth(self) -> int:
        """Return how many contexts this thread has made current and not taken back."""
        return int(getattr(self._depth, "value", 0))

    def _free(self, address: int) -> None:
        name = self._memory.pop(address).name
        (self._folder / name).unlink(missing_ok=True)
        self.note("free")

    def _at(self, address: Any) -> _Memory | None:
        where = int(address.value)
        return next((m for m in list(self._memory.values()) if m.address <= where < m.address + m.size), None)

    # What the driver does

    def _cuDeviceGetCount(self, count: Any) -> None:  # noqa: N802 - the driver's name, as all of these
        count._obj.value = len(self._gpus)

    def _cuDeviceGet(self, device: Any, number: int) -> int:  # noqa: N802
        device._obj.value = number
        return 0 if number < len(self._gpus) else NO_DEVICE

    def _cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> None:  # noqa: N802
        value._obj.value = self.compute_mode

    def _cuDeviceGetUuid(self, uuid: Any, device: Any) -> None:  # noqa: N802
        ctypes.memmove(ctypes.addressof(uuid._obj), self._gpus[device.value], 16)

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> None:  # noqa: N802
        context._obj.value = device.value + 1

    def _cuCtxPushCurrent_v2(self, context: Any) -> int:  # noqa: N802
        self._depth.value = self.depth() + 1
        return 0 if context.value else INVALID_CONTEXT

    def _cuCtxPopCurrent_v2(self, context: Any) -> None:  # noqa: N802
        self._depth.value = self.depth() - 1

    def _cuPointerGetAttribute(self, value: Any, attribute: int, pointer: Any) -> int:  # noqa: N802
        memory = self._at(pointer)
        if memory is None:
            return INVALID_VALUE
        value._obj.value = memory.device + (1 if attribute == _POINTER_CONTEXT else 0)
        return 0

    def _cuMemGetAddressRange_v2(self, start: Any, size: Any, pointer: Any) -> int:  # noqa: N802
        memory = self._at(pointer)
        if memory is None:
            return INVALID_VALUE
        start._obj.value, size._obj.value = memory.address, memory.size
        return 0

    def _cuIpcGetMemHandle(self, handle: Any, pointer: Any) -> int:  # noqa: N802
        memory = self._at(pointer)
        if memory is None or not (memory.is_own and memory.has_handle):
            return INVALID_VALUE
        self.note("handle")
        ctypes.memmove(ctypes.addressof(handle._obj), memory.name.encode().ljust(64, b"\0"), 64)
        return 0

    def _cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: int) -> int:  # noqa: N802
        name = bytes(handle).rstrip(b"\0").decode()
        owner = int(name.partition("-")[0])
        if owner == os.getpid() or name in self.opened():
            return INVALID_CONTEXT
        if not (self._folder / name).exists() or not Path(f"/proc/{owner}").exists():
            return MAP_FAILED
        self.note("open")
        memory = _Memory(self._folder / name, 0, is_own=False)
        self._memory[memory.address] = memory
        address._obj.value = memory.address
        return 0

    def _cuIpcCloseMemHandle(self, address: Any) -> int:  # noqa: N802
        self.note("close")
        return 0 if self._memory.pop(address.value, None) else INVALID_VALUE

    def _cuMemcpyDtoH_v2(self, target: Any, address: Any, size: Any) -> int:  # noqa: N802
        if self._at(address) is None:
            return INVALID_VALUE
        ctypes.memmove(target, address.value, size.value)
        return 0


class OnGpu:
    """An array of a framework, in memory of a GPU that is pretended.

    Args:
        elements: The elements, which only code that plays the GPU may look at.
    """

    def __init__(self, cuda: PretendedCuda, elements: Array, device: int = 0) -> None:
        self.cuda = cuda
        self.elements = elements
        self.device = device

    @property
    def shape(self) -> tuple[int, ...]:
        return self.elements.shape

    @property
    def address(self) -> int:
        return int(self.elements.__array_interface__["data"][0])

    def __getitem__(self, part: Any) -> "OnGpu":
        return OnGpu(self.cuda, self.elements[part], self.device)

    def transposed(self) -> "OnGpu":
        """Return a view whose elements do not follow each other."""
        return OnGpu(self.cuda, self.elements.T, self.device)

    def contiguous(self) -> "OnGpu":
        """Return a copy whose elements follow each other, on the GPU."""
        return self.cuda.put(np.ascontiguousarray(self.elements), device=self.device)

    def cpu(self) -> Array:
        self.cuda.note("cpu")
        return self.elements.copy()

    def __dlpack__(self, *, stream: object = None) -> object:
        elements: Any = self.elements
        capsule: object = elements.__dlpack__()
        _set_device(capsule, _CUDA, self.device)
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CUDA, self.device)


class _Exporter:
    def __init__(self, capsule: object) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: object) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CPU, 0)


def _set_device(capsule: object, kind: int, number: int) -> None:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    address = pointer(capsule, _CAPSULE)
    ctypes.c_int32.from_address(address + 8).value = kind
    ctypes.c_int32.from_address(address + 12).value = number


def install(folder: Path | str, gpus: Sequence[bytes] = GPUS[:1]) -> PretendedCuda:
    """Have `ctypes` find the pretended driver in this process; return it."""
    cuda = PretendedCuda(Path(folder), gpus)
    load = ctypes.CDLL

    def found(name: Any, *arguments: Any, **options: Any) -> Any:
        return cuda if name == LIBRARY else load(name, *arguments, **options)

    ctypes.CDLL = found  # type: ignore[misc,assignment] # for this process, which ends with its model
    return cuda


def is_installed() -> bool:
    """Return whether this process finds a pretended driver."""
    try:
        return isinstance(ctypes.CDLL(LIBRARY), PretendedCuda)
    except OSError:
        return False
