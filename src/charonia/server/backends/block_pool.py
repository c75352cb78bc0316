"""Blocks of memory, pinned or of a GPU, which are kept for the next batch."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from charonia.core.tensor import Array
from charonia.server.metrics.devices import MemoryAccount

MIN_BLOCK_BYTES = 4096
_STEPS = 8


def power_of_two(size: int) -> int:
    """Return the next power of two: few sizes, so that most free blocks fit."""
    return max(MIN_BLOCK_BYTES, 1 << (size - 1).bit_length())


def within_an_eighth(size: int) -> int:
    """Return a size that is larger by an eighth at most, for blocks that take much of the memory."""
    step = max(MIN_BLOCK_BYTES, power_of_two(size) // (2 * _STEPS))
    return -(-size // step) * step


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Memory, at least as large as requested.

    Attributes:
        memory: What was allocated: an object with the buffer protocol if it is memory of the CPU.
    """

    memory: Any
    size: int

    def array(self, size: int) -> Array:
        """Return the first bytes as a new array: views of it keep it alive, not the block."""
        return np.frombuffer(memoryview(self.memory)[:size], np.uint8)


class BlockPool:
    """Blocks in a few sizes. Thread-safe.

    Args:
        account: The limit of all blocks together, used and idle; it counts both.
        allocate: Allocates memory, which is freed with its last reference. Raises RuntimeError when there is no more.
        block_size: The size of the block for a number of bytes.
    """

    def __init__(
        self, account: MemoryAccount, allocate: Callable[[int], Any], block_size: Callable[[int], int] = power_of_two
    ) -> None:
        self.account = account
        self._allocate = allocate
        self._block_size = block_size
        self._lock = threading.RLock()  # the finalizer of an array, which gives a block back, may run anywhere
        self._idle: dict[int, list[Block]] = {}

    def take(self, size: int) -> Block | None:
        """Return a block of at least `size` bytes, None at the limit or when the system has no more.

        An idle block less than twice as large will do. If there is no room for another one, idle blocks are freed.
        """
        wanted, account = self._block_size(max(size, 1)), self.account
        with self._lock:
            fitting = min((each for each in self._idle if wanted <= each < 2 * wanted), default=None)
            if fitting is not None:
                idle = self._idle[fitting].pop()
                if not self._idle[fitting]:
                    del self._idle[fitting]
                account.idle_bytes -= idle.size
                account.used_bytes += idle.size
                return idle
            if account.used_bytes + wanted > account.limit_bytes:
                return None
            if account.used_bytes + account.idle_bytes + wanted > account.limit_bytes:
                self.trim()
            account.used_bytes += wanted
        block = self._allocated(wanted)
        if block is None:
            self.trim()
            block = self._allocated(wanted)
        if block is None:
            with self._lock:
                account.used_bytes -= wanted
        return block

    def release(self, block: Block) -> None:
        """Take back a block that is no longer in use."""
        with self._lock:
            self.account.used_bytes -= block.size
            self.account.idle_bytes += block.size
            self._idle.setdefault(block.size, []).append(block)

    def trim(self) -> None:
        """Free the idle blocks."""
        with self._lock:
            self.account.idle_bytes -= sum(size * len(blocks) for size, blocks in self._idle.items())
            self._idle.clear()

    def _allocated(self, size: int) -> Block | None:
        try:
            return Block(self._allocate(size), size)
        except RuntimeError:
            return None
