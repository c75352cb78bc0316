"""Instances on GPUs: the order of things with a GPU that is pretended; `tests/gpu` has what a real one answers."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support import torch_models
from tests.support.backends import request_of, version_of

from charonia.config.kinds import InstanceKind
from charonia.config.model import InstanceGroup, ModelConfig, ModelInput, ModelOutput
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.request import DeviceRequest, InferRequest
from charonia.core.tensor import Array, DeviceTensor
from charonia.server.backends.api import Outputs
from charonia.server.backends.block_pool import MIN_BLOCK_BYTES, BlockPool
from charonia.server.backends.pytorch.devices import ComputeDevice, GpuDevice, check_gpu
from charonia.server.backends.pytorch.instance import PyTorchInstance
from charonia.server.backends.pytorch.program import RunPlan
from charonia.server.backends.pytorch.source import find_source
from charonia.server.metrics.devices import PinnedMemory

BLOCK = MIN_BLOCK_BYTES
FP32 = DataType.FP32


def plain(size: int) -> Array:
    return np.empty(size, np.uint8)


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


PERCEPTRON = ModelConfig(
    name="m",
    backend="pytorch",
    max_batch_size=8,
    input=(ModelInput("x", FP32, dims=(16,)),),
    output=(ModelOutput("y", FP32, (4,)),),
    instance_group=(InstanceGroup("m_0", InstanceKind.KIND_GPU, count=2, gpus=(0,)),),
)


def ones(size: int) -> InferRequest:
    return request_of(x=np.ones((size, 16), np.float32))


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    torch_models.save_scripted(torch_models.Perceptron(), tmp_path / "m")
    return tmp_path / "m"


class TestInstance:
    def test_a_batch_enters_its_stream_copies_computes_waits_and_copies_back(self, model_dir: Path) -> None:
        device, cuda, account = pretended()
        plan = RunPlan(cleans_cache=True)
        program = find_source(version_of(model_dir), PERCEPTRON).open(torch.device("cpu"), plan)
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
        program = find_source(version_of(model_dir), PERCEPTRON).open(torch.device("cpu"), RunPlan())
        instance = PyTorchInstance("m_0", program, PERCEPTRON, RunPlan(), device, 1)
        wrong = request_of(x=np.ones((1, 5), np.float32))

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
    program = find_source(version_of(model_dir), PERCEPTRON).open(torch.device("cpu"), RunPlan())
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
