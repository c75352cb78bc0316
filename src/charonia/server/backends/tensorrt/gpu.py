"""A GPU as an instance uses it: a stream, copies, memory from pools, CUDA graphs.

Source: CUDA driver API, "Memory Management", "Stream Management" and "Graph Management".
"""

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from math import prod
from typing import Any

import numpy as np

from charonia.core.dtypes import DataType
from charonia.core.errors import unavailable
from charonia.core.tensor import Array
from charonia.server.backends.block_pool import Block, BlockPool, within_an_eighth
from charonia.server.channel.cuda_driver import CudaError, Driver, driver
from charonia.server.metrics.devices import MemoryAccount

ALIGNMENT = 256
"""Of everything in a block, as TensorRT asks; memory of a GPU has it."""

_NON_BLOCKING = 1
_PORTABLE = 1
_THREAD_LOCAL = 1
_CAPABILITY = (75, 76)
"""Attributes of a GPU: major and minor number of its compute capability."""


class Gpus:
    """The pools of all GPUs, which the models of the backend share. Thread-safe.

    Args:
        pinned: Account of the pinned memory.
        limit_bytes: Limit of the memory of each GPU, 0 for all that it has.
        accounts: Where the account of the memory of each GPU that is used goes.
    """

    def __init__(self, pinned: MemoryAccount, limit_bytes: int, accounts: dict[int, MemoryAccount]) -> None:
        self._pinned = pinned
        self._limit_bytes = limit_bytes
        self._accounts = accounts
        self._pools: dict[int, tuple[BlockPool, BlockPool]] = {}
        self._lock = threading.Lock()

    def pools(self, device: int) -> tuple[BlockPool, BlockPool]:
        """Return pinned memory for a GPU, and the memory of the GPU. Raises CudaError."""
        with self._lock:
            if device not in self._pools:
                with driver().current(driver().context(device)):
                    account = MemoryAccount(self._limit_bytes or _memory_info()[1])
                self._accounts[device] = account
                self._pools[device] = (
                    BlockPool(self._pinned, partial(_pinned, device)),
                    BlockPool(account, partial(_Memory, device, ("cuMemAlloc_v2", "cuMemFree_v2")), within_an_eighth),
                )
            return self._pools[device]

    def trim(self, device: int) -> None:
        """Free the memory of a GPU that no batch uses, for a plan that is loaded or because one is unloaded."""
        if device in self._pools:
            self._pools[device][1].trim()


class _Memory:
    """Memory that the driver allocates, freed with its last reference."""

    def __init__(self, device: int, functions: tuple[str, str], size: int, *flags: int) -> None:
        found, address = driver(), ctypes.c_void_p()
        context = found.context(device)
        try:
            with found.current(context):
                found.call(functions[0], ctypes.byref(address), ctypes.c_size_t(size), *flags)
        except CudaError as error:
            raise RuntimeError(str(error)) from error
        self.address = address.value or 0
        weakref.finalize(self, _free, found, context, functions[1], address).atexit = False


def _pinned(device: int, size: int) -> Any:
    memory = _Memory(device, ("cuMemHostAlloc", "cuMemFreeHost"), size, _PORTABLE)
    array: Any = (ctypes.c_char * size).from_address(memory.address)
    array.memory = memory  # which lives as long
    return array


def _free(found: Driver, context: ctypes.c_void_p, function: str, address: object) -> None:
    with suppress(CudaError), found.current(context):  # a GPU that has failed has nothing to free
        found.call(function, address)


def _memory_info() -> tuple[int, int]:
    """Return the free bytes of the current GPU, and all that it has. Raises CudaError."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    driver().call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


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
        memory: The memory of the GPU; that of a block has an `address`.
        priority: CUDA's priority of the stream.

    Raises:
        CudaError: The GPU fails.
    """

    def __init__(self, device: int, pinned: BlockPool, memory: BlockPool, priority: int = 0) -> None:
        self._device = device
        self._pinned = pinned
        self._memory = memory
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

    def take(self, size: int) -> Block:
        """Return a block of the GPU's memory, which goes back by `give_back` after `wait`.

        Raises:
            ServingError: UNAVAILABLE when there is not enough, even without the idle blocks.
            CudaError: The GPU fails.
        """
        block = self._memory.take(size)
        if block is None:
            account = self._memory.account
            free = min(account.limit_bytes - account.used_bytes, _memory_info()[0])
            raise unavailable(
                f"GPU {self._device} has not enough memory: a batch needs {size} bytes, {free} are free",
                hint="fewer models or instances at a time, or a plan with smaller profiles; "
                f"the limit of all batches is {account.limit_bytes} (--backend-config=tensorrt,memory-pool-byte-size)",
            )
        return block

    def give_back(self, block: Block) -> None:
        """Give a block back that the stream no longer uses."""
        self._memory.give_back(block)

    def clear(self, address: int, size: int) -> None:
        """Begin to fill memory of the GPU with zeros. Raises CudaError."""
        target, stream = ctypes.c_uint64(address), ctypes.c_void_p(self.stream)
        self._driver.call("cuMemsetD8Async", target, ctypes.c_uint8(0), ctypes.c_size_t(size), stream)

    def put(self, array: Array, address: int) -> None:
        """Begin to copy an array to the GPU, through pinned memory where there is some."""
        source = self._host(array.nbytes)
        np.copyto(source.view(array.dtype).reshape(array.shape), array)
        self._copy("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(address), _address(source), array.nbytes)

    def get(self, address: int, shape: Sequence[int], datatype: DataType) -> Array:
        """Begin to copy a tensor from the GPU; return the array, which is complete after `wait`."""
        raw = self._host(prod(shape) * datatype.byte_size)
        self._copy("cuMemcpyDtoHAsync_v2", _address(raw), ctypes.c_uint64(address), raw.nbytes)
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
        """Release the stream, when it has done what was begun, and its graphs."""
        with suppress(CudaError):
            self.wait()
        for graph in graphs:
            with suppress(CudaError):
                self._driver.call("cuGraphExecDestroy", graph)
        with suppress(CudaError):
            self._driver.call("cuStreamDestroy_v2", ctypes.c_void_p(self.stream))

    def _host(self, size: int) -> Array:
        """Return memory of the CPU for a copy, pinned where there is some: free when the last view of it is gone."""
        block = self._pinned.take(size) if size else None
        if block is None:
            raw: Array = np.empty(size, np.uint8)
        else:
            raw = block.array(size)
            weakref.finalize(raw, self._pinned.give_back, block)
        self._busy.append(raw)
        return raw

    def _copy(self, function: str, target: object, source: object, size: int) -> None:
        if size:
            self._driver.call(function, target, source, ctypes.c_size_t(size), ctypes.c_void_p(self.stream))


def _address(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
