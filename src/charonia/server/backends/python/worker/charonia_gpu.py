"""Tensors in the memory of GPUs that processes lend to each other.

The lender sends a handle of the memory and keeps the tensor until the borrower gives the loan back. The borrower opens
the handle when it needs the elements, once for all tensors in the same memory, and closes it before it gives the last
of them back. A process cannot open a handle of its own memory, and cannot make one for memory that it has opened; both
are looked up here. Used by both ends of a channel, on Python 3.8 and later.
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

if TYPE_CHECKING or __package__:
    from charonia.server.backends.python.worker import charonia_datatypes as datatypes
    from charonia.server.backends.python.worker import charonia_dlpack as dlpack
    from charonia.server.backends.python.worker.charonia_cuda import (
        HANDLE_BYTES,
        UUID_BYTES,
        Allocation,
        CudaError,
        driver,
    )
    from charonia.server.backends.python.worker.charonia_errors import TritonModelException
    from charonia.server.backends.python.worker.charonia_regions import ChannelError
else:  # siblings of the worker's script; the package is not there
    import charonia_datatypes as datatypes
    import charonia_dlpack as dlpack
    from charonia_cuda import HANDLE_BYTES, UUID_BYTES, Allocation, CudaError, driver
    from charonia_errors import TritonModelException
    from charonia_regions import ChannelError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from charonia.server.backends.python.worker.charonia_cuda import Driver
    from charonia.server.backends.python.worker.charonia_datatypes import Array
    from charonia.server.backends.python.worker.charonia_regions import RegionPool

    Place = tuple[int, int, bytes, bytes, int]
    """Where a tensor's elements are: id of the loan, negative for one of the receiver's own, of which nothing else
    counts but the size; size in bytes; UUID of the GPU, handle of the memory, offset in it."""

PLACE_LENGTH = 5


class Spot(NamedTuple):
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

    What is to be done when elements are not needed any more may wait for the GPU. Finalizers, which run in any thread,
    leave it to a thread that is there for it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: dict[bytes, _Memory] = {}
        self._own: weakref.WeakValueDictionary[bytes, _Memory] = weakref.WeakValueDictionary()
        self._ends: SimpleQueue[tuple[_Memory, bool, Callable[[], None]]] = SimpleQueue()
        self._ender: threading.Thread | None = None

    def open(self, spot: Spot) -> _Memory:
        """Return the memory of a handle, for one more user.

        Raises:
            CudaError: It cannot be opened.
        """
        with self._lock:
            if self._ender is None:
                self._ender = threading.Thread(target=self._run_ends, name="gpu-loans", daemon=True)
                self._ender.start()
            own = self._own.get(spot.handle)
            if own is not None:
                return own
            memory = self._opened.get(spot.handle)
            if memory is None:
                found = driver()
                device = found.device_of(spot.gpu)
                context = found.context(device)
                allocation = Allocation(context, device, *found.open(context, spot.handle))
                memory = self._opened[spot.handle] = _Memory(found, spot.gpu, spot.handle, allocation)
            memory.users += 1
            return memory

    def of(self, address: int) -> _Memory:
        """Return the memory that an address is in, which others can open, or have lent.

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

    def let_go(self, memory: _Memory, waits: bool, then: Callable[[], None]) -> None:
        """A user of memory is gone. Callable from finalizers.

        Args:
            memory: The memory.
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
            except Exception:  # others wait for theirs
                traceback.print_exc()
            del memory, then

    def _end(self, memory: _Memory) -> None:
        with self._lock:
            memory.users -= 1
            if not memory.users and self._opened.get(memory.handle) is memory:
                del self._opened[memory.handle]
                memory.driver.close(memory.context, memory.start)


_handles = _Handles()


class Exported:
    """A tensor where other processes find it, for as long as this lives.

    Attributes:
        spot: Where it is.
        size: Size in bytes.
        shape: Shape.
    """

    __slots__ = ("_keep", "shape", "size", "spot")

    def __init__(self, spot: Spot, size: int, shape: tuple[int, ...], *keep: object) -> None:
        self.spot = spot
        self.size = size
        self.shape = shape
        self._keep = keep


def export(source: Any, datatype: str, *, is_done: bool = False) -> Exported | None:
    """Return where other processes find a tensor, None where they cannot: it must be copied then.

    The GPU is done with it when this returns.

    Args:
        source: Offers `__dlpack__`.
        datatype: Its datatype as the protocol writes it.
        is_done: Whether the GPU is known to be done with it.
    """
    if isinstance(source, GpuArray):
        borrowed = source.borrowed
        return Exported(borrowed.spot, borrowed.size, source.shape, source)
    try:
        return _exported(source, datatype, is_done)
    except (CudaError, TritonModelException, AttributeError, BufferError, RuntimeError, TypeError, ValueError):
        return None  # no driver, memory without handles, or an object of another kind


def _exported(source: Any, datatype: str, is_done: bool) -> Exported | None:
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
    return Exported(Spot(memory.gpu, memory.handle, offset), size, layout.shape, source, memory)


def finish(source: Any) -> None:
    """Return when the GPU is done with a tensor, before another thread looks at it."""
    kind, device = source.__dlpack_device__()
    if kind == dlpack.CUDA and not isinstance(source, GpuArray):
        with contextlib.suppress(CudaError):  # it is not one of a driver that is here
            driver().synchronize(driver().context(device))


class Borrowed:
    """Elements that another process has lent.

    Args:
        loan: Id of the loan.
        size: Size in bytes.
        spot: Where they are.
        lender: Who keeps the loans of the other direction of the channel that this came by.
        give_back: Called, from any thread, when nobody here looks at them any more.
    """

    __slots__ = ("__weakref__", "_state", "lender", "loan", "size", "spot")

    def __init__(
        self, loan: int, size: int, spot: Spot, lender: RegionPool | None, give_back: Callable[[], None]
    ) -> None:
        self.loan = loan
        self.size = size
        self.spot = spot
        self.lender = lender
        self._state = _Use()
        weakref.finalize(self, _end, self._state, give_back).atexit = False

    @property
    def is_open(self) -> bool:
        """Whether the memory is open, and stays so whatever becomes of the lender."""
        return self._state.memory is not None

    def open(self) -> _Memory:
        """Open the memory, where it is not open yet.

        Raises:
            CudaError: It cannot be opened.
        """
        state = self._state
        with state.lock:
            if state.memory is None:
                memory = _handles.open(self.spot)
                if self.spot.offset + self.size > memory.size:
                    _handles.let_go(memory, False, _nothing)
                    raise CudaError(f"{self.size} bytes at {self.spot.offset} are not within {memory.size} bytes")
                state.memory = memory
            return state.memory

    def shown(self) -> tuple[_Memory, int]:
        """Return the memory and the address of the elements, for work of the GPU. Raises as `open`."""
        memory = self.open()
        self._state.waits = True
        return memory, memory.start + self.spot.offset

    def copied(self) -> memoryview:
        """Return a copy in the memory of the CPU. Raises as `open`."""
        memory = self.open()
        data = bytearray(self.size)
        target = (ctypes.c_char * self.size).from_buffer(data)
        memory.driver.to_host(memory.context, target, memory.start + self.spot.offset)
        return memoryview(data)


class _Use:
    """What is to be ended when borrowed elements are not needed any more."""

    __slots__ = ("lock", "memory", "waits")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.memory: _Memory | None = None
        self.waits = False


def _end(state: _Use, give_back: Callable[[], None]) -> None:
    if state.memory is None:
        give_back()
    else:
        _handles.let_go(state.memory, state.waits, give_back)


def _nothing() -> None:
    """Nobody waits for it."""


class GpuArray:
    """A tensor that another process has lent, for frameworks: offers dlpack and itself as an array of the CPU.

    Args:
        borrowed: Its elements.
        shape: Shape.
        datatype: Datatype as the protocol writes it.
    """

    __slots__ = ("borrowed", "datatype", "shape")

    def __init__(self, borrowed: Borrowed, shape: tuple[int, ...], datatype: str) -> None:
        self.borrowed = borrowed
        self.shape = shape
        self.datatype = datatype

    def cpu(self) -> Array:
        """Return a copy in the memory of the CPU; for BF16 its bits. Raises CudaError."""
        return datatypes.array_of(self.datatype, self.shape, self.borrowed.copied())

    def __dlpack__(
        self, *, stream: object = None, max_version: object = None, dl_device: object = None, copy: bool | None = None
    ) -> object:
        if dl_device == dlpack.CPU:
            return dlpack.export(self.cpu(), self.datatype)
        memory, address = self.borrowed.shown()
        # Whoever lent it had waited for the GPU: no stream has to wait.
        return dlpack.capsule_of(address, (dlpack.CUDA, memory.device), self.shape, self.datatype, self.borrowed)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CUDA, self.borrowed.open().device)


class CapsuleArray:
    """A tensor of this process in the memory of a GPU, of which a capsule is all that there is.

    Args:
        capsule: The capsule, which is not read.
        datatype: Its datatype as the protocol writes it.

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
        """Shape."""
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


def borrowed_array(
    place: object,
    shape: tuple[int, ...],
    datatype: str,
    lender: RegionPool | None,
    give_back: Callable[[int], None],
) -> Any:
    """Return what a place in a message leads to: a `GpuArray`, or what this end itself has lent.

    Args:
        place: Place, as it came.
        shape: Shape.
        datatype: Datatype as the protocol writes it.
        lender: This end's loans.
        give_back: Called, from any thread, with the id of a loan of the other end that is not needed any more.

    Raises:
        ChannelError: It leads nowhere.
    """
    loan, size, gpu, handle, offset = _checked(place)
    is_shape = isinstance(shape, tuple) and all(type(length) is int and length > 0 for length in shape)
    dtype = datatypes.DTYPES.get(datatype) if isinstance(datatype, str) else None
    if dtype is None or not is_shape or prod(shape) * dtype.itemsize != size:
        raise ChannelError(f"{size} bytes of a GPU are no tensor of shape {shape!r} and datatype {datatype!r}")
    if loan > 0:
        borrowed = Borrowed(loan, size, Spot(gpu, handle, offset), lender, partial(give_back, loan))
        return GpuArray(borrowed, shape, datatype)
    if lender is None:
        raise ChannelError(f"loan {-loan} is named as one of this end's, which has none to name")
    lent = lender.lent_gpu(-loan)
    if (lent.datatype, lent.shape) != (datatype, shape):
        raise ChannelError(f"loan {-loan} was lent as {lent.datatype} of shape {list(lent.shape)}")
    return lent.content


def _checked(place: object) -> Place:
    if isinstance(place, tuple) and len(place) == PLACE_LENGTH:
        loan, size, gpu, handle, offset = place
        numbers_fit = all(type(number) is int for number in (loan, size, offset)) and size > 0 and offset >= 0
        lengths = (len(gpu), len(handle)) if type(gpu) is bytes and type(handle) is bytes else None
        if numbers_fit and loan and lengths == ((UUID_BYTES, HANDLE_BYTES) if loan > 0 else (0, 0)):
            return loan, size, gpu, handle, offset
    raise ChannelError(f"the place of a tensor of a GPU is malformed: {place!r}")
