"""What changed in the repositories between two looks.

Rules:

1. A fingerprint covers the names of all folders and the names, sizes and modification times of all files below a
   model's folder. Modification times of folders are left out: they change when something drops a temporary file, and a
   change that matters shows up in the names. So are hidden entries and `__pycache__`, which importing a Python model
   writes into its folder.
2. A change counts once two consecutive looks agree on it (`Settling`): a model that is still being copied differs from
   look to look. Each model settles on its own, so a long copy does not hold up the others.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path

Fingerprint = str
"""Hexadecimal digest of what a model's folder holds."""

DEPTH_MAX = 32
"""Folders below one another that a fingerprint covers."""

ENTRIES_MAX = 100_000
"""Files and folders that a fingerprint covers: links that fan out must not make a look endless."""

NOT_CONTENT = frozenset({"__pycache__"})


def fingerprint(folder: Path) -> Fingerprint:
    """Return a digest of names, sizes and modification times of what lies in the folder. Blocks on the disk.

    Symbolic links are followed, except to folders that the path already goes through. What cannot be read or disappears
    meanwhile counts as unreadable, so that this never raises: the model's load will tell.
    """
    digest = blake2b(digest_size=16)
    for path, size, mtime_ns in sorted(islice(_content(str(folder), "", ()), ENTRIES_MAX)):
        digest.update(b"%s\0%d\0%d\0" % (os.fsencode(path), size, mtime_ns))
    return digest.hexdigest()


def _content(folder: str, prefix: str, parents: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, int, int]]:
    """Yield path, size and modification time of each file, and the path with "/" of each folder."""
    try:
        status = os.stat(folder)
        identity = (status.st_dev, status.st_ino)
        if identity in parents or len(parents) >= DEPTH_MAX:
            return
        with os.scandir(folder) as entries:
            listed = [entry for entry in entries if not entry.name.startswith(".") and entry.name not in NOT_CONTENT]
    except OSError:
        yield prefix + "?", -1, -1
        return
    for entry in listed:
        path = prefix + entry.name
        try:
            status = entry.stat()
        except OSError:
            yield path, -1, -1
            continue
        if stat.S_ISDIR(status.st_mode):
            yield path + "/", 0, 0
            yield from _content(entry.path, path + "/", (*parents, identity))
        else:
            yield path, status.st_size, status.st_mtime_ns


@dataclass(frozen=True, slots=True)
class Changes:
    """Names of models that came, changed or went. False when there is none."""

    added: tuple[str, ...] = ()
    modified: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.modified or self.removed)


def diff(old: Mapping[str, object], new: Mapping[str, object]) -> Changes:
    """Compare two looks at the models, each a folder by name."""
    return Changes(
        added=tuple(sorted(new.keys() - old.keys())),
        modified=tuple(sorted(name for name in new.keys() & old.keys() if new[name] != old[name])),
        removed=tuple(sorted(old.keys() - new.keys())),
    )


class Settling:
    """Holds changes back until two consecutive looks agree on them (rule 2). Pure: the caller looks, and when.

    Args:
        acted: Folders by name that the server has already acted on.
    """

    def __init__(self, acted: Mapping[str, object]) -> None:
        self._acted = dict(acted)
        self._last = self._acted.copy()

    def look(self, seen: Mapping[str, object]) -> Changes:
        """Take in a look at the disk and return the changes to act on now; each is returned once."""
        changes = diff(self._acted, seen)
        settled = Changes(
            added=self._agreed(changes.added, seen),
            modified=self._agreed(changes.modified, seen),
            removed=self._agreed(changes.removed, seen),
        )
        for name in (*settled.added, *settled.modified):
            self._acted[name] = seen[name]
        for name in settled.removed:
            del self._acted[name]
        self._last = dict(seen)
        return settled

    @property
    def is_pending(self) -> bool:
        """Whether a change waits for the next look: a reason to look again soon."""
        return bool(diff(self._acted, self._last))

    def _agreed(self, names: tuple[str, ...], seen: Mapping[str, object]) -> tuple[str, ...]:
        return tuple(name for name in names if self._last.get(name) == seen.get(name))
