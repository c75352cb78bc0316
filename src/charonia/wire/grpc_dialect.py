"""The queries of the client over gRPC. No I/O.

Source: KServe v2 protocol, gRPC, and Triton's extensions of it.
"""

from collections.abc import Callable, Mapping, MutableMapping, MutableSequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from charonia.core.dtypes import BY_WIRE
from charonia.core.errors import ServingError
from charonia.core.metadata import ModelIndexEntry, ModelMetadata, ModelState, ServerMetadata, TensorMetadata
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse
from charonia.schema.pool import message_class
from charonia.wire.answer import Answer
from charonia.wire.grpc_codec import GrpcEncoder, GrpcRequest, decode_response, decode_stream_response, parsed
from charonia.wire.json_text import dump, parse_object
from charonia.wire.query import TRACE_LEVEL, Json, Query, SharedMemoryRegion, TraceChange, trace_texts
from charonia.wire.transport import RequestForm

T = TypeVar("T")

_UNARY = RequestForm()
_STREAM = RequestForm(streaming=True)


class GrpcDialect:
    """Makes the queries of gRPC. The interface is `charonia.wire.query.Dialect`."""

    def __init__(self, encoder: GrpcEncoder) -> None:
        self._encoder = encoder

    def live(self) -> Query[GrpcRequest, bool]:
        return self._query("ServerLive", lambda message: bool(message.live))

    def ready(self) -> Query[GrpcRequest, bool]:
        return self._query("ServerReady", lambda message: bool(message.ready))

    def model_ready(self, model: str, version: str) -> Query[GrpcRequest, bool]:
        return self._query("ModelReady", lambda message: bool(message.ready), name=model, version=str(version))

    def server_metadata(self) -> Query[GrpcRequest, ServerMetadata]:
        return self._query(
            "ServerMetadata",
            lambda message: ServerMetadata(message.name, message.version, tuple(message.extensions)),
        )

    def model_metadata(self, model: str, version: str) -> Query[GrpcRequest, ModelMetadata]:
        return self._query("ModelMetadata", _model_metadata, name=model, version=str(version))

    def model_config(self, model: str, version: str) -> Query[GrpcRequest, Json]:
        return self._query("ModelConfig", lambda message: as_json(message.config), name=model, version=str(version))

    def statistics(self, model: str, version: str) -> Query[GrpcRequest, list[Json]]:
        return self._query(
            "ModelStatistics",
            lambda message: [as_json(entry) for entry in message.model_stats],
            name=model,
            version=str(version),
        )

    def index(self, ready: bool) -> Query[GrpcRequest, list[ModelIndexEntry]]:
        return self._query("RepositoryIndex", _index, ready=ready)

    def load(self, model: str, config: str, files: Mapping[str, bytes]) -> Query[GrpcRequest, None]:
        request = _new("RepositoryModelLoadRequest", model_name=model)
        if config:
            request.parameters["config"].string_param = config
        for path, content in files.items():
            request.parameters[f"file:{path}"].bytes_param = content
        return Query(self._encoder.call("RepositoryModelLoad", request), _nothing)

    def unload(self, model: str, dependents: bool) -> Query[GrpcRequest, None]:
        request = _new("RepositoryModelUnloadRequest", model_name=model)
        request.parameters["unload_dependents"].bool_param = dependents
        return Query(self._encoder.call("RepositoryModelUnload", request), _nothing)

    def register(self, region: SharedMemoryRegion) -> Query[GrpcRequest, None]:
        request = _new(
            "SystemSharedMemoryRegisterRequest",
            name=region.name,
            key=region.key,
            offset=region.offset,
            byte_size=region.byte_size,
        )
        return Query(self._encoder.call("SystemSharedMemoryRegister", request), _nothing)

    def unregister(self, name: str) -> Query[GrpcRequest, None]:
        request = _new("SystemSharedMemoryUnregisterRequest", name=name)
        return Query(self._encoder.call("SystemSharedMemoryUnregister", request), _nothing)

    def regions(self, name: str) -> Query[GrpcRequest, list[SharedMemoryRegion]]:
        return self._query("SystemSharedMemoryStatus", _regions, name=name)

    def trace_settings(self, model: str, change: TraceChange) -> Query[GrpcRequest, Json]:
        """The trace settings, after an optional change."""
        request = _new("TraceSettingRequest", model_name=model)
        for name, texts in trace_texts(change).items():
            request.settings[name].value.extend(texts)
            request.settings[name].SetInParent()
        return Query(
            self._encoder.call("TraceSetting", request),
            lambda answer: {
                name: list(setting.value) if name == TRACE_LEVEL else ",".join(setting.value)
                for name, setting in sorted(parsed("TraceSettingResponse", answer.body).settings.items())
            },
        )

    def traffic(self, model: str, change: Mapping[str, object]) -> Query[GrpcRequest, Json]:
        if not change:
            return self._traffic("ModelTraffic", "ModelTrafficRequest", model_name=model)
        text = dump(change).decode()
        return self._traffic("ModelTrafficChange", "ModelTrafficChangeRequest", model_name=model, change=text)

    def reset_traffic(self, model: str) -> Query[GrpcRequest, Json]:
        return self._traffic("ModelTrafficReset", "ModelTrafficRequest", model_name=model)

    def infer(self, request: InferRequest) -> Query[GrpcRequest, InferResponse]:
        return Query(self._encoder.infer(request, _UNARY), lambda answer: decode_response(answer.body))

    def stream(self, request: InferRequest) -> Query[GrpcRequest, InferResponse]:
        return Query(self._encoder.infer(request, _STREAM), _stream_response)

    def _traffic(self, method: str, message: str, **fields: object) -> Query[GrpcRequest, Json]:
        call = self._encoder.call(method, message_class(f"charonia.{message}")(**fields), "/charonia.Traffic/")

        def read(answer: Answer) -> Json:
            response: Any = message_class("charonia.ModelTrafficResponse").FromString(bytes(answer.body))
            return parse_object(response.traffic.encode())

        return Query(call, read)

    def _query(self, method: str, read: Callable[[Any], T], **fields: object) -> Query[GrpcRequest, T]:
        request = self._encoder.call(method, _new(f"{method}Request", **fields))
        return Query(request, lambda answer: read(parsed(f"{method}Response", answer.body)))


def as_json(message: Any) -> Json:
    """Return a message as the HTTP endpoint's JSON object: every field, by its own name."""
    document: Json = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if isinstance(value, MutableMapping):
            entry = field.message_type.fields_by_name["value"]
            document[field.name] = {str(key): _json_value(entry, item) for key, item in value.items()}
        elif isinstance(value, MutableSequence):
            document[field.name] = [_json_value(field, item) for item in value]
        elif not (isinstance(value, Message) or field.containing_oneof) or message.HasField(field.name):
            document[field.name] = _json_value(field, value)
    return document


def _json_value(field: Any, value: Any) -> object:
    if isinstance(value, Message):
        return as_json(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known is not None else value
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _new(message: str, /, **fields: object) -> Any:
    return message_class(f"inference.{message}")(**fields)


def _nothing(answer: Answer) -> None:
    return None


def _stream_response(answer: Answer) -> InferResponse:
    response = decode_stream_response(answer.body)
    if isinstance(response, ServingError):
        raise response
    return response


def _model_metadata(message: Any) -> ModelMetadata:
    return ModelMetadata(
        message.name,
        tuple(message.versions),
        message.platform,
        tuple(_tensor(tensor) for tensor in message.inputs),
        tuple(_tensor(tensor) for tensor in message.outputs),
    )


def _tensor(tensor: Any) -> TensorMetadata:
    return TensorMetadata(tensor.name, BY_WIRE[tensor.datatype], tuple(tensor.shape))


def _index(message: Any) -> list[ModelIndexEntry]:
    return [
        ModelIndexEntry(
            model.name,
            model.version,
            ModelState(model.state) if model.state in ModelState.__members__ else None,
            model.reason,
        )
        for model in message.models
    ]


def _regions(message: Any) -> list[SharedMemoryRegion]:
    return [
        SharedMemoryRegion(region.name, region.key, region.byte_size, region.offset)
        for region in message.regions.values()
    ]
