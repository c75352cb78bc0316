"""What annotations mean: the tensors of a function.

    bool int float          BOOL, INT64, FP64; a numpy scalar type its own datatype          [1]
    str bytes               BYTES                                                            [1]
    NDArray[np.float32]     that datatype, of one dimension or those of a `Shape`
    list of these           one variable dimension a level
    torch.Tensor            as NDArray[np.float32]
    PIL.Image.Image         BYTES: an encoded image, base64 text or data URL of one; as an output always a data URL
    what JSON has as one    its own datatype: Literal, Enum, Annotated[int, Field(ge=1)]; BYTES for dates, UUIDs     [1]
    record, dict, others    BYTES: JSON. A record that is the only parameter, or what is returned: a tensor a field.

A record is a dataclass, a pydantic model, a TypedDict or a NamedTuple.
"""

from __future__ import annotations

import collections.abc
import inspect
import typing
from typing import TYPE_CHECKING

import numpy as np

from ....channel import datatypes
from ....channel.tables import OBJECT
from .kinds import (
    Adapter,
    ArrayKind,
    BodyKind,
    BytesKind,
    FlatKind,
    FrameKind,
    ImageKind,
    JsonKind,
    Kind,
    ListKind,
    ScalarKind,
    TextKind,
    TorchKind,
    expanded,
    fields_of,
    hints_of,
    is_record,
    without_none,
)
from .service import Request, Response, Shape

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

OUTPUT = "output"
"""Name of the output of a function that returns one value; several have a number behind it."""

OBJECT_INPUT = "x"
"""Name of the input of an object that takes one array."""

_SCALARS = {bool: np.dtype(np.bool_), int: np.dtype(np.int64), float: np.dtype(np.float64)}
_JSON_SCALARS = {"boolean": bool, "integer": int, "number": float}
_STREAMS = (
    collections.abc.Iterator,
    collections.abc.Iterable,
    collections.abc.Generator,
    collections.abc.AsyncIterator,
    collections.abc.AsyncIterable,
    collections.abc.AsyncGenerator,
)


class Port(typing.NamedTuple):
    """An input or output of a model; an input that is not required may be missing from a request."""

    name: str
    kind: Kind
    is_required: bool = True
    schema: Any = None  # of a field, with its description and limits; by default that of the kind


class Signature(typing.NamedTuple):
    """The inputs and outputs of a function.

    Attributes:
        record: The class of its only parameter, whose fields are the inputs; None for a parameter an input.
        returns: How what is returned has the outputs: "one" value, a "tuple" or a "record".
        is_stream: Whether it yields any number of responses.
        request: Parameter that gets the HTTP request, "" for none.
    """

    inputs: list[Port]
    outputs: list[Port]
    record: Any
    returns: str
    is_stream: bool
    request: str = ""


def signature_of(function: Callable[..., Any], name: str, *, is_batched: bool) -> Signature:
    """Return the signature that the annotations of a function say.

    Raises:
        TypeError: An annotation is missing or means no tensor.
    """
    parameters = list(inspect.signature(function).parameters.values())
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(
                f"model '{name}': '{parameter}': inputs have names: write a parameter for each, or one dict"
            )
    hints = hints_of(function if inspect.isroutine(function) else type(function).__call__)
    request = _request_parameter(hints, name, is_batched)
    parameters = [parameter for parameter in parameters if parameter.name != request]
    record = None
    inputs = []
    if len(parameters) == 1:
        only = hints.get(parameters[0].name)
        only = _item(only) if is_batched else only
        record = only if is_record(only) else None
    if record is not None:
        schemas = _field_schemas(record)
        inputs = [
            Port(field, _kind(without_none(hint)[0], field, name), required, schemas.get(field))
            for field, hint, required in fields_of(record)
        ]
    else:
        for parameter in parameters:
            if parameter.name not in hints:
                raise TypeError(_missing(name, f"parameter '{parameter.name}'"))
            hint, is_optional = without_none(hints[parameter.name])
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
        raise TypeError(
            f"model '{name}': a stream has no batches: leave out max_batch_size, or return instead of yield"
        )
    outputs, returns = _outputs(returned, name, is_batched)
    return Signature(inputs, outputs, record, returns, is_stream, request)


def _outputs(returned: Any, name: str, is_batched: bool) -> tuple[list[Port], str]:
    if typing.get_origin(returned) is tuple and Ellipsis not in typing.get_args(returned):
        make = _batch_kind if is_batched else _kind
        kinds = [make(each, f"{OUTPUT}{at}", name) for at, each in enumerate(typing.get_args(returned))]
        return [Port(f"{OUTPUT}{at}", kind) for at, kind in enumerate(kinds)], "tuple"
    item = _item(returned) if is_batched else returned
    if is_record(item):
        ports = [Port(field, _kind(hint, field, name)) for field, hint, _ in fields_of(item)]
        return ports, "record"
    return [Port(OUTPUT, (_batch_kind if is_batched else _kind)(returned, OUTPUT, name))], "one"


def _request_parameter(hints: dict[str, Any], name: str, is_batched: bool) -> str:
    """Return the parameter that gets the HTTP request, or the list of those of a batch; "" for none."""
    own = next((each for each, hint in hints.items() if hint in (Request, list[Request]) and each != "return"), "")
    if own and hints[own] != (list[Request] if is_batched else Request):
        shown = "list[charonia.Request], one for each item" if is_batched else "charonia.Request"
        raise TypeError(f"model '{name}': parameter '{own}': expected {shown}")
    return own


def _missing(name: str, what: str) -> str:
    return f"model '{name}': {what} has no type; annotate it, or give an example of all inputs: @model(example={{...}})"


def _item(annotation: Any) -> Any:
    annotation = expanded(annotation)
    if typing.get_origin(annotation) is list:
        return typing.get_args(annotation)[0]
    return None


def _batch_kind(annotation: Any, what: str, name: str) -> Kind:
    """Return the kind of one item of a batch: of a list, or of an array whose first dimension is the batch."""
    annotation = expanded(annotation)
    item = _item(annotation)
    if item is not None:
        return _kind(item, what, name)
    kind = _kind(annotation, what, name)
    if not isinstance(kind, ArrayKind):
        raise TypeError(
            f"model '{name}': {what}: with max_batch_size, expected a list, or an array whose first dimension is the "
            f"batch, got {_shown(annotation)}: write list[{_shown(annotation)}]"
        )
    if len(kind.dims) == 1 and not any(isinstance(each, Shape) for each in getattr(annotation, "__metadata__", ())):
        return kind.of((-1,))  # no Shape: a vector an item
    if kind.dims[:1] != (-1,):
        raise TypeError(
            f"model '{name}': {what}: the first dimension is that of the batch, which varies: expected Shape(-1, ...), "
            f"got Shape{kind.dims}"
        )
    if len(kind.dims) > 1 or type(kind) is not ArrayKind:
        return kind.of(kind.dims[1:] or (1,))
    return FlatKind(kind.dtype)


def _kind(annotation: Any, what: str, name: str) -> Kind:
    annotation = expanded(annotation)
    extras = getattr(annotation, "__metadata__", ())
    shape = next((extra for extra in extras if isinstance(extra, Shape)), None)
    plain = expanded(annotation.__origin__ if extras else annotation)
    kind = _tensor_kind(expanded(without_none(plain)[0]), shape, what, name)
    if kind is not None:
        return kind
    if shape is not None:
        raise TypeError(f"model '{name}': {what}: Shape is for arrays: expected NDArray[...], got {_shown(plain)}")
    is_checked = bool(extras)
    if not is_checked and plain in _SCALARS:
        return ScalarKind(_SCALARS[plain], plain)
    if not is_checked and plain is str:
        return TextKind()
    element = plain
    depth = 0
    while typing.get_origin(element) is list and typing.get_args(element):
        depth, element = depth + 1, expanded(typing.get_args(element)[0])
    if depth:
        kind = _kind(element, what, name)
        if type(kind) in (ScalarKind, TextKind, BytesKind):
            is_checked = is_checked or kind.adapter is not None
            return ListKind(kind, depth, _adapter(annotation, what, name) if is_checked else None)
        return JsonKind(_adapter(annotation, what, name))
    adapter = _adapter(annotation, what, name)
    json_type = adapter.schema.get("type")
    if json_type == "string":
        return TextKind(adapter)
    if json_type in _JSON_SCALARS:
        of = _JSON_SCALARS[json_type]
        return ScalarKind(_SCALARS[of], of, adapter)
    return JsonKind(adapter)


def _tensor_kind(plain: Any, shape: Shape | None, what: str, name: str) -> Kind | None:
    """Return the kind of a type that is a tensor, an image or a table by itself, None for any other."""
    origin, arguments = typing.get_origin(plain), typing.get_args(plain)
    dims = shape.dims if shape is not None else (-1,)
    if origin is np.ndarray:
        return ArrayKind(_dtype(typing.get_args(arguments[1])[0], what, name), dims)
    if not isinstance(plain, type):
        return None
    if issubclass(plain, np.ndarray):
        return ArrayKind(np.dtype(np.float64), dims)
    if (plain.__module__, plain.__name__) == ("torch", "Tensor"):
        return TorchKind(np.dtype(np.float32), dims)
    if shape is not None:
        return None
    if plain is bytes:
        return BytesKind()
    if plain is Response:
        return BodyKind()
    if issubclass(plain, np.generic):
        return ScalarKind(_dtype(plain, what, name), plain)
    if plain.__module__.startswith("PIL."):
        return ImageKind()
    if (plain.__module__.partition(".")[0], plain.__name__) == ("pandas", "DataFrame"):
        return FrameKind(plain)
    return None


def _adapter(annotation: Any, what: str, name: str) -> Adapter:
    try:
        return Adapter(annotation)
    except TypeError as error:
        raise TypeError(
            f"model '{name}': {what}: {_shown(annotation)} is no type of a value: {error} (hint: expected bool, int, "
            "float, str, bytes, NDArray[...], list[...], PIL.Image.Image, dict, a record or another type of pydantic)"
        ) from None


def _field_schemas(record: Any) -> dict[str, Any]:
    """Return the schemas of the fields of a pydantic model, which have their descriptions and limits."""
    if not hasattr(record, "model_json_schema"):
        return {}
    try:
        document = record.model_json_schema()
    except ValueError:  # a field that JSON has no form for, such as an array
        return {}
    defs = {"$defs": document["$defs"]} if "$defs" in document else {}
    return {name: {**schema, **defs} for name, schema in document.get("properties", {}).items()}


def _dtype(element: Any, what: str, name: str) -> np.dtype[Any]:
    if isinstance(element, type) and issubclass(element, (np.str_, np.bytes_, np.object_)):
        return OBJECT
    dtype: np.dtype[Any]
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


def kind_of_value(value: Any, *, is_batch: bool) -> Kind:
    """Return the kind of an example's values. Raises TypeError: They are no tensor."""
    if hasattr(value, "to_numpy"):
        value = value.to_numpy()
    if isinstance(value, np.ndarray) or hasattr(value, "__array__"):
        array = np.asarray(value)
        dtype = OBJECT if datatypes.is_string(array.dtype) else array.dtype.newbyteorder("=")
        if dtype != OBJECT and dtype not in datatypes.WIRE:
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
