"""Blocks that are kept for the next batch: which one is taken, and when idle ones are freed."""

import weakref

import pytest

from charonia.server.backends.block_pool import MIN_BLOCK_BYTES, Block, BlockPool, power_of_two, within_an_eighth
from charonia.server.metrics.devices import MemoryAccount

BLOCK = MIN_BLOCK_BYTES


class Memory:
    def __init__(self, total: int = 1 << 40) -> None:
        self.total = total
        self.made = 0

    def allocate(self, size: int) -> object:
        if size > self.total:
            raise RuntimeError("out of memory")
        self.total -= size
        self.made += 1
        found = Memory()
        weakref.finalize(found, self._free, size)
        return found

    def _free(self, size: int) -> None:
        self.total += size


def taken(pool: BlockPool, size: int) -> Block:
    block = pool.take(size)
    assert block is not None
    return block


@pytest.mark.parametrize(
    ("size", "power", "eighth"),
    [
        (1, BLOCK, BLOCK),
        (BLOCK, BLOCK, BLOCK),
        (BLOCK + 1, 2 * BLOCK, 2 * BLOCK),
        (9 * BLOCK, 16 * BLOCK, 9 * BLOCK),
        (16 * BLOCK + 1, 32 * BLOCK, 18 * BLOCK),
        (1 << 30, 1 << 30, 1 << 30),
        ((1 << 30) + 1, 1 << 31, 9 << 27),
    ],
)
def test_sizes_of_blocks(size: int, power: int, eighth: int) -> None:
    assert (power_of_two(size), within_an_eighth(size)) == (power, eighth)


def test_the_smallest_idle_block_that_is_less_than_twice_as_large_is_taken() -> None:
    memory = Memory()
    pool = BlockPool(MemoryAccount(1 << 30), memory.allocate, within_an_eighth)
    blocks = {size: taken(pool, size * BLOCK) for size in (8, 4, 5)}
    for block in blocks.values():
        pool.release(block)

    assert [taken(pool, 3 * BLOCK), taken(pool, 3 * BLOCK)] == [blocks[4], blocks[5]]
    assert taken(pool, 3 * BLOCK).size == 3 * BLOCK  # the one of 8 is too large for it
    assert memory.made == 4


def test_a_system_without_memory_gets_the_idle_blocks_back_first() -> None:
    memory, account = Memory(4 * BLOCK), MemoryAccount(1 << 30)
    pool = BlockPool(account, memory.allocate)
    pool.release(taken(pool, 2 * BLOCK))

    large = taken(pool, 4 * BLOCK)

    assert large.size == 4 * BLOCK
    assert (account.used_bytes, account.idle_bytes) == (4 * BLOCK, 0)
    assert pool.take(1) is None
    assert account.used_bytes == 4 * BLOCK


def test_trimming_frees_the_idle_blocks_and_no_others() -> None:
    memory, account = Memory(8 * BLOCK), MemoryAccount(1 << 30)
    pool = BlockPool(account, memory.allocate)
    used, idle = taken(pool, 4 * BLOCK), taken(pool, 2 * BLOCK)
    pool.release(idle)
    del idle
    pool.trim()

    assert (account.used_bytes, account.idle_bytes) == (4 * BLOCK, 0)
    assert memory.total == 4 * BLOCK
    assert used.size == 4 * BLOCK


def test_a_block_can_come_back_while_others_are_freed() -> None:
    memory, account = Memory(), MemoryAccount(1 << 30)
    pool = BlockPool(account, memory.allocate)
    first, second = taken(pool, BLOCK), taken(pool, 2 * BLOCK)
    weakref.finalize(first.memory, pool.release, second)  # as the garbage collector may, anywhere
    pool.release(first)
    del first
    pool.trim()

    assert (account.used_bytes, account.idle_bytes) == (0, 2 * BLOCK)
