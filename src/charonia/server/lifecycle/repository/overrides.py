"""Model folders made from the files of a load request.

They are temporary folders that only this user can enter. The paths come from clients: they are checked before the first
byte is written, and files are only created, never opened where one already exists.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from charonia.core.errors import ServingError, internal, invalid

FILES_MAX = 4096
PATH_CHARS_MAX = 1024
TOTAL_BYTES_MAX = 8 * 1024**3

FOLDER_PREFIX = "charonia-model-"


def write_override(files: Mapping[str, bytes]) -> Path:
    """Write the files into a new private folder and return it. Blocks on the disk.

    Args:
        files: Content by path relative to the model's folder, with "/" between names.

    Raises:
        ServingError: INVALID_ARG for a path that is not accepted or for too many or too large files, INTERNAL when
            writing fails. Nothing is left behind.
    """
    contents = _checked(files)
    try:
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    except OSError as error:
        raise _failed(error) from error
    try:
        for relative, content in contents.items():
            path = folder / relative
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with path.open("xb") as file:
                file.write(content)
    except OSError as error:
        remove_override(folder)
        raise _failed(error) from error
    return folder


def remove_override(folder: Path) -> None:
    """Remove a folder that `write_override` made. Blocks on the disk.

    Raises:
        ServingError: INTERNAL when it is not such a folder. A file that cannot be removed stays, without an error.
    """
    if not folder.name.startswith(FOLDER_PREFIX):
        raise internal(f"'{folder}' is not a folder of model overrides")
    shutil.rmtree(folder, ignore_errors=True)


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
        raise invalid(f"model override file: expected a path of at most {PATH_CHARS_MAX} characters, got {len(path)}")
    relative = PurePosixPath(path)
    if relative.is_absolute() or ".." in relative.parts:
        raise invalid(f"model override file '{path}' must stay within model directory")
    if not relative.parts or path.endswith("/"):
        raise invalid(f"model override file '{path}': expected the path of a file")
    if "\\" in path or not path.isprintable():
        raise invalid(f"model override file {path!a}: expected a path of printable characters and '/'")
    return relative


def _failed(error: OSError) -> ServingError:
    reason = (error.strerror or str(error)).lower()
    return internal(f"model override cannot be written below {os.path.abspath(tempfile.gettempdir())}: {reason}")
