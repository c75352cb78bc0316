"""How values of each type become tensors, and tensors values."""

from __future__ import annotations

import base64
import binascii
import io
import typing
from typing import TYPE_CHECKING

import numpy as np

from ....channel import datatypes
from ....channel.tables import OBJECT
from .records import Adapter, json_text, made_up
from .service import BadRequest, Response

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ....channel.datatypes import Array
    from ....channel.tables import DataColumn

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
        try:
            return self.checked(made_up(self.adapter.schema))
        except (LookupError, TypeError, ValueError):
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
        """Return the array, in the annotated dtype."""
        return self._checked(value, self.dims)

    def read_batch(self, array: Array) -> Any:
        return self.read(array)

    def write_batch(self, values: Any) -> Array:
        """Return the array, in the annotated dtype."""
        return self._checked(values, (-1, *self.dims))

    def _checked(self, value: Any, dims: tuple[int, ...]) -> Array:
        array = np.asarray(value, self.dtype)
        if array.ndim != len(dims) or any(dim not in (-1, size) for dim, size in zip(dims, array.shape)):
            raise ValueError(f"expected an array of shape {list(dims)}, got {list(array.shape)}")
        return _encoded(array) if self.dtype == OBJECT else array


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
        return _one(str(self.plain(value)).encode())


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
        """Return the list."""
        if self.dtype != OBJECT:
            return self.checked(array.tolist())
        return self.checked((array if isinstance(self._element, BytesKind) else _decoded(array)).tolist())

    def write(self, value: Any) -> Array:
        """Return an array."""
        value = self.plain(value)
        array = _whole(value if isinstance(value, np.ndarray) else list(value), self.dtype)
        if array.ndim != len(self.dims):
            raise ValueError(f"expected a list of {len(self.dims)} levels, got an array of shape {list(array.shape)}")
        return _encoded(array) if self.dtype == OBJECT else array


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
        """Return the array, of one dimension."""
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
    return _mapped(array, _text)


def _encoded(array: Array) -> Array:
    return _mapped(array, lambda element: element if isinstance(element, bytes) else str(element).encode())


def _mapped(array: Array, change: Callable[[Any], Any]) -> Array:
    changed: Array = np.empty(array.size, OBJECT)
    changed[:] = [change(element) for element in array.ravel().tolist()]
    return changed.reshape(array.shape)
