"""A scan of the model repositories: which model folders are on the disk.

A repository is a folder of model folders. Hidden entries (`.git`, `..data` of a mounted Kubernetes volume) and plain
files beside the models are not models. A name that two repositories have is ambiguous, and means neither model; with
namespaces the repository is part of a model's key, and nothing is ambiguous.
"""

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path, PurePath

from charonia.config.backends import formats
from charonia.core.errors import ServingError, not_found, unavailable
from charonia.core.metadata import model_key
from charonia.server.lifecycle.repository.fingerprint import Fingerprint, fingerprint

CONFIG_FILE = "config.pbtxt"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model's folder at the time of a scan.

    Attributes:
        name: Name of the model: the folder's.
        repository: The repository that contains it.
        path: The folder.
        fingerprint: Compares equal as long as nothing in the folder changes; "" where it was not taken.
        origin: URI of the store that contains the model, "" for a folder of this machine. The files of a store are at
            `path` only after they were fetched.
        namespace: The repository's path or URI, "" without namespaces.
    """

    name: str
    repository: Path
    path: Path
    fingerprint: Fingerprint = ""
    origin: str = ""
    namespace: str = ""

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


def scan(repositories: Sequence[str | Path], *, fingerprints: bool = True, has_namespaces: bool = False) -> Scan:
    """Scan all repositories. Blocks on the disk.

    Args:
        repositories: Their paths; one given twice counts once.
        fingerprints: Whether to take the fingerprint of every model; without, only the names of models are read.
        has_namespaces: Whether the repository is part of a model's key.

    Raises:
        ServingError: NOT_FOUND for a repository that does not exist, UNAVAILABLE for one that cannot be read.
    """
    folders: list[ModelFolder] = []
    notes: list[str] = []
    for repository in dict.fromkeys(Path(os.path.abspath(path)) for path in repositories):
        for name in _model_names(repository, notes):
            path = repository / name
            content = fingerprint(path) if fingerprints else ""
            namespace = str(repository) if has_namespaces else ""
            folders.append(ModelFolder(name, repository, path, content, namespace=namespace))
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
    return ModelFolder(absolute.name, absolute.parent, absolute, fingerprint(absolute))


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
                elif PurePath(entry.name).suffix in suffixes and os.path.isfile(entry):
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
