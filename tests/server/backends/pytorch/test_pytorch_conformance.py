from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support import torch_models

from charonia.config.kinds import InstanceKind
from charonia.config.model import InstanceGroup, ModelConfig, ModelInput, ModelOutput
from charonia.core.dtypes import DataType
from charonia.core.request import InferRequest
from charonia.core.tensor import Tensor
from charonia.server.backends.api import ModelFiles
from charonia.server.backends.pytorch.backend import PyTorchBackend
from charonia.testing.backend_suite import BackendCase, BackendSuite


def config(runtime: str = "", platform: str = "", *, name_in: str = "x", name_out: str = "OUTPUT__0") -> ModelConfig:
    return ModelConfig(
        name="m",
        backend="pytorch",
        platform=platform,
        runtime=runtime,
        max_batch_size=8,
        input=(ModelInput(name_in, DataType.FP32, dims=(16,)),),
        output=(ModelOutput(name_out, DataType.FP32, (4,)),),
        instance_group=(InstanceGroup("m_0", InstanceKind.KIND_CPU, count=1),),
    )


def request(name: str) -> Callable[[int, int], InferRequest]:
    def make(seed: int, size: int) -> InferRequest:
        array = np.random.default_rng(seed).random((size, 16), np.float32)
        return InferRequest("m", {name: Tensor(name, DataType.FP32, array)})

    return make


def case(folder: Path, configured: ModelConfig) -> BackendCase:
    return BackendCase(
        make=PyTorchBackend,
        files=ModelFiles(folder, 1, folder / "1"),
        config=configured,
        request=request(configured.input[0].name),
    )


class TestTorchScript(BackendSuite):
    @pytest.fixture
    def backend_case(self, tmp_path: Path) -> BackendCase:
        torch_models.save_traced(torch_models.Perceptron(), (torch.zeros(2, 16),), tmp_path / "m")
        return case(tmp_path / "m", config())


class TestExportedProgram(BackendSuite):
    @pytest.fixture
    def backend_case(self, tmp_path: Path) -> BackendCase:
        torch_models.exported_perceptron(tmp_path / "m")
        return case(tmp_path / "m", config())


class TestModuleInPython(BackendSuite):
    @pytest.fixture
    def backend_case(self, tmp_path: Path) -> BackendCase:
        torch_models.eager_perceptron(tmp_path / "m")
        return case(tmp_path / "m", config(runtime="model.py"))


class TestAotInductorPackage(BackendSuite):
    @pytest.fixture
    def backend_case(self, aoti_perceptron: Path) -> BackendCase:
        return case(aoti_perceptron, config(platform="torch_aoti", name_in="INPUT__0"))
