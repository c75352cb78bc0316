"""Requests of different shapes in one batch, with the stock client."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tests.support.models import write_model
from tests.support.onnx_writer import GraphWriter
from tests.support.process import ServeProcess
from tests.support.stock_clients import infer_input

from charonia.core.dtypes import DataType

DELAY = "dynamic_batching { max_queue_delay_microseconds: 200000 }\n" + (
    'parameters { key: "ADAPT_QUEUE_DELAY" value { string_value: "false" } }\n'
)
LENGTHS = (3, 1, 6, 2)


def doubling() -> bytes:
    """Return a model that doubles a flat array, and says how many elements each request has."""
    graph = GraphWriter()
    graph.input("X", DataType.FP32, ("n",))
    graph.input("COUNT", DataType.FP32, ("b",))
    graph.weight("one", DataType.INT64, np.array([1]))
    graph.node("Add", ["X", "X"], "TWICE")
    graph.node("Unsqueeze", ["COUNT", "one"], "COUNTED")
    graph.output("TWICE", DataType.FP32, ("n",))
    graph.output("COUNTED", DataType.FP32, ("b", 1))
    return graph.model()


def masked_sum() -> bytes:
    """Return a model of rectangular batches: the sum of what is real, and twice each element."""
    graph = GraphWriter()
    graph.input("X", DataType.FP32, ("b", "n"))
    graph.input("MASK", DataType.FP32, ("b", "n"))
    graph.weight("axis", DataType.INT64, np.array([1]))
    graph.node("Mul", ["X", "MASK"], "real")
    graph.node("ReduceSum", ["real", "axis"], "SUM", keepdims=1)
    graph.node("Add", ["X", "X"], "TWICE")
    graph.output("SUM", DataType.FP32, ("b", 1))
    graph.output("TWICE", DataType.FP32, ("b", "n"))
    return graph.model()


RAGGED = f"""
backend: "onnxruntime" max_batch_size: 8
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }} ]
output [ {{ name: "TWICE" data_type: TYPE_FP32 dims: [ -1 ] }}, {{ name: "COUNTED" data_type: TYPE_FP32 dims: [ 1 ] }} ]
batch_input [ {{ kind: BATCH_ELEMENT_COUNT target_name: "COUNT" data_type: TYPE_FP32 source_input: "X" }} ]
batch_output [ {{ kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "TWICE" source_input: "X" }} ]
{DELAY}"""
PADDED = f"""
backend: "onnxruntime" max_batch_size: 8
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ -1 ] }},
        {{ name: "MASK" data_type: TYPE_FP32 dims: [ -1 ] optional: true }} ]
output [ {{ name: "SUM" data_type: TYPE_FP32 dims: [ 1 ] }}, {{ name: "TWICE" data_type: TYPE_FP32 dims: [ -1 ] }} ]
parameters {{ key: "PADDING" value {{ string_value:
  '{{"inputs": {{"X": {{"value": 5, "buckets": [4, 8], "mask": "MASK"}}}}, '
  '"outputs": {{"TWICE": {{"input": "X"}}}}}}' }} }}
{DELAY}"""
PYTHON = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        together = np.array([[len(requests)]], np.float32)
        return [
            pb_utils.InferenceResponse([
                pb_utils.Tensor("TWICE", 2 * pb_utils.get_input_tensor_by_name(request, "X").as_numpy()),
                pb_utils.Tensor("TOGETHER", together),
            ])
            for request in requests
        ]
"""
PYTHON_CONFIG = f"""
backend: "python" max_batch_size: 8
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }} ]
output [ {{ name: "TWICE" data_type: TYPE_FP32 dims: [ -1 ] }},
         {{ name: "TOGETHER" data_type: TYPE_FP32 dims: [ 1 ] }} ]
{DELAY}"""
STRATEGY = """
def batch_initialize(batcher):
    return {"elements": 0}

def batch_include_request(request, batch):
    batch["elements"] += request.inputs["X"].size
    return batch["elements"] <= 4
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "ragged", doubling(), config=RAGGED)
    write_model(folder, "padded", masked_sum(), config=PADDED)
    write_model(folder, "python", PYTHON, config=PYTHON_CONFIG)
    strategy = 'parameters { key: "BATCHING_STRATEGY" value { string_value: "batching.py" } }\n'
    (write_model(folder, "limited", PYTHON, config=PYTHON_CONFIG + strategy) / "batching.py").write_text(STRATEGY)
    with ServeProcess(folder) as process:
        yield process


def infer(module: Any, address: str, model: str, array: "np.ndarray", **more: object) -> Any:
    with module.InferenceServerClient(address) as client:
        return client.infer(model, [infer_input(module, "X", array)], **more)


def together(
    module: Any, address: str, model: str, lengths: Sequence[int], **more: object
) -> list[tuple["np.ndarray", Any]]:
    """Send requests of these lengths at once; return each array with its result."""
    arrays = [np.arange(1, length + 1, dtype=np.float32)[None] for length in lengths]
    with ThreadPoolExecutor(len(arrays)) as pool:
        results = pool.map(lambda array: infer(module, address, model, array, **more), arrays)
        return list(zip(arrays, results, strict=True))


def executions(server: ServeProcess, model: str) -> int:
    return int(server.ask(f"/v2/models/{model}/stats")["model_stats"][0]["execution_count"])


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("model", ["ragged", "padded", "python"])
def test_requests_of_different_lengths_share_a_batch(server: ServeProcess, protocol: str, model: str) -> None:
    module, address = (httpclient, server.http) if protocol == "http" else (grpcclient, server.grpc)
    before = executions(server, model)

    answers = together(module, address, model, LENGTHS)

    for array, result in answers:
        np.testing.assert_array_equal(result.as_numpy("TWICE"), 2 * array)
        if model == "ragged":
            assert result.as_numpy("COUNTED").tolist() == [[array.size]]
        elif model == "padded":
            assert result.as_numpy("SUM").tolist() == [[array.sum()]]
    assert executions(server, model) - before < len(LENGTHS)


def test_a_batching_strategy_limits_what_runs_together(server: ServeProcess) -> None:
    answers = together(httpclient, server.http, "limited", (1, 1, 1, 1, 1, 1, 1, 9))

    sizes = [int(result.as_numpy("TOGETHER")[0, 0]) for _, result in answers]
    assert max(sizes) <= 4
    assert sizes[-1] == 1  # too large for any other, but not refused
    for array, result in answers:
        np.testing.assert_array_equal(result.as_numpy("TWICE"), 2 * array)
