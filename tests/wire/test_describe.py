from charonia.core.dtypes import DataType
from charonia.core.metadata import ModelIndexEntry, ModelMetadata, ModelState, ServerMetadata, TensorMetadata
from charonia.core.statistics import BatchStatistics, Duration, MemoryUsage, ModelStatistics, ResponseStatistics
from charonia.wire import v2_control as describe

NONE = {"count": 0, "ns": 0}


def test_a_server_is_described() -> None:
    assert describe.server_metadata(ServerMetadata("s", "1", ("a", "b"))) == {
        "name": "s",
        "version": "1",
        "extensions": ["a", "b"],
    }


def test_a_model_is_described() -> None:
    x = TensorMetadata("x", DataType.FP32, (-1, 3))
    y = TensorMetadata("y", DataType.BYTES, (1,))

    assert describe.model_metadata(ModelMetadata("m", ("1", "2"), "onnxruntime_onnx", (x,), (y,))) == {
        "name": "m",
        "versions": ["1", "2"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
        "outputs": [{"name": "y", "datatype": "BYTES", "shape": [1]}],
    }


def test_the_index_leaves_out_what_is_not_known() -> None:
    entries = [ModelIndexEntry("a", "1", ModelState.UNAVAILABLE, "unloaded"), ModelIndexEntry("b")]

    assert describe.index(entries) == [
        {"name": "a", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"},
        {"name": "b"},
    ]


def test_statistics_have_the_keys_that_clients_know() -> None:
    model = ModelStatistics("m", "1", last_inference_ms=5, inference_count=3, execution_count=2)
    model.success.add(100, 3)
    model.batches = {2: BatchStatistics(), 1: BatchStatistics(compute_infer=Duration(1, 9))}
    model.responses = {"0": ResponseStatistics(success=Duration(1, 2))}
    model.memory = [MemoryUsage("CPU", 0, 10)]

    document = describe.statistics([model])

    assert document["model_stats"] == [
        {
            "name": "m",
            "version": "1",
            "last_inference": 5,
            "inference_count": 3,
            "execution_count": 2,
            "inference_stats": {
                "success": {"count": 3, "ns": 100},
                "fail": NONE,
                "queue": NONE,
                "compute_input": NONE,
                "compute_infer": NONE,
                "compute_output": NONE,
                "cache_hit": NONE,
                "cache_miss": NONE,
            },
            "response_stats": {
                "0": {
                    "compute_infer": NONE,
                    "compute_output": NONE,
                    "success": {"count": 1, "ns": 2},
                    "fail": NONE,
                    "empty_response": NONE,
                    "cancel": NONE,
                }
            },
            "batch_stats": [
                {
                    "batch_size": 1,
                    "compute_input": NONE,
                    "compute_infer": {"count": 1, "ns": 9},
                    "compute_output": NONE,
                },
                {"batch_size": 2, "compute_input": NONE, "compute_infer": NONE, "compute_output": NONE},
            ],
            "memory_usage": [{"type": "CPU", "id": 0, "byte_size": 10}],
        }
    ]
