"""The queries of the client over HTTP. No I/O.

Source: KServe v2 protocol, HTTP/REST, and Triton's statistics, model configuration, repository and shared memory
extensions.
"""

from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import orjson

from charonia.core.dtypes import BY_WIRE
from charonia.core.errors import ServingError, internal
from charonia.core.metadata import ModelIndexEntry, ModelMetadata, ModelState, ServerMetadata, TensorMetadata
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse
from charonia.wire.answer import Answer
from charonia.wire.http_codec import HttpEncoder, HttpRequest, decode_response, model_path
from charonia.wire.json_text import dump, kind_of, parse_object
from charonia.wire.query import TRACE_LEVEL, Json, Query, SharedMemoryRegion, TraceChange, trace_texts
from charonia.wire.transport import RequestForm

T = TypeVar("T")

_BINARY = RequestForm()
_STREAM = RequestForm(streaming=True)
_REGIONS = "/v2/systemsharedmemory"


class HttpDialect:
    """Makes the queries of HTTP. The interface is `charonia.wire.query.Dialect`."""

    def __init__(self, encoder: HttpEncoder) -> None:
        self._encoder = encoder

    def live(self) -> Query[HttpRequest, bool]:
        return self._query("GET", "/v2/health/live", None, _yes)

    def ready(self) -> Query[HttpRequest, bool]:
        return self._query("GET", "/v2/health/ready", None, _yes)

    def model_ready(self, model: str, version: str) -> Query[HttpRequest, bool]:
        return self._query("GET", model_path(model, version) + "/ready", None, _yes)

    def server_metadata(self) -> Query[HttpRequest, ServerMetadata]:
        return self._query("GET", "/v2", None, _server_metadata)

    def model_metadata(self, model: str, version: str) -> Query[HttpRequest, ModelMetadata]:
        return self._query("GET", model_path(model, version), None, _model_metadata)

    def model_config(self, model: str, version: str) -> Query[HttpRequest, Json]:
        return self._query("GET", model_path(model, version) + "/config", None, _object)

    def statistics(self, model: str, version: str) -> Query[HttpRequest, list[Json]]:
        path = model_path(model, version) if model else "/v2/models"
        return self._query("GET", path + "/stats", None, _statistics)

    def index(self, ready: bool) -> Query[HttpRequest, list[ModelIndexEntry]]:
        return self._query("POST", "/v2/repository/index", {"ready": True} if ready else {}, _index)

    def load(self, model: str, config: str, files: Mapping[str, bytes]) -> Query[HttpRequest, None]:
        parameters = {f"file:{path}": b64encode(content).decode() for path, content in files.items()}
        if config:
            parameters["config"] = config
        document: Json = {"parameters": parameters} if parameters else {}
        return self._query("POST", _repository_path(model) + "/load", document, _nothing)

    def unload(self, model: str, dependents: bool) -> Query[HttpRequest, None]:
        document: Json = {"parameters": {"unload_dependents": dependents}}
        return self._query("POST", _repository_path(model) + "/unload", document, _nothing)

    def register(self, region: SharedMemoryRegion) -> Query[HttpRequest, None]:
        document: Json = {"key": region.key, "offset": region.offset, "byte_size": region.byte_size}
        return self._query("POST", f"{_region_path(region.name)}/register", document, _nothing)

    def unregister(self, name: str) -> Query[HttpRequest, None]:
        return self._query("POST", f"{_region_path(name)}/unregister", {}, _nothing)

    def regions(self, name: str) -> Query[HttpRequest, list[SharedMemoryRegion]]:
        return self._query("GET", f"{_region_path(name)}/status", None, _regions)

    def trace_settings(self, model: str, change: TraceChange) -> Query[HttpRequest, Json]:
        path = model_path(model, "") + "/trace/setting" if model else "/v2/trace/setting"
        if not change:
            return self._query("GET", path, None, _object)
        document: Json = {
            name: None if not texts else texts if name == TRACE_LEVEL else texts[0]
            for name, texts in trace_texts(change).items()
        }
        return self._query("POST", path, document, _object)

    def traffic(self, model: str, change: Mapping[str, object]) -> Query[HttpRequest, Json]:
        return self._query(
            "POST" if change else "GET", f"{model_path(model, '')}/traffic", dict(change) or None, _object
        )

    def reset_traffic(self, model: str) -> Query[HttpRequest, Json]:
        return self._query("DELETE", f"{model_path(model, '')}/traffic", None, _object)

    def infer(self, request: InferRequest) -> Query[HttpRequest, InferResponse]:
        return Query(self._encoder.infer(request, _BINARY), _response)

    def stream(self, request: InferRequest) -> Query[HttpRequest, InferResponse]:
        """Refuse: HTTP has no streams of responses.

        Raises:
            ServingError: UNSUPPORTED.
        """
        return Query(self._encoder.infer(request, _STREAM), _response)

    def _query(
        self, method: str, path: str, document: Json | None, decode: Callable[[Answer], T]
    ) -> Query[HttpRequest, T]:
        return Query(self._encoder.request(method, path, b"" if document is None else dump(document)), decode)


def _repository_path(model: str) -> str:
    return model_path(model, "").replace("/v2/models/", "/v2/repository/models/", 1)


def _region_path(name: str) -> str:
    return model_path(name, "").replace("/v2/models", _REGIONS + "/region", 1) if name else _REGIONS


def _yes(answer: Answer) -> bool:
    return True


def _nothing(answer: Answer) -> None:
    return None


def _response(answer: Answer) -> InferResponse:
    return decode_response(answer.body, answer.json_bytes)


def _object(answer: Answer) -> Json:
    try:
        return parse_object(answer.body)
    except ServingError as error:
        raise internal(f"the server's response is not a JSON object: {error.message}") from error


def _list(answer: Answer, key: str = "") -> list[Any]:
    """Return the array in an answer: the whole document, or the member of a key."""
    found = _object(answer).get(key) if key else orjson.loads(answer.body)
    if type(found) is not list or any(type(entry) is not dict for entry in found):
        raise internal(f"the server's response: expected an array of objects, got {kind_of(found)}")
    return found


def _server_metadata(answer: Answer) -> ServerMetadata:
    document: Any = _object(answer)
    return ServerMetadata(
        str(document.get("name", "")), str(document.get("version", "")), tuple(document.get("extensions") or ())
    )


def _model_metadata(answer: Answer) -> ModelMetadata:
    document: Any = _object(answer)
    return ModelMetadata(
        document["name"],
        tuple(document.get("versions") or ()),
        document.get("platform", ""),
        tuple(_tensor(entry) for entry in document.get("inputs") or ()),
        tuple(_tensor(entry) for entry in document.get("outputs") or ()),
    )


def _tensor(entry: Any) -> TensorMetadata:
    return TensorMetadata(entry["name"], BY_WIRE[entry["datatype"]], tuple(int(dim) for dim in entry["shape"]))


def _statistics(answer: Answer) -> list[Json]:
    return _list(answer, "model_stats")


def _index(answer: Answer) -> list[ModelIndexEntry]:
    entries: list[ModelIndexEntry] = []
    for entry in _list(answer):
        state = entry.get("state", "")
        known = ModelState(state) if state in ModelState.__members__ else None
        entries.append(
            ModelIndexEntry(str(entry.get("name", "")), str(entry.get("version", "")), known, entry.get("reason", ""))
        )
    return entries


def _regions(answer: Answer) -> list[SharedMemoryRegion]:
    return [
        SharedMemoryRegion(entry["name"], entry["key"], int(entry["byte_size"]), int(entry.get("offset", 0)))
        for entry in _list(answer)
    ]
