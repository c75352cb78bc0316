"""`charonia demo`: serve models from installed packages, send real inputs, and print responses and measurements.

Exit status: 0 done, 1 a step failed, 2 misuse.
"""

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from charonia.cli.command_line import CommandLine, Option, carry_out, flag
from charonia.install_hint import extra_hint


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The folder of the models, and whether to stop the server afterwards."""

    repository: Path = Path("demo-repository")
    once: bool = False


# fmt: off
LINE = CommandLine(
    command="charonia demo",
    intro="""\
usage: charonia demo [OPTIONS]

Serve models from installed packages, send real inputs over HTTP and gRPC, print the responses.
""",
    groups={
        "Options": (
            Option("--repository", "repository", Path, "FOLDER", "Folder for the models",
                   default="./demo-repository"),
            flag("--once", "once", True,
                 "Stop the server afterwards, and use free ports instead of 8000, 8001 and 8002"),
        )
    },
    record=DemoOptions(),
)
# fmt: on


def run(arguments: Sequence[str]) -> int:
    return carry_out(LINE, arguments, _run)


def _run(options: DemoOptions) -> int:
    # Like Ctrl-C: unwinds the stack, so that the server is stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _demo(options.repository, options.once)
    except ModuleNotFoundError as error:
        print(f"charonia demo: {error} (hint: {extra_hint('demo')})", file=sys.stderr)
        return 1
    return 0


def _demo(repository: Path, once: bool) -> None:
    # Imported late, because it needs packages of the extra `demo`, and `--help` does not.
    package = "charonia.examples"
    if find_spec(package) is None:
        # A wheel contains a copy of the examples; a checkout has them in its root.
        package = "examples"
        sys.path.insert(0, str(Path(__file__).parents[3]))
    import_module(f"{package}.demo.demo").run(repository, once)
