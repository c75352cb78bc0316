"""What annotations mean: the tensors of a function, and how values become tensors and back.

    bool int float          BOOL, INT64, FP64; a numpy scalar type its own datatype          [1]
    str bytes               BYTES                                                            [1]
    NDArray[np.float32]     that datatype, of one dimension or those of a `Shape`
    list of these           one variable dimension a level
    PIL.Image.Image         BYTES: an encoded image, base64 text or data URL of one; as an output always a data URL
    record, dict            BYTES: JSON. A record that is the only parameter, or what is returned: a tensor a field.

A record is a dataclass, a pydantic model, a TypedDict or a NamedTuple.
"""

from __future__ import annotations

import base64
import binascii
import collections.abc
import dataclasses
import inspect
import io
import json
import sys
import types
import typing
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING or __package__:
    from charonia.server.backends.python.worker import charonia_datatypes as datatypes
    from charonia.server.backends.python.worker.charonia_service import BadRequest, Shape
else:  # siblings of the worker's script; the package is not there
    import charonia_datatypes as datatypes
    from charonia_service import BadRequest, Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from charonia.server.backends.python.worker.charonia_datatypes import Array

OUTPUT = "output"
"""Name of the output of a function that returns one value; several have a number behind it."""

OBJECT_INPUT = "x"
"""Name of the input of an object that takes one array."""

_SCALARS = {bool: np.dtype(np.bool_), int: np.dtype(np.int64), float: np.dtype(np.float64)}
_OBJECT = np.dtype(np.object_)
_STREAMS = (
    collections.abc.Iterator,
    collections.abc.Iterable,
    collections.abc.Generator,
    collections.abc.AsyncIterator,
    collections.abc.AsyncIterable,
    collections.abc.AsyncGenerator,
)


class Kind:
    """How values of one type are tensors.

    Attributes:
        dtype: numpy dtype of the tensor; that of objects for BYTES.
        dims: Dimensions of one value.
    """

    def __init__(self, dtype: np.dtype[Any], dims: tuple[int, ...]) -> None:
        self.dtype = dtype
        self.dims = dims

    @property
    def data_type(self) -> str:
        """Name of the datatype in configurations."""
        return "TYPE_STRING" if self.dtype == _OBJECT else f"TYPE_{datatypes.WIRE[self.dtype]}"

    def read(self, array: Array) -> Any:
        """Return the value of a tensor."""
        raise NotImplementedError

    def write(self, value: Any) -> Array:
        """Return the tensor of a value."""
        raise NotImplementedError

    def read_batch(self, array: Array) -> Any:
        """Return a batch of values."""
        return [self.read(row) for row in array]

    def write_batch(self, values: Any) -> Array:
        """Return the tensor of a batch of values."""
        rows = [self.write(value) for value in values]
        array: Array = np.stack(rows) if rows else np.empty((0, *self.dims), self.dtype)
        return array


class ArrayKind(Kind):
    """A numpy array. Of strings: `str` in the function, bytes in tensors."""

    def read(self, array: Array) -> Any:
        """Return the array."""
        return _decoded(array) if self.dtype == _OBJECT else array

    def write(self, value: Any) -> Array:
        """Return the array, in the annotated dtype."""
        return self._checked(value, self.dims)

    def read_batch(self, array: Array) -> Any:
        """Return the array."""
        return self.read(array)

    def write_batch(self, values: Any) -> Array:
        """Return the array, in the annotated dtype."""
        return self._checked(values, (-1, *self.dims))

    def _checked(self, value: Any, dims: tuple[int, ...]) -> Array:
        array = np.asarray(value, self.dtype)
        if array.ndim != len(dims) or any(dim not in (-1, size) for dim, size in zip(dims, array.shape)):
            raise ValueError(f"expected an array of shape {list(dims)}, got {list(array.shape)}")
        return _encoded(array) if self.dtype == _OBJECT else array


class ScalarKind(Kind):
    """A number or a boolean."""

    def __init__(self, dtype: np.dtype[Any], of: Callable[[Any], Any]) -> None:
        super().__init__(dtype, (1,))
        self._of = of

    def read(self, array: Array) -> Any:
        """Return the number."""
        return self._of(array.reshape(-1)[0])

    def write(self, value: Any) -> Array:
        """Return an array of one element."""
        return np.asarray(value, self.dtype).reshape(1)


class TextKind(Kind):
    """A string."""

    def __init__(self) -> None:
        super().__init__(_OBJECT, (1,))

    def read(self, array: Array) -> Any:
        """Return the string."""
        return _text(array.reshape(-1)[0])

    def write(self, value: Any) -> Array:
        """Return an array of one element."""
        return _one(str(value).encode())


class BytesKind(TextKind):
    """Bytes."""

    def read(self, array: Array) -> Any:
        """Return the bytes."""
        return bytes(array.reshape(-1)[0])

    def write(self, value: Any) -> Array:
        """Return an array of one element."""
        return _one(value.encode() if isinstance(value, str) else bytes(value))


class ListKind(Kind):
    """A list of scalars or strings, or of lists of them."""

    def __init__(self, element: Kind, depth: int) -> None:
        super().__init__(element.dtype, (-1,) * depth)
        self._element = element

    def read(self, array: Array) -> Any:
        """Return the list."""
        if self.dtype != _OBJECT:
            return array.tolist()
        return (array if isinstance(self._element, BytesKind) else _decoded(array)).tolist()

    def write(self, value: Any) -> Array:
        """Return an array."""
        array = np.array(value if isinstance(value, np.ndarray) else list(value), self.dtype)
        if array.ndim != len(self.dims):
            raise ValueError(f"expected a list of {len(self.dims)} levels, got an array of shape {list(array.shape)}")
        return _encoded(array) if self.dtype == _OBJECT else array


class ImageKind(TextKind):
    """An image of Pillow."""

    def read(self, array: Array) -> Any:
        """Return the image that a file, base64 text or a data URL holds."""
        from PIL import Image

        data = bytes(array.reshape(-1)[0])
        if data.startswith(b"data:"):
            data = data.partition(b",")[2]
        try:
            image = Image.open(io.BytesIO(data))
        except OSError:
            try:
                image = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
            except (OSError, binascii.Error):
                raise BadRequest("expected an image: the content of a PNG, JPEG or other file, or its base64") from None
        image.load()
        return image

    def write(self, value: Any) -> Array:
        """Return a data URL, which JSON can carry and browsers show."""
        data = io.BytesIO()
        value.save(data, "PNG")
        return _one(b"data:image/png;base64," + base64.b64encode(data.getvalue()))


class JsonKind(TextKind):
    """What JSON can carry: records, dictionaries, lists of them."""

    def __init__(self, annotation: Any) -> None:
        super().__init__()
        self._annotation = annotation

    def read(self, array: Array) -> Any:
        """Return the value that a JSON document describes."""
        try:
            return built(self._annotation, json.loads(array.reshape(-1)[0]))
        except ValueError as error:
            raise BadRequest(f"expected JSON: {error}") from None

    def write(self, value: Any) -> Array:
        """Return a JSON document."""
        return _one(json.dumps(value, default=_plain).encode())


class Port(typing.NamedTuple):
    """An input or output of a model; an input that is not required may be missing from a request."""

    name: str
    kind: Kind
    is_required: bool = True


class Signature(typing.NamedTuple):
    """The inputs and outputs of a function.

    Attributes:
        inputs: Its inputs.
        outputs: Its outputs.
        record: The class of its only parameter, whose fields are the inputs; None for a parameter an input.
        returns: How what is returned has the outputs: "one" value, a "tuple", a "record" with attributes or a "dict".
        is_stream: Whether it yields any number of responses.
    """

    inputs: list[Port]
    outputs: list[Port]
    record: Any
    returns: str
    is_stream: bool


def signature_of(function: Callable[..., Any], name: str, *, is_batched: bool) -> Signature:
    """Return the signature that the annotations of a function say.

    Raises:
        TypeError: An annotation is missing or means no tensor.
    """
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    hints = _hints(function if inspect.isroutine(function) else type(function).__call__)
    record = None
    inputs = []
    if len(parameters) == 1:
        only = _item(hints.get(parameters[0].name), parameters[0].name, name) if is_batched else hints.get(parameters[0].name)
        record = only if is_record(only) else None
    if record is not None:
        inputs = [Port(field, _kind(hint, field, name), required) for field, hint, required in fields_of(record)]
    else:
        for parameter in parameters:
            if parameter.name not in hints:
                raise TypeError(_missing(name, f"parameter '{parameter.name}'"))
            hint, is_optional = _without_none(hints[parameter.name])
            kind = _batch_kind(hint, parameter.name, name) if is_batched else _kind(hint, parameter.name, name)
            inputs.append(Port(parameter.name, kind, parameter.default is parameter.empty))
            if is_optional and parameter.default is parameter.empty:
                raise TypeError(f"model '{name}': parameter '{parameter.name}' may be None: give it the default None")
    if "return" not in hints:
        raise TypeError(_missing(name, "what it returns"))
    returned, is_stream = hints["return"], False
    if typing.get_origin(returned) in _STREAMS:
        returned, is_stream = typing.get_args(returned)[0], True
    if is_stream and is_batched:
        raise TypeError(f"model '{name}': a stream has no batches: leave out max_batch_size, or return instead of yield")
    outputs, returns = _outputs(returned, name, is_batched)
    return Signature(inputs, outputs, record, returns, is_stream)


def _outputs(returned: Any, name: str, is_batched: bool) -> tuple[list[Port], str]:
    if typing.get_origin(returned) is tuple and Ellipsis not in typing.get_args(returned):
        make = _batch_kind if is_batched else _kind
        kinds = [make(each, f"{OUTPUT}{at}", name) for at, each in enumerate(typing.get_args(returned))]
        return [Port(f"{OUTPUT}{at}", kind) for at, kind in enumerate(kinds)], "tuple"
    item = _item(returned, OUTPUT, name) if is_batched else returned
    if is_record(item):
        ports = [Port(field, _kind(hint, field, name)) for field, hint, _ in fields_of(item)]
        return ports, "dict" if typing.is_typeddict(item) else "record"
    return [Port(OUTPUT, (_batch_kind if is_batched else _kind)(returned, OUTPUT, name))], "one"


def _hints(function: Any) -> dict[str, Any]:
    return typing.get_type_hints(function, include_extras=True)


def _missing(name: str, what: str) -> str:
    return f"model '{name}': {what} has no type; annotate it, or give an example of all inputs: @model(example={{...}})"


def is_record(annotation: Any) -> bool:
    """Return whether a type is a record."""
    if not isinstance(annotation, type):
        return False
    return (
        dataclasses.is_dataclass(annotation)
        or hasattr(annotation, "model_fields")
        or typing.is_typeddict(annotation)
        or (issubclass(annotation, tuple) and hasattr(annotation, "_fields"))
    )


def fields_of(record: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yield name, type and whether it is required of each field of a record."""
    if hasattr(record, "model_fields"):
        for name, field in record.model_fields.items():
            yield name, _without_none(_hints(record).get(name, field.annotation))[0], field.is_required()
        return
    optional = set(getattr(record, "_field_defaults", ())) | set(getattr(record, "__optional_keys__", ()))
    if dataclasses.is_dataclass(record):
        missing = dataclasses.MISSING
        optional |= {
            f.name for f in dataclasses.fields(record) if f.default is not missing or f.default_factory is not missing
        }
    for name, hint in _hints(record).items():
        yield name, _without_none(hint)[0], name not in optional


def built(annotation: Any, value: Any) -> Any:
    """Return the record that plain values describe; other types as they are.

    Raises:
        BadRequest: They describe none.
    """
    annotation = _without_none(annotation)[0]
    if hasattr(annotation, "model_validate"):
        try:
            return annotation.model_validate(value)
        except ValueError as error:
            raise BadRequest(str(error)) from None
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is list and arguments and isinstance(value, list):
        return [built(arguments[0], each) for each in value]
    if not is_record(annotation) or typing.is_typeddict(annotation):
        return value
    if not isinstance(value, dict):
        raise BadRequest(f"expected an object with the fields of {annotation.__name__}, got {type(value).__name__}")
    hints = _hints(annotation)
    try:
        return annotation(**{name: built(hints.get(name), each) for name, each in value.items()})
    except (TypeError, ValueError) as error:
        raise BadRequest(str(error)) from None


def _item(annotation: Any, what: str, name: str) -> Any:
    """Return the type of one item of a batch that is annotated as a list."""
    if typing.get_origin(annotation) is list:
        return typing.get_args(annotation)[0]
    return None


def _batch_kind(annotation: Any, what: str, name: str) -> Kind:
    """Return the kind of one item of a batch: of a list, or of an array whose first dimension is the batch."""
    item = _item(annotation, what, name)
    if item is not None:
        return _kind(item, what, name)
    kind = _kind(annotation, what, name)
    if not isinstance(kind, ArrayKind):
        raise TypeError(
            f"model '{name}': {what}: with max_batch_size, expected a list or an array whose first dimension is the batch, "
            f"got {_shown(annotation)}: write list[{_shown(annotation)}]"
        )
    if len(kind.dims) == 1 and not _has_shape(annotation):
        return ArrayKind(kind.dtype, (-1,))  # no Shape: a vector an item
    if kind.dims[:1] != (-1,):
        raise TypeError(
            f"model '{name}': {what}: the first dimension is that of the batch, which varies: expected Shape(-1, ...), "
            f"got Shape{kind.dims}"
        )
    return ArrayKind(kind.dtype, kind.dims[1:] or (1,)) if len(kind.dims) > 1 else FlatKind(kind.dtype)


class FlatKind(ArrayKind):
    """A number an item, as an array of one dimension in the function."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        super().__init__(dtype, (1,))

    def read_batch(self, array: Array) -> Any:
        """Return the array, of one dimension."""
        return self.read(array.reshape(-1))

    def write_batch(self, values: Any) -> Array:
        """Return the array with a dimension more."""
        return self._checked(np.asarray(values, self.dtype).reshape(-1, 1), (-1, 1))


def _has_shape(annotation: Any) -> bool:
    return any(isinstance(extra, Shape) for extra in getattr(annotation, "__metadata__", ()))


def _kind(annotation: Any, what: str, name: str) -> Kind:
    shape = next((extra for extra in getattr(annotation, "__metadata__", ()) if isinstance(extra, Shape)), None)
    plain = _without_none(annotation.__origin__ if hasattr(annotation, "__metadata__") else annotation)[0]
    origin, arguments = typing.get_origin(plain), typing.get_args(plain)
    if origin is np.ndarray:
        element = typing.get_args(arguments[1])[0]
        return ArrayKind(_dtype(element, what, name), shape.dims if shape is not None else (-1,))
    if shape is not None:
        raise TypeError(f"model '{name}': {what}: Shape is for arrays: expected NDArray[...], got {_shown(plain)}")
    if origin is typing.Literal:
        return _kind(type(arguments[0]), what, name)
    if origin is list:
        depth, inner = 1, arguments[0]
        while typing.get_origin(inner) is list:
            depth, inner = depth + 1, typing.get_args(inner)[0]
        element = _kind(inner, what, name)
        return ListKind(element, depth) if type(element) in (ScalarKind, TextKind, BytesKind) else JsonKind(plain)
    if origin is dict or plain in (dict, typing.Any) or is_record(plain):
        return JsonKind(plain)
    return _class_kind(plain, what, name)


def _class_kind(plain: Any, what: str, name: str) -> Kind:
    if plain in _SCALARS:
        return ScalarKind(_SCALARS[plain], plain)
    if plain is str:
        return TextKind()
    if plain is bytes:
        return BytesKind()
    if isinstance(plain, type) and issubclass(plain, np.generic):
        return ScalarKind(_dtype(plain, what, name), plain)
    if isinstance(plain, type) and plain.__module__.startswith("PIL."):
        return ImageKind()
    raise TypeError(
        f"model '{name}': {what}: {_shown(plain)} is no type of a tensor: expected bool, int, float, str, bytes, "
        "NDArray[...], list[...], PIL.Image.Image, dict or a record"
    )


def _dtype(element: Any, what: str, name: str) -> np.dtype[Any]:
    if isinstance(element, type) and issubclass(element, (np.str_, np.bytes_, np.object_)):
        return _OBJECT
    try:
        dtype = np.dtype(element)
    except TypeError:
        dtype = np.dtype(np.void)
    if dtype not in datatypes.WIRE:
        raise TypeError(
            f"model '{name}': {what}: an array needs a dtype that tensors have, such as NDArray[np.float32], got "
            f"{_shown(element)}"
        )
    return dtype


def _without_none(annotation: Any) -> tuple[Any, bool]:
    """Return a type without `| None`, and whether it had that."""
    union = [typing.Union]
    if sys.version_info >= (3, 10):
        union.append(types.UnionType)
    if typing.get_origin(annotation) in union:
        others = [each for each in typing.get_args(annotation) if each is not type(None)]
        if len(others) == 1:
            return others[0], True
    return annotation, False


def kind_of_value(value: Any, *, is_batch: bool) -> Kind:
    """Return the kind of an example's values.

    Raises:
        TypeError: They are no tensor.
    """
    if hasattr(value, "to_numpy"):
        value = value.to_numpy()
    if isinstance(value, np.ndarray) or hasattr(value, "__array__"):
        array = np.asarray(value)
        dtype = _OBJECT if array.dtype.kind in "OSU" else array.dtype.newbyteorder("=")
        if dtype != _OBJECT and dtype not in datatypes.WIRE:
            raise TypeError(f"an array of dtype {dtype} is no tensor")
        if is_batch:
            return ArrayKind(dtype, array.shape[1:]) if array.ndim > 1 else FlatKind(dtype)
        return ArrayKind(dtype, array.shape or (1,))
    if is_batch and isinstance(value, list) and value:
        return _kind(type(value[0]), "example", "")
    if isinstance(value, list) and value and not isinstance(value[0], (dict, list)):
        return ListKind(_kind(type(value[0]), "example", ""), 1)
    return _kind(type(value), "example", "")


def _shown(annotation: Any) -> str:
    return getattr(annotation, "__name__", None) or str(annotation)


def _one(element: bytes) -> Array:
    array: Array = np.empty(1, _OBJECT)
    array[0] = element
    return array


def _text(element: bytes) -> str:
    try:
        return element.decode() if isinstance(element, bytes) else str(element)
    except UnicodeDecodeError:
        raise BadRequest("expected text in UTF-8, got other bytes") from None


def _decoded(array: Array) -> Array:
    return _mapped(array, _text)


def _encoded(array: Array) -> Array:
    return _mapped(array, lambda element: element if isinstance(element, bytes) else str(element).encode())


def _mapped(array: Array, change: Callable[[Any], Any]) -> Array:
    changed: Array = np.empty(array.size, _OBJECT)
    changed[:] = [change(element) for element in array.ravel().tolist()]
    return changed.reshape(array.shape)


def _plain(value: Any) -> Any:
    """Return what `json` can write for a value that it does not know."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"JSON has no form for {type(value).__name__}")
