"""Memory of a GPU, with a driver that is a fake of the few functions that are used."""

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

from charonia.core.errors import Code, ServingError
from charonia.server.channel import cuda_driver
from charonia.server.channel.cuda_driver import HANDLE_BYTES
from charonia.server.shared_memory.registry import CudaMemory

HANDLE = b"h" * HANDLE_BYTES
SIZE = 64
NO_GPU = 100
OUT_OF_RANGE = 101


class FakeDriver:
    """One GPU with one memory, which is an array of the host."""

    def __init__(self) -> None:
        self.memory = (ctypes.c_char * SIZE)(*(bytes((n,)) for n in range(SIZE)))
        self.failing: dict[str, int] = {}
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        act = getattr(type(self), f"act_{name}", lambda *_: None)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name in self.failing:
                return self.failing[name]
            act(self, *arguments)
            return 0

        return call

    def act_cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: int) -> None:  # noqa: N802 - the driver's
        assert bytes(handle) == HANDLE
        address._obj.value = ctypes.addressof(self.memory)

    def act_cuMemGetAddressRange_v2(self, start: Any, size: Any, address: Any) -> None:  # noqa: N802 - the driver's
        start._obj.value, size._obj.value = address.value, SIZE

    def act_cuMemcpyDtoH_v2(self, target: Any, address: Any, size: Any) -> None:  # noqa: N802 - the driver's
        ctypes.memmove(target, address.value, size.value)

    def act_cuMemcpyHtoD_v2(self, address: Any, data: bytes, size: Any) -> None:  # noqa: N802 - the driver's
        ctypes.memmove(address.value, data, size.value)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)
    cuda_driver.driver.cache_clear()
    yield fake
    cuda_driver.driver.cache_clear()


def refusal(raw_handle: bytes = HANDLE, device_id: int = 0, byte_size: int = 16) -> ServingError:
    with pytest.raises(ServingError) as caught:
        CudaMemory("r", raw_handle, device_id, byte_size)
    return caught.value


def test_memory_is_copied_from_and_to_the_gpu(driver: FakeDriver) -> None:
    memory = CudaMemory("r", HANDLE, 0, 32)

    assert bytes(memory.view(4, 8)) == bytes(range(4, 12))
    assert memory.view(0, 4).readonly
    memory.write(8, memoryview(b"abcd"))

    assert bytes(driver.memory)[:16] == bytes(range(8)) + b"abcd" + bytes(range(12, 16))


def test_memory_is_given_back_with_the_region(driver: FakeDriver) -> None:
    memory = CudaMemory("r", HANDLE, 0, 32)
    assert "cuIpcCloseMemHandle" not in driver.calls

    del memory

    assert driver.calls.count("cuIpcCloseMemHandle") == 1


def test_a_region_beyond_its_memory_is_refused_and_the_memory_given_back(driver: FakeDriver) -> None:
    error = refusal(byte_size=SIZE + 1)

    assert f"the memory has {SIZE} bytes, got byte_size {SIZE + 1}" in error.message
    assert "cuIpcCloseMemHandle" in driver.calls


@pytest.mark.parametrize(
    ("raw_handle", "device_id", "byte_size"), [(b"short", 0, 16), (HANDLE, 0, 0), (HANDLE, -1, 16), (HANDLE, 2**40, 16)]
)
def test_arguments_that_cannot_be_are_refused(
    driver: FakeDriver, raw_handle: bytes, device_id: int, byte_size: int
) -> None:
    error = refusal(raw_handle, device_id, byte_size)

    assert error.code is Code.INVALID_ARG
    assert error.message.startswith("failed to register shared memory region 'r': invalid args")


@pytest.mark.parametrize("function", ["cuDeviceGet", "cuIpcOpenMemHandle_v2", "cuMemGetAddressRange_v2"])
def test_what_the_driver_refuses_is_refused(driver: FakeDriver, function: str) -> None:
    driver.failing[function] = OUT_OF_RANGE

    error = refusal()

    assert error.code is Code.INVALID_ARG
    assert f"{function} failed with CUDA error {OUT_OF_RANGE}" in error.message


def test_a_gpu_that_fails_during_a_copy_is_an_internal_error(driver: FakeDriver) -> None:
    memory = CudaMemory("r", HANDLE, 0, 16)
    driver.failing["cuMemcpyDtoH_v2"] = 700

    with pytest.raises(ServingError) as caught:
        memory.view(0, 4)

    assert caught.value.code is Code.INTERNAL


@pytest.mark.parametrize("failing", [{"cuInit": NO_GPU}, None])
def test_without_a_gpu_it_says_so(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, failing: Any) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    if failing is None:
        monkeypatch.setattr(ctypes, "CDLL", missing)
    else:
        driver.failing = failing

    error = refusal()

    assert error.code is Code.INVALID_ARG
    assert error.message == "failed to register CUDA shared memory region: 'r', GPUs not supported"
