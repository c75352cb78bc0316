"""From the arguments of `charonia serve` to `ServerOptions`.

The options are tritonserver's by name and default, and a few of our own; `option_table` lists them. `argparse` splits
the arguments and prints the help; values are read here, so that all problems are reported at once.
"""

import argparse
import difflib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from operator import attrgetter
from typing import Any, NoReturn

from charonia.cli.cache import cache_folder, with_cache
from charonia.cli.foreign import FOREIGN, judge
from charonia.cli.option_table import GROUPS, Option, SeveralFields
from charonia.core.errors import ServingError, invalid
from charonia.server.options import ServerOptions

DESCRIPTION = "Serve the models of a repository over HTTP and gRPC."

ESCAPE_VARIABLE = "TRITON_SERVER_ESCAPE_LOG_MESSAGES"
"""Environment variable: 0 writes log messages as they are, without quoting."""

SUGGESTION_CUTOFF = 0.6
"""Similarity from which an option is suggested for an unknown one."""

HELP_COLUMNS_MAX = 120

_REPOSITORY_OPTION = "--model-repository"
_DEFAULTS = ServerOptions()


@dataclass(frozen=True, slots=True)
class Parsed:
    """What the command line asks for, and remarks on options without effect."""

    options: ServerOptions
    notes: tuple[str, ...] = ()


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Parsed:
    """Return what the arguments ask for.

    Raises:
        ServingError: INVALID_ARG with a line for every problem.
        SystemExit: With status 0, after printing, when help was asked for.
    """
    namespace, unknown = parser().parse_known_intermixed_args(arguments)
    given: dict[str, list[str]] = {name: texts for name, texts in vars(namespace).items() if texts}
    if "repository" in given:
        given[_REPOSITORY_OPTION] = given.get(_REPOSITORY_OPTION, []) + given.pop("repository")
    problems = [_unknown(text) for text in unknown]
    updates: dict[str, Any] = {}
    for option in all_options():
        if option.name in given:
            try:
                value = option.collect([option.read(text) for text in given[option.name]])
            except ValueError as error:
                problems.append(f"{option.name}: {error}")
            else:
                _add(updates, option.field, value)
    problems_and_notes = [
        judge(option.name, text) for option in FOREIGN if option.name in given for text in given[option.name]
    ]
    problems += [problem for problem, _ in problems_and_notes if problem]
    if environment.get(ESCAPE_VARIABLE) == "0":
        updates["log.escape"] = False
    updates["backends"] = with_cache(updates.get("backends", _DEFAULTS.backends), environment)
    cache = cache_folder(environment)
    if cache is not None:
        updates.setdefault("models.stores.cache", str(cache / "stores"))
    options = _build(updates, problems)
    if problems:
        raise invalid("\n".join(problems))
    return Parsed(options, tuple(note for _, note in problems_and_notes if note))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments, which also knows the help."""
    made = _Parser(
        prog="charonia serve",
        usage="charonia serve [OPTIONS] REPOSITORY...",
        description=DESCRIPTION,
        epilog=_epilog(),
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("repository", nargs="*", metavar="REPOSITORY", help=f"same as {_REPOSITORY_OPTION}=REPOSITORY")
    for title, options in GROUPS.items():
        group = made.add_argument_group(title)
        for option in options:
            text = option.help + (f" (default: {default_text(option)})" if default_text(option) else "")
            if option.metavar:
                group.add_argument(option.name, action="append", dest=option.name, metavar=option.metavar, help=text)
            else:
                group.add_argument(option.name, action="append_const", const="true", dest=option.name, help=text)
    for foreign in FOREIGN:
        made.add_argument(foreign.name, action="append", dest=foreign.name, help=argparse.SUPPRESS)
    return made


def all_options() -> Iterator[Option]:
    """Yield every option of every group."""
    for options in GROUPS.values():
        yield from options


def default_text(option: Option) -> str:
    """Return an option's default as it would be written on the command line, "" where there is none."""
    if option.default is not None:
        return option.default
    value = attrgetter(option.field)(_DEFAULTS)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return str(value.value)
    return str(value) if isinstance(value, int) or value else ""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise invalid(message.removeprefix("argument "))


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, HELP_COLUMNS_MAX) - 2
        super().__init__(prog, max_help_position=36, width=width)


def _epilog() -> str:
    accepted = [option.name for option in FOREIGN if not option.is_refused]
    refused = [option.name for option in FOREIGN if option.is_refused]
    return "\n".join(
        [
            "Accepted without effect, with a line in the log that says why:",
            *(f"  {name}" for name in accepted),
            "",
            "Refused, unless the value says that the feature is off:",
            *(f"  {name}" for name in refused),
        ]
    )


def _add(updates: dict[str, Any], field: str, value: object) -> None:
    """Note the value of a field; of two options that set a tuple both count, of others the one further down."""
    earlier = updates.get(field)
    if isinstance(value, SeveralFields):
        updates.update(value)
    elif isinstance(earlier, tuple) and isinstance(value, tuple):
        updates[field] = earlier + value
    elif field:
        updates[field] = value


def _build(updates: Mapping[str, Any], problems: list[str]) -> ServerOptions:
    """Return the options; what is wrong with them as a whole is added to `problems`."""
    try:
        options: ServerOptions = _replaced(_DEFAULTS, updates)
    except ServingError as error:
        problems.extend(error.message.splitlines())
        return _DEFAULTS
    if not options.models.repositories and not problems:
        problems.append(f"{_REPOSITORY_OPTION} must be specified, e.g. `charonia serve models`")
    if not (options.http.enabled or options.grpc.enabled):
        problems.append("at least one of --allow-http and --allow-grpc must be true")
    return options


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


def _unknown(text: str) -> str:
    name = text.partition("=")[0]
    known = [option.name for option in all_options()] + [option.name for option in FOREIGN]
    similar = difflib.get_close_matches(name, known, n=1, cutoff=SUGGESTION_CUTOFF)
    suggestion = f" Did you mean {similar[0]}?" if similar else ""
    return f'Bad option: "{name}".{suggestion}'
