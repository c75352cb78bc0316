"""The data files of warm-up samples."""

from pathlib import PurePosixPath

from charonia.config.model import ModelConfig
from charonia.core.errors import invalid
from charonia.repository.scan import ModelFolder

WARMUP_FOLDER = "warmup"
"""Folder of a model that holds them."""

FILE_BYTES_MAX = 2**30
"""Largest file of one input."""


def read_warmup_files(folder: ModelFolder, config: ModelConfig) -> dict[str, bytes]:
    """Return the content of each file that a warm-up sample names, by its name. Blocks on the disk.

    Raises:
        ServingError: INVALID_ARG, beginning with the path in the configuration: the name leaves the folder, or the file
            cannot be read.
    """
    contents: dict[str, bytes] = {}
    for index, sample in enumerate(config.model_warmup):
        for name, given in sample.inputs.items():
            if sample.batch_size and given.input_data_file is not None:
                path = f"model_warmup[{index}].inputs[{name}].input_data_file"
                contents[given.input_data_file] = _read(folder, given.input_data_file, path)
    return contents


def _read(folder: ModelFolder, filename: str, path: str) -> bytes:
    relative = PurePosixPath(filename)
    if not filename or relative.is_absolute() or ".." in relative.parts or "\0" in filename:
        raise invalid(f"{path}: must stay within the model's folder '{WARMUP_FOLDER}', got '{filename}'")
    # A symbolic link is followed, as for label files.
    file = folder.path / WARMUP_FOLDER / relative
    try:
        with file.open("rb") as opened:
            content = opened.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise invalid(f"{path}: {file}: {(error.strerror or str(error)).lower()}") from error
    if len(content) > FILE_BYTES_MAX:
        raise invalid(f"{path}: {file}: expected at most {FILE_BYTES_MAX} bytes, got more")
    return content
