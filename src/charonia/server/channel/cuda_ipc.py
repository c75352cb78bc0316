"""GPU tensors that processes share by CUDA IPC handles.

The exporter sends a handle of the memory and keeps the tensor until the importer releases the export. The importer
opens the handle when it needs the elements, once for all tensors in the same allocation, and closes it before it
releases the last of them. A process cannot open a handle of its own memory, and cannot make one for memory that it
has opened; both are looked up here. Used by both ends of a channel, on Python 3.8 and later.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import traceback
import weakref
from functools import partial
from math import prod
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from . import datatypes, dlpack
from .cuda_driver import HANDLE_BYTES, UUID_BYTES, Allocation, CudaError, driver
from .datatypes import TritonModelException
from .regions import ChannelError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .cuda_driver import Driver
    from .datatypes import Array
    from .regions import RegionPool

    Place = tuple[int, int, bytes, bytes, int]
    """Where a tensor's elements are: id of the export, negative for one of the receiver's own, of which nothing else
    counts but the size; size in bytes; UUID of the GPU, handle of the memory, offset in it."""

PLACE_LENGTH = 5


class IpcAddress(NamedTuple):
    """Where elements are, for any process that sees the GPU.

    Attributes:
        gpu: UUID of the GPU.
        handle: Handle of the memory.
        offset: Where they begin in it, in bytes.
    """

    gpu: bytes
    handle: bytes
    offset: int


class _Memory:
    """Memory of a GPU that has a handle: opened by this process, or its own."""

    __slots__ = ("__weakref__", "context", "device", "driver", "gpu", "handle", "size", "start", "users")

    def __init__(self, driver: Driver, gpu: bytes, handle: bytes, allocation: Allocation) -> None:
        context, device, start, size = allocation
        self.driver = driver
        self.gpu = gpu
        self.handle = handle
        self.context = context
        self.device = device
        self.start = start
        self.size = size
        self.users = 0  # where it was opened

    def wait(self) -> None:
        """Return when the GPU has done what was begun."""
        with contextlib.suppress(CudaError):  # one that has failed is at work on nothing
            self.driver.synchronize(self.context)


class _Handles:
    """The handles that this process has opened, and those of its own memory that others have.

    Releasing memory may have to wait for the GPU. Finalizers, which run in any thread, leave it to a dedicated thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: dict[bytes, _Memory] = {}
        self._own: weakref.WeakValueDictionary[bytes, _Memory] = weakref.WeakValueDictionary()
        self._ends: SimpleQueue[tuple[_Memory, bool, Callable[[], None]]] = SimpleQueue()
        self._ender: threading.Thread | None = None

    def open(self, address: IpcAddress) -> _Memory:
        """Return the memory of a handle, for one more user. Raises CudaError: It cannot be opened."""
        with self._lock:
            if self._ender is None:
                self._ender = threading.Thread(target=self._run_ends, name="cuda-ipc", daemon=True)
                self._ender.start()
            own = self._own.get(address.handle)
            if own is not None:
                return own
            memory = self._opened.get(address.handle)
            if memory is None:
                found = driver()
                device = found.device_of(address.gpu)
                context = found.context(device)
                allocation = Allocation(context, device, *found.open(context, address.handle))
                memory = self._opened[address.handle] = _Memory(found, address.gpu, address.handle, allocation)
            memory.users += 1
            return memory

    def of(self, address: int) -> _Memory:
        """Return the memory that an address is in, which others can open, or which another process owns.

        Raises:
            CudaError: There is no handle of it.
        """
        with self._lock:
            for memory in self._opened.values():
                if memory.start <= address < memory.start + memory.size:
                    return memory
            found = driver()
            allocation = found.allocation(address)
            handle = found.handle(allocation)
            own = self._own.get(handle)
            if own is None:
                own = self._own[handle] = _Memory(found, found.uuid(allocation.device), handle, allocation)
            return own

    def release(self, memory: _Memory, waits: bool, then: Callable[[], None]) -> None:
        """Remove a user of memory. May be called by finalizers.

        Args:
            waits: Whether the GPU may still be at work on what the user looked at.
            then: Called, in another thread, when that is over and the handle is closed where this was its last user.
        """
        self._ends.put((memory, waits, then))

    def _run_ends(self) -> None:
        while True:
            memory, waits, then = self._ends.get()
            try:
                if waits:
                    memory.wait()
                self._end(memory)
                then()
            except Exception:  # later entries must be handled
                traceback.print_exc()
            del memory, then

    def _end(self, memory: _Memory) -> None:
        with self._lock:
            memory.users -= 1
            if not memory.users and self._opened.get(memory.handle) is memory:
                del self._opened[memory.handle]
                memory.driver.close(memory.context, memory.start)


_handles = _Handles()


class ExportedMemory:
    """An exported tensor; other processes may use it as long as this object exists."""

    def __init__(self, address: IpcAddress, size: int, shape: tuple[int, ...], *keep: object) -> None:
        self.address = address
        self.size = size
        self.shape = shape
        self._keep = keep


def export(source: Any, datatype: str, *, is_done: bool = False) -> ExportedMemory | None:
    """Return where other processes find a tensor, None where they cannot: it must be copied then.

    The GPU is done with it when this returns.

    Args:
        is_done: Whether the GPU is known to be done with it.
    """
    if isinstance(source, GpuArray):
        imported = source.imported
        return ExportedMemory(imported.address, imported.size, source.shape, source)
    try:
        return _exported(source, datatype, is_done)
    except (CudaError, TritonModelException, AttributeError, BufferError, RuntimeError, TypeError, ValueError):
        return None  # no driver, memory without handles, or an object of another kind


def _exported(source: Any, datatype: str, is_done: bool) -> ExportedMemory | None:
    if source.__dlpack_device__()[0] != dlpack.CUDA:
        return None
    layout = dlpack.layout_of(source.__dlpack__())
    if not layout.is_contiguous:
        source, is_done = source.contiguous(), False
        layout = dlpack.layout_of(source.__dlpack__())
    size = prod(layout.shape) * datatypes.DTYPES[datatype].itemsize
    if not (size and layout.is_contiguous):
        return None
    memory = _handles.of(layout.address)
    offset = layout.address - memory.start
    if offset + size > memory.size:
        return None
    if not is_done:
        memory.driver.synchronize(memory.context)
    return ExportedMemory(IpcAddress(memory.gpu, memory.handle, offset), size, layout.shape, source, memory)


def finish(source: Any) -> None:
    """Return when the GPU is done with a tensor, before another thread looks at it."""
    kind, device = source.__dlpack_device__()
    if kind == dlpack.CUDA and not isinstance(source, GpuArray):
        with contextlib.suppress(CudaError):  # it is not one of a driver that is here
            driver().synchronize(driver().context(device))


class ImportedMemory:
    """Elements that another process owns.

    Args:
        address: Where they are.
        exporter: The exports of the other direction of the channel that this came by.
        release: Called, from any thread, when nothing here refers to them any more.
    """

    def __init__(
        self, export_id: int, size: int, address: IpcAddress, exporter: RegionPool | None, release: Callable[[], None]
    ) -> None:
        self.export_id = export_id
        self.size = size
        self.address = address
        self.exporter = exporter
        self._state = _MemoryReference()
        weakref.finalize(self, _end, self._state, release).atexit = False

    @property
    def is_open(self) -> bool:
        """Whether the memory is open; it then stays open even if the exporter ends."""
        return self._state.memory is not None

    def open(self) -> _Memory:
        """Open the memory, where it is not open yet."""
        state = self._state
        with state.lock:
            if state.memory is None:
                memory = _handles.open(self.address)
                if self.address.offset + self.size > memory.size:
                    _handles.release(memory, False, _nothing)
                    raise CudaError(f"{self.size} bytes at {self.address.offset} are not within {memory.size} bytes")
                state.memory = memory
            return state.memory

    def shown(self) -> tuple[_Memory, int]:
        """Return the memory and the address of the elements, for work of the GPU. Raises as `open`."""
        memory = self.open()
        self._state.waits = True
        return memory, memory.start + self.address.offset

    def copied(self) -> memoryview:
        """Return a copy in the memory of the CPU. Raises as `open`."""
        memory = self.open()
        data = bytearray(self.size)
        target = (ctypes.c_char * self.size).from_buffer(data)
        memory.driver.to_host(memory.context, target, memory.start + self.address.offset)
        return memoryview(data)


class _MemoryReference:
    """The reference that imported elements hold on opened memory."""

    __slots__ = ("lock", "memory", "waits")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.memory: _Memory | None = None
        self.waits = False


def _end(state: _MemoryReference, release: Callable[[], None]) -> None:
    if state.memory is None:
        release()
    else:
        _handles.release(state.memory, state.waits, release)


def _nothing() -> None:
    """Release nothing."""


class GpuArray:
    """A tensor that another process owns, for frameworks: offers dlpack and itself as an array of the CPU."""

    __slots__ = ("datatype", "imported", "shape")

    def __init__(self, imported: ImportedMemory, shape: tuple[int, ...], datatype: str) -> None:
        self.imported = imported
        self.shape = shape
        self.datatype = datatype

    def cpu(self) -> Array:
        """Return a copy in the memory of the CPU; for BF16 its bits. Raises CudaError."""
        return datatypes.array_of(self.datatype, self.shape, self.imported.copied())

    def __dlpack__(
        self, *, stream: object = None, max_version: object = None, dl_device: object = None, copy: bool | None = None
    ) -> object:
        if dl_device == dlpack.CPU:
            return dlpack.export(self.cpu(), self.datatype)
        memory, address = self.imported.shown()
        # The exporter has synchronized with the GPU: no stream has to wait.
        return dlpack.capsule_of(address, (dlpack.CUDA, memory.device), self.shape, self.datatype, self.imported)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CUDA, self.imported.open().device)


class CapsuleArray:
    """A tensor of this process in the memory of a GPU, of which a capsule is all that there is.

    Raises:
        CudaError: It is not in the memory of a GPU that this process can use, or its elements are scattered.
    """

    __slots__ = ("_capsule", "_layout", "datatype")

    def __init__(self, capsule: object, datatype: str) -> None:
        layout = dlpack.layout_of(capsule)
        if layout.device[0] != dlpack.CUDA or not layout.is_contiguous:
            raise CudaError("the elements do not follow each other in the memory of a GPU")
        driver()
        self._capsule = capsule
        self._layout = layout
        self.datatype = datatype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._layout.shape

    def cpu(self) -> Array:
        """Return a copy in the memory of the CPU, when the GPU is done; for BF16 its bits. Raises CudaError."""
        found = driver()
        context = found.context(self._layout.device[1])
        data = bytearray(prod(self.shape) * datatypes.DTYPES[self.datatype].itemsize)
        if data:
            found.synchronize(context)
            found.to_host(context, (ctypes.c_char * len(data)).from_buffer(data), self._layout.address)
        return datatypes.array_of(self.datatype, self.shape, memoryview(data))

    def __dlpack__(
        self, *, stream: object = None, max_version: object = None, dl_device: object = None, copy: bool | None = None
    ) -> object:
        return dlpack.capsule_of(self._layout.address, self._layout.device, self.shape, self.datatype, self)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._layout.device


def imported_array(
    place: object,
    shape: tuple[int, ...],
    datatype: str,
    exporter: RegionPool | None,
    release: Callable[[int], None],
) -> Any:
    """Return what a place in a message leads to: a `GpuArray`, or what this end itself has exported.

    Args:
        release: Called, from any thread, with the id of an export of the other end that is not needed any more.

    Raises:
        ChannelError: It leads nowhere.
    """
    export_id, size, gpu, handle, offset = _checked(place)
    is_shape = isinstance(shape, tuple) and all(type(length) is int and length > 0 for length in shape)
    dtype = datatypes.DTYPES.get(datatype) if isinstance(datatype, str) else None
    if dtype is None or not is_shape or prod(shape) * dtype.itemsize != size:
        raise ChannelError(f"{size} bytes of a GPU are no tensor of shape {shape!r} and datatype {datatype!r}")
    if export_id > 0:
        imported = ImportedMemory(
            export_id, size, IpcAddress(gpu, handle, offset), exporter, partial(release, export_id)
        )
        return GpuArray(imported, shape, datatype)
    if exporter is None:
        raise ChannelError(f"export {-export_id} is named as one of this end's, which has none to name")
    own = exporter.exported(-export_id)
    if (own.datatype, own.shape) != (datatype, shape):
        raise ChannelError(f"export {-export_id} is {own.datatype} of shape {list(own.shape)}")
    return own.content


def _checked(place: object) -> Place:
    if isinstance(place, tuple) and len(place) == PLACE_LENGTH:
        export_id, size, gpu, handle, offset = place
        numbers_fit = all(type(number) is int for number in (export_id, size, offset)) and size > 0 and offset >= 0
        lengths = (len(gpu), len(handle)) if type(gpu) is bytes and type(handle) is bytes else None
        if numbers_fit and export_id and lengths == ((UUID_BYTES, HANDLE_BYTES) if export_id > 0 else (0, 0)):
            return export_id, size, gpu, handle, offset
    raise ChannelError(f"the place of a tensor of a GPU is malformed: {place!r}")
