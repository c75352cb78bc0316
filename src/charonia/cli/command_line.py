"""The command line of every command: one record for an option, one splitter, one help, one way to name a mistake.

Arguments are split as getopt_long does it: order is free, `--option value` and `--option=value` are the same, short
options may be joined with their value or with each other, and `--` ends the options. A value may begin with a dash
unless it is the name of an option. Where a command abbreviates, a unique prefix of a long option is enough.

An option is a row of a table: it names the field of a record that it fills and the reader of its text. The default of
an option is that of its field, so no table repeats it. All mistakes are reported at once, a line each.
"""

import difflib
import shutil
import sys
import textwrap
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

from charonia.core.errors import ServingError, invalid

HELP_NAMES = frozenset({"--help", "-h", "-?"})
HELP_COLUMNS_MAX = 110
SIMILARITY_MIN = 0.6
"""Similarity from which a name is suggested for an unknown one."""

NEVER = -1
"""Rank of an option that is understood in full only."""

_HELP_INDENT = 34
_HELP_NARROW = 80

T = TypeVar("T")


def last(values: Sequence[Any]) -> Any:
    """Of an option given more than once, the last counts."""
    return values[-1]


def joined(values: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return the tuples of all occurrences, one behind the other."""
    return tuple(item for value in values for item in value)


class Fields(dict[str, object]):
    """Values by field, of an option that sets several."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        names: Its long name, then its short one and that of an argument without a name that means the same, each
            where there is one, separated by blanks: "--model -m". An argument that only its place names has no dashes.
        field: Path of the field that it sets, "" for none or several.
        read: From the text of an argument, "" for an option without one, to a value; raises ValueError.
        metavar: What the argument is, "" for an option without one.
        help: One sentence without a full stop.
        collect: From the values of all occurrences to that of the field, or to `Fields`.
        default: Default as text where it is not the field's.
        rank: Among which options a prefix is looked for first: 0, then 1; `NEVER` for none.
        unsupported: Why it has no effect, or is refused; "" for an option that works.
        is_refused: Whether it is a mistake to use it.
        harmless: Values, in lower case, that ask for what happens anyway.
        in_file_only: Whether it is an option of a configuration file and not of the command line.
    """

    names: str
    field: str
    read: Callable[[Any], object]
    metavar: str
    help: str
    collect: Callable[[Sequence[Any]], object] = last
    default: str | None = None
    rank: int = 0
    unsupported: str = ""
    is_refused: bool = False
    harmless: frozenset[str] = frozenset()
    in_file_only: bool = False

    @property
    def name(self) -> str:
        """The first of its names, by which messages call it."""
        return self.names.split()[0]

    @property
    def key(self) -> str:
        """Its name in a configuration file."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def place(self) -> str:
        """The name of the argument that means it by its place, "" for none."""
        final = self.names.split()[-1]
        return "" if final.startswith("-") else final


def flag(
    names: str,
    field: str,
    value: object,
    help: str,
    collect: Callable[[Sequence[Any]], object] = last,
    *,
    default: str = "",
    rank: int = 0,
) -> Option:
    """Return an option without an argument, which sets a field to a value."""

    def read(text: str) -> object:
        if text:
            raise ValueError(f"expected no value, got '{text}'")
        return value

    return Option(names, field, read, "", help, collect, default=default, rank=rank)


def refused(reason: str, *names: str, metavar: str = "VALUE", harmless: frozenset[str] = frozenset()) -> list[Option]:
    """Return options whose behaviour is not offered, with the reason."""
    return [Option(n, "", str, metavar, "", unsupported=reason, is_refused=True, harmless=harmless) for n in names]


def without_effect(reason: str, *names: str) -> list[Option]:
    """Return options that are accepted and ignored, with the reason."""
    return [Option(name, "", str, "VALUE", "", unsupported=reason) for name in names]


@dataclass(slots=True)
class Given:
    """What the arguments name.

    Attributes:
        values: Texts by name of the option, in order; values of a configuration file too.
        sources: Where a value is from, by name of the option, for those that are not from the command line.
        problems: What cannot be understood, a line each.
        notes: What is understood and deserves a remark.
        unread: Names of options whose values cannot be read.
    """

    values: dict[str, list[Any]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def add(self, option: Option, text: str) -> None:
        """Note a text of an option."""
        self.values.setdefault(option.name, []).append(text)

    def check(self) -> None:
        """Raise ServingError, INVALID_ARG with a line for every problem, where there is one."""
        if self.problems:
            raise invalid("\n".join(self.problems))


@dataclass(frozen=True, slots=True)
class CommandLine(Generic[T]):
    """The options of a command.

    Attributes:
        command: How it is called: "charonia perf".
        intro: What the help says before the options: usage, purpose.
        groups: Options by the heading they stand under.
        record: What the options fill; it knows the defaults.
        unlisted: Options that the help only names, by the words that it puts before them.
        epilog: What the help says behind the options.
        abbreviates: Whether a unique prefix of a long option is enough.
        hint: What to do about an argument that has no place.
    """

    command: str
    intro: str
    groups: Mapping[str, Sequence[Option]]
    record: T
    unlisted: Mapping[str, Sequence[Option]] = field(default_factory=dict)
    epilog: str = ""
    abbreviates: bool = False
    hint: str = ""

    def options(self) -> Iterator[Option]:
        """Yield every option of every group."""
        for options in self.groups.values():
            yield from options

    def parse(self, arguments: Sequence[str]) -> T:
        """Return the record that the arguments ask for.

        Raises:
            ServingError: INVALID_ARG with a line for every problem.
        """
        given = self.split(arguments)
        record = self.filled(self.read(given), given)
        given.check()
        return record

    def split(self, arguments: Sequence[str]) -> Given:
        """Return the options that arguments name, with their texts."""
        given = Given()
        known = {
            name: option
            for option in self._understood()
            if not option.in_file_only
            for name in option.names.split()
            if name.startswith("-")
        }
        rest, placed = deque(arguments), list[str]()
        while rest:
            token = rest.popleft()
            if token == "--":
                placed += rest
                rest.clear()
            elif token.startswith("--"):
                name, equals, text = token.partition("=")
                option = self._find(name, known, given.problems)
                if option is not None:
                    _take(given, option, text if equals else None, rest, known)
                elif not equals and rest and not rest[0].startswith("-"):
                    rest.popleft()  # most likely the value of the unknown option
            elif token.startswith("-") and len(token) > 1:
                self._take_letters(given, token[1:], rest, known)
            else:
                placed.append(token)
        self._place(given, placed)
        return given

    def read(self, given: Given) -> dict[str, Any]:
        """Return the values of the options by field; problems and notes are added to what is given."""
        updates: dict[str, Any] = {}
        for option in self._understood():
            if option.name not in given.values:
                continue
            texts = given.values[option.name]
            if option.unsupported and not _is_usable(option, texts, given):
                continue
            try:
                value = option.collect([option.read(text) for text in texts])
            except ValueError as error:
                given.problems.append(f"{given.sources.get(option.name, option.name)}: {error}")
                given.unread += option.names.split()
            else:
                _add(updates, option.field, value)
        return updates

    def filled(self, updates: Mapping[str, Any], given: Given) -> T:
        """Return the record with other values in some fields; rules that they break are added to the problems."""
        try:
            record: T = _replaced(self.record, updates)
        except ServingError as error:
            # What follows from an option that could not be read is no news.
            given.problems += [
                line
                for line in error.message.splitlines()
                if not any(line.startswith(f"{name}:") or f"{name} " in line for name in given.unread)
            ]
            return self.record
        return record

    def default_text(self, option: Option) -> str:
        """Return an option's default as it would be written on the command line, "" where there is none."""
        if option.default is not None or not option.field:
            return option.default or ""
        match attrgetter(option.field)(self.record):
            case bool() as value:
                return str(value).lower()
            case Enum() as value:
                return str(value.value)
            case float() as value:
                return f"{value:g}"
            case tuple() as values:
                return ",".join(map(str, values))
            case int() | str() | Path() as value:
                return str(value)
        return ""

    def help(self) -> str:
        """Return the help, as wide as the terminal."""
        width = min(shutil.get_terminal_size().columns, HELP_COLUMNS_MAX)
        blocks = [self.intro.rstrip()]
        for title, options in self.groups.items():
            entries = [self._entry(option, width) for option in options if not option.in_file_only]
            blocks.append("\n".join([f"{title}:", *entries]))
        blocks.append("  -h, --help")
        in_file = [option.key for option in self.options() if option.in_file_only]
        if in_file:
            blocks.append(_wrapped("In YAML only", in_file, width))
        blocks += [_wrapped(title, [o.name for o in options], width) for title, options in self.unlisted.items()]
        return "\n\n".join([*blocks, self.epilog.rstrip()] if self.epilog else blocks)

    def _understood(self) -> Iterator[Option]:
        yield from self.options()
        for options in self.unlisted.values():
            yield from options

    def _find(self, name: str, known: Mapping[str, Option], problems: list[str]) -> Option | None:
        """Return the option that a name or a prefix of it means, None after adding to `problems` if there is none."""
        if name in known:
            return known[name]
        for rank in (0, 1) if self.abbreviates else ():
            matching = sorted(long for long, option in known.items() if long.startswith(name) and option.rank == rank)
            if len(matching) == 1:
                return known[matching[0]]
            if matching:
                problems.append(f"option '{name}' is ambiguous: {', '.join(matching)}")
                return None
        long_names = [long for long, option in known.items() if long.startswith("--") and option.rank != NEVER]
        problems.append(unknown("option", name, long_names, f"{self.command} --help lists the options"))
        return None

    def _take_letters(self, given: Given, letters: str, rest: deque[str], known: Mapping[str, Option]) -> None:
        """Take joined short options, of which the last may have its value behind it."""
        while letters:
            name, letters = f"-{letters[0]}", letters[1:]
            if name not in known:
                given.problems.append(unknown("option", name, (), f"{self.command} --help lists the options"))
                return
            if known[name].metavar:
                _take(given, known[name], letters.removeprefix("=") or None, rest, known)
                return
            _take(given, known[name], None, rest, known)

    def _place(self, given: Given, placed: Sequence[str]) -> None:
        """Give the arguments without a name to the options that have a place, all that are left to the last one."""
        left = deque(placed)
        for option in self.options():
            if not option.place:
                continue
            if not left and option.name == option.place and not given.problems:
                given.problems.append(f"expected {option.place}, got none")
            while left:
                given.add(option, left.popleft())
                if option.collect is last:
                    break
        hint = f" (hint: {self.hint})" if self.hint else ""
        given.problems += [f"unexpected argument '{text}'{hint}" for text in left]

    def _entry(self, option: Option, width: int) -> str:
        long, *others = option.names.split()
        shorts = [name for name in others if name.startswith("-")]
        head = "  " + ", ".join([*shorts, long]) if shorts else f"  {long}" if option.place == long else f"      {long}"
        if option.place != long and option.metavar:
            head += f" {option.metavar}"
        default = self.default_text(option)
        text = option.help + (f" (default: {default})" if default else "")
        indent = _HELP_INDENT if width >= _HELP_NARROW else width // 3
        lines = textwrap.wrap(text, max(width - indent, 20), break_on_hyphens=False)
        if len(head) + 2 <= indent:
            return "\n".join([head.ljust(indent) + lines[0], *(" " * indent + line for line in lines[1:])])
        return "\n".join([head, *(" " * indent + line for line in lines)])


def unknown(kind: str, name: str, known: Sequence[str], otherwise: str = "") -> str:
    """Return a sentence on an unknown name, with the nearest known one.

    Args:
        kind: What it is the name of.
        name: The name.
        known: The names that there are.
        otherwise: Hint where no known name is similar; "" for all of them.
    """
    similar = difflib.get_close_matches(name, known, n=1, cutoff=SIMILARITY_MIN)
    hint = f"did you mean {similar[0]}?" if similar else otherwise or f"known are {', '.join(known)}"
    return f"unknown {kind} '{name}' (hint: {hint})"


def complain(prefix: str, error: ServingError) -> None:
    """Print what is wrong to stderr, a line a problem, with the hint behind the last."""
    lines = error.message.splitlines() or [""]
    if error.hint:
        lines[-1] += f" (hint: {error.hint})"
    for line in lines:
        print(f"{prefix}: {line}", file=sys.stderr)


def carry_out(line: CommandLine[T], arguments: Sequence[str], act: Callable[[T], int], *, failed: int = 1) -> int:
    """Run a command and return its exit status, 2 for a mistake in the arguments.

    Args:
        line: Its options.
        arguments: What it is given.
        act: Does the work and returns the exit status.
        failed: Exit status where it raises ServingError.
    """
    if not HELP_NAMES.isdisjoint(arguments):
        print(line.help())
        return 0
    try:
        record = line.parse(arguments)
    except ServingError as error:
        complain(line.command, error)
        print(f"`{line.command} --help` lists the options.", file=sys.stderr)
        return 2
    try:
        return act(record)
    except ServingError as error:
        complain(line.command, error)
        return failed


def _take(given: Given, option: Option, text: str | None, rest: deque[str], known: Mapping[str, Option]) -> None:
    """Note an option with its value, which may be the next argument."""
    if text is None and option.metavar:
        if not rest or rest[0].partition("=")[0] in known:
            given.problems.append(f"{option.name}: expected a value behind it, got none")
            given.unread += option.names.split()
            return
        text = rest.popleft()
    given.add(option, text or "")


def _is_usable(option: Option, texts: Sequence[Any], given: Given) -> bool:
    """Note that an option has no effect or is refused, and return whether its values are worth reading."""
    for text in texts:
        if str(text).strip().lower() in option.harmless:
            continue
        if option.is_refused:
            shown = f"{option.name}={text}" if text else option.name
            given.problems.append(f"{shown}: {option.unsupported}")
        else:
            given.notes.append(f"{option.name} has no effect: {option.unsupported}")
    return not option.is_refused


def _add(updates: dict[str, Any], path: str, value: object) -> None:
    """Note the value of a field; of two options that set a tuple both count, of others the one further down."""
    earlier = updates.get(path)
    if isinstance(value, Fields):
        updates.update(value)
    elif isinstance(earlier, tuple) and isinstance(value, tuple):
        updates[path] = earlier + value
    elif path:
        updates[path] = value


def _replaced(record: Any, updates: Mapping[str, Any]) -> Any:
    fields: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for path, value in updates.items():
        head, _, rest = path.partition(".")
        if rest:
            inner.setdefault(head, {})[rest] = value
        else:
            fields[head] = value
    for head, values in inner.items():
        fields[head] = _replaced(getattr(record, head), values)
    return replace(record, **fields)


def _wrapped(title: str, names: Sequence[str], width: int) -> str:
    text = f"{title}: {', '.join(names)}"
    return textwrap.fill(text, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
