"""Real networks in OpenVINO compared with ONNX Runtime: PP-OCRv4's and Magika's."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from charonia.config.complete import normalise
from charonia.config.model import ModelConfig
from charonia.core.dtypes import DataType
from charonia.core.request import InferRequest
from charonia.core.tensor import Array, Tensor
from charonia.server.backends.api import Backend, BackendSettings, BlockingInstance, ModelFiles, Outputs, Placement
from charonia.server.backends.onnxruntime.backend import OnnxRuntimeBackend
from charonia.server.backends.openvino.backend import OpenVinoBackend

SITE = Path(np.__file__).parents[1]
OCR = SITE / "rapidocr_onnxruntime" / "models"
MAGIKA = SITE / "magika" / "models" / "standard_v3_3" / "model.onnx"


def answer(backend: Backend, path: Path, given: Array, datatype: DataType) -> list[Array]:
    files = ModelFiles(path.parent.parent, 1, path.parent)
    start = ModelConfig(name="m", backend=backend.name, default_model_filename=path.name)

    async def run() -> list[Array]:
        completion = await backend.complete(files, start, BackendSettings())
        config = normalise(completion.config, name="m", gpu_count=0, default_instance_count=1)
        model = await backend.load(files, config, BackendSettings())
        instance = await model.create_instance(Placement("m_0", config.instance_group[0].kind, 0, 2))
        assert isinstance(instance, BlockingInstance)
        name = config.input[0].name
        [result] = instance.execute([InferRequest("m", {name: Tensor(name, datatype, given)})]).results
        assert isinstance(result, Outputs), result
        return [tensor.array for tensor in result.tensors]

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        (OCR / "ch_PP-OCRv4_det_infer.onnx", (1, 3, 96, 160)),
        (OCR / "ch_PP-OCRv4_rec_infer.onnx", (2, 3, 48, 96)),
        (OCR / "ch_ppocr_mobile_v2.0_cls_infer.onnx", (3, 3, 48, 192)),
        (MAGIKA, (4, 2048)),
    ],
    ids=["detection", "recognition", "direction", "magika"],
)
def test_a_network_computes_the_same_as_in_onnx_runtime(path: Path, shape: tuple[int, ...]) -> None:
    if not path.is_file():
        pytest.skip(f"{path.name} is not installed")
    random = np.random.default_rng(0)
    is_bytes = path == MAGIKA
    given = random.integers(0, 257, shape).astype(np.int32) if is_bytes else random.random(shape, np.float32)
    datatype = DataType.INT32 if is_bytes else DataType.FP32

    expected = answer(OnnxRuntimeBackend(), path, given, datatype)
    found = answer(OpenVinoBackend(), path, given, datatype)

    assert [array.shape for array in found] == [array.shape for array in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.astype(np.float64), other.astype(np.float64), rtol=1e-3, atol=1e-4)
