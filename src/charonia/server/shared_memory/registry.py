"""The shared-memory regions that clients have registered, by name. Both kinds share one set of names."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from charonia.core.errors import Code, ServingError, internal, invalid, not_found, unavailable
from charonia.server.shared_memory.cuda import CudaMemory
from charonia.server.shared_memory.system import SystemMemory
from charonia.wire.shared_memory import CudaRegion, RegionSpan, SystemRegion

REGIONS_MAX = 1024
"""Limit of registered regions."""

NAME_LENGTH_MAX = 1024
"""Longest name of a region."""


class Memory(Protocol):
    """Memory of a client. The registry checks that offsets and sizes are within it."""

    def view(self, offset: int, byte_size: int) -> memoryview:
        """Return bytes of it, read-only."""
        ...

    def write(self, offset: int, data: memoryview) -> None:
        """Copy bytes into it."""
        ...


class _Elsewhere:
    """Memory that only other processes have mapped."""

    def view(self, offset: int, byte_size: int) -> memoryview:
        raise internal("the memory of the region is mapped by another process")

    def write(self, offset: int, data: memoryview) -> None:
        raise internal("the memory of the region is mapped by another process")


class _Registered:
    __slots__ = ("memory", "region")

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
        """Make an empty registry.

        Args:
            bytes_max: Limit of the bytes of all regions together.
            open_system: Opens memory of the system; raises ServingError.
            open_cuda: Opens memory of a GPU; raises ServingError.
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
        self._regions = {region.name: _Registered(region, _Elsewhere()) for region in regions}

    async def unregister_system(self, name: str = "") -> None:
        """Forget one region of system shared memory, or all; an unknown one is no error."""
        self._unregister(SystemRegion, name)

    async def unregister_cuda(self, name: str = "") -> None:
        """Forget one region of a GPU's memory, or all; an unknown one is no error."""
        self._unregister(CudaRegion, name)

    def system(self, name: str = "") -> list[SystemRegion]:
        """Return one region of system shared memory, or all.

        Raises:
            ServingError: NOT_FOUND for an unknown name.
        """
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
            raise invalid(f"the name of a shared memory region: expected 1 to {NAME_LENGTH_MAX} characters")
        async with self._lock:
            self._check_room(region)
            # In a thread: allocating the memory of a large object takes time.
            memory = await asyncio.to_thread(open_memory)
            self._regions[region.name] = _Registered(region, memory)

    def _check_room(self, region: SystemRegion | CudaRegion) -> None:
        if region.name in self._regions:
            raise ServingError(
                Code.ALREADY_EXISTS,
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
        if not 0 < span.byte_size <= size - span.offset:
            raise invalid(
                f"Invalid offset + byte size for shared memory region: '{span.region}', got {span.offset} + "
                f"{span.byte_size} of {size} bytes"
            )
        return registered.memory
