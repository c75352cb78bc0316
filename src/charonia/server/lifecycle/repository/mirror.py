"""A repository in an object store, seen as model folders: listed at every scan, fetched when a model is loaded.

A scan reads names, sizes and entity tags only. They make a model's fingerprint, as the names, sizes and times of files
do on a disk, so that polling works the same for both. A fetch downloads the files whose content is not in the cache,
several parts at a time, and makes an immutable folder of them: a newer state of the model is another folder, which
shares the content that has not changed.

The cache is shared by all servers that name the same folder:

    <folder>/blobs/<key>                content of one file of a store; the key is a digest of path, size and tag
    <folder>/trees/<key>/<model>/       a model's folder, made of hard links to blobs
    <folder>/trees/<key>.lock           locked, shared, by each process that has the model loaded
    <folder>/lock                       locked, shared, to add something; exclusively, to remove something

Everything is added atomically, under a temporary name that is then renamed. A blob that no tree links to and a tree
that no process holds may be evicted; the least recently used go first, when the cache exceeds its limit.
"""

import concurrent.futures
import contextlib
import fcntl
import logging
import os
import secrets
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

from charonia.core.errors import unavailable
from charonia.server.lifecycle.repository.scan import CONFIG_FILE, NOT_CONTENT, ModelFolder
from charonia.stores.remote import PART_BYTES, RemoteFile, RemoteStore

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

    def __init__(self, folder: Path, bytes_max: int = 64 * 2**30) -> None:
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
        for folder in (self._trees, self._blobs):  # in this order: where blobs are, `trim` expects trees
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

    def add_tree(self, key: str, model: str, folders: list[str], files: Mapping[str, Path]) -> None:
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


_log = logging.getLogger(__name__)

FILES_MAX = 1_000_000
"""Files of a repository in a store."""


@dataclass(slots=True)
class _Listed:
    """A model as listed by the store: its files, and its folders, which may be empty."""

    files: list[RemoteFile] = field(default_factory=list)
    folders: set[str] = field(default_factory=set)

    def fingerprint(self) -> str:
        digest = blake2b(digest_size=16)
        for file in sorted(self.files, key=lambda file: file.path):
            digest.update(f"{file.path}\0{file.size}\0{file.tag}\0".encode())
        for folder in sorted(self.folders):
            digest.update(f"{folder}/\0".encode())
        return digest.hexdigest()


class StoreMirror:
    """A repository in an object store. Everything blocks; any thread may call.

    Args:
        store: The repository.
        cache: Keeps the fetched files.
        pool: Threads that fetch.

    Attributes:
        notes: Sentences about entries that the last scan ignored.
    """

    def __init__(self, store: RemoteStore, cache: StoreCache, pool: ThreadPoolExecutor) -> None:
        self.notes: tuple[str, ...] = ()
        self._store = store
        self._cache = cache
        self._pool = pool
        self._listed: dict[str, _Listed] = {}
        self._known: tuple[ModelFolder, ...] = ()

    @property
    def uri(self) -> str:
        return self._store.uri

    @property
    def known(self) -> tuple[ModelFolder, ...]:
        """The models of the last successful scan."""
        return self._known

    def list_models(self) -> tuple[ModelFolder, ...]:
        """Scan the store and return its models. Their files are not on this machine yet: see `fetch`.

        Raises:
            ServingError: UNAVAILABLE when the store cannot be read; `known` stays as it is.
        """
        listed, notes = _models(self._store.uri, self._store.files())
        uri, root = self._store.uri, Path(self._store.uri)
        folders = tuple(
            ModelFolder(name, root, None, model.fingerprint(), origin=uri) for name, model in sorted(listed.items())
        )
        self._listed, self._known, self.notes = listed, folders, tuple(notes)
        return folders

    def size(self, name: str) -> int:
        """Return the bytes of a model's files as listed."""
        model = self._listed.get(name)
        return sum(file.size for file in model.files) if model is not None else 0

    def fetch(self, folder: ModelFolder) -> tuple[ModelFolder, Lease]:
        """Fetch a model's files to this machine, as listed by the last scan.

        Returns:
            The folder with the path of its files, and the lease on them.

        Raises:
            ServingError: UNAVAILABLE when they cannot be fetched. Nothing incomplete is left behind.
        """
        model = self._listed.get(folder.name)
        if model is None:
            raise unavailable(f"model repository '{self.uri}' has no model '{folder.name}' any more")
        fingerprint = model.fingerprint()
        key = _digest(self.uri, folder.name, fingerprint)
        try:
            lease = self._cache.lease(key, folder.name) or self._make(key, folder.name, model)
        except OSError as error:
            reason = error.strerror or str(error)
            raise unavailable(
                f"files from '{self.uri}' cannot be stored in '{self._cache.folder}': {reason}",
                hint="--model-store-cache names another folder",
            ) from error
        return replace(folder, actual_path=lease.path, fingerprint=fingerprint), lease

    def _make(self, key: str, name: str, model: _Listed) -> Lease:
        wanted = {_digest(self.uri, name, f.path, str(f.size), f.tag): f for f in model.files}
        missing = sum(f.size for blob, f in wanted.items() if self._cache.blob(blob) is None)
        self._cache.trim(missing)
        with self._cache.filling():
            lacking = {blob: f for blob, f in wanted.items() if self._cache.blob(blob) is None}
            if lacking:
                _log.info("fetching %d of %d files of '%s' from %s", len(lacking), len(wanted), name, self.uri)
            self._fetch_all(name, lacking)
            files = {file.path: self._cache.folder / "blobs" / blob for blob, file in wanted.items()}
            self._cache.add_tree(key, name, sorted(model.folders), files)
            lease = self._cache.lease(key, name)
        if lease is None:
            raise unavailable(f"the files of '{name}' from '{self.uri}' were removed while they were being fetched")
        return lease

    def _fetch_all(self, name: str, files: Mapping[str, RemoteFile]) -> None:
        """Fetch files of a model into blobs: short ones concurrently, long ones one by one in concurrent parts."""
        remote = {blob: replace(file, path=f"{name}/{file.path}") for blob, file in files.items()}
        short = [(blob, file) for blob, file in remote.items() if file.size <= PART_BYTES]
        futures = [self._pool.submit(self._fetch_short, blob, file) for blob, file in short]
        try:
            for blob, file in remote.items():
                if file.size > PART_BYTES:
                    self._fetch_long(blob, file)
        finally:
            _finish(futures)

    def _fetch_short(self, blob: str, file: RemoteFile) -> None:
        with self._cache.new_blob(blob, file.size) as fd:
            if file.size:
                self._fetch_part(fd, file, 0, file.size)

    def _fetch_long(self, blob: str, file: RemoteFile) -> None:
        with self._cache.new_blob(blob, file.size) as fd:
            parts = [(start, min(start + PART_BYTES, file.size)) for start in range(0, file.size, PART_BYTES)]
            _finish([self._pool.submit(self._fetch_part, fd, file, start, end) for start, end in parts])

    def _fetch_part(self, fd: int, file: RemoteFile, start: int, end: int) -> None:
        position = start
        for piece in self._store.read(file, start, end):
            data = memoryview(piece)
            if position + len(data) > end:
                break
            while data:
                written = os.pwrite(fd, data, position)
                position += written
                data = data[written:]
        if position != end:
            counts = f"{position - start} of {end - start} bytes"
            raise unavailable(f"model repository '{self.uri}': '{file.path}' came incomplete: {counts}")


def _finish(futures: Sequence["Future[None]"]) -> None:
    """Wait until none runs any more, and raise the exception of the first that failed; it cancels the others."""
    try:
        for future in concurrent.futures.as_completed(futures):
            future.result()
    finally:
        for future in futures:
            future.cancel()
        concurrent.futures.wait(futures)


def _models(uri: str, files: Iterable[RemoteFile]) -> tuple[dict[str, _Listed], list[str]]:
    """Return the models by name, and notes about ignored entries.

    An object store has no folders. An empty object with the name of a version stands for an empty folder.
    """
    models: defaultdict[str, _Listed] = defaultdict(_Listed)
    notes: list[str] = []
    for count, file in enumerate(files):
        if count >= FILES_MAX:
            raise unavailable(f"model repository '{uri}': expected at most {FILES_MAX} files, found more")
        name, _, path = file.path.rstrip("/").partition("/")
        parts = path.split("/")
        if file.path == CONFIG_FILE:
            notes.append(
                f"repository '{uri}' holds a {CONFIG_FILE}, which is not read there: "
                "a repository is the folder around the model folders"
            )
        if not path or name.startswith("."):
            continue
        if any(part in ("", ".", "..") or "\0" in part for part in (name, *parts)):
            notes.append(f"repository '{uri}': '{file.path}' is ignored, it cannot be a file's path")
            continue
        model = models[name]
        if len(parts) > 1:
            model.folders.add("/".join(parts[:-1]))
        if any(part.startswith(".") or part in NOT_CONTENT for part in parts):
            continue
        if file.path.endswith("/") or (file.size == 0 and len(parts) == 1 and path.isdecimal()):
            model.folders.add(path)
        else:
            model.files.append(replace(file, path=path))
    for model in models.values():
        model.files = [file for file in model.files if file.path not in model.folders]
    return dict(models), notes


def _digest(*texts: str) -> str:
    digest = blake2b(digest_size=20)
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()
