"""Messages of the methods beside inference, against the stock client's own generated messages."""

from typing import Any

import pytest
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2

from charonia.config.model import DynamicBatching, ModelConfig, ModelInput
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.metadata import ModelIndexEntry, ModelMetadata, ModelState, ServerMetadata, TensorMetadata
from charonia.core.statistics import BatchStatistics, Duration, MemoryUsage, ModelStatistics, ResponseStatistics
from charonia.wire import grpc_messages
from charonia.wire.grpc_status import RpcError, Status


def test_a_model_is_named_with_its_version() -> None:
    for name in ("ModelReadyRequest", "ModelMetadataRequest", "ModelConfigRequest", "ModelStatisticsRequest"):
        data = getattr(service_pb2, name)(name="m", version="2").SerializeToString()
        assert grpc_messages.decode_model_reference(name, data) == ("m", "2")


def test_the_index_request_says_whether_only_ready_models_count() -> None:
    assert not grpc_messages.decode_index_request(b"")
    assert grpc_messages.decode_index_request(service_pb2.RepositoryIndexRequest(ready=True).SerializeToString())


def test_a_load_request_has_a_configuration_and_files() -> None:
    message = service_pb2.RepositoryModelLoadRequest(model_name="m")
    message.parameters["config"].string_param = "{}"
    message.parameters["file:1/a"].bytes_param = b"a"

    assert grpc_messages.decode_load_request(message.SerializeToString()) == ("m", "{}", {"1/a": b"a"})


def test_a_plain_load_request_has_neither() -> None:
    message = service_pb2.RepositoryModelLoadRequest(model_name="m")

    assert grpc_messages.decode_load_request(message.SerializeToString()) == ("m", None, None)


@pytest.mark.parametrize("unload_dependents", [True, False])
def test_an_unload_request_may_include_dependents(unload_dependents: bool) -> None:
    message = service_pb2.RepositoryModelUnloadRequest(model_name="m")
    if unload_dependents:
        message.parameters["unload_dependents"].bool_param = True

    assert grpc_messages.decode_unload_request(message.SerializeToString()) == ("m", unload_dependents)


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
        getattr(grpc_messages, f"decode_{kind.lower()}_request")(message.SerializeToString())

    assert caught.value.code is Code.INVALID_ARG
    assert fragment in caught.value.message


def test_a_parameter_without_value_is_refused() -> None:
    message = service_pb2.RepositoryModelLoadRequest(model_name="m")
    message.parameters["config"].SetInParent()

    with pytest.raises(ServingError, match="expected string_param, got no value"):
        grpc_messages.decode_load_request(message.SerializeToString())


@pytest.mark.parametrize(
    "name", ["RepositoryIndexRequest", "RepositoryModelLoadRequest", "RepositoryModelUnloadRequest"]
)
def test_a_repository_cannot_be_named(name: str) -> None:
    decode: Any = {
        "RepositoryIndexRequest": grpc_messages.decode_index_request,
        "RepositoryModelLoadRequest": grpc_messages.decode_load_request,
        "RepositoryModelUnloadRequest": grpc_messages.decode_unload_request,
    }[name]

    with pytest.raises(ServingError, match="'repository_name' specification is not supported") as caught:
        decode(getattr(service_pb2, name)(repository_name="r").SerializeToString())

    assert caught.value.code is Code.UNSUPPORTED


def test_bytes_that_are_no_message_are_an_internal_error() -> None:
    for decode in (grpc_messages.decode_index_request, grpc_messages.decode_health_check):
        with pytest.raises(RpcError, match="the bytes received are no") as caught:
            decode(b"\xff")
        assert caught.value.status is Status.INTERNAL
    grpc_messages.decode_empty("ServerLiveRequest", b"")


@pytest.mark.parametrize("value", [True, False])
def test_health_and_readiness_are_said(value: bool) -> None:
    assert service_pb2.ServerLiveResponse.FromString(grpc_messages.encode_live(value)).live is value
    assert service_pb2.ServerReadyResponse.FromString(grpc_messages.encode_server_ready(value)).ready is value
    assert service_pb2.ModelReadyResponse.FromString(grpc_messages.encode_model_ready(value)).ready is value
    health = health_pb2.HealthCheckResponse.FromString(grpc_messages.encode_health(value))
    assert health.status == (1 if value else 2)


def test_the_server_is_described() -> None:
    expected = service_pb2.ServerMetadataResponse(name="n", version="1", extensions=["a", "b"])

    assert grpc_messages.encode_server_metadata(ServerMetadata("n", "1", ("a", "b"))) == expected.SerializeToString()


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

    assert grpc_messages.encode_model_metadata(metadata) == expected.SerializeToString()


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

    assert grpc_messages.encode_index(entries) == expected.SerializeToString()


def test_statistics_have_every_field() -> None:
    entry = ModelStatistics("m", "1", last_inference_ms=5, inference_count=6, execution_count=7)
    entry.success = Duration(1, 10)
    entry.cache_miss = Duration(2, 20)
    entry.batches = {8: BatchStatistics(compute_infer=Duration(3, 30)), 1: BatchStatistics()}
    entry.memory = [MemoryUsage("GPU", 1, 1000)]
    entry.responses = {"0": ResponseStatistics(cancel=Duration(4, 40))}

    data = grpc_messages.encode_statistics([entry])

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
