"""Sources of a version's files behind one interface."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from charonia.core.errors import invalid, not_found, unavailable
from charonia.platform.artifacts.archives import is_archive, unpack
from charonia.platform.artifacts.blobs import PIECE_BYTES
from charonia.platform.artifacts.faults import disk_faults
from charonia.platform.artifacts.manifest import Blob
from charonia.platform.artifacts.paths import FILES_MAX, is_content, safe_path
from charonia.platform.artifacts.store import ArtifactStore
from charonia.platform.isolation.isolation import Isolation
from charonia.stores.remote import RemoteFile, RemoteStore

START_BYTES = 64
"""Bytes of a file that are read to recognise it."""

LISTED_MAX = 10 * FILES_MAX
"""Most files of a source, including files of other versions."""

Seen = Callable[[int], None]
"""Receives the number of bytes that have arrived; an exception cancels the work."""


class ArrivingFiles(Protocol):
    """The files of a future version."""

    def sizes(self) -> Mapping[str, int]:
        """Return the size of each file by its path.

        Raises:
            ServingError: UNAVAILABLE when they cannot be read; INVALID_ARG for invalid paths, or too many.
        """
        ...

    def read(self, path: str, limit: int) -> bytes:
        """Return the first bytes of a file.

        Raises:
            ServingError: UNAVAILABLE when it cannot be read.
        """
        ...

    def keep(self, path: str, store: ArtifactStore, seen: Seen) -> Blob:
        """Put a file into the store.

        Raises:
            ServingError: UNAVAILABLE when it cannot be read or stored; INTERNAL for a damaged disk.
            StorageFullError: There is no room for it.
        """
        ...

    def local(self, path: str, store: ArtifactStore, seen: Seen) -> Path:
        """Return the path of a file on this machine, fetching it if necessary. Raises as `keep`."""
        ...


class OwnFiles:
    """Immutable files of this machine that belong to the platform.

    Args:
        files: The path of each, by path in the version.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    def sizes(self) -> Mapping[str, int]:
        return {path: os.path.getsize(file) for path, file in self._files.items()}

    def read(self, path: str, limit: int) -> bytes:
        with disk_faults("upload", self._files[path]), self._files[path].open("rb") as file:
            return file.read(limit)

    def keep(self, path: str, store: ArtifactStore, seen: Seen) -> Blob:
        blob = store.adopt(self._files[path], what=f"file '{path}'")
        seen(blob.size)
        return blob

    def local(self, path: str, store: ArtifactStore, seen: Seen) -> Path:
        return self._files[path]


class FolderFiles:
    """A folder of this machine that the platform does not own."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise not_found(f"folder '{folder}': it does not exist on the platform's machine")
        self._folder = folder

    def sizes(self) -> Mapping[str, int]:
        """Return the sizes. Links are followed within the folder only. See `ArrivingFiles`."""
        with disk_faults("import", self._folder):
            return {path: self._file(path).stat().st_size for path in _below(self._folder)}

    def read(self, path: str, limit: int) -> bytes:
        with disk_faults("import", self._folder / path), self._file(path).open("rb") as file:
            return file.read(limit)

    def keep(self, path: str, store: ArtifactStore, seen: Seen) -> Blob:
        with disk_faults("import", self._folder / path), self._file(path).open("rb") as file:
            return store.add(_counted(iter(lambda: file.read(PIECE_BYTES), b""), seen), what=f"file '{path}'")

    def local(self, path: str, store: ArtifactStore, seen: Seen) -> Path:
        return self._file(path)

    def _file(self, path: str) -> Path:
        file = (self._folder / path).resolve()
        if not file.is_relative_to(self._folder.resolve()):
            raise invalid(f"file '{path}' is a link that leads out of '{self._folder}'")
        return file


class RemoteFiles:
    """Files below an address of an object store.

    Args:
        only: The only file to read, None for all.
    """

    def __init__(self, store: RemoteStore, only: RemoteFile | None = None) -> None:
        self._store = store
        self._only = only
        self._files: dict[str, RemoteFile] = {}

    def sizes(self) -> Mapping[str, int]:
        self._files = {}
        for file in self._store.files() if self._only is None else (self._only,):
            if file.path.endswith("/") or not file.path:  # a marker of a folder
                continue
            if len(self._files) >= LISTED_MAX:
                raise invalid(f"'{self._store.uri}': expected at most {LISTED_MAX} files, found more")
            self._files[safe_path(file.path)] = file
        if not self._files:
            raise not_found(f"'{self._store.uri}': no files below this address", hint="give the address of a folder")
        return {path: file.size for path, file in self._files.items()}

    def read(self, path: str, limit: int) -> bytes:
        file = self._files[path]
        end = min(limit, file.size)
        return b"".join(map(bytes, self._store.read(file, 0, end))) if end else b""

    def keep(self, path: str, store: ArtifactStore, seen: Seen) -> Blob:
        return store.add(self._pieces(path, seen), what=f"file '{path}'")

    def local(self, path: str, store: ArtifactStore, seen: Seen) -> Path:
        """Fetch a file as content that no version has yet. See `ArrivingFiles`."""
        return store.local.path(store.local.add(self._pieces(path, seen), what=f"file '{path}'").sha256)

    def _pieces(self, path: str, seen: Seen) -> Iterator[bytes]:
        file, size = self._files[path], 0
        for piece in self._store.read(file, 0, file.size) if file.size else ():
            size += len(piece)
            seen(len(piece))
            yield bytes(piece)
        if size != file.size:
            raise unavailable(f"'{self._store.uri}': '{path}' came incomplete: {size} of {file.size} bytes")


@contextmanager
def unpacked(files: ArrivingFiles, store: ArtifactStore, isolation: Isolation, seen: Seen) -> Iterator[ArrivingFiles]:
    """Yield the files unchanged, or the content of a single archive."""
    paths = list(files.sizes())
    if len(paths) != 1 or not is_archive(paths[0]):
        yield files
        return
    with store.scratch() as folder:
        unpack(files.local(paths[0], store, seen), paths[0], folder, isolation, lambda: seen(0))
        yield OwnFiles({path: folder / path for path in _below(folder)})


def _below(folder: Path) -> list[str]:
    found: list[str] = []
    for top, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if is_content(name))
        for name in sorted(names):
            with contextlib.suppress(OSError):
                if not os.path.isfile(os.path.join(top, name)):  # a socket, a link to nowhere
                    continue
            found.append(safe_path(os.path.relpath(os.path.join(top, name), folder)))
            if len(found) > LISTED_MAX:
                raise invalid(f"'{folder.name}': expected at most {LISTED_MAX} files, found more")
    return found


def _counted(pieces: Iterator[bytes], seen: Seen) -> Iterator[bytes]:
    for piece in pieces:
        seen(len(piece))
        yield piece
