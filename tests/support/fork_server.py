"""Starts `charonia` commands as forks of a process that has the server's modules already.

Most of what the start of a small server takes is the import of its modules, and the tests start hundreds. A command
runs as it does from a terminal otherwise: its own process, arguments, environment, folder and stderr. What it starts
itself, such as worker processes, is forked as well (`warm_start`).
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, TextIO

from tests.support import warm_start

from charonia.cli.main import main

_FORK_SERVER = multiprocessing.get_context("forkserver")
_PATH = list(sys.path)  # before tests import what changes it, such as Ray
_FORK_SERVER.set_forkserver_preload([*warm_start.COMMANDS, __name__, "tests.support.preloaded"])


def run_command(
    *arguments: str | Path, folder: Path | None = None, given: str = "", seconds_max: float = 120
) -> "subprocess.CompletedProcess[str]":
    """Run a `charonia` command to its end, and return its exit status and what it wrote.

    Args:
        given: Its standard input.

    Raises:
        subprocess.TimeoutExpired: It took longer.
    """
    texts = [str(argument) for argument in arguments]
    new_file = partial(tempfile.TemporaryFile, "w+")
    with new_file() as read, new_file() as out, new_file() as errors:
        read.write(given)
        read.seek(0)
        process = _fork(texts, folder or Path.cwd(), read.fileno(), out.fileno(), errors.fileno())
        process.join(seconds_max)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(["charonia", *texts], seconds_max)
        for file in (out, errors):
            file.seek(0)
        return subprocess.CompletedProcess(["charonia", *texts], process.exitcode, out.read(), errors.read())


class ForkedCommand:
    """A running `charonia` command, with what the tests use of `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str]) -> None:
        reading, writing = os.pipe()
        self.stderr: TextIO = open(reading)  # noqa: SIM115 # closed by its reader
        with open(os.devnull, "r+b", buffering=0) as nothing:
            self._process = _fork(list(arguments), Path.cwd(), nothing.fileno(), nothing.fileno(), writing)
        os.close(writing)
        self.pid: int = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
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
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Descriptor:
    """A descriptor that is passed to the process while it starts; there it is a number."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (DupFd(self.descriptor),)


def _detached(duplicate: Any) -> int:
    return int(duplicate.detach())


def _fork(arguments: list[str], folder: Path, *descriptors: int) -> BaseProcess:
    """Start a command whose standard streams are these."""
    streams = tuple(map(_Descriptor, descriptors))
    process = _FORK_SERVER.Process(
        target=_run, args=(arguments, _PATH, dict(os.environ), folder, *streams), daemon=True
    )
    process.start()
    return process


def _run(arguments: list[str], path: list[str], environment: dict[str, str], folder: Path, *streams: int) -> None:
    sys.path[:] = path
    template = warm_start.fork_template()
    warm_start.install(template)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for place, descriptor in enumerate(streams):
        os.dup2(descriptor, place)
        os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 # multiprocessing has put another one in its place
    sys.argv = ["charonia", *arguments]
    try:
        sys.exit(main())
    finally:
        template.close()
