"""From the arguments of `charonia tune` to what it is asked for, and the help.

Arguments are split as argparse does it for Model Analyzer: order is free, `--option value` and `--option=value` are the
same, and a unique prefix of a long option is enough. Of an option that is given twice, the last counts.
"""

import shutil
import textwrap
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from charonia.core.errors import invalid
from charonia.tools.tune.merge import Merged, default_text, merge
from charonia.tools.tune.nearest import unknown
from charonia.tools.tune.options import TuneFor
from charonia.tools.tune.settings import GROUPS, OPTIONS, Option
from charonia.tools.tune.values import flag, names, path
from charonia.tools.tune.yaml_config import read_yaml

HELP_NAMES = frozenset({"--help", "-h"})
HELP_COLUMNS_MAX = 110
_HELP_INDENT = 44
_HELP_NARROW = 80

USAGE = """\
usage: charonia tune [profile] [OPTIONS]
       charonia tune report [OPTIONS]

Find the configuration of a model that gives the most within your limits.

  charonia tune -m REPOSITORY --profile-models resnet
  charonia tune -m REPOSITORY --profile-models resnet --latency-budget 50
  charonia tune -f config.yaml
  charonia tune --triton-launch-mode remote --triton-http-endpoint HOST:PORT \\
    --profile-models resnet
"""

EXIT_CODES = """\
Exit status:
   0  there is a recommendation, which may be to change nothing
   1  the server was lost; what was measured is kept
   2  no configuration keeps the constraints; the closest one is reported
   3  nothing could be measured: every configuration failed
  99  wrong options, no such model, no place to write, server not there or not
      in mode explicit
 130  interrupted; what was measured is reported, the next run goes on with it
"""


class Subcommand(StrEnum):
    """What to do."""

    PROFILE = "profile"
    REPORT = "report"


REPORT_OPTIONS = (
    Option("checkpoint_directory", "", path, "PATH", "Folder of the journal", "-s", default="./checkpoints"),
    Option("export_path", "", path, "PATH", "Folder that `results` is in", "-e", default="."),
    Option("report_model_configs", "", names, "NAME,...", "Variants to show; all of them without", "-n", default=""),
    Option("json", "", path, "FILE", "Result to report on", default="the newest in the folders", is_ours=True),
    Option("html", "", path, "FILE", "The report", default="", is_ours=True),
    Option("png", "", path, "FOLDER", "Pictures of the plots; needs matplotlib", default="", is_ours=True),
    Option("output_formats", "", names, "LIST", "Accepted: the report is one HTML file", "-o", default=""),
    Option("always_report_gpu_metrics", "", flag, "", "Accepted: what the server tells is reported", default=""),
    Option("quiet", "", flag, "", "Print nothing but errors", "-q", default=""),
    Option("verbose", "", flag, "", "Print the tables too", "-v", default=""),
)
CONFIG_FILE = Option("config_file", "", path, "FILE", "Options from a YAML file", "-f", default="")


@dataclass(slots=True)
class Given:
    """What the arguments name.

    Attributes:
        values: Text by name of the option.
        problems: What cannot be understood, a line each.
    """

    values: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ReportRequest:
    """What a report is asked for.

    Attributes:
        journal_folder: Folder of the journal.
        export: Folder that `results` is in.
        names: Variants to show, () for all.
        json: Result to report on, None for the newest in the folders.
        html: File for the report, None for the usual place.
        png: Folder for pictures of the plots, None for none.
        quiet: Whether stdout stays empty.
        verbose: Whether the tables are printed.
    """

    journal_folder: Path = Path("checkpoints")
    export: Path = Path()
    names: tuple[str, ...] = ()
    json: Path | None = None
    html: Path | None = None
    png: Path | None = None
    quiet: bool = False
    verbose: bool = False


def subcommand(arguments: Sequence[str]) -> tuple[Subcommand, TuneFor, list[str]]:
    """Return what to do, what for, and the other arguments.

    Raises:
        ServingError: INVALID_ARG for another word.
    """
    rest = deque(arguments)
    tune_for = TuneFor.ONLINE
    if len(rest) > 1 and rest[0] in ("-m", "--mode") and rest[1] in (*TuneFor,):
        rest.popleft()
        tune_for = TuneFor(rest.popleft())
    if not rest or rest[0].startswith("-"):
        return Subcommand.PROFILE, tune_for, list(rest)
    word = rest.popleft()
    if word == "analyze":
        word = "profile"
    if word not in (*Subcommand,):
        raise invalid(unknown("subcommand", word, list(Subcommand)))
    return Subcommand(word), tune_for, list(rest)


def parse_profile(arguments: Sequence[str], tune_for: TuneFor = TuneFor.ONLINE) -> Merged:
    """Return what the arguments of `profile` ask for; a file that they name is read.

    Raises:
        ServingError: INVALID_ARG with a line for every problem.
    """
    given = split(arguments, [CONFIG_FILE, *(option for option in OPTIONS if option.on_command_line)])
    if given.problems:
        raise invalid("\n".join(given.problems))
    config_file = given.values.pop(CONFIG_FILE.name, None)
    if config_file is None:
        return merge({}, given.values, tune_for=tune_for)
    return merge(read_yaml(Path(config_file)), given.values, config_file=Path(config_file), tune_for=tune_for)


def parse_report(arguments: Sequence[str]) -> ReportRequest:
    """Return what the arguments of `report` ask for.

    Raises:
        ServingError: INVALID_ARG with a line for every problem.
    """
    given = split(arguments, [CONFIG_FILE, *REPORT_OPTIONS])
    document = read_yaml(Path(given.values.pop(CONFIG_FILE.name))) if CONFIG_FILE.name in given.values else {}
    by_name = {option.name: option for option in REPORT_OPTIONS}
    given.problems += [unknown("key", name, list(by_name)) for name in document if name not in by_name]
    values: dict[str, object] = {}
    for name, value in {**document, **given.values}.items():
        if name in by_name:
            try:
                values[name] = by_name[name].read(_model_configs(value) if name == "report_model_configs" else value)
            except ValueError as error:
                given.problems.append(f"{by_name[name].flag}: {error}")
    if given.problems:
        raise invalid("\n".join(given.problems))
    found = {_REPORT_FIELDS[name]: value for name, value in values.items() if name in _REPORT_FIELDS}
    return ReportRequest(**found)  # type: ignore[arg-type]  # each was read by the reader of its option


_REPORT_FIELDS = {
    "checkpoint_directory": "journal_folder",
    "export_path": "export",
    "report_model_configs": "names",
    "json": "json",
    "html": "html",
    "png": "png",
    "quiet": "quiet",
    "verbose": "verbose",
}


def split(arguments: Sequence[str], options: Sequence[Option]) -> Given:
    """Return the options that arguments name, with their texts."""
    given = Given()
    by_flag = {option.flag: option for option in options} | {option.short: option for option in options if option.short}
    rest = deque(arguments)
    while rest:
        token = rest.popleft()
        name, equals, text = token.partition("=")
        if not token.startswith("-"):
            given.problems.append(f"unexpected argument '{token}' (hint: charonia tune --help lists the options)")
            continue
        option = _find(name, by_flag, given.problems)
        if option is None:
            if not equals and rest and not rest[0].startswith("-"):
                rest.popleft()  # most likely the value of the option that nobody knows
        elif not option.metavar:
            given.values[option.name] = text if equals else "true"
        elif equals:
            given.values[option.name] = text
        elif rest and rest[0] not in by_flag:
            given.values[option.name] = rest.popleft()
        else:
            given.problems.append(f"{name}: expected a value behind it, got none")
    return given


def help_text() -> str:
    """Return the help."""
    width = min(shutil.get_terminal_size().columns, HELP_COLUMNS_MAX)
    blocks = [USAGE, "\n".join(["profile:", _entry(CONFIG_FILE, width), ""])]
    for title, options in GROUPS.items():
        listed = [option for option in options if option.on_command_line]
        blocks.append("\n".join([f"{title}:", *(_entry(option, width) for option in listed), ""]))
    in_yaml = ", ".join(option.name for option in OPTIONS if not option.on_command_line)
    blocks.append(textwrap.fill(f"In YAML only: {in_yaml}", width, subsequent_indent="  ") + "\n")
    blocks.append("\n".join(["report:", *(_entry(option, width) for option in REPORT_OPTIONS), ""]))
    blocks.append(EXIT_CODES.rstrip())
    return "\n".join(blocks)


def _model_configs(value: object) -> object:
    if isinstance(value, Mapping):
        return list(value)
    if isinstance(value, list):
        return [name for part in value for name in (part if isinstance(part, Mapping) else [part])]
    return value


def _find(name: str, by_flag: Mapping[str, Option], problems: list[str]) -> Option | None:
    """Return the option that a name or a prefix of it means, None after adding to `problems` where there is none."""
    if name in by_flag:
        return by_flag[name]
    if name.startswith("--"):
        matching = [known for known in by_flag if known.startswith(name)]
        if len(matching) == 1:
            return by_flag[matching[0]]
        if matching:
            problems.append(f"option '{name}' is ambiguous: {', '.join(sorted(matching))}")
            return None
    known = sorted(known for known in by_flag if known.startswith("--"))
    sentence = unknown("option", name, known)
    if ", " in sentence:
        sentence = f"unknown option '{name}' (hint: charonia tune --help lists the options)"
    problems.append(sentence)
    return None


def _entry(option: Option, width: int) -> str:
    names_ = f"{option.short}, {option.flag}" if option.short else f"    {option.flag}"
    head = f"  {names_} {option.metavar}".rstrip()
    default = default_text(option)
    text = option.help + (f" (default: {default})" if default else "")
    column = _HELP_INDENT if width >= _HELP_NARROW else width // 3
    lines = textwrap.wrap(text, max(width - column, 20), break_on_hyphens=False)
    indent = " " * column
    if len(head) + 2 > column:
        return "\n".join([head, *(indent + line for line in lines)])
    return "\n".join([head.ljust(column) + lines[0], *(indent + line for line in lines[1:])])
