"""`charonia tune`: find the configuration of a model that gives the most within its user's limits.

Tables and summary go to stdout, what is being tried to stderr. Exit status: see `charonia tune --help`.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from charonia.core.errors import ServingError

if TYPE_CHECKING:
    from charonia.cli.tune_options import ReportRequest
    from charonia.tools.tune.merge import Merged

MISUSE = 99
FAILED = 1


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    from charonia.cli.tune_options import HELP_NAMES, Subcommand, help_text, parse_profile, parse_report, subcommand

    if not arguments or HELP_NAMES & set(arguments):
        print(help_text(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else MISUSE
    try:
        command, tune_for, rest = subcommand(arguments)
        if command is Subcommand.REPORT:
            return _report(parse_report(rest))
        return _profile(parse_profile(rest, tune_for), shlex.join(["charonia", "tune", *arguments]))
    except ServingError as error:
        _print_problem(error)
        return MISUSE


def _profile(merged: "Merged", command: str) -> int:
    # Imported late: they read the client and the load generator, which `--help` does not need.
    from charonia.cli.tune_files import JSON_STDOUT, check_writable, write_results
    from charonia.cli.tune_live import watched
    from charonia.cli.tune_load import loads_of
    from charonia.tools.perf.run import stopped_by_signals
    from charonia.tools.tune.profile import profile
    from charonia.tools.tune.result import exit_status
    from charonia.tools.tune.summary import summary

    output = merged.options.output
    check_writable(output)
    loads = loads_of(merged.options)
    with watched(sys.stderr, quiet=output.quiet, verbose=output.verbose) as progress, stopped_by_signals() as stop:
        found = replace(profile(merged, loads, progress, stop), command=command)
    written, tables = write_results(found, output)
    if not output.quiet:
        text = sys.stderr if output.json is not None and str(output.json) == JSON_STDOUT else sys.stdout
        if output.verbose:
            print(*(f"{table}\n" for table in tables), sep="\n", file=text)
        if output.summaries:
            print(summary(found, output.configs_per_model, top_configs=output.top_configs), file=text)
        print("\nWritten: " + ", ".join(map(str, written)), file=text)
    if found.problem:
        print(f"charonia tune: {found.problem}", file=sys.stderr)
    return exit_status(found)


def _report(request: "ReportRequest") -> int:
    from charonia.cli.tune_files import read_result, write_report
    from charonia.tools.tune.result import exit_status
    from charonia.tools.tune.summary import summary

    found = read_result(request)
    known = {variant.name for group in found.groups for variant in group.variants}
    missing = [name for name in request.names if name not in known]
    if missing:
        from charonia.core.errors import not_found
        from charonia.tools.tune.nearest import unknown

        raise not_found("\n".join(unknown("variant", name, sorted(known)) for name in missing))
    written = write_report(found, request)
    if not request.quiet:
        print(summary(found, names=request.names))
        print("\nWritten: " + ", ".join(map(str, written)))
    return exit_status(found)


def _print_problem(error: ServingError) -> None:
    for line in error.message.splitlines():
        print(f"charonia tune: {line}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
