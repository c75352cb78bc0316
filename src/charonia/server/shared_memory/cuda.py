"""A client's memory on a GPU, opened by its CUDA IPC handle through the driver's library.

Models take host arrays, so each input is copied from the GPU and each output to it, once.
"""

import ctypes
import weakref

from charonia.core.errors import ServingError, internal, invalid
from charonia.server.backends.python.worker.cuda_driver import HANDLE_BYTES, CudaError, Driver, driver

DEVICES_MAX = 1024

_WHAT_FAILED = "cuda shared memory"


class CudaMemory:
    """A part of a GPU's memory. It is closed when neither this object nor a copy in progress needs it."""

    def __init__(self, name: str, raw_handle: bytes, device_id: int, byte_size: int) -> None:
        """Open the memory.

        Args:
            name: Name of the region.
            raw_handle: The handle.
            device_id: The GPU.
            byte_size: Size of the part, which begins at the start of the memory.

        Raises:
            ServingError: INVALID_ARG for memory that does not exist, or without a GPU.
        """
        api = _driver_for(name)
        if len(raw_handle) != HANDLE_BYTES or byte_size < 1 or not 0 <= device_id < DEVICES_MAX:
            raise _refused(name, f"invalid args: a handle has {HANDLE_BYTES} bytes and a region at least 1")
        self._driver = api
        try:
            self._context = api.context(device_id)
            self._address, size = api.open(self._context, raw_handle)
        except CudaError as error:
            raise _refused(name, f"{_WHAT_FAILED}: {error}") from error
        if byte_size > size:
            api.close(self._context, self._address)
            raise _refused(name, f"invalid args: the memory has {size} bytes, got byte_size {byte_size}")
        weakref.finalize(self, api.close, self._context, self._address)

    def view(self, offset: int, byte_size: int) -> memoryview:
        """Return a copy of bytes within the part. Raises INTERNAL when the GPU fails."""
        data = (ctypes.c_char * byte_size)()
        try:
            self._driver.to_host(self._context, data, self._address + offset)
        except CudaError as error:
            raise internal(f"{_WHAT_FAILED}: {error}") from error
        return memoryview(data).cast("B").toreadonly()

    def write(self, offset: int, data: memoryview) -> None:
        """Copy `data` into the part, which it must fit. Raises INTERNAL when the GPU fails."""
        try:
            self._driver.to_device(self._context, self._address + offset, bytes(data))
        except CudaError as error:
            raise internal(f"{_WHAT_FAILED}: {error}") from error


def _driver_for(name: str) -> Driver:
    try:
        return driver()
    except CudaError as error:
        raise invalid(
            f"failed to register CUDA shared memory region: '{name}', GPUs not supported",
            hint="this server has no GPU that it can use: register system shared memory",
        ) from error


def _refused(name: str, reason: str) -> ServingError:
    return invalid(f"failed to register shared memory region '{name}': {reason}")
