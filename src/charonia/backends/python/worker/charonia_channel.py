"""Messages between the server and a worker process, over one stream socket.

Used by both ends, so it needs nothing but the standard library and runs on Python 3.8. A message is a frame:

    4 bytes length of the header, 4 bytes length of the rest, header, rest

The header is a tuple of plain values in `marshal` form of version 2, which every Python since 2.5 reads and which,
unlike pickle, cannot name code. The rest is tensor bytes, one after the other. A tensor of more than `INLINE_BYTES_MAX`
lies in a region instead: a memfd that its sender owns, whose descriptor goes along with the first message that uses it.
The receiver maps it and keeps the mapping; the sender writes to it again only after the receiver has released it.
Nothing has a name in any file system, so nothing can be left behind.
"""

import contextlib
import marshal
import mmap
import os
import socket
import struct
import tempfile
from array import array

INLINE_BYTES_MAX = 64 * 1024
"""Larger tensors go through shared memory: below, a copy through the socket is cheaper than a page fault."""

HEADER_BYTES_MAX = 64 * 1024 * 1024
"""A longer header is taken for a broken stream."""

REST_BYTES_MAX = 2**32 - 1

FDS_MAX = 64
"""Descriptors that one message may carry; tensors beyond go inline."""

POOL_BYTES_MAX = 256 * 1024 * 1024
"""Most bytes of idle regions that a sender keeps for reuse."""

_FRAME = struct.Struct("<II")
_RECEIVE_BYTES = 256 * 1024
_REGION_BYTES_MIN = 128 * 1024


class ChannelError(Exception):
    """The stream is not what this module writes."""


def make_memory(size):
    """Return a descriptor of `size` bytes of memory without a name."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("charonia", getattr(os, "MFD_CLOEXEC", 1))
    else:
        fd, path = tempfile.mkstemp()
        os.unlink(path)
    os.ftruncate(fd, size)
    return fd


class Region:
    """Shared memory of the sending end."""

    __slots__ = ("fd", "id", "is_announced", "memory", "size")

    def __init__(self, id, size):
        self.id = id
        self.size = size
        self.fd = make_memory(size)
        self.memory = mmap.mmap(self.fd, size)
        self.is_announced = False

    def close(self):
        """Give the memory back; the other end keeps its mapping until it is told."""
        os.close(self.fd)
        with contextlib.suppress(BufferError):  # somebody still looks at it: the mapping goes with the last view
            self.memory.close()


class RegionPool:
    """The regions of a sending end: those in use by id, and idle ones for reuse."""

    def __init__(self):
        self._used = {}
        self._idle = {}
        self._idle_bytes = 0
        self._next_id = 1

    def take(self, size):
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

    def release(self, ids):
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

    def close(self):
        """Give everything back."""
        for region in self._used.values():
            region.close()
        for regions in self._idle.values():
            for region in regions:
                region.close()
        self._used.clear()
        self._idle.clear()


class Mappings:
    """The regions of the other end that are mapped here, by id."""

    def __init__(self):
        self._memory = {}

    def add(self, region_id, fd):
        """Map a region and close its descriptor."""
        try:
            self._memory[region_id] = mmap.mmap(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def view(self, region_id, size):
        """Return the first `size` bytes of a region."""
        memory = self._memory.get(region_id)
        if memory is None or size > len(memory):
            raise ChannelError(f"region {region_id} of {size} bytes is not mapped")
        return memoryview(memory)[:size]

    def drop(self, ids):
        """Unmap regions; one that is still looked at goes with its last view."""
        for region_id in ids:
            memory = self._memory.pop(region_id, None)
            if memory is not None:
                with contextlib.suppress(BufferError):
                    memory.close()

    def close(self):
        """Unmap everything."""
        self.drop(list(self._memory))


class Outgoing:
    """A message in the making: places tensors inline or in regions."""

    __slots__ = ("_pool", "fds", "parts", "regions", "size")

    def __init__(self, pool):
        self._pool = pool
        self.parts = []
        self.size = 0
        self.fds = []
        self.regions = []

    def place(self, data):
        """Take in the bytes of a tensor; return where the other end finds them: (region, announced now, size)."""
        size = len(data)
        if size <= INLINE_BYTES_MAX or len(self.fds) >= FDS_MAX:
            self.parts.append(data)
            self.size += size
            return (0, False, size)
        region = self._pool.take(size)
        region.memory[:size] = data
        self.regions.append(region.id)
        announced = not region.is_announced
        if announced:
            region.is_announced = True
            self.fds.append(region.fd)
        return (region.id, announced, size)

    def frame(self, header):
        """Return the buffers of the whole message."""
        text = marshal.dumps(header, 2)
        if self.size > REST_BYTES_MAX or len(text) > HEADER_BYTES_MAX:
            raise ChannelError(f"a message of {len(text) + self.size} bytes is too large")
        return [_FRAME.pack(len(text), self.size) + text, *self.parts]


class Incoming:
    """A received message: finds the tensors of its header."""

    __slots__ = ("_mappings", "_position", "_rest", "fds", "header", "regions")

    def __init__(self, header, rest, fds, mappings):
        self.header = header
        self.fds = fds
        self.regions = []
        self._rest = rest
        self._position = 0
        self._mappings = mappings

    def find(self, place):
        """Return the bytes of the next tensor; to be called in the order in which they were placed."""
        region_id, announced, size = place
        if not region_id:
            start = self._position
            self._position = end = start + size
            if end > len(self._rest):
                raise ChannelError("the message ends within a tensor")
            return self._rest[start:end]
        if announced:
            if not self.fds:
                raise ChannelError(f"the descriptor of region {region_id} is missing")
            self._mappings.add(region_id, self.fds.pop(0))
        self.regions.append(region_id)
        return self._mappings.view(region_id, size)


class Receiver:
    """Puts received bytes together to messages."""

    def __init__(self, mappings):
        self._mappings = mappings
        self._data = bytearray()
        self._fds = []

    def feed(self, data, fds=()):
        """Take in bytes and descriptors; return the messages that are now complete."""
        self._fds.extend(fds)
        self._data += data
        messages = []
        while len(self._data) >= _FRAME.size:
            header_size, rest_size = _FRAME.unpack_from(self._data)
            if header_size > HEADER_BYTES_MAX:
                raise ChannelError(f"a header of {header_size} bytes is too large")
            start = _FRAME.size + header_size
            end = start + rest_size
            if len(self._data) < end:
                break
            whole = bytes(self._data[:end]) if end < len(self._data) else bytes(self._data)
            del self._data[:end]
            try:
                header = marshal.loads(whole[_FRAME.size : start])
            except (ValueError, EOFError, TypeError) as error:
                raise ChannelError(f"a header cannot be read: {error}") from error
            # Descriptors arrive with the first byte of their message, so those here belong to this message or to a
            # later one; a message takes only those that it announces.
            messages.append(Incoming(header, memoryview(whole)[start:], self._fds, self._mappings))
        return messages

    def close(self):
        """Close descriptors that no message has taken."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


def receive(sock, flags=0):
    """Return the next bytes and descriptors of a socket; empty bytes at its end."""
    data, ancillary, _, _ = sock.recvmsg(_RECEIVE_BYTES, socket.CMSG_SPACE(FDS_MAX * 4), flags)
    fds = []
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array("i")
            numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
            fds.extend(numbers)
    return data, fds


def send_some(sock, buffers, fds):
    """Send what the socket takes; return the number of bytes. Descriptors go with the first byte."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    return sock.sendmsg(buffers, ancillary)


def remaining(buffers, sent):
    """Return the buffers without their first `sent` bytes."""
    left = []
    for buffer in buffers:
        size = len(buffer)
        if sent >= size:
            sent -= size
        else:
            left.append(memoryview(buffer)[sent:] if sent else buffer)
            sent = 0
    return left


def send_all(sock, buffers, fds):
    """Send everything on a blocking socket."""
    while buffers:
        sent = send_some(sock, buffers, fds)
        fds = ()
        buffers = remaining(buffers, sent)
