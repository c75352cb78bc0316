"""The digest of a request: equal only for requests that a model cannot distinguish. Pure.

It covers everything that a model may see and that may change its answer: the names, datatypes, shapes and bytes of the
inputs in the order they were sent, the requested outputs, and the parameters where a model gets them. Each part is
written with its length or number in front, so no two requests have the same encoding, which is hashed with SHA-256. A
faster hash without cryptographic strength would let a client construct two requests with the same key.
"""

import struct
from collections.abc import Iterable
from hashlib import sha256

import numpy as np

from charonia.core.dtypes import DataType
from charonia.core.request import InferRequest, ParameterValue
from charonia.core.tensor import Array, Tensor

_LENGTH = struct.Struct("<Q")
_INTEGERS = struct.Struct("<q")

# A tag for each type: 1, 1.0, True and "1" are different values.
_TAGS: dict[type, bytes] = {bool: b"b", int: b"i", float: b"f", str: b"s"}


def request_digest(request: InferRequest, *, with_parameters: bool) -> bytes:
    """Return the digest of a request.

    Args:
        request: The request; its arrays must not change during the call.
        with_parameters: Whether the model gets the parameters of a request.
    """
    digest = sha256()
    head = [_INTEGERS.pack(len(request.inputs))]
    tensors = request.inputs.values()
    for tensor in tensors:
        head += (_text(tensor.name), _text(tensor.datatype.wire), _shape(tensor.array.shape))
    head.append(_INTEGERS.pack(len(request.outputs)))
    for output in request.outputs:
        head += (_text(output.name), _INTEGERS.pack(output.classification))
    if with_parameters:
        head.append(_INTEGERS.pack(len(request.parameters)))
        head += [_text(key) + _value(value) for key, value in sorted(request.parameters.items())]
        head += (_value(request.correlation_id), _value(request.flags))
    digest.update(_part(b"".join(head)))
    for tensor in tensors:
        if tensor.datatype is DataType.BYTES:
            digest.update(_part(_strings(tensor.array)))
        else:
            array = tensor.array if tensor.array.flags.c_contiguous else np.ascontiguousarray(tensor.array)
            digest.update(array.reshape(-1).view(np.uint8).data)  # its size is known from datatype and shape
    return digest.digest()


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(8 * t.array.size if t.datatype is DataType.BYTES else t.array.nbytes for t in tensors)


def is_private(array: Array) -> bool:
    """Whether an array is a view of immutable bytes: of a received message, not of shared memory."""
    base: object = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    return isinstance(base.obj if isinstance(base, memoryview) else base, bytes)


def _part(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _text(text: str) -> bytes:
    return _part(text.encode(errors="surrogatepass"))


def _shape(shape: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(shape) + 1}q", len(shape), *shape)


def _value(value: ParameterValue) -> bytes:
    return _TAGS[type(value)] + _text(value.hex() if isinstance(value, float) else str(value))


def _strings(array: Array) -> bytes:
    strings = array.reshape(-1).tolist()
    lengths = np.fromiter(map(len, strings), "<u8", len(strings))
    return lengths.tobytes() + b"".join(strings)
