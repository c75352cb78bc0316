"""What a model's folder says: its configuration file and the files of a version."""

import os
from pathlib import Path

from charonia.config.model import ModelConfig
from charonia.config.pbtxt import parse
from charonia.core.errors import ServingError, invalid
from charonia.repository.scan import CONFIG_FILE, ModelFolder
from charonia.repository.versions import unreadable

CONFIG_BYTES_MAX = 16 * 1024 * 1024
"""A configuration is text that somebody wrote; anything larger is another file."""

VARIANTS_FOLDER = "configs"
"""Folder of a model with configuration variants (`--model-config-name`)."""


def read_config(folder: ModelFolder, *, config_name: str = "") -> tuple[ModelConfig | None, Path | None]:
    """Return the model's configuration as it is written and the file it is from. Blocks on the disk.

    Args:
        folder: The model's folder.
        config_name: `configs/<config_name>.pbtxt` is used where it exists, else `config.pbtxt`.

    Returns:
        Configuration and file, or None and None where the model has no file.

    Raises:
        ServingError: INVALID_ARG, beginning with the path of the file, when it cannot be read or parsed.
    """
    for path in _candidates(folder, config_name):
        content = _read(path)
        if content is None:
            continue
        try:
            return parse(content.decode(errors="surrogateescape")), path
        except ServingError as error:
            # The parser, which does not know the path, begins with the usual name.
            message = error.message.removeprefix(CONFIG_FILE)
            where = str(path) if message != error.message else f"{path}: "
            raise ServingError(error.code, where + message, hint=error.hint) from error
    return None, None


def check_name(folder: ModelFolder, config: ModelConfig) -> None:
    """Check that a configuration's name, where it has one, is its folder's.

    Raises:
        ServingError: INVALID_ARG when it is not.
    """
    if config.name and config.name != folder.name:
        raise invalid(
            f"unexpected directory name '{folder.name}' for model '{config.name}', "
            "directory name must equal model name",
            hint="leave `name` out of the configuration and the folder's is used",
        )


def version_files(folder: ModelFolder, version: int) -> tuple[str, ...]:
    """Return the names of files and folders in a version's folder, sorted, without hidden ones. Blocks on the disk.

    Raises:
        ServingError: INVALID_ARG when the folder cannot be read.
    """
    try:
        return tuple(sorted(name for name in os.listdir(folder.path / str(version)) if not name.startswith(".")))
    except OSError as error:
        raise unreadable(folder, error) from error


def _candidates(folder: ModelFolder, config_name: str) -> list[Path]:
    default = folder.path / CONFIG_FILE
    return [folder.path / VARIANTS_FOLDER / f"{config_name}.pbtxt", default] if config_name else [default]


def _read(path: Path) -> bytes | None:
    """Return the file's content, or None where there is no such file."""
    try:
        with path.open("rb") as file:
            content = file.read(CONFIG_BYTES_MAX + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise invalid(f"{path}: {(error.strerror or str(error)).lower()}") from error
    if len(content) > CONFIG_BYTES_MAX:
        raise invalid(f"{path}: expected at most {CONFIG_BYTES_MAX} bytes of configuration, got more")
    return content
