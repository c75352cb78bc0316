"""`charonia perf`: send load to a model of any KServe v2 server, and report latency and throughput.

Results go to stdout, everything else to stderr. `charonia perf --help` lists the exit status.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from importlib import import_module
from typing import Any

from charonia.cli.command_line import HELP_NAMES, Given, complain
from charonia.cli.perf_options import LINE, OLD_NAMES
from charonia.cli.values import with_key
from charonia.core.errors import ServingError
from charonia.tools.perf.api import RunSettings
from charonia.tools.perf.options import RANGES, PerfOptions, run_settings
from charonia.tools.report.summary import failures
from charonia.tools.results.records import LoadMode, PerfRun, Verdict

_WAYS = (LoadMode.CONCURRENCY, LoadMode.PERIODIC, LoadMode.REQUEST_RATE, LoadMode.INTERVALS)


class ExitStatus(IntEnum):
    """Exit status."""

    MEASURED = 0
    FAILED_REQUESTS = 1
    UNSTABLE = 2
    NO_REQUESTS = 3
    """No request was answered, or a condition of `--fail-if` is true."""
    OVERLOADED = 4
    REFUSED = 99
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Parsed:
    """The parsed command line.

    Attributes:
        named: The options given on the command line, as text by name.
        command: The command line, for the record.
        notes: Remarks, one sentence each.
    """

    options: PerfOptions
    named: dict[str, str]
    command: str = ""
    notes: tuple[str, ...] = ()

    def settings(self, config: Mapping[str, Any]) -> RunSettings:
        """Return the settings of the run for a model with this configuration.

        Raises:
            ServingError: INVALID_ARG if the options do not fit the model.
        """
        return run_settings(self.options, config, described(self.named), self.command)


def run(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["compare"]:
        status: int = import_module("charonia.cli.perf_compare").run(arguments[1:])
        return status
    if not HELP_NAMES.isdisjoint(arguments):
        print(LINE.help())
        return ExitStatus.MEASURED
    if "--version" in arguments:
        from charonia.version import __version__

        print(f"charonia perf {__version__}")
        return ExitStatus.MEASURED
    try:
        parsed = parse(arguments)
    except ServingError as error:
        complain("error", error)
        print("`charonia perf --help` lists the options.", file=sys.stderr)
        return ExitStatus.REFUSED
    for note in parsed.notes:
        print(f"note: {note}", file=sys.stderr)
    # Imported late, because the help and invalid arguments do not need it.
    from charonia.cli.perf_run import measure, served

    try:
        with served(parsed.options) as options:
            parsed = replace(parsed, options=options)
            measured = measure(options, parsed.settings)
    except ServingError as error:
        complain("error", error)
        return ExitStatus.REFUSED
    failed = failures(parsed.options.report.fail_if, measured)
    for sentence in failed:
        print(f"failed: {sentence}", file=sys.stderr)
    status = status_of(measured)
    return ExitStatus.NO_REQUESTS if failed and status is not ExitStatus.INTERRUPTED else status


def parse(arguments: Sequence[str]) -> Parsed:
    """Parse the arguments.

    Raises:
        ServingError: INVALID_ARG with a line for every problem.
    """
    given = LINE.split(arguments)
    _with_new_names(given)
    updates = LINE.read(given)
    ways = [RANGES[mode] for mode in _WAYS if RANGES[mode] in given.values]
    if len(ways) > 1:
        given.problems.append(f"{' and '.join(ways)}: expected one way to send requests, got {len(ways)}")
        updates = {field: value for field, value in updates.items() if not field.startswith("load.")}
    _note_without_effect(given)
    if "--async" in given.values and "--sync" in given.values:
        given.problems.append("--sync and --async: expected one of them, got both")
    options = LINE.filled({"target.model": "", **updates}, given)
    given.check()
    options = replace(options, target=replace(options.target, headers=with_key(options.target.headers)))
    shown = given.values | _without_secrets(given.values)
    words = [word for name, texts in shown.items() for text in texts for word in ([name, text] if text else [name])]
    command = shlex.join(["charonia", "perf", *words])
    return Parsed(options, {name: ",".join(texts) for name, texts in shown.items()}, command, tuple(given.notes))


def described(named: Mapping[str, str]) -> dict[str, str]:
    """Return the effective options as text by name without dashes: the given ones, and the defaults of the others."""
    defaults = {option.name: text for option in LINE.options() if (text := LINE.default_text(option))}
    return {name.removeprefix("--"): text for name, text in (defaults | dict(named)).items()}


def status_of(run: PerfRun) -> ExitStatus:
    """Return the exit status of a run: that of its worst level."""
    verdicts = {level.verdict for level in run.levels}
    if Verdict.INTERRUPTED in verdicts:
        return ExitStatus.INTERRUPTED
    if not any(level.request_count for level in run.levels):
        return ExitStatus.NO_REQUESTS
    if Verdict.SERVER_LOST in verdicts or any(level.error_count for level in run.levels):
        return ExitStatus.FAILED_REQUESTS
    if Verdict.OVERLOADED in verdicts:
        return ExitStatus.OVERLOADED
    is_settled = verdicts.isdisjoint((Verdict.UNSTABLE, Verdict.DISTURBED))
    return ExitStatus.MEASURED if is_settled else ExitStatus.UNSTABLE


def _with_new_names(given: Given) -> None:
    """Replace perf_analyzer's old option names with the new ones, with a note for each."""
    old = {option.name: given.values.pop(option.name) for option in OLD_NAMES if option.name in given.values}
    given.notes += [f"{option.name} is an old name: {option.help}" for option in OLD_NAMES if option.name in old]
    sources = old.get("--data-directory", []) + (["zero"] if "-z" in old else [])
    if sources:
        given.values["--input-data"] = given.values.get("--input-data", []) + sources
    levels = sorted(old.keys() & {"-t", "-c", "-d"})
    if not levels:
        return
    if "--concurrency-range" in given.values:
        given.problems.append(f"--concurrency-range: expected none of its old names, got {' '.join(levels)}")
        return
    if "-c" in old and "-d" not in old:
        given.problems.append("-c: expected -d with it, got none (hint: --concurrency-range START:END)")
    start = old.get("-t", ["1"])[-1]
    end = old.get("-c", ["0"])[-1]
    given.values["--concurrency-range"] = [f"{start}:{end}" if "-d" in old else start]


def _note_without_effect(given: Given) -> None:
    names = given.values
    if any(name.startswith("--ssl-grpc-") for name in names) and "--ssl-grpc-use-ssl" not in names:
        given.notes.append("--ssl-grpc-... has no effect without --ssl-grpc-use-ssl")
    is_https = any(text.startswith("https://") for text in names.get("--url", []))
    if any(name.startswith("--ssl-https-") for name in names) and not is_https:
        given.notes.append("--ssl-https-... has no effect without a URL such as -u https://HOST:PORT")
    if "--request-distribution" in names and "--request-rate-range" not in names:
        given.notes.append("--request-distribution has no effect without --request-rate-range")
    if "--verbose-csv" in names and "--csv" not in names:
        given.notes.append("--verbose-csv has no effect without -f")


def _without_secrets(values: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return headers without their values, to keep tokens and passwords out of reports."""
    headers = values.get("--header", [])
    return {"--header": [f"{text.partition(':')[0]}:***" for text in headers]} if headers else {}
