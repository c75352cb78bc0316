"""Shared memory that the ends of a channel pass to each other.

A tensor that lies in shared memory already is not copied again. A worker that sends back what it has received names the
server's own region. What one worker has sent, the server lends to another: it passes the descriptor on, and the other
maps it such that what it writes there stays its own.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import weakref
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    Data = bytes | bytearray | memoryview

POOL_BYTES_MAX = 256 * 1024 * 1024
"""Most bytes of idle regions that a sender keeps for reuse."""

GPU_LOANS_MAX = 1024
"""Tensors of a GPU that one end of a channel has lent to the other and not got back; more are copied by the CPU."""

_REGION_BYTES_MIN = 128 * 1024


class ChannelError(Exception):
    """The stream is not what the channel's other end writes."""


def make_memory(size: int) -> int:
    """Return a descriptor of `size` bytes of memory without a name."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("charonia", getattr(os, "MFD_CLOEXEC", 1))
    else:
        fd, path = tempfile.mkstemp()
        os.unlink(path)
    try:
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _address(data: Data | mmap.mmap) -> int:
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


_lendable: dict[int, int] = {}
"""Descriptor of shared memory by the address at which it begins in this process."""


class Region:
    """Shared memory of the sending end.

    Attributes:
        is_out: Whether the other end may still look at it.
        holds: How many arrays of this end look at it after the other end has sent it back.
    """

    __slots__ = ("fd", "holds", "id", "is_announced", "is_out", "memory", "size")

    def __init__(self, id: int, size: int) -> None:
        self.id = id
        self.size = size
        self.fd = make_memory(size)
        try:
            self.memory = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self.is_announced = False
        self.is_out = True
        self.holds = 0
        _lendable[_address(self.memory)] = self.fd

    def close(self) -> None:
        """Give the memory back; the other end keeps its mapping until it is told."""
        _lendable.pop(_address(self.memory), None)
        os.close(self.fd)
        with contextlib.suppress(BufferError):  # somebody still looks at it: the mapping goes with the last view
            self.memory.close()


class Loan:
    """Shared memory of somebody else that was passed on to the other end.

    Attributes:
        data: What lies in it: keeps it from being written to meanwhile.
    """

    __slots__ = ("data", "fd", "id")

    def __init__(self, id: int, fd: int, data: Data) -> None:
        self.id = id
        self.data = data
        self.fd = os.dup(fd)

    def close(self) -> None:
        """The other end no longer looks at it."""
        os.close(self.fd)


class Lent(NamedTuple):
    """A tensor of a GPU that was lent to the other end.

    Attributes:
        content: What this end has, and gets again when the other end sends it back.
        datatype: Datatype as the protocol writes it.
        shape: Shape.
        exported: Keeps the elements where the other end finds them.
    """

    content: object
    datatype: str
    shape: tuple[int, ...]
    exported: object


class RegionPool:
    """The regions of a sending end: those in use by id, and idle ones for reuse.

    Args:
        theirs: The other end's regions as they are mapped here. With them, a tensor that lies in one of these is not
            sent but named.
        lends: Whether what others have sent is passed on without a copy.

    Attributes:
        lends_gpu: Whether tensors of a GPU are lent unless somebody asks otherwise.
        is_closed: Whether the other end is gone.
    """

    def __init__(self, theirs: Mappings | None = None, *, lends: bool = False) -> None:
        self._theirs = theirs
        self._lends = lends
        self._used: dict[int, Region] = {}
        self._loans: dict[int, Loan] = {}
        self._gpu_loans: dict[int, Lent] = {}
        self._idle: dict[int, list[Region]] = {}
        self._idle_bytes = 0
        self._next_id = 1
        self._let_go: list[int] = []  # regions whose arrays are gone; appended to by any thread
        self._dropped: list[int] = []
        self.lends_gpu = False
        self.is_closed = False

    def theirs(self, data: Data) -> int:
        """Return the id of the other end's region at whose beginning `data` lies, 0 for none."""
        return self._theirs.id_at(_address(data)) if self._theirs is not None else 0

    def lend(self, data: Data) -> Loan | None:
        """Return a loan of the shared memory at whose beginning `data` lies, None where it lies in none."""
        fd = _lendable.get(_address(data)) if self._lends else None
        if fd is None:
            return None
        loan = self._loans[self._next_id] = Loan(self._next_id, fd, data)
        self._next_id += 1
        return loan

    def lend_gpu(self, lent: Lent) -> int:
        """Keep a tensor of a GPU for the other end; return the loan's id, 0 when there are too many."""
        if len(self._gpu_loans) >= GPU_LOANS_MAX:
            return 0
        loan = self._next_id
        self._next_id += 1
        self._gpu_loans[loan] = lent
        return loan

    def lent_gpu(self, loan: int) -> Lent:
        """Return what was lent, and is named by the other end.

        Raises:
            ChannelError: There is no such loan.
        """
        lent = self._gpu_loans.get(loan)
        if lent is None:
            raise ChannelError(f"there is no loan {loan} of a tensor of a GPU")
        return lent

    def take(self, size: int) -> Region:
        """Return a region of at least `size` bytes."""
        self._collect()
        wanted = _REGION_BYTES_MIN
        while wanted < size:
            wanted *= 2
        idle = self._idle.get(wanted)
        if idle:
            region = idle.pop()
            self._idle_bytes -= wanted
            region.is_out = True
        else:
            region = Region(self._next_id, wanted)
            self._next_id += 1
        self._used[region.id] = region
        return region

    def hold(self, region_id: int, size: int) -> memoryview:
        """Return the first `size` bytes of a region that the other end has named; it stays as it is while they live.

        Raises:
            ChannelError: There is no such region in use, or it is smaller.
        """
        region = self._used.get(region_id)
        if region is None or size > region.size:
            raise ChannelError(f"there is no region {region_id} of {size} bytes in use")
        region.holds += 1
        holder = np.frombuffer(region.memory, np.uint8, size)
        weakref.finalize(holder, partial(self._let_go.append, region_id)).atexit = False
        return memoryview(holder)  # type: ignore[arg-type] # an array is a buffer

    def release(self, ids: Iterable[int]) -> list[int]:
        """Take regions back; return the ids of those that are given up and that the other end should unmap."""
        for region_id in ids:
            region = self._used.get(region_id)
            if region is not None:
                region.is_out = False
                self._free(region)
            elif region_id in self._loans:
                self._loans.pop(region_id).close()
                self._dropped.append(region_id)
            else:
                self._gpu_loans.pop(region_id, None)
        self._collect()
        dropped, self._dropped = self._dropped, []
        return dropped

    def _collect(self) -> None:
        while self._let_go:
            region = self._used.get(self._let_go.pop())
            if region is not None:
                region.holds -= 1
                self._free(region)

    def _free(self, region: Region) -> None:
        if region.is_out or region.holds:
            return
        del self._used[region.id]
        if self._idle_bytes + region.size > POOL_BYTES_MAX:
            region.close()
            self._dropped.append(region.id)
        else:
            self._idle.setdefault(region.size, []).append(region)
            self._idle_bytes += region.size

    def close(self) -> None:
        """Give everything back."""
        self.is_closed = True
        self._gpu_loans.clear()
        for region in self._used.values():
            region.close()
        for loan in self._loans.values():
            loan.close()
        for regions in self._idle.values():
            for region in regions:
                region.close()
        self._used.clear()
        self._loans.clear()
        self._idle.clear()
        self._idle_bytes = 0


class Mappings:
    """The regions of the other end that are mapped here, by id.

    Args:
        lends: Whether what lies in them may be passed on: this keeps a descriptor of each.
    """

    def __init__(self, *, lends: bool = False) -> None:
        self._lends = lends
        self._memory: dict[int, mmap.mmap] = {}
        self._ids: dict[int, int] = {}  # by address

    def add(self, region_id: int, fd: int, *, lent: bool = False) -> None:
        """Map a region and take over its descriptor; what is written to a lent one stays in this process.

        Raises:
            ChannelError: The descriptor is not one of memory.
        """
        keep = False
        try:
            access = mmap.ACCESS_COPY if lent else mmap.ACCESS_WRITE
            memory = self._memory[region_id] = mmap.mmap(fd, os.fstat(fd).st_size, access=access)
            address = _address(memory)
            if not lent:
                self._ids[address] = region_id
                keep = self._lends
                if keep:
                    _lendable[address] = fd
        except (OSError, ValueError) as error:
            raise ChannelError(f"region {region_id} cannot be mapped: {error}") from error
        finally:
            if not keep:
                os.close(fd)

    def id_at(self, address: int) -> int:
        """Return the id of the region that begins at an address, 0 for none."""
        return self._ids.get(address, 0)

    def view(self, region_id: int, size: int) -> memoryview:
        """Return the first `size` bytes of a region.

        Raises:
            ChannelError: There is no such region, or it is smaller.
        """
        memory = self._memory.get(region_id)
        if memory is None or size > len(memory):
            raise ChannelError(f"region {region_id} of {size} bytes is not mapped")
        return memoryview(memory)[:size]

    def drop(self, ids: Iterable[int]) -> None:
        """Unmap regions; one that is still looked at goes with its last view."""
        for region_id in ids:
            # Not closed: an array made over it would not keep that from happening, and would then look at nothing.
            memory = self._memory.pop(region_id, None)
            if memory is None:
                continue
            address = _address(memory)
            if self._ids.get(address) == region_id:
                del self._ids[address]
                fd = _lendable.pop(address, None) if self._lends else None
                if fd is not None:
                    os.close(fd)

    def close(self) -> None:
        """Unmap everything."""
        self.drop(list(self._memory))
