"""The JSON of inference requests and responses, and the tensors that follow it in binary form.

A body is JSON, optionally followed by the bytes of tensors (binary tensor data extension); the length of the JSON part
then comes beside the body. Source: KServe v2 protocol and Triton's parameters, classification and binary tensor data
extensions.
"""

import json
from collections.abc import Mapping
from math import isfinite, prod

import numpy as np
import orjson

from charonia.core.dtypes import BY_WIRE, DataType
from charonia.core.errors import ServingError, invalid, unsupported
from charonia.core.request import SEQUENCE_END, SEQUENCE_START, InferRequest, ParameterValue, RequestedOutput
from charonia.core.response import InferResponse
from charonia.core.tensor import Array, Tensor
from charonia.protocol.tensors import bytes_array, decode_tensor, encode_tensor

NESTING_MAX = 100
"""Deepest nesting of arrays in `data`."""

UINT64_MAX = 2**64 - 1

_ONE_SOURCE = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'."
)
_SHM_DISABLED = "Client shared memory is disabled: input or output '{}' cannot use region '{}'"
_NO_JSON_FORM = (DataType.FP16, DataType.BF16)
_NO_FORMS: dict[str, bool] = {}


class InferCall:
    """A decoded request and how its outputs are to be sent.

    Attributes:
        request: What goes to the engine.
        binary: Whether outputs are binary unless `forms` says otherwise.
        forms: Whether an output is binary, by name, for those that say so.
    """

    __slots__ = ("binary", "forms", "request")

    def __init__(self, request: InferRequest, binary: bool, forms: dict[str, bool]) -> None:
        self.request = request
        self.binary = binary
        self.forms = forms


def decode_request(
    model: str, version: str, body: bytes | memoryview, header_length: int | None, tensor_bytes_max: int
) -> InferCall:
    """Return the request in a body.

    Args:
        model: Model name of the URL.
        version: Version of the URL, "" for none.
        body: The whole body.
        header_length: Bytes of JSON at its start, None when all of it is JSON.
        tensor_bytes_max: Most bytes that a tensor given as JSON may take.

    Raises:
        ServingError: INVALID_ARG or UNSUPPORTED, with what is wrong.
    """
    view = memoryview(body)
    if header_length is not None and not 0 < header_length <= len(view):
        raise invalid(
            f"Inference-Header-Content-Length: expected a number of bytes from 1 to the body's {len(view)}, "
            f"got {header_length}"
        )
    document = _parse(view if header_length is None else view[:header_length])
    tail = view[header_length:] if header_length is not None else view[:0]
    inputs = document.get("inputs")
    if not isinstance(inputs, list):
        raise invalid(f"Unable to parse 'inputs' for model '{model}': expected an array, got {_kind(inputs)}")
    tensors: dict[str, Tensor] = {}
    position = 0
    for entry in inputs:
        tensor, position = _input(model, entry, tail, position, tensor_bytes_max)
        if tensor.name in tensors:
            raise invalid(f"input '{tensor.name}' already exists in request")
        tensors[tensor.name] = tensor
    if position != len(tail):
        raise invalid(
            f"unexpected additional input data for model '{model}': {len(tail) - position} bytes are left over"
        )
    request = InferRequest(model, tensors, model_version=version, id=_string(document, "id"))
    binary = _parameters(request, document.get("parameters"))
    listed = document.get("outputs")
    if listed:
        forms = _outputs(request, listed)
        return InferCall(request, binary, forms)
    return InferCall(request, binary, _NO_FORMS)


def raw_request(model: str, version: str, tensor: Tensor) -> InferCall:
    """Return the call of a raw binary request: one input, outputs in binary form."""
    return InferCall(InferRequest(model, {tensor.name: tensor}, model_version=version), True, _NO_FORMS)


def raw_tensor(
    model: str, name: str, datatype: DataType, dims: tuple[int, ...], batches: bool, body: bytes | memoryview
) -> Tensor:
    """Return the one input of a raw binary request, whose shape follows from the number of bytes.

    Args:
        model: Model name, for messages.
        name: The model's only input.
        datatype: Its datatype.
        dims: Its dimensions without the batch, at most one of them -1.
        batches: Whether the model has a batch dimension; it becomes 1.
        body: The bytes.

    Raises:
        ServingError: INVALID_ARG when no shape fits.
    """
    lead = (1,) if batches else ()
    if datatype is DataType.BYTES:
        if prod(dims) not in (1, -1):
            raise invalid(
                f"raw input '{name}' for model '{model}': a BYTES input must have exactly one element, not {list(dims)}"
            )
        shape = lead + tuple(abs(d) for d in dims)
        return Tensor(name, datatype, bytes_array(name, shape, [bytes(body)]))
    if dims.count(-1) > 1:
        raise invalid(
            f"raw input '{name}' for model '{model}': the shape {list(dims)} has more than one variable dimension"
        )
    fixed = prod(d for d in dims if d != -1) * datatype.byte_size
    variable = len(body) // fixed if -1 in dims and fixed else 1
    shape = lead + tuple(variable if d == -1 else d for d in dims)
    return decode_tensor(name, datatype, shape, body)


def encode_response(response: InferResponse, call: InferCall) -> tuple[bytes, list[bytes | memoryview]]:
    """Return the JSON part of a response and the tensors that follow it, none when all outputs are in the JSON.

    Raises:
        ServingError: An output cannot be put into JSON.
    """
    blobs: list[bytes | memoryview] = []
    outputs: list[dict[str, object]] = []
    all_finite = True
    forms = call.forms
    for tensor in response.outputs:
        entry: dict[str, object] = {
            "name": tensor.name,
            "datatype": tensor.datatype.wire,
            "shape": tensor.array.shape,
        }
        if forms.get(tensor.name, call.binary) if forms else call.binary:
            blob = encode_tensor(tensor)
            entry["parameters"] = {"binary_data_size": len(blob)}
            blobs.append(blob)
        else:
            data = _json_data(tensor)
            entry["data"] = data
            all_finite = all_finite and _is_finite(tensor)
        outputs.append(entry)
    document: dict[str, object] = {}
    if response.id:
        document["id"] = response.id
    document["model_name"] = response.model_name
    document["model_version"] = response.model_version
    if response.parameters:
        document["parameters"] = response.parameters
        all_finite = all_finite and all(isfinite(v) for v in response.parameters.values() if isinstance(v, float))
    document["outputs"] = outputs
    if all_finite:
        return orjson.dumps(document), blobs
    # NaN and infinity have no form in JSON proper; clients of this protocol expect the literals that Python writes.
    return json.dumps(document, separators=(",", ":")).encode(), blobs


def encode_error(error: ServingError) -> bytes:
    """Return the body of an error response."""
    return orjson.dumps({"error": str(error)})


def parse_object(body: bytes | memoryview) -> dict[str, object]:
    """Return the JSON object of a body; an empty body is an empty object.

    Raises:
        ServingError: INVALID_ARG when it is no JSON object.
    """
    return _parse(memoryview(body)) if len(body) else {}


def _parse(text: memoryview) -> dict[str, object]:
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        document = _parse_leniently(bytes(text), error)
    if not isinstance(document, dict):
        raise invalid(f"failed to parse the request JSON buffer: expected an object, got {_kind(document)}")
    return document


def _parse_leniently(text: bytes, error: Exception) -> object:
    """Parse JSON with the literals NaN and Infinity, which the quick parser refuses."""
    if b"NaN" in text or b"Infinity" in text:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as second:
            error = second
    raise invalid(f"failed to parse the request JSON buffer: {error}")


def _input(model: str, entry: object, tail: memoryview, position: int, tensor_bytes_max: int) -> tuple[Tensor, int]:
    if not isinstance(entry, dict):
        raise invalid(f"Unable to parse 'inputs' for model '{model}': expected objects, got {_kind(entry)}")
    name = _string(entry, "name", required=True)
    shape = _shape(name, entry.get("shape"))
    datatype = BY_WIRE.get(_string(entry, "datatype", required=True))
    if datatype is None:
        raise invalid(f"input '{name}': datatype '{entry['datatype']}' is none of {', '.join(BY_WIRE)}")
    parameters = entry.get("parameters")
    size = region = None
    if parameters is not None:
        if not isinstance(parameters, dict):
            raise invalid(f"input '{name}': 'parameters' must be an object, got {_kind(parameters)}")
        size = parameters.get("binary_data_size")
        region = parameters.get("shared_memory_region")
    data = entry.get("data")
    if (data is not None) + (size is not None) + (region is not None) != 1:
        raise invalid(f"{_ONE_SOURCE} Input '{name}' of model '{model}' sets {'none' if data is None else 'several'}.")
    if region is not None:
        raise unsupported(_SHM_DISABLED.format(name, region))
    if size is None:
        return _json_tensor(name, datatype, shape, data, tensor_bytes_max), position
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise invalid(f"input '{name}': 'binary_data_size' must be a number of bytes, got {size!r}")
    end = position + size
    if end > len(tail):
        raise invalid(
            f"unexpected size for input '{name}', expecting {end - len(tail)} additional bytes for model '{model}'"
        )
    return decode_tensor(name, datatype, shape, tail[position:end]), end


def _shape(name: str, shape: object) -> tuple[int, ...]:
    if not isinstance(shape, list):
        raise invalid(f"input '{name}': 'shape' must be an array of integers, got {_kind(shape)}")
    for dim in shape:
        if type(dim) is not int or dim < 0:
            raise invalid(f"input '{name}': a dimension must be a non-negative integer, got {dim!r} in 'shape'")
    return tuple(shape)


def _json_tensor(name: str, datatype: DataType, shape: tuple[int, ...], data: object, tensor_bytes_max: int) -> Tensor:
    if datatype in _NO_JSON_FORM:
        raise invalid(
            f"receiving {datatype.wire} data via JSON is not supported. Please use the binary data format for input "
            f"'{name}'"
        )
    count = prod(shape)
    # Asked before anything of that size is made.
    if count * (datatype.byte_size or 4) > tensor_bytes_max:
        raise invalid(
            f"input '{name}': a {datatype.wire} tensor of shape {list(shape)} is larger than the maximum of "
            f"{tensor_bytes_max} bytes (--http-max-input-size)"
        )
    if datatype is DataType.BYTES:
        return Tensor(name, datatype, bytes_array(name, shape, _strings(name, data)))
    array = _numbers(name, datatype, data)
    if array.size != count:
        raise invalid(
            f"Unable to parse 'data': Shape does not match true shape of 'data' field: input '{name}' of shape "
            f"{list(shape)} has {count} elements, got {array.size}"
        )
    return Tensor(name, datatype, array.reshape(shape))


def _numbers(name: str, datatype: DataType, data: object) -> Array:
    try:
        array = np.array(data)
    except (ValueError, OverflowError) as error:
        raise invalid(
            f"Unable to parse 'data': Shape does not match true shape of 'data' field: input '{name}' is not a regular "
            "array"
        ) from error
    target = datatype.numpy
    kind = array.dtype.kind
    if array.size == 0:
        return np.zeros(0, target)
    if target.kind == "b":
        fits = kind == "b"
    elif target.kind == "f":
        fits = kind in "iuf"
    else:
        bits = 8 * target.itemsize
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if target.kind == "i" else (0, 2**bits - 1)
        fits = kind in "iu" and int(array.min()) >= low and int(array.max()) <= high
    if not fits:
        raise invalid(f"Unable to parse 'data' of input '{name}': not every element is a valid {datatype.wire} value")
    with np.errstate(over="ignore"):  # a number beyond FP32 becomes infinity, as anywhere else
        return array.astype(target)


def _strings(name: str, data: object) -> list[bytes]:
    level: list[object] = data if isinstance(data, list) else [data]
    for _ in range(NESTING_MAX):
        if not any(isinstance(item, list) for item in level):
            break
        if not all(isinstance(item, list) for item in level):
            raise invalid(f"Unable to parse 'data' of input '{name}': strings and arrays are mixed")
        level = [element for item in level if isinstance(item, list) for element in item]
    else:
        raise invalid(f"Unable to parse 'data' of input '{name}': arrays are nested deeper than {NESTING_MAX}")
    elements = [item.encode() for item in level if isinstance(item, str)]
    if len(elements) != len(level):
        raise invalid(f"Unable to parse 'data' of input '{name}': every element of a BYTES tensor must be a string")
    return elements


def _parameters(request: InferRequest, parameters: object) -> bool:
    """Sort the request's parameters into their fields; return whether outputs are binary by default."""
    if parameters is None:
        return False
    if not isinstance(parameters, dict):
        raise invalid(f"'parameters' must be an object, got {_kind(parameters)}")
    binary = False
    for key, value in parameters.items():
        match key:
            case "binary_data_output":
                binary = _boolean(key, value)
            case "sequence_id":
                if isinstance(value, str):
                    request.correlation_id = value
                else:
                    request.correlation_id = _unsigned(key, value)
            case "sequence_start":
                request.flags |= SEQUENCE_START if _boolean(key, value) else 0
            case "sequence_end":
                request.flags |= SEQUENCE_END if _boolean(key, value) else 0
            case "priority":
                request.priority = _unsigned(key, value)
            case "timeout":
                request.timeout_us = _unsigned(key, value)
            case _:
                request.parameters[key] = custom_parameter(key, value)
    return binary


def custom_parameter(key: str, value: object) -> ParameterValue:
    """Return a custom request parameter.

    Raises:
        ServingError: INVALID_ARG for a reserved key, or a value that is neither text, number nor boolean.
    """
    if key.startswith("triton_"):
        raise invalid(
            f"parameter '{key}': parameter keys starting with 'triton_' are reserved for Triton usage and should not "
            "be specified."
        )
    if not isinstance(value, bool | int | float | str):
        raise invalid(f"parameter '{key}': expected a string, a number or a boolean, got {_kind(value)}")
    return value


def _outputs(request: InferRequest, listed: object) -> dict[str, bool]:
    if not isinstance(listed, list):
        raise invalid(f"Unable to parse 'outputs': expected an array, got {_kind(listed)}")
    outputs: dict[str, RequestedOutput] = {}
    forms: dict[str, bool] = {}
    for entry in listed:
        if not isinstance(entry, dict):
            raise invalid(f"Unable to parse 'outputs': expected objects, got {_kind(entry)}")
        name = _string(entry, "name", required=True)
        if name in outputs:
            raise invalid(f"output '{name}' already exists in request")
        classification = 0
        parameters = entry.get("parameters")
        if parameters is not None:
            if not isinstance(parameters, dict):
                raise invalid(f"output '{name}': 'parameters' must be an object, got {_kind(parameters)}")
            classification = _output_parameters(name, parameters, forms)
        outputs[name] = RequestedOutput(name, classification)
    request.outputs = tuple(outputs.values())
    return forms


def _output_parameters(name: str, parameters: Mapping[str, object], forms: dict[str, bool]) -> int:
    region = parameters.get("shared_memory_region")
    if region is not None:
        for other in ("classification", "binary_data"):
            if parameters.get(other):
                raise invalid(f"Output can't set both 'shared_memory_region' and '{other}': output '{name}'")
        raise unsupported(_SHM_DISABLED.format(name, region))
    if "binary_data" in parameters:
        forms[name] = _boolean("binary_data", parameters["binary_data"])
    count = parameters.get("classification")
    if count is None:
        return 0
    classes = _unsigned("classification", count)
    if classes < 1:
        raise invalid(f"output '{name}': 'classification' must be at least 1, got {classes}")
    return classes


def _json_data(tensor: Tensor) -> list[object]:
    if tensor.datatype in _NO_JSON_FORM:
        raise invalid(
            f"sending {tensor.datatype.wire} data via JSON is not supported. Please use the binary data format for "
            f"output '{tensor.name}'"
        )
    elements: list[object] = tensor.array.ravel().tolist()
    if tensor.datatype is not DataType.BYTES:
        return elements
    try:
        return [e.decode() if isinstance(e, bytes) else str(e) for e in elements]
    except UnicodeDecodeError as error:
        raise invalid(
            f"output '{tensor.name}' holds bytes that are no text, which JSON cannot carry",
            hint="ask for it in binary form ('binary_data': true)",
        ) from error


def _is_finite(tensor: Tensor) -> bool:
    return tensor.array.dtype.kind != "f" or bool(np.isfinite(tensor.array).all())


def _string(document: Mapping[str, object], key: str, *, required: bool = False) -> str:
    value = document.get(key)
    if value is None and not required:
        return ""
    if not isinstance(value, str):
        raise invalid(f"Unable to parse '{key}': expected a string, got {_kind(value)}")
    return value


def _boolean(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise invalid(f"parameter '{key}': expected a boolean, got {_kind(value)}")
    return value


def _unsigned(key: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= UINT64_MAX:
        raise invalid(f"parameter '{key}': expected a non-negative integer, got {value!r}")
    return value


def _kind(value: object) -> str:
    kinds = {
        type(None): "nothing",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return kinds.get(type(value), type(value).__name__)
