"""JSON files of runs. A file is whole at every moment: a new one takes the place of the old one in a single step."""

import os
from pathlib import Path

from charonia.core.errors import ServingError, invalid, not_found
from charonia.results.json_form import from_json, to_json
from charonia.results.records import Run

FILE_BYTES_MAX = 1 << 30
"""Largest file that is read."""


def write_run(path: Path, run: Run) -> None:
    """Write a run as JSON.

    Raises:
        OSError: The file cannot be written.
    """
    write_whole(path, to_json(run).encode() + b"\n")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file such that whoever opens it finds the old content or the new one, never a part.

    Raises:
        OSError: It cannot be written.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)  # a pipe or a device: there is nothing to replace
    else:
        _replace(path.resolve(), content)


def read_run(path: Path) -> Run:
    """Return the run of a JSON file.

    Raises:
        ServingError: NOT_FOUND when there is no such file, INVALID_ARG when it is not a run of this version.
    """
    try:
        if path.is_file() and path.stat().st_size > FILE_BYTES_MAX:
            raise invalid(f"{path}: expected at most {FILE_BYTES_MAX} bytes, got {path.stat().st_size}")
        content = path.read_bytes()
    except FileNotFoundError:
        raise not_found(f"{path}: no such file") from None
    except OSError as error:
        raise invalid(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        return from_json(content, str(path))
    except ServingError as error:
        raise invalid(error.message, hint="give a file that `charonia perf --json FILE` wrote") from None


def _replace(path: Path, content: bytes) -> None:
    mode = path.stat().st_mode & 0o777 if path.exists() else None
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        if mode is not None:
            part.chmod(mode)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
