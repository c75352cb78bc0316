"""Records in annotations: dataclasses, pydantic models, TypedDicts and NamedTuples, and how values become them."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import TYPE_CHECKING

from .service import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


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
            yield name, without_none(hints_of(record).get(name, field.annotation))[0], field.is_required()
        return
    optional = set(getattr(record, "_field_defaults", ())) | set(getattr(record, "__optional_keys__", ()))
    if dataclasses.is_dataclass(record):
        missing = dataclasses.MISSING
        optional |= {
            f.name for f in dataclasses.fields(record) if f.default is not missing or f.default_factory is not missing
        }
    for name, hint in hints_of(record).items():
        yield name, without_none(hint)[0], name not in optional


def built(annotation: Any, value: Any) -> Any:
    """Return the record that plain values describe; other types as they are.

    Raises:
        BadRequest: They describe none.
    """
    annotation = without_none(annotation)[0]
    if hasattr(annotation, "model_validate"):
        try:
            return annotation.model_validate(value)
        except ValueError as error:
            raise BadRequest(_problems(error)) from None
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is list and arguments and isinstance(value, list):
        return [built(arguments[0], each) for each in value]
    if not is_record(annotation) or typing.is_typeddict(annotation):
        return value
    if not isinstance(value, dict):
        raise BadRequest(f"expected an object with the fields of {annotation.__name__}, got {type(value).__name__}")
    hints = hints_of(annotation)
    try:
        return annotation(**{name: built(hints.get(name), each) for name, each in value.items()})
    except (TypeError, ValueError) as error:
        raise BadRequest(str(error)) from None


def example_of(annotation: Any, depth: int = 3) -> Any:
    """Return what JSON may have for a type: an element of each list, the required fields of each record.

    Args:
        annotation: The type.
        depth: Records within each other that are filled in; a type may contain itself.
    """
    annotation = expanded(without_none(expanded(annotation))[0])
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return example_of(annotation.__origin__, depth)
    if origin is typing.Literal:
        return arguments[0]
    if origin is list:
        return [example_of(arguments[0], depth)] if depth else []
    if is_record(annotation) and depth:
        return {name: example_of(hint, depth - 1) for name, hint, is_required in fields_of(annotation) if is_required}
    return {bool: True, int: 1, float: 0.5, str: "hello"}.get(annotation, {})


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
        if len(others) == 1:
            return others[0], True
    return annotation, False


def _problems(error: Any) -> str:
    """Return what a pydantic model says is wrong."""
    if not hasattr(error, "errors"):
        return str(error)
    return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
