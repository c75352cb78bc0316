"""Regions of shared memory that the ends of a channel pass to each other, and their reference counts.

The end that allocates a region owns it and reuses it once nothing refers to it any more, at either end. A tensor that
lies in shared memory already is not copied again: a worker that sends back what it has received names the server's own
region, and what one worker has sent, the server forwards to another as a descriptor, which is mapped copy-on-write. An
end can also lend a region to receive data in: when that data is sent, the message names the region.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from bisect import bisect_left, bisect_right, insort
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    Data = bytes | bytearray | memoryview
    import mmap


class Mapped(NamedTuple):
    """A region as it is mapped in this process.

    Attributes:
        owner: The pool, or the mappings, that it belongs to.
        id: Its number there.
        fd: Its descriptor, -1 where none is kept.
    """

    owner: object
    id: int
    size: int
    fd: int


class Addresses:
    """The mapped regions by address. Thread-safe."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._mapped: dict[int, Mapped] = {}  # by the address at which it begins
        self._starts: list[int] = []  # in order; replaced, never changed, so that `find` needs no lock

    def add(self, memory: mmap.mmap, mapped: Mapped) -> None:
        """Add a region."""
        start = _address(memory)
        with self._changing:
            self._mapped[start] = mapped
            starts = self._starts.copy()
            insort(starts, start)
            self._starts = starts

    def remove(self, memory: mmap.mmap, owner: object) -> Mapped | None:
        """Remove a region; return it, or None if this owner has none there."""
        start = _address(memory)
        with self._changing:
            mapped = self._mapped.get(start)
            if mapped is None or mapped.owner is not owner:
                return None
            starts = self._starts.copy()
            del starts[bisect_left(starts, start)], self._mapped[start]
            self._starts = starts
        return mapped

    def find(self, data: Data) -> tuple[Mapped, int] | None:
        """Return the region in which all of `data` lies, and the offset there; None if there is no such region."""
        address, starts = _address(data), self._starts
        index = bisect_right(starts, address)
        if not index:
            return None
        start = starts[index - 1]
        mapped = self._mapped.get(start)
        if mapped is None or address + len(data) > start + mapped.size:
            return None
        return mapped, address - start


def _address(data: Data | mmap.mmap) -> int:
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


addresses = Addresses()
"""The regions mapped in this process."""


POOL_BYTES_MAX = 256 * 1024 * 1024
"""Most bytes of idle regions that a sender keeps for reuse."""

LENT_BYTES_MAX = 256 * 1024 * 1024
"""Most bytes of regions in use with which a sender still lends memory; without it, data is copied when it is sent."""

EXPORTS_MAX = 1024
"""GPU tensors of one end of a channel that the other end has handles of; more are copied through host memory."""

_REGION_BYTES_MIN = 128 * 1024


class ChannelError(Exception):
    """The other end of the channel breaks the protocol."""


def make_memory(size: int) -> int:
    """Return a descriptor of `size` bytes of memory without a name."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("charonia", getattr(os, "MFD_CLOEXEC", 1))
    else:
        import tempfile  # not on Linux, and it takes a while

        fd, path = tempfile.mkstemp()
        os.unlink(path)
    try:
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Region:
    """Shared memory of the sending end.

    Attributes:
        outs: Reference count of the other end: the places in it that messages have named.
        holds: Reference count of this end: arrays over it that the other end has sent back, or that were lent.
    """

    __slots__ = ("_pool", "fd", "holds", "id", "is_announced", "memory", "outs", "size")

    def __init__(self, pool: RegionPool, id: int, size: int) -> None:
        self.id = id
        self.size = size
        self.fd = make_memory(size)
        try:
            self.memory = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self.is_announced = False
        self.outs = 0
        self.holds = 0
        self._pool = pool
        addresses.add(self.memory, Mapped(pool, id, size, self.fd))

    def close(self) -> None:
        """Give the memory back; the other end keeps its mapping until it is told."""
        addresses.remove(self.memory, self._pool)
        os.close(self.fd)
        with contextlib.suppress(BufferError):  # a view of it is left, and the mapping goes with the last one
            self.memory.close()


class ForwardedRegion:
    """Shared memory of a third process whose descriptor was passed on to the other end.

    Attributes:
        data: What lies in it: keeps it from being written to meanwhile.
    """

    __slots__ = ("data", "fd", "id")

    def __init__(self, id: int, fd: int, data: Data) -> None:
        self.id = id
        self.data = data
        self.fd = os.dup(fd)

    def close(self) -> None:
        os.close(self.fd)


class Export(NamedTuple):
    """A tensor of a GPU of which the other end has a CUDA IPC handle.

    Attributes:
        content: What this end has, and gets again when the other end sends it back.
        exported: Keeps the memory allocated that the handle leads to.
    """

    content: object
    datatype: str
    shape: tuple[int, ...]
    exported: object


class RegionPool:
    """The regions of a sending end: those in use by id, and idle ones for reuse.

    Args:
        theirs: The other end's regions as they are mapped here. With them, a tensor that is in one of these is not
            sent but named.
        forwards: Whether regions of third processes are passed on without a copy.
        names_own: Whether a tensor that is in a region of this end is named, too: the other end must not write there.

    Attributes:
        exports_gpu: Whether tensors of a GPU travel as CUDA IPC handles unless the receiver asks otherwise.
    """

    def __init__(self, theirs: Mappings | None = None, *, forwards: bool = False, names_own: bool = False) -> None:
        self._remote = theirs
        self._forwards = forwards
        self._names_own = names_own
        self._used: dict[int, Region] = {}
        self._forwarded: dict[int, ForwardedRegion] = {}
        self._exports: dict[int, Export] = {}
        self._idle: dict[int, list[Region]] = {}
        self._idle_bytes = 0
        self._used_bytes = 0
        self._next_id = 1
        self._released: list[int] = []  # regions that lost an array; appended to by any thread
        self._dropped: list[int] = []
        self.exports_gpu = False
        self.is_closed = False

    def is_remote(self, mapped: Mapped) -> bool:
        """Whether a message may name this region as one of the other end's."""
        return self._remote is not None and self._remote.may_name(mapped)

    def put(self, data: Data, found: tuple[Mapped, int] | None) -> tuple[Region | ForwardedRegion, int]:
        """Return a region with these bytes, to which the other end refers from now on, and their offset there.

        Args:
            found: Where they lie in shared memory of this process, None where they do not. Else they are copied.

        Raises:
            OSError: There is no memory for them, or no descriptor.
        """
        if found is not None:
            mapped, offset = found
            own = self._used.get(mapped.id) if self._names_own and mapped.owner is self else None
            if own is not None:
                own.outs += 1
                return own, offset
            if self._forwards and mapped.fd >= 0:
                return self._forward(mapped.fd, data), offset
        region = self.take(len(data))
        region.outs = 1
        region.memory[: len(data)] = data
        return region, 0

    def _forward(self, fd: int, data: Data) -> ForwardedRegion:
        forwarded = self._forwarded[self._next_id] = ForwardedRegion(self._next_id, fd, data)
        self._next_id += 1
        return forwarded

    def lend(self, size: int) -> memoryview | None:
        """Return memory to receive `size` bytes in, that messages then name; None if there is none.

        It goes back to the pool when neither end refers to it any more.
        """
        self._collect()
        if self.is_closed or self._used_bytes + size > LENT_BYTES_MAX:
            return None
        try:
            region = self.take(size)
        except OSError:  # no descriptor or no memory is left for it
            return None
        return self.hold(region.id, size)

    def add_export(self, export: Export) -> int:
        """Keep a tensor of a GPU for the other end; return the export's id, 0 when there are too many."""
        if len(self._exports) >= EXPORTS_MAX:
            return 0
        export_id = self._next_id
        self._next_id += 1
        self._exports[export_id] = export
        return export_id

    def exported(self, export_id: int) -> Export:
        """Return an export that the other end names. Raises ChannelError: There is none of this id."""
        export = self._exports.get(export_id)
        if export is None:
            raise ChannelError(f"there is no export {export_id} of a tensor of a GPU")
        return export

    def take(self, size: int) -> Region:
        """Return a region of at least `size` bytes that nothing refers to yet. Raises OSError if there is none."""
        self._collect()
        wanted = _REGION_BYTES_MIN
        while wanted < size:
            wanted *= 2
        idle = self._idle.get(wanted)
        if idle:
            region = idle.pop()
            self._idle_bytes -= wanted
        else:
            region = Region(self, self._next_id, wanted)
            self._next_id += 1
        self._used[region.id] = region
        self._used_bytes += wanted
        return region

    def hold(self, region_id: int, size: int, offset: int = 0) -> memoryview:
        """Return a part of a region, which is lent or was named by the other end, and count a reference to it.

        Raises:
            ChannelError: There is no such region in use, or it is smaller.
        """
        region = self._used.get(region_id)
        if region is None or offset + size > region.size:
            raise ChannelError(f"there is no region {region_id} of {offset + size} bytes in use")
        region.holds += 1
        holder = np.frombuffer(region.memory, np.uint8, size, offset)
        weakref.finalize(holder, partial(self._released.append, region_id)).atexit = False
        return memoryview(holder)  # type: ignore[arg-type] # an array is a buffer

    def release(self, ids: Iterable[int]) -> list[int]:
        """Drop the other end's references; return the ids of regions that were freed and that it should unmap."""
        for region_id in ids:
            region = self._used.get(region_id)
            if region is not None:
                region.outs = max(region.outs - 1, 0)
                self._free(region)
            elif region_id in self._forwarded:
                self._forwarded.pop(region_id).close()
                self._dropped.append(region_id)
            else:
                self._exports.pop(region_id, None)
        self._collect()
        dropped, self._dropped = self._dropped, []
        return dropped

    def _collect(self) -> None:
        while self._released:
            region = self._used.get(self._released.pop())
            if region is not None:
                region.holds -= 1
                self._free(region)

    def _free(self, region: Region) -> None:
        if region.outs or region.holds:
            return
        del self._used[region.id]
        self._used_bytes -= region.size
        if self._idle_bytes + region.size > POOL_BYTES_MAX:
            region.close()
            self._dropped.append(region.id)
        else:
            self._idle.setdefault(region.size, []).append(region)
            self._idle_bytes += region.size

    def close(self) -> None:
        """Give everything back."""
        self.is_closed = True
        self._exports.clear()
        for region in self._used.values():
            region.close()
        for forwarded in self._forwarded.values():
            forwarded.close()
        for regions in self._idle.values():
            for region in regions:
                region.close()
        self._used.clear()
        self._forwarded.clear()
        self._idle.clear()
        self._idle_bytes = self._used_bytes = 0


class Mappings:
    """The regions of the other end that are mapped here, by id.

    Args:
        forwards: Whether what lies in them may be forwarded, for which a descriptor of each is kept.
    """

    def __init__(self, *, forwards: bool = False) -> None:
        self._forwards = forwards
        self._memory: dict[int, mmap.mmap] = {}

    def add(self, region_id: int, fd: int, *, forwarded: bool = False) -> None:
        """Map a region and take over its descriptor; a forwarded one is mapped copy-on-write.

        Raises:
            ChannelError: The descriptor is not one of memory.
        """
        keep = False
        try:
            access = mmap.ACCESS_COPY if forwarded else mmap.ACCESS_WRITE
            memory = self._memory[region_id] = mmap.mmap(fd, os.fstat(fd).st_size, access=access)
            if not forwarded:
                keep = self._forwards
                addresses.add(memory, Mapped(self, region_id, len(memory), fd if keep else -1))
        except (OSError, ValueError) as error:
            raise ChannelError(f"region {region_id} cannot be mapped: {error}") from error
        finally:
            if not keep:
                os.close(fd)

    def may_name(self, mapped: Mapped) -> bool:
        """Whether this is one of these regions, and a message may name it."""
        return mapped.owner is self

    def view(self, region_id: int, size: int, offset: int = 0) -> memoryview:
        """Return a part of a region. Raises ChannelError: There is no such region, or it is smaller."""
        memory = self._memory.get(region_id)
        if memory is None or offset + size > len(memory):
            raise ChannelError(f"region {region_id} of {offset + size} bytes is not mapped")
        return memoryview(memory)[offset : offset + size]

    def drop(self, ids: Iterable[int]) -> None:
        """Unmap regions; one with views goes with the last of them."""
        for region_id in ids:
            # Not closed: an array made over it would not keep that from happening, and would then look at nothing.
            memory = self._memory.pop(region_id, None)
            if memory is None:
                continue
            mapped = addresses.remove(memory, self)
            if mapped is not None and mapped.fd >= 0:
                os.close(mapped.fd)

    def close(self) -> None:
        self.drop(list(self._memory))
