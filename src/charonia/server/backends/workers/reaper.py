"""Kills the children of workers when the server is killed. Run as a script, it is the reaper process.

The system kills a worker as soon as the server ends (Linux), but not the worker's children. So the server starts a
small reaper process. It reads the process groups of workers from a pipe, and kills them when the pipe closes, which
happens when the server ends.
"""

import contextlib
import os
import signal
import sys


class Reaper:
    """The reaper process, as seen by the server. It starts with the first group."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._owner = 0
        self._pid = 0
        self._pipe = -1

    def watch(self, group: int) -> None:
        """Register a process group to be killed when this process ends, even by SIGKILL."""
        if self._owner != os.getpid():  # there is none yet, or it belongs to the parent that forked this process
            self._groups.clear()
            self._start()
        self._groups.add(group)
        self._tell(f"+{group}\n")

    def unregister(self, group: int) -> None:
        if self._owner == os.getpid() and group in self._groups:
            self._groups.discard(group)
            self._tell(f"-{group}\n")

    def end(self) -> int:
        """End the reaper process, unless groups are left; return its pid to wait for, or 0."""
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
"""The reaper of this process."""


def main() -> None:
    """Read groups from standard input; at its end, kill the remaining ones."""
    os.setsid()  # signals to the server's terminal or group must not end this process
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
