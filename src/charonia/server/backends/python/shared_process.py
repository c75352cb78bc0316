"""Processes that the functions of one file share: each function is a thread, with a connection of its own.

A function that is loaded again gets a new process, which the others join when they are loaded again: so no new code
runs beside old one. When the process ends, all its functions are started again, together in another one.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import IO

from charonia.server.backends.python.reaper import reaper

EXIT_S_MAX = 5.0
"""Time that a process has to exit when its last function has left."""

SCRIPT = Path(__file__).parent / "worker" / "script.py"

Start = Callable[[tuple[str, ...], tuple[int, ...]], "subprocess.Popen[bytes]"]
"""Starts a process, with arguments of the script and descriptors that it inherits."""


class SharedProcess:
    """A process.

    Args:
        start: Starts it.

    Attributes:
        models: The models that have joined, also those that have left.
        count: Functions in it now.
    """

    def __init__(self, start: Start) -> None:
        self.models: set[str] = set()
        self.count = 0
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.popen = start(("shared", str(theirs.fileno())), (theirs.fileno(),))
        self._ending: asyncio.Task[None] | None = None

    @property
    def has_ended(self) -> bool:
        return self.popen.returncode is not None or self._ending is not None

    def join(self, receiving: socket.socket, sending: socket.socket) -> "JoinedThread":
        """Start a thread with these ends of a connection.

        Raises:
            OSError: The process has ended.
        """
        socket.send_fds(self._control, [b"+"], [receiving.fileno(), sending.fileno()])
        self.count += 1
        return JoinedThread(self)

    def leave(self) -> None:
        """A thread has ended; with the last one, so does the process."""
        self.count -= 1
        if not self.count:
            self._control.close()
            self._ending = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        try:
            await asyncio.to_thread(self.popen.wait, EXIT_S_MAX)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, 9)
            await asyncio.to_thread(self.popen.wait)
        reaper.forget(self.popen.pid)
        if self.popen.stdout is not None:
            self.popen.stdout.close()


class JoinedThread:
    """A thread in a shared process, with what is used of `subprocess.Popen`.

    Attributes:
        pid: Number of the process.
        pidfd: Its pidfd, which the caller closes.
        stdout: What the process writes: whichever of its functions reads first gets it.
    """

    def __init__(self, shared: SharedProcess) -> None:
        self.shared = shared
        self.pid = shared.popen.pid
        self.pidfd = os.pidfd_open(self.pid)
        output = shared.popen.stdout
        assert output is not None
        self.stdout: IO[bytes] = open(os.dup(output.fileno()), "rb", 0)  # noqa: SIM115 # its owner closes it

    @property
    def returncode(self) -> int | None:
        return self.shared.popen.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        return self.shared.popen.wait(timeout)


class SharedProcesses:
    """The processes in use, by what their functions have in common."""

    def __init__(self) -> None:
        self._current: dict[Hashable, SharedProcess] = {}

    def of(self, key: Hashable, model: str, start: Start) -> SharedProcess:
        """Return the process that an instance of a model joins.

        Args:
            key: What the functions of a process have in common.
            model: Name of the model.
            start: Starts a process.
        """
        found = self._current.get(key)
        if found is None or found.has_ended or model in found.models:
            self._current = {other: each for other, each in self._current.items() if not each.has_ended}
            found = self._current[key] = SharedProcess(start)
        found.models.add(model)
        return found
