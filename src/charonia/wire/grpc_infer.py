"""Inference requests and responses as gRPC messages.

Decoding: protobuf's C parser builds the message, and the inputs become views of its `raw_input_contents`. The parser
copies its output twice, so the tensors of large messages are cut out before it sees them. Clients often send the same
message with other tensors: the form of small ones is cached, and the parser does not see those at all.

Encoding: a response is assembled here, byte by byte, because building a message object costs several times as much.
Parts that repeat between responses (names, shapes) are cached. The bytes equal protobuf's output.

Source: KServe v2 protocol, gRPC, and Triton's extensions of it.

The `raw_input_contents` of a ModelInferRequest, the bytes of its tensors, are read without protobuf's parser.

In a large message they are cut out as views before the parser, which would copy them, sees the rest. Small messages of
a client often differ in them only: their form is cached, and the parser does not see another message of that form.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from charonia.core.dtypes import BY_WIRE, DataType
from charonia.core.errors import ServingError, internal, invalid
from charonia.core.request import SEQUENCE_END, SEQUENCE_START, InferRequest, RequestedOutput
from charonia.core.response import InferResponse, ParametersKey, parameters_key
from charonia.core.tensor import Array, Tensor
from charonia.schema.pool import message_class
from charonia.wire.grpc_framing import VIEW_ABOVE_BYTES, Buffer
from charonia.wire.grpc_status import RpcError, Status
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
    write,
)
from charonia.wire.tensors import bytes_array, decode_tensor, encode_tensor

EMPTY_FINAL: Final = "triton_enable_empty_final_response"
"""The only request parameter with the reserved prefix that a caller may send."""

CACHED_HEADS_MAX: Final = 4096
"""Limit of cached names and output heads."""

INT64_MAX: Final = 2**63 - 1
UINT64_MAX: Final = 2**64 - 1

_VARINT_1: Final = tuple(bytes((value,)) for value in range(128))
_FINAL: Final = {
    # Field 4, a map entry: key "triton_final_response", value {bool_param}.
    True: b"\x22\x1b\x0a\x15triton_final_response\x12\x02\x08\x01",
    False: b"\x22\x1b\x0a\x15triton_final_response\x12\x02\x08\x00",
}
_CONTENTS: Final[dict[DataType, str]] = {
    DataType.BOOL: "bool_contents",
    DataType.INT8: "int_contents",
    DataType.INT16: "int_contents",
    DataType.INT32: "int_contents",
    DataType.INT64: "int64_contents",
    DataType.UINT8: "uint_contents",
    DataType.UINT16: "uint_contents",
    DataType.UINT32: "uint_contents",
    DataType.UINT64: "uint64_contents",
    DataType.FP32: "fp32_contents",
    DataType.FP64: "fp64_contents",
    DataType.BYTES: "bytes_contents",
}

FORMS_MAX = 512
"""Limit of cached forms of messages; beyond it, the cache is cleared."""

FORM_BYTES_MAX: Final = 2048
"""Most bytes before the tensors of a message whose form is cached."""

TOP_LEVEL_FIELDS_MAX: Final = 256
"""Messages with more fields than this go to the parser as a whole."""

_RAW_INPUTS_TAG: Final = 0x3A


def split_raw_inputs(data: Buffer) -> tuple[Buffer, list[Buffer] | None]:
    """Return a ModelInferRequest without its `raw_input_contents`, and those as views.

    Bytes that are not clearly such a message are returned unchanged, with None, for the parser to judge.
    """
    view = memoryview(data)
    raw: list[Buffer] = []
    rest: list[Buffer] = []
    position, end = 0, len(view)
    for _ in range(TOP_LEVEL_FIELDS_MAX):
        if position == end:
            return b"".join(rest), raw
        start = position
        if view[position] & 0x87 != 2:  # Every field of the message has a number below 16 and is length-delimited.
            return data, None
        size, body = _length(view, position + 1)
        position = body + size
        if size < 0 or position > end:
            return data, None
        if view[start] == _RAW_INPUTS_TAG:
            raw.append(view[body:position])
        else:
            rest.append(view[start:position])
    return data, None


def _length(view: memoryview, position: int) -> tuple[int, int]:
    """Return the length at `position` and where its field begins; -1 if it is not a number below 2**35."""
    size = shift = 0
    for byte in view[position : position + 5]:
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return size, position + shift // 7
    return -1, position


class _PlacedInput(NamedTuple):
    """An input of messages of one form.

    Attributes:
        datatype: Its datatype, of a fixed size.
        dtype: The same for numpy.
        before: The bytes before its elements: the field's tag and length.
        start: Where those begin.
        position: Where its elements begin.
    """

    name: str
    datatype: DataType
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    before: bytes
    start: int
    position: int


class _Form(NamedTuple):
    """What messages have in common that differ in the elements of their tensors only.

    Attributes:
        head: All bytes before the raw inputs.
        model_version: Its version, "" for none.
        outputs: The requested outputs.
        wants_empty_final: Whether they ask for an empty final response.
    """

    head: bytes
    model_name: str
    model_version: str
    outputs: tuple[RequestedOutput, ...]
    wants_empty_final: bool
    inputs: tuple[_PlacedInput, ...]


_forms: Final[dict[tuple[int, bytes], _Form]] = {}
"""By the length of the message and its first field, the model's name; the last form that was seen of each."""


def cached_call(data: bytes) -> "GrpcInferCall | None":
    """Return what a message says whose form is cached, None if it is not."""
    form = _forms.get(_key(data))
    if form is None or not data.startswith(form.head):
        return None
    inputs: dict[str, Tensor] = {}
    for name, datatype, dtype, shape, before, start, position in form.inputs:
        if not data.startswith(before, start):
            return None
        inputs[name] = Tensor(name, datatype, np.ndarray(shape, dtype, data, position))
    request = InferRequest(form.model_name, inputs, model_version=form.model_version, outputs=form.outputs)
    return GrpcInferCall(request, form.wants_empty_final, NO_PLACES)


def cache_form(data: bytes, request: InferRequest, wants_empty_final: bool) -> None:
    """Cache the form of a message, if only the elements of its inputs follow its head.

    Args:
        data: The message.
        request: The request in it, without an id, other parameters and tensors in shared memory.
        wants_empty_final: Whether it asks for an empty final response.
    """
    head, raw = split_raw_inputs(data)
    if raw is None or len(raw) != len(request.inputs) or len(head) > FORM_BYTES_MAX or not data.startswith(head):
        return
    end = len(head)
    inputs: list[_PlacedInput] = []
    for tensor, elements in zip(request.inputs.values(), raw, strict=True):
        size = len(elements)
        start, position = end, end + 1 + max(1, (size.bit_length() + 6) // 7)
        before, end = data[start:position], position + size
        if tensor.datatype is DataType.BYTES:
            return
        placed = _PlacedInput(tensor.name, tensor.datatype, tensor.array.dtype, tensor.shape, before, start, position)
        inputs.append(placed)
    if end != len(data):  # a length takes more bytes than it needs
        return
    if len(_forms) >= FORMS_MAX:
        _forms.clear()
    named = (request.model_name, request.model_version, request.outputs)
    _forms[_key(data)] = _Form(bytes(head), *named, wants_empty_final, tuple(inputs))


def _key(data: bytes) -> tuple[int, bytes]:
    return len(data), data[: 2 + data[1]] if len(data) > 1 else data


class GrpcInferCall(NamedTuple):
    """A decoded ModelInferRequest.

    Attributes:
        request: The request for the engine.
        wants_empty_final: Whether it asks for an empty final response.
        places: Destinations in shared memory, by name of the output.
    """

    request: InferRequest
    wants_empty_final: bool
    places: Mapping[str, OutputLocation]


def decode_infer(data: Buffer, regions: Regions | None = None) -> GrpcInferCall:
    """Decode a ModelInferRequest.

    Args:
        data: The message.
        regions: Shared memory of clients; None if it is disabled.

    Raises:
        RpcError: INTERNAL when the bytes are not such a message.
        ServingError: INVALID_ARG for a request that contradicts itself, UNSUPPORTED for unsupported features.
    """
    raw: list[Buffer] | None = None
    small: bytes | None = None
    if len(data) > VIEW_ABOVE_BYTES:
        data, raw = split_raw_inputs(data)
    elif isinstance(data, bytes):
        small = data
        known = cached_call(small)
        if known is not None:
            return known
    message = _parsed(data)
    contents = message.raw_input_contents if raw is None else raw
    request = InferRequest(message.model_name, _inputs(message, contents, regions), id=message.id)
    request.model_version = message.model_version
    targets = NO_PLACES
    if message.outputs:
        request.outputs, spans = _requested_outputs(message.outputs)
        if spans:
            targets = places(spans, regions)
    parameters = message.parameters
    wants_empty_final = _apply_parameters(request, parameters) if parameters else False
    if small is not None and not request.id and targets is NO_PLACES and set(parameters) <= {EMPTY_FINAL}:
        cache_form(small, request, wants_empty_final)
    return GrpcInferCall(request, wants_empty_final, targets)


def decode_infer_identity(data: Buffer) -> InferRequest:
    """Return a ModelInferRequest without inputs, to identify one that `decode_infer` refused.

    Raises:
        RpcError: INTERNAL when the bytes are not such a message.
    """
    message = _parsed(data)
    return InferRequest(message.model_name, {}, model_version=message.model_version, id=message.id)


def _parsed(data: Buffer) -> Any:
    try:
        return message_class("inference.ModelInferRequest").FromString(data)  # type: ignore[arg-type]  # any buffer
    except DecodeError as error:
        raise RpcError(Status.INTERNAL, "the bytes received are not a ModelInferRequest") from error


def _inputs(message: Any, raw: Any, regions: Regions | None) -> dict[str, Tensor]:
    model_name = message.model_name
    inputs: dict[str, Tensor] = {}
    raw_count = len(raw)
    used = 0
    for item in message.inputs:
        name = item.name
        datatype = BY_WIRE.get(item.datatype)
        if datatype is None:
            raise invalid(f"input '{name}': expected a datatype such as FP32 or BYTES, got '{item.datatype}'")
        shape = tuple(item.shape)
        if shape and min(shape) < 0:
            raise invalid(f"input '{name}': expected dimensions of 0 or more, got {list(shape)}")
        if name in inputs:
            raise invalid(f"input '{name}' already exists in request")
        part = _span(f"input '{name}'", item.parameters) if item.parameters else None
        if part is not None:
            if item.HasField("contents"):
                raise invalid(f"contents field must not be specified when '{REGION}' is, for input '{name}'")
            inputs[name] = decode_tensor(name, datatype, shape, view(part, regions), model_name)
        elif item.HasField("contents"):
            if raw_count:
                raise invalid(
                    f"contents field must not be specified when using raw_input_contents for '{name}' "
                    f"for model '{model_name}'"
                )
            inputs[name] = Tensor(name, datatype, _contents_array(name, datatype, shape, item.contents))
        elif used < raw_count:
            inputs[name] = decode_tensor(name, datatype, shape, raw[used], model_name)
            used += 1
        elif raw_count or 0 not in shape:
            raise invalid(f"unable to find data for input tensor '{name}' for model '{model_name}' in request.")
        else:
            inputs[name] = decode_tensor(name, datatype, shape, b"", model_name)
    if used != raw_count:
        raise invalid(
            f"unexpected additional input data for model '{model_name}': "
            f"{used} inputs take raw_input_contents, got {raw_count}"
        )
    return inputs


def _contents_array(name: str, datatype: DataType, shape: tuple[int, ...], contents: Any) -> Array:
    field = _CONTENTS.get(datatype)
    if field is None:
        raise invalid(f"input '{name}': {datatype.wire} has no field in contents", hint="send it in raw_input_contents")
    set_fields = [descriptor.name for descriptor, _ in contents.ListFields()]
    if set_fields not in ([], [field]):
        raise invalid(f"input '{name}': {datatype.wire} elements are expected in {field}, got {', '.join(set_fields)}")
    elements = getattr(contents, field)
    if datatype is DataType.BYTES:
        return bytes_array(name, shape, elements)
    flat: Array = np.fromiter(elements, _wide(datatype), len(elements))
    if flat.dtype != datatype.numpy:
        limits = np.iinfo(datatype.numpy.name)
        if flat.size and (flat.min() < limits.min or flat.max() > limits.max):
            raise invalid(f"input '{name}': {datatype.wire} holds {limits.min} to {limits.max}, got a value beyond")
        flat = flat.astype(datatype.numpy)
    return decode_tensor(name, datatype, shape, flat.data.cast("B") if flat.size else b"").array


def _wide(datatype: DataType) -> "np.dtype[np.generic]":
    """Return the dtype of the field that holds a datatype's elements."""
    if datatype in (DataType.INT8, DataType.INT16):
        return DataType.INT32.numpy
    return DataType.UINT32.numpy if datatype in (DataType.UINT8, DataType.UINT16) else datatype.numpy


def _requested_outputs(items: Any) -> tuple[tuple[RequestedOutput, ...], dict[str, RegionSpan]]:
    outputs: list[RequestedOutput] = []
    spans: dict[str, RegionSpan] = {}
    names: set[str] = set()
    for item in items:
        name = item.name
        if name in names:
            raise invalid(f"output '{name}' already exists in request")
        names.add(name)
        classes = 0
        if item.parameters:
            part = _span(f"output '{name}'", item.parameters)
            if part is not None:
                spans[name] = part
            if "classification" in item.parameters:
                if part is not None:
                    raise invalid(f"Output can't set both '{REGION}' and 'classification': output '{name}'")
                value = item.parameters["classification"]
                classes = value.int64_param
                if value.WhichOneof("parameter_choice") != "int64_param" or classes < 1:
                    raise invalid(f"output '{name}': expected 'classification' as int64_param of 1 or more")
        outputs.append(RequestedOutput(name, classes))
    return tuple(outputs), spans


def _span(owner: str, parameters: Any) -> RegionSpan | None:
    """Return the part of a region that a tensor's parameters name, None if they name none."""
    if REGION not in parameters:
        return None
    return span(owner, *(_value(parameters[key]) if key in parameters else None for key in (REGION, OFFSET, BYTE_SIZE)))


def _value(parameter: Any) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    return getattr(parameter, choice) if choice is not None else None


def _apply_parameters(request: InferRequest, parameters: Any) -> bool:
    """Set the fields and custom parameters of a request; return whether it asks for an empty final response."""
    enable_empty_final = False
    for key in parameters:
        value = _value(parameters[key])
        if key == "sequence_id":
            named = _of_type(key, value, int, str)
            # Ids are unsigned; clients send those beyond int64 as the negative number of the same bits.
            request.correlation_id = named & UINT64_MAX if type(named) is int else named
        elif key == "sequence_start":
            request.flags |= SEQUENCE_START if _of_type(key, value, bool) else 0
        elif key == "sequence_end":
            request.flags |= SEQUENCE_END if _of_type(key, value, bool) else 0
        elif key == "priority":
            request.priority = _natural(key, value)
        elif key == "timeout":
            request.timeout_us = _natural(key, value)
        elif key == EMPTY_FINAL:
            enable_empty_final = _of_type(key, value, bool)
        elif key.startswith("triton_"):
            raise invalid(
                f"parameter '{key}': parameter keys starting with 'triton_' are reserved for Triton usage "
                "and should not be specified."
            )
        elif value is None:
            raise invalid(f"parameter '{key}' has no value")
        else:
            request.parameters[key] = value
    return enable_empty_final


def _of_type(key: str, value: Any, *types: type) -> Any:
    if type(value) not in types:
        expected = " or ".join(kind.__name__ for kind in types)
        raise invalid(f"parameter '{key}': expected {expected}, got {type(value).__name__}")
    return value


def _natural(key: str, value: Any) -> int:
    number: int = _of_type(key, value, int)
    if number < 0:
        raise invalid(f"parameter '{key}': expected 0 or more, got {number}")
    return number


def encode_response(
    response: InferResponse, final: bool | None = None, places: Mapping[str, OutputLocation] = NO_PLACES
) -> list[Buffer]:
    """Return a ModelInferResponse in pieces: everything except large tensors is in the first.

    Args:
        final: Value of the parameter `triton_final_response`; None omits it.
        places: Destinations in shared memory, by name of the output, which is written there.

    Raises:
        ServingError: INTERNAL when the protocol has no type for a response parameter, or a place is too small for its
            output.
    """
    head: list[bytes] = [_names(response.model_name, response.model_version)]
    if response.id:
        encoded = response.id.encode()
        head += (b"\x1a", varint(len(encoded)), encoded)
    if final is not None:
        head.append(_FINAL[final])
    if response.parameters:
        key = parameters_key(response.parameters)
        head.append(_parameters(response.parameters) if key is None else _repeated_parameters(key))
    tail: list[Buffer] = []
    for tensor in response.outputs:
        data = encode_tensor(tensor)
        if places and tensor.name in places:
            write(places[tensor.name], tensor.name, data)
            data = b""
        head.append(_output(tensor.name, tensor.datatype.wire, tensor.shape))
        tail += (b"\x32", varint(len(data)), data)
    return _merged(head, tail)


def encode_stream_response(
    response: InferResponse, final: bool, places: Mapping[str, OutputLocation] = NO_PLACES
) -> list[Buffer]:
    """Return a ModelStreamInferResponse with a response, in pieces. Raises as `encode_response`."""
    parts = encode_response(response, final, places)
    size = sum(map(len, parts))
    return [b"".join((b"\x12", varint(size), parts[0])), *parts[1:]]


def encode_stream_error(error: ServingError, request: InferRequest, final: bool = True) -> list[Buffer]:
    """Return a ModelStreamInferResponse with an error and the identity of its request."""
    message: Any = message_class("inference.ModelStreamInferResponse")()
    # A model's text may contain characters that UTF-8 cannot encode.
    message.error_message = str(error).encode("utf-8", "replace").decode()
    message.infer_response.id = request.id
    message.infer_response.model_name = request.model_name
    message.infer_response.model_version = request.model_version
    message.infer_response.parameters["triton_final_response"].bool_param = final
    return [message.SerializeToString()]


def _merged(head: list[bytes], tail: Iterable[Buffer]) -> list[Buffer]:
    """Return the pieces of a message, small neighbours joined."""
    pieces: list[Buffer] = []
    pending: list[Buffer] = [*head]
    for part in tail:
        if len(part) > VIEW_ABOVE_BYTES:
            pieces += (b"".join(pending), part)
            pending = []
        else:
            pending.append(part)
    if pending:
        pieces.append(b"".join(pending))
    return pieces


def varint(value: int) -> bytes:
    """Return a number in protobuf's form."""
    if value < 128:
        return _VARINT_1[value]
    encoded = bytearray()
    while value >= 128:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


@lru_cache(CACHED_HEADS_MAX)
def _names(model_name: str, model_version: str) -> bytes:
    message: Any = message_class("inference.ModelInferResponse")(model_name=model_name, model_version=model_version)
    encoded: bytes = message.SerializeToString()
    return encoded


@lru_cache(CACHED_HEADS_MAX)
def _output(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    message: Any = message_class("inference.ModelInferResponse")()
    message.outputs.add(name=name, datatype=datatype, shape=shape)
    encoded: bytes = message.SerializeToString()
    return encoded


@lru_cache(CACHED_HEADS_MAX)
def _repeated_parameters(key: ParametersKey) -> bytes:
    return _parameters({name: value for name, _, value in key})


def _parameters(parameters: Mapping[str, object]) -> bytes:
    message: Any = message_class("inference.ModelInferResponse")()
    for key, value in parameters.items():
        set_parameter(message.parameters, key, value, internal, "response parameter")
    encoded: bytes = message.SerializeToString()
    return encoded


def set_parameter(
    target: Any,
    key: str,
    value: object,
    refusal: Callable[[str], ServingError] = invalid,
    what: str = "parameter",
) -> None:
    """Set an entry of a map of InferParameter.

    Raises:
        ServingError: INVALID_ARG for a value of an unsupported type, unless `refusal` is of another kind.
    """
    if isinstance(value, bool):
        field = "bool_param"
    elif isinstance(value, int):
        field = "uint64_param" if value > INT64_MAX else "int64_param"
    else:
        field = "double_param" if isinstance(value, float) else "string_param"
    try:
        setattr(target[key], field, value)
    except (TypeError, ValueError) as error:
        raise refusal(
            f"{what} '{key}': expected a boolean, an integer of 64 bits, a number or a string, got "
            f"{type(value).__name__}"
        ) from error
