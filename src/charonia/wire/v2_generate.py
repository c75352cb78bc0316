"""The generate extension: tensors as plain members of a JSON object, as used for language models.

A key that names an input of the model sets that tensor; every other key is a request parameter. `id` is the request's
id, and `parameters` an object of more keys under the same rule. A response has a key for each output and parameter,
and an array of one element is written as that element. For an input of strings, objects are taken as their JSON text,
apart from `{"b64": "..."}`, which stands for bytes. Inputs and outputs of functions have the form of `plain_values`.

The shape of nested arrays is that of their nesting; the batch may be left out. That of a flat array follows from the
number of elements and the configuration: the last variable dimension takes all elements, the others are 1. Source:
Triton's generate extension, which refuses nested arrays.
"""

import codecs
import difflib
import json
import re
from base64 import b64decode
from collections.abc import Mapping
from itertools import chain
from math import prod
from typing import NamedTuple

import numpy as np

from charonia.config.model import ModelConfig, ModelInput
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, internal, invalid
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse
from charonia.core.tensor import Tensor
from charonia.wire.json_text import Object, dump, is_literal, kind_of, parse_object, string_at
from charonia.wire.plain_values import (
    CONTENT,
    PlainValues,
    Schema,
    from_base64,
    json_texts,
    plain_output,
    plain_values,
    with_missing,
)
from charonia.wire.tables import RECORDS, table_document
from charonia.wire.v2_data import check_elements, decode_data, encode_data, flat_and_nesting, has_literals
from charonia.wire.v2_request import apply_parameters

NESTED = "parameters"
"""The key of an object with more keys."""

HTTP_CONTENT_TYPE, HTTP_STATUS, HTTP_HEADERS = "http_content_type", "http_status", "http_headers"
"""Response parameters of a function that chose its body; headers are a JSON object."""

BARE = "output"
"""Name of the only output of a function that returns one value."""

_FIELD_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_FIELD_VALUE = re.compile(r"[\t\x20-\x7e\xa0-\xff]*")
_FRAMING = frozenset({"connection", "content-encoding", "content-length", "transfer-encoding", "upgrade"})

RESERVED = frozenset({"binary_data_output", "priority", "sequence_end", "sequence_id", "sequence_start", "timeout"})
"""Parameters of requests, which no model needs to know."""


class GenerateCall(NamedTuple):
    """A request, with the conditions for the form of its response.

    Attributes:
        request: The request.
        config: The model's configuration.
        is_list: Whether an input of a model with a batch dimension was a list of values.
        is_bare: Whether the response has the outputs only, and of a single one named `output` its value.
    """

    request: InferRequest
    config: ModelConfig
    is_list: bool
    is_bare: bool = False


def decode_generate(
    config: ModelConfig, version: str, body: bytes | memoryview, tensor_bytes_max: int, form: Object | None = None
) -> GenerateCall:
    """Return the request in a body.

    Args:
        config: The model's configuration.
        version: Version of the URL, "" for none.
        body: A JSON object.
        tensor_bytes_max: Largest size of a tensor in bytes.
        form: The object that the body stands for if it is no JSON, see `form_document`.

    Raises:
        ServingError: INVALID_ARG, with the problem.
    """
    inputs = {tensor.name: tensor for tensor in config.input if tensor.data_type is not None}
    if form is None:
        text = bytes(body)
        document = parse_object(text, array_as=RECORDS)
        _check_unique(text, inputs)
        document = table_document(config, document)
    else:
        document = form
    schemas = plain_values(config) or PlainValues()
    has_batch = config.max_batch_size > 0
    is_list = False
    tensors: dict[str, Tensor] = {}
    parameters: Object = {}
    for members in (document, _nested(document)):
        for key, value in members.items():
            tensor = inputs.get(key)
            if tensor is None:
                if members is not document or key not in ("id", NESTED):
                    parameters[key] = value
            elif key in tensors:
                raise _repeated(key)
            elif value is not None or not tensor.optional:
                schema = schemas.inputs.get(key, {})
                tensors[key], is_one = _input(tensor, schema, value, tensor_bytes_max, has_batch=has_batch)
                is_list = is_list or not is_one
    if parameters:
        _check_keys(config, tensors, parameters)
    request = InferRequest(config.name, tensors, model_version=version)
    if "id" not in inputs:
        request.id = string_at(document, "id")
    apply_parameters(request, parameters)
    return GenerateCall(request, config, is_list)


def _input(
    model_input: ModelInput, schema: Schema, value: object, bytes_max: int, *, has_batch: bool
) -> tuple[Tensor, bool]:
    """Return an input, and whether it is one value rather than a list of them for the batch."""
    name, datatype = model_input.name, model_input.data_type
    assert datatype is not None
    dims = (-1, *model_input.dims) if has_batch else model_input.dims
    value = with_missing(schema, datatype, value)
    if CONTENT in schema:
        texts, shape = json_texts(schema[CONTENT], value, has_batch=has_batch)
        return decode_data(name, datatype, (*(shape or (1,) * has_batch), 1), texts, bytes_max), not shape
    if datatype is DataType.BYTES:
        value = with_json_text(from_base64(name, value), dims)
    elements, nesting = flat_and_nesting(name, datatype, value)
    if len(nesting) < 2 and (schema.get("type") != "array" or "prefixItems" in schema):
        try:
            shape = infer_shape(name, dims, len(elements))
        except ServingError:
            check_elements(name, datatype, elements)
            raise
    else:
        shape = _nested_shape(name, model_input.dims, nesting, has_batch=has_batch)
    is_one = len(nesting) < len(dims) and shape[:1] == (1,) and not (model_input.dims == (1,) and nesting)
    return decode_data(name, datatype, shape, elements, bytes_max), is_one or not has_batch


def with_json_text(value: object, dims: tuple[int, ...]) -> object:
    """Return the value of an input of strings with JSON text in place of objects.

    A list with objects is one text where the input has one element, else each object is one.

    Args:
        value: What JSON has for the input.
        dims: Dimensions of the input, including the batch; -1 for variable ones.
    """
    if type(value) is list and any(type(element) is dict for element in value):
        if any(dim != 1 for dim in dims):
            return [with_json_text(element, ()) for element in value]
    elif type(value) is not dict:
        return value
    return dump(value, literals=True).decode()


def infer_shape(name: str, dims: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the shape of an input with a number of elements.

    Args:
        name: Name of the input.
        dims: Its dimensions, including the batch; -1 for variable ones.
        count: Number of elements.

    Raises:
        ServingError: INVALID_ARG if no shape fits.
    """
    fixed = prod(dim for dim in dims if dim != -1)
    last = max((index for index, dim in enumerate(dims) if dim == -1), default=None)
    if count % fixed or (last is None and count != fixed):
        raise invalid(
            f"The schema can not convert input '{name}' to tensor with proper shape: its shape is {list(dims)}, "
            f"got {count} element{'s' * (count != 1)}"
        )
    return tuple((count // fixed if index == last else 1) if dim == -1 else dim for index, dim in enumerate(dims))


def encode_generated(response: InferResponse, call: GenerateCall | None = None) -> bytes:
    """Return a response as a JSON object. Outputs of a function have the form that its `call` asks for.

    Raises:
        ServingError: INVALID_ARG when JSON cannot carry an output.
    """
    is_bare = call is not None and call.is_bare
    document: dict[str, object] = {"id": response.id} if response.id and not is_bare else {}
    literals = False
    if not is_bare:
        document["model_name"] = response.model_name
        document["model_version"] = response.model_version
        document.update(response.parameters)
        literals = any(map(is_literal, response.parameters.values()))
    values = plain_values(call.config) if call is not None else None
    for tensor in response.outputs:
        if call is not None and values is not None:
            schema = values.outputs.get(tensor.name, {})
            document[tensor.name] = plain_output(call.config, schema, tensor, is_list=call.is_list)
            continue
        data = encode_data(tensor)
        if not isinstance(data, list):
            literals = literals or has_literals(data)
        document[tensor.name] = data if len(data) != 1 else data[0]
    return dump(document[BARE] if is_bare and document.keys() == {BARE} else document, literals=literals)


class RawAnswer(NamedTuple):
    """A response that is the content of an output, not JSON."""

    status: int
    body: bytes
    content_type: bytes
    headers: bytes


def raw_answer(response: InferResponse, call: GenerateCall, accept: bytes) -> RawAnswer | None:
    """Return the response of a function that chose its body, or of one with a picture where the client asks for one.

    Args:
        response: The response.
        call: Its request.
        accept: The client's header field, b"" for none.

    Raises:
        ServingError: INTERNAL for a content type, status or header field that HTTP cannot carry.
    """
    if len(response.outputs) != 1 or response.outputs[0].array.size != 1 or plain_values(call.config) is None:
        return None
    content = bytes(response.outputs[0].array.ravel()[0]) if response.outputs[0].datatype is DataType.BYTES else b""
    content_type = response.parameters.get(HTTP_CONTENT_TYPE)
    if content_type is None:
        kind, _, encoded = content.partition(b";base64,")
        is_asked = kind.startswith(b"data:image/") and (kind[5:] in accept or b"image/*" in accept)
        return RawAnswer(200, b64decode(encoded), kind[5:], b"") if is_asked else None
    status = response.parameters.get(HTTP_STATUS, 200)
    fields = {"content-type": content_type, **json.loads(str(response.parameters.get(HTTP_HEADERS, "{}")))}
    for name, value in fields.items():
        if not _FIELD_NAME.fullmatch(name) or name.lower() in _FRAMING or not _FIELD_VALUE.fullmatch(str(value)):
            raise internal(
                f"model '{call.config.name}' returned the header field '{name}: {value}', which HTTP cannot carry"
            )
    if type(status) is not int or not 200 <= status <= 599:
        raise internal(f"model '{call.config.name}' returned the HTTP status {status}, expected 200 to 599")
    lines = [f"{name}: {value}\r\n".encode("latin-1") for name, value in list(fields.items())[1:]]
    return RawAnswer(status, content, str(content_type).encode("latin-1"), b"".join(lines))


class StreamedText:
    """Encodes the responses of one request, whose strings may end within a UTF-8 character.

    The bytes of such a character wait for the next response that continues it. A string that starts anew does not
    continue it: its model repeats the text so far.
    """

    def __init__(self, call: GenerateCall | None = None) -> None:
        self._call = call
        self._held: dict[tuple[str, int], bytes] = {}

    def encode(self, response: InferResponse) -> bytes:
        """Return a response as a JSON object.

        Raises:
            ServingError: INVALID_ARG when JSON cannot carry an output.
        """
        if not self._held:
            try:
                return encode_generated(response, self._call)
            except ServingError:
                pass  # a string may end within a character
        outputs = [self._continued(each) if each.datatype is DataType.BYTES else each for each in response.outputs]
        names = (response.model_name, response.model_version, response.id)
        return encode_generated(InferResponse(*names, outputs, response.parameters), self._call)

    def end(self) -> ServingError | None:
        """Return an error if the last response ended within a character, None otherwise."""
        if not self._held:
            return None
        name = next(iter(self._held))[0]
        return invalid(f"output '{name}' ends within a UTF-8 character", hint="send the rest of its bytes")

    def _continued(self, tensor: Tensor) -> Tensor:
        elements = [self._whole((tensor.name, place), text) for place, text in enumerate(tensor.array.ravel().tolist())]
        array = np.empty(len(elements), object)
        array[:] = elements
        return Tensor(tensor.name, tensor.datatype, array.reshape(tensor.array.shape))

    def _whole(self, key: tuple[str, int], text: bytes) -> bytes:
        """Return the whole characters of a string, and hold back the bytes of one that is incomplete."""
        if not text:
            return text
        text = self._held.pop(key, b"") * (text[0] & 0xC0 == 0x80) + text
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            decoder.decode(text)
        except UnicodeDecodeError:
            return text  # not text at all: the caller reports it
        held = decoder.getstate()[0]
        if held:
            self._held[key] = held
        return text[: len(text) - len(held)]


def _check_keys(config: ModelConfig, tensors: Mapping[str, Tensor], parameters: Object) -> None:
    """Refuse an unknown key that was probably meant as a missing input.

    It is if it resembles that one, if it has a value that no parameter can have, or if no key is an input.

    Raises:
        ServingError: INVALID_ARG with the inputs of the model.
    """
    others = [key for key in parameters if key not in RESERVED]
    left_out = [tensor.name for tensor in config.input if tensor.optional and tensor.name not in tensors]
    missing = [tensor.name for tensor in config.input if not tensor.optional and tensor.name not in tensors]
    if not missing:
        missing = [each for each in left_out if difflib.get_close_matches(each, others, n=1, cutoff=0.8)]
    if not missing:
        return
    near = {key: names[0] for key in others if (names := difflib.get_close_matches(key, missing, n=1))}
    likely = [key for key in others if not tensors or isinstance(parameters[key], list | dict)]
    unknown = next(chain(near, likely), None)
    if unknown is None:
        return
    inputs = ", ".join(tensor.name for tensor in config.input)
    raise invalid(
        f"model '{config.name}' has no input '{unknown}', and the request lacks {', '.join(missing)}",
        hint=f"its inputs are {inputs}" + (f"; did you mean '{near[unknown]}'?" if near else ""),
    )


def _nested(document: Object) -> Object:
    nested = document.get(NESTED, {})
    if type(nested) is not dict:
        raise invalid(f"Expected JSON object for keyword: '{NESTED}', got {kind_of(nested)}")
    return nested


def _nested_shape(name: str, dims: tuple[int, ...], nesting: tuple[int, ...], *, has_batch: bool) -> tuple[int, ...]:
    """Return the shape of nested arrays, which are one element of a batch where their depth is that of the input.

    Raises:
        ServingError: INVALID_ARG if the input has another shape.
    """
    if nesting[-1:] == (0,):  # an empty array does not tell the sizes within it
        nesting += tuple(max(dim, 0) for dim in dims[len(nesting) :])
    shape = (1, *nesting) if has_batch and len(nesting) == len(dims) else nesting
    expected = (-1, *dims) if has_batch else dims
    if len(shape) != len(expected) or any(dim not in (-1, size) for dim, size in zip(expected, shape, strict=True)):
        raise invalid(f"input '{name}': expected an array of shape {list(expected)}, got {list(nesting)}")
    return shape


def _check_unique(text: bytes, inputs: Mapping[str, object]) -> None:
    """Refuse an input that occurs twice in one object, which a parser does not report."""
    if all(text.count(b'"%b"' % name.encode()) < 2 for name in inputs):
        return

    def pairs(members: list[tuple[str, object]]) -> Object:
        names = [name for name, _ in members if name in inputs]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise _repeated(name)
        return dict(members)

    json.loads(text.decode(), object_pairs_hook=pairs)


def _repeated(name: str) -> ServingError:
    return invalid(f"input '{name}' already exists in request")
