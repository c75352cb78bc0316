"""Pinned memory: memory of the CPU that a GPU copies from and to by itself, while others compute.

Pinned memory cannot be swapped out, so there is a limit to all of it together. Blocks come in powers of two and are
kept for the next batch. When there is no room, whoever asks gets none and copies the slow way: nobody waits.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from charonia.stats.devices import PinnedMemory

MIN_BLOCK_BYTES = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Pinned memory, at least as large as asked for.

    Attributes:
        memory: The bytes.
    """

    memory: torch.Tensor

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.memory.numel()


def pinned(size: int) -> torch.Tensor:
    """Return new pinned memory."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class PinnedPool:
    """Blocks of pinned memory. May be used from many threads.

    Args:
        account: The limit of all blocks together, used and free; what is in use is noted there.
        allocate: Makes memory.
    """

    def __init__(self, account: PinnedMemory, allocate: Callable[[int], torch.Tensor] = pinned) -> None:
        self._account = account
        self._allocate = allocate
        self._lock = threading.Lock()
        self._free: dict[int, list[Block]] = {}
        self._free_bytes = 0

    def take(self, size: int) -> Block | None:
        """Return a block of at least `size` bytes, None where there is no room."""
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
                # Blocks of other sizes give way.
                self._free.clear()
                self._free_bytes = 0
            self._account.used_bytes += wanted
        try:
            return Block(self._allocate(wanted))
        except RuntimeError:  # the system has no more to pin
            with self._lock:
                self._account.used_bytes -= wanted
            return None

    def give_back(self, block: Block) -> None:
        """Take a block back; nobody reads or writes it any more."""
        with self._lock:
            self._account.used_bytes -= block.size
            self._free_bytes += block.size
            self._free.setdefault(block.size, []).append(block)
