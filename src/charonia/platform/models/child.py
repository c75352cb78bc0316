"""Runs Charonia's own commands for a check: in processes that see nothing of what the platform alone is told."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from charonia.platform.tasks.runner import TaskRun
from charonia.python_command import python_module

CHECK_S_MAX = 600.0
"""Time that a command may take."""

OUTPUT_LINES_MAX = 100_000
"""Lines of a command's output that are looked at."""

_PASSED_ON = frozenset({"HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "TZ", "UV_CACHE_DIR"})
"""Environment variables of the platform that a model may see. The others may hold credentials."""


@dataclass(frozen=True, slots=True)
class CheckingPython:
    """An interpreter that checks.

    Attributes:
        name: Name of its environment, "" for the platform's own.
        path: The interpreter.
    """

    name: str = ""
    path: Path = Path(sys.executable)


@dataclass(frozen=True, slots=True)
class CheckOutput:
    """What a command has done.

    Attributes:
        status: Its exit status.
        output: The lines that it has written.
    """

    status: int
    output: list[str]


def charonia(
    run: TaskRun,
    python: CheckingPython,
    arguments: Sequence[str],
    *,
    timeout_s: float = CHECK_S_MAX,
    memory_bytes: int = 0,
    enough: Callable[[str], bool] | None = None,
) -> CheckOutput:
    """Run a command of Charonia.

    Args:
        run: The task, whose log has what it writes.
        python: The interpreter.
        arguments: Its name and arguments.
        timeout_s: After this it is ended.
        memory_bytes: Memory that each of its processes may take, 0 for no limit.
        enough: Whether it is ended after a line.

    Raises:
        CancelledTaskError: If somebody has cancelled the task.
        ServingError: INTERNAL if it took too long.
    """
    output: list[str] = []

    def keep(line: str) -> None:
        if len(output) < OUTPUT_LINES_MAX:
            output.append(line.replace("\0", "\ufffd"))  # which PostgreSQL does not take

    environment = {key: value for key, value in os.environ.items() if key in _PASSED_ON}
    command = python_module("charonia", *arguments, python=python.path)
    if memory_bytes:
        command = ["/bin/sh", "-c", 'ulimit -d "$0" && exec "$@"', str(memory_bytes >> 10), *command]
    run.log(f"$ charonia {' '.join(arguments)}")
    status = run.run(command, timeout_s=timeout_s, environment=environment, on_line=keep, enough=enough)
    return CheckOutput(status, output)
