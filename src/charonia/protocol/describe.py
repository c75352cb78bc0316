"""The JSON of metadata, statistics and the repository index."""

from charonia.core.metadata import ModelIndexEntry, ModelMetadata, ServerMetadata, TensorMetadata
from charonia.stats.model import Duration, ModelStatistics, ResponseStatistics

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
    return {"name": tensor.name, "datatype": tensor.datatype.wire, "shape": list(tensor.shape)}
