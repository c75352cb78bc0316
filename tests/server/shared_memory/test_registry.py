"""The registered regions: names, limits, and what a request may name."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.core.errors import Code, ServingError, invalid
from charonia.server.shared_memory.registry import NAME_LENGTH_MAX, REGIONS_MAX, RegionRegistry
from charonia.wire.shared_memory import CudaRegion, RegionSpan, SystemRegion


class FakeMemory:
    def __init__(self, size: int) -> None:
        self.bytes = bytearray(size)

    def view(self, offset: int, byte_size: int) -> memoryview:
        return memoryview(self.bytes)[offset : offset + byte_size]

    def write(self, offset: int, data: memoryview) -> None:
        self.bytes[offset : offset + len(data)] = data


def registry(bytes_max: int = 1000) -> RegionRegistry:
    return RegionRegistry(
        bytes_max,
        open_system=lambda region: FakeMemory(region.byte_size),
        open_cuda=lambda region: FakeMemory(region.byte_size),
    )


def system(name: str = "r", byte_size: int = 100) -> SystemRegion:
    return SystemRegion(name, "/key", 0, byte_size)


def cuda(name: str = "g", byte_size: int = 100) -> CudaRegion:
    return CudaRegion(name, b"h" * 64, 0, byte_size)


def refusal(work: Coroutine[Any, Any, None]) -> ServingError:
    with pytest.raises(ServingError) as caught:
        asyncio.run(work)
    return caught.value


def test_regions_are_listed_by_their_kind() -> None:
    regions = registry()
    asyncio.run(regions.register_system(system()))
    asyncio.run(regions.register_cuda(cuda()))

    assert (regions.system(), regions.cuda()) == ([system()], [cuda()])
    assert (regions.system("r"), regions.cuda("g")) == ([system()], [cuda()])
    for look, kind in ((regions.system, "system"), (regions.cuda, "cuda")):
        with pytest.raises(ServingError, match=f"Unable to find {kind} shared memory region: 'x'") as caught:
            look("x")
        assert caught.value.code is Code.NOT_FOUND
    with pytest.raises(ServingError, match="Unable to find system"):
        regions.system("g")


def test_a_name_is_taken_whatever_its_kind() -> None:
    regions = registry()
    asyncio.run(regions.register_system(system("r")))

    for work in (regions.register_system(system("r")), regions.register_cuda(cuda("r"))):
        error = refusal(work)
        assert error.code is Code.ALREADY_EXISTS
        assert "shared memory region 'r' already in manager" in error.message


async def test_of_two_registrations_at_once_one_has_the_name() -> None:
    regions = registry()

    outcomes = await asyncio.gather(
        regions.register_system(system()), regions.register_system(system()), return_exceptions=True
    )
    assert outcomes[0] is None
    assert isinstance(outcomes[1], ServingError)


def test_unregistering_takes_one_region_or_all_of_a_kind() -> None:
    regions = registry()
    for name in ("a", "b"):
        asyncio.run(regions.register_system(system(name)))
    asyncio.run(regions.register_cuda(cuda()))

    asyncio.run(regions.unregister_system("none"))
    asyncio.run(regions.unregister_system("g"))
    asyncio.run(regions.unregister_system("a"))
    assert [r.name for r in regions.system()] == ["b"]
    asyncio.run(regions.unregister_cuda("b"))
    asyncio.run(regions.unregister_system())
    assert regions.system() == []
    assert [r.name for r in regions.cuda()] == ["g"]
    asyncio.run(regions.unregister_cuda())
    assert regions.cuda() == []


def test_what_a_request_uses_stays_after_its_name_has_gone() -> None:
    regions = registry()
    asyncio.run(regions.register_system(system()))
    view, place = regions.view(RegionSpan("r", 0, 4)), regions.place(RegionSpan("r", 0, 4))

    asyncio.run(regions.unregister_system("r"))
    place.write(b"abcd")

    assert bytes(view) == b"abcd"


@pytest.mark.parametrize(
    ("span", "fragment"),
    [
        (RegionSpan("x", 0, 1), "Unable to find shared memory region: 'x'"),
        (RegionSpan("r", 100, 1), "Invalid offset for shared memory region: 'r'"),
        (RegionSpan("r", -1, 1), "Invalid offset for shared memory region: 'r'"),
        (RegionSpan("r", 2**64, 1), "Invalid offset for shared memory region: 'r'"),
        (RegionSpan("r", 32, 2**64 - 32), r"Integer overflow detected: byte_size \(\d+\) \+ offset \(32\)"),
        (RegionSpan("r", 0, 0), r"Invalid offset \+ byte size for shared memory region: 'r'"),
        (RegionSpan("r", 0, 101), r"Invalid offset \+ byte size for shared memory region: 'r'"),
        (RegionSpan("r", 99, 2), r"Invalid offset \+ byte size for shared memory region: 'r'"),
    ],
)
def test_nothing_outside_a_region_can_be_named(span: RegionSpan, fragment: str) -> None:
    regions = registry()
    asyncio.run(regions.register_system(system()))

    for use in (regions.view, regions.place):
        with pytest.raises(ServingError, match=fragment):
            use(span)


def test_all_of_a_region_can_be_named() -> None:
    regions = registry()
    asyncio.run(regions.register_system(system()))

    assert len(regions.view(RegionSpan("r", 0, 100))) == 100
    assert len(regions.view(RegionSpan("r", 99, 1))) == 1


@pytest.mark.parametrize("name", ["", "n" * (NAME_LENGTH_MAX + 1)])
def test_a_name_has_a_length(name: str) -> None:
    assert refusal(registry().register_system(system(name))).code is Code.INVALID_ARG


def test_there_is_a_limit_on_the_bytes_of_all_regions() -> None:
    regions = registry(bytes_max=150)
    asyncio.run(regions.register_system(system("a")))

    error = refusal(regions.register_cuda(cuda("b", 51)))
    asyncio.run(regions.register_cuda(cuda("b", 50)))

    assert error.code is Code.UNAVAILABLE
    assert "51 bytes exceed the rest of the 150 bytes" in error.message
    assert "--client-shm-byte-size" in error.hint


def test_there_is_a_limit_on_the_number_of_regions() -> None:
    regions = registry(bytes_max=10**6)

    async def fill() -> None:
        for number in range(REGIONS_MAX):
            await regions.register_system(system(str(number), 1))
        await regions.register_system(system("one more", 1))

    assert f"at most {REGIONS_MAX} regions" in refusal(fill()).message


def test_memory_that_cannot_be_opened_leaves_nothing_behind() -> None:
    def fail(region: SystemRegion) -> FakeMemory:
        raise invalid("no")

    regions = RegionRegistry(1000, open_system=fail)

    assert refusal(regions.register_system(system())).message == "no"
    assert regions.system() == []


@given(st.integers(-(2**70), 2**70) | st.integers(-2, 130), st.integers(-(2**70), 2**70) | st.integers(-2, 130))
def test_a_part_is_given_out_just_when_it_is_within_the_region(offset: int, byte_size: int) -> None:
    regions = registry()
    asyncio.run(regions.register_system(system()))
    is_within = 0 <= offset < 100 and byte_size > 0 and offset + byte_size <= 100

    try:
        view = regions.view(RegionSpan("r", offset, byte_size))
    except ServingError:
        assert not is_within
    else:
        assert is_within
        assert len(view) == byte_size
