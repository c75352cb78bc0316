"""Ensembles whose steps run in different libraries: what one step returns is what the next one reads, not a copy."""

import io
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.models import write_model
from tests.support.onnx_writer import GraphWriter

from charonia import Server
from charonia.core.dtypes import DataType
from charonia.core.request import InferRequest
from charonia.core.tensor import Array
from charonia.server.backends.api import BlockingInstance, Execution, Outputs

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("openvino")
for library in ("treelite", "xgboost", "lightgbm", "sklearn"):
    pytest.importorskip(library)
forests = pytest.importorskip("tests.support.forests")

PIXELS_CONFIG = """
backend: "image"
max_batch_size: 4
parameters { key: "resize" value { string_value: "stretch" } }
parameters { key: "size" value { string_value: "16" } }
"""

ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input { name: "IMAGE" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "scores" data_type: TYPE_FP32 dims: [ 3 ] }
ensemble_scheduling {
  step [
    { model_name: "pixels" input_map { key: "IMAGE" value: "IMAGE" } output_map { key: "PIXELS" value: "pixels" } },
    { model_name: "features" input_map { key: "pixels" value: "pixels" } output_map { key: "means" value: "means" } },
    { model_name: "forest" input_map { key: "input__0" value: "means" }
      output_map { key: "output__0" value: "scores" } }
  ]
}
"""


def features() -> bytes:
    """Return an ONNX model: the mean of each channel of an image, twice."""
    graph = GraphWriter()
    pixels = graph.input("pixels", DataType.FP32, ["batch", 3, 16, 16])
    means = graph.node("Flatten", [graph.node("GlobalAveragePool", [pixels], "pooled")], "flat", axis=1)
    graph.node("Concat", [means, means], "means", axis=1)
    graph.output("means", DataType.FP32, ["batch", forests.FEATURES])
    return graph.model()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("mixed")
    write_model(repository, "pixels", "", config=PIXELS_CONFIG)
    write_model(repository, "features", features(), config='backend: "openvino"')
    forests.of_xgboost("multi").write(repository / "forest" / "1")
    write_model(repository, "pipeline", "", config=ENSEMBLE)
    with Server(repository) as started:
        yield started


def pictures(count: int) -> NDArray[np.object_]:
    """Return PNG files of one colour each, [count, 1]."""
    files = np.empty((count, 1), object)
    for index in range(count):
        file = io.BytesIO()
        Image.new("RGB", (20, 30), (40 * index, 100, 255 - 30 * index)).save(file, "PNG")
        files[index, 0] = file.getvalue()
    return files


def test_a_picture_goes_through_image_openvino_and_fil(server: Server) -> None:
    scores = server.infer("pipeline", {"IMAGE": pictures(4)})["scores"]

    colours = np.array([(40 * i, 100, 255 - 30 * i) for i in range(4)], np.float32) / np.float32(255)
    expected = forests.of_xgboost("multi").scores(np.concatenate([colours, colours], axis=1))
    np.testing.assert_allclose(scores.astype(np.float32), expected, rtol=1e-5)


def test_the_steps_read_what_the_steps_before_them_wrote(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from charonia.server.backends.fil.backend import FilInstance
    from charonia.server.backends.image.instance import ImageInstance
    from charonia.server.backends.openvino.backend import OpenVinoInstance

    seen: list[tuple[str, list[int], list[int]]] = []

    def watch(kind: type[BlockingInstance]) -> None:
        execute = kind.execute

        def watching(self: BlockingInstance, requests: Sequence[InferRequest]) -> Execution:
            execution = execute(self, requests)
            (result,) = execution.results
            assert isinstance(result, Outputs)
            read = [_address(tensor.array) for tensor in requests[0].inputs.values()]
            seen.append((kind.__name__, read, [_address(tensor.array) for tensor in result.tensors]))
            return execution

        monkeypatch.setattr(kind, "execute", watching)

    for kind in (ImageInstance, OpenVinoInstance, FilInstance):
        watch(kind)
    server.infer("pipeline", {"IMAGE": pictures(2)})

    (first, _, pixels), (second, taken, means), (third, rows, _) = seen
    assert [first, second, third] == ["ImageInstance", "OpenVinoInstance", "FilInstance"]
    assert taken == pixels
    assert rows == means


def _address(array: Array) -> int:
    return array.ctypes.data
