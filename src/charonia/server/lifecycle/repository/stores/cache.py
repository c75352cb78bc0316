"""The cache of fetched models on this machine's disk, shared by all servers that name the same folder.

    <folder>/blobs/<key>                content of one file of a store; the key is a digest of path, size and tag
    <folder>/trees/<key>/<model>/       a model's folder, made of hard links to blobs
    <folder>/trees/<key>.lock           locked, shared, by each process that has the model loaded
    <folder>/lock                       locked, shared, to add something; exclusively, to remove something

Everything is added atomically, under a temporary name that is then renamed. A blob that no tree links to and a tree
that no process holds may be evicted; the least recently used go first, when the cache exceeds its limit.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from charonia.core.errors import unavailable

BYTES_MAX = 64 * 1024**3
"""Default size limit of a cache."""

PART_SUFFIX = ".part"
PART_AGE_S_MAX = 24 * 3600.0
"""Age from which a temporary file belongs to a process that has ended."""


class Lease:
    """A tree in use: it is not removed until `release`, or the end of the process.

    Attributes:
        path: The model's folder.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    def release(self) -> None:
        """Allow its eviction. May be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class StoreCache:
    """A cache in a folder. Everything blocks on the disk; any thread may call.

    Args:
        folder: The folder; created with the first entry.
        bytes_max: Size limit of the content. Entries in use are never removed.
    """

    def __init__(self, folder: Path, bytes_max: int = BYTES_MAX) -> None:
        self.folder = folder.expanduser().absolute()
        self.bytes_max = bytes_max
        self._blobs = self.folder / "blobs"
        self._trees = self.folder / "trees"

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        """Prevent evictions while something is added.

        Raises:
            OSError: The folder cannot be written.
        """
        for folder in (self._blobs, self._trees):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(self.folder / "lock", fcntl.LOCK_SH):
            yield

    def blob(self, key: str) -> Path | None:
        """Return the path of a file's content, None where it is not in the cache."""
        path = self._blobs / key
        return path if path.exists() else None

    @contextlib.contextmanager
    def new_blob(self, key: str, size: int) -> Iterator[int]:
        """Give a descriptor to write a file's content to; the blob is added when the block ends without an error."""
        part = self._blobs / f"{key}.{secrets.token_hex(4)}{PART_SUFFIX}"
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
        try:
            os.truncate(fd, size)
            yield fd
            part.replace(self._blobs / key)
        finally:
            os.close(fd)
            part.unlink(missing_ok=True)

    def lease(self, key: str, model: str) -> Lease | None:
        """Take a tree into use, None where it is not in the cache."""
        path = self._trees / key / model
        if not path.is_dir():
            return None
        fd = os.open(self._trees / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            if path.is_dir():  # another process may have evicted it before we had the lock
                os.utime(path.parent)
                return Lease(path, fd)
        except OSError:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def plant(self, key: str, model: str, folders: list[str], files: Mapping[str, Path]) -> None:
        """Add a tree.

        Args:
            key: Its key.
            model: Name of the model, and of its folder.
            folders: Folders that may be empty, relative to the model's.
            files: Blob by path relative to the model's folder.
        """
        part = self._trees / f"{key}.{secrets.token_hex(4)}{PART_SUFFIX}"
        top = part / model
        try:
            top.mkdir(parents=True)
            for folder in folders:
                (top / folder).mkdir(parents=True, exist_ok=True)
            for relative, blob in files.items():
                path = top / relative
                path.parent.mkdir(parents=True, exist_ok=True)
                _link(blob, path)
            with contextlib.suppress(FileExistsError, OSError):  # another process was quicker
                part.rename(self._trees / key)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def trim(self, needed: int = 0) -> None:
        """Evict entries that are not in use, least recently used first, until `needed` more bytes fit. Best effort.

        Raises:
            ServingError: UNAVAILABLE when `needed` exceeds the size limit of the cache.
        """
        if needed > self.bytes_max:
            raise unavailable(
                f"the model's files have {_mib(needed)}, the cache of model stores keeps {_mib(self.bytes_max)}",
                hint="raise --model-store-cache-size",
            )
        if not self._blobs.is_dir():
            return
        with contextlib.suppress(BlockingIOError), _locked(self.folder / "lock", fcntl.LOCK_EX | fcntl.LOCK_NB):
            self._remove_leftovers()
            limit = self.bytes_max - needed
            self._sweep_blobs(limit)
            for tree in sorted(self._complete_trees(), key=_age):
                if self.used_bytes() <= limit:
                    break
                if self._remove_tree(tree):
                    self._sweep_blobs(limit)

    def used_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._blobs.iterdir() if not path.name.endswith(PART_SUFFIX))

    def _complete_trees(self) -> list[Path]:
        return [path for path in self._trees.iterdir() if path.is_dir() and not path.name.endswith(PART_SUFFIX)]

    def _sweep_blobs(self, limit: int) -> None:
        """Remove blobs that no tree links to while the cache exceeds the limit."""
        used = self.used_bytes()
        if used <= limit:
            return
        unlinked = [path for path in self._blobs.iterdir() if path.stat().st_nlink == 1]
        for path in sorted(unlinked, key=_age):
            if used <= limit:
                break
            used -= path.stat().st_size
            path.unlink()

    def _remove_tree(self, tree: Path) -> bool:
        lock = self._trees / f"{tree.name}.lock"
        try:
            with _locked(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
                # Renamed first: an incomplete tree is never visible.
                gone = tree.with_name(f"{tree.name}.{secrets.token_hex(4)}{PART_SUFFIX}")
                tree.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)
                lock.unlink(missing_ok=True)
        except BlockingIOError:  # in use
            return False
        return True

    def _remove_leftovers(self) -> None:
        """Remove the temporary files of processes that have ended."""
        for folder in (self._blobs, self._trees):
            for path in folder.glob(f"*{PART_SUFFIX}"):
                if _now(folder) - _age(path) > PART_AGE_S_MAX:
                    if path.is_dir():
                        shutil.rmtree(path, ignore_errors=True)
                    else:
                        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path, operation: int) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, operation)
        yield
    finally:
        os.close(fd)


def _link(blob: Path, path: Path) -> None:
    try:
        os.link(blob, path)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links, or too many of them
        shutil.copyfile(blob, path)


def _age(path: Path) -> float:
    """Return the modification time: of a tree, its last lease; of a blob, its creation."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _now(folder: Path) -> float:
    """Return the time by the clock of the file system."""
    os.utime(folder)
    return folder.stat().st_mtime


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
