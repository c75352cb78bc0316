"""The shared-memory regions that clients have registered, by name. Both kinds share one set of names.

A client's memory on a GPU, opened by its CUDA IPC handle through the driver's library.

Models take host arrays, so each input is copied from the GPU and each output to it, once.

A client's system shared memory (`shm_open`): tmpfs files in one folder.

Reads are views of a mapping, writes go through the file. A process that touches the mapping of a truncated file, or a
hole when the file system is full, dies of SIGBUS. So the registered part is allocated at registration, the size of the
file is checked before each use, and a write cannot fault at all. One risk remains: a client that truncates its object
while a model reads the input.
"""

import asyncio
import ctypes
import mmap
import os
import stat
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

from charonia.core.errors import ServingError, conflict, internal, invalid, not_found, unavailable, unsupported
from charonia.server.channel.cuda_driver import HANDLE_BYTES, CudaError, Driver, driver
from charonia.wire.shared_memory import CudaRegion, RegionSpan, SystemRegion

REGIONS_MAX = 1024
"""Limit of registered regions."""

NAME_LENGTH_MAX = 1024
"""Longest name of a region."""

DEVICES_MAX = 1024

_WHAT_FAILED = "cuda shared memory"

SHM_FOLDER = "/dev/shm"
"""Linux' folder of memory objects."""

OBJECT_NAME_BYTES_MAX = 255

RESERVED_PREFIXES = ("triton_python_backend_shm_region_", "sem.")
"""Prefixes of names that are not a client's: memory of Triton's Python models, and semaphores."""

_FLAGS = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


class SystemMemory:
    """A part of a memory object. It is unmapped with the last reference to this object and to its views."""

    def __init__(self, region: SystemRegion, folder: str = SHM_FOLDER) -> None:
        """Open and map the part.

        Args:
            region: The part; a leading slash of the object's name is ignored.
            folder: The folder of memory objects.

        Raises:
            ServingError: INVALID_ARG for an invalid name or a part beyond the object's end, INTERNAL when there is no
                such object, UNAVAILABLE when its memory cannot be allocated, UNSUPPORTED on platforms without memory
                objects.
        """
        label, key, offset, byte_size = region
        name = _checked_name(label, key)
        if not os.path.isdir(folder):
            raise unsupported(
                "system shared memory is not offered on this platform", hint="send the tensors in the messages"
            )
        try:
            self._file = os.open(os.path.join(folder, name), _FLAGS)
        except OSError as error:
            raise internal(f"Unable to open shared memory region: '{key}': {error.strerror}") from error
        weakref.finalize(self, os.close, self._file)
        self._key = key
        self._offset = offset
        self._end = offset + byte_size
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode):
            raise internal(f"Unable to open shared memory region: '{key}': it is not a memory object")
        if not 0 < byte_size <= status.st_size - offset:
            raise invalid(
                f"failed to register shared memory region '{label}': invalid args: {byte_size} bytes from offset "
                f"{offset} on, in an object of {status.st_size} bytes"
            )
        lead = offset % mmap.ALLOCATIONGRANULARITY
        try:
            os.posix_fallocate(self._file, offset, byte_size)
            mapping = mmap.mmap(self._file, lead + byte_size, access=mmap.ACCESS_READ, offset=offset - lead)
        except OSError as error:
            raise unavailable(
                f"failed to register shared memory region '{label}': {byte_size} bytes cannot be allocated: "
                f"{error.strerror}",
                hint=f"is {folder} full?",
            ) from error
        self._bytes = memoryview(mapping)[lead:]

    def view(self, offset: int, byte_size: int) -> memoryview:
        """Return a read-only view of bytes within the part.

        Raises:
            ServingError: INVALID_ARG when the object was truncated.
        """
        self._check()
        return self._bytes[offset : offset + byte_size]

    def write(self, offset: int, data: memoryview) -> None:
        """Copy `data` into the part, which it must fit.

        Raises:
            ServingError: INVALID_ARG when the object was truncated, INTERNAL when it cannot be written.
        """
        self._check()
        position = self._offset + offset
        try:
            while data:
                written = os.pwrite(self._file, data, position)
                data, position = data[written:], position + written
        except OSError as error:
            raise internal(f"shared memory region '{self._key}' cannot be written: {error.strerror}") from error

    def _check(self) -> None:
        size = os.fstat(self._file).st_size
        if size < self._end:
            raise invalid(
                f"the memory object '{self._key}' has {size} bytes now, its registered part ends at {self._end}",
                hint="unregister the region before the object is truncated",
            )


def _checked_name(label: str, key: str) -> str:
    """Return the file name of a memory object."""
    name = key.lstrip("/")
    if not name or name in (".", "..") or "/" in name or "\0" in name or len(os.fsencode(name)) > OBJECT_NAME_BYTES_MAX:
        raise invalid(
            f"cannot register shared memory region '{label}' - invalid shm key '{key[:OBJECT_NAME_BYTES_MAX]}'",
            hint=f"expected 1 to {OBJECT_NAME_BYTES_MAX} bytes without '/' behind the first one",
        )
    for prefix in RESERVED_PREFIXES:
        if name.startswith(prefix):
            raise invalid(
                f"cannot register shared memory region '{label}' with key '{key}' as the key contains the reserved "
                f"prefix '{prefix}'"
            )
    return name


class CudaMemory:
    """A part of a GPU's memory. It is closed when neither this object nor a copy in progress needs it."""

    def __init__(self, name: str, raw_handle: bytes, device_id: int, byte_size: int) -> None:
        """Open the memory.

        Args:
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


class Memory(Protocol):
    """Memory of a client. The registry checks that offsets and sizes are within it."""

    def view(self, offset: int, byte_size: int) -> memoryview:
        """Return bytes of it, read-only."""

    def write(self, offset: int, data: memoryview) -> None:
        """Copy bytes into it."""


class _RemotelyMapped:
    """Memory that only other processes have mapped."""

    def view(self, offset: int, byte_size: int) -> memoryview:
        raise internal("the memory of the region is mapped by another process")

    def write(self, offset: int, data: memoryview) -> None:
        raise internal("the memory of the region is mapped by another process")


class _Registered:
    def __init__(self, region: SystemRegion | CudaRegion, memory: Memory) -> None:
        self.region = region
        self.memory = memory


class _OutputSpan:
    """The destination of an output. See `charonia.wire.shared_memory.OutputLocation`."""

    __slots__ = ("_memory", "span")

    def __init__(self, span: RegionSpan, memory: Memory) -> None:
        self.span = span
        self._memory = memory

    def write(self, data: bytes | memoryview) -> None:
        self._memory.write(self.span.offset, memoryview(data))


class RegionRegistry:
    """The registered regions. Unregistering removes the name; the memory is closed after its last request."""

    def __init__(
        self,
        bytes_max: int,
        *,
        open_system: Callable[[SystemRegion], Memory] = SystemMemory,
        open_cuda: Callable[[CudaRegion], Memory] = lambda r: CudaMemory(*r),
    ) -> None:
        """Create an empty registry.

        Args:
            bytes_max: Limit of the bytes of all regions together.
        """
        self._bytes_max = bytes_max
        self._open_system = open_system
        self._open_cuda = open_cuda
        self._regions: dict[str, _Registered] = {}
        self._lock = asyncio.Lock()  # one registration at a time, so that limits and names hold

    async def register_system(self, region: SystemRegion) -> None:
        """Register a region of system shared memory.

        Raises:
            ServingError: ALREADY_EXISTS for a name in use; UNAVAILABLE at a limit; otherwise as `SystemMemory`.
        """
        await self._register(region, lambda: self._open_system(region))

    async def register_cuda(self, region: CudaRegion) -> None:
        """Register a region of a GPU's memory. Raises as `register_system`, with `CudaMemory` for `SystemMemory`."""
        await self._register(region, lambda: self._open_cuda(region))

    def remember(self, regions: Iterable[SystemRegion | CudaRegion]) -> None:
        """Take these regions for the registered ones, without their memory: other processes have it mapped."""
        self._regions = {region.name: _Registered(region, _RemotelyMapped()) for region in regions}

    async def unregister_system(self, name: str = "") -> None:
        """Unregister one region of system shared memory, or all; an unknown one is not an error."""
        self._unregister(SystemRegion, name)

    async def unregister_cuda(self, name: str = "") -> None:
        """Unregister one region of a GPU's memory, or all; an unknown one is not an error."""
        self._unregister(CudaRegion, name)

    def system(self, name: str = "") -> list[SystemRegion]:
        """Return one region of system shared memory, or all. Raises ServingError: NOT_FOUND for an unknown name."""
        found = [r for r in self._named(name) if isinstance(r, SystemRegion)]
        if name and not found:
            raise not_found(f"Unable to find system shared memory region: '{name}'")
        return found

    def cuda(self, name: str = "") -> list[CudaRegion]:
        """Return one region of a GPU's memory, or all. Raises as `system`."""
        found = [r for r in self._named(name) if isinstance(r, CudaRegion)]
        if name and not found:
            raise not_found(f"Unable to find cuda shared memory region: '{name}'")
        return found

    def view(self, span: RegionSpan) -> memoryview:
        """Return the bytes of a part. See `charonia.wire.shared_memory.Regions`."""
        return self._memory(span).view(span.offset, span.byte_size)

    def place(self, span: RegionSpan) -> _OutputSpan:
        """Return a part to write to. See `charonia.wire.shared_memory.Regions`."""
        return _OutputSpan(span, self._memory(span))

    async def _register(self, region: SystemRegion | CudaRegion, open_memory: Callable[[], Memory]) -> None:
        if not 0 < len(region.name) <= NAME_LENGTH_MAX:
            reason = f"invalid args: a name has 1 to {NAME_LENGTH_MAX} characters, got {len(region.name)}"
            raise invalid(f"failed to register shared memory region: {reason}")
        async with self._lock:
            self._check_room(region)
            # In a thread: allocating the memory of a large object takes time.
            memory = await asyncio.to_thread(open_memory)
            self._regions[region.name] = _Registered(region, memory)

    def _check_room(self, region: SystemRegion | CudaRegion) -> None:
        if region.name in self._regions:
            raise conflict(
                f"shared memory region '{region.name}' already in manager",
                hint="unregister it first, or choose another name",
            )
        if len(self._regions) >= REGIONS_MAX:
            raise unavailable(
                f"shared memory: at most {REGIONS_MAX} regions can be registered", hint="unregister those not in use"
            )
        used = sum(registered.region.byte_size for registered in self._regions.values())
        if region.byte_size > self._bytes_max - used:
            raise unavailable(
                f"shared memory region '{region.name}': {region.byte_size} bytes exceed the rest of the "
                f"{self._bytes_max} bytes for all regions, {used} are in use",
                hint="the limit is set by --client-shm-byte-size",
            )

    def _unregister(self, kind: type, name: str) -> None:
        for key, registered in list(self._regions.items()):
            if isinstance(registered.region, kind) and name in ("", key):
                del self._regions[key]

    def _named(self, name: str) -> list[SystemRegion | CudaRegion]:
        return [registered.region for key, registered in self._regions.items() if name in ("", key)]

    def _memory(self, span: RegionSpan) -> Memory:
        registered = self._regions.get(span.region)
        if registered is None:
            raise not_found(f"Unable to find shared memory region: '{span.region}'")
        size = registered.region.byte_size
        if not 0 <= span.offset < size:
            raise invalid(
                f"Invalid offset for shared memory region: '{span.region}', got {span.offset} of {size} bytes"
            )
        if span.offset + span.byte_size >= 2**64:
            raise invalid(
                f"Integer overflow detected: byte_size ({span.byte_size}) + offset ({span.offset}) exceeds maximum "
                f"value ({2**64 - 1}) for region '{span.region}'"
            )
        if not 0 < span.byte_size <= size - span.offset:
            raise invalid(
                f"Invalid offset + byte size for shared memory region: '{span.region}', got {span.offset} + "
                f"{span.byte_size} of {size} bytes"
            )
        return registered.memory
