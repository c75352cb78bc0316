"""Members of a request by name, such as sampling parameters: known ones are checked, others are refused. Pure."""

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple


class RequestMember(NamedTuple):
    """Valid values of a member."""

    words: str
    fits: Callable[[Any], bool]


class MemberError(ValueError):
    """A wrong member; the text begins with its name."""


def check(name: str, value: Any, member: RequestMember) -> None:
    """Raise MemberError for a value that a member cannot have."""
    if not member.fits(value):
        raise MemberError(f"{name}: expected {member.words}, got {json.dumps(value)[:100]}")


def read_members(fields: Mapping[str, Any], known: Mapping[str, RequestMember]) -> dict[str, Any]:
    """Return the values of members; texts may stand for other values, and None for the default.

    Raises:
        MemberError: One is unknown, or has a value that it cannot have.
    """
    values = {}
    for name, value in fields.items():
        member = known.get(name)
        if member is None:
            raise MemberError(f"{name}: there is no such parameter{closest_hint(name, known)}")
        if value is not None:
            read = _read(value)
            values[name] = read if member.fits(read) else value
            check(name, values[name], member)
    return values


def _read(value: Any) -> Any:
    """Return what a text stands for, such as a number; lists and flags of some clients are texts."""
    try:
        found = json.loads(value.lower() if value.lower() in ("true", "false") else value)
    except (AttributeError, ValueError):
        found = value
    if isinstance(found, str):
        return value
    return int(found) if isinstance(found, float) and found.is_integer() else found


def closest_hint(name: str, known: Iterable[str]) -> str:
    """Return a hint at the known name that is most like a wrong one, "" for none."""
    found = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean '{found[0]}'?" if found else ""


ABOVE_0 = math.ulp(0.0)
"""The least number above 0."""


def number(least: float = -math.inf, most: float = math.inf) -> RequestMember:
    """Return a member that is a finite number from `least` to `most`."""
    above = "above 0" if least == ABOVE_0 else f"of at least {least:g}" if least > -math.inf else ""
    words = f"a number {above}" if most == math.inf else f"a number {above} and up to {most:g}"
    words = f"a number from {least:g} to {most:g}" if most < math.inf and least != ABOVE_0 else words
    return RequestMember(
        words.rstrip(), lambda value: type(value) in (int, float) and math.isfinite(value) and least <= value <= most
    )


def integer(least: int, most: float = math.inf) -> RequestMember:
    """Return a member that is a whole number from `least` to `most`."""
    words = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
    return RequestMember(f"a whole number {words}", lambda value: type(value) is int and least <= value <= most)


def is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def is_format(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("type") not in ("text", "json_object", "json_schema"):
        return False
    schema = value.get("json_schema")
    return value["type"] != "json_schema" or (isinstance(schema, dict) and isinstance(schema.get("schema"), dict))


FLAG = RequestMember("a boolean", lambda value: type(value) is bool)
TEXT = RequestMember("a string", lambda value: isinstance(value, str))
TEXTS = RequestMember("an array of strings", is_texts)
STOPS = RequestMember("a string or an array of strings", lambda value: isinstance(value, str) or is_texts(value))
IDS = RequestMember(
    "an array of ids", lambda value: isinstance(value, list) and all(type(each) is int for each in value)
)
OBJECT = RequestMember("an object", lambda value: isinstance(value, dict))
FORMAT = RequestMember("an object of type text, json_object, or json_schema with its schema", is_format)
