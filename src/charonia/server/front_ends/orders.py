"""Orders of the parent of a server's processes to its engines, as files in the private folder.

A new engine may be of another release than the parent, so these are JSON, and it reads its command line itself.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from charonia.core.errors import invalid, unsupported
from charonia.server.front_ends.messages import PROTOCOL
from charonia.server.options import FRONT_ENDS_AUTO, ServerOptions

FIXED = (
    "front_ends",
    *(f"{endpoint}.{field}" for endpoint in ("http", "grpc") for field in ("enabled", "address", "port")),
    "metrics.enabled", "metrics_address", "metrics.port", "replica_port",
)  # fmt: skip
"""The options of the listening sockets, which an upgrade cannot change."""


@dataclass(frozen=True, slots=True)
class HandOverOrder:
    """An order to an engine to hand over.

    Attributes:
        socket: Name of the next engine's socket, "" where that is started later.
        finish_s: Seconds to finish its requests, streams and sequences.
    """

    socket: str
    finish_s: float


class ServeCommand(NamedTuple):
    """A command line of `charonia serve`.

    Attributes:
        folder: Folder that its relative paths begin at, "" for the current folder of the server.
    """

    arguments: Sequence[str]
    folder: str = ""


@dataclass(frozen=True, slots=True)
class NewEngine:
    """How an engine starts that replaces another one.

    Attributes:
        protocol: `PROTOCOL` of the front ends.
        command: Its command line.
        command_before: The command line of the previous engine.
        repositories: The repositories of the previous engine, with one that was made for files.
        cpu_cores: Default of the cores of models.
        front_ends: Number of the front ends.
    """

    protocol: int
    command: ServeCommand
    command_before: ServeCommand
    repositories: Sequence[str]
    cpu_cores: int
    front_ends: int


def write_order(folder: Path, order: HandOverOrder) -> None:
    """Write the order that an engine reads on SIGUSR2."""
    (folder / "hand_over").write_text(json.dumps(asdict(order)), encoding="utf-8")


def read_order(folder: Path) -> HandOverOrder:
    """Return what `write_order` wrote."""
    return HandOverOrder(**json.loads((folder / "hand_over").read_text(encoding="utf-8")))


def new_engine_path(folder: Path, name: str) -> Path:
    """Return where the order for a new engine lies, until the engine has taken its place."""
    return folder / f"{name}.order"


def write_new_engine(folder: Path, name: str, order: NewEngine) -> None:
    new_engine_path(folder, name).write_text(json.dumps(asdict(order)), encoding="utf-8")


def read_new_engine(folder: Path, name: str) -> NewEngine | None:
    """Return how an engine starts that is new, None for one that is as the server was started.

    Raises:
        ServingError: UNSUPPORTED where the front ends could not talk to it.
    """
    path = new_engine_path(folder, name)
    if not path.exists():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    if values["protocol"] != PROTOCOL:
        raise unsupported(
            "the release on the disk does not go with the running front ends: "
            f"expected protocol {values['protocol']}, got {PROTOCOL}",
            hint="restart the server",
        )
    commands = {name: ServeCommand(*values[name]) for name in ("command", "command_before")}
    return NewEngine(**{**values, **commands})


def options_of(order: NewEngine, parse: Callable[[ServeCommand], ServerOptions]) -> ServerOptions:
    """Return the options of a new engine.

    Args:
        order: How it starts.
        parse: Returns the options of a command line; raises ServingError.

    Raises:
        ServingError: The arguments cannot be used, or change where the server listens.
    """
    options, before = (_numbered(parse(given), order) for given in (order.command, order.command_before))
    changed = [name for name in FIXED if _field(options, name) != _field(before, name)]
    if changed:
        raise invalid(
            f"an upgrade cannot change the number of front ends, and where they listen: {', '.join(changed)}",
            hint="leave these options as they were, or restart the server",
        )
    models = options.models
    if (models.repositories, models.files) == (before.models.repositories, before.models.files):
        models = replace(models, repositories=tuple(order.repositories))
    return replace(options, models=models, cpu_cores=options.cpu_cores or order.cpu_cores)


def _numbered(options: ServerOptions, order: NewEngine) -> ServerOptions:
    return replace(options, front_ends=order.front_ends) if options.front_ends == FRONT_ENDS_AUTO else options


def _field(options: ServerOptions, path: str) -> object:
    value: object = options
    for name in path.split("."):
        value = getattr(value, name)
    return value
