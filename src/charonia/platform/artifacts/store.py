"""The store of all model files: a folder, or an object store with a folder of this machine as its cache."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path

from charonia.core.errors import internal
from charonia.platform.artifacts.blobs import BlobFolder, demand_room, disk_faults
from charonia.platform.artifacts.manifest import Blob, Manifest, size
from charonia.stores.location import is_store, parse_address
from charonia.stores.remote import ObjectStore, RemoteFile

UNUSED_S_MAX = 7 * 24 * 3600.0
"""How long a cached file of an object store stays on this machine after its last use by a deployment's folder."""

SWEEP_S = 24 * 3600.0
"""Age of abandoned temporary files."""

BLOBS = "sha256/"
"""Prefix of the files in an object store; other objects are not collected."""

DELETED_TOGETHER = 500
"""Files that are removed from an object store with one call."""


class ArtifactStore:
    """Files by their content. Any thread may call.

    Only `collect` removes content. It runs while nothing is added, because it would also remove new content that no
    version names yet.

    Args:
        local: The folder, which for an object store is a cache.
        remote: The object store, None for the folder alone.
    """

    def __init__(self, local: BlobFolder, remote: ObjectStore | None = None) -> None:
        self.local = local
        self.remote = remote
        self._change = threading.Condition()
        self._adding = 0
        self._is_collecting = False
        self.is_collection_due = False

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Hold off collections until the new files are named by a version."""
        with self._change:
            self._change.wait_for(lambda: not self._is_collecting)
            self._adding += 1
        try:
            yield
        finally:
            with self._change:
                self._adding -= 1

    def add(self, pieces: Iterable[bytes], *, what: str) -> Blob:
        """Store content. See `BlobFolder.add`."""
        return self._sent(self.local.add(pieces, what=what))

    def adopt(self, path: Path, *, what: str) -> Blob:
        """Store an immutable file. See `add`."""
        return self._sent(self.local.adopt(path, what=what))

    def fetch(self, blob: Blob) -> Path:
        """Return the path of content on this machine, fetching it if necessary."""
        if not self.local.has(blob.sha256):
            if self.remote is None:
                raise internal(f"the file '{self.local.path(blob.sha256)}' of the store is missing")
            pieces = (
                self.remote.read(RemoteFile(remote_key(blob), blob.size, ""), 0, blob.size) if blob.size else iter(())
            )
            got = self.local.add(map(bytes, pieces), what=f"blob {blob.sha256[:12]}")
            if got != blob:
                self.local.remove(got.sha256)
                raise internal(f"'{self.remote.uri}/{remote_key(blob)}' has been damaged: its content has another hash")
        return self.local.path(blob.sha256)

    def materialise(self, files: Manifest, folder: Path, check: Callable[[], object] = bool) -> None:
        """Create a model's folder with the files of a version, as hard links on the same disk.

        The files must not be modified.

        Args:
            folder: The model's folder, which in a repository has the name of the model.
            check: Called before each file; an exception cancels the work.
        """
        missing = {path: blob for path, blob in files.items() if not self.local.has(blob.sha256)}
        if missing:  # links take no room
            demand_room(self.local.folder, size(missing), what=f"files of '{folder.name}'")
        with disk_faults(f"files of '{folder.name}'", folder):
            (folder / "1").mkdir(parents=True, exist_ok=True)
        for path, blob in files.items():
            check()
            self.fetch(blob)
            self.local.link(blob.sha256, folder / path)

    def collect(self, used: Callable[[], Set[str]]) -> tuple[int, int] | None:
        """Remove all content that no version names.

        Args:
            used: Returns the hashes that versions name; called while nothing is added.

        Returns:
            The number of files and of bytes that were removed, None if something is being added: try again when
            `is_collection_due` and the addition is done.
        """
        with self._change:
            self.is_collection_due = bool(self._adding or self._is_collecting)
            if self.is_collection_due:
                return None
            self._is_collecting = True
        try:
            return self._removed(used())
        finally:
            with self._change:
                self._is_collecting = False
                self._change.notify_all()

    def _removed(self, used: Set[str]) -> tuple[int, int]:
        count = removed_bytes = 0
        self.local.sweep(SWEEP_S)
        before = time.time() - UNUSED_S_MAX
        for sha256, state in list(self.local.all()):
            is_spare = self.remote is not None and state.st_nlink == 1 and state.st_ctime < before
            if sha256 not in used or is_spare:
                self.local.remove(sha256)
            if sha256 not in used:
                count, removed_bytes = count + 1, removed_bytes + state.st_size
        if self.remote is not None:
            gone = [file for file in self.remote.files(BLOBS) if file.path.rpartition("/")[2] not in used]
            for start in range(0, len(gone), DELETED_TOGETHER):
                self.remote.delete([file.path for file in gone[start : start + DELETED_TOGETHER]])
            count, removed_bytes = len(gone), sum(file.size for file in gone)
        return count, removed_bytes

    def _sent(self, blob: Blob) -> Blob:
        if self.remote is not None:
            found = self.remote.find(remote_key(blob))
            if found is None or found.size != blob.size:
                self.remote.put(remote_key(blob), self.local.path(blob.sha256))
        return blob


def open_artifacts(where: str, data: Path) -> ArtifactStore:
    """Return the store of a platform.

    Args:
        where: Folder or address, "" for a folder in the data folder.
    """
    if is_store(where):
        remote = ObjectStore(parse_address(where), title="artifact store")
        return ArtifactStore(BlobFolder(data / "artifacts"), remote)
    return ArtifactStore(BlobFolder(Path(where).expanduser() if where else data / "artifacts"))


def remote_key(blob: Blob) -> str:
    return f"{BLOBS}{blob.sha256[:2]}/{blob.sha256}"
