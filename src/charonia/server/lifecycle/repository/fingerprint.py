"""A fingerprint of a model's folder, which changes when anything in the folder changes.

It covers the names of all folders and the names, sizes, modification and change times of all files below a model's
folder. The change time catches a file that replaces another with the same modification time (`cp -p`, `rsync -t`), and
one whose permissions changed. The times of folders do not count: a temporary file changes them, and a change that
matters shows in the names. Hidden entries and `__pycache__`, which the import of a Python model creates, do not count
either.
"""

import os
import stat
from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice
from pathlib import Path

Fingerprint = str
"""Hexadecimal digest of the names, sizes and times in a model's folder."""

DEPTH_MAX = 32
"""Levels of nested folders that a fingerprint covers."""

ENTRIES_MAX = 100_000
"""Files and folders that a fingerprint covers: fanned-out links must not make a scan endless."""

NOT_CONTENT = frozenset({"__pycache__"})


def fingerprint(folder: Path) -> Fingerprint:
    """Return a digest of the names, sizes and times in the folder. Blocks on the disk.

    Symbolic links are followed, except to folders that the path already goes through. An entry that cannot be read or
    disappears during the scan counts as unreadable. This never raises: the load of the model reports the error.
    """
    digest = blake2b(digest_size=16)
    for path, size, mtime_ns, ctime_ns in sorted(islice(_content(str(folder), "", ()), ENTRIES_MAX)):
        digest.update(b"%s\0%d\0%d\0%d\0" % (os.fsencode(path), size, mtime_ns, ctime_ns))
    return digest.hexdigest()


def version_fingerprint(folder: Path, version: int, *, config: str, is_immutable: bool = False) -> Fingerprint:
    """Return the fingerprint of one version: without the other versions, and without the configuration.

    Args:
        folder: The model's folder.
        version: The version.
        config: Name of the configuration file, which is compared by what it says.
        is_immutable: Whether files are replaced as a whole, and change times of their links mean nothing.
    """
    digest = blake2b(digest_size=16)
    for path, size, mtime_ns, ctime_ns in sorted(islice(_content(str(folder), "", ()), ENTRIES_MAX)):
        top = path.partition("/")[0]
        if path != config and not (path != top and top.isdecimal() and top != str(version)):
            changed_ns = 0 if is_immutable else ctime_ns
            digest.update(b"%s\0%d\0%d\0%d\0" % (os.fsencode(path), size, mtime_ns, changed_ns))
    return digest.hexdigest()


def _content(folder: str, prefix: str, parents: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, int, int, int]]:
    """Yield path, size, modification and change time of each file, and the path with "/" of each folder."""
    try:
        status = os.stat(folder)
        identity = (status.st_dev, status.st_ino)
        if identity in parents or len(parents) >= DEPTH_MAX:
            return
        with os.scandir(folder) as entries:
            listed = [entry for entry in entries if not entry.name.startswith(".") and entry.name not in NOT_CONTENT]
    except OSError:
        yield prefix + "?", -1, -1, -1
        return
    for entry in listed:
        path = prefix + entry.name
        try:
            status = entry.stat()
        except OSError:
            yield path, -1, -1, -1
            continue
        if stat.S_ISDIR(status.st_mode):
            yield path + "/", 0, 0, 0
            yield from _content(entry.path, path + "/", (*parents, identity))
        else:
            yield path, status.st_size, status.st_mtime_ns, status.st_ctime_ns
