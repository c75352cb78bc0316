"""Messages between the server and a worker process, over one stream socket.

Used by both ends, so it needs nothing but numpy and the standard library and runs on Python 3.8. A message is a frame:

    4 bytes length of the header, 4 bytes length of the rest, header, rest

The header is a tuple of plain values in `marshal` form of version 2, which every Python since 2.5 reads and which,
unlike pickle, cannot run code. The rest is the bytes of tensors; header and tensors are padded so that each tensor
begins at a multiple of `ALIGNMENT`. A tensor of more than `INLINE_BYTES_MAX` lies in a region instead: a memfd that its
sender owns, whose descriptor is sent with the first message that uses it. The receiver maps it and keeps the mapping;
the sender writes to it again only after the receiver has released it. Memfds have no name in a file system, so none can
be left behind. A tensor in GPU memory is sent as a CUDA IPC handle: see `cuda_ipc`.
"""

from __future__ import annotations

import marshal
import os
import select
import socket
import struct
import time
from array import array
from typing import TYPE_CHECKING, Final

from . import cuda_ipc
from .regions import ChannelError, Export, ForwardedRegion, Mappings, Region, RegionPool, addresses

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    Data = bytes | bytearray | memoryview
    Place = tuple[int, int, int, int]
    """Location of a tensor's bytes: id of the region, 0 for inline, negative for one of the receiver's own; how it is
    announced, 0 where it is already known; size in bytes; offset in the region."""

PLACE_LENGTH: Final = 4
"""Length of the place of a tensor that is bytes; `cuda_ipc` has that of others."""

INLINE_BYTES_MAX: Final = 64 * 1024
"""Larger tensors use shared memory; for smaller ones, a copy through the socket is cheaper than page faults."""

ALIGNMENT: Final = 16
"""Alignment of tensors in bytes, that of new arrays: some libraries require it, or are slower without."""

HEADER_BYTES_MAX = 64 * 1024 * 1024
"""A longer header means that the stream is corrupt."""

REST_BYTES_MAX: Final = 2**32 - 1

FDS_MAX: Final = 64
"""Descriptors that one message, and one call of the system, may carry; tensors beyond go inline."""

BUFFERS_MAX: Final = 1000
"""Buffers in one call of the system; Linux takes 1024."""

KNOWN: Final = 0
OWNED: Final = 1
FORWARDED: Final = 2
"""How a place announces its region: not at all, as one that the sender owns, as one that it forwards."""

_FRAME: Final = struct.Struct("<II")
_PADDING: Final = bytes(ALIGNMENT)
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(FDS_MAX * 4)

# One buffer for all sockets of the server, whose channels are all read by one thread: a new one of this size for every
# message would be mapped and unmapped by the system each time.
RECEIVE_BYTES: Final = 256 * 1024
"""Bytes that are received at a time."""

_received: Final = memoryview(bytearray(RECEIVE_BYTES))


class Outgoing:
    """A message being composed: places tensors inline or in regions."""

    __slots__ = ("_announced", "_regions", "fds", "parts", "pool", "size")

    def __init__(self, pool: RegionPool) -> None:
        self.pool = pool
        self.parts: list[Data] = []
        self.size = 0
        self.fds: list[int] = []
        self._regions: list[int] = []
        self._announced: list[Region] = []

    def place(self, data: Data) -> Place:
        """Add the bytes of a tensor; return their place for the other end."""
        size = len(data)
        if size <= INLINE_BYTES_MAX:
            return self._place_inline(data)
        found = addresses.find(data)
        if found is not None and self.pool.is_remote(found[0]):
            return (-found[0].id, KNOWN, size, found[1])
        if len(self.fds) >= FDS_MAX:
            return self._place_inline(data)
        try:
            region, offset = self.pool.put(data, found)
        except OSError:  # no descriptor or no memory is left for it
            return self._place_inline(data)
        self._regions.append(region.id)
        if isinstance(region, ForwardedRegion):
            self.fds.append(region.fd)
            return (region.id, FORWARDED, size, offset)
        if region.is_announced:
            return (region.id, KNOWN, size, offset)
        region.is_announced = True
        self._announced.append(region)
        self.fds.append(region.fd)
        return (region.id, OWNED, size, offset)

    def export(
        self, source: Any, datatype: str, content: object = None, *, is_done: bool = False
    ) -> cuda_ipc.Place | None:
        """Export a tensor of a GPU; return where the other end finds it, None where it must be copied.

        Args:
            content: What this end gets when the other end sends it back, None for `source`.
            is_done: Whether the GPU is known to be done with it.
        """
        if isinstance(source, cuda_ipc.GpuArray) and source.imported.exporter is self.pool:
            return (-source.imported.export_id, source.imported.size, b"", b"", 0)
        exported = cuda_ipc.export(source, datatype, is_done=is_done)
        if exported is None:
            return None
        export_id = self.pool.add_export(
            Export(source if content is None else content, datatype, exported.shape, exported)
        )
        if not export_id:
            return None
        self._regions.append(export_id)
        return (export_id, exported.size, *exported.address)

    def _place_inline(self, data: Data) -> Place:
        padding = -self.size % ALIGNMENT
        if padding:
            self.parts.append(_PADDING[:padding])
        self.parts.append(data)
        self.size += padding + len(data)
        return (0, KNOWN, len(data), 0)

    def withdraw(self) -> None:
        """Release the regions of a message that is not sent."""
        for region in self._announced:
            region.is_announced = False
        self.pool.release(self._regions)

    def frame(self, header: tuple[object, ...]) -> list[Data]:
        """Return the buffers of the whole message.

        Raises:
            ChannelError: It is too large, or the header holds something that is no plain value.
        """
        try:
            text = marshal.dumps(header, 2)  # type: ignore[arg-type] # unsupported types are a ValueError
        except ValueError as error:
            raise ChannelError(f"a message holds a value that cannot be sent: {error}") from error
        if self.size > REST_BYTES_MAX or len(text) > HEADER_BYTES_MAX:
            raise ChannelError(f"a message of {len(text) + self.size} bytes is too large")
        text += _PADDING[: -(_FRAME.size + len(text)) % ALIGNMENT]  # ignored: a marshalled value has a known end
        return [_FRAME.pack(len(text), self.size) + text, *self.parts]


class Incoming:
    """A received message: finds the tensors of its header.

    Attributes:
        header: Its kind and content.
        ours: This end's regions, where the other end may name them.
        regions: Regions of the other end that were found.
    """

    __slots__ = ("_fds", "_mappings", "_position", "_rest", "header", "ours", "regions")

    def __init__(
        self,
        header: tuple[Any, ...],
        rest: memoryview,
        fds: list[int],
        mappings: Mappings,
        ours: RegionPool | None = None,
    ) -> None:
        self.header = header
        self.ours = ours
        self.regions: list[int] = []
        self._fds = fds
        self._rest = rest
        self._position = 0
        self._mappings = mappings

    def find(self, place: object) -> memoryview:
        """Return the bytes of the next tensor; to be called in the order in which they were placed.

        Raises:
            ChannelError: They are not there.
        """
        region_id, announced, size, offset = _checked(place)
        if not region_id:
            start = self._position + -self._position % ALIGNMENT
            self._position = end = start + size
            if end > len(self._rest):
                raise ChannelError("the message ends within a tensor")
            return self._rest[start:end]
        if region_id < 0:
            if self.ours is None:
                raise ChannelError(f"region {-region_id} is named as one of this end's, which has none to name")
            return self.ours.hold(-region_id, size, offset)
        if announced:
            if not self._fds:
                raise ChannelError(f"the descriptor of region {region_id} is missing")
            self._mappings.add(region_id, self._fds.pop(0), forwarded=announced == FORWARDED)
        self.regions.append(region_id)
        return self._mappings.view(region_id, size, offset)


def _checked(place: object) -> Place:
    if not (isinstance(place, tuple) and len(place) == PLACE_LENGTH):
        raise ChannelError(f"the place of a tensor is malformed: {place!r}")
    region_id, announced, size, offset = place
    has_numbers = type(region_id) is type(size) is type(offset) is int
    if not has_numbers or size < 0 or offset < 0 or announced not in (KNOWN, OWNED, FORWARDED):
        raise ChannelError(f"the place of a tensor is malformed: {place!r}")
    return region_id, announced, size, offset


class Receiver:
    """Assembles messages from received bytes.

    Args:
        mappings: The other end's regions.
        ours: This end's, where the other end may name them.
    """

    def __init__(self, mappings: Mappings, ours: RegionPool | None = None) -> None:
        self._mappings = mappings
        self._ours = ours
        self._data = bytearray()
        self._fds: list[int] = []

    def feed(self, data: bytes | bytearray, fds: Iterable[int] = ()) -> list[Incoming]:
        """Take in bytes and descriptors; return the messages that are now complete.

        Raises:
            ChannelError: The bytes are no messages.
        """
        self._fds.extend(fds)
        if self._data:
            self._data += data
            data = self._data
        messages: list[Incoming] = []
        whole = memoryview(data)
        size = len(data)
        start = 0
        while size - start >= _FRAME.size:
            header_size, rest_size = _FRAME.unpack_from(data, start)
            if header_size > HEADER_BYTES_MAX:
                raise ChannelError(f"a header of {header_size} bytes is too large")
            middle = _FRAME.size + header_size
            end = start + middle + rest_size
            if end > size:
                break
            # A frame after one whose tensors end anywhere is copied to where its own are aligned.
            frame = memoryview(bytearray(whole[start:end])) if start % ALIGNMENT else whole[start:end]
            header = _read_header(frame[_FRAME.size : middle])
            # Descriptors arrive with the first byte of their message, so those here belong to this message or to a
            # later one; a message takes only those that it announces.
            messages.append(Incoming(header, frame[middle:], self._fds, self._mappings, self._ours))
            start = end
        if start:
            self._data = bytearray(whole[start:])
        elif data is not self._data:
            self._data = bytearray(data)
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


def receive(sock: socket.socket, flags: int = 0, buffer: memoryview = _received) -> tuple[bytearray, list[int]]:
    """Return the next bytes and descriptors of a socket; empty bytes at its end.

    The bytes can be written to, because a model may compute in place on arrays that lie in them.

    Args:
        buffer: What to receive into; threads that receive at the same time need one each.
    """
    size, ancillary, _, _ = sock.recvmsg_into([buffer], _ANCILLARY_BYTES, flags)
    data = bytearray(buffer[:size])
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


def poll_for(poll: select.poll, duration_ns: int) -> bool:
    """Poll without sleeping until there is data or the time is over; return whether there is data."""
    end = time.monotonic_ns() + duration_ns
    while not poll.poll(0):
        if time.monotonic_ns() > end:
            return False
        os.sched_yield()  # other processes may have this core
    return True
