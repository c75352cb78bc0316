"""Temporary folders that only this user can enter, and that do not outlast their process for long.

The process that made a folder holds a lock on it as long as it lives, however it ends. The next server of the same user
removes the folders that no process holds.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

_log = logging.getLogger(__name__)

PREFIX = "charonia-files-"


class PrivateFolder:
    """A new folder; as a context manager it is removed at the end. Making and removing it blocks on the disk."""

    def __init__(self) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            # Until it is locked, another process may find it and remove it.
            try:
                self._fd = os.open(self.path, os.O_RDONLY)
            except FileNotFoundError:
                continue
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            if self.path.exists():
                break
            os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove it with its files. A file that cannot be removed stays, without an error. May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def remove_abandoned() -> None:
    """Remove the folders of processes that have ended without removing them. Blocks on the disk."""
    for path in sorted(Path(tempfile.gettempdir()).glob(PREFIX + "*")):
        with contextlib.suppress(OSError):  # of another user, or just removed
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
                _log.info("removed '%s', which a process that has ended left behind", path)
            finally:
                os.close(fd)
