"""Files being uploaded: one file each, as long as the received bytes.

Received bytes are kept when a connection breaks, and the upload continues from there. A piece may be sent again, even
while an earlier request with it still waits for the rest.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from charonia.core.errors import Code, ServingError, not_found, too_large
from charonia.platform.artifacts.blobs import demand_room, disk_faults

LOOK_BYTES = 16 * 1024 * 1024
"""Bytes after which free space is checked again."""


_SEALED = ".sealed"


class UploadFolder:
    """Files being uploaded. Any thread may call.

    A file that a version is created from is sealed: its content may already be the version's.

    Args:
        folder: Their folder, which is created.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with disk_faults("uploads", folder):
            folder.mkdir(parents=True, exist_ok=True)

    def path(self, key: str) -> Path:
        return self.folder / key

    def begin(self, sizes: dict[str, int]) -> None:
        """Create empty files.

        Args:
            sizes: Their final sizes, by key.
        """
        demand_room(self.folder, sum(sizes.values()), what="upload")
        with disk_faults("upload", self.folder):
            for key in sizes:
                self.path(key).touch(mode=0o600)

    def received(self, key: str) -> int:
        """Return how many bytes of a file have arrived."""
        for path in (self.path(key), self.sealed(key)):
            with contextlib.suppress(FileNotFoundError):
                return path.stat().st_size
        raise _gone(key)

    @contextmanager
    def writing(self, key: str, offset: int, size: int) -> Iterator["UploadWriter"]:
        """Yield a writer that starts at `offset`."""
        try:
            file = self.path(key).open("r+b", buffering=0)
        except FileNotFoundError:
            raise _gone(key) from None
        with file:
            _lock(file, self.path(key), fcntl.LOCK_SH)
            received = os.fstat(file.fileno()).st_size
            if not 0 <= offset <= received:
                raise ServingError(
                    Code.CANCELLED,
                    f"upload {key}: expected an offset of at most {received}, the bytes received so far, got {offset}",
                    hint=f"continue from {received}",
                )
            file.seek(offset)
            yield UploadWriter(file, offset, size, self.folder)

    def seal(self, keys: Sequence[str]) -> None:
        """Prevent all writes to files from now on. Sealing again changes nothing."""
        for key in keys:
            if self.sealed(key).exists():
                continue
            try:
                file = self.path(key).open("rb")
            except FileNotFoundError:
                raise _gone(key) from None
            with file:  # a writer that has opened but not yet locked it finds it gone
                _lock(file, self.path(key), fcntl.LOCK_EX)
                self.path(key).rename(self.sealed(key))

    def sealed(self, key: str) -> Path:
        return self.folder / f"{key}{_SEALED}"

    def unseal(self, keys: Sequence[str]) -> None:
        """Allow writes to files again, except files whose content the store has taken over."""
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                if self.sealed(key).stat().st_nlink == 1:
                    self.sealed(key).rename(self.path(key))

    def remove(self, key: str) -> None:
        """Remove a file, if it is there."""
        self.path(key).unlink(missing_ok=True)
        self.sealed(key).unlink(missing_ok=True)

    def unused(self, older_than_s: float) -> list[str]:
        """Return the keys of files without progress for this time."""
        before = time.time() - older_than_s
        return [path.name.removesuffix(_SEALED) for path in self.folder.iterdir() if path.stat().st_mtime < before]


class UploadWriter:
    """Writes one piece of a file. One thread may call at a time."""

    def __init__(self, file: BinaryIO, offset: int, size: int, folder: Path) -> None:
        self._file = file
        self._position = offset
        self._size = size
        self._folder = folder
        self._looked = offset - LOOK_BYTES

    def write(self, piece: bytes) -> None:
        """Write the next bytes.

        Raises:
            TooLargeError: The file would exceed its declared size.
            StorageFullError: There is no room for them; bytes written before stay.
        """
        if self._position + len(piece) > self._size:
            raise too_large(f"upload: expected {self._size} bytes, as declared at its start, got more")
        with disk_faults("upload", self._folder):
            if self._position - self._looked >= LOOK_BYTES:
                self._looked = self._position
                demand_room(self._folder, 0, what="upload")
            view = memoryview(piece)
            while view:
                written = self._file.write(view)
                view = view[written:]
                self._position += written


def _lock(file: BinaryIO, path: Path, kind: int) -> None:
    try:
        fcntl.flock(file.fileno(), kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ServingError(
            Code.CANCELLED, f"upload {path.name}: it is still being sent", hint="try again in a moment"
        ) from None
    try:
        is_same = os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        is_same = False
    if not is_same:  # taken over after it was opened: its content must not change any more
        raise _gone(path.name)


def _gone(key: str) -> ServingError:
    return not_found(f"upload '{key}' does not exist", hint="start again: it was imported, or has expired")
