"""Messages between the server and a worker process, over one stream socket.

Used by both ends, so it needs nothing but the standard library and runs on Python 3.8. A message is a frame:

    4 bytes length of the header, 4 bytes length of the rest, header, rest

The header is a tuple of plain values in `marshal` form of version 2, which every Python since 2.5 reads and which,
unlike pickle, cannot name code. The rest is tensor bytes, one after the other; header and tensors are padded such that
each tensor begins at a multiple of `ALIGNMENT`. A tensor of more than `INLINE_BYTES_MAX` lies in a region instead: a
memfd that its sender owns, whose descriptor goes along with the first message that uses it. The receiver maps it and
keeps the mapping; the sender writes to it again only after the receiver has released it. Nothing has a name in any file
system, so nothing can be left behind.
"""

from __future__ import annotations

import contextlib
import marshal
import mmap
import os
import socket
import struct
import tempfile
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    Data = bytes | bytearray | memoryview
    Place = tuple[int, bool, int]
    """Where a tensor's bytes are: id of the region or 0 for inline, whether it is announced here, size in bytes."""

INLINE_BYTES_MAX = 64 * 1024
"""Larger tensors go through shared memory: below, a copy through the socket is cheaper than a page fault."""

ALIGNMENT = 16
"""Tensors lie at multiples of this many bytes, as fresh arrays do: some libraries take no others, or are slower."""

HEADER_BYTES_MAX = 64 * 1024 * 1024
"""A longer header is taken for a broken stream."""

REST_BYTES_MAX = 2**32 - 1

FDS_MAX = 64
"""Descriptors that one message, and one call of the system, may carry; tensors beyond go inline."""

BUFFERS_MAX = 1000
"""Buffers in one call of the system; Linux takes 1024."""

POOL_BYTES_MAX = 256 * 1024 * 1024
"""Most bytes of idle regions that a sender keeps for reuse."""

_FRAME = struct.Struct("<II")
_PADDING = bytes(ALIGNMENT)
_ANCILLARY_BYTES = socket.CMSG_SPACE(FDS_MAX * 4)

# One buffer for all sockets of the process, whose channels are all read by one thread: a new one of this size for every
# message would be mapped and unmapped by the system each time.
_received = memoryview(bytearray(256 * 1024))
_REGION_BYTES_MIN = 128 * 1024


class ChannelError(Exception):
    """The stream is not what this module writes."""


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


class Region:
    """Shared memory of the sending end."""

    __slots__ = ("fd", "id", "is_announced", "memory", "size")

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

    def close(self) -> None:
        """Give the memory back; the other end keeps its mapping until it is told."""
        os.close(self.fd)
        with contextlib.suppress(BufferError):  # somebody still looks at it: the mapping goes with the last view
            self.memory.close()


class RegionPool:
    """The regions of a sending end: those in use by id, and idle ones for reuse."""

    def __init__(self) -> None:
        self._used: dict[int, Region] = {}
        self._idle: dict[int, list[Region]] = {}
        self._idle_bytes = 0
        self._next_id = 1

    def take(self, size: int) -> Region:
        """Return a region of at least `size` bytes."""
        wanted = _REGION_BYTES_MIN
        while wanted < size:
            wanted *= 2
        idle = self._idle.get(wanted)
        if idle:
            region = idle.pop()
            self._idle_bytes -= wanted
        else:
            region = Region(self._next_id, wanted)
            self._next_id += 1
        self._used[region.id] = region
        return region

    def release(self, ids: Iterable[int]) -> list[int]:
        """Take regions back; return the ids of those that are given up and that the other end should unmap."""
        dropped = []
        for region_id in ids:
            region = self._used.pop(region_id, None)
            if region is None:
                continue
            if self._idle_bytes + region.size > POOL_BYTES_MAX:
                region.close()
                dropped.append(region_id)
            else:
                self._idle.setdefault(region.size, []).append(region)
                self._idle_bytes += region.size
        return dropped

    def close(self) -> None:
        """Give everything back."""
        for region in self._used.values():
            region.close()
        for regions in self._idle.values():
            for region in regions:
                region.close()
        self._used.clear()
        self._idle.clear()
        self._idle_bytes = 0


class Mappings:
    """The regions of the other end that are mapped here, by id."""

    def __init__(self) -> None:
        self._memory: dict[int, mmap.mmap] = {}

    def add(self, region_id: int, fd: int) -> None:
        """Map a region and close its descriptor.

        Raises:
            ChannelError: The descriptor is not one of memory.
        """
        try:
            self._memory[region_id] = mmap.mmap(fd, os.fstat(fd).st_size)
        except (OSError, ValueError) as error:
            raise ChannelError(f"region {region_id} cannot be mapped: {error}") from error
        finally:
            os.close(fd)

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
            self._memory.pop(region_id, None)

    def close(self) -> None:
        """Unmap everything."""
        self.drop(list(self._memory))


class Outgoing:
    """A message in the making: places tensors inline or in regions."""

    __slots__ = ("_announced", "_pool", "_regions", "fds", "parts", "size")

    def __init__(self, pool: RegionPool) -> None:
        self._pool = pool
        self.parts: list[Data] = []
        self.size = 0
        self.fds: list[int] = []
        self._regions: list[int] = []
        self._announced: list[Region] = []

    def place(self, data: Data) -> Place:
        """Take in the bytes of a tensor; return where the other end finds them."""
        size = len(data)
        if size <= INLINE_BYTES_MAX or len(self.fds) >= FDS_MAX:
            return self._place_inline(data)
        try:
            region = self._pool.take(size)
        except OSError:  # no descriptor or no memory is left for it
            return self._place_inline(data)
        region.memory[:size] = data
        self._regions.append(region.id)
        announced = not region.is_announced
        if announced:
            region.is_announced = True
            self._announced.append(region)
            self.fds.append(region.fd)
        return (region.id, announced, size)

    def _place_inline(self, data: Data) -> Place:
        padding = -self.size % ALIGNMENT
        if padding:
            self.parts.append(_PADDING[:padding])
        self.parts.append(data)
        self.size += padding + len(data)
        return (0, False, len(data))

    def withdraw(self) -> None:
        """Give back the regions of a message that is not sent."""
        for region in self._announced:
            region.is_announced = False
        self._pool.release(self._regions)

    def frame(self, header: tuple[object, ...]) -> list[Data]:
        """Return the buffers of the whole message.

        Raises:
            ChannelError: It is too large, or the header holds something that is no plain value.
        """
        try:
            text = marshal.dumps(header, 2)  # type: ignore[arg-type] # whatever it cannot write is a ValueError
        except ValueError as error:
            raise ChannelError(f"a message holds a value that cannot be sent: {error}") from error
        if self.size > REST_BYTES_MAX or len(text) > HEADER_BYTES_MAX:
            raise ChannelError(f"a message of {len(text) + self.size} bytes is too large")
        text += _PADDING[: -(_FRAME.size + len(text)) % ALIGNMENT]  # not read: a marshalled value knows where it ends
        return [_FRAME.pack(len(text), self.size) + text, *self.parts]


class Incoming:
    """A received message: finds the tensors of its header."""

    __slots__ = ("_fds", "_mappings", "_position", "_rest", "header", "regions")

    def __init__(self, header: tuple[Any, ...], rest: memoryview, fds: list[int], mappings: Mappings) -> None:
        self.header = header
        self.regions: list[int] = []
        self._fds = fds
        self._rest = rest
        self._position = 0
        self._mappings = mappings

    def find(self, place: Place) -> memoryview:
        """Return the bytes of the next tensor; to be called in the order in which they were placed.

        Raises:
            ChannelError: They are not there.
        """
        region_id, announced, size = _checked(place)
        if not region_id:
            start = self._position + -self._position % ALIGNMENT
            self._position = end = start + size
            if end > len(self._rest):
                raise ChannelError("the message ends within a tensor")
            return self._rest[start:end]
        if announced:
            if not self._fds:
                raise ChannelError(f"the descriptor of region {region_id} is missing")
            self._mappings.add(region_id, self._fds.pop(0))
        self.regions.append(region_id)
        return self._mappings.view(region_id, size)


def _checked(place: object) -> Place:
    if not (isinstance(place, tuple) and len(place) == 3):
        raise ChannelError(f"the place of a tensor is malformed: {place!r}")
    region_id, announced, size = place
    if type(region_id) is not int or type(size) is not int or region_id < 0 or size < 0:
        raise ChannelError(f"the place of a tensor is malformed: {place!r}")
    return region_id, bool(announced), size


class Receiver:
    """Puts received bytes together to messages."""

    def __init__(self, mappings: Mappings) -> None:
        self._mappings = mappings
        self._data = bytearray()
        self._fds: list[int] = []

    def feed(self, data: bytes | bytearray, fds: Iterable[int] = ()) -> list[Incoming]:
        """Take in bytes and descriptors; return the messages that are now complete.

        Raises:
            ChannelError: The bytes are no messages.
        """
        self._fds.extend(fds)
        messages: list[Incoming] = []
        if not self._data and len(data) >= _FRAME.size:
            header_size, rest_size = _FRAME.unpack_from(data)
            start = _FRAME.size + header_size
            if start + rest_size == len(data) and header_size <= HEADER_BYTES_MAX:
                # Just one whole message, the usual case: nothing to put together.
                whole = memoryview(data)
                header = _read_header(whole[_FRAME.size : start])
                messages.append(Incoming(header, whole[start:], self._fds, self._mappings))
                return messages
        self._data += data
        while len(self._data) >= _FRAME.size:
            header_size, rest_size = _FRAME.unpack_from(self._data)
            if header_size > HEADER_BYTES_MAX:
                raise ChannelError(f"a header of {header_size} bytes is too large")
            start = _FRAME.size + header_size
            end = start + rest_size
            if len(self._data) < end:
                break
            whole = memoryview(self._data[:end])
            del self._data[:end]
            header = _read_header(whole[_FRAME.size : start])
            # Descriptors arrive with the first byte of their message, so those here belong to this message or to a
            # later one; a message takes only those that it announces.
            messages.append(Incoming(header, whole[start:], self._fds, self._mappings))
        return messages

    def close(self) -> None:
        """Close descriptors that no message has taken."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


def _read_header(text: memoryview) -> tuple[Any, ...]:
    try:
        header = marshal.loads(text)
    except (ValueError, EOFError, TypeError) as error:
        raise ChannelError(f"a header cannot be read: {error}") from error
    if not (isinstance(header, tuple) and header and isinstance(header[0], str)):
        raise ChannelError("a header does not begin with the kind of its message")
    return header


def receive(sock: socket.socket, flags: int = 0) -> tuple[bytearray, list[int]]:
    """Return the next bytes and descriptors of a socket; empty bytes at its end.

    The bytes can be written to, because a model may compute in place on arrays that lie in them.
    """
    size, ancillary, _, _ = sock.recvmsg_into([_received], _ANCILLARY_BYTES, flags)
    data = bytearray(_received[:size])
    fds: list[int] = []
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array("i")
            numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
            fds.extend(numbers)
    return data, fds


def send_some(sock: socket.socket, buffers: Sequence[Data], fds: Sequence[int]) -> int:
    """Send what the socket takes, and the first `FDS_MAX` descriptors; return the number of bytes.

    Descriptors go with the first byte that is sent. Where more than that many are due, only that byte goes with the
    first of them, so that all have been sent before the messages that they belong to end.
    """
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds[:FDS_MAX]))] if fds else []
    if len(fds) > FDS_MAX:
        return sock.sendmsg([memoryview(buffers[0])[:1]], ancillary)
    return sock.sendmsg(buffers[:BUFFERS_MAX], ancillary)


def remaining(buffers: Sequence[Data], sent: int) -> list[Data]:
    """Return the buffers without their first `sent` bytes."""
    for index, buffer in enumerate(buffers):
        if sent < len(buffer):
            return [memoryview(buffer)[sent:], *buffers[index + 1 :]]
        sent -= len(buffer)
    return []


def send_all(sock: socket.socket, buffers: Sequence[Data], fds: Sequence[int]) -> None:
    """Send everything on a blocking socket."""
    while buffers:
        sent = send_some(sock, buffers, fds)
        fds = fds[FDS_MAX:]
        buffers = remaining(buffers, sent)
