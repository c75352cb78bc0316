"""Blocks of pinned memory, which are kept for the next batch."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from charonia.core.tensor import Array
from charonia.server.metrics.devices import PinnedMemory

MIN_BLOCK_BYTES = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Memory, at least as large as requested.

    Attributes:
        memory: The bytes: an object with the buffer protocol.
        size: Number of bytes.
    """

    memory: Any
    size: int

    def array(self, size: int) -> Array:
        """Return the first bytes as a new array: views of it keep it alive, not the block."""
        return np.frombuffer(memoryview(self.memory)[:size], np.uint8)


class BlockPool:
    """Blocks in powers of two. Thread-safe.

    Args:
        account: The limit of all blocks together, used and free; it counts the used bytes.
        allocate: Allocates memory. Raises RuntimeError when there is no more.
    """

    def __init__(self, account: PinnedMemory, allocate: Callable[[int], Any]) -> None:
        self._account = account
        self._allocate = allocate
        self._lock = threading.Lock()
        self._free: dict[int, list[Block]] = {}
        self._free_bytes = 0

    def take(self, size: int) -> Block | None:
        """Return a block of at least `size` bytes, None at the limit."""
        wanted = max(MIN_BLOCK_BYTES, 1 << (size - 1).bit_length()) if size > 0 else MIN_BLOCK_BYTES
        with self._lock:
            free = self._free.get(wanted)
            if free:
                block = free.pop()
                self._free_bytes -= wanted
                self._account.used_bytes += wanted
                return block
            if self._account.used_bytes + wanted > self._account.limit_bytes:
                return None
            if self._account.used_bytes + self._free_bytes + wanted > self._account.limit_bytes:
                # Free blocks of other sizes are released.
                self._free.clear()
                self._free_bytes = 0
            self._account.used_bytes += wanted
        try:
            return Block(self._allocate(wanted), wanted)
        except RuntimeError:  # the system has no more
            with self._lock:
                self._account.used_bytes -= wanted
            return None

    def give_back(self, block: Block) -> None:
        """Take back a block that is no longer in use."""
        with self._lock:
            self._account.used_bytes -= block.size
            self._free_bytes += block.size
            self._free.setdefault(block.size, []).append(block)
