"""Shared by the commands of the platform's users: resources and verbs, the platform, tasks, tables."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from charonia.cli.command_line import HELP_NAMES, CommandLine, Option, carry_out, unknown
from charonia.cli.values import api_key, filled, path
from charonia.core.errors import internal, invalid, unavailable
from charonia.platform.api_client import KEY_HINT, PlatformClient, path_of
from charonia.platform.data_folder import DEFAULT_FOLDER, local_access
from charonia.tools.report.quantities import ruled

SERVER_VARIABLE = "CHARONIA_PLATFORM"
KEY_VARIABLE = "CHARONIA_PLATFORM_KEY"

LOOK_S = 0.3
"""Interval at which a running task is polled."""

PAGE = 200
"""Entries per request of a list."""

Columns = Mapping[str, str | Callable[[Any], object]]
"""Headings, each with the key of its values in an entry, or a function that returns the value of one."""


@dataclass(frozen=True, slots=True)
class PlatformAccess:
    """The platform that a command talks to, and as whom."""

    server: str = ""
    key: str = field(default="", repr=False)
    data: Path = DEFAULT_FOLDER
    project: str = "default"


THIS_MACHINE = PlatformAccess()

# fmt: off
ACCESS = (
    Option("--project", "access.project", filled, "NAME", "The project"),
    Option("--server", "access.server", filled, "URL",
           f"Address of the platform, also as {SERVER_VARIABLE}; default: the platform of this machine"),
    Option("--key", "access.key", filled, "KEY",
           f"An API key, also as {KEY_VARIABLE}; default: the key in the data folder of this machine's platform"),
    Option("--data", "access.data", path, "PATH", "Data folder of the platform of this machine"),
)
# fmt: on
"""The options of every such command."""


Act = Callable[[PlatformClient, Any], int]
"""Runs a command with its options, and returns the exit status."""


class Verb(NamedTuple):
    """An action on a resource of the platform.

    Attributes:
        summary: A line for the list of verbs.
        options: Its options in addition to the common ones.
    """

    summary: str
    act: Act
    purpose: str
    operands: str = ""
    options: Sequence[Option] = ()


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of things on a platform, as a command: "charonia models".

    Attributes:
        record: The options of all verbs, with their defaults.
    """

    command: str
    purpose: str
    record: Any
    verbs: Mapping[str, Verb]

    def lines(self) -> dict[str, CommandLine[Any]]:
        return {
            name: CommandLine(
                command=(command := f"{self.command} {name}"),
                intro=f"usage: {command} [OPTIONS]{verb.operands and ' '}{verb.operands}\n\n{verb.purpose}\n",
                groups={"Options": (*verb.options, *ACCESS)},
                record=self.record,
            )
            for name, verb in self.verbs.items()
        }

    def run(self, arguments: Sequence[str]) -> int:
        """Run a verb, from its name and its arguments, and return the exit status."""
        name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
        if name in self.verbs:
            return carry_out(self.lines()[name], rest, lambda given: self.verbs[name].act(connect(given.access), given))
        if name and name not in HELP_NAMES:
            print(f"{self.command}: {unknown('subcommand', name, list(self.verbs))}", file=sys.stderr)
            return 2
        width = max(map(len, self.verbs))
        text = [f"usage: {self.command} SUBCOMMAND [OPTIONS]", "", self.purpose, "", "subcommands:"]
        text += [f"  {each:<{width}}  {found.summary}" for each, found in self.verbs.items()]
        text += ["", f"`{self.command} SUBCOMMAND --help` explains one."]
        print("\n".join(text), file=sys.stdout if name else sys.stderr)
        return 0 if name else 2


def connect(access: PlatformAccess, environment: Mapping[str, str] = os.environ) -> PlatformClient:
    """Return the API of the platform."""
    server = access.server or environment.get(SERVER_VARIABLE, "")
    key = api_key(access.key, KEY_VARIABLE, environment)
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
    if local is None or local.url != server.rstrip("/"):  # its key is for that platform only
        raise invalid(f"expected an API key for {server}, got none", hint=KEY_HINT)
    return PlatformClient(server, local.key)


def follow(client: PlatformClient, number: int, *, with_log: bool = False) -> Mapping[str, Any]:
    """Wait for the end of a task, print its progress to stderr, and return it.

    Args:
        with_log: Whether its log is printed, too.
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


def listed(client: PlatformClient, place: str, key: str = "", **query: Any) -> Iterator[Mapping[str, Any]]:
    """Yield all entries of a list, page by page.

    Args:
        key: Where an answer has its entries, beside their total; "" if it is the entries.
    """
    count, total = 0, 1
    while count < total:
        answer = client.call("GET", place, query={**query, "limit": PAGE, "offset": count})
        page = answer[key] if key else answer
        yield from page
        count += len(page)
        total = (answer["total"] if key else count + 1) if page else 0


def table(columns: Columns, entries: Iterable[Any]) -> str:
    """Return entries in aligned columns below their headings."""
    readers = [itemgetter(column) if isinstance(column, str) else column for column in columns.values()]
    return ruled([list(columns), *([str(read(entry)) for read in readers] for entry in entries)])


def facts(named: Mapping[str, str]) -> list[str]:
    return [f"{name}: {text}" for name, text in named.items() if text]


def moment(seconds: float) -> str:
    """Return a time as people read it, in their zone; "-" for 0."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else "-"


def at(key: str) -> Callable[[Mapping[str, Any]], str]:
    """Return what reads the time of an entry."""
    return lambda entry: moment(entry[key])
