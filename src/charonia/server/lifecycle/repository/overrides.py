"""Model folders made from the files of a load request.

The paths come from clients: they are checked before the first
byte is written, and files are only created, never opened where one already exists.
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import PurePosixPath

from charonia.core.errors import ServingError, internal, invalid
from charonia.server.machine.private_folder import PrivateFolder

FILES_MAX = 4096
PATH_CHARS_MAX = 1024
NAME_BYTES_MAX = 255
"""Longest name of a file or folder, which is that of usual file systems."""

TOTAL_BYTES_MAX = 8 * 1024**3


def write_override(files: Mapping[str, bytes]) -> PrivateFolder:
    """Write the files into a new private folder and return it. Blocks on the disk.

    Args:
        files: Content by path relative to the model's folder, with "/" between names.

    Raises:
        ServingError: INVALID_ARG for a path that is not accepted or for too many or too large files, INTERNAL when
            writing fails. Nothing is left behind.
    """
    contents = _checked(files)
    try:
        folder = PrivateFolder()
    except OSError as error:
        raise _failed(error) from error
    try:
        for relative, content in contents.items():
            path = folder.path / relative
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with path.open("xb") as file:
                file.write(content)
    except OSError as error:
        folder.remove()
        raise _failed(error) from error
    return folder


def _checked(files: Mapping[str, bytes]) -> dict[PurePosixPath, bytes]:
    if len(files) > FILES_MAX:
        raise invalid(f"model override: expected at most {FILES_MAX} files, got {len(files)}")
    total = sum(len(content) for content in files.values())
    if total > TOTAL_BYTES_MAX:
        raise invalid(f"model override: expected at most {TOTAL_BYTES_MAX} bytes in all, got {total}")
    contents: dict[PurePosixPath, bytes] = {}
    for path, content in files.items():
        relative = _inside(path)
        if relative in contents:
            raise invalid(f"model override file '{path}' is given twice")
        contents[relative] = content
    for relative in contents:
        for parent in relative.parents:
            if parent in contents:
                raise invalid(f"model override file '{relative}': '{parent}' is a file, too, and cannot hold it")
    return contents


def _inside(path: str) -> PurePosixPath:
    if len(path) > PATH_CHARS_MAX:
        raise invalid(f"Invalid file path: expected at most {PATH_CHARS_MAX} characters, got {len(path)}")
    relative = PurePosixPath(path.lstrip("/"))  # clients write /1/model.onnx, too
    if ".." in relative.parts:
        raise invalid(f"Invalid file path '{path}': it must stay within model directory")
    if not relative.parts or path.endswith("/"):
        raise invalid(f"Invalid file path '{path}': expected the path of a file")
    if "\\" in path or not path.isprintable():
        raise invalid(f"Invalid file path {path!a}: expected printable characters and '/'")
    longest = max(relative.parts, key=lambda part: len(part.encode()))
    if len(longest.encode()) > NAME_BYTES_MAX:
        raise invalid(
            f"Invalid file path: expected names of at most {NAME_BYTES_MAX} bytes, got {len(longest.encode())}"
        )
    return relative


def _failed(error: OSError) -> ServingError:
    reason = (error.strerror or str(error)).lower()
    return internal(f"model override cannot be written below {os.path.abspath(tempfile.gettempdir())}: {reason}")
