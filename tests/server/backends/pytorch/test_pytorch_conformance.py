from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import torch_models
from tests.support.backends import config_of, request_of, version_of

from charonia.core.dtypes import DataType
from charonia.core.request import InferRequest
from charonia.server.backends.pytorch.backend import PyTorchBackend
from charonia.testing.backend_suite import BackendCase, BackendSuite

FP32 = DataType.FP32


def case(folder: Path, name_in: str = "x", **more: Any) -> BackendCase:
    config = config_of({name_in: (FP32, (16,))}, {"OUTPUT__0": (FP32, (4,))}, backend="pytorch", **more)

    def request(seed: int, size: int) -> InferRequest:
        return request_of(**{name_in: np.random.default_rng(seed).random((size, 16), np.float32)})

    return BackendCase(PyTorchBackend, version_of(folder), config, request)


class TestTorchScript(BackendSuite):
    @pytest.fixture
    def backend_case(self, tmp_path: Path) -> BackendCase:
        torch_models.save_traced(torch_models.Perceptron(), (torch.zeros(2, 16),), tmp_path / "m")
        return case(tmp_path / "m")


class TestExportedProgram(BackendSuite):
    @pytest.fixture
    def backend_case(self, tmp_path: Path) -> BackendCase:
        torch_models.exported_perceptron(tmp_path / "m")
        return case(tmp_path / "m")


class TestModuleInPython(BackendSuite):
    @pytest.fixture
    def backend_case(self, tmp_path: Path) -> BackendCase:
        torch_models.eager_perceptron(tmp_path / "m")
        return case(tmp_path / "m", runtime="model.py")


class TestAotInductorPackage(BackendSuite):
    @pytest.fixture
    def backend_case(self, aoti_perceptron: Path) -> BackendCase:
        return case(aoti_perceptron, "INPUT__0", platform="torch_aoti")
