"""Ends what workers have started when the server is killed. Run as a script, it is the process that does so.

A worker itself is killed by the system as soon as the server is gone (Linux), but not what the worker has started. So a
small process stands beside the server. It reads from a pipe which process groups there are, and kills them when the
pipe ends, which is when the server does.
"""

import contextlib
import os
import signal
import sys


class Reaper:
    """The process beside this one, from the first group on until this one ends."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._owner = 0
        self._pid = 0
        self._pipe = -1

    def watch(self, group: int) -> None:
        """Have a process group killed when this process ends, however it ends."""
        if self._owner != os.getpid():  # there is none yet, or it is that of the process that has forked this one
            self._groups.clear()
            self._start()
        self._groups.add(group)
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """The group has ended."""
        if self._owner == os.getpid() and group in self._groups:
            self._groups.discard(group)
            self._tell(f"-{group}\n")

    def end(self) -> int:
        """Let the process end, unless there are groups left to watch; return its number to wait for, or 0."""
        if self._owner != os.getpid() or self._groups:
            return 0
        self._owner = 0
        os.close(self._pipe)
        return self._pid

    def _tell(self, lines: str) -> None:
        try:
            os.write(self._pipe, lines.encode())
        except BrokenPipeError:  # it was killed
            os.close(self._pipe)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, os.WNOHANG)
            self._start()
            os.write(self._pipe, "".join(f"+{group}\n" for group in self._groups).encode())

    def _start(self) -> None:
        reading, self._pipe = os.pipe()
        try:
            self._pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", __file__],
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, reading, 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                ],
            )
        finally:
            os.close(reading)
        self._owner = os.getpid()


reaper = Reaper()
"""That of this process."""


def main() -> None:
    """Read groups from standard input; at its end, kill those that are left."""
    os.setsid()  # what ends the server by its terminal or its group must not end this first
    groups: set[int] = set()
    for line in sys.stdin:
        if line.startswith("+"):
            groups.add(int(line[1:]))
        else:
            groups.discard(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
