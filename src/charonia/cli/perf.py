"""`charonia perf`: send load to a model of any KServe v2 server, and say what was measured.

Results go to stdout, everything else to stderr. The exit status is listed in `EXIT_CODES` of `perf_options`.
"""

import sys
from collections.abc import Sequence
from enum import IntEnum
from importlib import import_module

from charonia.core.errors import ServingError
from charonia.tools.results.records import Run, Verdict


class Status(IntEnum):
    """Exit status."""

    MEASURED = 0
    FAILED_REQUESTS = 1
    UNSTABLE = 2
    NO_REQUESTS = 3
    OVERLOADED = 4
    REFUSED = 99
    INTERRUPTED = 130


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    if arguments[:1] == ["compare"]:
        status: int = import_module("charonia.cli.perf_compare").run(arguments[1:])
        return status
    # Imported late: `charonia --help` needs none of it.
    from charonia.cli.perf_options import HELP_NAMES, help_text, parse

    if not HELP_NAMES.isdisjoint(arguments):
        print(help_text())
        return Status.MEASURED
    if "--version" in arguments:
        from charonia import __version__

        print(f"charonia perf {__version__}")
        return Status.MEASURED
    try:
        parsed = parse(arguments)
    except ServingError as error:
        _complain(error)
        print("`charonia perf --help` lists the options.", file=sys.stderr)
        return Status.REFUSED
    for note in parsed.notes:
        print(f"note: {note}", file=sys.stderr)
    try:
        from charonia.cli.perf_run import measure

        return status_of(measure(parsed))
    except ServingError as error:
        _complain(error)
        return Status.REFUSED


def status_of(run: Run) -> Status:
    """Return the exit status of a run: that of its worst level."""
    verdicts = {level.verdict for level in run.levels}
    if Verdict.INTERRUPTED in verdicts:
        return Status.INTERRUPTED
    if not any(level.request_count for level in run.levels):
        return Status.NO_REQUESTS
    if Verdict.SERVER_LOST in verdicts or any(level.error_count for level in run.levels):
        return Status.FAILED_REQUESTS
    if Verdict.OVERLOADED in verdicts:
        return Status.OVERLOADED
    return Status.UNSTABLE if Verdict.UNSTABLE in verdicts else Status.MEASURED


def _complain(error: ServingError) -> None:
    lines = error.message.splitlines() or [""]
    if error.hint:
        lines[-1] += f" (hint: {error.hint})"
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
