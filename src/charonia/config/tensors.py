"""Checks of the inputs and outputs of a configuration, and of its batch inputs and batch outputs."""

from collections import Counter
from collections.abc import Iterator, Sequence, Set

from charonia.config.backends import record_of
from charonia.config.kinds import Format
from charonia.config.model import BatchInput, BatchOutput, ModelConfig, ModelInput, ModelOutput
from charonia.config.problems import Problem
from charonia.core.dtypes import DataType

WILDCARD = -1
"""A dimension of any size."""

_IMAGE_DIMS = 3


def tensor_problems(config: ModelConfig) -> list[Problem]:
    """Return all problems of `input`, `output`, `batch_input` and `batch_output`."""
    problems: list[Problem] = []
    sides: dict[str, Sequence[ModelInput | ModelOutput]] = {"input": config.input, "output": config.output}
    for kind, tensors in sides.items():
        names = Counter(tensor.name for tensor in tensors)
        for index, tensor in enumerate(tensors):
            path = f"{kind}[{index}]"
            problems += _io_problems(config, tensor, kind, path)
            if tensor.name and names[tensor.name] > 1:
                problems.append(Problem(f"{path}.name", f"model {kind} '{tensor.name}' is given more than once"))
    for index, tensor in enumerate(config.input):
        problems += _input_problems(config, tensor, f"input[{index}]")
    inputs = {tensor.name for tensor in config.input}
    outputs = {output.name for output in config.output}
    for index, computed in enumerate(config.batch_input):
        problems += _batch_input_problems(computed, f"batch_input[{index}]", inputs)
    targets = Counter(target for scattered in config.batch_output for target in scattered.target_name)
    for index, scattered in enumerate(config.batch_output):
        problems += _batch_output_problems(scattered, f"batch_output[{index}]", inputs, outputs, targets)
    return problems


def dim_problems(
    dims: Sequence[int], path: str, subject: str, *, word: str = "dimension", wildcard: bool = True
) -> Iterator[Problem]:
    """Yield a problem for every size that is neither positive nor, with `wildcard`, -1 for "variable".

    Args:
        dims: The sizes.
        path: Path of the list.
        subject: Their owner, the subject of the sentence.
        word: The word for a size.
        wildcard: Whether -1 is allowed.
    """
    allowed = "integer >= 1, or -1 to indicate a variable-size dimension" if wildcard else "integer >= 1"
    for index, dim in enumerate(dims):
        if dim < 1 and not (wildcard and dim == WILDCARD):
            yield Problem(f"{path}[{index}]", f"{subject} {word} must be {allowed}, got {dim}")


def _io_problems(config: ModelConfig, tensor: ModelInput | ModelOutput, kind: str, path: str) -> Iterator[Problem]:
    subject = f"model {kind} '{tensor.name}'" if tensor.name else f"model {kind}"
    model = config.name
    if not tensor.name:
        yield Problem(f"{path}.name", f"{subject} must specify 'name' for {model}")
    if tensor.data_type is None:
        yield Problem(f"{path}.data_type", f"{subject} must specify 'data_type' for {model}")
    if not tensor.dims:
        yield Problem(f"{path}.dims", f"{subject} must specify 'dims' for {model}")
    unfit = list(dim_problems(tensor.dims, f"{path}.dims", subject))
    if tensor.reshape is not None:
        shape = tensor.reshape.shape
        unfit += dim_problems(shape, f"{path}.reshape.shape", subject, word="reshape dimensions")
        # Some libraries have tensors without dimensions; other backends expect an array.
        if not shape and config.max_batch_size == 0 and not record_of(config.backend).scalars:
            message = f"{subject} cannot have empty reshape for non-batching model as scalar tensors are not supported"
            yield Problem(f"{path}.reshape", f"{message} for {model}")
        elif not unfit and tensor.dims:
            mismatch = _reshape_mismatch(tensor.dims, shape)
            if mismatch:
                message = f"{subject} has different {mismatch} for dims and reshape for {model}"
                yield Problem(f"{path}.reshape", f"{message}: {list(tensor.dims)} and {list(shape)}")
    yield from unfit
    if not record_of(config.backend).plans:
        if tensor.is_shape_tensor:
            yield Problem(f"{path}.is_shape_tensor", f"{subject}: shape tensors are only supported for TensorRT models")
        if tensor.is_non_linear_format_io:
            message = f"{subject}: non-linear formats are only supported for TensorRT models"
            yield Problem(f"{path}.is_non_linear_format_io", message)


def _reshape_mismatch(dims: Sequence[int], shape: Sequence[int]) -> str:
    """Return what differs between two shapes of one tensor, or "" if they hold the same elements.

    Variable dimensions correspond in order, so the dimensions between them must have the same size on both sides.
    """
    if dims.count(WILDCARD) != shape.count(WILDCARD):
        return "number of variable-size dimensions"
    return "" if _fixed_sizes(dims) == _fixed_sizes(shape) else "size"


def _fixed_sizes(shape: Sequence[int]) -> list[int]:
    """Return the product of the fixed dimensions before, between and after the variable ones."""
    sizes = [1]
    for dim in shape:
        if dim == WILDCARD:
            sizes.append(1)
        else:
            sizes[-1] *= dim
    return sizes


def _input_problems(config: ModelConfig, tensor: ModelInput, path: str) -> Iterator[Problem]:
    if tensor.format is not Format.FORMAT_NONE and len(tensor.dims) != _IMAGE_DIMS:
        message = f"model input '{tensor.name}' NHWC/NCHW require 3 dims for {config.name}, got {list(tensor.dims)}"
        yield Problem(f"{path}.format", message)
    if tensor.allow_ragged_batch and config.max_batch_size == 0:
        message = (
            f"model input '{tensor.name}' allows a ragged batch, but {config.name} does not batch: max_batch_size is 0"
        )
        yield Problem(f"{path}.allow_ragged_batch", message)


def _batch_input_problems(computed: BatchInput, path: str, inputs: Set[str]) -> Iterator[Problem]:
    kind = computed.kind.name
    yield from _source_problems(inputs, computed.source_input, f"batch input kind '{kind}'", f"{path}.source_input")
    if not computed.target_name:
        yield Problem(f"{path}.target_name", f"batch input kind '{kind}' must specify 'target_name'")
    if computed.data_type not in (DataType.INT32, DataType.FP32):
        given = computed.data_type.config if computed.data_type else "none"
        message = f"batch input kind '{kind}' must have data_type TYPE_INT32 or TYPE_FP32, got {given}"
        yield Problem(f"{path}.data_type", message)


def _batch_output_problems(
    scattered: BatchOutput, path: str, inputs: Set[str], outputs: Set[str], targets: Counter[str]
) -> Iterator[Problem]:
    kind = scattered.kind.name
    yield from _source_problems(inputs, scattered.source_input, f"batch output kind '{kind}'", f"{path}.source_input")
    if not scattered.target_name:
        yield Problem(f"{path}.target_name", f"batch output kind '{kind}' must specify 'target_name'")
    for index, target in enumerate(scattered.target_name):
        where = f"{path}.target_name[{index}]"
        if target not in outputs:
            yield Problem(where, f"unknown target output name '{target}'")
        if targets[target] > 1:
            yield Problem(where, f"target output name '{target}' can only be specified once")


def _source_problems(inputs: Set[str], sources: Sequence[str], subject: str, path: str) -> Iterator[Problem]:
    if len(sources) != 1:
        yield Problem(path, f"{subject} expects 1 source input, got {len(sources)}")
    for index, source in enumerate(sources):
        if source not in inputs:
            yield Problem(f"{path}[{index}]", f"unknown source input name '{source}'")
