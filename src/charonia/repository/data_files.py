"""Data files in a model's folder that its configuration names."""

from pathlib import PurePosixPath

from charonia.core.errors import invalid
from charonia.repository.scan import ModelFolder

FILE_BYTES_MAX = 2**30
"""Largest file of one tensor."""


def read_data_file(folder: ModelFolder, place: str, filename: str, path: str) -> bytes:
    """Return the content of a file. Blocks on the disk.

    Args:
        folder: The model's folder.
        place: Folder in it that holds the file.
        filename: Name of the file, relative to that.
        path: Where the configuration names it.

    Raises:
        ServingError: INVALID_ARG, beginning with the path: the name leaves the folder, or the file cannot be read.
    """
    relative = PurePosixPath(filename)
    if not filename or relative.is_absolute() or ".." in relative.parts or "\0" in filename:
        raise invalid(f"{path}: must stay within the model's folder '{place}', got '{filename}'")
    # A symbolic link is followed, as for label files.
    file = folder.path / place / relative
    try:
        with file.open("rb") as opened:
            content = opened.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise invalid(f"{path}: {file}: {(error.strerror or str(error)).lower()}") from error
    if len(content) > FILE_BYTES_MAX:
        raise invalid(f"{path}: {file}: expected at most {FILE_BYTES_MAX} bytes, got more")
    return content
