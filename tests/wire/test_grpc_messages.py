"""Messages of the methods beside inference, against the stock client's own generated messages."""

from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from charonia.config.model import DynamicBatching, ModelConfig, ModelInput
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.metadata import ModelIndexEntry, ModelMetadata, ModelState, ServerMetadata, TensorMetadata
from charonia.core.statistics import BatchStatistics, Duration, MemoryUsage, ModelStatistics, ResponseStatistics
from charonia.wire import grpc_messages, v2_control
from charonia.wire.grpc_messages import encoded
from charonia.wire.grpc_status import RpcError, Status

PARAMETERS: dict[str, Any] = {"Load": grpc_messages.load_parameters, "Unload": grpc_messages.unloads_dependents}


@pytest.mark.parametrize(("config", "files"), [("{}", {"1/a": b"a"}), (None, None)])
def test_a_load_request_may_have_a_configuration_and_files(config: str | None, files: dict[str, bytes] | None) -> None:
    message = service_pb2.RepositoryModelLoadRequest(model_name="m")
    if config is not None:
        message.parameters["config"].string_param = config
    for path, content in (files or {}).items():
        message.parameters[f"file:{path}"].bytes_param = content

    assert grpc_messages.load_parameters(message) == (config, files)


@pytest.mark.parametrize("unload_dependents", [True, False])
def test_an_unload_request_may_include_dependents(unload_dependents: bool) -> None:
    message = service_pb2.RepositoryModelUnloadRequest(model_name="m")
    if unload_dependents:
        message.parameters["unload_dependents"].bool_param = True

    assert grpc_messages.unloads_dependents(message) is unload_dependents


@pytest.mark.parametrize(
    ("kind", "key", "field", "value", "fragment"),
    [
        ("Load", "other", "string_param", "x", "unrecognized load parameter 'other'."),
        ("Load", "config", "bytes_param", b"{}", "'config': expected string_param, got bytes_param"),
        ("Load", "file:a", "string_param", "x", "'file:a': expected bytes_param, got string_param"),
        ("Unload", "other", "bool_param", True, "unrecognized unload parameter 'other'."),
        ("Unload", "unload_dependents", "int64_param", 1, "expected bool_param, got int64_param"),
    ],
)
def test_another_parameter_is_refused(kind: str, key: str, field: str, value: object, fragment: str) -> None:
    message = getattr(service_pb2, f"RepositoryModel{kind}Request")(model_name="m")
    setattr(message.parameters[key], field, value)

    with pytest.raises(ServingError) as caught:
        PARAMETERS[kind](message)

    assert caught.value.code is Code.INVALID_ARG
    assert fragment in caught.value.message


def test_a_parameter_without_value_is_refused() -> None:
    message = service_pb2.RepositoryModelLoadRequest(model_name="m")
    message.parameters["config"].SetInParent()

    with pytest.raises(ServingError, match="expected string_param, got no value"):
        grpc_messages.load_parameters(message)


def test_a_repository_cannot_be_named() -> None:
    for check in (*PARAMETERS.values(), grpc_messages.check_repository):
        with pytest.raises(ServingError, match="'repository_name' specification is not supported") as caught:
            check(service_pb2.RepositoryModelLoadRequest(repository_name="r"))
        assert caught.value.code is Code.UNSUPPORTED


def test_bytes_that_are_no_message_are_an_internal_error() -> None:
    with pytest.raises(RpcError, match=r"the bytes received are not a inference\.RepositoryIndexRequest") as caught:
        grpc_messages.parsed("inference.RepositoryIndexRequest", b"\xff")
    assert caught.value.status is Status.INTERNAL


def test_the_server_is_described() -> None:
    expected = service_pb2.ServerMetadataResponse(name="n", version="1", extensions=["a", "b"])

    document = v2_control.server_metadata(ServerMetadata("n", "1", ("a", "b")))
    assert encoded("inference.ServerMetadataResponse", document) == expected.SerializeToString()


def test_a_model_is_described() -> None:
    metadata = ModelMetadata(
        "m",
        ("1", "2"),
        "onnxruntime_onnx",
        (TensorMetadata("x", DataType.FP32, (-1, 16)),),
        (TensorMetadata("y", DataType.BYTES, ()),),
    )
    expected = service_pb2.ModelMetadataResponse(name="m", versions=["1", "2"], platform="onnxruntime_onnx")
    expected.inputs.add(name="x", datatype="FP32", shape=[-1, 16])
    expected.outputs.add(name="y", datatype="BYTES")

    document = v2_control.model_metadata(metadata)
    assert encoded("inference.ModelMetadataResponse", document) == expected.SerializeToString()


def test_a_configuration_is_the_message_of_the_protocol() -> None:
    config = ModelConfig(
        name="m",
        max_batch_size=8,
        input=(ModelInput("x", DataType.FP32, dims=(3, -1)),),
        dynamic_batching=DynamicBatching(preferred_batch_size=(4, 8)),
    )

    message = service_pb2.ModelConfigResponse.FromString(grpc_messages.encode_model_config(config)).config

    assert (message.name, message.max_batch_size, message.input[0].data_type) == ("m", 8, 11)
    assert list(message.input[0].dims) == [3, -1]
    assert list(message.dynamic_batching.preferred_batch_size) == [4, 8]


def test_the_index_lists_models_with_their_state() -> None:
    entries = [ModelIndexEntry("m", "1", ModelState.UNAVAILABLE, "unloaded"), ModelIndexEntry("n")]
    expected = service_pb2.RepositoryIndexResponse()
    expected.models.add(name="m", version="1", state="UNAVAILABLE", reason="unloaded")
    expected.models.add(name="n")

    document = {"models": v2_control.index(entries)}
    assert encoded("inference.RepositoryIndexResponse", document) == expected.SerializeToString()


def test_statistics_have_every_field() -> None:
    entry = ModelStatistics("m", "1", last_inference_ms=5, inference_count=6, execution_count=7)
    entry.success = Duration(1, 10)
    entry.cache_miss = Duration(2, 20)
    entry.batches = {8: BatchStatistics(compute_infer=Duration(3, 30)), 1: BatchStatistics()}
    entry.memory = [MemoryUsage("GPU", 1, 1000)]
    entry.responses = {"0": ResponseStatistics(cancel=Duration(4, 40))}

    data = encoded("inference.ModelStatisticsResponse", v2_control.statistics([entry]))

    (stats,) = service_pb2.ModelStatisticsResponse.FromString(data).model_stats
    assert (stats.name, stats.version, stats.last_inference) == ("m", "1", 5)
    assert (stats.inference_count, stats.execution_count) == (6, 7)
    assert (stats.inference_stats.success.count, stats.inference_stats.success.ns) == (1, 10)
    assert (stats.inference_stats.cache_miss.count, stats.inference_stats.cache_miss.ns) == (2, 20)
    assert stats.inference_stats.HasField("queue")
    assert [batch.batch_size for batch in stats.batch_stats] == [1, 8]
    assert stats.batch_stats[1].compute_infer.ns == 30
    assert (stats.memory_usage[0].type, stats.memory_usage[0].id, stats.memory_usage[0].byte_size) == ("GPU", 1, 1000)
    assert stats.response_stats["0"].cancel.count == 4
