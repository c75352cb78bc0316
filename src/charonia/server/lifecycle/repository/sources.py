"""All repositories of a server, folders and stores, scanned together. Everything blocks; any thread may call."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from charonia.core.errors import ServingError
from charonia.server.lifecycle.repository.mirror import Lease, StoreCache, StoreMirror
from charonia.server.lifecycle.repository.scan import ModelFolder, Scan, fingerprint, gather, scan
from charonia.server.model_options import StoreSettings
from charonia.stores.location import is_store, parse_address
from charonia.stores.remote import RemoteStore, open_store

_log = logging.getLogger(__name__)

CACHE = "~/.cache/charonia/stores"
"""Default folder of fetched files."""

STALE_S = 5.0
"""Age from which the known models of a store are refreshed, in the background, when a client requests the index."""


class Sources:
    """The repositories of a server.

    Args:
        repositories: Paths of folders, and URIs of stores; one given twice counts once.
        options: How stores are read.
        has_namespaces: Whether the repository is part of a model's key.
        stores: Stores to use in place of those that the URIs name, by URI; for tests.

    Raises:
        ServingError: INVALID_ARG for a URI or settings of a store that cannot be used.
    """

    def __init__(
        self,
        repositories: Sequence[str | Path],
        options: StoreSettings | None = None,
        *,
        has_namespaces: bool = False,
        stores: dict[str, RemoteStore] | None = None,
    ) -> None:
        options = options or StoreSettings()
        paths = [str(path) for path in dict.fromkeys(repositories)]
        self._local = [path for path in paths if not is_store(path)]
        self._has_namespaces = has_namespaces
        self._mirrors: dict[str, StoreMirror] = {}
        self._scanned_s = 0.0
        self._refreshing = threading.Lock()
        addresses = [parse_address(path) for path in paths if is_store(path)]
        self._pool = ThreadPoolExecutor(options.downloads, "fetch") if addresses else None
        cache = StoreCache(Path(options.cache or CACHE), options.cache_mb * 2**20)
        for address in addresses:
            store = (stores or {}).get(address.uri) or open_store(address)
            if self._pool is not None:
                self._mirrors[address.uri] = StoreMirror(store, cache, self._pool)

    def scan_model(self, name: str) -> Scan:
        """Scan for one model, without fingerprints; stores are scanned as by `scan_all`.

        Raises:
            ServingError: As `scan_all`.
        """
        if self._mirrors:
            return self.scan_all(fingerprints=False)
        return scan(self._local, fingerprints=False, has_namespaces=self._has_namespaces, only=name)

    def scan_all(self, *, fingerprints: bool = True) -> Scan:
        """Scan every repository.

        For a store that cannot be read, the models of the last time count, and `Scan.unread` has the reason.

        Raises:
            ServingError: NOT_FOUND for a folder that does not exist, UNAVAILABLE for one that cannot be read.
        """
        folders: list[ModelFolder] = []
        notes: list[str] = []
        unread: list[str] = []
        for mirror in self._mirrors.values():
            try:
                folders += mirror.list_models()
            except ServingError as error:
                unread.append(str(error))
                folders += mirror.known
            notes += mirror.notes
        self._scanned_s = time.monotonic()
        return self._gathered(folders, notes, unread, fingerprints=fingerprints)

    def known(self) -> Scan:
        """Scan the folders, and return the known models of stores, which are refreshed in the background when stale.

        Raises:
            ServingError: As `scan_all`, for folders.
        """
        folders = [folder for mirror in self._mirrors.values() for folder in mirror.known]
        if self._mirrors and time.monotonic() - self._scanned_s > STALE_S and self._refreshing.acquire(blocking=False):
            threading.Thread(target=self._refresh, name="look", daemon=True).start()
        return self._gathered(folders, (), (), fingerprints=False)

    def fetch(self, folder: ModelFolder) -> tuple[ModelFolder, Lease | None]:
        """Fetch a model's files to this machine, where they are in a store.

        Returns:
            The folder with the path of its files, and the lease on them; None for a folder of this machine.

        Raises:
            ServingError: UNAVAILABLE when they cannot be fetched.
        """
        if not folder.origin:
            return folder, None
        return self._mirrors[folder.origin].fetch(folder)

    def refreshed(self, folder: ModelFolder) -> ModelFolder:
        """Return the present state of one model's folder; where it cannot be read, the given one."""
        if not folder.origin:
            return replace(folder, fingerprint=fingerprint(folder.path))
        mirror = self._mirrors[folder.origin]
        try:
            mirror.list_models()
        except ServingError as error:
            _log.warning("%s; the last successful scan of it is used", error)
        same = [replace(each, namespace=folder.namespace) for each in mirror.known if each.name == folder.name]
        return same[0] if same else folder

    def size(self, folder: ModelFolder) -> int:
        """Return the bytes of a model's files: a first estimate of the memory that it takes."""
        if folder.origin:
            return self._mirrors[folder.origin].size(folder.name)
        total = 0
        for top, _, files in os.walk(folder.path):
            for name in files:
                with contextlib.suppress(OSError):  # removed meanwhile
                    total += os.stat(os.path.join(top, name)).st_size
        return total

    def close(self) -> None:
        """Stop the threads that fetch."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _gathered(
        self, folders: Sequence[ModelFolder], notes: Sequence[str], unread: Sequence[str], *, fingerprints: bool
    ) -> Scan:
        found = scan(self._local, fingerprints=fingerprints, has_namespaces=self._has_namespaces)
        if not self._mirrors:
            return found
        named = [replace(f, namespace=f.origin) if self._has_namespaces else f for f in folders]
        return gather([*found.folders, *named], [*found.notes, *notes], unread)

    def _refresh(self) -> None:
        try:
            for mirror in self._mirrors.values():
                mirror.list_models()
        except ServingError as error:
            _log.warning("%s", error)
        finally:
            self._scanned_s = time.monotonic()
            self._refreshing.release()
