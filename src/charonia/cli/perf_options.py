"""From the arguments of `charonia perf` to `PerfOptions`, and the help.

Arguments are split as getopt_long does it for perf_analyzer: order is free, `--option value` and `--option=value` are
the same, short options may be joined with their value or each other, and a unique prefix of a long option is enough.
Our own long options come second there, so that a prefix that worked with perf_analyzer means the same here.
"""

import difflib
import shlex
import shutil
import textwrap
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import attrgetter
from typing import Any

from charonia.cli.perf_foreign import DEPRECATED, REFUSED, UNPARSED, with_new_names
from charonia.cli.perf_table import GROUPS, OPTIONS, Option
from charonia.core.errors import ServingError, invalid
from charonia.tools.perf.options import PerfOptions, TargetOptions

HELP_NAMES = frozenset({"--help", "-h", "-?"})
SUGGESTION_CUTOFF = 0.6
"""Similarity from which an option is suggested for an unknown one."""

HELP_COLUMNS_MAX = 110
_HELP_INDENT = 34

_BY_NAME = {option.name: option for option in OPTIONS} | {option.short: option for option in OPTIONS if option.short}
_TAKES_VALUE = {name: bool(option.metavar) for name, option in _BY_NAME.items()}
_TAKES_VALUE |= {option.name: bool(option.metavar) for option in (*DEPRECATED, *REFUSED)}
_THEIRS = sorted(
    {option.name for option in OPTIONS if not option.is_ours}
    | {option.name for option in (*DEPRECATED, *REFUSED) if option.name.startswith("--") and option.name != UNPARSED}
)
_OURS = sorted(option.name for option in OPTIONS if option.is_ours)
_FIELD_DEFAULTS = PerfOptions(target=TargetOptions(model="NAME"))

EXAMPLES = """\
usage: charonia perf -m MODEL [OPTIONS]
       charonia perf compare A.json B.json

Measure a model on a server of the KServe v2 protocol: Charonia, Triton, others.

  charonia perf -m NAME                                   one request at a time
  charonia perf -m NAME --concurrency-range 1:8 -f r.csv  1 to 8 at a time
  charonia perf -m NAME --request-rate-range 200          200 a second
  charonia perf -m NAME --measurement-mode adaptive       as short as it can be
"""

EXIT_CODES = """\
Exit status:
   0  measured, and every level is stable
   1  measured, but requests failed or the server was lost
   2  measured, but a level is not stable
   3  no request was answered
   4  measured, but the server did not keep up with the offered rate
  99  wrong options or data, no such model, server not there
 130  interrupted; what was measured is reported
"""


@dataclass(slots=True)
class Given:
    """What the arguments name.

    Attributes:
        values: Texts by name of the option, in order.
        problems: What cannot be understood, a line each.
        notes: What is understood and deserves a remark.
    """

    values: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Parsed:
    """What the command line asks for.

    Attributes:
        options: The options.
        named: Those that were named on the command line, as text by name.
        command: The command line, for the record.
        notes: Remarks, one sentence each.
    """

    options: PerfOptions
    named: dict[str, str]
    command: str = ""
    notes: tuple[str, ...] = ()


def parse(arguments: Sequence[str]) -> Parsed:
    """Return what the arguments ask for.

    Raises:
        ServingError: INVALID_ARG with a line for every problem.
    """
    given = split(arguments)
    with_new_names(given.values, given.problems, given.notes)
    given.problems += [f"{foreign.name}: {foreign.reason}" for foreign in REFUSED if foreign.name in given.values]
    groups: dict[str, dict[str, Any]] = {}
    for option in OPTIONS:
        if option.name in given.values:
            try:
                value = option.collect([option.read(text) for text in given.values[option.name]])
            except ValueError as error:
                given.problems.append(f"{option.name}: {error}")
            else:
                _set(groups, option, value)
    _note_without_effect(given)
    if "--async" in given.values and "--sync" in given.values:
        given.problems.append("--sync and --async: expected one of them, got both")
    options = _build(groups, given)
    if given.problems:
        raise invalid("\n".join(given.problems))
    shown = given.values | _without_secrets(given.values)
    words = [word for name, texts in shown.items() for text in texts for word in ([name, text] if text else [name])]
    command = shlex.join(["charonia", "perf", *words])
    return Parsed(options, {name: ",".join(texts) for name, texts in shown.items()}, command, tuple(given.notes))


def split(arguments: Sequence[str]) -> Given:
    """Return the options that arguments name, with their texts, as getopt_long would."""
    given = Given()
    rest = deque(arguments)
    while rest:
        token = rest.popleft()
        if token == "--":
            given.problems += [f"unexpected argument '{text}'" for text in rest]
            rest.clear()
        elif token.startswith("--"):
            name, equals, text = token.partition("=")
            found = _full_name(name, given.problems)
            if found:
                _take(given, found, text if equals else None, rest)
            elif not equals and rest and not rest[0].startswith("-"):
                rest.popleft()  # most likely the value of the option that nobody knows
        elif token.startswith("-") and len(token) > 1:
            _take_cluster(given, token, rest)
        else:
            given.problems.append(f"unexpected argument '{token}' (hint: a model is named with -m)")
    return given


def help_text() -> str:
    """Return the help."""
    width = min(shutil.get_terminal_size().columns, HELP_COLUMNS_MAX)
    blocks = [EXAMPLES]
    for title, options in GROUPS.items():
        blocks.append("\n".join([f"{title}:", *(_help_entry(option, width) for option in options), ""]))
    deprecated = ", ".join(option.name for option in DEPRECATED)
    refused = ", ".join(option.name for option in REFUSED)
    blocks.append(f"  -h, --help; --version\n\n{_wrapped('Old names, understood with a note: ', deprecated, width)}")
    blocks.append(_wrapped("Options of perf_analyzer that are refused: ", refused, width) + "\n")
    blocks.append(EXIT_CODES.rstrip())
    return "\n".join(blocks)


def default_text(option: Option) -> str:
    """Return an option's default as it would be written on the command line, "" where there is none."""
    if option.default is not None or not option.fields:
        return option.default or ""
    value = attrgetter(option.fields.partition(" ")[0])(_FIELD_DEFAULTS)
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value) if value is not None else ""


def described(named: Mapping[str, str]) -> dict[str, str]:
    """Return the options in force as text by name without dashes: those named, and the defaults of the others."""
    defaults = {option.name: default_text(option) for option in OPTIONS if default_text(option)}
    return {name.removeprefix("--"): text for name, text in (defaults | dict(named)).items()}


def _without_secrets(values: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return headers without their values: tokens and passwords do not belong into reports."""
    headers = values.get("--header", [])
    return {"--header": [f"{text.partition(':')[0]}:***" for text in headers]} if headers else {}


def _take(given: Given, name: str, text: str | None, rest: deque[str]) -> None:
    if not _TAKES_VALUE[name]:
        if text is not None:
            given.problems.append(f"{name}: expected no value, got '{text}'")
        text = ""
    elif text is None:
        if not rest or rest[0] in _TAKES_VALUE:
            given.problems.append(f"{name}: expected a value behind it, got none")
            return
        text = rest.popleft()
    long_name = _BY_NAME[name].name if name in _BY_NAME else name
    given.values.setdefault(long_name, []).append(text)


def _take_cluster(given: Given, token: str, rest: deque[str]) -> None:
    letters = token[1:]
    while letters:
        name, letters = f"-{letters[0]}", letters[1:]
        if name not in _TAKES_VALUE:
            given.problems.append(f"unknown option '{name}' (hint: charonia perf --help lists the options)")
            return
        if _TAKES_VALUE[name]:
            _take(given, name, letters or None, rest)
            return
        _take(given, name, None, rest)


def _full_name(name: str, problems: list[str]) -> str:
    """Return the option that a name or a prefix of it means, "" after adding to `problems` when there is none."""
    if name in _TAKES_VALUE:
        return name
    for names in (_THEIRS, _OURS):
        matching = [known for known in names if known.startswith(name)]
        if len(matching) == 1:
            return matching[0]
        if matching:
            problems.append(f"option '{name}' is ambiguous: {', '.join(matching)}")
            return ""
    similar = difflib.get_close_matches(name, [*_THEIRS, *_OURS], n=1, cutoff=SUGGESTION_CUTOFF)
    hint = f"did you mean {similar[0]}?" if similar else "charonia perf --help lists the options"
    problems.append(f"unknown option '{name}' (hint: {hint})")
    return ""


def _set(groups: dict[str, dict[str, Any]], option: Option, value: object) -> None:
    paths = option.fields.split()
    values = value if len(paths) > 1 and isinstance(value, tuple) else (value,)
    for path, part in zip(paths, values, strict=bool(paths)):
        head, _, name = path.partition(".")
        groups.setdefault(head, {})[name] = part


def _build(groups: Mapping[str, Mapping[str, Any]], given: Given) -> PerfOptions:
    """Return the options; rules that they break are added to the problems."""
    made: dict[str, Any] = {}
    for head, values in groups.items():
        group = getattr(_FIELD_DEFAULTS, head) if head != "target" else TargetOptions()
        for name in ("http_tls", "grpc_tls"):
            inner = {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{name}.")}
            if inner:
                group = replace(group, **{name: replace(getattr(group, name), **inner)})
        made[head] = replace(group, **{key: value for key, value in values.items() if "." not in key})
    try:
        return PerfOptions(**made)
    except ServingError as error:
        # What follows from an option that could not be read is no news.
        unread = [problem.partition(":")[0] for problem in given.problems]
        unread += [option.short for option in OPTIONS if option.short and option.name in unread]
        given.problems += [
            line
            for line in error.message.splitlines()
            if not any(line.startswith(f"{name}:") or f"{name} " in line for name in unread)
        ]
        return _FIELD_DEFAULTS


def _note_without_effect(given: Given) -> None:
    names = given.values
    if "--max-threads" in names:
        given.notes.append("--max-threads has no effect: an event loop sends, not threads")
    if any(name.startswith("--ssl-grpc-") for name in names) and "--ssl-grpc-use-ssl" not in names:
        given.notes.append("--ssl-grpc-... has no effect without --ssl-grpc-use-ssl")
    is_https = any(text.startswith("https://") for text in names.get("--url", []))
    if any(name.startswith("--ssl-https-") for name in names) and not is_https:
        given.notes.append("--ssl-https-... has no effect without a URL such as -u https://HOST:PORT")
    if "--request-distribution" in names and "--request-rate-range" not in names:
        given.notes.append("--request-distribution has no effect without --request-rate-range")
    if "--verbose-csv" in names and "--csv" not in names:
        given.notes.append("--verbose-csv has no effect without -f")


def _help_entry(option: Option, width: int) -> str:
    names = f"{option.short}, {option.name}" if option.short else f"    {option.name}"
    head = f"  {names} {option.metavar}".rstrip()
    default = default_text(option)
    text = option.help + (f" (default: {default})" if default else "")
    lines = textwrap.wrap(text, width - _HELP_INDENT, break_on_hyphens=False)
    indent = " " * _HELP_INDENT
    if len(head) + 2 > _HELP_INDENT:
        return "\n".join([head, *(indent + line for line in lines)])
    return "\n".join([head.ljust(_HELP_INDENT) + lines[0], *(indent + line for line in lines[1:])])


def _wrapped(title: str, text: str, width: int) -> str:
    return textwrap.fill(title + text, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
