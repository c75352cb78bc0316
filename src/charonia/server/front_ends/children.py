"""The processes of a server, as files of its private folder: start, options, orders and reports.

A new engine may be of another release than the parent, so orders are JSON, and it reads its command line itself.
"""

import json
import marshal
import os
import pickle
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError, invalid, unsupported
from charonia.core.metadata import ModelIndexEntry
from charonia.python_command import python_module
from charonia.server.front_ends.messages import PROTOCOL, decode_error, plain, record
from charonia.server.guard.restarts import ProcessRole
from charonia.server.guard.supervisor import ProcessSpec
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


OPTIONS_NAME = "options"
"""File with the options for the children, in the private folder."""

ENGINE = "engine"
"""Name of the engine's process."""


Sockets = Mapping[str, Sequence[socket.socket]]
"""The listening sockets of a process by endpoint: "http", "grpc", "metrics"."""


class ErrorRecord(NamedTuple):
    """An error in a report, as `messages.encode_error` writes it."""

    code: str
    message: str
    hint: str
    is_unexecuted: bool
    retry_after_s: int = 0


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """A process's report that it has started, or failed to.

    Attributes:
        error: Why it cannot start, None when it has.
        models: Of an engine, every model with the state of its versions.
        configs: Of an engine, the configuration of each model that is ready.
        version: Release of an engine.
    """

    error: ErrorRecord | None = None
    models: tuple[ModelIndexEntry, ...] = ()
    configs: Mapping[str, ModelConfig] = field(default_factory=dict)
    version: str = ""


def process_spec(
    folder: Path,
    name: str,
    role: ProcessRole,
    sockets: Sockets,
    *further: str,
    shared: Sockets | None = None,
    python: str = sys.executable,
) -> ProcessSpec:
    """Return how to start a process of a server.

    Args:
        folder: Folder of its options.
        sockets: Its own listening sockets.
        further: More arguments.
        shared: Listening sockets that other servers have, too.
        python: Its interpreter.
    """
    named = [(endpoint, sock) for each in (shared or {}, sockets) for endpoint, own in each.items() for sock in own]
    descriptors = [f"{endpoint}={sock.fileno()}" for endpoint, sock in named]
    arguments = (name, str(folder), *further, *descriptors)
    command = python_module("charonia.cli.serve_process", *arguments, python=python)
    own, others = ([sock for each in part.values() for sock in each] for part in (sockets, shared or {}))
    return ProcessSpec(name, role, command, sockets=own, shared_sockets=others)


def process_specs(
    folder: Path, engine: Sockets, front_ends: Sequence[Sockets], shared: Sequence[Sockets] = ()
) -> list[ProcessSpec]:
    """Return the engine and the front ends of a server whose options are in `folder`, given their sockets.

    Those in `shared`, of each front end, are shared with other servers.
    """
    return [
        process_spec(folder, ENGINE, ProcessRole.ENGINE, engine),
        *(
            process_spec(folder, front_end_name(number), ProcessRole.FRONT_END, own, shared=others)
            for number, (own, others) in enumerate(zip_longest(front_ends, shared), 1)
        ),
    ]


def with_descriptors(options: ServerOptions, words: Iterable[str]) -> ServerOptions:
    """Return the options of a process that has inherited sockets, named as in the command of `process_spec`."""
    found: dict[str, tuple[int, ...]] = {}
    for word in words:
        endpoint, _, descriptor = word.partition("=")
        os.set_inheritable(int(descriptor), False)
        found[endpoint] = (*found.get(endpoint, ()), int(descriptor))
    return replace(
        options,
        http=replace(options.http, descriptors=found.get("http", ())),
        grpc=replace(options.grpc, descriptors=found.get("grpc", ())),
        metrics=replace(options.metrics, descriptors=found.get("metrics", ())),
    )


def front_end_name(number: int) -> str:
    return f"front_end_{number}"


def number_of(name: str) -> int:
    """Return the number of a process: 0 for an engine, from 1 on for front ends and their successors."""
    return 0 if name.startswith(ENGINE) else int(name.split("_")[2])


def write_report(folder: Path, name: str, report: ProcessReport) -> None:
    (folder / f"{name}.report").write_bytes(marshal.dumps(plain(report), 2))  # type: ignore[arg-type] # plain values


def remove_report(folder: Path, name: str) -> None:
    """Remove the report of the process that ran before under this name."""
    (folder / f"{name}.report").unlink(missing_ok=True)


def read_report(folder: Path, name: str) -> ProcessReport | None:
    """Return the report of a child, None if it has written none."""
    try:
        return record(ProcessReport, marshal.loads((folder / f"{name}.report").read_bytes()))
    except FileNotFoundError:
        return None


def write_options(folder: Path, options: ServerOptions, name: str = "") -> None:
    """Write the options for the children, or, with its name, of a new engine for the time after an upgrade."""
    options_path(folder, name).write_bytes(pickle.dumps(options))


def options_path(folder: Path, name: str) -> Path:
    """Return the path of the options of a new engine, "" for those of the server."""
    return folder / (f"{name}.{OPTIONS_NAME}" if name else OPTIONS_NAME)


def take_options(folder: Path, name: str) -> None:
    options_path(folder, name).replace(folder / OPTIONS_NAME)


def read_options(folder: Path) -> ServerOptions:
    """Return the options that the parent has written."""
    with (folder / OPTIONS_NAME).open("rb") as file:
        options: ServerOptions = pickle.load(file)  # noqa: S301 # written by the parent into its private folder
    return options


def error_of(folder: Path, name: str) -> ServingError | None:
    """Return why a child could not start, by its own report; None without a report."""
    report = read_report(folder, name)
    return decode_error(tuple(report.error)) if report is not None and report.error is not None else None
