"""`charonia tune`: find the configuration with which a model performs best within the user's limits.

Tables and summary go to stdout, progress to stderr. Exit status: see `charonia tune --help`.
"""

import shlex
import sys
from collections.abc import Sequence

from charonia.cli.command_line import HELP_NAMES, complain
from charonia.cli.tune_options import APPLY, PROFILE, REPORT, Subcommand, parse_profile, parse_report, subcommand
from charonia.core.errors import ServingError

MISUSE = 99


def run(arguments: Sequence[str]) -> int:
    if not arguments or HELP_NAMES & set(arguments):
        lines = {str(Subcommand.REPORT): REPORT, str(Subcommand.APPLY): APPLY}
        line = lines.get(arguments[0]) if arguments else None
        print((line or PROFILE).help(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else MISUSE
    try:
        command, tune_for, rest = subcommand(arguments)
        if command is Subcommand.REPORT:
            report = parse_report(rest)
            # Imported late: it reads the client and the load generator, which `--help` does not need.
            from charonia.cli.tune_run import report_on

            return report_on(report)
        if command is Subcommand.APPLY:
            wanted = parse_report(rest, APPLY)
            from charonia.cli.tune_run import apply

            return apply(wanted)
        request = parse_profile(rest, tune_for)
        from charonia.cli.tune_run import profile_models

        return profile_models(request, shlex.join(["charonia", "tune", *arguments]))
    except ServingError as error:
        complain("charonia tune", error)
        return MISUSE
