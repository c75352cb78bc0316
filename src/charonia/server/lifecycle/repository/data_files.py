"""Reads the files in a model's folder that its configuration names: class labels, warm-up data, initial states.

Symbolic links are followed, because model stores are full of them; a name that leaves the folder is refused.
"""

import logging
from math import prod

from charonia.config.model import ModelConfig
from charonia.core.errors import invalid
from charonia.server.lifecycle.repository.scan import ModelFolder, is_inside, read_file
from charonia.wire.plain_values import labels_of

_log = logging.getLogger(__name__)

LABEL_BYTES_MAX = 64 * 1024 * 1024
"""Largest label file."""

FILE_BYTES_MAX = 2**30
"""Largest file of one tensor."""

WARMUP_FOLDER = "warmup"
"""Folder of a model that has the data files of warm-up samples."""

STATE_FOLDER = "initial_state"
"""Folder of a model that has the data files of initial states."""

ESCAPES = "must stay within model directory"


def read_labels(folder: ModelFolder, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Return the labels of each output: those of its schema, or of a file, whose line i names class i.

    Blocks on the disk.

    Raises:
        ServingError: INVALID_ARG for a path that leaves the model's folder, or a file that cannot be read.
    """
    labels = {
        output.name: _read(folder, output.name, output.label_filename)
        for output in config.output
        if output.label_filename
    }
    for output in config.output:
        classes = prod(output.dims) if output.dims and -1 not in output.dims else 0
        if output.label_filename and len(labels[output.name]) < classes:
            _log.warning(
                "model '%s': '%s' has %d labels for the %d classes of output '%s': the last %d have none",
                folder.name, output.label_filename, len(labels[output.name]), classes, output.name,
                classes - len(labels[output.name]),
            )  # fmt: skip
    named = {output.name: labels_of(config, output.name) for output in config.output}
    return {name: found for name, found in named.items() if found} | labels


def _read(folder: ModelFolder, output: str, filename: str) -> tuple[str, ...]:
    subject = f"model '{folder.name}': label_filename '{filename}' of output '{output}'"
    if not is_inside(filename):
        raise invalid(f"{subject} {ESCAPES}")
    content = read_file(folder.path / filename, LABEL_BYTES_MAX, subject)
    try:
        # Only line feeds end a line: `splitlines` would also cut a label at a form feed or a line separator.
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise invalid(f"{subject}: expected UTF-8 text, byte {error.start} is not") from error
    if lines[-1] == "":
        lines.pop()
    return tuple(line.removesuffix("\r") for line in lines)


def read_data_file(folder: ModelFolder, place: str, filename: str, path: str) -> bytes:
    """Return the content of a file. Blocks on the disk."""
    if not is_inside(filename):
        raise invalid(f"{path}: must stay within the model's folder '{place}', got '{filename}'")
    file = folder.path / place / filename
    return read_file(file, FILE_BYTES_MAX, f"{path}: {file}")


def read_warmup_files(folder: ModelFolder, config: ModelConfig) -> dict[str, bytes]:
    """Return the content of each file that a warm-up sample names, by its name. Blocks on the disk.

    Raises:
        ServingError: INVALID_ARG, beginning with the path in the configuration: the name leaves the folder, or the file
            cannot be read.
    """
    contents: dict[str, bytes] = {}
    for index, sample in enumerate(config.model_warmup):
        for name, warmup_input in sample.inputs.items():
            if sample.batch_size and warmup_input.input_data_file is not None:
                path = f"model_warmup[{index}].inputs[{name}].input_data_file"
                contents[warmup_input.input_data_file] = read_data_file(
                    folder, WARMUP_FOLDER, warmup_input.input_data_file, path
                )
    return contents


def read_state_files(folder: ModelFolder, config: ModelConfig) -> dict[str, bytes]:
    """Return the content of each file that an initial state names, by its name. Blocks on the disk.

    Raises:
        ServingError: INVALID_ARG, beginning with the path in the configuration: the name leaves the folder, or the file
            cannot be read.
    """
    sequence = config.sequence_batching
    contents: dict[str, bytes] = {}
    for index, state in enumerate(sequence.state if sequence is not None else ()):
        for initial in state.initial_state:
            if initial.data_file is not None:
                path = f"sequence_batching.state[{index}].initial_state[0].data_file"
                contents[initial.data_file] = read_data_file(folder, STATE_FOLDER, initial.data_file, path)
    return contents
