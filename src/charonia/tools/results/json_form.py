"""The JSON of a run: fields by the names of the records, enumerations by value, format and version first. Pure."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from charonia.core.errors import ServingError, invalid
from charonia.core.latency import LatencyHistogram
from charonia.tools.results.records import PerfRun

_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class DocumentForm(Generic[_R]):
    """The JSON of a kind of results.

    Attributes:
        what: Whose JSON it is, for errors.
        version: Raised when a reader of the old form would misread the new one.
    """

    kind: type[_R]
    what: str
    name: str
    version: int = 1

    def write(self, value: _R) -> str:
        return json.dumps({"format": self.name, "version": self.version, **plain(value)}, allow_nan=False)

    def read(self, text: str | bytes, source: str = "the JSON text") -> _R:
        """Return what JSON text describes. Unknown fields are ignored, because a newer writer may have more.

        Raises:
            ServingError: INVALID_ARG if it is not JSON of this kind and version.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise invalid(f"{source}: expected JSON, got: {error}") from None
        if not isinstance(data, dict) or data.get("format") != self.name:
            raise invalid(f"{source}: expected the JSON of {self.what} ('format': '{self.name}')")
        if data.get("version") != self.version:
            raise invalid(f"{source}: expected version {self.version} of the format, got {data.get('version')!r}")
        try:
            return record(self.kind, data)
        except ServingError as error:
            raise invalid(f"{source}: {error.message}") from None
        except (KeyError, TypeError, ValueError) as error:
            raise invalid(f"{source}: not the JSON of {self.what}: {error}") from None


def plain(value: Any) -> Any:
    """Return a record of this package, or of a tool, as values of JSON."""
    if is_dataclass(value) and not isinstance(value, type):
        kept = [field.name for field in fields(value) if field.metadata.get("json", True)]
        return {name: plain(getattr(value, name)) for name in kept}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, LatencyHistogram):
        return value.to_json()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def record(kind: type[_R], data: Any) -> _R:
    """Return a record of this type from the values of `plain`.

    Raises:
        KeyError: A field without a default is missing.
        TypeError: A value has the wrong type.
        ValueError: A value is invalid.
    """
    if not isinstance(data, dict):
        raise TypeError(f"{kind.__name__}: expected an object, got {type(data).__name__}")
    hints = _hints(kind)  # type: ignore[arg-type]  # classes are hashable
    values = {}
    for field in fields(kind):  # type: ignore[arg-type]  # a record
        if field.name in data:
            values[field.name] = _value(hints[field.name], data[field.name], f"{kind.__name__}.{field.name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise KeyError(f"{kind.__name__}.{field.name} is missing")
    return kind(**values)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _value(hint: Any, data: Any, where: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        inner = next(option for option in get_args(hint) if option is not NoneType)
        return None if data is None else _value(inner, data, where)
    if origin is tuple:
        return tuple(_value(get_args(hint)[0], item, where) for item in _of(list, data, where))
    if origin in (dict, Mapping):
        return {key: _value(get_args(hint)[1], item, where) for key, item in _of(dict, data, where).items()}
    if hint is LatencyHistogram:
        return LatencyHistogram.from_json(_of(dict, data, where))
    if issubclass(hint, Enum):
        return hint(data)
    if isinstance(hint, type) and is_dataclass(hint):
        return record(hint, data)
    if hint is float:
        return float(_of((int, float), data, where))
    return _of(hint, data, where)


def _of(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise TypeError(f"{where}: unexpected {type(data).__name__}")
    return data


RUN = DocumentForm(PerfRun, "a run", "charonia-perf")
to_json, from_json = RUN.write, RUN.read
