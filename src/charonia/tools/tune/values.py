"""Values of the options of `charonia tune`: from the text of an argument, or from what YAML holds, to what it means.

Each reader takes both and raises ValueError with what it expected and what came. Lists are written as a list, as text
with commas, as `start:stop:step`, or as a mapping of start, stop and step; both ends of a range count.
"""

import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

Read = Callable[[object], object]
"""A reader."""

VALUES_MAX = 10_000
"""Most values of a range: a step of 1 from one to a million is a slip."""

INTEGER_MAX = 2**31 - 1

_TRUE = frozenset({"true", "1", "on", "yes"})
_FALSE = frozenset({"false", "0", "off", "no"})
_RANGE_KEYS = frozenset({"start", "stop", "step"})

_E = TypeVar("_E", bound=StrEnum)


def shown(value: object) -> str:
    """Return a value as a message quotes it."""
    text = value if isinstance(value, str) else repr(value)
    return f"'{text}'" if len(text) <= 80 else f"'{text[:77]}...'"


def text(value: object) -> str:
    """Read a text that is not empty; YAML's numbers count as text."""
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        raise ValueError(f"expected a text, got {shown(value)}")
    return str(value)


def path(value: object) -> Path:
    """Read the path of a file or folder."""
    return Path(text(value)).expanduser()


def flag(value: object) -> bool:
    """Read true or false."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError(f"expected true or false, got {shown(value)}")


def integer(low: int, high: int = INTEGER_MAX) -> Callable[[object], int]:
    """Return a reader of integers from `low` to `high`."""

    def read(value: object) -> int:
        number = _integer(value)
        if number is None or not low <= number <= high:
            most = "" if high == INTEGER_MAX else f" and at most {high}"
            raise ValueError(f"expected an integer of at least {low}{most}, got {shown(value)}")
        return number

    return read


def number(low: float, *, above: bool = False) -> Callable[[object], float]:
    """Return a reader of finite numbers of at least `low`; `above` leaves `low` itself out."""

    def read(value: object) -> float:
        found = _number(value)
        if found is None or found < low or (above and found == low):
            raise ValueError(f"expected a number {'above' if above else 'of at least'} {low:g}, got {shown(value)}")
        return found

    return read


def choice(kind: type[_E]) -> Callable[[object], _E]:
    """Return a reader of the values of an enumeration, in any case."""
    by_word = {member.value.lower(): member for member in kind}

    def read(value: object) -> _E:
        member = by_word.get(str(value).strip().lower())
        if member is None:
            raise ValueError(f"expected {' or '.join(member.value for member in kind)}, got {shown(value)}")
        return member

    return read


def names(value: object) -> tuple[str, ...]:
    """Read names: a list, or text with commas."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list) or not value:
        raise ValueError(f"expected names, as a list or with commas between them, got {shown(value)}")
    return tuple(text(part) for part in value)


def integers(low: int) -> Callable[[object], tuple[int, ...]]:
    """Return a reader of integers in any form of a list, each of at least `low`; sorted, none twice."""
    single = integer(low)

    def read(value: object) -> tuple[int, ...]:
        found = [item for part in _parts(value) for item in _expanded(part, single)]
        return tuple(sorted(set(found)))

    return read


def numbers(low: float) -> Callable[[object], tuple[float, ...]]:
    """Return a reader of numbers above `low` in any form of a list; sorted, none twice. Ranges are of integers."""
    single = number(low, above=True)

    def read(value: object) -> tuple[float, ...]:
        found: list[float] = []
        for part in _parts(value):
            found += _expanded(part, integer(max(1, math.ceil(low)))) if _is_range(part) else [single(part)]
        return tuple(sorted(set(found)))

    return read


def duration(value: object) -> float:
    """Read a time in seconds: a number, or a text such as 90s, 5m or 1h."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    found = _number(value)
    if found is None and isinstance(value, str) and value.strip()[-1:] in units:
        amount = _number(value.strip()[:-1])
        found = None if amount is None else amount * units[value.strip()[-1]]
    if found is None or found < 0:
        raise ValueError(f"expected a time such as 90, 90s or 5m, got {shown(value)}")
    return found


def pairs(value: object) -> tuple[tuple[str, str], ...]:
    """Read a mapping of names to single values, such as the flags of a program; a flag without value is "" or true."""
    if isinstance(value, list) and all(isinstance(part, Mapping) for part in value):
        value = {key: inner for part in value for key, inner in part.items()}
    if not isinstance(value, Mapping):
        raise ValueError(f"expected names with values, got {shown(value)}")
    found = []
    for name, inner in value.items():
        for single in inner if isinstance(inner, list) else [inner]:
            if isinstance(single, Mapping | list):
                raise ValueError(f"{name}: expected a single value, got {shown(single)}")
            found.append((text(name), "" if single in (None, True) else str(single)))
    return tuple(found)


def _integer(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            return None
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
