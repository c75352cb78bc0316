"""Environments by key in a folder that any number of servers share; each is made once.

    <folder>/<key>/lock           held while the environment is made
    <folder>/<key>/<random>/      the environment; it cannot be moved once it is made
    <folder>/<key>/environment    link to it, put there when it is complete

What an interrupted build has left has no link to it and is removed by the next one.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import lru_cache
from pathlib import Path

from charonia.core.errors import invalid

_log = logging.getLogger(__name__)

BUILD_S_MAX = 1800.0
"""Time that making one environment may take, downloads included."""

LOCK_POLL_S = 0.1
"""How often a lock that another process or model holds is tried again."""

KEY_LETTERS = 24

_LINK = "environment"


class EnvironmentCache:
    """The environments in a folder.

    Args:
        folder: The folder; it is made when it is needed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.expanduser()

    async def archive_key(self, path: Path) -> str:
        """Return the key of an archive: its content's.

        Raises:
            ServingError: It cannot be read.
        """
        try:
            return await asyncio.to_thread(_archive_key, path)
        except OSError as error:
            raise invalid(f"the archive '{path}' cannot be read: {error.strerror}") from error

    async def get(self, key: str, build: Callable[[Path], Awaitable[None]], *, what: str) -> Path:
        """Return the environment of a key; makes it where it is not there.

        Args:
            key: Says what is in it.
            build: Makes an environment in the folder that it is given, which does not exist yet.
            what: What it is made of, for messages.

        Raises:
            ServingError: It cannot be made.
        """
        place = self._folder / key
        found = _complete(place)
        if found is not None:
            return found
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            async with _locked(place / "lock", what):
                return _complete(place) or await self._make(place, build, what)
        except OSError as error:
            raise invalid(
                f"the environment of {what} cannot be kept in '{place}': {error}",
                hint="CHARONIA_CACHE, or --backend-config=python,environment-cache=FOLDER, names another folder",
            ) from error

    async def _make(self, place: Path, build: Callable[[Path], Awaitable[None]], what: str) -> Path:
        await asyncio.to_thread(_remove_leftovers, place)
        folder = place / secrets.token_hex(4)
        _log.info("making the Python environment of %s in %s; this may take a while", what, folder)
        start = time.monotonic()
        try:
            async with asyncio.timeout(BUILD_S_MAX):
                await build(folder)
        except BaseException as error:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            if isinstance(error, TimeoutError):
                raise invalid(f"the environment of {what} was not made within {BUILD_S_MAX:g} s") from None
            raise
        link = place / f"{folder.name}.link"
        link.symlink_to(folder.name)
        link.replace(place / _LINK)
        _log.info("made the Python environment of %s in %.1f s", what, time.monotonic() - start)
        return folder


def _complete(place: Path) -> Path | None:
    """Return the environment, unless there is none or its interpreter has gone."""
    link = place / _LINK
    if not any((link / "bin" / name).exists() for name in ("python", "python3")):
        return None
    return place / os.readlink(link)


def _remove_leftovers(place: Path) -> None:
    for path in place.iterdir():
        if path.is_symlink():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


@contextlib.asynccontextmanager
async def _locked(path: Path, what: str) -> AsyncIterator[None]:
    """Hold the lock at a path. It ends with the process, however that ends."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        is_waiting = False
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not is_waiting:
                    _log.info("waiting for the Python environment of %s, which is being made already", what)
                is_waiting = True
                await asyncio.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(fd)


def _archive_key(path: Path) -> str:
    status = path.stat()
    return _content_key(path, status.st_size, status.st_mtime_ns, status.st_ino)


@lru_cache(maxsize=256)
def _content_key(path: Path, size: int, mtime_ns: int, inode: int) -> str:
    """Return the key of a file's content, read once for as long as the file is not changed."""
    with path.open("rb") as file:
        return "archive-" + hashlib.file_digest(file, "sha256").hexdigest()[:KEY_LETTERS]
