"""Finds the region of shared memory that contains an address of this process."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import mmap

    Data = bytes | bytearray | memoryview


class Mapped(NamedTuple):
    """A region as it is mapped in this process.

    Attributes:
        owner: The pool, or the mappings, that it belongs to.
        id: Its number there.
        size: Its size in bytes.
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
