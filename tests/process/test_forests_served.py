"""A server with forests, as its clients see it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http
from numpy.typing import NDArray
from tests.support import models
from tests.support.fork_server import run_command
from tests.support.onnx_writer import GraphWriter
from tests.support.process import ServeProcess
from tests.support.stock_clients import infer_input

from charonia.core.dtypes import DataType

for library in ("treelite", "xgboost", "lightgbm", "sklearn"):
    pytest.importorskip(library)
forests = pytest.importorskip("tests.support.forests")

SCALE = np.linspace(0.5, 2, forests.FEATURES, dtype=np.float32)

CLASSIFIER = """
backend: "fil"
max_batch_size: 64
input { name: "input__0" data_type: TYPE_FP32 dims: [ 6 ] }
output [
  { name: "output__0" data_type: TYPE_FP32 dims: [ 2 ] },
  { name: "treeshap_output" data_type: TYPE_FP32 dims: [ 7 ] }
]
parameters [
  { key: "model_type" value: { string_value: "lightgbm" } },
  { key: "is_classifier" value: { string_value: "true" } },
  { key: "predict_proba" value: { string_value: "true" } },
  { key: "threshold" value: { string_value: "0.5" } },
  { key: "storage_type" value: { string_value: "AUTO" } }
]
instance_group [ { kind: KIND_AUTO } ]
dynamic_batching { }
"""

ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input { name: "raw" data_type: TYPE_FP32 dims: [ 6 ] }
output { name: "scores" data_type: TYPE_FP32 dims: [ 3 ] }
ensemble_scheduling {
  step [
    { model_name: "features" input_map { key: "raw" value: "raw" } output_map { key: "scaled" value: "scaled" } },
    { model_name: "bare" input_map { key: "input__0" value: "scaled" } output_map { key: "output__0" value: "scores" } }
  ]
}
"""


def feature_step() -> bytes:
    """Return an ONNX model: each feature times a number of its own."""
    graph = GraphWriter()
    raw = graph.input("raw", DataType.FP32, ["batch", forests.FEATURES])
    graph.node("Mul", [raw, graph.weight("scale", DataType.FP32, SCALE)], "scaled")
    graph.output("scaled", DataType.FP32, ["batch", forests.FEATURES])
    return graph.model()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    repository = tmp_path_factory.mktemp("forests")
    forests.of_xgboost("multi").write(repository / "bare" / "1")
    forests.of_lightgbm("binary").write(repository / "classifier" / "1")
    (repository / "classifier" / "config.pbtxt").write_text(CLASSIFIER)
    models.write_model(repository, "features", feature_step())
    models.write_model(repository, "pipeline", "", config=ENSEMBLE)
    (repository / "pipeline" / "1").mkdir(exist_ok=True)
    with ServeProcess(repository) as running:
        yield running


def over_http(server: ServeProcess, model: str, name: str, data: NDArray[np.float32]) -> http.InferResult:
    with http.InferenceServerClient(server.http) as client:
        return client.infer(model, [infer_input(http, name, data)])


def over_grpc(server: ServeProcess, model: str, name: str, data: NDArray[np.float32]) -> grpc.InferResult:
    with grpc.InferenceServerClient(server.grpc) as client:
        return client.infer(model, [infer_input(grpc, name, data)])


def test_a_folder_with_a_forest_alone_is_served_over_both_protocols(server: ServeProcess) -> None:
    data = forests.rows(5, 1)

    one = over_http(server, "bare", "input__0", data).as_numpy("output__0")
    other = over_grpc(server, "bare", "input__0", data).as_numpy("output__0")

    np.testing.assert_allclose(one, forests.of_xgboost("multi").scores(data), rtol=1e-5)
    np.testing.assert_array_equal(one, other)


def test_a_configuration_of_triton_is_served_with_shapley_values(server: ServeProcess) -> None:
    data, forest = forests.rows(5, 2), forests.of_lightgbm("binary")
    positive = forest.scores(data)

    for call in (over_http, over_grpc):
        answer = call(server, "classifier", "input__0", data)
        np.testing.assert_allclose(answer.as_numpy("output__0"), np.hstack([1 - positive, positive]), rtol=1e-5)
        np.testing.assert_allclose(
            answer.as_numpy("treeshap_output"), forest.contributions(data)[:, 0], rtol=1e-4, atol=1e-6
        )


def test_features_of_an_onnx_model_go_to_a_forest(server: ServeProcess) -> None:
    data = forests.rows(4, 4)

    answer = over_grpc(server, "pipeline", "raw", data).as_numpy("scores")

    np.testing.assert_allclose(answer, forests.of_xgboost("multi").scores(data * SCALE), rtol=1e-4)


def test_a_file_of_a_forest_is_served_without_a_repository(tmp_path: Path) -> None:
    file = forests.of_lightgbm("regression").write(tmp_path)
    (tmp_path / "price.txt").write_bytes(file.read_bytes())

    with ServeProcess(tmp_path / "price.txt") as server:
        done = run_command("infer", "price", "-u", server.http)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("output__0 FP32[1,1]: ")
