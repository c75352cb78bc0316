"""How values of each type become tensors, and tensors values; records, and values that JSON describes, by pydantic."""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import io
import sys
import types
import typing
from typing import TYPE_CHECKING

import numpy as np

from ....channel import datatypes
from ....channel.tables import OBJECT
from .service import BadRequest, Response

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from ....channel.datatypes import Array
    from ....channel.tables import DataColumn


EXAMPLES = {"date": "2024-01-31", "date-time": "2024-01-31T12:00:00Z", "time": "12:00:00", "duration": "PT1M"}
"""Text for made-up requests by format."""

EXAMPLES["uuid"] = "00000000-0000-4000-8000-000000000000"


def hints_of(function: Any) -> dict[str, Any]:
    return typing.get_type_hints(function, include_extras=True)


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
            yield name, hints_of(record).get(name, field.annotation), field.is_required()
        return
    optional = set(getattr(record, "_field_defaults", ())) | set(getattr(record, "__optional_keys__", ()))
    if dataclasses.is_dataclass(record):
        missing = dataclasses.MISSING
        optional |= {
            f.name for f in dataclasses.fields(record) if f.default is not missing or f.default_factory is not missing
        }
    for name, hint in hints_of(record).items():
        yield name, hint, name not in optional


def made(record: Any, values: dict[str, Any]) -> Any:
    """Return the record that has these values.

    Raises:
        BadRequest: They make none.
    """
    if hasattr(record, "model_validate"):
        return _checked(record.model_validate, values)
    if typing.is_typeddict(record):
        return values
    try:
        return record(**values)
    except (TypeError, ValueError) as error:
        raise BadRequest(str(error)) from None


class Adapter:
    """Reads, checks and describes values of a type, by pydantic.

    Raises:
        TypeError: pydantic is missing, or no value of the type has a form in JSON.
    """

    def __init__(self, annotation: Any) -> None:
        try:
            from pydantic import TypeAdapter
            from pydantic.errors import PydanticUserError
        except ImportError:
            raise TypeError("it needs pydantic, which is not installed: pip install pydantic") from None
        try:
            self._adapter: Any = TypeAdapter(_with_typed_dicts(annotation))
            self.schema: dict[str, Any] = self._adapter.json_schema()
        except (PydanticUserError, NameError, AttributeError) as error:
            raise TypeError(str(error).partition("\n")[0].partition(". ")[0]) from None

    def read(self, text: bytes) -> Any:
        """Return the value that JSON text describes. Raises BadRequest for one that is not of the type."""
        return _checked(self._adapter.validate_json, text)

    def check(self, value: Any) -> Any:
        """Return a plain value as one of the type. Raises BadRequest if it is none."""
        return _checked(self._adapter.validate_python, value)

    def plain(self, value: Any) -> Any:
        """Return a value of the type as JSON has it. Raises BadRequest if it is not of the type."""
        return self._adapter.dump_python(self.check(value), mode="json")


def json_text(value: Any, *, allow_nan: bool) -> bytes:
    """Return the JSON text of any value that pydantic or numpy knows; NaN and infinity become null, or are refused.

    Raises:
        ValueError: It has no such form.
    """
    import pydantic_core

    if allow_nan:
        text: bytes = pydantic_core.to_json(value, inf_nan_mode="null", fallback=_plain)
        return text
    import json

    plain = pydantic_core.to_jsonable_python(value, inf_nan_mode="constants", fallback=_plain)
    return json.dumps(plain, allow_nan=False).encode()


def sample_value(schema: Any, defs: Any = None, depth: int = 3) -> Any:
    """Return a value that fits a JSON schema: the first choice, an element of each list, the required members.

    Args:
        schema: The schema.
        defs: Schemas that it refers to; by default its own.
        depth: Objects and lists within each other that are filled in; a schema may contain itself.
    """
    defs = schema.get("$defs", {}) if defs is None else defs
    if "$ref" in schema:
        return sample_value(defs.get(schema["$ref"].rpartition("/")[2], {}), defs, depth)
    for key, first in (("const", False), ("default", False), ("examples", True), ("enum", True)):
        if key in schema and schema[key] is not None:
            return schema[key][0] if first else schema[key]
    for choices in (schema.get("anyOf"), schema.get("oneOf"), schema.get("allOf")):
        if choices:
            return sample_value(next((each for each in choices if each.get("type") != "null"), choices[0]), defs, depth)
    kind = schema.get("type")
    if kind == "object":
        required = schema.get("required", ()) if depth else ()
        return {name: sample_value(schema["properties"][name], defs, depth - 1) for name in required}
    if kind == "array":
        first = schema.get("prefixItems", ())
        count = max(1, schema.get("minItems", 0)) - len(first) if "items" in schema and depth > 1 else 0
        return [sample_value(each, defs, depth - 1) for each in first] + [
            sample_value(schema["items"], defs, depth - 1) for _ in range(count)
        ]
    if kind == "string":
        text = EXAMPLES.get(schema.get("format", ""), "hello")
        return text.ljust(schema.get("minLength", 0), "o")[: schema.get("maxLength")]
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        value = low + 1 if "exclusiveMinimum" in schema or not low else low
        value = value if kind == "integer" or low else 0.5
        return min(value, schema.get("maximum", value))
    return {"boolean": True, "null": None}.get(kind, {})


def expanded(annotation: Any) -> Any:
    """Return what an alias stands for: one of a `type` statement, as `NDArray` is in newer versions of numpy."""
    while True:
        origin = typing.get_origin(annotation)
        if hasattr(origin, "__value__"):
            annotation = origin.__value__[typing.get_args(annotation)]
        elif hasattr(annotation, "__value__"):
            annotation = annotation.__value__
        else:
            return annotation


def without_none(annotation: Any) -> tuple[Any, bool]:
    """Return a type without `| None`, and whether it had that."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        others = [each for each in typing.get_args(annotation) if each is not type(None)]
        if len(others) < len(typing.get_args(annotation)):
            return typing.Union[tuple(others)], True  # noqa: UP007 # of a sequence
    return annotation, False


def _checked(read: Any, value: Any) -> Any:
    """Call a validating function of pydantic, and raise its problems as a BadRequest."""
    try:
        return read(value)
    except ValueError as error:
        raise BadRequest(_problems(error)) from None


def _problems(error: Any) -> str:
    """Return what pydantic says is wrong."""
    if not hasattr(error, "errors"):
        return str(error)
    found = error.errors()
    if found[0]["type"] == "json_invalid":
        return f"expected JSON: {found[0]['ctx']['error']}"
    return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}".removeprefix(": ") for each in found)


def _with_typed_dicts(annotation: Any) -> Any:
    """Return a type with the TypedDicts that pydantic can read before Python 3.12, in place of those of `typing`."""
    if sys.version_info >= (3, 12):
        return annotation
    if typing.is_typeddict(annotation) and type(annotation).__module__ == "typing":
        import typing_extensions

        fields = {name: _with_typed_dicts(hint) for name, hint in hints_of(annotation).items()}
        wrapped = {
            name: hint if name in annotation.__required_keys__ else typing_extensions.NotRequired[hint]
            for name, hint in fields.items()
        }
        return typing_extensions.TypedDict(annotation.__name__, wrapped)  # type: ignore[operator] # made at run time
    if typing.get_origin(annotation) in (list, dict, tuple, typing.Union) and typing.get_args(annotation):
        return typing.get_origin(annotation)[tuple(map(_with_typed_dicts, typing.get_args(annotation)))]
    return annotation


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy, torch
        return value.tolist()
    if hasattr(value, "to_dict"):  # pandas
        return value.to_dict("records") if hasattr(value, "columns") else value.tolist()
    raise TypeError(f"JSON has no form for {type(value).__name__}")


_FRAME = typing.Union[typing.List[typing.Dict[str, typing.Any]], typing.Dict[str, typing.List[typing.Any]]]  # noqa: UP006,UP007

_JSON_TYPES = {"b": "boolean", "i": "integer", "u": "integer", "f": "number", "O": "string"}


class Kind:
    """How values of one type are tensors.

    Attributes:
        dtype: numpy dtype of the tensor; that of objects for BYTES.
        dims: Dimensions of one value.
        adapter: What checks values further, None where all of the datatype are values.
    """

    def __init__(self, dtype: np.dtype[Any], dims: tuple[int, ...], adapter: Adapter | None = None) -> None:
        self.dtype = dtype
        self.dims = dims
        self.adapter = adapter

    @property
    def data_type(self) -> str:
        return "TYPE_STRING" if self.dtype == OBJECT else f"TYPE_{datatypes.WIRE[self.dtype]}"

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the tensor of a value."""
        if self.adapter is not None:
            return self.adapter.schema
        return {"type": _JSON_TYPES[self.dtype.kind]}

    def read(self, array: Array) -> Any:
        raise NotImplementedError

    def write(self, value: Any) -> Array:
        raise NotImplementedError

    def example(self) -> Any:
        """Return a value for requests that are made up, None where any of the datatype will do."""
        if self.adapter is None:
            return None
        with contextlib.suppress(LookupError, TypeError, ValueError):
            return self.checked(sample_value(self.adapter.schema))
        return None  # such as a text with a pattern: an example is no reason to fail

    def checked(self, value: Any) -> Any:
        """Return a value of the datatype as one of the type."""
        return value if self.adapter is None else self.adapter.check(value)

    def plain(self, value: Any) -> Any:
        """Return a value of the type as one of the datatype."""
        return value if self.adapter is None else self.adapter.plain(value)

    def read_batch(self, array: Array) -> Any:
        return [self.read(row) for row in array]

    def write_batch(self, values: Any) -> Array:
        """Return the tensor of a batch of values."""
        rows = [self.write(value) for value in values]
        array: Array = np.stack(rows) if rows else np.empty((0, *self.dims), self.dtype)
        return array


class ArrayKind(Kind):
    """A numpy array. Of strings: `str` in the function, bytes in tensors."""

    @property
    def schema(self) -> dict[str, Any]:
        return _nested(super().schema, self.dims)

    def of(self, dims: tuple[int, ...]) -> ArrayKind:
        """Return the kind of such arrays of other dimensions."""
        return type(self)(self.dtype, dims)

    def read(self, array: Array) -> Any:
        return _decoded(array) if self.dtype == OBJECT else array

    def write(self, value: Any) -> Array:
        return self._checked(value, self.dims)

    def read_batch(self, array: Array) -> Any:
        return self.read(array)

    def write_batch(self, values: Any) -> Array:
        return self._checked(values, (-1, *self.dims))

    def _checked(self, value: Any, dims: tuple[int, ...]) -> Array:
        array = np.asarray(value, self.dtype)
        if array.ndim != len(dims) or any(dim not in (-1, size) for dim, size in zip(dims, array.shape)):
            raise ValueError(f"expected an array of shape {list(dims)}, got {list(array.shape)}")
        return datatypes.as_bytes(array) if self.dtype == OBJECT else array


class TorchKind(ArrayKind):
    """A tensor of PyTorch."""

    def read(self, array: Array) -> Any:
        import torch

        return torch.from_numpy(array if array.flags.writeable else array.copy())

    def _checked(self, value: Any, dims: tuple[int, ...]) -> Array:
        return super()._checked(value.detach().cpu().numpy() if hasattr(value, "detach") else value, dims)


class ScalarKind(Kind):
    """A number or a boolean."""

    def __init__(self, dtype: np.dtype[Any], of: Callable[[Any], Any], adapter: Adapter | None = None) -> None:
        super().__init__(dtype, (1,), adapter)
        self._of = of

    def read(self, array: Array) -> Any:
        return self.checked(self._of(array.reshape(-1)[0]))

    def write(self, value: Any) -> Array:
        return _whole(self.plain(value), self.dtype).reshape(1)


class TextKind(Kind):
    """A string, or a type whose values are strings in JSON, such as dates."""

    def __init__(self, adapter: Adapter | None = None) -> None:
        super().__init__(OBJECT, (1,), adapter)

    def read(self, array: Array) -> Any:
        return self.checked(_text(array.reshape(-1)[0]))

    def write(self, value: Any) -> Array:
        text = self.plain(value)
        if not isinstance(text, str):
            raise TypeError(f"expected a string, got {type(text).__name__}")
        return _one(text.encode())


class BytesKind(TextKind):
    """Bytes."""

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "string", "format": "binary"}

    def read(self, array: Array) -> Any:
        return bytes(array.reshape(-1)[0])

    def write(self, value: Any) -> Array:
        return _one(value.encode() if isinstance(value, str) else bytes(value))


class BodyKind(BytesKind):
    """The body of an HTTP response."""

    def write(self, value: Any) -> Array:
        if not isinstance(value, Response):
            raise TypeError(f"expected a charonia.Response, got {type(value).__name__}")
        return _one(value.content)


class ListKind(Kind):
    """A list of scalars or strings, or of lists of them."""

    def __init__(self, element: Kind, depth: int, adapter: Adapter | None = None) -> None:
        super().__init__(element.dtype, (-1,) * depth, adapter)
        self._element = element

    @property
    def schema(self) -> dict[str, Any]:
        return super().schema if self.adapter is not None else _nested(self._element.schema, self.dims)

    def read(self, array: Array) -> Any:
        if self.dtype != OBJECT:
            return self.checked(array.tolist())
        return self.checked((array if isinstance(self._element, BytesKind) else _decoded(array)).tolist())

    def write(self, value: Any) -> Array:
        value = self.plain(value)
        array = _whole(value if isinstance(value, np.ndarray) else list(value), self.dtype)
        if not array.size:
            array = array.reshape(array.shape + (0,) * (len(self.dims) - array.ndim))
        if array.ndim != len(self.dims):
            raise ValueError(f"expected a list of {len(self.dims)} levels, got an array of shape {list(array.shape)}")
        return datatypes.as_bytes(array) if self.dtype == OBJECT else array


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

    def example(self) -> Any:
        """Return a small image."""
        from PIL import Image

        return Image.new("RGB", (32, 32))

    def write(self, value: Any, accept: str = "") -> Array:
        """Return a data URL, which JSON can carry and browsers show.

        Args:
            value: The image.
            accept: The client's header field: the first of PNG, JPEG and WebP in it is the form, PNG without any.
        """
        is_any = "image/*" in accept or "image/png" in accept
        form = next((each for each in ("jpeg", "webp") if not is_any and f"image/{each}" in accept), "png")
        if form == "jpeg" and value.mode not in ("L", "RGB", "CMYK"):
            value = value.convert("RGB")
        data = io.BytesIO()
        value.save(data, form)
        return _one(f"data:image/{form};base64,".encode() + base64.b64encode(data.getvalue()))


class JsonKind(TextKind):
    """What JSON can carry: records, dictionaries, unions, lists of them."""

    adapter: Adapter
    allow_nan = True

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter)

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "string", "contentMediaType": "application/json", "contentSchema": self.adapter.schema}

    def read(self, array: Array) -> Any:
        return self.adapter.read(bytes(array.reshape(-1)[0]))

    def checked(self, value: Any) -> Any:
        with contextlib.suppress(ValueError):
            return super().checked(value)
        return value  # an example that the type refuses, such as a text with a pattern, still shows the form

    def write(self, value: Any) -> Array:
        return _one(json_text(value, allow_nan=self.allow_nan))


class FrameKind(JsonKind):
    """A data frame of pandas: a list of records, or an object of columns."""

    def __init__(self, frame: Any) -> None:
        super().__init__(Adapter(_FRAME))
        self._frame = frame

    def read(self, array: Array) -> Any:
        return self._frame(super().read(array))


class FlatKind(ArrayKind):
    """A number an item, as an array of one dimension in the function."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        super().__init__(dtype, (1,))

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": _JSON_TYPES[self.dtype.kind]}

    def read_batch(self, array: Array) -> Any:
        return self.read(array.reshape(-1))

    def write_batch(self, values: Any) -> Array:
        return self._checked(np.asarray(values, self.dtype).reshape(-1, 1), (-1, 1))


class ColumnKind(FlatKind):
    """A column of the data frame that an object gets."""

    def __init__(self, column: DataColumn) -> None:
        super().__init__(column.tensor)
        self._column = column

    @property
    def schema(self) -> dict[str, Any]:
        return self._column.schema

    def read_batch(self, array: Array) -> Any:
        """Return the elements, which `DataTable.frame` reads."""
        return array.reshape(-1)

    def write_batch(self, values: Any) -> Array:
        return self._column.write(values).reshape(-1, 1)


def _nested(schema: dict[str, Any], dims: tuple[int, ...]) -> dict[str, Any]:
    """Return the schema of nested lists with these dimensions."""
    for dim in reversed(dims):
        schema = {"type": "array", "items": schema, **({"minItems": dim, "maxItems": dim} if dim >= 0 else {})}
    return schema


def _whole(value: Any, dtype: np.dtype[Any]) -> Array:
    """Return a value as an array of a dtype; integers must be whole."""
    array = np.asarray(value)
    if dtype.kind in "iu" and array.dtype.kind == "f" and (array % 1 != 0).any():
        raise ValueError(f"expected integers, got {array[array % 1 != 0].reshape(-1)[0]}")
    return np.asarray(value, dtype)


def _one(element: bytes) -> Array:
    array: Array = np.empty(1, OBJECT)
    array[0] = element
    return array


def _text(element: bytes) -> str:
    try:
        return element.decode() if isinstance(element, bytes) else str(element)
    except UnicodeDecodeError:
        raise BadRequest("expected text in UTF-8, got other bytes") from None


def _decoded(array: Array) -> Array:
    decoded: Array = np.empty(array.size, OBJECT)
    decoded[:] = [_text(element) for element in array.ravel().tolist()]
    return decoded.reshape(array.shape)
