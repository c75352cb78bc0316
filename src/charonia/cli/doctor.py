"""`charonia doctor`: what this machine offers, and what the models of a repository need.

Exit status: 0 nothing is wrong, 1 something is, 2 misuse.
"""

import asyncio
import json
import sys
from collections.abc import Sequence

from charonia.cli.arguments import Parser
from charonia.core.errors import ServingError


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    given = parser().parse_args(arguments)
    # Imported late: they read the engine, which `--help` does not need.
    from charonia.server.doctor.machine import look
    from charonia.server.doctor.report import problem_count, to_json, to_text
    from charonia.server.doctor.repository import examine

    try:
        sections = look()
        if given.model_repository:
            sections += asyncio.run(examine(given.model_repository))
    except ServingError as error:
        print(f"charonia doctor: {error}", file=sys.stderr)
        return 1
    print(json.dumps(to_json(sections), indent=2) if given.json else to_text(sections))
    count = problem_count(sections)
    if count and not given.json:
        print(f"\n{count} problem{'s' if count > 1 else ''}, marked with !")
    return 1 if count else 0


def parser() -> Parser:
    """Return the parser of the arguments."""
    made = Parser(
        prog="charonia doctor",
        description="Show what this machine offers to models, and what the models of a repository need.",
    )
    made.add_argument(
        "--model-repository",
        action="append",
        default=[],
        metavar="PATH",
        help="also look at the models of this folder; nothing is loaded; repeatable",
    )
    made.add_argument("--json", action="store_true", help="print JSON")
    return made
