"""The body of an inference request: JSON, followed by the bytes of its binary inputs.

A header gives the length of the JSON part; without it, the whole body is JSON. With length 0 there is no JSON: the body
is the model's only input (raw binary request).

Clients often repeat the same JSON part while only the tensors after it change, so a decoder caches the decoded form of
small ones. Source: KServe v2 protocol and Triton's parameters, classification and binary tensor data extensions.
"""

from collections.abc import Mapping
from math import prod
from typing import Final

import numpy as np

from charonia.core.dtypes import BY_WIRE, DataType
from charonia.core.errors import invalid
from charonia.core.request import SEQUENCE_END, SEQUENCE_START, InferRequest, ParameterValue, RequestedOutput
from charonia.core.tensor import Tensor
from charonia.wire.json_text import (
    INT64_MIN,
    UINT64_MAX,
    Object,
    boolean,
    kind_of,
    parse_object,
    string_at,
    unsigned,
)
from charonia.wire.shared_memory import (
    BYTE_SIZE,
    NO_PLACES,
    OFFSET,
    REGION,
    OutputLocation,
    Regions,
    RegionSpan,
    places,
    span,
    view,
)
from charonia.wire.tensors import bytes_array, decode_tensor
from charonia.wire.v2_data import decode_data

CACHED_MAX = 512
"""Limit of cached JSON parts; beyond it, the cache is cleared."""

CACHED_BYTES_MAX = 2048
"""Longest JSON part that is cached."""

PLAIN_DIMS_MAX: Final = 32
"""Tensors with more dimensions take the slower way: not every numpy has them."""

_ONE_SOURCE: Final = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'."
)


class HttpInferCall:
    """A decoded request and the form of its outputs.

    Attributes:
        request: The request for the engine.
        binary: Whether outputs are binary unless `forms` says otherwise.
        forms: Whether an output is binary, by name, for outputs that specify it.
        places: Destinations in shared memory, by name of the output.
    """

    __slots__ = ("binary", "forms", "places", "request")

    def __init__(
        self,
        request: InferRequest,
        binary: bool,
        forms: Mapping[str, bool],
        places: Mapping[str, OutputLocation] = NO_PLACES,
    ) -> None:
        self.request = request
        self.binary = binary
        self.forms = forms
        self.places = places


class _SharedInput:
    """An input in shared memory."""

    __slots__ = ("datatype", "name", "shape", "span")

    def __init__(self, name: str, datatype: DataType, shape: tuple[int, ...], span: RegionSpan) -> None:
        self.name = name
        self.datatype = datatype
        self.shape = shape
        self.span = span

    def tensor(self, regions: Regions | None, model: str) -> Tensor:
        return decode_tensor(self.name, self.datatype, self.shape, view(self.span, regions), model)


_BinaryInput = tuple[str, DataType, tuple[int, ...], int, np.dtype[np.generic] | None]
"""Name, datatype, shape, size in bytes; and the dtype where bytes of that size are the array without more checks."""


class _Head:
    """A decoded JSON part. Requests share it, so it is immutable."""

    __slots__ = ("binary", "fields", "forms", "id", "inputs", "outputs", "parameters", "spans")

    def __init__(self) -> None:
        self.id = ""
        self.inputs: list[_BinaryInput | Tensor | _SharedInput] = []  # a tensor where its elements are in the JSON
        self.outputs: tuple[RequestedOutput, ...] = ()
        self.forms: dict[str, bool] = {}
        self.spans: dict[str, RegionSpan] = {}  # outputs that go to shared memory
        self.binary = False
        self.parameters: dict[str, ParameterValue] = {}
        self.fields: dict[str, int | str] = {}  # fields of the request that parameters set

    @property
    def is_cacheable(self) -> bool:
        """Whether another request is likely to repeat it."""
        return not self.id and not any(type(entry) is Tensor for entry in self.inputs)

    def apply_parameters(self, request: InferRequest) -> None:
        if self.parameters:
            request.parameters = dict(self.parameters)
        for field, value in self.fields.items():
            setattr(request, field, value)


class InferDecoder:
    """Decodes the bodies of inference requests."""

    def __init__(self, tensor_bytes_max: int, regions: Regions | None = None) -> None:
        """Create a decoder.

        Args:
            tensor_bytes_max: Largest size in bytes of a tensor given as JSON.
            regions: Shared memory of clients; None if it is disabled.
        """
        self._tensor_bytes_max = tensor_bytes_max
        self._regions = regions
        self._heads: dict[bytes, _Head] = {}

    def decode(self, model: str, version: str, body: bytes | memoryview, json_size: int | None = None) -> HttpInferCall:
        """Return the request in a body.

        Args:
            model: Model name of the URL.
            version: Version of the URL, "" for none.
            body: The whole body.
            json_size: Bytes of JSON at its start, None when all of it is JSON.

        Raises:
            ServingError: INVALID_ARG or UNSUPPORTED, with the problem.
        """
        size = len(body)
        if json_size is None:
            json_size = size
        elif not 0 < json_size <= size:
            raise invalid(
                f"Inference-Header-Content-Length: expected a number from 0 to the body's {size} bytes, got {json_size}"
            )
        text = bytes(body[:json_size])
        head = self._heads.get(text) if json_size <= CACHED_BYTES_MAX else None
        if head is None:
            head = self._parse_head(model, text)
        position = json_size
        tensors: dict[str, Tensor] = {}
        for entry in head.inputs:
            if not isinstance(entry, tuple):
                tensors[entry.name] = entry if isinstance(entry, Tensor) else entry.tensor(self._regions, model)
                continue
            name, datatype, shape, length, dtype = entry
            end = position + length
            if end > size:
                raise invalid(
                    f"unexpected size for input '{name}', expecting {end - size} additional bytes for model '{model}'"
                )
            if dtype is not None:
                tensors[name] = Tensor(name, datatype, np.ndarray(shape, dtype, body, position))
            else:
                tensors[name] = decode_tensor(name, datatype, shape, memoryview(body)[position:end], model)
            position = end
        if position != size:
            raise invalid(
                f"unexpected additional input data for model '{model}': {size - position} bytes are left over"
            )
        request = InferRequest(model, tensors, model_version=version, id=head.id, outputs=head.outputs)
        if head.parameters or head.fields:
            head.apply_parameters(request)
        return HttpInferCall(
            request, head.binary, head.forms, places(head.spans, self._regions) if head.spans else NO_PLACES
        )

    def _parse_head(self, model: str, text: bytes) -> _Head:
        head = _parse_head(model, text, self._tensor_bytes_max)
        if len(text) <= CACHED_BYTES_MAX and head.is_cacheable:
            if len(self._heads) >= CACHED_MAX:
                self._heads.clear()
            self._heads[text] = head
        return head


def raw_call(model: str, version: str, tensor: Tensor) -> HttpInferCall:
    """Return the call of a raw binary request: one input, binary outputs."""
    return HttpInferCall(InferRequest(model, {tensor.name: tensor}, model_version=version), True, {})


def raw_tensor(name: str, datatype: DataType, dims: tuple[int, ...], batched: bool, body: bytes | memoryview) -> Tensor:
    """Return the one input of a raw binary request, whose shape follows from the number of bytes.

    Args:
        name: The model's only input.
        dims: Its dimensions without the batch, at most one of them -1.
        batched: Whether the model has a batch dimension; it becomes 1.
        body: The bytes; for a BYTES input its only element, without a length prefix.

    Raises:
        ServingError: INVALID_ARG when no shape fits.
    """
    lead = (1,) if batched else ()
    if datatype is DataType.BYTES:
        shape = lead + tuple(1 if d == -1 else d for d in dims)
        if prod(shape) != 1:
            raise invalid(
                f"For BYTE datatype raw input '{name}', the model must have input shape [1], got {list(dims)}"
            )
        return Tensor(name, datatype, bytes_array(name, shape, [bytes(body)]))
    if dims.count(-1) > 1:
        raise invalid(
            f"The shape of the raw input '{name}' can not be deduced because there are more than one variable-sized "
            f"dimension: {list(dims)}"
        )
    fixed_bytes = prod(d for d in dims if d != -1) * datatype.byte_size
    variable = len(body) // fixed_bytes if fixed_bytes else 0
    return decode_tensor(name, datatype, lead + tuple(variable if d == -1 else d for d in dims), body)


def apply_parameters(request: InferRequest, parameters: Object) -> None:
    """Apply the parameters of a request: reserved ones that set fields, and custom ones.

    Raises:
        ServingError: INVALID_ARG for a reserved key or an invalid value.
    """
    head = _Head()
    _read_parameters(head, parameters)
    head.apply_parameters(request)


def custom_parameter(key: str, value: object) -> ParameterValue:
    """Return the value of a custom parameter.

    Raises:
        ServingError: INVALID_ARG for a reserved key, or a value that is neither a string, a number nor a boolean.
    """
    if key.startswith("triton_"):
        raise invalid(
            f"parameter '{key}': parameter keys starting with 'triton_' are reserved for Triton usage and should not "
            "be specified."
        )
    if not isinstance(value, bool | int | float | str):
        raise invalid(f"parameter '{key}' has invalid type. Expected a string, number or boolean, got {kind_of(value)}")
    if isinstance(value, int) and not INT64_MIN <= value <= UINT64_MAX:
        raise invalid(f"parameter '{key}': the integer does not fit 64 bits")
    return value


def _parse_head(model: str, text: bytes, tensor_bytes_max: int) -> _Head:
    document = parse_object(text)
    head = _Head()
    head.id = string_at(document, "id")
    inputs = document.get("inputs")
    if type(inputs) is not list:
        raise invalid(f"Unable to parse 'inputs' for model '{model}': expected an array, got {kind_of(inputs)}")
    names = set()
    for entry in inputs:
        if type(entry) is not dict:
            raise invalid(f"Unable to parse 'inputs' for model '{model}': expected objects, got {kind_of(entry)}")
        name = string_at(entry, "name", required=True)
        if name in names:
            raise invalid(f"input '{name}' already exists in request")
        names.add(name)
        head.inputs.append(_input(name, entry, tensor_bytes_max))
    _read_parameters(head, _object_at(document, "parameters", "the request"))
    outputs = document.get("outputs")
    if outputs is not None:
        _read_outputs(head, model, outputs)
    return head


def _input(name: str, entry: Object, tensor_bytes_max: int) -> _BinaryInput | Tensor | _SharedInput:
    shape = _shape(name, entry.get("shape"))
    datatype = BY_WIRE.get(string_at(entry, "datatype", required=True))
    if datatype is None:
        raise invalid(f"input '{name}': datatype '{entry['datatype']}' is none of {', '.join(BY_WIRE)}")
    parameters = _object_at(entry, "parameters", f"input '{name}'")
    size = parameters.get("binary_data_size")
    region = parameters.get(REGION)
    data = entry.get("data")
    sources = (data is not None) + (size is not None) + (region is not None)
    if sources != 1:
        raise invalid(f"{_ONE_SOURCE} Input '{name}' sets {sources} of them.")
    if region is not None:
        return _SharedInput(name, datatype, shape, _span(f"input '{name}'", parameters))
    if data is not None:
        return decode_data(name, datatype, shape, data, tensor_bytes_max)
    if type(size) is not int or size < 0:
        raise invalid(f"input '{name}': 'binary_data_size' must be a non-negative integer, got {kind_of(size)}")
    is_plain = 0 < size == prod(shape) * datatype.byte_size and len(shape) <= PLAIN_DIMS_MAX
    return name, datatype, shape, size, datatype.numpy if is_plain else None


def _shape(name: str, shape: object) -> tuple[int, ...]:
    if type(shape) is not list:
        raise invalid(f"input '{name}': 'shape' must be an array of integers, got {kind_of(shape)}")
    for dim in shape:
        if type(dim) is not int or dim < 0:
            raise invalid(f"input '{name}': a dimension in 'shape' must be a non-negative integer, got {dim!r:.40}")
    return tuple(shape)


def _read_parameters(head: _Head, parameters: Object) -> None:
    for key, value in parameters.items():
        match key:
            case "binary_data_output":
                head.binary = boolean(key, value)
            case "sequence_id":
                head.fields["correlation_id"] = value if isinstance(value, str) else unsigned(key, value)
            case "sequence_start" | "sequence_end":
                flag = SEQUENCE_START if key == "sequence_start" else SEQUENCE_END
                head.fields["flags"] = int(head.fields.get("flags", 0)) | (flag if boolean(key, value) else 0)
            case "priority":
                head.fields["priority"] = unsigned(key, value)
            case "timeout":
                head.fields["timeout_us"] = unsigned(key, value)
            case _:
                head.parameters[key] = custom_parameter(key, value)


def _read_outputs(head: _Head, model: str, entries: object) -> None:
    if type(entries) is not list:
        raise invalid(f"Unable to parse 'outputs' for model '{model}': expected an array, got {kind_of(entries)}")
    outputs: dict[str, RequestedOutput] = {}
    for entry in entries:
        if type(entry) is not dict:
            raise invalid(f"Unable to parse 'outputs' for model '{model}': expected objects, got {kind_of(entry)}")
        name = string_at(entry, "name", required=True)
        if name in outputs:
            raise invalid(f"output '{name}' already exists in request")
        parameters = _object_at(entry, "parameters", f"output '{name}'")
        if parameters.get(REGION) is not None:
            for other in ("classification", "binary_data"):
                if parameters.get(other):
                    raise invalid(f"Output can't set both 'shared_memory_region' and '{other}': output '{name}'")
            head.spans[name] = _span(f"output '{name}'", parameters)
        if "binary_data" in parameters:
            head.forms[name] = boolean("binary_data", parameters["binary_data"])
        outputs[name] = RequestedOutput(name, unsigned("classification", parameters.get("classification", 0)))
    if outputs:
        head.binary = False  # `binary_data_output` is for requests that name no outputs
    head.outputs = tuple(outputs.values())


def _span(owner: str, parameters: Object) -> RegionSpan:
    return span(owner, parameters[REGION], parameters.get(OFFSET), parameters.get(BYTE_SIZE))


def _object_at(document: Object, key: str, owner: str) -> Object:
    value = document.get(key)
    if value is None:
        return {}
    if type(value) is not dict:
        raise invalid(f"{owner}: '{key}' must be an object, got {kind_of(value)}")
    return value
