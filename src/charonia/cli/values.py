"""Values of options: from the text of an argument to what it means.

Each reader raises ValueError with what it expected, which the parser puts behind the option's name.
"""

from collections.abc import Callable
from enum import Enum
from typing import TypeVar

from charonia.core.errors import ServingError
from charonia.server.lifecycle.repository.stores.location import is_store, parse_address

_E = TypeVar("_E", bound=Enum)

_TRUE = frozenset({"true", "1", "on", "yes"})
_FALSE = frozenset({"false", "0", "off", "no"})

INTEGER_MAX = 2**31 - 1


def boolean(text: str) -> bool:
    """Read true/1/on/yes or false/0/off/no, in any case."""
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError(f"expected true or false, got '{text}'")


def integer(low: int, high: int = INTEGER_MAX) -> Callable[[str], int]:
    """Return a reader of integers from `low` to `high`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise ValueError(f"expected an integer from {low} to {high}, got '{text}'")
        return value

    return read


def verbosity(text: str) -> int:
    """Read a level of detail: an integer, or a boolean word for 1 and 0."""
    if text.strip().lower() in (_TRUE | _FALSE) - {"0", "1"}:
        return int(boolean(text))
    return integer(0, 100)(text)


def choice(kind: type[_E]) -> Callable[[str], _E]:
    """Return a reader of the values of an enumeration, in any case."""
    by_word = {str(member.value).lower(): member for member in kind}

    def read(text: str) -> _E:
        member = by_word.get(text.strip().lower())
        if member is None:
            raise ValueError(f"expected {' or '.join(str(m.value) for m in kind)}, got '{text}'")
        return member

    return read


def filled(text: str) -> str:
    """Read a text that may not be empty."""
    if not text:
        raise ValueError("expected a value, got ''")
    return text


def repository(text: str) -> str:
    """Read the path of a model repository, or the URI of one in an object store."""
    if is_store(text):
        try:
            parse_address(text)
        except ServingError as error:
            raise ValueError(error.message) from None
    return filled(text)


def assignment(text: str) -> tuple[str, str, str]:
    """Read `<owner>,<key>=<value>` or `<key>=<value>`; the owner is "" in the second form."""
    head, equals, value = text.partition("=")
    owner, comma, key = head.rpartition(",")
    if not equals or not key or (comma and not owner):
        raise ValueError(f"expected <name>,<key>=<value> or <key>=<value>, got '{text}'")
    return owner, key, value
