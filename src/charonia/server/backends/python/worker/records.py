"""Annotations of service files: records, and values that JSON describes, which pydantic reads, checks and describes."""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from typing import TYPE_CHECKING

from .service import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

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


def made_up(schema: Any, defs: Any = None, depth: int = 3) -> Any:
    """Return a value that fits a JSON schema: the first choice, an element of each list, the required members.

    Args:
        schema: The schema.
        defs: Schemas that it refers to; by default its own.
        depth: Objects and lists within each other that are filled in; a schema may contain itself.
    """
    defs = schema.get("$defs", {}) if defs is None else defs
    if "$ref" in schema:
        return made_up(defs.get(schema["$ref"].rpartition("/")[2], {}), defs, depth)
    for key, first in (("const", False), ("default", False), ("examples", True), ("enum", True)):
        if key in schema and schema[key] is not None:
            return schema[key][0] if first else schema[key]
    for choices in (schema.get("anyOf"), schema.get("oneOf"), schema.get("allOf")):
        if choices:
            return made_up(next((each for each in choices if each.get("type") != "null"), choices[0]), defs, depth)
    kind = schema.get("type")
    if kind == "object":
        required = schema.get("required", ()) if depth else ()
        return {name: made_up(schema["properties"][name], defs, depth - 1) for name in required}
    if kind == "array":
        first = schema.get("prefixItems", ())
        count = max(1, schema.get("minItems", 0)) - len(first) if "items" in schema and depth > 1 else 0
        return [made_up(each, defs, depth - 1) for each in first] + [
            made_up(schema["items"], defs, depth - 1) for _ in range(count)
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
