"""The tensors of a model, without the batch dimension, the steps and streams that match them, and conversions to them.

Conversions of numbers and strings from files are lenient in form and exact in value: integers are accepted as
floating-point numbers, whole floating-point numbers as integers, 0 and 1 as booleans, and nested lists as flat ones. A
conversion that would change a value (2.5 or 300 for UINT8) is an error.
"""

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, invalid
from charonia.core.metadata import ModelMetadata, TensorMetadata
from charonia.core.tensor import Array, to_bfloat16
from charonia.wire.tensors import bytes_array, decode_elements, decode_tensor

Item = dict[str, Array]
"""Arrays by tensor name, without the batch dimension."""

FILE_BYTES_MAX = 4 * 2**30
"""Largest file of input data."""


@dataclass(frozen=True, slots=True)
class InputStep:
    """An item to send.

    Attributes:
        expected: Expected outputs, None without validation data.
        where: Its place in a file, for messages, e.g. `data.json: step 3`.
    """

    inputs: Item
    expected: Mapping[str, Array] | None = None
    where: str = ""


Stream = list[InputStep]
"""Steps in the order in which they are sent."""


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of a model.

    Attributes:
        shape: Shape of one item, without the batch dimension; -1 for a variable dimension that `--shape` does not set.
        optional: Whether a request may omit it.
        declared: The model's own shape if `--shape` has replaced it, else None.
    """

    name: str
    datatype: DataType
    shape: Shape
    optional: bool = False
    declared: Shape | None = None

    @property
    def is_fixed(self) -> bool:
        return -1 not in self.shape

    def fits(self, shape: Shape) -> bool:
        """Return whether an item may have this shape."""
        declared = self.shape if self.declared is None else self.declared
        return len(shape) == len(declared) and all(want in (-1, got) for want, got in zip(declared, shape, strict=True))

    def __str__(self) -> str:
        return f"{self.datatype.wire} of shape {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The form of requests to a model.

    Attributes:
        version: Version to request, "" for the server's choice.
        max_batch_size: Limit of items in a request; 0 for a model without batch dimension.
    """

    name: str
    version: str
    max_batch_size: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...] = field(default=())

    def input(self, name: str) -> TensorSpec | None:
        return next((spec for spec in self.inputs if spec.name == name), None)

    def output(self, name: str) -> TensorSpec | None:
        return next((spec for spec in self.outputs if spec.name == name), None)


def model_spec(metadata: ModelMetadata, config: Mapping[str, Any], version: str = "") -> ModelSpec:
    """Return the form of requests to a model.

    Args:
        metadata: The server's metadata of the model, shapes with the batch dimension.
        config: The server's configuration of the model as JSON, {} if the server does not provide it.
    """
    max_batch_size = int(config.get("max_batch_size", 0))
    configured = {entry.get("name"): entry for entry in config.get("input", ())}
    inputs = []
    for tensor in metadata.inputs:
        entry = configured.get(tensor.name, {})
        is_optional = bool(entry.get("optional", False))
        inputs.append(replace(_tensor(tensor, max_batch_size), optional=is_optional))
    outputs = tuple(_tensor(tensor, max_batch_size) for tensor in metadata.outputs)
    return ModelSpec(metadata.name, version, max_batch_size, tuple(inputs), outputs)


def with_shapes(spec: ModelSpec, shapes: Iterable[tuple[str, Shape]]) -> ModelSpec:
    """Return the model with the variable dimensions of its inputs filled in.

    Args:
        shapes: Shape by input; an input of fixed shape keeps its own.

    Raises:
        ServingError: INVALID_ARG for an unknown input, or a shape that does not fit it.
    """
    wanted = dict(shapes)
    for name, shape in wanted.items():
        tensor = spec.input(name)
        if tensor is None:
            raise invalid(f"--shape: expected an input of model '{spec.name}', {names(spec.inputs)}, got '{name}'")
        if not tensor.fits(shape):
            raise invalid(
                f"--shape: input '{name}': expected a shape that fits {list(tensor.shape)}, got {list(shape)}"
            )
    inputs = [
        replace(tensor, shape=wanted[tensor.name], declared=tensor.shape) if tensor.name in wanted else tensor
        for tensor in spec.inputs
    ]
    return replace(spec, inputs=tuple(inputs))


def check_batch_size(spec: ModelSpec, batch_size: int) -> None:
    """Check that the model accepts this number of items in a request."""
    if spec.max_batch_size == 0 and batch_size > 1:
        raise invalid(f"-b: expected 1, as model '{spec.name}' does not support batching, got {batch_size}")
    if spec.max_batch_size and batch_size > spec.max_batch_size:
        raise invalid(
            f"-b: expected at most {spec.max_batch_size}, the max_batch_size of model '{spec.name}', got {batch_size}"
        )


def names(tensors: Iterable[TensorSpec]) -> str:
    return ", ".join(f"'{tensor.name}'" for tensor in tensors) or "none"


def _tensor(tensor: TensorMetadata, max_batch_size: int) -> TensorSpec:
    shape = tensor.shape[1:] if max_batch_size else tensor.shape
    return TensorSpec(tensor.name, tensor.datatype, shape)


_KINDS = {type(None): "null", bool: "a boolean", dict: "an object", list: "a list"}


def is_integer(datatype: DataType) -> bool:
    """Return whether a datatype is integral. BF16 is not, although its arrays hold integers."""
    return datatype.numpy.kind in "iu" and datatype is not DataType.BF16


def integer_limits(datatype: DataType) -> tuple[int, int]:
    """Return the lowest and the highest value of an integral datatype."""
    bits = 8 * datatype.byte_size
    return (0, 2**bits - 1) if datatype.numpy.kind == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def from_list(spec: TensorSpec, content: object, shape: Shape | None) -> Array:
    """Return the array of a list, nested or flat, or of a single value.

    Args:
        shape: Explicit shape, None for the tensor's own.

    Raises:
        ServingError: INVALID_ARG; the message does not name the place.
    """
    plain: NDArray[Any]
    try:
        plain = np.array(content, dtype=object if spec.datatype is DataType.BYTES else None)
    except (ValueError, OverflowError):
        raise invalid(f"expected {spec}, got lists of different lengths") from None
    if spec.datatype is DataType.BYTES:
        return _shaped(spec, _strings(spec, plain), shape)
    if plain.dtype.kind == "f" and is_integer(spec.datatype):
        plain = np.array(content, dtype=object)  # floats would round integers of 64 bits
    return _shaped(spec, to_datatype(spec, plain), shape)


def from_base64(spec: TensorSpec, text: object, shape: Shape | None) -> Array:
    """Return the array of base64 text, which holds the binary form: row-major, little-endian."""
    if not isinstance(text, str):
        raise invalid(f"expected base64 text as b64, got {_kind(text)}")
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid(f"expected base64 text, got: {error}") from None
    return from_raw(spec, raw, shape)


def from_raw(spec: TensorSpec, raw: bytes, shape: Shape | None = None) -> Array:
    """Return the array of a tensor's binary form."""
    if spec.datatype is DataType.BYTES:
        try:
            elements = decode_elements(spec.name, raw)
        except ServingError as error:
            raise invalid(
                f"expected strings with 4 bytes of length before each, got {len(raw)} other bytes: {error.message}"
            ) from None
        return _shaped(spec, bytes_array(spec.name, [len(elements)], elements), shape)
    count, rest = divmod(len(raw), spec.datatype.byte_size)
    wanted = shape if shape is not None else _known_shape(spec, count)
    if rest or wanted is None or prod(wanted) != count:
        size = "" if wanted is None else f", which takes {prod(wanted) * spec.datatype.byte_size} bytes"
        raise invalid(f"expected {_shown(spec, wanted)}{size}, got {len(raw)} bytes")
    return _checked(spec, decode_tensor(spec.name, spec.datatype, wanted, raw).array)


def to_datatype(spec: TensorSpec, plain: NDArray[Any]) -> Array:
    """Return an array of numbers or booleans as the tensor's datatype, with unchanged values.

    Raises:
        ServingError: INVALID_ARG for a value that the datatype cannot represent.
    """
    datatype = spec.datatype
    if plain.dtype.kind == "O":
        plain = _numbers(spec, plain)
    if plain.dtype.kind not in "biuf":
        raise invalid(f"expected numbers for {spec}, got text")
    if datatype is DataType.BF16:
        return to_bfloat16(plain.astype(np.float32))
    if datatype is DataType.BOOL:
        _refuse(spec, plain, (plain != 0) & (plain != 1))
    elif is_integer(datatype):
        lowest, highest = integer_limits(datatype)
        outside = (plain < lowest) | (plain > highest)
        fraction = plain != np.floor(plain) if plain.dtype.kind == "f" else np.zeros(plain.shape, bool)
        _refuse(spec, plain, outside | fraction | (plain != plain))  # NaN equals nothing
    elif plain.dtype.kind != "b":
        with np.errstate(over="ignore"):
            made: Array = plain.astype(datatype.numpy)
        _refuse(spec, plain, np.isinf(made) & np.isfinite(plain))
        return made
    return plain.astype(datatype.numpy)


def _numbers(spec: TensorSpec, plain: NDArray[Any]) -> NDArray[Any]:
    """Return objects as exact integers or floating-point numbers."""
    for value in plain.flat:
        if not isinstance(value, int | float):
            raise invalid(f"expected numbers for {spec}, got {_kind(value)}")
    if not is_integer(spec.datatype):
        return _floats(spec, plain)
    whole = [int(value) if isinstance(value, int) or value.is_integer() else value for value in plain.flat]
    if all(isinstance(value, int) for value in whole):
        lowest, highest = min(whole, default=0), max(whole, default=0)
        wide = np.uint64 if highest > np.iinfo(np.int64).max and lowest >= 0 else np.int64
        try:
            return np.array(whole, wide).reshape(plain.shape)
        except OverflowError:
            raise invalid(f"expected values that fit {spec.datatype.wire}, got {lowest} to {highest}") from None
    return _floats(spec, plain)


def _floats(spec: TensorSpec, plain: NDArray[Any]) -> NDArray[Any]:
    try:
        return plain.astype(np.float64)
    except OverflowError:
        digits = max(len(str(abs(value))) for value in plain.flat if isinstance(value, int))
        raise invalid(f"expected values that fit {spec.datatype.wire}, got an integer of {digits} digits") from None


def _strings(spec: TensorSpec, plain: NDArray[Any]) -> Array:
    elements = []
    for value in plain.flat:
        if isinstance(value, bytes):
            elements.append(value)
        elif isinstance(value, str):
            elements.append(value.encode(errors="surrogateescape"))
        else:
            raise invalid(f"expected strings for {spec}, got {_kind(value)}")
    return bytes_array(spec.name, plain.shape, elements)


def _shaped(spec: TensorSpec, array: Array, shape: Shape | None) -> Array:
    """Return the array in the explicit shape, else in its own if that fits, else in the tensor's."""
    if shape is None:
        shape = array.shape if spec.fits(array.shape) else _known_shape(spec, array.size)
    if shape is None or prod(shape) != array.size:
        raise invalid(f"expected {_shown(spec, shape)}, got {_got(array)}")
    return _checked(spec, array.reshape(shape))


def _known_shape(spec: TensorSpec, count: int) -> Shape | None:
    """Return the shape of a number of elements, None if variable dimensions make it ambiguous."""
    if spec.is_fixed:
        return spec.shape
    known = prod(size for size in spec.shape if size != -1)
    if spec.shape.count(-1) > 1 or known == 0 or count % known:
        return None
    return tuple(count // known if size == -1 else size for size in spec.shape)


def _checked(spec: TensorSpec, array: Array) -> Array:
    if not spec.fits(array.shape):
        raise invalid(f"expected {spec}, got shape {list(array.shape)}")
    return array


def _refuse(spec: TensorSpec, plain: NDArray[Any], wrong: NDArray[np.bool_]) -> None:
    if wrong.any():
        raise invalid(f"expected values that fit {spec.datatype.wire}, got {plain[wrong].flat[0]}")


def _shown(spec: TensorSpec, shape: Shape | None) -> str:
    if shape is not None:
        return f"{prod(shape)} elements ({spec.datatype.wire} of shape {list(shape)})"
    return f"{spec} (hint: name the shape with --shape or beside the content)"


def _got(array: Array) -> str:
    return f"{array.size}" if array.ndim == 1 else f"shape {list(array.shape)}"


def _kind(value: object) -> str:
    if isinstance(value, str):
        return f"the text '{value[:40]}'"
    return _KINDS.get(type(value), f"the number {value}")
