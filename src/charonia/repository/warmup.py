"""The data files of warm-up samples."""

from charonia.config.model import ModelConfig
from charonia.repository.data_files import read_data_file
from charonia.repository.scan import ModelFolder

WARMUP_FOLDER = "warmup"
"""Folder of a model that holds them."""


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
                contents[given.input_data_file] = read_data_file(folder, WARMUP_FOLDER, given.input_data_file, path)
    return contents
