from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tests.support.backends import request_of, version_of
from tests.support.models import save_skops

from charonia.config.model import InstanceGroup, ModelConfig, ModelInput, ModelOutput, Reshape
from charonia.core.dtypes import DataType
from charonia.core.request import InferRequest
from charonia.server.backends.sklearn.backend import SklearnBackend
from charonia.testing.backend_suite import BackendCase, BackendSuite

ROWS = np.random.default_rng(0).normal(size=(50, 4))
CLASSES = np.where(ROWS[:, 0] > 0, "yes", "no")


def request(seed: int, size: int) -> InferRequest:
    return request_of(X=np.random.default_rng(seed).normal(size=(size, 4)))


def bad_request() -> InferRequest:
    return request_of(X=np.full((1, 4), np.nan))


class TestPipeline(BackendSuite):
    @pytest.fixture
    def backend_case(self, tmp_path: Path) -> BackendCase:
        files = version_of(tmp_path / "m")
        estimator = make_pipeline(StandardScaler(), LogisticRegression()).fit(ROWS, CLASSES)
        save_skops(estimator, files.version_dir / "model.skops")
        return BackendCase(
            make=SklearnBackend,
            files=files,
            config=ModelConfig(
                name="m",
                backend="sklearn",
                max_batch_size=8,
                input=(ModelInput("X", DataType.FP64, dims=(4,)),),
                output=(
                    ModelOutput("label", DataType.BYTES, (1,), Reshape()),
                    ModelOutput("predict_proba", DataType.FP32, (2,)),
                ),
                instance_group=(InstanceGroup("m_0", count=1),),
            ),
            request=request,
            bad_request=bad_request,
        )
