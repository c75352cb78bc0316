"""Class labels of outputs, from the files that a configuration names."""

from pathlib import PurePosixPath

from charonia.config.model import ModelConfig
from charonia.core.errors import invalid
from charonia.repository.scan import ModelFolder

LABEL_BYTES_MAX = 64 * 1024 * 1024
"""Largest label file."""

ESCAPES = "must stay within model directory"


def read_labels(folder: ModelFolder, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Return the labels of each output that has a label file: line i names class i. Blocks on the disk.

    Raises:
        ServingError: INVALID_ARG for a path that leaves the model's folder, or a file that cannot be read.
    """
    return {
        output.name: _read(folder, output.name, output.label_filename)
        for output in config.output
        if output.label_filename
    }


def _read(folder: ModelFolder, output: str, filename: str) -> tuple[str, ...]:
    subject = f"model '{folder.name}': label_filename '{filename}' of output '{output}'"
    relative = PurePosixPath(filename)
    if relative.is_absolute() or ".." in relative.parts or "\0" in filename:
        raise invalid(f"{subject} {ESCAPES}")
    # A symbolic link is followed: whoever made it in the folder may point it anywhere. Model stores are full of them.
    try:
        with (folder.path / relative).open("rb") as file:
            content = file.read(LABEL_BYTES_MAX + 1)
    except OSError as error:
        raise invalid(f"{subject}: {(error.strerror or str(error)).lower()}") from error
    if len(content) > LABEL_BYTES_MAX:
        raise invalid(f"{subject}: expected at most {LABEL_BYTES_MAX} bytes, got more")
    try:
        # Only line feeds end a line: `splitlines` would also cut a label at a form feed or a line separator.
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise invalid(f"{subject}: expected UTF-8 text, byte {error.start} is not") from error
    if lines[-1] == "":
        lines.pop()
    return tuple(line.removesuffix("\r") for line in lines)
