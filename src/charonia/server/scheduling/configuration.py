"""Checks of a configuration's scheduling sections. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence

from charonia.config.kinds import ControlKind, TimeoutAction
from charonia.config.model import (
    ControlInput,
    DynamicBatching,
    InitialState,
    ModelConfig,
    SequenceBatching,
    SequenceControl,
    SequenceState,
)
from charonia.config.problems import Problem
from charonia.config.tensors import dim_problems
from charonia.core.dtypes import DataType

PRIORITY_LEVELS_MAX = 1024
"""Most priority levels; each has its own queue."""

CORRELATION_ID_TYPES = (DataType.UINT64, DataType.INT64, DataType.UINT32, DataType.INT32, DataType.BYTES)
"""Datatypes of the control input for the correlation id."""

_FALSE_AND_TRUE = 2
_SCHEDULERS = ("dynamic_batching", "sequence_batching", "ensemble_scheduling")


def scheduling_problems(config: ModelConfig) -> list[Problem]:
    """Return all problems of `dynamic_batching` and `sequence_batching`."""
    problems: list[Problem] = []
    chosen = [name for name in _SCHEDULERS if getattr(config, name) is not None]
    if len(chosen) > 1:
        problems.append(Problem(chosen[1], f"only one scheduler may be given, got {' and '.join(chosen)}"))
    if config.dynamic_batching is not None:
        problems += _dynamic_problems(config, config.dynamic_batching)
    if config.sequence_batching is not None:
        problems += _sequence_problems(config, config.sequence_batching)
    return problems


def idle_settings(config: ModelConfig) -> Iterator[str]:
    """Yield a sentence for each setting of `dynamic_batching` that has no effect in a valid configuration."""
    dynamic = config.dynamic_batching
    if dynamic is None:
        return
    if config.max_batch_size <= 1:
        why = f"no request waits for others with max_batch_size {config.max_batch_size}"
        if dynamic.max_queue_delay_microseconds:
            yield f"dynamic_batching.max_queue_delay_microseconds has no effect: {why}"
        if dynamic.preferred_batch_size:
            yield f"dynamic_batching.preferred_batch_size has no effect: {why}"
    if not dynamic.priority_levels:
        for name in ("default_priority_level", "priority_queue_policy"):
            if getattr(dynamic, name):
                yield f"dynamic_batching.{name} has no effect without priority_levels"
    policies = {"default_queue_policy": dynamic.default_queue_policy}
    if dynamic.priority_levels:
        policies |= {f"priority_queue_policy[{key}]": each for key, each in dynamic.priority_queue_policy.items()}
    for name, policy in policies.items():
        if policy is None or policy.timeout_action is not TimeoutAction.DELAY:
            continue
        if not policy.default_timeout_microseconds and not policy.allow_timeout_override:
            yield f"dynamic_batching.{name}.timeout_action has no effect: no request has a queue timeout"


def _dynamic_problems(config: ModelConfig, dynamic: DynamicBatching) -> Iterator[Problem]:
    path, model = "dynamic_batching", config.name
    yield from _preferred_problems(config, dynamic.preferred_batch_size, path, "dynamic batching preferred size")
    levels = dynamic.priority_levels
    if levels > PRIORITY_LEVELS_MAX:
        yield Problem(f"{path}.priority_levels", f"must be at most {PRIORITY_LEVELS_MAX} for {model}, got {levels}")
    if levels and not 1 <= dynamic.default_priority_level <= levels:
        message = f"default priority level must be in range [1, {levels}] for {model}"
        yield Problem(f"{path}.default_priority_level", f"{message}, got {dynamic.default_priority_level}")
    for level in dynamic.priority_queue_policy if levels else ():
        if not 1 <= level <= levels:
            message = f"priority queue policy must have priority level in range [1, {levels}] for {model}, got {level}"
            yield Problem(f"{path}.priority_queue_policy[{level}]", message)
    if dynamic.preserve_ordering:
        yield from _ordering_problems(model, dynamic, path)


def _ordering_problems(model: str, dynamic: DynamicBatching, path: str) -> Iterator[Problem]:
    if dynamic.priority_levels > 1:
        message = f"Only one priority level is allowed when 'preserve_ordering' is true for {model}"
        yield Problem(f"{path}.priority_levels", f"{message}, got {dynamic.priority_levels}")
    policies = {f"priority_queue_policy[{key}]": policy for key, policy in dynamic.priority_queue_policy.items()}
    if dynamic.default_queue_policy is not None:
        policies["default_queue_policy"] = dynamic.default_queue_policy
    for name, policy in policies.items():
        if policy.timeout_action is TimeoutAction.DELAY:
            message = f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {model}"
            yield Problem(f"{path}.{name}.timeout_action", message)


def _preferred_problems(config: ModelConfig, sizes: Sequence[int], path: str, subject: str) -> Iterator[Problem]:
    for index, size in enumerate(sizes):
        where = f"{path}.preferred_batch_size[{index}]"
        if size < 1:
            yield Problem(where, f"{subject} must be positive for {config.name}, got {size}")
        elif size > config.max_batch_size:
            limit = f"max batch size for {config.name}, {config.max_batch_size}"
            yield Problem(where, f"{subject} must be <= {limit}, got {size}")


def _sequence_problems(config: ModelConfig, sequence: SequenceBatching) -> Iterator[Problem]:
    path, model = "sequence_batching", config.name
    if sequence.direct is not None and sequence.oldest is not None:
        yield Problem(f"{path}.oldest", "only one strategy may be given, got direct and oldest")
    if sequence.direct is not None:
        utilization = sequence.direct.minimum_slot_utilization
        # 0 is the value if the file does not set it.
        if utilization and not 0.0 < utilization <= 1.0:
            message = f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {model}"
            yield Problem(f"{path}.direct.minimum_slot_utilization", f"{message}, got {utilization}")
    if sequence.oldest is not None:
        subject = "sequence batching preferred batch size"
        yield from _preferred_problems(config, sequence.oldest.preferred_batch_size, f"{path}.oldest", subject)
        candidates = sequence.oldest.max_candidate_sequences
        if candidates < 0:
            message = f"sequence batching candidate sequences must be non-negative for {model}, got {candidates}"
            yield Problem(f"{path}.oldest.max_candidate_sequences", message)
    yield from _control_problems(model, sequence.control_input, f"{path}.control_input")
    yield from _state_problems(config, sequence, f"{path}.state")


def _control_problems(model: str, inputs: Sequence[ControlInput], path: str) -> Iterator[Problem]:
    kinds = Counter(control.kind for tensor in inputs for control in tensor.control)
    repeated = {kind for kind, count in kinds.items() if count > 1}
    seen: set[str] = set()
    for index, tensor in enumerate(inputs):
        where = f"{path}[{index}]"
        if not tensor.name:
            yield Problem(f"{where}.name", f"sequence batching control tensor must specify 'name' for {model}")
        elif tensor.name in seen:
            message = f"sequence batching specifies more than one control tensor '{tensor.name}' for {model}"
            yield Problem(f"{where}.name", message)
        seen.add(tensor.name)
        if not tensor.control:
            message = f"sequence batching control tensor '{tensor.name}' must specify 'control' for {model}"
            yield Problem(f"{where}.control", message)
        if len({control.kind for control in tensor.control}) > 1:
            message = f"sequence batching control tensor '{tensor.name}' is specified for multiple control kinds"
            yield Problem(f"{where}.control", f"{message} for {model}")
        for position, control in enumerate(tensor.control):
            if control.kind in repeated:
                message = f"sequence batching specifies multiple {control.kind.name} tensors for {model}"
                yield Problem(f"{where}.control[{position}].kind", message)
            yield from _value_problems(model, control, f"{where}.control[{position}]")


def _value_problems(model: str, control: SequenceControl, path: str) -> Iterator[Problem]:
    kind = control.kind.name
    values = {
        "int32_false_true": control.int32_false_true,
        "fp32_false_true": control.fp32_false_true,
        "bool_false_true": control.bool_false_true,
    }
    names = [name for name, pair in values.items() if pair]
    if control.kind is ControlKind.CONTROL_SEQUENCE_CORRID:
        if names:
            message = f"sequence batching must not specify '{names[0]}' for {kind} for {model}"
            yield Problem(f"{path}.{names[0]}", message)
        if control.data_type not in CORRELATION_ID_TYPES:
            allowed = ", ".join(datatype.config for datatype in CORRELATION_ID_TYPES)
            name = control.data_type.config if control.data_type else "none"
            message = f"unexpected data type for control {kind} for {model}: expected one of {allowed}, got {name}"
            yield Problem(f"{path}.data_type", message)
        return
    if control.data_type is not None:
        yield Problem(f"{path}.data_type", f"sequence batching must not specify 'data_type' for {kind} for {model}")
    if not names:
        choices = "either 'int32_false_true', 'fp32_false_true' or 'bool_false_true'"
        yield Problem(path, f"sequence batching must specify {choices} for {kind} for {model}")
    elif len(names) > 1:
        message = f"sequence batching specifies more than one of {', '.join(names)} for {kind} for {model}"
        yield Problem(path, message)
    for name in names:
        if len(values[name]) != _FALSE_AND_TRUE:
            message = f"sequence batching control '{name}' must have exactly 2 entries for {kind} for {model}"
            yield Problem(f"{path}.{name}", f"{message}, got {len(values[name])}")


def _state_problems(config: ModelConfig, sequence: SequenceBatching, path: str) -> Iterator[Problem]:
    model = config.name
    inputs = {tensor.name for tensor in config.input} | {tensor.name for tensor in sequence.control_input}
    outputs: set[str] = set()
    for index, state in enumerate(sequence.state):
        where = f"{path}[{index}]"
        for name in ("input_name", "output_name", "data_type", "dims"):
            if not getattr(state, name):
                yield Problem(f"{where}.{name}", f"sequence batching state must specify '{name}' for {model}")
        subject = f"sequence batching state '{state.input_name}'"
        yield from dim_problems(state.dims, f"{where}.dims", subject, wildcard=True)
        if state.input_name in inputs:
            yield Problem(f"{where}.input_name", f"{subject} has the name of another input of {model}")
        if state.output_name in outputs:
            yield Problem(f"{where}.output_name", f"{subject} has the output of another state of {model}")
        inputs.add(state.input_name)
        outputs.add(state.output_name)
        for output in config.output:
            if output.name == state.output_name and output.data_type != state.data_type:
                message = f"{subject} has another type than output '{output.name}' of {model}"
                yield Problem(f"{where}.output_name", message)
        if len(state.initial_state) > 1:
            message = f"{subject} has more than one initial state for {model}"
            yield Problem(f"{where}.initial_state", message)
        for position, initial in enumerate(state.initial_state):
            yield from _initial_problems(model, state, initial, f"{where}.initial_state[{position}]")


def _initial_problems(model: str, state: SequenceState, initial: InitialState, path: str) -> Iterator[Problem]:
    subject = f"initial state of '{state.input_name}'"
    if (initial.zero_data is None) == (initial.data_file is None):
        yield Problem(path, f"{subject} must specify zero_data or data_file for {model}")
    # Fields that it omits are as in the state.
    if initial.data_type not in (None, state.data_type):
        yield Problem(f"{path}.data_type", f"{subject} must have the data type of the state for {model}")
    dims = initial.dims or tuple(max(1, dim) for dim in state.dims)
    # Its dims are the dims of the initial state, so none of them is variable.
    yield from dim_problems(dims, f"{path}.dims", subject, wildcard=False)
    if len(dims) != len(state.dims) or any(d not in (-1, size) for d, size in zip(state.dims, dims, strict=True)):
        yield Problem(
            f"{path}.dims", f"{subject} must have dims that fit {list(state.dims)} for {model}, got {list(dims)}"
        )
