"""Problems of a configuration, collected to be reported together, and how their messages quote and suggest."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor, EnumDescriptor

from charonia.core.dtypes import BY_WIRE
from charonia.core.errors import invalid, nearest

MAX_QUOTED_CHARS = 120
"""Longest piece of an invalid text that an error repeats."""

MAX_LISTED_NAMES = 16
"""Longest list of known names that a hint gives if none of them is similar."""


def field_hint(name: str, message: Descriptor) -> str:
    """Return a hint for an unknown field: a similar name, another message's field, or a list."""
    near = nearest(name, list(message.fields_by_name))
    if near:
        return f"did you mean '{near}'?"
    owners = [other.name for other in _messages(message.file.message_types_by_name.values()) if _has(other, name)]
    if owners:
        return f"'{name}' is a field of {', '.join(owners)}"
    return _listed(list(message.fields_by_name))


def value_hint(name: str, enum: EnumDescriptor) -> str:
    """Return a hint for an unknown value. `name` is as written, possibly with quotes."""
    bare = name.strip("\"'")
    if bare in enum.values_by_name:
        return f"write {bare} without quotes"
    datatype = BY_WIRE.get(bare.upper().removeprefix("TYPE_"))
    if datatype is not None and datatype.config in enum.values_by_name:
        return f"did you mean {datatype.config}?"
    near = nearest(bare, list(enum.values_by_name))
    return f"did you mean {near}?" if near else _listed(list(enum.values_by_name))


def short(text: str) -> str:
    """Return the text, truncated to the length that an error may repeat."""
    return text if len(text) <= MAX_QUOTED_CHARS else text[:MAX_QUOTED_CHARS] + "..."


def printable(text: str) -> str:
    """Return the text with all characters escaped that a log line or a header cannot contain."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in text)


def _listed(known: Sequence[str]) -> str:
    return f"known are {', '.join(known)}" if len(known) <= MAX_LISTED_NAMES else ""


def _messages(messages: Iterable[Descriptor]) -> Iterator[Descriptor]:
    for message in messages:
        if not message.GetOptions().map_entry:
            yield message
            yield from _messages(message.nested_types)


def _has(message: Descriptor, field: str) -> bool:
    return field in message.fields_by_name


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a configuration.

    Attributes:
        path: Its path in config.pbtxt: "input[1].dims[0]". An element of a map is named by its key.
        message: The problem, as one sentence.
    """

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


def check_problems(name: str, problems: Iterable[Problem]) -> None:
    """Raise the problems of model `name`, if there are any, as one error, with a line for each of several.

    Raises:
        ServingError: INVALID_ARG.
    """
    found = list(problems)
    if len(found) == 1:
        raise invalid(f"model '{name}': {found[0]}")
    if found:
        lines = "\n".join(f"  {problem}" for problem in found)
        raise invalid(f"model '{name}': {len(found)} problems in the model configuration\n{lines}")
