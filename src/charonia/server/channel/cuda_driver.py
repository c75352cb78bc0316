"""A minimal binding of the CUDA driver library, with errors as exceptions.

Used by the server and by worker processes, so it needs only the standard library and runs on Python 3.8. The library is
installed wherever a GPU can be used. Each call pushes its context and pops it afterwards, because frameworks use the
thread's current context to determine their current GPU. Source: CUDA driver API, "Primary Context
Management", "Unified Addressing" and "Inter-process communication".
"""

from __future__ import annotations

import contextlib
import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

LIBRARY = "libcuda.so.1"

HANDLE_BYTES = 64
"""Size of a handle for other processes."""

UUID_BYTES = 16
"""Size of a GPU's UUID. Device numbers differ between processes that see different GPUs."""

_LAZY_PEER_ACCESS = 1
_POINTER_CONTEXT = 1
_POINTER_DEVICE = 9
_COMPUTE_MODE = 20
_COMPUTE_MODE_DEFAULT = 0


class CudaError(Exception):
    """An error of the driver, or there is no driver."""


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * UUID_BYTES),)


class Allocation(NamedTuple):
    """Memory as it was allocated, of which a tensor is a part."""

    context: ctypes.c_void_p
    device: int
    start: int
    size: int


class Driver:
    """The driver of this machine, for the GPUs that this process sees."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self.call("cuInit", 0)

    def device_count(self) -> int:
        """Return how many GPUs this process sees."""
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def is_shared(self, device_id: int) -> bool:
        """Return whether several processes may use a GPU at a time."""
        device, mode = ctypes.c_int(), ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), device_id)
        self.call("cuDeviceGetAttribute", ctypes.byref(mode), _COMPUTE_MODE, device)
        return mode.value == _COMPUTE_MODE_DEFAULT

    def context(self, device_id: int) -> ctypes.c_void_p:
        """Return the primary context of a GPU, which stays until the process ends."""
        if device_id not in self._contexts:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self.call("cuDeviceGet", ctypes.byref(device), device_id)
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[device_id] = context
        return self._contexts[device_id]

    def uuid(self, device_id: int) -> bytes:
        """Return the UUID of a GPU."""
        device, uuid = ctypes.c_int(), _Uuid()
        self.call("cuDeviceGet", ctypes.byref(device), device_id)
        self.call("cuDeviceGetUuid", ctypes.byref(uuid), device)
        return bytes(uuid)

    def device_of(self, uuid: bytes) -> int:
        """Return the number that a GPU has in this process. Raises CudaError: The process does not see it."""
        for device_id in range(self.device_count()):
            if self.uuid(device_id) == uuid:
                return device_id
        raise CudaError(f"this process does not see GPU {uuid.hex()}: CUDA_VISIBLE_DEVICES hides it")

    def allocation(self, address: int) -> Allocation:
        """Return the memory that an address belongs to."""
        context, device = ctypes.c_void_p(), ctypes.c_int()
        pointer = ctypes.c_uint64(address)
        self.call("cuPointerGetAttribute", ctypes.byref(context), _POINTER_CONTEXT, pointer)
        self.call("cuPointerGetAttribute", ctypes.byref(device), _POINTER_DEVICE, pointer)
        if not context.value:
            raise CudaError("memory of a pool belongs to no context")
        start, size = self._range(context, pointer)
        return Allocation(context, device.value, start, size)

    def handle(self, allocation: Allocation) -> bytes:
        """Return the handle by which other processes open memory, which is to be this process' own.

        Raises:
            CudaError: It has none: it was allocated in a way that knows no handles.
        """
        handle = _IpcHandle()
        with self.current(allocation.context):
            self.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(allocation.start))
        return bytes(handle)

    def synchronize(self, context: ctypes.c_void_p) -> None:
        """Return when the GPU has done everything that was begun in a context."""
        with self.current(context):
            self.call("cuCtxSynchronize")

    def open(self, context: ctypes.c_void_p, raw_handle: bytes) -> tuple[int, int]:
        """Return address and size of the memory behind a handle."""
        address = ctypes.c_uint64()
        handle = _IpcHandle.from_buffer_copy(raw_handle)
        with self.current(context):
            self.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, _LAZY_PEER_ACCESS)
        try:
            start, size = self._range(context, address)
        except CudaError:
            self.close(context, address.value)
            raise
        return address.value, start + size - address.value

    def close(self, context: ctypes.c_void_p, address: int) -> None:
        """Close memory; memory that is already lost is not an error."""
        with contextlib.suppress(CudaError), self.current(context):
            self.call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def to_host(self, context: ctypes.c_void_p, target: Any, address: int) -> None:
        with self.current(context):
            self.call("cuMemcpyDtoH_v2", target, ctypes.c_uint64(address), ctypes.c_size_t(len(target)))

    def to_device(self, context: ctypes.c_void_p, address: int, data: bytes) -> None:
        with self.current(context):
            self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))

    def _range(self, context: ctypes.c_void_p, address: ctypes.c_uint64) -> tuple[int, int]:
        start, size = ctypes.c_uint64(), ctypes.c_size_t()
        with self.current(context):
            self.call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size), address)
        return start.value, size.value

    @contextlib.contextmanager
    def current(self, context: ctypes.c_void_p) -> Iterator[None]:
        """Make a context current in this thread."""
        self.call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def call(self, function: str, *arguments: object) -> None:
        """Call a function of the library. Raises CudaError."""
        status = getattr(self._library, function)(*arguments)
        if status:
            raise CudaError(f"{function} failed with CUDA error {status}")


@lru_cache(maxsize=None)  # noqa: UP033 - Python 3.8
def driver() -> Driver:
    """Return the driver of this machine. Raises CudaError: There is none, or it finds no GPU."""
    try:
        return Driver(ctypes.CDLL(LIBRARY))
    except (OSError, AttributeError) as error:
        raise CudaError(f"there is no driver of NVIDIA GPUs: {error}") from error


def is_usable() -> bool:
    """Return whether this process sees GPUs, and may use all of them beside other processes."""
    try:
        found = driver()
        return all(map(found.is_shared, range(found.device_count()))) and found.device_count() > 0
    except CudaError:
        return False
