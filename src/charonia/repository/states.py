"""The files that states of sequences start from."""

from charonia.config.model import ModelConfig
from charonia.repository.data_files import read_data_file
from charonia.repository.scan import ModelFolder

STATE_FOLDER = "initial_state"
"""Folder of a model that holds them."""


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
