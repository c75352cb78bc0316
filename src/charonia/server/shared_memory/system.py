"""A client's system shared memory (`shm_open`): tmpfs files in one folder.

Reads are views of a mapping, writes go through the file. A process that touches the mapping of a truncated file, or a
hole when the file system is full, dies of SIGBUS. So the registered part is allocated at registration, the size of the
file is checked before each use, and a write cannot fault at all. One risk remains: a client that truncates its object
while a model reads the input.
"""

import mmap
import os
import stat
import weakref

from charonia.core.errors import internal, invalid, unavailable, unsupported
from charonia.wire.shared_memory import SystemRegion

SHM_FOLDER = "/dev/shm"
"""Linux' folder of memory objects."""

NAME_BYTES_MAX = 255

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
        name = _checked_name(key)
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


def _checked_name(key: str) -> str:
    """Return the file name of a memory object."""
    name = key.lstrip("/")
    problem = ""
    if not name or name in (".", "..") or "/" in name or "\0" in name or len(os.fsencode(name)) > NAME_BYTES_MAX:
        problem = f"expected 1 to {NAME_BYTES_MAX} bytes without '/' behind the first one"
    elif name.startswith(RESERVED_PREFIXES):
        problem = f"names that begin with {' or '.join(RESERVED_PREFIXES)} are reserved"
    if problem:
        raise invalid(f"Unable to open shared memory region: '{key[:NAME_BYTES_MAX]}': {problem}")
    return name
