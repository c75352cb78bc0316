"""Readers of the values of options, from the text of an argument or a value in a configuration file.

A reader raises ValueError with the expected and the actual value; the parser puts the option's name before it. Lists
are written as a list, as comma-separated text, as `start:stop:step`, or as a mapping of start, stop and step; ranges
include both ends.
"""

import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from pathlib import Path
from typing import TypeVar

from charonia.core.errors import NAMES_SHOWN, ServingError, invalid
from charonia.stores.location import is_store

Read = Callable[[object], object]
"""A reader."""

INTEGER_MAX = 2**31 - 1
VALUES_MAX = 10_000
"""Limit of values in a range, because a step of 1 from one to a million is most likely a mistake."""

STDOUT = Path("-")
"""In place of a file to write."""

TRUE = frozenset({"true", "1", "on", "yes"})
FALSE = frozenset({"false", "0", "off", "no"})

_E = TypeVar("_E", bound=Enum)
_T = TypeVar("_T")

_RANGE_KEYS = frozenset({"start", "stop", "step"})
_SHOWN_MAX = 80
_UNITS_NS = {
    "ns": 1,
    "us": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|ms|s|m|h)?")


def shown(value: object) -> str:
    """Return a value as quoted in messages."""
    text = value if isinstance(value, str) else repr(value)
    return f"'{text}'" if len(text) <= _SHOWN_MAX else f"'{text[: _SHOWN_MAX - 3]}...'"


def filled(value: object) -> str:
    """Read a non-empty text; numbers in a file count as text."""
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        raise ValueError(f"expected a value, got {shown(value)}")
    return str(value)


def path(value: object) -> Path:
    """Read the path of a file or folder and make it absolute; - stays."""
    found = Path(filled(value)).expanduser()
    return found if found == STDOUT else found.absolute()


def path_text(value: object) -> str:
    """Read a path as `path` does, where the option also takes something else, such as an address."""
    text = filled(value)
    return text if "://" in text else str(path(text))


def fetched(value: object) -> Path:
    """Read a path as `path` does; what is in a store is fetched first, and removed when the program exits."""
    text = filled(value)
    if not is_store(text):
        return path(text)
    from charonia.stores.remote import local_copy  # here: few options name a store

    try:
        return local_copy(text)
    except ServingError as error:
        raise ValueError(f"{error.message} (hint: {error.hint})" if error.hint else error.message) from None


def path_or_none(text: str) -> str:
    """Read a path as `path` does, "" for none."""
    return text and path_text(text)


def boolean(value: object) -> bool:
    """Read true/1/on/yes or false/0/off/no, in any case."""
    word = str(value).strip().lower()
    if word in TRUE:
        return True
    if word in FALSE:
        return False
    raise ValueError(f"expected true or false, got {shown(value)}")


def switch(value: object) -> bool:
    """Read an option whose argument is optional; without one it is true."""
    return value == "" or boolean(value)


def integer(low: int, high: int = INTEGER_MAX) -> Callable[[object], int]:
    """Return a reader of integers from `low` to `high`."""

    def read(value: object) -> int:
        number = _integer(value)
        if number is None or not low <= number <= high:
            raise ValueError(f"expected an integer from {low} to {high}, got {shown(value)}")
        return number

    return read


def number(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[object], float]:
    """Return a reader of finite numbers from `low` to `high`; `above` excludes `low`."""

    def read(value: object) -> float:
        found = _number(value)
        if found is None or not low <= found <= high or (above and found == low):
            least = f"a number above {low:g}" if above else f"a number of at least {low:g}"
            most = "" if high == math.inf else f" and at most {high:g}"
            raise ValueError(f"expected {least}{most}, got {shown(value)}")
        return found

    return read


def word(known: Mapping[str, _T], expected: str = "") -> Callable[[object], _T]:
    """Return a reader of words, in any case, that maps each to a value; `expected` names them in the error."""
    by_word = {name.lower(): value for name, value in known.items()}

    def read(value: object) -> _T:
        given = str(value).strip().lower()
        if given not in by_word:
            raise ValueError(f"expected {expected or ' or '.join(known)}, got {shown(value)}")
        return by_word[given]

    return read


def choice(kind: type[_E]) -> Callable[[object], _E]:
    """Return a reader of the values of an enumeration."""
    return word({str(member.value): member for member in kind})


def one_of(names: Collection[str]) -> Callable[[object], str]:
    """Return a reader of one of these names."""
    return word({name: name for name in names}, f"one of {', '.join(names)}")


def duration(default_unit: str) -> Callable[[object], int]:
    """Return a reader of times such as `50ms` or `1.5s` into ns; a number alone is in `default_unit`."""

    def read(value: object) -> int:
        match = _DURATION.fullmatch(str(value).strip())
        if match is None:
            raise ValueError(f"expected a time such as 50ms or 2s, got {shown(value)}")
        return round(float(match[1]) * _UNITS_NS[match[2] or default_unit])

    return read


def seconds(value: object) -> float:
    """Read a time in seconds: a number, or a text such as 90s, 5m or 1h."""
    return duration("s")(value) / 1e9


def assignment(value: str) -> tuple[str, str, str]:
    """Read `<owner>,<key>=<value>` or `<key>=<value>`; the owner is "" in the second form."""
    head, equals, setting = value.partition("=")
    owner, comma, key = head.rpartition(",")
    if not equals or not key or (comma and not owner):
        raise ValueError(f"expected <name>,<key>=<value> or <key>=<value>, got '{value}'")
    return owner, key, setting


KEY_VARIABLE = "CHARONIA_API_KEY"
"""Environment variable with the API key of a server, for commands that are given none."""

HEADER_HELP = f"Header, or a file with one; repeatable. The API key can also be in {KEY_VARIABLE}"
"""Help of the option that `header` reads."""

_KEY_HEADERS = ("authorization", "x-api-key")


def file_text(path: str) -> str:
    """Return the text in a file. Raises ValueError if it cannot be read."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"'{path}' cannot be read: {getattr(error, 'strerror', None) or error}") from None


def header(value: str) -> tuple[str, str]:
    """Read `Name:Value`, or `@FILE`, whose content is that: other users see the command line, but not the file."""
    text = value
    if value.startswith("@"):
        text = file_text(value[1:]).strip()
    name, colon, content = text.partition(":")
    if not colon or not name.strip() or "\n" in text or "\r" in text:
        raise ValueError("expected Name:Value" + (f" in '{value[1:]}'" if text is not value else f", got '{value}'"))
    return name.strip(), content.strip()


def api_key(option: str, variable: str = KEY_VARIABLE, environment: Mapping[str, str] = os.environ) -> str:
    """Return the API key of an option, or else of the environment, without white space around it; "" for none.

    Raises:
        ServingError: INVALID_ARG for characters that a header cannot have; the message does not show the key.
    """
    key = (option or environment.get(variable, "")).strip()
    if not (key.isascii() and key.isprintable()):
        source = "the API key" if option else variable
        raise invalid(f"{source}: expected printable ASCII characters, got others")
    return key


def with_key(headers: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Return headers with the API key of the environment, where they have none. Raises as `api_key`."""
    key = api_key("")
    has_key = any(name.lower() in _KEY_HEADERS for name, _ in headers)
    return headers if has_key or not key else (*headers, ("x-api-key", key))


def name_and_value(text: str) -> tuple[str, str]:
    """Read NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"expected NAME=VALUE, got '{text}'")
    return name, value


def names(value: object) -> tuple[str, ...]:
    """Read names: a list, or comma-separated text."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list) or not value:
        raise ValueError(f"expected a list of names, or names separated by commas, got {shown(value)}")
    return tuple(filled(part) for part in value)


def integers(low: int) -> Callable[[object], tuple[int, ...]]:
    """Return a reader of integers of at least `low`, in any form of a list; sorted, without duplicates."""
    single = integer(low)
    return lambda value: tuple(sorted({item for part in _parts(value) for item in _expanded(part, single)}))


def numbers(value: object) -> tuple[float, ...]:
    """Read numbers above 0, in any form of a list; sorted, without duplicates. Ranges contain integers."""
    single = number(0, above=True)
    found: set[float] = set()
    for part in _parts(value):
        found |= set(_expanded(part, integer(1))) if _is_range(part) else {single(part)}
    return tuple(sorted(found))


def pairs(value: object) -> tuple[tuple[str, str], ...]:
    """Read a mapping of names to single values, such as the flags of a program; a bare flag is "" or true."""
    if isinstance(value, list) and all(isinstance(part, Mapping) for part in value):
        value = {key: inner for part in value for key, inner in part.items()}
    if not isinstance(value, Mapping):
        raise ValueError(f"expected names with values, got {shown(value)}")
    found = []
    for name, inner in value.items():
        for single in inner if isinstance(inner, list) else [inner]:
            if isinstance(single, Mapping | list):
                raise ValueError(f"{name}: expected a single value, got {shown(single)}")
            found.append((filled(name), "" if single in (None, True) else str(single)))
    return tuple(found)


def by_version(text: str) -> dict[str, float]:
    """Read a number for each version, such as `1=90,2=10`; nothing is an empty mapping."""
    found = {}
    for part in text.split(",") if text else []:
        version, equals, value = part.partition("=")
        try:
            found[version.strip()] = float(value)
        except ValueError:
            equals = ""
        if not equals or not version.strip().isdecimal():
            raise ValueError(f"expected VERSION=NUMBER, separated by commas, got '{part}'")
    return found


def _integer(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    try:
        return int(value)
    except ValueError:
        return None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        found = float(value)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def _parts(value: object) -> list[object]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    elif not isinstance(value, list):
        value = [value]
    if not value:
        raise ValueError("expected a value, a list or a range, got an empty list")
    return list(value)


def _is_range(part: object) -> bool:
    return isinstance(part, Mapping) or (isinstance(part, str) and ":" in part)


def _expanded(part: object, single: Callable[[object], int]) -> list[int]:
    if isinstance(part, Mapping):
        if not {"start", "stop"} <= part.keys() <= _RANGE_KEYS:
            raise ValueError(f"expected start, stop and maybe step, got {', '.join(map(str, part)) or 'nothing'}")
        bounds = [part["start"], part["stop"], part.get("step", 1)]
    elif isinstance(part, str) and ":" in part:
        bounds = [*part.split(":"), 1] if part.count(":") == 1 else list(part.split(":"))
        if len(bounds) != 3:
            raise ValueError(f"expected start:stop:step, got {shown(part)}")
    else:
        return [single(part)]
    start, stop, step = single(bounds[0]), single(bounds[1]), integer(1)(bounds[2])
    if stop < start:
        raise ValueError(f"expected a stop of at least {start}, got {stop}")
    if (stop - start) // step >= VALUES_MAX:
        raise ValueError(f"expected at most {VALUES_MAX} values, got a range of {(stop - start) // step + 1}")
    return list(range(start, stop + 1, step))


def only_model(names: Collection[str], where: str = "the server") -> str:
    """Return the name of the only model, for a command without a name. Raises ServingError."""
    if len(names) == 1:
        return next(iter(names))
    listed = ", ".join(sorted(names)[:NAMES_SHOWN]) + ", ..." * (len(names) > NAMES_SHOWN)
    raise invalid(
        "expected the name of a model, got none", hint=f"{where} has {listed}" if names else f"{where} has none"
    )
