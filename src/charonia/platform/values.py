"""The domains of values in calls: numbers, times and texts that every database can store.

Each parameter and each member of a request has one of these types or a narrower one; a test walks all routes.
"""

import re
from math import isfinite
from typing import Annotated, Any

from annotated_types import Ge, Le
from fastapi import Query
from pydantic import AfterValidator, AllowInfNan, BaseModel, ConfigDict, StringConstraints
from pydantic_core import PydanticCustomError

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


class RequestBody(BaseModel):
    """Base of the bodies of requests: types are not converted, unknown members are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


Limit = Annotated[int, Query(ge=1, le=LIMIT_MAX, description="How many entries to return.")]
Offset = Annotated[Number, Query(description="How many entries to skip.")]


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
