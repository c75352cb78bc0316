"""The body of an inference response: JSON, followed by the bytes of the outputs that were requested in binary form.

Source: KServe v2 protocol and Triton's binary tensor data extension.
"""

from collections.abc import Mapping
from functools import lru_cache

from charonia.core.response import InferResponse, ParametersKey, parameters_key
from charonia.wire.json_text import dump, is_literal
from charonia.wire.shared_memory import NO_PLACES, OutputLocation, write
from charonia.wire.tensors import encode_tensor
from charonia.wire.v2_data import encode_data, has_literals

CACHED_MAX = 512
"""Limit of cached JSON parts."""


def encode_response(
    response: InferResponse, binary: bool, forms: Mapping[str, bool], places: Mapping[str, OutputLocation] = NO_PLACES
) -> tuple[bytes, list[bytes | memoryview]]:
    """Return the JSON part of a response and the binary outputs that follow it, none when all outputs are in the JSON.

    Args:
        binary: Whether outputs are binary unless `forms` says otherwise.
        forms: Whether an output is binary, by name, for outputs that specify it.
        places: Destinations in shared memory, by name of the output, which is written there.

    Raises:
        ServingError: JSON cannot carry an output, or its place is too small.
    """
    if not (response.id or places):
        key = parameters_key(response.parameters) if response.parameters else ()
        repeated = _repeated(response, binary, forms, key) if key is not None else None
        if repeated is not None:
            return repeated
    blobs: list[bytes | memoryview] = []
    outputs: list[dict[str, object]] = []
    literals = False
    for tensor in response.outputs:
        entry: dict[str, object] = {
            "name": tensor.name,
            "datatype": tensor.datatype.wire,
            "shape": tensor.array.shape,
        }
        if places and tensor.name in places:
            # Clients know its location, and C++ clients interpret any parameter as the sign of a binary output.
            write(places[tensor.name], tensor.name, encode_tensor(tensor))
        elif forms.get(tensor.name, binary):
            blob = encode_tensor(tensor)
            entry["parameters"] = {"binary_data_size": len(blob)}
            blobs.append(blob)
        else:
            entry["data"] = encode_data(tensor)
            literals = literals or has_literals(tensor.array)
        outputs.append(entry)
    document: dict[str, object] = {"id": response.id} if response.id else {}
    document["model_name"] = response.model_name
    document["model_version"] = response.model_version
    if response.parameters:
        document["parameters"] = response.parameters
        literals = literals or any(map(is_literal, response.parameters.values()))
    document["outputs"] = outputs
    return dump(document, literals=literals), blobs


def _repeated(
    response: InferResponse, binary: bool, forms: Mapping[str, bool], parameters: ParametersKey
) -> tuple[bytes, list[bytes | memoryview]] | None:
    """Return a response with binary outputs only, with a JSON part from the cache. None for any other response."""
    blobs: list[bytes | memoryview] = []
    outputs: list[tuple[str, str, tuple[int, ...], int]] = []
    for tensor in response.outputs:
        if not forms.get(tensor.name, binary):
            return None
        blob = encode_tensor(tensor)
        blobs.append(blob)
        outputs.append((tensor.name, tensor.datatype.wire, tensor.shape, len(blob)))
    return _binary_document(response.model_name, response.model_version, parameters, tuple(outputs)), blobs


@lru_cache(CACHED_MAX)
def _binary_document(
    model: str, version: str, parameters: ParametersKey, outputs: tuple[tuple[str, str, tuple[int, ...], int], ...]
) -> bytes:
    document: dict[str, object] = {"model_name": model, "model_version": version}
    if parameters:
        document["parameters"] = {name: value for name, _, value in parameters}
    document["outputs"] = [
        {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}
        for name, datatype, shape, size in outputs
    ]
    return dump(document)
