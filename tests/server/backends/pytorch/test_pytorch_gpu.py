"""Instances on GPUs: the order of things with a GPU that is pretended, and everything where there is one."""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support import torch_models

from charonia.config.kinds import InstanceKind
from charonia.config.model import InstanceGroup, ModelConfig, ModelInput, ModelOutput
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.request import DeviceRequest, InferRequest
from charonia.core.tensor import Array, DeviceTensor, Tensor
from charonia.server.backends.api import BackendSettings, ModelFiles, Outputs, Placement
from charonia.server.backends.block_pool import MIN_BLOCK_BYTES, BlockPool
from charonia.server.backends.pytorch.backend import PyTorchBackend, PyTorchModel
from charonia.server.backends.pytorch.devices import ComputeDevice, CpuDevice, GpuDevice, check_gpu
from charonia.server.backends.pytorch.instance import PyTorchInstance
from charonia.server.backends.pytorch.program import RunPlan
from charonia.server.backends.pytorch.source import find_source
from charonia.server.metrics.devices import PinnedMemory
from charonia.testing import backend_suite
from charonia.testing.backend_suite import BackendCase, BackendSuite

BLOCK = MIN_BLOCK_BYTES
FP32 = DataType.FP32


def plain(size: int) -> Array:
    return np.empty(size, np.uint8)


class TestBlockPool:
    def test_blocks_are_powers_of_two_and_used_again(self) -> None:
        account = PinnedMemory(1 << 20)
        made: list[int] = []

        def allocate(size: int) -> Array:
            made.append(size)
            return plain(size)

        pool = BlockPool(account, allocate)
        first = pool.take(BLOCK + 1)
        assert first is not None
        pool.give_back(first)
        again = pool.take(2 * BLOCK)

        assert again is first
        assert made == [2 * BLOCK]
        assert account.used_bytes == 2 * BLOCK

    def test_without_room_there_is_none_and_nobody_waits(self) -> None:
        account = PinnedMemory(2 * BLOCK)
        pool = BlockPool(account, plain)
        held = [pool.take(1), pool.take(1)]

        assert pool.take(1) is None
        assert all(held)
        assert account.used_bytes == 2 * BLOCK

    def test_free_blocks_of_other_sizes_give_way(self) -> None:
        pool = BlockPool(PinnedMemory(2 * BLOCK), plain)
        for block in [pool.take(1), pool.take(1)]:
            assert block is not None
            pool.give_back(block)

        large = pool.take(2 * BLOCK)

        assert large is not None
        assert large.size == 2 * BLOCK

    def test_memory_that_the_system_does_not_pin_is_no_block_and_counts_nothing(self) -> None:
        account = PinnedMemory(1 << 20)

        def refuse(size: int) -> Array:
            raise RuntimeError("CUDA error: out of memory")

        assert BlockPool(account, refuse).take(1) is None
        assert account.used_bytes == 0

    def test_a_limit_of_zero_pins_nothing(self) -> None:
        assert BlockPool(PinnedMemory(0), plain).take(1) is None


class FakeStream:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def synchronize(self) -> None:
        self._log.append("synchronize")


class FakeCuda:
    """What is used of `torch.cuda`, over tensors of the CPU."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802 - as PyTorch has it
        return FakeStream(self.log)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.log.append("enter")
        yield
        self.log.append("leave")

    def empty_cache(self) -> None:
        self.log.append("empty_cache")


def pretended(limit: int = 1 << 20) -> tuple[GpuDevice, FakeCuda, PinnedMemory]:
    cuda, account = FakeCuda(), PinnedMemory(limit)
    return GpuDevice(torch.device("cpu"), BlockPool(account, plain), cuda), cuda, account


class TestCopies:
    def test_inputs_are_gathered_in_pinned_memory_that_is_free_when_the_batch_has_run(self) -> None:
        device, cuda, account = pretended()
        parts: list[Array] = [np.ones((1, 3), np.float32), np.full((2, 3), 2, np.float32)]

        tensor = device.put(parts).clone()
        used = account.used_bytes
        device.wait()

        assert tensor.tolist() == [[1, 1, 1], [2, 2, 2], [2, 2, 2]]
        assert (used, account.used_bytes) == (BLOCK, 0)
        assert cuda.log == ["synchronize"]

    def test_an_output_stays_in_pinned_memory_as_long_as_somebody_reads_it(self) -> None:
        device, cuda, account = pretended()

        one, other = device.take([torch.arange(6.0).reshape(2, 3), torch.tensor([True])])
        view = one[1:]
        del one
        gc.collect()
        assert account.used_bytes == 2 * BLOCK
        assert view.tolist() == [[3, 4, 5]]
        assert other.tolist() == [True]

        del view, other
        gc.collect()
        assert account.used_bytes == 0
        assert cuda.log == ["synchronize"], "one wait for all outputs"

    def test_without_room_in_pinned_memory_copies_are_made_all_the_same(self) -> None:
        device, _, account = pretended(0)

        tensor = device.put([np.ones((1, 3), np.float32)])
        [array] = device.take([tensor * 2])

        assert array.tolist() == [[2, 2, 2]]
        assert account.used_bytes == 0

    def test_empty_tensors_pass(self) -> None:
        device, _, account = pretended()

        tensor = device.put([np.ones((0, 3), np.float32)])
        [array] = device.take([tensor])

        assert array.shape == (0, 3)
        assert account.used_bytes == 0

    @pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.bool, torch.uint16])
    def test_every_datatype_comes_back(self, dtype: torch.dtype) -> None:
        device, _, _ = pretended()
        given = torch.tensor([[0, 1]]).to(dtype)

        [array] = device.take([device.put([given.numpy()])])

        np.testing.assert_array_equal(array, given.numpy())


PERCEPTRON = ModelConfig(
    name="m",
    backend="pytorch",
    max_batch_size=8,
    input=(ModelInput("x", FP32, dims=(16,)),),
    output=(ModelOutput("y", FP32, (4,)),),
    instance_group=(InstanceGroup("m_0", InstanceKind.KIND_GPU, count=2, gpus=(0,)),),
)


def files_of(folder: Path) -> ModelFiles:
    return ModelFiles(folder, 1, folder / "1")


def ones(size: int) -> InferRequest:
    return InferRequest("m", {"x": Tensor("x", FP32, np.ones((size, 16), np.float32))})


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    torch_models.save_scripted(torch_models.Perceptron(), tmp_path / "m")
    return tmp_path / "m"


class TestInstance:
    def test_a_batch_enters_its_stream_copies_computes_waits_and_copies_back(self, model_dir: Path) -> None:
        device, cuda, account = pretended()
        plan = RunPlan(cleans_cache=True)
        program = find_source(files_of(model_dir), PERCEPTRON).open(torch.device("cpu"), plan)
        instance = PyTorchInstance("m_0", program, PERCEPTRON, plan, device, 1)

        execution = instance.execute([ones(1), ones(2)])

        assert cuda.log == ["enter", "synchronize", "synchronize", "empty_cache", "leave"]
        shapes = [result.tensors[0].shape for result in execution.results if isinstance(result, Outputs)]
        assert shapes == [(1, 4), (2, 4)]
        del execution
        gc.collect()
        assert account.used_bytes == 0

    def test_a_batch_that_fails_gives_its_memory_back(self, model_dir: Path) -> None:
        device, cuda, account = pretended()
        program = find_source(files_of(model_dir), PERCEPTRON).open(torch.device("cpu"), RunPlan())
        instance = PyTorchInstance("m_0", program, PERCEPTRON, RunPlan(), device, 1)
        wrong = InferRequest("m", {"x": Tensor("x", FP32, np.ones((1, 5), np.float32))})

        with pytest.raises(ServingError):
            instance.execute([wrong])

        assert account.used_bytes == 0
        assert cuda.log == ["enter", "synchronize"]


class Content:
    """A tensor that is said to lie on a GPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.native = tensor
        self.copies = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.native.shape)

    def to_host(self) -> Array:
        self.copies += 1
        return self.native.numpy()


def instance_on(model_dir: Path, device: ComputeDevice) -> PyTorchInstance:
    program = find_source(files_of(model_dir), PERCEPTRON).open(torch.device("cpu"), RunPlan())
    return PyTorchInstance("m_0", program, PERCEPTRON, RunPlan(), device, 1)


class TestExchange:
    def test_inputs_that_lie_on_a_gpu_are_joined_there(self, model_dir: Path) -> None:
        device, _, _ = pretended()
        contents = [Content(torch.ones(size, 16)) for size in (1, 2)]
        requests = [InferRequest("m", {"x": DeviceTensor("x", FP32, content)}) for content in contents]

        execution = instance_on(model_dir, device).execute(requests)

        assert [content.copies for content in contents] == [0, 0]
        [plain_result] = instance_on(model_dir, device).execute([ones(2)]).results
        assert isinstance(plain_result, Outputs)
        result = execution.results[1]
        assert isinstance(result, Outputs)
        np.testing.assert_array_equal(result.tensors[0].array, plain_result.tensors[0].array)

    def test_an_instance_on_the_cpu_gets_a_copy(self, model_dir: Path) -> None:
        content = Content(torch.ones(1, 16))

        [result] = (
            instance_on(model_dir, CpuDevice())
            .execute([InferRequest("m", {"x": DeviceTensor("x", FP32, content)})])
            .results
        )

        assert isinstance(result, Outputs)
        assert content.copies == 1

    def test_outputs_stay_on_the_gpu_for_a_model_that_asks_for_them_there(self, model_dir: Path) -> None:
        device, _, _ = pretended()
        asked = [DeviceRequest("m", request.inputs) for request in (ones(1), ones(2))]
        instance = instance_on(model_dir, device)

        _, second = instance.execute(asked).results
        [expected] = instance.execute([ones(2)]).results

        assert isinstance(second, Outputs)
        assert isinstance(expected, Outputs)
        [tensor] = second.tensors
        assert isinstance(tensor, DeviceTensor)
        assert isinstance(tensor.content.native, torch.Tensor)
        assert tensor.shape == (2, 4)
        np.testing.assert_array_equal(tensor.array, expected.tensors[0].array)

    def test_a_batch_that_others_share_is_answered_in_the_memory_of_the_cpu(self, model_dir: Path) -> None:
        device, _, _ = pretended()

        results = instance_on(model_dir, device).execute([DeviceRequest("m", ones(1).inputs), ones(1)]).results

        kinds = [type(result.tensors[0]) for result in results if isinstance(result, Outputs)]
        assert kinds == [Tensor, Tensor]


class FakeTorchCuda:
    def __init__(self, is_available: bool, count: int) -> None:
        self._is_available = is_available
        self._count = count

    def is_available(self) -> bool:
        return self._is_available

    def device_count(self) -> int:
        return self._count


@pytest.mark.parametrize(
    ("cuda", "api", "reason"),
    [
        (None, FakeTorchCuda(False, 0), "is a build for the CPU"),
        ("13.0", FakeTorchCuda(False, 0), "CUDA 13.0 of the installed PyTorch does not start"),
        ("13.0", FakeTorchCuda(True, 1), "PyTorch sees 1 GPU"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, api: FakeTorchCuda, reason: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)

    with pytest.raises(ServingError, match=reason) as caught:
        check_gpu("m_0", 1, api)

    assert caught.value.code is Code.UNSUPPORTED


def test_a_gpu_that_is_there_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    check_gpu("m_0", 0, FakeTorchCuda(True, 1))


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that PyTorch can use")
GPU = Placement("lane_0", InstanceKind.KIND_GPU, 0)


class _OnGpu(BackendSuite):
    @pytest.fixture(autouse=True)
    def _placed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backend_suite, "PLACEMENT", GPU)
        monkeypatch.setattr(backend_suite, "TOLERANCE", 1e-3)


def case(folder: Path) -> BackendCase:
    def request(seed: int, size: int) -> InferRequest:
        array = np.random.default_rng(seed).random((size, 16), np.float32)
        return InferRequest("m", {"x": Tensor("x", FP32, array)})

    return BackendCase(make=PyTorchBackend, files=files_of(folder), config=PERCEPTRON, request=request)


@needs_gpu
class TestTorchScriptOnAGpu(_OnGpu):
    @pytest.fixture
    def backend_case(self, model_dir: Path) -> BackendCase:
        return case(model_dir)


@needs_gpu
class TestExportedProgramOnAGpu(_OnGpu):
    @pytest.fixture
    def backend_case(self, tmp_path: Path) -> BackendCase:
        torch_models.exported_perceptron(tmp_path / "m")
        return case(tmp_path / "m")


async def on_gpu(folder: Path, config: ModelConfig, count: int) -> tuple[PyTorchModel, list[PyTorchInstance]]:
    model = await PyTorchBackend().load(files_of(folder), config, BackendSettings())
    return model, [await model.create_instance(GPU) for _ in range(count)]


@needs_gpu
class TestOnAGpu:
    @pytest.mark.parametrize(("shares", "copies"), [("false", 2), ("true", 1)])
    def test_weights_are_there_as_often_as_the_configuration_says(
        self, model_dir: Path, shares: str, copies: int
    ) -> None:
        config = replace(PERCEPTRON, parameters={"ENABLE_WEIGHT_SHARING": shares})

        model, instances = asyncio.run(on_gpu(model_dir, config, 2))

        assert [usage.type for usage in model.memory()] == ["GPU"] * copies
        for instance in instances:
            [result] = instance.execute([ones(2)]).results
            assert isinstance(result, Outputs)

    def test_out_of_memory_fails_the_batch_and_the_next_one_is_answered(self, tmp_path: Path) -> None:
        (torch_models.folder_of(tmp_path / "m") / "model.py").write_text(
            "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n"
            "        return torch.zeros(int(x.sum()), 1 << 30, device=x.device).sum(1, keepdim=True) + x\n",
            encoding="utf-8",
        )
        config = ModelConfig(
            name="m",
            runtime="model.py",
            input=(ModelInput("x", FP32, dims=(1, 1)),),
            output=(ModelOutput("y", FP32, (-1, 1)),),
        )
        _, [instance] = asyncio.run(on_gpu(tmp_path / "m", config, 1))

        def ask(size: float) -> InferRequest:
            return InferRequest("m", {"x": Tensor("x", FP32, np.full((1, 1), size, np.float32))})

        with pytest.raises(ServingError, match="out of memory") as caught:
            instance.execute([ask(1 << 20)])
        [result] = instance.execute([ask(1)]).results

        assert caught.value.code is Code.UNAVAILABLE
        assert isinstance(result, Outputs)

    def test_answers_of_a_gpu_are_those_of_the_cpu(self, model_dir: Path) -> None:
        _, [instance] = asyncio.run(on_gpu(model_dir, PERCEPTRON, 1))
        with torch.inference_mode():
            expected = torch_models.Perceptron()(torch.ones(3, 16)).numpy()

        [result] = instance.execute([ones(3)]).results

        assert isinstance(result, Outputs)
        np.testing.assert_allclose(result.tensors[0].array.astype(np.float64), expected, atol=1e-3)
