"""The command-line layer of all commands: the record of an option, the splitter, the help, and error messages.

Arguments are split as getopt_long does it: order is free, `--option value` and `--option=value` are the same, short
options may be joined with their values or with each other, and `--` ends the options. A value may begin with a dash
unless it is the name of an option. Where a command abbreviates, a unique prefix of a long option is enough.

An option is a row of a table: it names the field of a record that it sets, and the reader of its text. The default of
an option is that of its field, so no table repeats it. All errors are reported together, a line each.
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
"""Minimal similarity of a suggested name."""

NEVER = -1
"""Rank of an option that cannot be abbreviated."""

_HELP_INDENT = 34
_HELP_NARROW = 80

T = TypeVar("T")


def last(values: Sequence[Any]) -> Any:
    """Return the last value: of an option given several times, the last counts."""
    return values[-1]


def joined(values: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return the concatenated tuples of all occurrences."""
    return tuple(item for value in values for item in value)


class Fields(dict[str, object]):
    """Values by field, for an option that sets several fields."""

    @classmethod
    def merged(cls, values: Sequence["Fields"]) -> "Fields":
        """Return the fields of all occurrences; the last one of each counts."""
        return cls({name: value for fields in values for name, value in fields.items()})


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        names: Its long name, optionally its short name and the name of an equivalent positional argument,
            separated by spaces: "--model -m". The name of a positional argument has no dashes.
        field: Path of the field that it sets, "" for none or several.
        read: Reads a value from the text of an argument, "" for an option without one; raises ValueError.
        metavar: Placeholder of the argument, "" for an option without one.
        help: One sentence without a full stop.
        collect: Combines the values of all occurrences into that of the field, or into `Fields`.
        default: Default as text, None for that of the field.
        rank: Priority of abbreviations: prefixes match options of rank 0 first, then 1; `NEVER` for no match.
        unsupported: Reason why it has no effect or is refused; "" for a supported option.
        instead: What replaces it, "" for an option that is not deprecated.
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
    in_file_only: bool = False
    instead: str = ""

    @property
    def name(self) -> str:
        """The first of its names, used in messages."""
        return self.names.split()[0]

    @property
    def key(self) -> str:
        """Its name in a configuration file."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def place(self) -> str:
        """The name of its positional argument, "" for none."""
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


def refused(reason: str, *names: str, metavar: str = "VALUE") -> list[Option]:
    """Return options that are refused, with the reason."""
    return [Option(n, "", str, metavar, "", unsupported=reason, is_refused=True) for n in names]


def ignored_options(reason: str, *names: str) -> list[Option]:
    """Return options that are accepted and ignored, with the reason."""
    return [Option(name, "", str, "VALUE", "", unsupported=reason) for name in names]


@dataclass(slots=True)
class ParsedOptions:
    """The given options.

    Attributes:
        values: Texts by name of the option, in order, including values of a configuration file.
        sources: Sources of values that are not from the command line, by name of the option.
    """

    values: dict[str, list[Any]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def add(self, option: Option, text: str) -> None:
        self.values.setdefault(option.name, []).append(text)

    def check(self) -> None:
        """Raise ServingError, INVALID_ARG with a line for every problem, if there are any; missing arguments last."""
        if self.problems:
            raise invalid("\n".join(sorted(self.problems, key=lambda text: text.startswith("expected "))))


@dataclass(frozen=True, slots=True)
class CommandLine(Generic[T]):
    """The options of a command.

    Attributes:
        intro: Start of the help: usage and purpose.
        unlisted: Options that the help lists by name only, by heading.
        abbreviates: Whether a unique prefix of a long option is accepted.
        foreign_options: Hints for options of similar programs, which are none here, by name.
    """

    command: str
    intro: str
    groups: Mapping[str, Sequence[Option]]
    record: T
    unlisted: Mapping[str, Sequence[Option]] = field(default_factory=dict)
    epilog: str = ""
    abbreviates: bool = False
    hint: str = ""
    foreign_options: Mapping[str, str] = field(default_factory=dict)

    def options(self) -> Iterator[Option]:
        """Yield every option of every group."""
        for options in self.groups.values():
            yield from options

    def parse(self, arguments: Sequence[str]) -> T:
        """Return the record that the arguments describe.

        Raises:
            ServingError: INVALID_ARG with a line for every problem.
        """
        parsed = self.split(arguments)
        record = self.filled(self.read(parsed), parsed)
        parsed.check()
        return record

    def split(self, arguments: Sequence[str]) -> ParsedOptions:
        """Return the given options with their texts."""
        parsed = ParsedOptions()
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
                option = self._find(name, known, parsed.problems)
                if option is not None:
                    _take(parsed, option, text if equals else None, rest, known)
                elif not equals and rest and not rest[0].startswith("-"):
                    rest.popleft()  # most likely the value of the unknown option
            elif token.startswith("-") and len(token) > 1:
                self._take_letters(parsed, token[1:], rest, known)
            else:
                placed.append(token)
        self._place(parsed, placed)
        return parsed

    def read(self, options: ParsedOptions) -> dict[str, Any]:
        """Return the values of the options by field; problems and notes are added to `options`."""
        updates: dict[str, Any] = {}
        for option in self._understood():
            if option.name not in options.values:
                continue
            texts = options.values[option.name]
            if option.instead:
                options.notes.append(f"{option.name} is deprecated: use {option.instead}")
            if option.unsupported and not _is_usable(option, texts, options):
                continue
            try:
                value = option.collect([option.read(text) for text in texts])
            except ValueError as error:
                options.problems.append(f"{options.sources.get(option.name, option.name)}: {error}")
                options.unread += option.names.split()
            else:
                _add(updates, option.field, value)
        return updates

    def filled(self, updates: Mapping[str, Any], options: ParsedOptions) -> T:
        """Return the record with updated fields; violated rules are added to the problems."""
        try:
            record: T = _replaced(self.record, updates)
        except ServingError as error:
            # Omit consequences of options with invalid values.
            options.problems += [
                line
                for line in error.message.splitlines()
                if not any(line.startswith(f"{name}:") or f"{name} " in line for name in options.unread)
            ]
            return self.record
        return record

    def default_text(self, option: Option) -> str:
        """Return an option's default as on the command line, "" if there is none."""
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
        """Return the help, wrapped to the width of the terminal."""
        width = min(shutil.get_terminal_size().columns, HELP_COLUMNS_MAX)
        blocks = [_filled(self.intro, width)]
        for title, options in self.groups.items():
            entries = [self._entry(option, width) for option in options if not option.in_file_only]
            blocks.append("\n".join([f"{title}:", *entries]))
        blocks.append("  -h, --help")
        in_file = [option.key for option in self.options() if option.in_file_only]
        if in_file:
            blocks.append(_wrapped("In YAML only", in_file, width))
        blocks += [_wrapped(title, [o.name for o in options], width) for title, options in self.unlisted.items()]
        return "\n\n".join([*blocks, _filled(self.epilog, width)] if self.epilog else blocks)

    def _understood(self) -> Iterator[Option]:
        yield from self.options()
        for options in self.unlisted.values():
            yield from options

    def _find(self, name: str, known: Mapping[str, Option], problems: list[str]) -> Option | None:
        """Return the option with a name or unique prefix; if there is none, add a problem and return None."""
        if name in known:
            return known[name]
        if name in self.foreign_options:
            problems.append(f"unknown option '{name}' (hint: {self.foreign_options[name]})")
            return None
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

    def _take_letters(
        self, options: ParsedOptions, letters: str, rest: deque[str], known: Mapping[str, Option]
    ) -> None:
        """Process joined short options; the last may be followed by its value."""
        while letters:
            name, letters = f"-{letters[0]}", letters[1:]
            if name not in known:
                options.problems.append(unknown("option", name, (), f"{self.command} --help lists the options"))
                return
            if known[name].metavar:
                _take(options, known[name], letters.removeprefix("=") or None, rest, known)
                return
            _take(options, known[name], None, rest, known)

    def _place(self, options: ParsedOptions, placed: Sequence[str]) -> None:
        """Assign positional arguments to their options; the last option gets the rest."""
        left = deque(placed)
        for option in self.options():
            if not option.place:
                continue
            if not left and option.name == option.place and not options.problems:
                options.problems.append(f"expected {option.place}, got none")
            while left:
                options.add(option, left.popleft())
                if option.collect is last:
                    break
        hint = f" (hint: {self.hint})" if self.hint else ""
        options.problems += [f"unexpected argument '{text}'{hint}" for text in left]

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
    """Return a message about an unknown name, with the most similar known one.

    Args:
        otherwise: Hint if no known name is similar; "" to list all of them.
    """
    similar = difflib.get_close_matches(name, known, n=1, cutoff=SIMILARITY_MIN)
    hint = f"did you mean {similar[0]}?" if similar else otherwise or f"known are {', '.join(known)}"
    return f"unknown {kind} '{name}' (hint: {hint})"


def complain(prefix: str, error: ServingError) -> None:
    """Print an error to stderr, a line per problem, with the hint after the last."""
    lines = error.message.splitlines() or [""]
    if error.hint:
        lines[-1] += f" (hint: {error.hint})"
    for line in lines:
        print(f"{prefix}: {line}", file=sys.stderr)


def carry_out(line: CommandLine[T], arguments: Sequence[str], act: Callable[[T], int], *, failed: int = 1) -> int:
    """Run a command and return its exit status, 2 for invalid arguments.

    Args:
        failed: Exit status if it raises ServingError.
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


def _take(
    options: ParsedOptions, option: Option, text: str | None, rest: deque[str], known: Mapping[str, Option]
) -> None:
    """Add an option with its value, which may be the next argument."""
    if text is None and option.metavar:
        if not rest or rest[0].partition("=")[0] in known:
            options.problems.append(f"{option.name}: expected a value behind it, got none")
            options.unread += option.names.split()
            return
        text = rest.popleft()
    options.add(option, text or "")


def _is_usable(option: Option, texts: Sequence[Any], options: ParsedOptions) -> bool:
    """Report an option that has no effect or is refused, and return whether to read its values."""
    for text in texts:
        if option.is_refused:
            shown = f"{option.name}={text}" if text else option.name
            options.problems.append(f"{shown}: {option.unsupported}")
        else:
            options.notes.append(f"{option.name} has no effect: {option.unsupported}")
    return not option.is_refused


def _add(updates: dict[str, Any], path: str, value: object) -> None:
    """Set the value of a field; tuples of several options are concatenated, otherwise the later option counts."""
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


def _filled(text: str, width: int) -> str:
    """Return a text wrapped to a width; a paragraph with an indented line or a usage is left unchanged."""
    return "\n\n".join(
        part
        if "\n " in f"\n{part}" or part.startswith("usage:")
        else textwrap.fill(part, width, break_on_hyphens=False)
        for part in text.rstrip().split("\n\n")
    )


def _wrapped(title: str, names: Sequence[str], width: int) -> str:
    text = f"{title}: {', '.join(names)}"
    return textwrap.fill(text, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
