"""Inference requests as HTTP requests, and responses from HTTP bodies. No I/O.

A request is encoded in parts that are joined when it is sent, because sequence flags and id change but tensors do not.

Source: KServe v2 protocol, HTTP/REST, and Triton's binary tensor data, parameters, classification, sequence and shared
memory extensions.
"""

import re
from collections.abc import Mapping, Sequence
from urllib.parse import quote

import orjson

from charonia.core.dtypes import BY_WIRE
from charonia.core.errors import Code, ServingError, internal, invalid, unsupported
from charonia.core.request import SEQUENCE_END, SEQUENCE_START, InferRequest, RequestedOutput
from charonia.core.response import InferResponse
from charonia.core.tensor import Tensor
from charonia.wire.compression import compress
from charonia.wire.endpoint import Endpoint
from charonia.wire.json_text import dump, is_literal, parse_object
from charonia.wire.tensors import decode_tensor, encode_tensor
from charonia.wire.transport import RequestForm, SharedTensor, WireOptions
from charonia.wire.v2_data import decode_data, encode_data

JOINED_BYTES_MAX = 64 * 1024
"""Up to this size, head and body are sent in one piece; joining larger ones costs more than a second write."""

TENSOR_BYTES_MAX = 2**31
"""Largest tensor in a JSON response, in bytes."""

Buffer = bytes | memoryview

_CODINGS = ("", "gzip", "deflate")
_TOKEN = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz")
_VALUE = re.compile("[\t\x20-\x7e\xa0-\xff]*")
_OWN_HEADERS = frozenset(
    ("host", "content-length", "transfer-encoding", "connection", "inference-header-content-length")
)


CODES: dict[int, Code] = {
    400: Code.INVALID_ARG,
    404: Code.NOT_FOUND,
    408: Code.UNAVAILABLE,
    413: Code.INVALID_ARG,
    429: Code.UNAVAILABLE,
    500: Code.INTERNAL,
    501: Code.UNSUPPORTED,
    502: Code.UNAVAILABLE,
    503: Code.UNAVAILABLE,
    504: Code.UNAVAILABLE,
}
"""Code by status of an error; every other one is UNKNOWN."""


_HOST = b"\r\nHost: "  # the first header of every request


class HttpRequest:
    """A request in the bytes of HTTP.

    Attributes:
        pieces: The bytes to write, in order; a single piece if it is small.
        byte_size: Size of all pieces.
    """

    __slots__ = ("byte_size", "pieces")

    def __init__(self, head: bytes, body: Sequence[Buffer]) -> None:
        self.byte_size = len(head) + sum(map(len, body))
        whole = self.byte_size <= JOINED_BYTES_MAX
        self.pieces: list[Buffer] = [b"".join((head, *body))] if whole else [head, *body]

    def to(self, authority: str) -> "HttpRequest":
        """Return the request to the same path of another host and port."""
        head = bytes(self.pieces[0])
        begin = head.index(_HOST) + len(_HOST)
        end = head.index(b"\r\n", begin)
        wanted = authority.encode("latin-1")
        if head[begin:end] == wanted:
            return self
        return HttpRequest(b"".join((head[:begin], wanted, head[end:])), self.pieces[1:])


class PreparedHttp(HttpRequest):
    """An encoded inference request, which can be resent as another part of a sequence."""

    __slots__ = ("_blobs", "_encoder", "_fields", "_parameters", "_path", "_tensors")

    def __init__(
        self,
        encoder: "HttpEncoder",
        path: str,
        fields: Mapping[str, object],
        parameters: Mapping[str, object],
        tensors: bytes,
        blobs: Sequence[Buffer],
    ) -> None:
        self._encoder = encoder
        self._path = path
        self._fields = fields
        self._parameters = parameters
        self._tensors = tensors
        self._blobs = blobs
        document = {**fields, "parameters": parameters} if parameters else fields
        text = (
            dump(document, literals=any(map(is_literal, parameters.values())))[:-1]
            + (b"," if document else b"")
            + tensors
            + b"}"
        )
        super().__init__(*encoder.infer_parts(path, text, blobs))

    def with_sequence(self, correlation_id: int | str, start: bool, end: bool) -> "PreparedHttp":
        parameters = {**self._parameters, **_sequence(correlation_id, start, end)}
        return PreparedHttp(self._encoder, self._path, self._fields, parameters, self._tensors, self._blobs)

    def with_timeout(self, timeout_us: int) -> "PreparedHttp":
        """Return a copy with this queue timeout."""
        parameters = {**self._parameters, "timeout": timeout_us}
        return PreparedHttp(self._encoder, self._path, self._fields, parameters, self._tensors, self._blobs)


class HttpEncoder:
    """Encodes requests to one server.

    Args:
        endpoint: The server.
        options: Headers and compression.

    Raises:
        ServingError: INVALID_ARG for an invalid header or an unknown compression.
    """

    def __init__(self, endpoint: Endpoint, options: WireOptions) -> None:
        for coding in (options.request_compression, options.response_compression):
            if coding not in _CODINGS:
                raise invalid(f"compression '{coding}': expected 'gzip', 'deflate' or ''")
        self._prefix = quote(endpoint.prefix, safe="/%")
        self._coding = options.request_compression
        fields = [f"Host: {endpoint.authority}", *(_field(name, value) for name, value in options.headers)]
        if options.response_compression:
            fields.append(f"Accept-Encoding: {options.response_compression}")
        self._head = "".join(f"{field}\r\n" for field in fields).encode("latin-1")

    def request(self, method: str, path: str, body: bytes = b"") -> HttpRequest:
        """Return a request other than an inference, with JSON as its body."""
        fields = b"Content-Type: application/json\r\n" if body else b""
        return HttpRequest(self._request_head(method, path, len(body), fields), [body] if body else [])

    def infer(self, request: InferRequest, form: RequestForm) -> PreparedHttp:
        """Return an inference request.

        Raises:
            ServingError: INVALID_ARG for a tensor that JSON cannot carry, UNSUPPORTED for streaming.
        """
        if form.streaming:
            raise unsupported("streaming is not possible over HTTP", hint="use gRPC")
        blobs: list[Buffer] = []
        inputs = [_input(tensor, form, blobs) for tensor in request.inputs.values()]
        tensors: dict[str, object] = {"inputs": inputs}
        parameters: dict[str, object] = dict(request.parameters)
        wanted = {output.name: output for output in request.outputs}
        for name in form.shared_outputs:
            wanted.setdefault(name, RequestedOutput(name))
        if wanted:
            tensors["outputs"] = [_output(output, form) for output in wanted.values()]
        elif not form.json_outputs:
            parameters["binary_data_output"] = True
        if request.correlation_id:
            start, end = bool(request.flags & SEQUENCE_START), bool(request.flags & SEQUENCE_END)
            parameters |= _sequence(request.correlation_id, start, end)
        if request.priority:
            parameters["priority"] = request.priority
        if request.timeout_us:
            parameters["timeout"] = request.timeout_us
        path = model_path(request.model_name, request.model_version) + "/infer"
        fields = {"id": request.id} if request.id else {}
        text = dump(tensors, literals=form.json_inputs)
        return PreparedHttp(self, path, fields, parameters, text[1:-1], blobs)

    def infer_parts(self, path: str, text: bytes, blobs: Sequence[Buffer]) -> tuple[bytes, Sequence[Buffer]]:
        """Return head and body of an inference request."""
        body: Sequence[Buffer] = [text, *blobs]
        if blobs:
            fields = b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n" % len(text)
        else:
            fields = b"Content-Type: application/json\r\n"
        if self._coding:
            body = [compress(list(body), self._coding)]
            fields += b"Content-Encoding: %b\r\n" % self._coding.encode()
        return self._request_head("POST", path, sum(map(len, body)), fields), body

    def _request_head(self, method: str, path: str, length: int, fields: bytes) -> bytes:
        line = f"{method} {self._prefix}{path} HTTP/1.1\r\n".encode("ascii")
        size = b"Content-Length: %d\r\n" % length if length or method != "GET" else b""
        return b"".join((line, self._head, fields, size, b"\r\n"))


def model_path(model: str, version: str) -> str:
    """Return the path of a model, or of a version of it."""
    path = f"/v2/models/{quote(model, safe='')}"
    return path if version == "" else f"{path}/versions/{quote(str(version), safe='')}"


def decode_response(body: Buffer, json_bytes: int) -> InferResponse:
    """Return the response in a body, without outputs in shared memory.

    Args:
        body: The whole body, decompressed.
        json_bytes: Bytes of JSON at its start, -1 when all of it is JSON.

    Raises:
        ServingError: INTERNAL for a body that does not follow the protocol.
    """
    size = len(body) if json_bytes < 0 else json_bytes
    if size > len(body):
        raise _no_response(f"it ends within its JSON: expected {size} bytes, got {len(body)}")
    view = memoryview(body)
    try:
        document = parse_object(view[:size])
        outputs, position = _outputs(document.get("outputs", []), view, size)
        parameters = document.get("parameters", {})
        if type(parameters) is not dict:
            raise invalid("'parameters' is not an object")
    except (ServingError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise _no_response(str(error)) from error
    if position != len(view):
        raise _no_response(f"{len(view) - position} bytes are left over")
    return InferResponse(
        str(document.get("model_name", "")),
        str(document.get("model_version", "")),
        str(document.get("id", "")),
        outputs,
        parameters,
    )


def error_message(body: Buffer, status: int) -> str:
    """Return the server's message in the body of an error, which may be an event of a stream."""
    try:
        document = orjson.loads(bytes(body).removeprefix(b"data: "))
    except orjson.JSONDecodeError:
        text = bytes(body[:400]).decode("utf-8", "replace").strip()
        return f"HTTP status {status}: {text}" if text else f"HTTP status {status}"
    message = document.get("error") if type(document) is dict else None
    if type(message) is dict:  # OpenAI's form
        message = message.get("message")
    return message if type(message) is str and message else f"HTTP status {status}"


def _outputs(entries: object, view: memoryview, position: int) -> tuple[list[Tensor], int]:
    if type(entries) is not list:
        raise invalid("'outputs' is not an array")
    outputs: list[Tensor] = []
    for entry in entries:
        name, datatype, shape = entry["name"], BY_WIRE[entry["datatype"]], entry["shape"]
        if any(type(dim) is not int or dim < 0 for dim in shape):
            raise invalid(f"output '{name}': {shape!r:.80} is not a shape")
        parameters = entry.get("parameters", {})
        size = parameters.get("binary_data_size")
        if size is not None:
            end = position + size
            if size < 0 or end > len(view):
                raise invalid(f"output '{name}' ends too early: {size} bytes expected, {len(view) - position} left")
            outputs.append(decode_tensor(name, datatype, shape, view[position:end]))
            position = end
        elif "data" in entry:
            outputs.append(decode_data(name, datatype, shape, entry["data"], TENSOR_BYTES_MAX))
    return outputs, position


def _input(tensor: Tensor, form: RequestForm, blobs: list[Buffer]) -> dict[str, object]:
    entry: dict[str, object] = {"name": tensor.name, "datatype": tensor.datatype.wire, "shape": list(tensor.shape)}
    shared = form.shared_inputs.get(tensor.name)
    if shared is not None:
        entry["parameters"] = _shared(shared)
    elif form.json_inputs:
        entry["data"] = encode_data(tensor)
    else:
        blob = encode_tensor(tensor)
        entry["parameters"] = {"binary_data_size": len(blob)}
        blobs.append(blob)
    return entry


def _output(output: RequestedOutput, form: RequestForm) -> dict[str, object]:
    parameters: dict[str, object] = {"binary_data": True} if not form.json_outputs else {}
    shared = form.shared_outputs.get(output.name)
    if shared is not None:
        parameters = _shared(shared)
    elif output.classification:
        parameters["classification"] = output.classification
    return {"name": output.name, "parameters": parameters} if parameters else {"name": output.name}


def _shared(tensor: SharedTensor) -> dict[str, object]:
    place: dict[str, object] = {"shared_memory_region": tensor.region, "shared_memory_byte_size": tensor.byte_size}
    if tensor.offset:
        place["shared_memory_offset"] = tensor.offset
    return place


def _sequence(correlation_id: int | str, start: bool, end: bool) -> dict[str, object]:
    return {"sequence_id": correlation_id, "sequence_start": start, "sequence_end": end}


def _field(name: str, value: str) -> str:
    if not name or not _TOKEN.issuperset(name.lower()) or name.lower() in _OWN_HEADERS:
        raise invalid(f"header '{name}': expected a name that the client does not set itself")
    if not _VALUE.fullmatch(value):
        raise invalid(f"header '{name}': the value contains characters that headers do not allow")
    return f"{name}: {value.strip()}"


def _no_response(reason: str) -> ServingError:
    return internal(f"the server's response is not an inference response: {reason}")
