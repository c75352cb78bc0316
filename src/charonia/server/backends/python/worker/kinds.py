"""How values of each type become tensors, and tensors values."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import io
import json
from typing import TYPE_CHECKING

import numpy as np

from . import datatypes
from .records import built, example_of
from .service import BadRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .datatypes import Array

OBJECT = np.dtype(np.object_)


class Kind:
    """How values of one type are tensors.

    Attributes:
        dtype: numpy dtype of the tensor; that of objects for BYTES.
        dims: Dimensions of one value.
        choice: One of the values that are permitted, None where all of the datatype are.
    """

    def __init__(self, dtype: np.dtype[Any], dims: tuple[int, ...]) -> None:
        self.dtype = dtype
        self.dims = dims
        self.choice: Any = None

    @property
    def data_type(self) -> str:
        return "TYPE_STRING" if self.dtype == OBJECT else f"TYPE_{datatypes.WIRE[self.dtype]}"

    def read(self, array: Array) -> Any:
        raise NotImplementedError

    def write(self, value: Any) -> Array:
        raise NotImplementedError

    def example(self) -> Any:
        """Return a value for requests that are made up, None where any of the datatype will do."""
        return self.choice

    def read_batch(self, array: Array) -> Any:
        return [self.read(row) for row in array]

    def write_batch(self, values: Any) -> Array:
        """Return the tensor of a batch of values."""
        rows = [self.write(value) for value in values]
        array: Array = np.stack(rows) if rows else np.empty((0, *self.dims), self.dtype)
        return array


class ArrayKind(Kind):
    """A numpy array. Of strings: `str` in the function, bytes in tensors."""

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


class ScalarKind(Kind):
    """A number or a boolean."""

    def __init__(self, dtype: np.dtype[Any], of: Callable[[Any], Any]) -> None:
        super().__init__(dtype, (1,))
        self._of = of

    def read(self, array: Array) -> Any:
        return self._of(array.reshape(-1)[0])

    def write(self, value: Any) -> Array:
        return np.asarray(value, self.dtype).reshape(1)


class TextKind(Kind):
    """A string."""

    def __init__(self) -> None:
        super().__init__(OBJECT, (1,))

    def read(self, array: Array) -> Any:
        return _text(array.reshape(-1)[0])

    def write(self, value: Any) -> Array:
        return _one(str(value).encode())


class BytesKind(TextKind):
    """Bytes."""

    def read(self, array: Array) -> Any:
        return bytes(array.reshape(-1)[0])

    def write(self, value: Any) -> Array:
        return _one(value.encode() if isinstance(value, str) else bytes(value))


class ListKind(Kind):
    """A list of scalars or strings, or of lists of them."""

    def __init__(self, element: Kind, depth: int) -> None:
        super().__init__(element.dtype, (-1,) * depth)
        self._element = element

    def read(self, array: Array) -> Any:
        """Return the list."""
        if self.dtype != OBJECT:
            return array.tolist()
        return (array if isinstance(self._element, BytesKind) else _decoded(array)).tolist()

    def write(self, value: Any) -> Array:
        """Return an array."""
        array = np.array(value if isinstance(value, np.ndarray) else list(value), self.dtype)
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
            document = json.loads(array.reshape(-1)[0])
        except ValueError as error:
            raise BadRequest(f"expected JSON: {error}") from None
        return built(self._annotation, document)

    def example(self) -> Any:
        try:
            return example_of(self._annotation)
        except (NameError, TypeError):
            return None  # of a type that is not known yet: an example is no reason to fail

    def write(self, value: Any) -> Array:
        """Return a JSON document."""
        return _one(json.dumps(value, default=_plain).encode())


class FlatKind(ArrayKind):
    """A number an item, as an array of one dimension in the function."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        super().__init__(dtype, (1,))

    def read_batch(self, array: Array) -> Any:
        """Return the array, of one dimension."""
        return self.read(array.reshape(-1))

    def write_batch(self, values: Any) -> Array:
        return self._checked(np.asarray(values, self.dtype).reshape(-1, 1), (-1, 1))


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


def _plain(value: Any) -> Any:
    """Return what `json` can write for a value that it does not know."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"JSON has no form for {type(value).__name__}")
