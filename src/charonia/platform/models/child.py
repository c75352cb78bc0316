"""Runs Charonia's own commands for a check, confined."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from charonia.platform.isolation.isolation import Isolation, PrivateFolders, Reach
from charonia.platform.tasks.runner import TaskRun
from charonia.python_command import python_module

CHECK_S_MAX = 600.0
"""Time limit of a command."""

OUTPUT_LINES_MAX = 100_000
"""Lines of a command's output that are kept."""


@dataclass(frozen=True, slots=True)
class CheckingPython:
    """An interpreter for checks.

    Attributes:
        name: Name of its environment, "" for the platform's own.
    """

    name: str = ""
    path: Path = Path(sys.executable)


@dataclass(frozen=True, slots=True)
class CheckRun:
    """What all commands of a check share."""

    run: TaskRun
    python: CheckingPython
    isolation: Isolation
    room: PrivateFolders
    repository: Path


@dataclass(frozen=True, slots=True)
class CheckOutput:
    """The result of a command."""

    status: int
    output: list[str]


def charonia(
    check: CheckRun,
    arguments: Sequence[str],
    *,
    timeout_s: float = CHECK_S_MAX,
    memory_bytes: int = 0,
    enough: Callable[[str], bool] | None = None,
) -> CheckOutput:
    """Run a command of Charonia.

    Args:
        memory_bytes: Memory limit of each process, 0 for none.
        enough: Returns whether to stop the command after a line.

    Raises:
        CancelledTaskError: If the task was cancelled.
    """
    output: list[str] = []

    def keep(line: str) -> None:
        if len(output) < OUTPUT_LINES_MAX:
            output.append(line.replace("\0", "\ufffd"))  # which PostgreSQL rejects

    command = python_module("charonia", *arguments, python=check.python.path)
    if memory_bytes:
        command = ["/bin/sh", "-c", 'ulimit -d "$0" && exec "$@"', str(memory_bytes >> 10), *command]
    check.run.log(f"$ charonia {' '.join(arguments)}")
    reach = Reach(read=[check.repository], python=check.python.path, project=check.run.project_id)
    status = check.run.run(
        check.isolation.command(command, check.room, reach),
        timeout_s=timeout_s,
        environment=check.isolation.environment(check.room),
        folder=check.room.home,
        on_line=keep,
        enough=enough,
    )
    return CheckOutput(status, output)
