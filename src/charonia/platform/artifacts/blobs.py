"""Files by the hash of their content, in a folder: `sha256/ab/abcd...`; and errors of disks.

A blob is complete when it has its name: it is written under a temporary one first. Blobs are immutable, so folders of
models are made of hard links to them.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from charonia.core.errors import Code, ServingError, internal
from charonia.platform.artifacts.manifest import Blob

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class StorageFullError(ServingError):
    """The disk has no room left. Whatever writes files raises it: docstrings do not repeat this."""


def storage_full(message: str) -> StorageFullError:
    return StorageFullError(Code.UNAVAILABLE, message, hint="delete unused versions, or add room")


@contextmanager
def disk_faults(what: str, place: Path) -> Iterator[None]:
    """Turn errors of a disk into errors for users.

    Args:
        what: The operation: "upload".
    """
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        if error.errno in _FULL:
            raise storage_full(f"{what}: there is no room left in '{place}'") from error
        raise internal(f"{what}: '{place}' cannot be used: {reason}") from error


PIECE_BYTES = 1024 * 1024
"""Bytes read and hashed at a time."""

RESERVE_BYTES = 64 * 1024 * 1024
"""Space that stays free on a disk for the database and the logs."""

_MODE = 0o444


class BlobFolder:
    """A folder of blobs. Any thread may call.

    Args:
        folder: The folder, which is created.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._blobs = folder / "sha256"
        self._incoming = folder / "incoming"
        with disk_faults("store", folder):
            self._blobs.mkdir(parents=True, exist_ok=True)
            self._incoming.mkdir(exist_ok=True)

    def path(self, sha256: str) -> Path:
        return self._blobs / sha256[:2] / sha256

    def has(self, sha256: str) -> bool:
        return self.path(sha256).is_file()

    def add(self, pieces: Iterable[bytes], *, what: str) -> Blob:
        """Store content from an iterator."""
        digest, size = hashlib.sha256(), 0
        with disk_faults(what, self.folder), self._temporary() as path, path.open("wb") as file:
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
                size += len(piece)
            file.flush()
            os.fsync(file.fileno())
            self._name(path, digest.hexdigest())
        return Blob(digest.hexdigest(), size)

    def adopt(self, source: Path, *, what: str) -> Blob:
        """Store an immutable file, which also stays in its place."""
        digest, size = hashlib.sha256(), 0
        with disk_faults(what, source), source.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
                size += len(piece)
        sha256 = digest.hexdigest()
        if not self.has(sha256):
            with disk_faults(what, self.folder), self._temporary() as path:
                link_or_copy(source, path)
                self._name(path, sha256)
        return Blob(sha256, size)

    def link(self, sha256: str, target: Path) -> None:
        """Link a blob into a folder, replacing an existing file."""
        with disk_faults(f"blob {sha256[:12]}", target.parent):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            link_or_copy(self.path(sha256), target)

    def check(self, blob: Blob) -> None:
        """Check that a blob still has its content."""
        digest = hashlib.sha256()
        with disk_faults(f"blob {blob.sha256[:12]}", self.path(blob.sha256)), self.path(blob.sha256).open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
        if digest.hexdigest() != blob.sha256:
            raise internal(f"the file '{self.path(blob.sha256)}' has been damaged: its content has another hash")

    def all(self) -> Iterator[tuple[str, os.stat_result]]:
        for folder in sorted(self._blobs.iterdir()):
            for path in sorted(folder.iterdir()):
                with contextlib.suppress(FileNotFoundError):
                    yield path.name, path.stat()

    def remove(self, sha256: str) -> None:
        """Remove a blob; folders that have a link to it keep the content."""
        with disk_faults(f"blob {sha256[:12]}", self.folder):
            self.path(sha256).unlink(missing_ok=True)

    def sweep(self, older_than_s: float) -> None:
        """Remove temporary files of killed writers."""
        before = time.time() - older_than_s
        for path in self._incoming.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield an empty folder on the disk of the blobs, which is removed afterwards."""
        with disk_faults("store", self._incoming):
            folder = Path(tempfile.mkdtemp(dir=self._incoming))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _temporary(self) -> Iterator[Path]:
        handle, name = tempfile.mkstemp(dir=self._incoming)
        os.close(handle)
        try:
            yield Path(name)
        finally:
            Path(name).unlink(missing_ok=True)

    def _name(self, path: Path, sha256: str) -> None:
        path.chmod(_MODE)
        self.path(sha256).parent.mkdir(exist_ok=True)
        path.rename(self.path(sha256))


def demand_room(folder: Path, size: int, *, what: str) -> None:
    """Check that there is room for `size` bytes on the disk of a folder."""
    with disk_faults(what, folder):
        free = shutil.disk_usage(folder).free - RESERVE_BYTES
    if free < max(size, 0):
        raise storage_full(f"{what}: needs {size} bytes, and '{folder}' has room for {max(0, free)}")


def link_or_copy(source: Path, target: Path) -> None:
    """Make a hard link, or a copy if the file system has none or the disk differs. `target` is replaced."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
            raise
        shutil.copyfile(source, target)
