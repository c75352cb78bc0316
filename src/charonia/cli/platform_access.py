"""What the commands of the platform's users share: the platform that they talk to, subcommands, tasks, tables."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from charonia.cli.command_line import HELP_NAMES, CommandLine, Option, carry_out, unknown
from charonia.cli.values import filled, path
from charonia.core.errors import internal, invalid, unavailable
from charonia.platform.api_client import KEY_HINT, PlatformClient, path_of
from charonia.platform.data_folder import DEFAULT_FOLDER, local_access

SERVER_VARIABLE = "CHARONIA_PLATFORM"
KEY_VARIABLE = "CHARONIA_PLATFORM_KEY"

LOOK_S = 0.3
"""Pause between two looks at what goes on."""


@dataclass(frozen=True, slots=True)
class PlatformAccess:
    """The platform that a command talks to, and as whom.

    Attributes:
        server: Its address, "" for that of this machine.
        key: An API key, "" for that of the data folder.
        data: The data folder of the platform of this machine.
        project: Name of the project.
    """

    server: str = ""
    key: str = field(default="", repr=False)
    data: Path = DEFAULT_FOLDER
    project: str = "default"


THIS_MACHINE = PlatformAccess()

# fmt: off
ACCESS = (
    Option("--project", "access.project", filled, "NAME", "The project"),
    Option("--server", "access.server", filled, "URL",
           f"Address of the platform, also as {SERVER_VARIABLE}; by default the one of this machine"),
    Option("--key", "access.key", filled, "KEY",
           f"An API key, also as {KEY_VARIABLE}; the platform of this machine has left one in its data folder"),
    Option("--data", "access.data", path, "PATH", "Data folder of the platform of this machine"),
)
# fmt: on
"""The options of every such command."""


class PlatformSubcommand(NamedTuple):
    """A subcommand: its summary, its options, and what it does."""

    summary: str
    line: CommandLine[Any]
    act: Callable[[Any], int]


def run_subcommand(
    command: str, purpose: str, subcommands: Mapping[str, PlatformSubcommand], arguments: Sequence[str]
) -> int:
    """Run one of several subcommands and return its exit status.

    Args:
        command: "charonia models".
        purpose: One sentence for the help.
        subcommands: The subcommands by name.
        arguments: Its name and its arguments.
    """
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name in subcommands:
        return carry_out(subcommands[name].line, rest, subcommands[name].act)
    if name and name not in HELP_NAMES:
        print(f"{command}: {unknown('subcommand', name, list(subcommands))}", file=sys.stderr)
        return 2
    width = max(map(len, subcommands))
    lines = [f"  {each:<{width}}  {found.summary}" for each, found in subcommands.items()]
    text = "\n".join(
        [
            f"usage: {command} SUBCOMMAND [OPTIONS]",
            *("", purpose, "", "subcommands:", *lines, ""),
            f"`{command} SUBCOMMAND --help` explains one.",
        ]
    )
    print(text, file=sys.stdout if name else sys.stderr)
    return 0 if name else 2


def connect(access: PlatformAccess, environment: Mapping[str, str] = os.environ) -> PlatformClient:
    """Return the API of the platform.

    Raises:
        ServingError: UNAVAILABLE if none is named and none runs on this machine; INVALID_ARG without a key.
    """
    server = access.server or environment.get(SERVER_VARIABLE, "")
    key = access.key or environment.get(KEY_VARIABLE, "")
    if server and key:
        return PlatformClient(server, key)
    folder = access.data.expanduser()
    local = local_access(folder)
    if not server:
        if local is None:
            raise unavailable(
                f"no platform of this user runs with the data folder '{folder}'",
                hint=f"`charonia platform` starts one; --server or {SERVER_VARIABLE} names another",
            )
        return PlatformClient(local.url, key or local.key)
    if local is None or local.url != server.rstrip("/"):  # its key is for nobody else
        raise invalid(f"expected an API key for {server}, got none", hint=KEY_HINT)
    return PlatformClient(server, local.key)


def follow(client: PlatformClient, number: int, *, with_log: bool = False) -> Mapping[str, Any]:
    """Wait for the end of a task, say on stderr what it does, and return it.

    Args:
        client: The platform.
        number: The task.
        with_log: Whether its log is printed, too.

    Raises:
        ServingError: INTERNAL if it has failed or was cancelled.
    """
    said, offset = "", 0
    while True:
        task: dict[str, Any] = client.call("GET", path_of("tasks", number))
        if with_log:
            piece = client.call("GET", path_of("tasks", number, "log"), query={"offset": offset})
            offset += len(piece.encode())
            sys.stderr.write(piece)
        elif task["doing"] and task["doing"] != said:
            said = task["doing"]
            print(f"{task['progress']:4.0%} {said}", file=sys.stderr)
        if task["state"] == "done":
            return task
        if task["state"] in ("failed", "cancelled"):
            raise internal(f"{task['subject']}: {task['reason'] or task['state']}")
        time.sleep(LOOK_S)


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return rows in aligned columns below their headings."""
    cells = [list(headings), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def moment(seconds: float) -> str:
    """Return a time as people read it, in their zone; "-" for 0."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else "-"


def size_text(size: int) -> str:
    """Return a number of bytes as people read it: "12.3 MB"."""
    amount, unit = float(size), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 1000 or unit == "TB":
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
