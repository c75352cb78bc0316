"""`charonia demo`: serve models that packages ship, send them real inputs, print the answers and what was measured.

Exit status: 0 done, 1 something did not work, 2 misuse.
"""

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from charonia.cli.command_line import CommandLine, Option, carry_out, flag


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Where the models are written, and whether the server is stopped afterwards."""

    repository: Path = Path("demo-repository")
    once: bool = False


LINE = CommandLine(
    command="charonia demo",
    intro="""\
usage: charonia demo [OPTIONS]

Serve models that packages ship, send real inputs over HTTP and gRPC, print what came back.
""",
    groups={
        "Options": (
            Option(
                *("--repository", "repository", Path, "FOLDER", "Where to write the models"),
                default="./demo-repository",
            ),
            flag(
                *("--once", "once", True),
                "Stop the server afterwards, and use free ports instead of 8000, 8001 and 8002",
            ),
        )
    },
    record=DemoOptions(),
)


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    return carry_out(LINE, arguments, _run)


def _run(given: DemoOptions) -> int:
    # As Ctrl-C does: leave through every `finally`, so that the server is stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _demo(given.repository, given.once)
    except ModuleNotFoundError as error:
        print(f"charonia demo: {error} (hint: pip install 'charonia[demo]')", file=sys.stderr)
        return 1
    return 0


def _demo(repository: Path, once: bool) -> None:
    # Imported late: they need packages of the extra `demo`, and `--help` does not.
    from charonia.demo.models import build_repository
    from charonia.demo.process import Ports, demand_free, free_ports, running_server
    from charonia.demo.show import next_steps, show

    ports = free_ports() if once else Ports()
    demand_free(ports)
    build_repository(repository)
    print(f"Model repository: {repository.resolve()}", flush=True)
    with running_server(repository, ports) as server:
        show(repository, ports)
        if not once:
            print("\n" + next_steps(ports), flush=True)
            try:
                server.wait()
            except KeyboardInterrupt:
                print("\nStopping.", flush=True)
