"""The domains of values in calls: numbers, times and texts that every database can store.

Each parameter and each member of a request has one of these types or a narrower one; a test walks all routes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Annotated, Any

from annotated_types import Ge, GroupedMetadata, Le
from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    ConfigDict,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from charonia.core.errors import invalid

INTEGER_MAX = 2**31 - 1
"""Largest id, number and count: an INTEGER of PostgreSQL."""

SIZE_MAX = 2**63 - 1
"""Largest size in bytes: a BIGINT."""

TIME_S_MAX = 253_402_300_799.0
"""The end of the year 9999 in seconds since the epoch: the latest time with a date."""

AMOUNT_MAX = 1e12
"""Largest value of other numbers: weights, milliseconds."""

DEPTH_MAX = 64
"""Most levels of a free-form JSON object."""

LIMIT_MAX = 200
"""Most entries of an answer."""

TEXT_PATTERN = r"^[^\x00]*$"


def check_json(value: Any) -> Any:
    """Return a JSON value whose numbers are finite and of 64 bits, and whose texts every database can store.

    Raises:
        PydanticCustomError: A ValueError that describes the invalid value.
    """
    waiting: list[tuple[Any, int]] = [(value, 1)]
    while waiting:
        found, depth = waiting.pop()
        problem = _problem(found)
        if depth > DEPTH_MAX and isinstance(found, dict | list):
            problem = f"JSON may have at most {DEPTH_MAX} levels"
        if problem:
            raise PydanticCustomError("json_domain", problem)
        if isinstance(found, dict):
            waiting += [(each, depth + 1) for pair in found.items() for each in pair]
        elif isinstance(found, list):
            waiting += [(each, depth + 1) for each in found]
    return value


def _problem(value: object) -> str:
    match value:
        case str() if "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
            return "Texts must be Unicode without NUL"
        case float() if not isfinite(value):
            return "Numbers must be finite"
        case int() if not -SIZE_MAX - 1 <= value <= SIZE_MAX:
            return "Integers must fit into 64 bits"
    return ""


Text = Annotated[str, StringConstraints(pattern=TEXT_PATTERN)]
Number = Annotated[int, Ge(0), Le(INTEGER_MAX)]
Size = Annotated[int, Ge(0), Le(SIZE_MAX)]
Time = Annotated[float, Ge(0), Le(TIME_S_MAX), AllowInfNan(False)]
Amount = Annotated[float, Ge(0), Le(AMOUNT_MAX), AllowInfNan(False)]
JsonObject = Annotated[dict[str, Any], AfterValidator(check_json)]


_EXPECTED = {
    "missing": "a value",
    "invalid_key": "a text",
    "string_too_short": "at least {min_length} characters",
    "string_too_long": "at most {max_length} characters",
    "string_pattern_mismatch": "a text that matches {pattern}",
    "finite_number": "a finite number",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "too_short": "at least {min_length} of them",
    "too_long": "at most {max_length} of them",
}
"""Expected values, by type of the error of pydantic."""

_TYPES = {"string": "a text", "int": "a whole number", "float": "a number", "bool": "true or false"}
_TYPES |= {"list": "a list", "tuple": "a list", "dict": "an object", "model": "an object"}
"""Those for other types, by their first word: `int_type`, `int_parsing`, `int_from_float`."""

_KEY = "[key]"
"""The end of the location of a name, in errors of pydantic."""


def problems_of(errors: Sequence[Mapping[str, Any]], whole: str = "body") -> list[str]:
    """Return errors of pydantic as messages: "models[0].name: expected a text, got 3".

    Args:
        whole: The subject of a problem that has no location.
    """
    return [f"{_path(error['loc']) or whole}: {_said(error)}" for error in errors]


def _path(location: Sequence[str | int]) -> str:
    names = location[:-2] if location and location[-1] == _KEY else location
    text = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in names)
    return text.removeprefix(".")


def _said(error: Mapping[str, Any]) -> str:
    kind, value, about = error["type"], error["input"], error.get("ctx", {})
    if kind == "json_invalid":
        return f"expected JSON: {about['error']}"
    form = _EXPECTED.get(kind) or _TYPES.get(kind.partition("_")[0])
    if form is None:
        return str(error["msg"])
    what = "a text without NUL" if about.get("pattern") == TEXT_PATTERN else form.format(**about)
    return f"expected {what}, got {'nothing' if kind == 'missing' else about.get('actual_length') or shown(value)}"


def shown(value: object) -> str:
    """Return a value for a message, cut to 80 characters."""
    text = f"'{value}'" if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def refused(what: str, value: object) -> PydanticCustomError:
    """Return the error of a validator about a value.

    Args:
        what: The expected value.
    """
    return PydanticCustomError("expected", f"expected {what}, got {shown(value)}")


def expected(what: str, *, is_shown: bool = True) -> WrapValidator:
    """Name a type in messages: any problem with a value is reported as "expected WHAT, got VALUE".

    Args:
        is_shown: Whether the message may show the value.
    """

    def read(value: object, inner: ValidatorFunctionWrapHandler) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise (refused(what, value) if is_shown else PydanticCustomError("expected", f"expected {what}")) from None

    return WrapValidator(read)


@dataclass(frozen=True, slots=True)
class Whole(GroupedMetadata):
    """The bounds of a whole number."""

    least: int
    most: int

    def __iter__(self) -> Iterator[object]:
        yield Ge(self.least)
        yield Le(self.most)
        yield expected(f"a whole number from {self.least} to {self.most}")


def errors_at(*found: tuple[Sequence[str | int], str]) -> ValidationError:
    """Return the error of a validator with several problems: the location within the value, and the message."""
    details = [
        InitErrorDetails(type=PydanticCustomError("expected", text), loc=tuple(at), input=None) for at, text in found
    ]
    return ValidationError.from_exception_data("value", details)


class RequestBody(BaseModel):
    """Base of the bodies of requests: types are not converted, unknown members are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="wrap")
    @classmethod
    def _name_known_members(cls, value: Any, read: ValidatorFunctionWrapHandler) -> Any:
        try:
            return read(value)
        except ValidationError as error:
            unknown = f"unknown; expected one of {', '.join(cls.model_fields)}"
            found = error.errors(include_url=False)
            raise errors_at(
                *((each["loc"], unknown if each["type"] == "extra_forbidden" else _said(each)) for each in found)
            ) from None


OLDER_PYTHONS = ("3.10", "3.9", "3.8")
"""Versions of Python that only workers of Python models support: their environments have no server."""


NAME_CHARS_MAX = 128

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{NAME_CHARS_MAX - 1}}}")


def check_name(kind: str, name: str) -> str:
    """Return a name."""
    if not _NAME.fullmatch(name):
        raise invalid(
            f"{kind}: expected a name of letters, digits, '_', '.' and '-', got '{name[:NAME_CHARS_MAX]}'",
            hint=f"it begins with a letter or a digit and has at most {NAME_CHARS_MAX} characters",
        )
    return name
