"""Tensors of GPUs as the two ends of a channel share them by CUDA IPC, with GPUs that are pretended."""

import ctypes
import gc
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.pretended_cuda import GPUS, OnGpu, PretendedCuda
from tests.support.python_model import array_of, config, error_of, load, request

from charonia.config.model import TransactionPolicy
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, unavailable
from charonia.core.request import InferRequest
from charonia.core.tensor import Array, DeviceTensor
from charonia.server.backends.python.worker.tensor import Tensor
from charonia.server.backends.workers import codec
from charonia.server.channel import cuda_driver, dlpack, regions
from charonia.server.channel.channel import Incoming, Outgoing
from charonia.server.channel.cuda_driver import CudaError
from charonia.server.channel.cuda_ipc import GpuArray, ImportedMemory, IpcAddress, export, finish, imported_array
from charonia.server.channel.datatypes import TritonModelException
from charonia.server.channel.regions import ChannelError, Export, Mappings, RegionPool

NUMBERS = np.arange(6, dtype=np.float32).reshape(2, 3)
SIZE = NUMBERS.nbytes


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedCuda]:
    pretended = PretendedCuda(tmp_path)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pretended)
    cuda_driver.driver.cache_clear()
    yield pretended
    assert pretended.depth() == 0, "a context was left current"
    assert soon(lambda: pretended.opened() == set()), "memory of others was left open"
    cuda_driver.driver.cache_clear()


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    cuda_driver.driver.cache_clear()
    yield
    cuda_driver.driver.cache_clear()


@pytest.fixture
def elsewhere(tmp_path: Path) -> IpcAddress:
    """Numbers in memory that another process, which is alive, has allocated."""
    name = f"{os.getppid()}-1"
    (tmp_path / name).write_bytes(bytes(16) + NUMBERS.tobytes() + bytes(24))
    return IpcAddress(GPUS[0], name.encode().ljust(64, b"\0"), 16)


def soon(condition: Callable[[], bool]) -> bool:
    """Return whether something comes true: handles are released by a thread."""
    end = time.monotonic() + 200
    while not condition() and time.monotonic() < end:
        gc.collect()
        time.sleep(0.001)
    return condition()


def imported(
    address: IpcAddress, returned: list[int], export_id: int = 1, exporter: RegionPool | None = None
) -> GpuArray:
    return GpuArray(
        ImportedMemory(export_id, SIZE, address, exporter, lambda: returned.append(export_id)), NUMBERS.shape, "FP32"
    )


# What is exported


def test_a_tensor_is_lent_by_gpu_handle_and_offset_when_the_gpu_is_done_with_it(cuda: PretendedCuda) -> None:
    outgoing = Outgoing(RegionPool())
    whole = cuda.put(np.arange(10, dtype=np.int16))

    place = outgoing.export(whole[4:7], "INT16")

    assert place is not None
    export_id, size, gpu, handle, offset = place
    assert (export_id, size, gpu, offset) == (1, 6, GPUS[0], 8)
    assert handle.rstrip(b"\0").decode() in cuda.files()
    assert cuda.noted("cuCtxSynchronize") == 1
    assert outgoing.parts == []


def test_an_export_keeps_the_tensor_until_it_is_released(cuda: PretendedCuda) -> None:
    pool = RegionPool()
    place = Outgoing(pool).export(cuda.put(NUMBERS), "FP32")
    assert place is not None
    gc.collect()
    assert len(cuda.files()) == 1

    assert pool.release([place[0]]) == []

    gc.collect()
    assert cuda.files() == set()
    assert pool.release([place[0]]) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda cuda: cuda.put(NUMBERS, has_handle=False),
        lambda cuda: cuda.put(NUMBERS[:0]),
        lambda cuda: OnGpu(cuda, NUMBERS.copy()),
        lambda cuda: NUMBERS,
        lambda cuda: "no tensor at all",
    ],
    ids=["no handle", "empty", "other memory", "of the CPU", "nothing"],
)
def test_what_has_no_handle_is_not_exported(cuda: PretendedCuda, make: Callable[[PretendedCuda], Any]) -> None:
    pool = RegionPool()

    assert Outgoing(pool).export(make(cuda), "FP32") is None


def test_without_a_driver_nothing_is_exported(no_driver: None, tmp_path: Path) -> None:
    assert export(PretendedCuda(tmp_path).put(NUMBERS), "FP32") is None
    assert not cuda_driver.is_usable()


def test_there_is_a_limit_to_exports(cuda: PretendedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "EXPORTS_MAX", 2)
    pool = RegionPool()
    tensor = cuda.put(NUMBERS)

    exported = [Outgoing(pool).export(tensor, "FP32") for _ in range(3)]

    assert [place is None for place in exported] == [False, False, True]
    pool.release([1])
    assert Outgoing(pool).export(tensor, "FP32") is not None


# What is imported


def test_elements_are_read_where_they_are_and_released_when_their_last_user_is_gone(
    cuda: PretendedCuda, elsewhere: IpcAddress
) -> None:
    returned: list[int] = []
    array = imported(elsewhere, returned)
    assert cuda.opened() == set(), "nobody has looked yet"

    on_gpu = cuda.adopt(array)
    del array

    assert on_gpu.elements.tolist() == NUMBERS.tolist()
    assert cuda.noted("cuMemcpyDtoH_v2") == cuda.noted("cuCtxSynchronize") == 0
    on_gpu.elements[0, 0] = 7  # what the GPU writes is written for all
    assert returned == []
    del on_gpu
    assert soon(lambda: returned == [1])
    assert cuda.opened() == set()
    assert cuda.noted("cuCtxSynchronize") == 1, "the GPU may have been at work on it"


def test_tensors_in_the_same_memory_open_it_once(cuda: PretendedCuda, elsewhere: IpcAddress) -> None:
    returned: list[int] = []
    first, second = imported(elsewhere, returned, 1), imported(elsewhere._replace(offset=40), returned, 2)
    assert first.cpu().tolist() == NUMBERS.tolist()
    assert second.cpu().tolist() == np.zeros((2, 3)).tolist()

    del first
    assert soon(lambda: returned == [1])
    assert len(cuda.opened()) == 1
    del second

    assert soon(lambda: returned == [1, 2])
    assert (cuda.noted("open"), cuda.noted("close")) == (1, 1)
    assert cuda.noted("cuCtxSynchronize") == 0, "copies are done when they return"
    assert imported(elsewhere, returned).cpu().tolist() == NUMBERS.tolist()


def test_a_part_of_what_is_imported_is_exported_on_by_the_handle_of_its_owner(
    cuda: PretendedCuda, elsewhere: IpcAddress
) -> None:
    returned: list[int] = []
    pool = RegionPool()
    part = cuda.adopt(imported(elsewhere, returned))[1:]

    place = Outgoing(pool).export(part, "FP32")

    assert place == (1, 12, GPUS[0], elsewhere.handle, elsewhere.offset + 12)
    assert cuda.noted("handle") == 0
    del part
    gc.collect()
    assert returned == []
    pool.release([1])
    assert soon(lambda: returned == [1])


def test_a_process_finds_its_own_memory_when_its_handle_comes_back(cuda: PretendedCuda) -> None:
    mine = cuda.put(NUMBERS)
    exported = export(mine, "FP32")
    assert exported is not None
    returned: list[int] = []

    back = cuda.adopt(imported(exported.address, returned))

    assert back.address == mine.address
    assert cuda.noted("open") == 0
    del back
    assert soon(lambda: returned == [1])
    assert cuda.noted("close") == 0


def test_what_is_named_is_the_very_thing_that_was_exported(cuda: PretendedCuda) -> None:
    pool = RegionPool()
    mine = cuda.put(NUMBERS)
    Outgoing(pool).export(mine, "FP32")
    named = (-1, SIZE, b"", b"", 0)

    assert imported_array(named, (2, 3), "FP32", pool, print) is mine
    for shape, datatype in (((3, 2), "FP32"), ((2, 3), "INT32")):
        with pytest.raises(ChannelError, match="is FP32 of shape"):
            imported_array(named, shape, datatype, pool, print)
    pool.release([1])
    with pytest.raises(ChannelError, match="no export 1"):
        imported_array(named, (2, 3), "FP32", pool, print)
    with pytest.raises(ChannelError, match="has none to name"):
        imported_array(named, (2, 3), "FP32", None, print)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"gpu": GPUS[1]}, "does not see GPU .*: CUDA_VISIBLE_DEVICES hides it"),
        ({"offset": 64}, "24 bytes at 64 are not within 64 bytes"),
        ({"handle": b"999999999-1".ljust(64, b"\0")}, "cuIpcOpenMemHandle_v2 failed with CUDA error 205"),
    ],
)
def test_a_handle_that_cannot_be_opened_says_why_and_leaves_nothing_open(
    cuda: PretendedCuda, elsewhere: IpcAddress, change: dict[str, Any], expected: str
) -> None:
    returned: list[int] = []
    array = imported(elsewhere._replace(**change), returned)

    with pytest.raises(CudaError, match=expected):
        array.cpu()

    del array
    assert soon(lambda: returned == [1] and cuda.opened() == set())


PLACE = (1, SIZE, GPUS[0], bytes(64), 0)


@pytest.mark.parametrize(
    "place",
    [
        None,
        PLACE[:4],
        list(PLACE),
        ("1", *PLACE[1:]),
        (0, *PLACE[1:]),
        (True, *PLACE[1:]),
        (1, 0, *PLACE[2:]),
        (1, SIZE, b"short", *PLACE[3:]),
        (1, SIZE, GPUS[0], b"short", 0),
        (1, SIZE, GPUS[0], "x" * 64, 0),
        (*PLACE[:4], -1),
        (-1, *PLACE[1:]),
    ],
)
def test_a_place_that_is_malformed_is_refused(place: object) -> None:
    with pytest.raises(ChannelError, match="malformed"):
        imported_array(place, (2, 3), "FP32", RegionPool(), print)


@pytest.mark.parametrize(
    ("shape", "datatype"),
    [((2, 2), "FP32"), ((-2, -3), "FP32"), ((2, 3), "BYTES"), ((2, 3), "FP16"), ([2, 3], "FP32"), ((2, 3), None)],
)
def test_a_size_that_is_not_that_of_the_tensor_is_refused(shape: Any, datatype: Any) -> None:
    with pytest.raises(ChannelError, match="are no tensor of shape"):
        imported_array(PLACE, shape, datatype, RegionPool(), print)


def test_whatever_stands_where_a_place_should_be_is_found_or_refused() -> None:
    rng = random.Random(2026)
    odd = (None, True, -1, 0, 1, 24, 2**70, 1.5, "", b"", b"y" * 16, b"y" * 64, (), (2, 3), [2])
    pool = RegionPool()
    pool.add_export(Export("mine", "FP32", (2, 3), None))
    for _ in range(3000):
        place = [rng.choice(odd) if rng.random() < 0.2 else part for part in PLACE]
        shape, datatype = rng.choice([(2, 3), (2, 3), rng.choice(odd)]), rng.choice(["FP32", "FP32", rng.choice(odd)])
        try:
            found = imported_array(tuple(place[: rng.choice([5, 5, 5, 4])]), shape, datatype, pool, lambda _: None)  # type: ignore[arg-type] # odd ones
        except ChannelError:
            continue
        assert isinstance(found, GpuArray)
        assert found.shape == (2, 3)


# Capsules


def test_a_capsule_keeps_what_it_shows_until_its_reader_lets_go_and_one_that_nobody_reads_keeps_nothing() -> None:
    class Kept:
        gone = 0

        def __del__(self) -> None:
            Kept.gone += 1

    memory = np.arange(6, dtype=np.int32)
    address = memory.__array_interface__["data"][0]
    capsule = dlpack.capsule_of(address, dlpack.CPU, (2, 3), "INT32", Kept())
    assert dlpack.layout_of(capsule) == (address, dlpack.CPU, (2, 3), True)

    array, datatype = dlpack.read(capsule, "X")
    del capsule
    gc.collect()

    assert (array.tolist(), datatype, Kept.gone) == ([[0, 1, 2], [3, 4, 5]], "INT32", 0)
    del array
    assert Kept.gone == 1
    dlpack.capsule_of(address, dlpack.CPU, (), "INT32", Kept())
    assert Kept.gone == 2
    assert dlpack._given_out == {}


def test_a_capsule_of_a_gpu_is_a_tensor_there(cuda: PretendedCuda) -> None:
    mine = cuda.put(NUMBERS)

    tensor = Tensor.from_dlpack("X", mine.__dlpack__())

    assert (tensor.is_cpu(), tensor.shape(), tensor.triton_dtype()) == (False, [2, 3], 11)
    assert cuda.adopt(Tensor.from_dlpack("Y", tensor)).address == mine.address
    assert cuda.adopt(tensor).address == mine.address
    assert Outgoing(RegionPool()).export(tensor._source, "FP32") is not None  # type: ignore[attr-defined] # of a GPU
    assert tensor.as_numpy().tolist() == NUMBERS.tolist()
    assert cuda.noted("cuMemcpyDtoH_v2") == 1
    assert Tensor.from_dlpack("X", cuda.put(NUMBERS[:0]).__dlpack__()).as_numpy().shape == (0, 3)
    with pytest.raises(TritonModelException, match="memory of a CUDA GPU"):
        Tensor.from_dlpack("X", mine.transposed().__dlpack__())


# In the server


def lent_by_worker(address: IpcAddress, pool: RegionPool, returned: list[int]) -> DeviceTensor:
    message = Incoming(("done",), memoryview(b""), [], Mappings(), pool)
    return codec.imported_tensor(("OUT", "FP32", (2, 3), (4, SIZE, *address)), message, returned.append)


def test_the_server_passes_on_what_one_worker_has_lent_without_opening_it(
    cuda: PretendedCuda, elsewhere: IpcAddress
) -> None:
    first, second = RegionPool(), RegionPool()
    returned: list[int] = []
    tensor = lent_by_worker(elsewhere, first, returned)

    place = codec.exported_place(tensor, Outgoing(second))
    back = codec.exported_place(tensor, Outgoing(first))

    assert place == (1, SIZE, *elsewhere)
    assert back == (-4, SIZE, b"", b"", 0)
    assert cuda.noted("open") == 0
    message = Incoming(("done",), memoryview(b""), [], Mappings(), second)
    echoed = codec.imported_tensor(("OUT", "FP32", (2, 3), (-1, SIZE, b"", b"", 0)), message, print)
    assert echoed.content is tensor.content
    del tensor, echoed
    assert returned == []
    second.release([1])
    assert returned == [4]


def test_what_a_worker_had_is_gone_with_it_unless_it_is_open(cuda: PretendedCuda, elsewhere: IpcAddress) -> None:
    pool = RegionPool()
    closed, open_here = lent_by_worker(elsewhere, pool, []), lent_by_worker(elsewhere, pool, [])
    assert open_here.content.native is not None

    pool.close()

    looks: list[Callable[[], object]] = [
        lambda: closed.array,
        lambda: closed.content.native,
        lambda: codec.exported_place(closed, Outgoing(pool)),
    ]
    for look in looks:
        with pytest.raises(ServingError, match="the worker process that made it has ended") as caught:
            look()
        assert caught.value.code is Code.UNAVAILABLE
    assert codec.exported_place(open_here, Outgoing(RegionPool())) is None
    assert open_here.array.tolist() == NUMBERS.tolist()


def test_a_thread_that_hands_a_tensor_on_waits_for_the_gpu(cuda: PretendedCuda, elsewhere: IpcAddress) -> None:
    finish(cuda.put(NUMBERS))
    assert cuda.noted("cuCtxSynchronize") == 1

    finish(imported(elsewhere, []))  # its owner has waited
    finish(cuda.put(NUMBERS, device=7))  # a GPU that is not there has nothing to wait for

    assert cuda.noted("cuCtxSynchronize") == 1


class Gone:
    native = None
    shape = (3,)

    def to_host(self) -> Array:
        raise unavailable("it is gone")


@pytest.mark.usefixtures("execution_mode")
@pytest.mark.parametrize("body", ["", "raise ValueError('none of them')", "return None"])
@pytest.mark.parametrize("is_decoupled", [False, True])
async def test_a_request_whose_input_is_gone_fails_and_the_model_gets_the_others(
    tmp_path: Path, body: str, is_decoupled: bool
) -> None:
    answers = "[pb_utils.InferenceResponse([pb_utils.Tensor('OUT', v)]) for v in values]"
    sends = f"[r.get_response_sender().send(a, flags=1) for r, a in zip(requests, {answers})]"
    code = f"""
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        values = [pb_utils.get_input_tensor_by_name(r, "IN").as_numpy() + len(requests) for r in requests]
        {body or (sends if is_decoupled else "return " + answers)}
"""
    gone = InferRequest("m", {"IN": DeviceTensor("IN", DataType.FP32, Gone())})
    plain = [request(np.full(3, number, np.float32)) for number in (1, 2)]

    policy = TransactionPolicy(decoupled=is_decoupled)
    model = await load(tmp_path, code, replace(config(), model_transaction_policy=policy))

    await model.run([gone])  # nothing is left for the model to do
    first, refused, last = await model.run([plain[0], gone, plain[1]])

    assert (error_of(refused).code, error_of(refused).message) == (Code.UNAVAILABLE, "it is gone")
    if not body:
        assert [array_of(first)[0], array_of(last)[0]] == [3, 4]
