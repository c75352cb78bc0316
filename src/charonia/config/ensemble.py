"""What is wrong with an ensemble, as far as its own configuration tells.

What only the models of its steps can tell is in `charonia.config.composition`.
"""

from collections import Counter
from collections.abc import Iterator

from charonia.config.model import EnsembleScheduling, EnsembleStep, ModelConfig
from charonia.config.platforms import ENSEMBLE
from charonia.config.problems import Problem

_PATH = "ensemble_scheduling"

STEP_PATH = f"{_PATH}.step"
"""Path of the steps in a configuration."""


def ensemble_problems(config: ModelConfig) -> list[Problem]:
    """Return everything that is wrong with `ensemble_scheduling` and with what cannot stand beside it."""
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
    for index, given in enumerate(config.input):
        if given.name not in read:
            yield Problem(f"input[{index}]", f"ensemble input '{given.name}' for ensemble '{name}' is not used")
    reached = _reached(inputs, scheduling)
    writers = {tensor: step for step in scheduling.step for tensor in step.output_map.values()}
    for index, wanted in enumerate(config.output):
        if wanted.name not in reached:
            cause = _cause(writers.get(wanted.name), reached)
            yield Problem(f"output[{index}]", f"output '{wanted.name}' for ensemble '{name}' is not written{cause}")


def _reached(inputs: set[str], scheduling: EnsembleScheduling) -> set[str]:
    """Return the tensors that come to be when every step runs as soon as all of its inputs are there."""
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
