"""The additional tensors of sequence models: controls and states."""

from collections.abc import Mapping
from dataclasses import replace

from charonia.config.kinds import ControlKind
from charonia.config.model import ControlInput, ModelConfig, ModelInput, ModelOutput, SequenceControl
from charonia.core.dtypes import DataType

CONTROL_DIMS = (1,)
"""Dims of every control input."""


def control_type(control: SequenceControl) -> DataType:
    """Return the datatype of a control input."""
    if control.data_type is not None:
        return control.data_type
    if control.fp32_false_true:
        return DataType.FP32
    return DataType.BOOL if control.bool_false_true else DataType.INT32


def controls(config: ModelConfig) -> Mapping[ControlKind, tuple[ControlInput, SequenceControl]]:
    """Return the control inputs of a validated configuration, by kind."""
    sequence = config.sequence_batching
    inputs = sequence.control_input if sequence is not None else ()
    return {control.kind: (tensor, control) for tensor in inputs for control in tensor.control}


def seen_by_model(config: ModelConfig) -> ModelConfig:
    """Return the configuration with the server's additional inputs (controls and states) and outputs (states).

    For a backend that must know every tensor of the model. A model without sequences has none.
    """
    sequence = config.sequence_batching
    if sequence is None:
        return config
    inputs = {tensor.name: tensor for tensor in config.input}
    outputs = {tensor.name: tensor for tensor in config.output}
    for tensor, control in controls(config).values():
        inputs.setdefault(tensor.name, ModelInput(tensor.name, control_type(control), dims=CONTROL_DIMS))
    for state in sequence.state:
        inputs.setdefault(state.input_name, ModelInput(state.input_name, state.data_type, dims=state.dims))
        outputs.setdefault(state.output_name, ModelOutput(state.output_name, state.data_type, dims=state.dims))
    return replace(config, input=tuple(inputs.values()), output=tuple(outputs.values()))


def added_names(config: ModelConfig) -> frozenset[str]:
    """Return the names of the inputs and outputs that `seen_by_model` may add."""
    sequence = config.sequence_batching
    if sequence is None:
        return frozenset()
    states = {name for state in sequence.state for name in (state.input_name, state.output_name)}
    return frozenset(states | {tensor.name for tensor in sequence.control_input})
