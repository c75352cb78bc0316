"""Members of a request by name, such as sampling parameters: known ones are read, others are refused. Pure."""

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

INTEGER_MAX = 2**31 - 1


class RequestMember(NamedTuple):
    """One member.

    Attributes:
        words: What it expects.
        read: Returns its value; raises ValueError, TypeError, LookupError or AttributeError for one that it does not
            expect.
    """

    words: str
    read: Callable[[Any], Any]


def read_members(given: Mapping[str, Any], known: Mapping[str, RequestMember]) -> dict[str, Any]:
    """Return the values of members; numbers and truth values may be texts, and None stands for the default.

    Raises:
        ValueError: One is unknown, or has a value that it cannot have; the message begins with its name.
    """
    values = {}
    for name, value in given.items():
        member = known.get(name)
        if member is None:
            raise ValueError(f"{name}: there is no such parameter{near(name, known)}")
        if value is None:
            continue
        try:
            values[name] = member.read(value)
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError):
            raise ValueError(f"{name}: expected {member.words}, got {json.dumps(value)[:100]}") from None
    return values


def near(name: str, known: Iterable[str]) -> str:
    """Return a hint at the known name that is most like a wrong one, "" for none."""
    found = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean '{found[0]}'?" if found else ""


def number(words: str, least: float = -math.inf, most: float = math.inf) -> RequestMember:
    """Return a member that is a finite number from `least` to `most`."""

    def read(value: Any) -> float:
        found = float(value)
        if isinstance(value, bool) or not math.isfinite(found) or not least <= found <= most:
            raise ValueError
        return found

    return RequestMember(words, read)


def integer(least: int, most: int = INTEGER_MAX) -> RequestMember:
    """Return a member that is a whole number from `least` to `most`."""

    def read(value: Any) -> int:
        found = value if isinstance(value, int) else int(value) if isinstance(value, str) else round(value)
        if isinstance(value, bool) or not least <= found <= most or (isinstance(value, float) and found != value):
            raise ValueError
        return found

    bound = f"at least {least}" if most == INTEGER_MAX else f"{least} to {most}"
    return RequestMember(f"a whole number, {bound}", read)


def _flag(value: Any) -> bool:
    return value if isinstance(value, bool) else {"true": True, "false": False}[value.lower()]


def _texts(value: Any) -> list[str]:
    if isinstance(value, str) and value.startswith('["'):  # a list, from a client that sends everything as text
        value = json.loads(value)
    texts = [value] if isinstance(value, str) else list(value)
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError
    return texts


def _ids(value: Any) -> list[int]:
    read = integer(0).read
    return [read(each) for each in (json.loads(value) if isinstance(value, str) else list(value))]


def _object(value: Any) -> dict[str, Any]:
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise TypeError
    return found


FLAG = RequestMember("true or false", _flag)
TEXTS = RequestMember("a text or a list of texts, none of them empty", _texts)
IDS = RequestMember("a list of ids of tokens", _ids)
OBJECT = RequestMember("an object", _object)
