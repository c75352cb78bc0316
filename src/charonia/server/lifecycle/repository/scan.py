"""A scan of the model repositories: which model folders are on the disk.

A repository is a folder of model folders. Hidden entries (`.git`, `..data` of a mounted Kubernetes volume) and plain
files beside the models are not models. A name that two repositories have is ambiguous, and means neither model; with
namespaces the repository is part of a model's key, and nothing is ambiguous.

A fingerprint covers the names of all folders and the names, sizes, modification and change times of all files below a
model's folder. The change time catches a file that replaces another with the same modification time (`cp -p`,
`rsync -t`), and one whose permissions changed. The times of folders do not count: a temporary file changes them, and a
change that matters shows in the names. Hidden entries and `__pycache__`, which the import of a Python model creates, do
not count either.

A change counts when two consecutive scans agree on it: a model that is still being copied differs between scans.
Each model settles on its own, so a long copy does not delay the others.
"""

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from hashlib import blake2b
from itertools import islice
from pathlib import Path, PurePosixPath

from charonia.config.backends import formats
from charonia.core.errors import ServingError, invalid, not_found, unavailable
from charonia.core.metadata import model_key

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


CONFIG_FILE = "config.pbtxt"


def is_inside(name: str) -> bool:
    """Whether a path that a configuration names stays within its folder."""
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def read_file(path: Path, bytes_max: int, subject: object) -> bytes:
    """Return the content of a file. Blocks on the disk.

    Raises:
        ServingError: INVALID_ARG, beginning with the subject: it cannot be read, or is too large.
    """
    try:
        with path.open("rb") as file:
            content = file.read(bytes_max + 1)
    except OSError as error:
        raise invalid(f"{subject}: {(error.strerror or str(error)).lower()}") from error
    if len(content) > bytes_max:
        raise invalid(f"{subject}: expected at most {bytes_max} bytes, got more")
    return content


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model's folder at the time of a scan.

    Attributes:
        name: Name of the model.
        repository: The repository that contains it.
        actual_path: The folder, where it is not that of this name in the repository. A `Path` takes 400 bytes, and
            there may be thousands of models.
        fingerprint: Compares equal as long as nothing in the folder changes; "" where it was not taken.
        origin: URI of the store that contains the model, "" for a folder of this machine. The files of a store are at
            `path` only after they were fetched.
        namespace: The repository's path or URI, "" without namespaces.
    """

    name: str
    repository: Path
    actual_path: Path | None = None
    fingerprint: Fingerprint = ""
    origin: str = ""
    namespace: str = ""

    @property
    def path(self) -> Path:
        """The folder."""
        return self.actual_path or self.repository / self.name

    @property
    def key(self) -> str:
        """The model's key, unique in the server."""
        return model_key(self.namespace, self.name)

    def present(self) -> Fingerprint:
        """Return the present fingerprint; that of a folder in a store is from the scan. Blocks on the disk."""
        return self.fingerprint if self.origin else fingerprint(self.path)

    @property
    def place(self) -> str:
        """Its path or URI, for messages."""
        return f"{self.origin}/{self.name}" if self.origin else str(self.path)


@dataclass(frozen=True, slots=True)
class Scan:
    """The result of a scan of all repositories.

    Attributes:
        models: Folder by key of the model, in the order of keys.
        ambiguous: Places by model name, for names that more than one repository has.
        notes: Sentences about ignored entries that look like a mistake.
        folders: Every folder that was found.
        unread: Why stores could not be read; the scan has their models of the last time.
    """

    models: Mapping[str, ModelFolder] = field(default_factory=dict)
    ambiguous: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    folders: tuple[ModelFolder, ...] = ()
    unread: tuple[str, ...] = ()


def scan(
    repositories: Sequence[str | Path], *, fingerprints: bool = True, has_namespaces: bool = False, only: str = ""
) -> Scan:
    """Scan all repositories. Blocks on the disk.

    Args:
        repositories: Their paths; one given twice counts once.
        fingerprints: Whether to take the fingerprint of every model; without, only the names of models are read.
        has_namespaces: Whether the repository is part of a model's key.
        only: Name of the one model to look for, whatever else is there.

    Raises:
        ServingError: NOT_FOUND for a repository that does not exist, UNAVAILABLE for one that cannot be read; not for
            `only`.
    """
    folders: list[ModelFolder] = []
    notes: list[str] = []
    for repository in dict.fromkeys(Path(os.path.abspath(path)) for path in repositories):
        is_there = only and not only.startswith(".") and os.path.isdir(repository / only)
        for name in ([only] if is_there else []) if only else _model_names(repository, notes):
            content = fingerprint(repository / name) if fingerprints else ""
            namespace = str(repository) if has_namespaces else ""
            folders.append(ModelFolder(name, repository, None, content, namespace=namespace))
    return gather(folders, notes)


def gather(folders: Iterable[ModelFolder], notes: Sequence[str] = (), unread: Sequence[str] = ()) -> Scan:
    """Return the scan that has these folders."""
    found: dict[str, list[ModelFolder]] = {}
    every = tuple(folders)
    for folder in every:
        found.setdefault(folder.key, []).append(folder)
    return Scan(
        models={key: same[0] for key, same in sorted(found.items()) if len(same) == 1},
        ambiguous={key: tuple(folder.place for folder in same) for key, same in sorted(found.items()) if len(same) > 1},
        notes=tuple(notes),
        folders=every,
        unread=tuple(unread),
    )


def folder_at(path: str | Path) -> ModelFolder:
    """Return the model folder at `path`, for commands that take one model.

    Raises:
        ServingError: NOT_FOUND when there is no folder.
    """
    absolute = Path(os.path.abspath(path))
    if not absolute.is_dir():
        raise not_found(f"model folder '{path}': {'not a folder' if absolute.exists() else 'no such folder'}")
    return ModelFolder(absolute.name, absolute.parent, None, fingerprint(absolute))


def _model_names(repository: Path, notes: list[str]) -> list[str]:
    names: list[str] = []
    files: list[str] = []
    suffixes = {form.suffix for form in formats() if not form.has_helpers}  # scripts may be beside the models
    try:
        with os.scandir(repository) as entries:
            for entry in entries:
                if entry.name == CONFIG_FILE:
                    notes.append(
                        f"repository '{repository}' holds a {CONFIG_FILE}, which is not read there: "
                        "a repository is the folder around the model folders"
                    )
                elif os.path.splitext(entry.name)[1] in suffixes and os.path.isfile(entry):
                    files.append(entry.name)
                if entry.name.startswith(".") or not _is_folder(entry, repository, notes):
                    continue
                if _is_text(entry.name):
                    names.append(entry.name)
                else:
                    notes.append(f"repository '{repository}': folder {entry.name!a} is ignored, its name is not UTF-8")
    except OSError as error:
        raise _unreadable(repository, error) from error
    if files:
        first, *others = sorted(files)
        more = f", nor are {len(others)} more" if others else ""
        notes.append(
            f"repository '{repository}' holds the file {first!a}, which is not read there{more}: a model lies in a "
            "folder of its own and of its version, such as mymodel/1/model.onnx; "
            f"`charonia serve {os.fspath(repository / first)!a}` takes the file itself"
        )
    return names


def _is_folder(entry: os.DirEntry[str], repository: Path, notes: list[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:  # a temporary failure of the disk must not remove a model
            raise
        notes.append(f"repository '{repository}': {entry.name!a} is ignored, it is a link that leads in a circle")
        return False


def _unreadable(repository: Path, error: OSError) -> ServingError:
    reason = (error.strerror or str(error)).lower()
    message = f"failed to poll from model repository '{repository}': {reason}"
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        near = _nearest(repository)
        takes = "--model-repository takes a folder that holds one folder for each model"
        return not_found(message, hint=f"did you mean '{near}'?" if near else takes)
    return unavailable(message)


def _nearest(path: Path) -> Path | None:
    """Return the path that this may be a misspelling of, or None."""
    try:
        near = get_close_matches(path.name, os.listdir(path.parent), n=1)
    except OSError:
        return None
    return path.parent / near[0] if near else None


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Changes:
    """Names of the models that were added, changed or removed. False when there are none."""

    added: tuple[str, ...] = ()
    modified: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.modified or self.removed)


def diff(old: Mapping[str, object], new: Mapping[str, object]) -> Changes:
    """Compare two scans, each a mapping of names to model folders."""
    return Changes(
        added=tuple(sorted(new.keys() - old.keys())),
        modified=tuple(sorted(name for name in new.keys() & old.keys() if new[name] != old[name])),
        removed=tuple(sorted(old.keys() - new.keys())),
    )


class Watch:
    """Turns scans of the repositories into the changes to act on. A name that becomes ambiguous is a modified one."""

    def __init__(self) -> None:
        self._acted: dict[str, object] = {}
        self._last: dict[str, object] = {}

    def reset(self, scan: Scan) -> None:
        """Take a scan as the state that the server has acted on."""
        self._acted = _view(scan)
        self._last = _view(scan)

    def changes(self, scan: Scan) -> Changes:
        """Compare with a new scan and return the changes that have settled; each is returned once."""
        seen = _view(scan)
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
        self._last = seen
        return settled

    def invalidate(self, name: str) -> None:
        """Treat a model as new: the next scan reports it as a change."""
        self._acted.pop(name, None)

    @property
    def is_pending(self) -> bool:
        """Whether a change waits for the next scan to confirm it: a reason to scan again soon."""
        return bool(diff(self._acted, self._last))

    def _agreed(self, names: tuple[str, ...], seen: Mapping[str, object]) -> tuple[str, ...]:
        return tuple(name for name in names if self._last.get(name) == seen.get(name))


def _view(scan: Scan) -> dict[str, object]:
    return {**scan.models, **scan.ambiguous}
