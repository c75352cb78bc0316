"""Checks of an ensemble: its configuration, alone and against the models of its steps. Pure.

The loader checks whether the models exist, and their dependencies. Key fragments of Triton's messages are kept.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from charonia.config.backends import ENSEMBLE
from charonia.config.model import (
    EnsembleScheduling,
    EnsembleStep,
    ModelConfig,
    ModelInput,
    ModelOutput,
    TransactionPolicy,
)
from charonia.config.problems import Problem
from charonia.config.tensors import WILDCARD

_PATH = "ensemble_scheduling"

STEP_PATH = f"{_PATH}.step"
"""Path of the steps in a configuration."""


def ensemble_problems(config: ModelConfig) -> list[Problem]:
    """Return all problems of `ensemble_scheduling`, and of fields that cannot be combined with it."""
    name, scheduling = config.name, config.ensemble_scheduling
    if config.platform != ENSEMBLE:
        if scheduling is None:
            return []
        message = f"ensemble scheduling cannot be set for model '{name}' whose platform is not ensemble"
        return [Problem(_PATH, message)]
    problems: list[Problem] = []
    if config.instance_group:
        message = f"instance group should not be specified for ensemble '{name}'"
        problems.append(Problem("instance_group", message))
    if config.optimization is not None:
        problems.append(Problem("optimization", f"optimization should not be specified for ensemble '{name}'"))
    if config.model_warmup:
        problems.append(Problem("model_warmup", f"model_warmup can not be specified for ensemble '{name}'"))
    if scheduling is None:
        message = f"ensemble scheduling must be set for ensemble {name} whose platform is ensemble"
        return [*problems, Problem(_PATH, message)]
    if not scheduling.step:
        return [*problems, Problem(STEP_PATH, f"must specify 'step' for ensemble '{name}'")]
    problems += _step_problems(name, scheduling)
    missing = [field for field in ("input", "output") if not getattr(config, field)]
    if missing:
        # Without them the tensors of the steps cannot be checked.
        message = f"must specify {{}} for ensemble '{name}': the tensors that requests {{}}"
        said = {"input": "carry", "output": "get back"}
        return [*problems, *(Problem(field, message.format(f"'{field}'", said[field])) for field in missing)]
    return [*problems, *_graph_problems(config, scheduling)]


def _step_problems(name: str, scheduling: EnsembleScheduling) -> Iterator[Problem]:
    for index, step in enumerate(scheduling.step):
        path = f"{STEP_PATH}[{index}]"
        for field in ("model_name", "input_map", "output_map"):
            if not getattr(step, field):
                message = f"must specify '{field}' in step {index} of ensemble '{name}'"
                yield Problem(f"{path}.{field}", message)
        if step.model_version < -1:
            message = f"step {index} of ensemble '{name}' must have a version number, or -1 for the latest"
            yield Problem(f"{path}.model_version", f"{message}, got {step.model_version}")
        if step.model_name == name and name:
            message = f"circular dependency between ensembles: {name} -> {name}"
            yield Problem(f"{path}.model_name", message)
        for field, mapping in (("input_map", step.input_map), ("output_map", step.output_map)):
            for key, tensor in mapping.items():
                if not key or not tensor:
                    message = f"step {index} of ensemble '{name}' maps '{key}' to '{tensor}': neither may be empty"
                    yield Problem(f"{path}.{field}[{key}]", message)


def _graph_problems(config: ModelConfig, scheduling: EnsembleScheduling) -> Iterator[Problem]:
    """Follow the tensors through the steps: none written twice, none unused, every output reached."""
    name = config.name
    inputs = {tensor.name for tensor in config.input}
    outputs = {tensor.name for tensor in config.output}
    read = {tensor for step in scheduling.step for tensor in step.input_map.values()}
    written = Counter(tensor for step in scheduling.step for tensor in step.output_map.values())
    for index, step in enumerate(scheduling.step):
        for key, tensor in step.output_map.items():
            path = f"{STEP_PATH}[{index}].output_map[{key}]"
            if written[tensor] > 1 or tensor in inputs:
                message = f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{name}'"
                yield Problem(path, f"{message}; an input of the ensemble counts as written")
            elif tensor not in read and tensor not in outputs:
                yield Problem(path, f"ensemble tensor '{tensor}' is unused in ensemble '{name}'")
    for index, model_input in enumerate(config.input):
        if model_input.name not in read:
            yield Problem(f"input[{index}]", f"ensemble input '{model_input.name}' for ensemble '{name}' is not used")
    reached = _reached(inputs, scheduling)
    writers = {tensor: step for step in scheduling.step for tensor in step.output_map.values()}
    for index, wanted in enumerate(config.output):
        if wanted.name not in reached:
            cause = _cause(writers.get(wanted.name), reached)
            yield Problem(f"output[{index}]", f"output '{wanted.name}' for ensemble '{name}' is not written{cause}")


def _reached(inputs: set[str], scheduling: EnsembleScheduling) -> set[str]:
    """Return the tensors that exist after every step has run whose inputs all exist."""
    missing = [set(step.input_map.values()) for step in scheduling.step]
    readers: dict[str, list[int]] = {}
    for index, tensors in enumerate(missing):
        for tensor in tensors:
            readers.setdefault(tensor, []).append(index)
    ready = [index for index, tensors in enumerate(missing) if not tensors]
    arriving = [*inputs, *(tensor for index in ready for tensor in scheduling.step[index].output_map.values())]
    reached: set[str] = set()
    while arriving:
        tensor = arriving.pop()
        if tensor in reached:
            continue
        reached.add(tensor)
        for index in readers.get(tensor, ()):
            missing[index].discard(tensor)
            if not missing[index]:
                arriving.extend(scheduling.step[index].output_map.values())
    return reached


def _cause(writer: EnsembleStep | None, reached: set[str]) -> str:
    missing = [tensor for tensor in writer.input_map.values() if tensor not in reached] if writer else []
    return f": at least one of its depending tensors, '{missing[0]}', is not connected" if missing else ""


@dataclass(frozen=True, slots=True)
class _End:
    """One end of a link: a tensor of a model that writes or reads an ensemble tensor.

    Attributes:
        model: Name of the model, for messages.
        tensor: Its input or output.
        dims: Its dims on this side: those of the steps for an input or output of the ensemble itself.
        batches: Whether the model has a batch dimension.
        path: Path of the link in the configuration.
    """

    model: str
    tensor: ModelInput | ModelOutput
    dims: tuple[int, ...]
    batches: bool
    path: str

    def has_type_of(self, other: "_End") -> bool:
        return self.tensor.data_type is other.tensor.data_type

    def has_shape_of(self, other: "_End") -> bool:
        """Whether the shapes can be the same; a batch dimension may be missing on one side."""
        return _match(self.dims, other.dims) or (self.batches != other.batches and _match(self.shape, other.shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return (WILDCARD, *self.dims) if self.batches else self.dims


def scheduling_of(config: ModelConfig) -> EnsembleScheduling:
    """Return the steps of an ensemble's configuration; none for any other model."""
    return config.ensemble_scheduling or EnsembleScheduling()


def composition_problems(config: ModelConfig, models: Sequence[ModelConfig | None]) -> list[Problem]:
    """Return all mismatches.

    Args:
        config: A valid configuration of an ensemble.
        models: The complete configuration of each step's model; None if it is unknown, which skips its checks.
    """
    problems: list[Problem] = []
    for index, (step, model) in enumerate(zip(scheduling_of(config).step, models, strict=True)):
        if model is None:
            continue
        path = f"{STEP_PATH}[{index}]"
        problems += _map_problems(config.name, step.input_map, model, f"{path}.input_map", is_input=True)
        problems += _map_problems(config.name, step.output_map, model, f"{path}.output_map", is_input=False)
        problems += _unmapped(config.name, step.input_map, model, f"{path}.input_map")
        # A model that does not batch is limited by its dims alone.
        if 0 < model.max_batch_size < config.max_batch_size:
            message = (
                f"ensemble {config.name} allows maximum batch size {config.max_batch_size}, but it contains model "
                f"{model.name} which only allows maximum batch size to be {model.max_batch_size}; reduce the "
                f"one of the ensemble, or set max_batch_size in the config.pbtxt of {model.name}: where that is "
                "silent, it is completed to --backend-config=default-max-batch-size, which is 4 by default"
            )
            problems.append(Problem(f"{path}.model_name", message))
    return problems + list(_link_problems(config, models))


def composed(config: ModelConfig, models: Sequence[ModelConfig]) -> ModelConfig:
    """Return an ensemble's configuration with the property that follows from its steps: whether it is decoupled."""
    return replace(config, model_transaction_policy=TransactionPolicy(any(model.is_decoupled for model in models)))


def _map_problems(
    name: str, mapping: Mapping[str, str], model: ModelConfig, path: str, *, is_input: bool
) -> Iterator[Problem]:
    tensors: Sequence[ModelInput | ModelOutput] = model.input if is_input else model.output
    kind = "input" if is_input else "output"
    own = [tensor.name for tensor in tensors]
    for key, tensor in mapping.items():
        if key not in own:
            verb = "is mapping to" if is_input else "is mapped from"
            message = f"in ensemble {name}, ensemble tensor {tensor} {verb} non-existing {kind} {key} in model "
            yield Problem(f"{path}[{key}]", f"{message}{model.name}; its {kind}s are {', '.join(own)}")


def _unmapped(name: str, mapping: Mapping[str, str], model: ModelConfig, path: str) -> Iterator[Problem]:
    for tensor in model.input:
        if tensor.name not in mapping and not tensor.optional:
            message = (
                f"in ensemble {name}, input {tensor.name} in model {model.name} is not mapped to any ensemble tensors"
            )
            yield Problem(path, message)


def _link_problems(config: ModelConfig, models: Sequence[ModelConfig | None]) -> Iterator[Problem]:
    """Compare every end of each ensemble tensor with the first: its writer, if that is known."""
    name, batches = config.name, config.max_batch_size > 0
    ends: dict[str, list[_End]] = {}
    for index, model_input in enumerate(config.input):
        ends.setdefault(model_input.name, []).append(
            _End(name, model_input, model_input.inner_dims, batches, f"input[{index}]")
        )
    steps = scheduling_of(config).step
    for field in ("output_map", "input_map"):
        for index, (step, model) in enumerate(zip(steps, models, strict=True)):
            if model is None:
                continue
            tensors: Sequence[ModelInput | ModelOutput] = model.output if field == "output_map" else model.input
            own = {tensor.name: tensor for tensor in tensors}
            mapping = step.output_map if field == "output_map" else step.input_map
            for key, tensor in mapping.items():
                if key in own:
                    path = f"{STEP_PATH}[{index}].{field}[{key}]"
                    end = _End(model.name, own[key], own[key].dims, model.max_batch_size > 0, path)
                    ends.setdefault(tensor, []).append(end)
    for index, output in enumerate(config.output):
        ends.setdefault(output.name, []).append(_End(name, output, output.inner_dims, batches, f"output[{index}]"))
    for tensor_name, (first, *others) in ends.items():
        subject = f"in ensemble {name}, ensemble tensor {tensor_name}: inconsistent"
        for other in others:
            if not other.has_type_of(first):
                message = f"{subject} data type: {_inferred(_type(first), first, _type(other), other)}"
                yield Problem(other.path, message)
            elif not other.has_shape_of(first):
                shapes = _inferred(_dims(first.shape), first, _dims(other.shape), other)
                yield Problem(other.path, f"{subject} shape: {shapes}")


def _inferred(expected: str, first: _End, got: str, other: _End) -> str:
    return f"{expected} is inferred from model {first.model} while {got} is inferred from model {other.model}"


def _type(end: _End) -> str:
    return end.tensor.data_type.config if end.tensor.data_type else "none"


def _dims(dims: Sequence[int]) -> str:
    return f"[{','.join(map(str, dims))}]"


def _match(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and all(a == b or WILDCARD in (a, b) for a, b in zip(one, other, strict=True))
