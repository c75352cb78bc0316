"""`charonia perf compare BEFORE AFTER`: what changed between two runs, and what is noise.

Exit status: 0 nothing got worse, 1 something did, 2 misuse or files that cannot be compared.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from charonia.cli.arguments import Parser
from charonia.core.errors import ServingError


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    given = parser().parse_args(arguments)

    # Imported late: `--help` needs no numpy.
    from charonia.tools.report.compare import Criteria, Outcome, compare
    from charonia.tools.report.compare_text import as_json, as_text
    from charonia.tools.report.run_files import read_run

    try:
        before, after = (read_run(path) for path in (given.before, given.after))
        criteria = Criteria(given.confidence / 100, given.threshold / 100)
        found = compare(before, after, criteria, any_model=given.any_model)
    except ServingError as error:
        print(f"charonia perf compare: {error}", file=sys.stderr)
        return 2
    show = as_json if given.json else as_text
    print(show(found, (str(given.before), str(given.after))))
    return 1 if found.outcome in (Outcome.WORSE, Outcome.MIXED) else 0


def parser() -> Parser:
    """Return the parser of the arguments."""
    made = Parser(
        prog="charonia perf compare",
        description="Compare two runs level by level: what changed, and what is noise.",
        epilog="Exit status: 0 nothing got worse, 1 something did, 2 misuse or files that cannot be compared.",
    )
    made.add_argument("before", type=Path, metavar="BEFORE", help="file that `charonia perf --json` wrote")
    made.add_argument("after", type=Path, metavar="AFTER", help="another one, measured later")
    made.add_argument("--json", action="store_true", help="print JSON instead of a table")
    made.add_argument(
        *("--confidence", "-c"),
        type=_percentage(50, 99.99),
        default=95.0,
        metavar="PERCENT",
        help="probability that all intervals hold (default: 95)",
    )
    made.add_argument(
        *("--threshold", "-t"),
        type=_percentage(0, 1000),
        default=2.0,
        metavar="PERCENT",
        help="smallest change that counts (default: 2)",
    )
    made.add_argument("--any-model", action="store_true", help="compare runs of models with different names too")
    return made


def _percentage(low: float, high: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"expected a number from {low:g} to {high:g}, got '{text}'")
        return value

    return read
