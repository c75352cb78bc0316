"""Requests and responses of all methods other than inference, as gRPC messages.

Source: KServe v2 protocol, gRPC, and Triton's extensions of it, such as system and CUDA shared memory.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from charonia.config.convert import to_message
from charonia.config.model import ModelConfig
from charonia.core.errors import invalid, unsupported
from charonia.core.metadata import ModelIndexEntry, ModelMetadata, ServerMetadata, TensorMetadata
from charonia.core.statistics import BatchStatistics, Duration, ModelStatistics, ResponseStatistics
from charonia.schema.pool import message_class
from charonia.wire.grpc_framing import Buffer
from charonia.wire.grpc_status import RpcError, Status
from charonia.wire.json_text import Object, dump, parse_object
from charonia.wire.shared_memory import CudaRegion, SystemRegion


def decode_traffic_request(data: Buffer) -> str:
    """Return the model of a ModelTrafficRequest.

    Raises:
        RpcError: INTERNAL when the bytes are not such a message.
    """
    model: str = parsed("charonia.ModelTrafficRequest", data).model_name
    return model


def decode_traffic_change(data: Buffer) -> tuple[str, Object]:
    """Return the model and the change of a ModelTrafficChangeRequest.

    Raises:
        RpcError: INTERNAL when the bytes are not such a message.
        ServingError: INVALID_ARG when the change is not a JSON object.
    """
    request = parsed("charonia.ModelTrafficChangeRequest", data)
    return request.model_name, parse_object(request.change.encode())


def encode_traffic(document: Mapping[str, object]) -> bytes:
    return serialized(new("charonia.ModelTrafficResponse", traffic=dump(document).decode()))


def decode_region_name(message: str, data: Buffer) -> str:
    """Return the name in a request such as `SystemSharedMemoryStatusRequest`, which is named in `message`.

    Raises:
        RpcError: INTERNAL when the bytes are not such a message.
    """
    name: str = _parsed(message, data).name
    return name


def decode_system_register(data: Buffer) -> SystemRegion:
    """Return the region in a SystemSharedMemoryRegisterRequest. Raises as `decode_region_name`."""
    request = _parsed("SystemSharedMemoryRegisterRequest", data)
    return SystemRegion(request.name, request.key, request.offset, request.byte_size)


def decode_cuda_register(data: Buffer) -> CudaRegion:
    """Return the region in a CudaSharedMemoryRegisterRequest. Raises as `decode_region_name`."""
    request = _parsed("CudaSharedMemoryRegisterRequest", data)
    return CudaRegion(request.name, request.raw_handle, request.device_id, request.byte_size)


def encode_system_status(regions: Iterable[SystemRegion]) -> bytes:
    """Return a SystemSharedMemoryStatusResponse."""
    message: Any = message_class("inference.SystemSharedMemoryStatusResponse")()
    for region in regions:
        entry = message.regions[region.name]
        entry.name, entry.key, entry.offset, entry.byte_size = region
    data: bytes = message.SerializeToString()
    return data


def encode_cuda_status(regions: Iterable[CudaRegion]) -> bytes:
    """Return a CudaSharedMemoryStatusResponse."""
    message: Any = message_class("inference.CudaSharedMemoryStatusResponse")()
    for region in regions:
        entry = message.regions[region.name]
        entry.name, entry.device_id, entry.byte_size = region.name, region.device_id, region.byte_size
    data: bytes = message.SerializeToString()
    return data


def _parsed(name: str, data: Buffer) -> Any:
    try:
        return message_class(f"inference.{name}").FromString(data)  # type: ignore[arg-type]  # any buffer
    except DecodeError as error:
        raise RpcError(Status.INTERNAL, f"the bytes received are not a {name}") from error


FILE_PREFIX = "file:"
"""Load parameters with this prefix hold a file; the path follows."""

_REQUEST_DURATIONS = (
    "success", "fail", "queue", "compute_input", "compute_infer", "compute_output",
    "cache_hit", "cache_miss",
)  # fmt: skip
_BATCH_DURATIONS = ("compute_input", "compute_infer", "compute_output")
_RESPONSE_DURATIONS = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")
_SERVING = 1
_NOT_SERVING = 2


def parsed(name: str, data: Buffer) -> Any:
    """Parse the message of this full name.

    Raises:
        RpcError: INTERNAL when the bytes are not such a message.
    """
    try:
        return message_class(name).FromString(data)  # type: ignore[arg-type]  # the parser takes any buffer
    except DecodeError as error:
        raise RpcError(Status.INTERNAL, f"the bytes received are not a {name}") from error


def new(message: str, /, **fields: object) -> Any:
    return message_class(message)(**fields)


def serialized(message: Any) -> bytes:
    """Return the bytes of a message."""
    data: bytes = message.SerializeToString()
    return data


def decode_model_reference(message: str, data: Buffer) -> tuple[str, str]:
    """Return name and version in a request such as `ModelReadyRequest`, which is named in `message`.

    Raises:
        RpcError: INTERNAL when the bytes are not such a message.
    """
    request = parsed(f"inference.{message}", data)
    return request.name, request.version


def decode_empty(message: str, data: Buffer) -> None:
    """Check a request without fields, such as `ServerLiveRequest`. Raises as `decode_model_reference`."""
    parsed(f"inference.{message}", data)


def decode_index_request(data: Buffer) -> bool:
    """Return whether the request asks for ready models only.

    Raises:
        RpcError: INTERNAL when the bytes are not such a message.
        ServingError: UNSUPPORTED if it names a repository.
    """
    request = parsed("inference.RepositoryIndexRequest", data)
    _refuse_repository(request.repository_name)
    ready: bool = request.ready
    return ready


def decode_load_request(data: Buffer) -> tuple[str, str | None, Mapping[str, bytes] | None]:
    """Return model name, configuration as JSON text or None, and files by path or None.

    Raises:
        RpcError: INTERNAL when the bytes are not such a message.
        ServingError: INVALID_ARG for an unknown parameter or an invalid value, UNSUPPORTED if it names a repository.
    """
    request = parsed("inference.RepositoryModelLoadRequest", data)
    _refuse_repository(request.repository_name)
    config: str | None = None
    files: dict[str, bytes] = {}
    for key, value in request.parameters.items():
        choice = value.WhichOneof("parameter_choice")
        if key == "config":
            _expect(key, "string_param", choice)
            config = value.string_param
        elif key.startswith(FILE_PREFIX):
            _expect(key, "bytes_param", choice)
            files[key.removeprefix(FILE_PREFIX)] = value.bytes_param
        else:
            raise invalid(f"unrecognized load parameter '{key}'.", hint="'config' and 'file:<path>' are accepted")
    return request.model_name, config, files or None


def decode_unload_request(data: Buffer) -> tuple[str, bool]:
    """Return model name and whether to unload its dependents too. Raises as `decode_load_request`."""
    request = parsed("inference.RepositoryModelUnloadRequest", data)
    _refuse_repository(request.repository_name)
    unload_dependents = False
    for key, value in request.parameters.items():
        if key != "unload_dependents":
            raise invalid(f"unrecognized unload parameter '{key}'.", hint="'unload_dependents' is accepted")
        _expect(key, "bool_param", value.WhichOneof("parameter_choice"))
        unload_dependents = value.bool_param
    return request.model_name, unload_dependents


def decode_health_check(data: Buffer) -> None:
    """Check a `HealthCheckRequest`: every service name gets the same response. Raises as `decode_model_reference`."""
    parsed("grpc.health.v1.HealthCheckRequest", data)


def _refuse_repository(repository_name: str) -> None:
    if repository_name:
        raise unsupported("'repository_name' specification is not supported", hint="leave it empty")


def _expect(key: str, expected: str, choice: str | None) -> None:
    if choice != expected:
        raise invalid(f"parameter '{key}': expected {expected}, got {choice or 'no value'}")


def encode_health(is_serving: bool) -> bytes:
    return serialized(new("grpc.health.v1.HealthCheckResponse", status=_SERVING if is_serving else _NOT_SERVING))


def encode_live(live: bool) -> bytes:
    return serialized(new("inference.ServerLiveResponse", live=live))


def encode_server_ready(ready: bool) -> bytes:
    return serialized(new("inference.ServerReadyResponse", ready=ready))


def encode_model_ready(ready: bool) -> bytes:
    return serialized(new("inference.ModelReadyResponse", ready=ready))


def encode_server_metadata(metadata: ServerMetadata) -> bytes:
    """Return a `ServerMetadataResponse`."""
    message = new("inference.ServerMetadataResponse", name=metadata.name, version=metadata.version)
    message.extensions.extend(metadata.extensions)
    return serialized(message)


def encode_model_metadata(metadata: ModelMetadata) -> bytes:
    """Return a `ModelMetadataResponse`."""
    message = new("inference.ModelMetadataResponse", name=metadata.name, platform=metadata.platform)
    message.versions.extend(metadata.versions)
    for field, tensors in ((message.inputs, metadata.inputs), (message.outputs, metadata.outputs)):
        _add_tensors(field, tensors)
    return serialized(message)


def _add_tensors(field: Any, tensors: Sequence[TensorMetadata]) -> None:
    for tensor in tensors:
        field.add(name=tensor.name, datatype=tensor.datatype.wire, shape=tensor.shape)


def encode_model_config(config: ModelConfig) -> bytes:
    """Return a `ModelConfigResponse`."""
    message = new("inference.ModelConfigResponse")
    message.config.CopyFrom(to_message(config))
    return serialized(message)


def encode_index(entries: Sequence[ModelIndexEntry]) -> bytes:
    """Return a `RepositoryIndexResponse`."""
    message = new("inference.RepositoryIndexResponse")
    for entry in entries:
        state = entry.state.value if entry.state is not None else ""
        message.models.add(name=entry.name, version=entry.version, state=state, reason=entry.reason)
    return serialized(message)


def encode_statistics(entries: Sequence[ModelStatistics]) -> bytes:
    """Return a `ModelStatisticsResponse`."""
    message = new("inference.ModelStatisticsResponse")
    for entry in entries:
        _fill_statistics(message.model_stats.add(), entry)
    return serialized(message)


def _fill_statistics(message: Any, entry: ModelStatistics) -> None:
    message.name = entry.name
    message.version = entry.version
    message.last_inference = entry.last_inference_ms
    message.inference_count = entry.inference_count
    message.execution_count = entry.execution_count
    _fill_durations(message.inference_stats, entry, _REQUEST_DURATIONS)
    for batch_size, batch in sorted(entry.batches.items()):
        item = message.batch_stats.add(batch_size=batch_size)
        _fill_durations(item, batch, _BATCH_DURATIONS)
    for usage in entry.memory:
        message.memory_usage.add(type=usage.type, id=usage.id, byte_size=usage.byte_size)
    for index, response in entry.responses.items():
        _fill_durations(message.response_stats[index], response, _RESPONSE_DURATIONS)


def _fill_durations(
    message: Any, source: ModelStatistics | BatchStatistics | ResponseStatistics, names: tuple[str, ...]
) -> None:
    for name in names:
        duration: Duration = getattr(source, name)
        field = getattr(message, name)
        field.SetInParent()
        field.count = duration.count
        field.ns = duration.ns
