"""What is wrong with the warm-up samples of a complete configuration."""

from collections import Counter
from collections.abc import Iterator, Sequence

from charonia.config.model import ModelConfig, ModelWarmup, WarmupInput
from charonia.config.problems import Problem
from charonia.config.tensors import dim_problems


def warmup_problems(config: ModelConfig) -> Iterator[Problem]:
    """Yield everything that is wrong with `model_warmup`, sample by sample."""
    names = Counter(sample.name for sample in config.model_warmup)
    for index, sample in enumerate(config.model_warmup):
        path = f"model_warmup[{index}]"
        if not sample.name:
            yield Problem(f"{path}.name", "a warm-up sample must specify 'name'")
        elif names[sample.name] > 1:
            yield Problem(f"{path}.name", f"warm-up sample '{sample.name}' is given more than once")
        if sample.batch_size > max(1, config.max_batch_size):
            message = f"warm-up sample '{sample.name}' must not exceed max_batch_size {config.max_batch_size}"
            yield Problem(f"{path}.batch_size", f"{message}, got {sample.batch_size}")
        yield from _input_problems(sample, path)
        if sample.batch_size and sample.inputs and config.input:
            yield from _fit_problems(config, sample, path)


def _input_problems(sample: ModelWarmup, path: str) -> Iterator[Problem]:
    if not sample.inputs:
        yield Problem(f"{path}.inputs", f"warm-up sample '{sample.name}' must specify 'inputs'")
    for name, given in sample.inputs.items():
        where = f"{path}.inputs[{name}]"
        subject = _subject(sample, name)
        if given.data_type is None:
            yield Problem(f"{where}.data_type", f"{subject} must specify 'data_type'")
        # Warm-up data has one shape: -1 would leave it open.
        yield from dim_problems(given.dims, f"{where}.dims", subject, wildcard=False)
        sources = (given.zero_data, given.random_data, given.input_data_file)
        if sum(source is not None for source in sources) != 1:
            yield Problem(where, f"{subject} must specify one of zero_data, random_data and input_data_file")


def _fit_problems(config: ModelConfig, sample: ModelWarmup, path: str) -> Iterator[Problem]:
    """Yield how a sample does not fit the model's inputs."""
    inputs = {tensor.name: tensor for tensor in config.input}
    internal = _internal_inputs(config)
    for name, given in sample.inputs.items():
        where, subject = f"{path}.inputs[{name}]", _subject(sample, name)
        tensor = inputs.get(name)
        if tensor is None:
            if name not in internal:
                known = ", ".join([*inputs, *sorted(internal)])
                yield Problem(where, f"{subject} is no input of the model, which has {known}")
        elif given.data_type is not None and given.data_type is not tensor.data_type:
            expected = tensor.data_type.config if tensor.data_type is not None else "another"
            yield Problem(f"{where}.data_type", f"{subject} must be {expected}, got {given.data_type.config}")
        elif not _fits(given, tensor.dims):
            message = f"{subject} must have dims {list(tensor.dims)}, got {list(given.dims)}"
            yield Problem(f"{where}.dims", message)
    missing = [name for name, tensor in inputs.items() if not tensor.optional and name not in sample.inputs]
    if missing:
        names = ", ".join(f"'{name}'" for name in missing)
        yield Problem(f"{path}.inputs", f"warm-up sample '{sample.name}' lacks input {names}")


def _internal_inputs(config: ModelConfig) -> set[str]:
    """Return inputs that the scheduler fills in for a client's request, and a sample has to bring itself."""
    sequences = config.sequence_batching
    if sequences is None:
        return set()
    return {c.name for c in sequences.control_input} | {state.input_name for state in sequences.state}


def _fits(given: WarmupInput, dims: Sequence[int]) -> bool:
    return len(given.dims) == len(dims) and all(d in (-1, g) for d, g in zip(dims, given.dims, strict=True))


def _subject(sample: ModelWarmup, name: str) -> str:
    return f"warm-up input '{name}' of sample '{sample.name}'"
