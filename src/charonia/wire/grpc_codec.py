"""Inference requests as gRPC calls, and responses from gRPC messages. No I/O.

A message is assembled from parts. The order of fields does not matter in the protobuf format, so id and sequence flags
precede the part that was encoded once.

Source: KServe v2 protocol, gRPC, Triton's extensions of it, and "gRPC over HTTP/2".
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
from google.protobuf.message import DecodeError, Message

from charonia.core.dtypes import BY_WIRE, DataType
from charonia.core.errors import Code, ServingError, internal, invalid, unsupported
from charonia.core.request import SEQUENCE_END, SEQUENCE_START, InferRequest, ParameterValue, RequestedOutput
from charonia.core.response import InferResponse
from charonia.core.tensor import Array, Tensor
from charonia.schema.pool import message_class
from charonia.wire.endpoint import Endpoint
from charonia.wire.grpc_framing import Buffer, framed
from charonia.wire.grpc_headers import ACCEPT_ENCODING, Header, Headers
from charonia.wire.grpc_infer import EMPTY_FINAL, set_parameter, varint
from charonia.wire.grpc_status import STATUS_BY_CODE, Status
from charonia.wire.tensors import bytes_array, decode_tensor, encode_tensor
from charonia.wire.transport import RequestForm, SharedTensor, WireOptions

COMPRESSION_LEVEL = 6
"""zlib's level for requests."""

CODES: dict[int, Code] = {
    **{status: code for code, status in STATUS_BY_CODE.items()},
    Status.DEADLINE_EXCEEDED: Code.UNAVAILABLE,
    Status.RESOURCE_EXHAUSTED: Code.UNAVAILABLE,
    Status.FAILED_PRECONDITION: Code.INVALID_ARG,
    Status.OUT_OF_RANGE: Code.INVALID_ARG,
}
"""Code by status; every other one is UNKNOWN."""

_SERVICE = "/inference.GRPCInferenceService/"
_ENCODINGS = ("", "gzip", "deflate")
_NAME = re.compile("[0-9a-z_.-]+")
_VALUE = re.compile("[\x20-\x7e]*")
_WIDE = {"i": np.dtype(np.int64), "u": np.dtype(np.uint64)}
_RAW_INPUT_TAG = b"\x3a"
_ERROR_TAG = 0x0A
_RESERVED = ("content-type", "te", "host", "user-agent", "content-length", "connection", "transfer-encoding")
_TIMEOUT_US_MAX = 99_999_999


class GrpcRequest:
    """A call with one message, in the bytes of gRPC.

    Attributes:
        headers: Headers of the call.
        pieces: The message with its prefix, in pieces.
        byte_size: Size of all pieces.
        is_stream: Whether it may have several responses.
    """

    __slots__ = ("byte_size", "headers", "is_stream", "pieces")

    def __init__(self, headers: Headers, pieces: list[Buffer], is_stream: bool = False) -> None:
        self.headers = headers
        self.pieces = pieces
        self.byte_size = sum(map(len, pieces))
        self.is_stream = is_stream

    def to(self, authority: str) -> "GrpcRequest":
        """Return the call of the same method of another host and port."""
        wanted = authority_header(authority)
        if wanted in self.headers:
            return self
        headers = tuple(wanted if header[0] == wanted[0] else header for header in self.headers)
        return GrpcRequest(headers, self.pieces, self.is_stream)


class PreparedGrpc(GrpcRequest):
    """An encoded inference request, which can be resent as another part of a sequence."""

    __slots__ = ("_encoder", "_first", "_parts")

    def __init__(self, encoder: "GrpcEncoder", first: Message, parts: Sequence[Buffer], is_stream: bool) -> None:
        self._encoder = encoder
        self._first = first
        self._parts = parts
        headers = encoder.stream_headers if is_stream else encoder.infer_headers
        super().__init__(headers, encoder.framed([first.SerializeToString(), *parts]), is_stream)

    def with_sequence(self, correlation_id: int | str, start: bool, end: bool) -> "PreparedGrpc":
        """Return a copy as a part of a sequence."""
        first: Any = message_class("inference.ModelInferRequest")()
        first.CopyFrom(self._first)
        set_sequence(first, correlation_id, start, end)
        return PreparedGrpc(self._encoder, first, self._parts, self.is_stream)


class GrpcEncoder:
    """Encodes calls of one server.

    Args:
        endpoint: The server.
        options: Metadata and compression.

    Raises:
        ServingError: INVALID_ARG for invalid metadata or an unknown compression.
    """

    def __init__(self, endpoint: Endpoint, options: WireOptions) -> None:
        for encoding in (options.request_compression, options.response_compression):
            if encoding not in _ENCODINGS:
                raise invalid(f"compression '{encoding}': expected 'gzip', 'deflate' or ''")
        self._encoding = (options.request_compression or "identity").encode()
        self._scheme = b"https" if endpoint.tls else b"http"
        self._authority = authority_header(endpoint.authority)
        self._metadata = tuple(_metadata(name, value) for name, value in options.headers)
        self.infer_headers = self._headers("ModelInfer")
        self.stream_headers = self._headers("ModelStreamInfer")

    def call(self, method: str, message: Message, service: str = _SERVICE) -> GrpcRequest:
        """Return a call of a method of a service, by default that of inference."""
        return GrpcRequest(self._headers(method, service), self.framed([message.SerializeToString()]))

    def infer(self, request: InferRequest, form: RequestForm) -> PreparedGrpc:
        """Return an inference request.

        Raises:
            ServingError: UNSUPPORTED for tensors as JSON, INVALID_ARG for a parameter that gRPC cannot carry.
        """
        if form.json_inputs or form.json_outputs:
            raise unsupported("tensors cannot be sent as JSON over gRPC", hint="use HTTP")
        message: Any = message_class("inference.ModelInferRequest")()
        first: Any = message_class("inference.ModelInferRequest")()
        message.model_name = request.model_name
        message.model_version = str(request.model_version)
        first.id = request.id
        set_parameters(message.parameters, request.parameters)
        if request.correlation_id:
            start, end = bool(request.flags & SEQUENCE_START), bool(request.flags & SEQUENCE_END)
            set_sequence(first, request.correlation_id, start, end)
        if request.priority:
            set_parameter(message.parameters, "priority", request.priority)
        if request.timeout_us:
            set_parameter(message.parameters, "timeout", request.timeout_us)
        if form.streaming and form.empty_final:
            set_parameter(message.parameters, EMPTY_FINAL, True)
        raw: list[Buffer] = []
        for tensor in request.inputs.values():
            entry = message.inputs.add(name=tensor.name, datatype=tensor.datatype.wire, shape=tensor.shape)
            shared = form.shared_inputs.get(tensor.name)
            if shared is not None:
                _set_shared(entry.parameters, shared)
            else:
                data = encode_tensor(tensor)
                raw += (_RAW_INPUT_TAG + varint(len(data)), data)
        _set_outputs(message, request, form)
        return PreparedGrpc(self, first, [message.SerializeToString(), *raw], form.streaming)

    def framed(self, parts: Sequence[Buffer]) -> list[Buffer]:
        return framed(parts, self._encoding, COMPRESSION_LEVEL)

    def _headers(self, method: str, service: str = _SERVICE) -> Headers:
        encoding: Headers = ((b"grpc-encoding", self._encoding),) if self._encoding != b"identity" else ()
        return (
            (b":method", b"POST"),
            (b":scheme", self._scheme),
            (b":path", (service + method).encode()),
            self._authority,
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"user-agent", b"charonia"),
            ACCEPT_ENCODING,
            *encoding,
            *self._metadata,
        )


def authority_header(authority: str) -> Header:
    return b":authority", authority.encode("ascii" if authority.isascii() else "idna")


def timeout_header(timeout_s: float) -> Header:
    """Return the header with the caller's timeout."""
    microseconds = max(round(timeout_s * 1e6), 1)
    if microseconds <= _TIMEOUT_US_MAX:
        return b"grpc-timeout", b"%du" % microseconds
    return b"grpc-timeout", b"%dS" % min(round(timeout_s) or 1, _TIMEOUT_US_MAX)


def set_sequence(message: Any, correlation_id: int | str, start: bool, end: bool) -> None:
    set_parameters(message.parameters, {"sequence_id": correlation_id, "sequence_start": start, "sequence_end": end})


def set_parameters(target: Any, parameters: Mapping[str, ParameterValue]) -> None:
    """Set entries of a map of InferParameter. Raises as `set_parameter`."""
    for key, value in parameters.items():
        set_parameter(target, key, value)


def parsed(name: str, data: Buffer) -> Any:
    """Parse a message of the inference service.

    Raises:
        ServingError: INTERNAL when the bytes are not such a message.
    """
    try:
        return message_class(f"inference.{name}").FromString(data)  # type: ignore[arg-type]  # the parser takes any buffer
    except DecodeError as error:
        raise internal(f"the server's response is not a {name}") from error


def decode_response(data: Buffer) -> InferResponse:
    """Return the response in a ModelInferResponse, without outputs in shared memory.

    Raises:
        ServingError: INTERNAL for bytes that are not such a response.
    """
    return _response(parsed("ModelInferResponse", data))


def decode_stream_response(data: Buffer) -> InferResponse | ServingError:
    """Return the response in a ModelStreamInferResponse, or the error in it. Raises as `decode_response`."""
    message = parsed("ModelStreamInferResponse", data)
    if message.error_message:
        return ServingError(Code.UNKNOWN, message.error_message)
    return _response(message.infer_response)


def stream_error(data: Buffer) -> str:
    """Return the error in a ModelStreamInferResponse, "" for none. Raises as `decode_response`."""
    # If set, the field comes first, so most messages need no parser.
    if not len(data) or data[0] != _ERROR_TAG:
        return ""
    message: str = parsed("ModelStreamInferResponse", data).error_message
    return message


def decode_status_message(value: bytes) -> str:
    """Return the text of a `grpc-message` header."""
    return unquote_to_bytes(value).decode("utf-8", "replace")


def _response(message: Any) -> InferResponse:
    raw = message.raw_output_contents
    outputs: list[Tensor] = []
    used = 0
    try:
        for item in message.outputs:
            datatype, shape = BY_WIRE[item.datatype], tuple(item.shape)
            if used < len(raw):
                # Elements in shared memory leave an empty entry.
                if raw[used] or 0 in shape:
                    outputs.append(decode_tensor(item.name, datatype, shape, raw[used]))
                used += 1
            elif item.HasField("contents") or 0 in shape:
                outputs.append(Tensor(item.name, datatype, _contents(item.name, datatype, shape, item.contents)))
    except (ServingError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise internal(f"the server's response is not an inference response: {error}") from error
    if used != len(raw):
        raise internal(f"the server's response is not an inference response: {len(raw)} raw outputs, {used} expected")
    parameters: dict[str, ParameterValue] = {}
    for key, value in message.parameters.items():
        choice = value.WhichOneof("parameter_choice")
        if choice is not None:
            parameters[key] = getattr(value, choice)
    return InferResponse(message.model_name, message.model_version, message.id, outputs, parameters)


def _contents(name: str, datatype: DataType, shape: tuple[int, ...], contents: Any) -> Array:
    fields = contents.ListFields()
    elements = fields[0][1] if fields else ()
    if datatype is DataType.BYTES:
        return bytes_array(name, shape, elements)
    wide = _WIDE.get(datatype.numpy.kind, datatype.numpy)
    return np.fromiter(elements, wide, len(elements)).astype(datatype.numpy).reshape(shape)


def _set_outputs(message: Any, request: InferRequest, form: RequestForm) -> None:
    wanted = {output.name: output for output in request.outputs}
    for name in form.shared_outputs:
        wanted.setdefault(name, RequestedOutput(name))
    for output in wanted.values():
        entry = message.outputs.add(name=output.name)
        shared = form.shared_outputs.get(output.name)
        if shared is not None:
            _set_shared(entry.parameters, shared)
        elif output.classification:
            entry.parameters["classification"].int64_param = output.classification


def _set_shared(parameters: Any, tensor: SharedTensor) -> None:
    parameters["shared_memory_region"].string_param = tensor.region
    parameters["shared_memory_byte_size"].int64_param = tensor.byte_size
    if tensor.offset:
        parameters["shared_memory_offset"].int64_param = tensor.offset


def _metadata(name: str, value: str) -> Header:
    lower = name.lower()
    if not _NAME.fullmatch(lower) or lower.startswith("grpc-") or lower in _RESERVED:
        raise invalid(f"metadata '{name}': expected a name that the client does not set itself")
    if not _VALUE.fullmatch(value):
        raise invalid(f"metadata '{name}': the value contains characters other than printable ASCII")
    return lower.encode(), value.strip().encode()
