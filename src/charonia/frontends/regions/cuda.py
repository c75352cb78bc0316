"""A client's memory on a GPU, opened by its inter-process handle through the driver's library.

Models take arrays of the host, so an input is copied from the GPU and an output to it, once. The library is that of the
driver, libcuda, which is there wherever a GPU can be used. Source: CUDA driver API, "Unified Addressing" and
"Inter-process communication".
"""

import ctypes
import weakref
from functools import cache
from typing import Any

from charonia.core.errors import ServingError, internal, invalid

HANDLE_BYTES = 64
"""Size of a handle for other processes."""

DEVICES_MAX = 1024

_LIBRARY = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1
_WHAT_FAILED = "cuda shared memory"


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class CudaMemory:
    """A part of a GPU's memory. It is given back when neither this nor a copy in progress needs it."""

    def __init__(self, name: str, raw_handle: bytes, device_id: int, byte_size: int) -> None:
        """Open the memory.

        Args:
            name: Name of the region.
            raw_handle: The handle.
            device_id: The GPU.
            byte_size: Size of the part, from the start of the memory on.

        Raises:
            ServingError: INVALID_ARG when there is no such memory, or no GPU.
        """
        driver = _Driver.of(name)
        if len(raw_handle) != HANDLE_BYTES or byte_size < 1 or not 0 <= device_id < DEVICES_MAX:
            raise _refused(name, f"invalid args: a handle has {HANDLE_BYTES} bytes and a region at least 1")
        self._driver = driver
        try:
            self._context = driver.context(device_id)
            self._address, size = driver.open(self._context, raw_handle)
        except ServingError as error:
            raise _refused(name, error.message) from error
        if byte_size > size:
            driver.close(self._context, self._address)
            raise _refused(name, f"invalid args: the memory has {size} bytes, got byte_size {byte_size}")
        weakref.finalize(self, driver.close, self._context, self._address)

    def view(self, offset: int, byte_size: int) -> memoryview:
        """Return a copy of bytes of the part, which must be within it. Raises INTERNAL when the GPU fails."""
        data = (ctypes.c_char * byte_size)()
        self._driver.to_host(self._context, data, self._address + offset)
        return memoryview(data).cast("B").toreadonly()

    def write(self, offset: int, data: memoryview) -> None:
        """Copy `data` into the part, which it must fit. Raises INTERNAL when the GPU fails."""
        self._driver.to_device(self._context, self._address + offset, bytes(data))


class _Driver:
    """The few functions of the driver that are needed, with errors as exceptions."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._call("cuInit", 0)

    @classmethod
    def of(cls, name: str) -> "_Driver":
        """Return the driver of this machine; raises INVALID_ARG where there is none or it finds no GPU."""
        try:
            return _driver()
        except (OSError, AttributeError, ServingError) as error:
            raise invalid(
                f"failed to register CUDA shared memory region: '{name}', GPUs not supported",
                hint="this server has no GPU that it can use: register system shared memory",
            ) from error

    def context(self, device_id: int) -> ctypes.c_void_p:
        """Return the primary context of a GPU, which stays until the process ends."""
        if device_id not in self._contexts:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(device), device_id)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[device_id] = context
        return self._contexts[device_id]

    def open(self, context: ctypes.c_void_p, raw_handle: bytes) -> tuple[int, int]:
        """Return address and size of the memory behind a handle."""
        address, start, size = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t()
        handle = _IpcHandle.from_buffer_copy(raw_handle)
        self._call("cuCtxSetCurrent", context)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, _LAZY_PEER_ACCESS)
        try:
            self._call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size), address)
        except ServingError:
            self.close(context, address.value)
            raise
        return address.value, start.value + size.value - address.value

    def close(self, context: ctypes.c_void_p, address: int) -> None:
        """Give memory back; one that the GPU has lost anyway is no error."""
        self._library.cuCtxSetCurrent(context)
        self._library.cuIpcCloseMemHandle(ctypes.c_uint64(address))

    def to_host(self, context: ctypes.c_void_p, target: Any, address: int) -> None:
        """Fill a buffer of the host."""
        self._call("cuCtxSetCurrent", context)
        self._call("cuMemcpyDtoH_v2", target, ctypes.c_uint64(address), ctypes.c_size_t(len(target)))

    def to_device(self, context: ctypes.c_void_p, address: int, data: bytes) -> None:
        """Copy bytes of the host."""
        self._call("cuCtxSetCurrent", context)
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise internal(f"{_WHAT_FAILED}: {function} failed with CUDA error {status}")


@cache
def _driver() -> _Driver:
    return _Driver(ctypes.CDLL(_LIBRARY))


def _refused(name: str, reason: str) -> ServingError:
    return invalid(f"failed to register shared memory region '{name}': {reason}")
