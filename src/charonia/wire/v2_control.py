"""The JSON of metadata, statistics, the repository index and repository requests.

An empty body of a request is equivalent to an empty object.

Source: KServe v2 model repository extension, with Triton's load and unload parameters.
"""

from base64 import b64decode
from binascii import Error as Base64Error

from charonia.core.errors import invalid
from charonia.core.metadata import ModelIndexEntry, ModelMetadata, ServerMetadata, TensorMetadata
from charonia.core.statistics import Duration, ModelStatistics, ResponseStatistics
from charonia.wire.json_text import Object, kind_of, parse_object

FILE_PREFIX = "file:"


def decode_index(body: bytes | memoryview) -> bool:
    """Return whether the request asks for ready models only.

    Raises:
        ServingError: INVALID_ARG for an invalid body.
    """
    ready = _document(body).get("ready", False)
    if type(ready) is not bool:
        raise invalid(f"Invalid value for 'ready': expected a boolean, got {kind_of(ready)}")
    return ready


def decode_load(body: bytes | memoryview) -> tuple[str | None, dict[str, bytes]]:
    """Return the configuration that replaces the model's own, and the files, by path, that replace its folder.

    Raises:
        ServingError: INVALID_ARG for an invalid body.
    """
    config: str | None = None
    files: dict[str, bytes] = {}
    for key, value in _parameters(body).items():
        if type(value) is not str:
            raise invalid(f"load parameter '{key}': expected a string, got {kind_of(value)}")
        if key == "config":
            config = value
        elif key.startswith(FILE_PREFIX):
            try:
                files[key.removeprefix(FILE_PREFIX)] = b64decode(value, validate=True)
            except (Base64Error, ValueError) as error:
                raise invalid(f"load parameter '{key}': the value is not base64: {error}") from error
        else:
            raise invalid(f"unrecognized load parameter '{key}'", hint="known are 'config' and 'file:<path>'")
    return config, files


def decode_unload(body: bytes | memoryview) -> bool:
    """Return whether to unload the models of an ensemble with it.

    Raises:
        ServingError: INVALID_ARG for an invalid body.
    """
    dependents = _parameters(body).get("unload_dependents", False)
    if type(dependents) is not bool:
        raise invalid(f"unload parameter 'unload_dependents': expected a boolean, got {kind_of(dependents)}")
    return dependents


def _parameters(body: bytes | memoryview) -> Object:
    parameters = _document(body).get("parameters", {})
    if type(parameters) is not dict:
        raise invalid(f"'parameters' must be an object, got {kind_of(parameters)}")
    return parameters


def _document(body: bytes | memoryview) -> Object:
    return parse_object(body) if len(body) else {}


Json = dict[str, object]


def server_metadata(metadata: ServerMetadata) -> Json:
    """Return the answer to `GET /v2`."""
    return {"name": metadata.name, "version": metadata.version, "extensions": list(metadata.extensions)}


def model_metadata(metadata: ModelMetadata) -> Json:
    """Return the answer to `GET /v2/models/{model}`."""
    return {
        "name": metadata.name,
        "versions": list(metadata.versions),
        "platform": metadata.platform,
        "inputs": [_tensor(t) for t in metadata.inputs],
        "outputs": [_tensor(t) for t in metadata.outputs],
    }


def index(entries: list[ModelIndexEntry]) -> list[Json]:
    """Return the answer to `POST /v2/repository/index`."""
    return [_index_entry(entry) for entry in entries]


def _index_entry(entry: ModelIndexEntry) -> Json:
    known = {"version": entry.version, "state": entry.state.value if entry.state else "", "reason": entry.reason}
    return {"name": entry.name, **{key: value for key, value in known.items() if value}}


def statistics(models: list[ModelStatistics]) -> Json:
    """Return the answer to `GET /v2/models/stats` and its variants."""
    return {"model_stats": [_model_statistics(model) for model in models]}


def _model_statistics(model: ModelStatistics) -> Json:
    return {
        "name": model.name,
        "version": model.version,
        "last_inference": model.last_inference_ms,
        "inference_count": model.inference_count,
        "execution_count": model.execution_count,
        "inference_stats": {
            "success": _duration(model.success),
            "fail": _duration(model.fail),
            "queue": _duration(model.queue),
            "compute_input": _duration(model.compute_input),
            "compute_infer": _duration(model.compute_infer),
            "compute_output": _duration(model.compute_output),
            "cache_hit": _duration(model.cache_hit),
            "cache_miss": _duration(model.cache_miss),
        },
        "response_stats": {key: _response_statistics(r) for key, r in model.responses.items()},
        "batch_stats": [
            {
                "batch_size": size,
                "compute_input": _duration(batch.compute_input),
                "compute_infer": _duration(batch.compute_infer),
                "compute_output": _duration(batch.compute_output),
            }
            for size, batch in sorted(model.batches.items())
        ],
        "memory_usage": [{"type": m.type, "id": m.id, "byte_size": m.byte_size} for m in model.memory],
    }


def _response_statistics(response: ResponseStatistics) -> Json:
    return {
        "compute_infer": _duration(response.compute_infer),
        "compute_output": _duration(response.compute_output),
        "success": _duration(response.success),
        "fail": _duration(response.fail),
        "empty_response": _duration(response.empty_response),
        "cancel": _duration(response.cancel),
    }


def _duration(duration: Duration) -> Json:
    return {"count": duration.count, "ns": duration.ns}


def _tensor(tensor: TensorMetadata) -> Json:
    found: Json = {"name": tensor.name, "datatype": tensor.datatype.wire, "shape": list(tensor.shape)}
    return {**found, "parameters": tensor.parameters} if tensor.parameters else found
