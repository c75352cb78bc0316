"""Records as plain values and back, for messages between processes. Pure.

A dataclass or a named tuple becomes the list of its fields, an enumeration the name of its member. The type says how to
read the values again: both ends run the same code, so that nothing else needs to be in the message.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


def plain(value: object) -> object:
    """Return a record as values that a message can hold."""
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value):
        return [plain(getattr(value, each.name)) for each in fields(value)]
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


def record(kind: type[T], value: object) -> T:
    return cast(T, _read(kind, value))


def _read(kind: Any, value: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if NoneType in arguments:  # `X | None`
        return None if value is None else _read(next(each for each in arguments if each is not NoneType), value)
    if origin is None:
        if isinstance(kind, type) and issubclass(kind, Enum):
            return kind[value]
        hints = _hints(kind)
        return kind(*map(_read, hints, value)) if hints else value
    if issubclass(origin, Mapping):
        of_key, of_value = arguments
        return {_read(of_key, key): _read(of_value, each) for key, each in value.items()}
    if issubclass(origin, tuple) and arguments[-1] is not ...:
        return tuple(map(_read, arguments, value))
    if issubclass(origin, Sequence):
        return (tuple if issubclass(origin, tuple) else list)(_read(arguments[0], each) for each in value)
    return value


@cache
def _hints(kind: Any) -> tuple[Any, ...]:
    """Return the types of the fields of a record, empty for other types."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return tuple(hints[each.name] for each in fields(kind))
    names = getattr(kind, "_fields", ())
    hints = get_type_hints(kind) if names else {}
    return tuple(hints[name] for name in names)
