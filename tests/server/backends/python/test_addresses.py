"""Which region of shared memory some bytes lie in."""

import mmap

from charonia.server.channel.regions import Addresses, Mapped

OWNER = object()


def test_bytes_are_found_in_the_region_that_holds_all_of_them() -> None:
    addresses, memory = Addresses(), mmap.mmap(-1, 8192)
    region = Mapped(OWNER, 1, 4096, -1)
    addresses.add(memory, region)
    view = memoryview(memory)

    assert addresses.find(view[:4096]) == (region, 0)
    assert addresses.find(view[4000:4096]) == (region, 4000)
    assert addresses.find(view[4000:4097]) is None
    assert addresses.find(view[5000:5001]) is None
    assert addresses.find(bytearray(8)) is None


def test_a_region_is_found_among_others_until_its_owner_removes_it() -> None:
    addresses = Addresses()
    memories = [mmap.mmap(-1, 4096) for _ in range(5)]
    for number, memory in enumerate(memories):
        addresses.add(memory, Mapped(OWNER, number, 4096, -1))

    assert addresses.remove(memories[2], object()) is None
    assert [addresses.find(memoryview(memory)[9:20]) for memory in memories] == [
        (Mapped(OWNER, number, 4096, -1), 9) for number in range(5)
    ]
    assert addresses.remove(memories[2], OWNER) == Mapped(OWNER, 2, 4096, -1)

    assert addresses.find(memoryview(memories[2])[:1]) is None
    assert addresses.remove(memories[2], OWNER) is None
    assert [addresses.find(memoryview(memories[number])) is None for number in (0, 1, 3, 4)] == [False] * 4
