"""What the states of sequences start from: zeros, or files in the model's folder `initial_state`."""

from math import prod

import numpy as np

from charonia.config.model import InitialState, ModelConfig, SequenceState
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, invalid
from charonia.core.tensor import Array
from charonia.protocol.tensors import decode_tensor
from charonia.repository.scan import ModelFolder

STATE_FOLDER = "initial_state"
"""Folder of a model that holds the files that `data_file` names."""


def read_initial_states(folder: ModelFolder, config: ModelConfig) -> dict[str, Array]:
    """Return what each state of a validated configuration starts from, by name of the state's input.

    Arrays have a batch dimension of 1 where the model batches. A state whose configuration does not say what it starts
    from starts from zeros; a variable dimension is 1 unless the initial state says otherwise.

    Raises:
        ServingError: INVALID_ARG when a file is not there, or does not hold what the configuration says.
    """
    sequence = config.sequence_batching
    lead = (1,) if config.max_batch_size > 0 else ()
    return {state.input_name: _start_of(folder, config, state, lead) for state in (sequence.state if sequence else ())}


def _start_of(folder: ModelFolder, config: ModelConfig, state: SequenceState, lead: tuple[int, ...]) -> Array:
    initial = state.initial_state[0] if state.initial_state else InitialState()
    datatype = state.data_type or DataType.FP32
    shape = (*lead, *(max(1, dim) for dim in initial.dims or state.dims))
    if initial.data_file is None:
        if datatype is DataType.BYTES:
            empty: Array = np.full(shape, b"", np.object_)
            return empty
        return np.zeros(shape, datatype.numpy)
    path = folder.path / STATE_FOLDER / initial.data_file
    subject = f"model '{config.name}': initial state of '{state.input_name}'"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise invalid(
            f"{subject}: the file {STATE_FOLDER}/{initial.data_file} cannot be read: {error.strerror}"
        ) from error
    try:
        return decode_tensor(state.input_name, datatype, shape, content).array.copy()
    except ServingError as error:
        expected = f"{prod(shape)} elements of {datatype.config}"
        raise invalid(f"{subject}: the file {STATE_FOLDER}/{initial.data_file} must hold {expected}: {error}") from None
