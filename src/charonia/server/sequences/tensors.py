"""The control inputs that the server adds to requests of sequences, and the states that it keeps between them."""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from charonia.config.kinds import ControlKind
from charonia.config.model import InitialState, ModelConfig, SequenceControl, SequenceState
from charonia.config.sequence_tensors import CONTROL_DIMS, control_type, controls
from charonia.core.dtypes import DataType
from charonia.core.raw_data import from_file, zeros
from charonia.core.request import FIELDS, SEQUENCE_END, SEQUENCE_START, InferRequest, RequestedOutput
from charonia.core.tensor import Array, Tensor
from charonia.server.backends.api import Outputs

States = dict[str, Array]
"""Arrays of a sequence's states by name of the state's input, with the batch dimension where the model has one."""


class SequenceRequest(InferRequest):
    """A request with controls and states, as the model receives it.

    Attributes:
        sequence: Number of its sequence, 0 for padding.
    """

    __slots__ = ("sequence",)

    def __init__(self, request: InferRequest, inputs: dict[str, Tensor], outputs: tuple[RequestedOutput, ...]) -> None:
        for name in FIELDS:
            setattr(self, name, getattr(request, name))
        self.inputs = inputs
        self.outputs = outputs
        self.sequence = 0


class _Flag(NamedTuple):
    """A control that is on or off."""

    off: Tensor
    on: Tensor


class SequenceTensors:
    """Controls and states of one model.

    Args:
        config: A validated configuration with `sequence_batching`.
        initial: Initial states, by name of the state's input.
    """

    def __init__(self, config: ModelConfig, initial: Mapping[str, Array]) -> None:
        if config.sequence_batching is None:
            raise ValueError(f"model {config.name!r} does not work on sequences")
        self._name = config.name
        self._lead = (1,) if config.max_batch_size > 0 else ()
        self._states = config.sequence_batching.state
        self._initial = dict(initial)
        flagged: dict[ControlKind, _Flag] = {}
        self._id: tuple[str, DataType] | None = None
        for kind, (tensor, control) in controls(config).items():
            if kind is ControlKind.CONTROL_SEQUENCE_CORRID:
                self._id = (tensor.name, control_type(control))
            else:
                flagged[kind] = self._flag(tensor.name, control)
        self._flags = [_controls(flagged, flags, is_ready=True) for flags in range(4)]  # by START | END
        self._absent = _controls(flagged, 0, is_ready=False)
        public = [output.name for output in config.output]
        self._hidden = frozenset(state.output_name for state in self._states) - set(public)
        self._all_outputs = tuple(RequestedOutput(name) for name in public)
        self._kept = {state.output_name: state for state in self._states}
        self.has_states = bool(self._states)
        self.has_variable_states = any(-1 in state.dims for state in self._states)

    def initial_states(self) -> States:
        return dict(self._initial)

    def complete(self, request: InferRequest, flags: int, states: States) -> SequenceRequest:
        """Return a request of a sequence with its controls and states.

        Args:
            request: As it arrived.
            flags: `SEQUENCE_START | SEQUENCE_END`.
            states: The sequence's states.
        """
        inputs = dict(request.inputs)
        outputs = request.outputs
        inputs.update(self._flags[flags])
        if self._id is not None:
            self._add_id(inputs, request.correlation_id)
        if self._states:
            for state in self._states:
                inputs[state.input_name] = Tensor(state.input_name, type_of(state), states[state.input_name])
            outputs = (*(outputs or self._all_outputs), *(RequestedOutput(name) for name in self._kept))
        completed = SequenceRequest(request, inputs, outputs)
        completed.flags = flags
        return completed

    def padding(self, like: SequenceRequest) -> SequenceRequest:
        """Return the padding of a row without a request: zeros, with the shapes of another request."""
        inputs = {name: Tensor(name, t.datatype, zeros(t.datatype, t.array.shape)) for name, t in like.inputs.items()}
        inputs.update(self._absent)
        request = SequenceRequest(like, inputs, like.outputs)
        request.id, request.correlation_id, request.flags, request.parameters = "", 0, 0, {}
        request.trace = None
        return request

    def take(self, outputs: Outputs, states: States) -> None:
        """Store the states that a model returned, and remove states that are not outputs of the configuration."""
        rest = []
        for tensor in outputs.tensors:
            state = self._kept.get(tensor.name)
            if state is not None:
                # A view would keep its base alive: the whole batch, or a worker's memory.
                array = tensor.array
                states[state.input_name] = array if array.base is None else array.copy()
            if tensor.name not in self._hidden:
                rest.append(tensor)
        outputs.tensors = rest

    def shapes(self, states: States) -> Hashable:
        """Return the shapes of states; sequences share a batch only if theirs are equal."""
        return tuple(states[state.input_name].shape for state in self._states)

    def _flag(self, name: str, control: SequenceControl) -> _Flag:
        datatype = control_type(control)
        values: Sequence[float] = control.int32_false_true or control.fp32_false_true or control.bool_false_true
        shape = (*self._lead, *CONTROL_DIMS)
        off, on = (Tensor(name, datatype, np.full(shape, value, datatype.numpy)) for value in values)
        return _Flag(off, on)

    def _add_id(self, inputs: dict[str, Tensor], correlation_id: int | str) -> None:
        if self._id is None:
            return
        name, datatype = self._id
        shape = (*self._lead, *CONTROL_DIMS)
        array: Array
        if datatype is DataType.BYTES:
            array = np.empty(shape, np.object_)
            array[...] = str(correlation_id).encode()
        else:
            array = np.full(shape, _same_bits(correlation_id, datatype), datatype.numpy)
        inputs[name] = Tensor(name, datatype, array)


def _controls(flagged: Mapping[ControlKind, _Flag], flags: int, *, is_ready: bool) -> dict[str, Tensor]:
    """Return the controls that are on or off, by name."""
    on = {
        ControlKind.CONTROL_SEQUENCE_START: bool(flags & SEQUENCE_START),
        ControlKind.CONTROL_SEQUENCE_END: bool(flags & SEQUENCE_END),
        ControlKind.CONTROL_SEQUENCE_READY: is_ready,
    }
    tensors = (flag.on if on[kind] else flag.off for kind, flag in flagged.items())
    return {tensor.name: tensor for tensor in tensors}


def type_of(state: SequenceState) -> DataType:
    """Return the datatype of a state of a validated configuration."""
    if state.data_type is None:
        raise ValueError(f"state {state.input_name!r} has no data type: the configuration was not validated")
    return state.data_type


def initial_states(config: ModelConfig, files: Mapping[str, bytes]) -> States:
    """Return the initial states of a sequence: zeros, unless the configuration names a file.

    Raises:
        ServingError: INVALID_ARG, beginning with the path: the content of a file does not fit the state.
    """
    sequence = config.sequence_batching
    lead = (1,) if config.max_batch_size > 0 else ()
    found: States = {}
    for index, state in enumerate(sequence.state if sequence is not None else ()):
        initial = state.initial_state[0] if state.initial_state else InitialState()
        dims = tuple(max(1, dim) for dim in initial.dims or state.dims)
        if initial.data_file is None:
            array = zeros(type_of(state), dims)
        else:
            path = f"sequence_batching.state[{index}].initial_state[0].data_file"
            array = from_file(files[initial.data_file], type_of(state), dims, f"{path}: '{initial.data_file}'")
        found[state.input_name] = array.reshape(lead + dims)
    return found


def _same_bits(correlation_id: int | str, datatype: DataType) -> int | str:
    """Return an id as its control input holds it: in INT64 the upper half of the unsigned numbers is negative."""
    if datatype is DataType.INT64 and isinstance(correlation_id, int) and correlation_id >= 2**63:
        return correlation_id - 2**64
    return correlation_id
