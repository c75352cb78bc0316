"""What lies in the model repositories: one look at the disk.

A repository is a folder of model folders. Hidden entries (`.git`, `..data` of a mounted Kubernetes volume) and plain
files beside the models are not models. A name that two repositories offer is ambiguous, and then belongs to neither.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from charonia.core.errors import ServingError, not_found, unavailable
from charonia.repository.fingerprint import Fingerprint, fingerprint

CONFIG_FILE = "config.pbtxt"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model's folder as it was when it was looked at.

    Attributes:
        name: Name of the model: the folder's.
        repository: The repository that it lies in.
        path: The folder.
        fingerprint: Compares equal as long as nothing in the folder changes; "" where it was not taken.
    """

    name: str
    repository: Path
    path: Path
    fingerprint: Fingerprint = ""


@dataclass(frozen=True, slots=True)
class Scan:
    """One look at all repositories.

    Attributes:
        models: Folder by model name, in the order of names.
        ambiguous: Folders by model name, for names that more than one repository has.
        notes: Sentences about what was passed over and looks like a mistake.
    """

    models: Mapping[str, ModelFolder] = field(default_factory=dict)
    ambiguous: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def scan(repositories: Sequence[str | Path], *, fingerprints: bool = True) -> Scan:
    """Look at the model folders of all repositories. Blocks on the disk.

    Args:
        repositories: Their paths; one given twice counts once.
        fingerprints: Whether to look at every file of every model; without, only at the names of models.

    Raises:
        ServingError: NOT_FOUND for a repository that is not there, UNAVAILABLE for one that cannot be read.
    """
    found: dict[str, list[ModelFolder]] = {}
    notes: list[str] = []
    for repository in dict.fromkeys(Path(os.path.abspath(path)) for path in repositories):
        for name in _model_names(repository, notes):
            path = repository / name
            content = fingerprint(path) if fingerprints else ""
            found.setdefault(name, []).append(ModelFolder(name, repository, path, content))
    return Scan(
        models={name: folders[0] for name, folders in sorted(found.items()) if len(folders) == 1},
        ambiguous={
            name: tuple(folder.path for folder in folders)
            for name, folders in sorted(found.items())
            if len(folders) > 1
        },
        notes=tuple(notes),
    )


def folder_at(path: str | Path) -> ModelFolder:
    """Return the model folder at `path`, for a command that is about one model.

    Raises:
        ServingError: NOT_FOUND when there is no folder.
    """
    absolute = Path(os.path.abspath(path))
    if not absolute.is_dir():
        raise not_found(f"model folder '{path}': {'not a folder' if absolute.exists() else 'no such folder'}")
    return ModelFolder(absolute.name, absolute.parent, absolute, fingerprint(absolute))


def _model_names(repository: Path, notes: list[str]) -> list[str]:
    names: list[str] = []
    try:
        with os.scandir(repository) as entries:
            for entry in entries:
                if entry.name == CONFIG_FILE:
                    notes.append(
                        f"repository '{repository}' holds a {CONFIG_FILE}, which is not read there: "
                        "a repository is the folder around the model folders"
                    )
                if entry.name.startswith(".") or not entry.is_dir():
                    continue
                if _is_text(entry.name):
                    names.append(entry.name)
                else:
                    notes.append(f"repository '{repository}': folder {entry.name!a} is ignored, its name is not UTF-8")
    except OSError as error:
        raise _unreadable(repository, error) from error
    return names


def _unreadable(repository: Path, error: OSError) -> ServingError:
    reason = (error.strerror or str(error)).lower()
    message = f"failed to poll from model repository '{repository}': {reason}"
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return not_found(message, hint="--model-repository takes a folder that holds one folder for each model")
    return unavailable(message)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
