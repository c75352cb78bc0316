"""Starts `charonia` commands as forks of a process that has the server's modules already.

Most of what the start of a small server takes is the import of its modules, and the tests start hundreds. A command
runs as it does from a terminal otherwise: its own process, arguments, environment, folder and stderr.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, TextIO

from charonia.cli.main import main

_FORK_SERVER = multiprocessing.get_context("forkserver")
_FORK_SERVER.set_forkserver_preload(["charonia.server.app", "charonia.cli.serve", __name__])


class ForkedCommand:
    """A running `charonia` command, with what the tests use of `subprocess.Popen`.

    Args:
        arguments: Its arguments: "serve", …

    Attributes:
        pid: Its process.
        stderr: What it writes to stderr.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        reading, writing = os.pipe()
        self.stderr: TextIO = open(reading)  # noqa: SIM115 # closed by its reader
        self._process = _FORK_SERVER.Process(
            target=_run, args=(list(arguments), dict(os.environ), Path.cwd(), _Descriptor(writing)), daemon=True
        )
        self._process.start()
        os.close(writing)
        self.pid: int = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the same."""
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int:
        """Wait for its end and return the exit status.

        Raises:
            subprocess.TimeoutExpired: It goes on.
        """
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("charonia", timeout_s)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class _Descriptor:
    """A descriptor that is passed to the process while it starts; there it is a number."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (DupFd(self.descriptor),)


def _detached(duplicate: Any) -> int:
    return int(duplicate.detach())


def _run(arguments: Sequence[str], environment: dict[str, str], folder: Path, errors: int) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor, place in ((nothing, 0), (nothing, 1), (errors, 2)):
        os.dup2(descriptor, place)
    os.close(nothing)
    os.close(errors)
    sys.argv = ["charonia", *arguments]
    sys.exit(main())
