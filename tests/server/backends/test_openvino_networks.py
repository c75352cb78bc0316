"""Real networks in OpenVINO compared with ONNX Runtime: PP-OCRv4's and Magika's."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.backends import CPU, ask, complete_wholly, load, request

from charonia.config.model import ModelConfig
from charonia.core.dtypes import DataType
from charonia.core.tensor import Array
from charonia.server.backends.api import Backend, ModelFiles
from charonia.server.backends.onnxruntime.backend import OnnxRuntimeBackend
from charonia.server.backends.openvino.backend import OpenVinoBackend

SITE = Path(np.__file__).parents[1]
OCR = SITE / "rapidocr_onnxruntime" / "models"
MAGIKA = SITE / "magika" / "models" / "standard_v3_3" / "model.onnx"


def answer(backend: Backend, path: Path, given: Array, datatype: DataType) -> list[Array]:
    start = ModelConfig(name="m", backend=backend.name, default_model_filename=path.name)
    files = ModelFiles(path.parent.parent, 1, path.parent)
    config = complete_wholly(lambda: backend, files, start).config
    instance = load(lambda: backend, files, config, place=replace(CPU, threads=2))
    return [*ask(instance, request({config.input[0].name: (datatype, given)})).values()]


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
