"""What is read of a ModelInferRequest without protobuf's parser: its `raw_input_contents`, the bytes of its tensors.

Those of a large message are cut out as views before the parser, which would copy them, sees the rest. Small messages of
a client often differ in them only: their form is cached, and the parser does not see another message of that form.
"""

from typing import NamedTuple

import numpy as np

from charonia.core.dtypes import DataType
from charonia.core.request import InferRequest, RequestedOutput
from charonia.core.tensor import Tensor
from charonia.wire.grpc_framing import Buffer

FORMS_MAX = 512
"""Limit of cached forms of messages; beyond it, the cache is cleared."""

FORM_BYTES_MAX = 2048
"""Most bytes before the tensors of a message whose form is cached."""

TOP_LEVEL_FIELDS_MAX = 256
"""Messages with more fields than this go to the parser as a whole."""

_RAW_INPUTS_TAG = 0x3A


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
        name: Its name.
        datatype: Its datatype, of a fixed size.
        dtype: The same for numpy.
        shape: Its shape.
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
        model_name: The model.
        model_version: Its version, "" for none.
        outputs: The requested outputs.
        inputs: The inputs.
    """

    head: bytes
    model_name: str
    model_version: str
    outputs: tuple[RequestedOutput, ...]
    inputs: tuple[_PlacedInput, ...]


_forms: dict[tuple[int, bytes], _Form] = {}
"""By the length of the message and its first field, the model's name; the last form that was seen of each."""


def cached_request(data: bytes) -> InferRequest | None:
    """Return the request in a message whose form is cached, None if it is not."""
    form = _forms.get(_key(data))
    if form is None or not data.startswith(form.head):
        return None
    inputs: dict[str, Tensor] = {}
    for name, datatype, dtype, shape, before, start, position in form.inputs:
        if not data.startswith(before, start):
            return None
        inputs[name] = Tensor(name, datatype, np.ndarray(shape, dtype, data, position))
    return InferRequest(form.model_name, inputs, model_version=form.model_version, outputs=form.outputs)


def cache_form(data: bytes, request: InferRequest) -> None:
    """Cache the form of a message, if nothing but the elements of its inputs follows its head.

    Args:
        data: The message.
        request: The request in it, without an id, parameters and tensors in shared memory.
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
    _forms[_key(data)] = _Form(bytes(head), request.model_name, request.model_version, request.outputs, tuple(inputs))


def _key(data: bytes) -> tuple[int, bytes]:
    return len(data), data[: 2 + data[1]] if len(data) > 1 else data
