"""Finds a model's file in a version's folder, and says what can be seen from outside."""

from pathlib import Path, PurePosixPath

from charonia.config.model import ModelConfig
from charonia.core.errors import invalid
from charonia.server.backends.api import ModelFiles

_STARTS = (
    (b"version https://git-lfs", "the file is a Git LFS pointer: `git lfs pull` fetches the model"),
    (b"<!doctype html", "the file is an HTML page: the download needed a login, or the link leads to a page"),
    (b"<html", "the file is an HTML page: the download needed a login, or the link leads to a page"),
    (b"\x1f\x8b", "the file is compressed with gzip: gunzip unpacks it"),
)
"""What files begin with that are not models, in lower case, and the hint."""


def model_file(files: ModelFiles, config: ModelConfig, default: str) -> Path:
    """Return the model's file, or where that is a folder, the file in it: of the same name, or of the default name.

    Args:
        files: The model's folders.
        config: Its configuration, which may name another file.
        default: The file's name where the configuration names none.

    Raises:
        ServingError: INVALID_ARG when there is none.
    """
    name = config.default_model_filename or default
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise invalid(f"default_model_filename: must stay within the version's folder, got '{name}'")
    path = files.version_dir / name
    candidates = [path / path.name, path / default] if path.is_dir() else [path]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    folder = candidates[0].parent
    found = sorted(p.name for p in folder.glob("*")) if folder.is_dir() else []
    held = f"the folder holds {', '.join(found[:10]) or 'nothing'}"
    raise invalid(
        f"model '{config.name}' version {files.version} has no file {candidates[0].relative_to(files.model_dir)}",
        hint=held if path.is_dir() else f"{held}; `default_model_filename` names another file",
    )


def broken_file_hint(path: Path) -> str:
    """Return a hint for a file that a library does not load, "" for none. Blocks on disk I/O."""
    try:
        with path.open("rb") as file:
            start = file.read(64).lstrip().lower()
    except OSError:
        return ""
    if not start:
        return "the file is empty"
    return next((hint for beginning, hint in _STARTS if start.startswith(beginning)), "")


def weights_bytes(path: Path) -> int:
    """Return the total size of a model's file and those beside it, which hold external data. Blocks on disk I/O."""
    return sum(file.stat().st_size for file in path.parent.iterdir() if file.is_file())
