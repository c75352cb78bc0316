"""A GPU as an instance uses it: a stream, copies, memory from pools, CUDA graphs.

Source: CUDA driver API, "Memory Management", "Stream Management" and "Graph Management".
"""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from math import prod
from typing import Any

import numpy as np

from charonia.core.dtypes import DataType
from charonia.core.errors import unavailable
from charonia.core.tensor import Array
from charonia.server.backends.block_pool import BlockPool
from charonia.server.backends.python.worker.cuda_driver import CudaError, Driver, driver
from charonia.server.metrics.devices import PinnedMemory

_NON_BLOCKING = 1
_PORTABLE = 1
_THREAD_LOCAL = 1
_CAPABILITY = (75, 76)
"""Attributes of a GPU: major and minor number of its compute capability."""


class GpuMemory:
    """Memory of a GPU, freed with its last reference.

    Attributes:
        address: Its address on the GPU.
        size: Number of bytes.
    """

    __slots__ = ("__weakref__", "address", "size")

    def __init__(self, device: int, size: int) -> None:
        """Allocate it. Raises RuntimeError when the GPU has no more."""
        found, address = driver(), ctypes.c_uint64()
        context = found.context(device)
        _allocate(found, context, "cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self.address = address.value
        self.size = size
        weakref.finalize(self, _free, found, context, "cuMemFree_v2", address).atexit = False


def pinned_pool(device: int, account: PinnedMemory) -> BlockPool:
    """Return a pool of pinned memory, for copies to and from a GPU."""
    return BlockPool(account, lambda size: _pinned(device, size))


def _pinned(device: int, size: int) -> Any:
    found, address = driver(), ctypes.c_void_p()
    context = found.context(device)
    _allocate(found, context, "cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(size), _PORTABLE)
    memory = (ctypes.c_char * size).from_address(address.value or 0)
    weakref.finalize(memory, _free, found, context, "cuMemFreeHost", address).atexit = False
    return memory


def _allocate(found: Driver, context: ctypes.c_void_p, function: str, *arguments: object) -> None:
    try:
        with found.current(context):
            found.call(function, *arguments)
    except CudaError as error:
        raise RuntimeError(str(error)) from error


def _free(found: Driver, context: ctypes.c_void_p, function: str, address: object) -> None:
    with suppress(CudaError), found.current(context):  # a GPU that has failed has nothing to free
        found.call(function, address)


def capability(device: int) -> str:
    """Return the compute capability of a GPU, such as "9.0". Raises CudaError."""
    found, handle, numbers = driver(), ctypes.c_int(), []
    found.call("cuDeviceGet", ctypes.byref(handle), device)
    for attribute in _CAPABILITY:
        number = ctypes.c_int()
        found.call("cuDeviceGetAttribute", ctypes.byref(number), attribute, handle)
        numbers.append(str(number.value))
    return ".".join(numbers)


class GpuStream:
    """A GPU and a stream of its own on it. Used by one thread at a time, within `current`.

    Args:
        device: Number of the GPU.
        host: Pinned memory for it.
        priority: CUDA's priority of the stream.

    Attributes:
        stream: The stream.
    """

    def __init__(self, device: int, host: BlockPool, priority: int = 0) -> None:
        self._device = device
        self._host = host
        self._driver = driver()
        self._context = self._driver.context(device)
        self._busy: list[object] = []  # what the stream still reads or writes
        stream = ctypes.c_void_p()
        with self.current():
            self._driver.call("cuStreamCreateWithPriority", ctypes.byref(stream), _NON_BLOCKING, priority)
        self.stream = stream.value or 0

    def current(self) -> AbstractContextManager[None]:
        """Make the GPU that of this thread."""
        return self._driver.current(self._context)

    def take(self, size: int) -> GpuMemory:
        """Return memory of the GPU, filled with zeros.

        Raises:
            ServingError: UNAVAILABLE when there is not enough.
        """
        try:
            memory = GpuMemory(self._device, max(size, 1))
        except RuntimeError as error:
            raise unavailable(f"GPU {self._device} has no {size} bytes of memory left: {error}") from error
        self._driver.call(
            *("cuMemsetD8Async", ctypes.c_uint64(memory.address), ctypes.c_uint8(0)),
            *(ctypes.c_size_t(memory.size), ctypes.c_void_p(self.stream)),
        )
        return memory

    def put(self, array: Array, address: int) -> None:
        """Begin to copy an array to the GPU, through pinned memory where there is some."""
        size = array.nbytes
        block = self._host.take(size) if size else None
        if block is None:
            source = np.ascontiguousarray(array)
        else:
            source = block.array(size)
            weakref.finalize(source, self._host.give_back, block)
            np.copyto(source.view(array.dtype).reshape(array.shape), array)
        self._busy.append(source)
        self._copy("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(address), _host(source), size)

    def get(self, address: int, shape: Sequence[int], datatype: DataType) -> Array:
        """Begin to copy a tensor from the GPU; return the array, which is complete after `wait`."""
        size = prod(shape) * datatype.byte_size
        block = self._host.take(size) if size else None
        if block is None:
            raw: Array = np.empty(size, np.uint8)
        else:
            raw = block.array(size)
            # Views keep it alive: the block is free when the last one is gone.
            weakref.finalize(raw, self._host.give_back, block)
        self._busy.append(raw)
        self._copy("cuMemcpyDtoHAsync_v2", _host(raw), ctypes.c_uint64(address), size)
        return raw.view(datatype.numpy).reshape(tuple(shape))

    def wait(self) -> None:
        """Return when everything that was begun is done. Raises CudaError."""
        try:
            self._driver.call("cuStreamSynchronize", ctypes.c_void_p(self.stream))
        finally:
            self._busy.clear()

    def capture(self, work: Callable[[], None]) -> ctypes.c_void_p:
        """Return a graph of what the work puts on the stream, which it does not do yet. Raises CudaError."""
        stream, graph, ready = ctypes.c_void_p(self.stream), ctypes.c_void_p(), ctypes.c_void_p()
        self._driver.call("cuStreamBeginCapture_v2", stream, _THREAD_LOCAL)
        try:
            work()
        finally:
            self._driver.call("cuStreamEndCapture", stream, ctypes.byref(graph))
        try:
            self._driver.call("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, ctypes.c_uint64(0))
        finally:
            self._driver.call("cuGraphDestroy", graph)
        return ready

    def launch(self, graph: ctypes.c_void_p) -> None:
        """Begin what a graph holds. Raises CudaError."""
        self._driver.call("cuGraphLaunch", graph, ctypes.c_void_p(self.stream))

    def close(self, graphs: Sequence[ctypes.c_void_p]) -> None:
        """Release the stream and its graphs."""
        for graph in graphs:
            with suppress(CudaError):
                self._driver.call("cuGraphExecDestroy", graph)
        with suppress(CudaError):
            self._driver.call("cuStreamDestroy_v2", ctypes.c_void_p(self.stream))

    def _copy(self, function: str, target: object, source: object, size: int) -> None:
        if size:
            self._driver.call(function, target, source, ctypes.c_size_t(size), ctypes.c_void_p(self.stream))


def _host(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
