"""Ragged batches: requests of different shapes as one flat array, and its outputs split again. Pure.

An input with `allow_ragged_batch` reaches the model as one array of one dimension: the elements of all requests, in
order. A `batch_input`, computed from the shapes in the batch, tells the model which elements belong to which request.
An output with a `batch_output` is such an array, too, and is split by the shapes of an input.

Shapes here are shapes of requests, with the batch dimension. Source: Triton's "ragged batching".
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import assert_never

import numpy as np

from charonia.config.complete import Signature, SignatureTensor
from charonia.config.kinds import BatchInputKind
from charonia.config.model import BatchInput, ModelConfig
from charonia.config.problems import Problem
from charonia.core.dtypes import DataType
from charonia.core.errors import internal
from charonia.core.request import InferRequest
from charonia.core.tensor import Array

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ComputedInput:
    """An input that is computed from the shapes of another.

    Attributes:
        names: Inputs of the model that receive it.
        kind: The computed quantity.
        datatype: INT32 or FP32.
        source: The input whose shapes are used.
    """

    names: tuple[str, ...]
    kind: BatchInputKind
    datatype: DataType
    source: str


@dataclass(frozen=True, slots=True)
class RaggedPlan:
    """The ragged inputs and outputs of a configuration.

    Attributes:
        inputs: Inputs whose elements are concatenated.
        computed: Inputs that are computed.
        scattered: By output, the input by whose shapes it is split.
    """

    inputs: frozenset[str]
    computed: tuple[ComputedInput, ...]
    scattered: dict[str, str]

    @property
    def sources(self) -> frozenset[str]:
        return frozenset(computed.source for computed in self.computed) | frozenset(self.scattered.values())

    @property
    def targets(self) -> dict[str, DataType]:
        return {name: computed.datatype for computed in self.computed for name in computed.names}


def ragged_plan(config: ModelConfig) -> RaggedPlan:
    return RaggedPlan(
        frozenset(tensor.name for tensor in config.input if tensor.allow_ragged_batch),
        tuple(_computed(batch_input) for batch_input in config.batch_input),
        {target: output.source_input[0] for output in config.batch_output for target in output.target_name},
    )


def _computed(batch_input: BatchInput) -> ComputedInput:
    datatype = batch_input.data_type
    if datatype is None:
        raise ValueError(f"batch input {batch_input.target_name} has no data type: the configuration was not validated")
    return ComputedInput(batch_input.target_name, batch_input.kind, datatype, batch_input.source_input[0])


def configured_form(plan: RaggedPlan, config: ModelConfig, model: Signature) -> tuple[Signature, list[Problem]]:
    """Return a model's tensors as a configuration without ragged batches would have them.

    Args:
        plan: The plan of the configuration.
        config: The configuration.
        model: The model's tensors; () is the shape of those whose rank is not known.

    Returns:
        The signature without the computed inputs, and what contradicts the plan.
    """
    problems: list[Problem] = []
    own = {tensor.name for tensor in model.inputs}
    for name, datatype in plan.targets.items():
        if name not in own:
            problems.append(Problem("batch_input", f"batch input '{name}' is not an input of the model: {sorted(own)}"))
        elif any(model_input.name == name for model_input in config.input):
            problems.append(Problem("batch_input", f"batch input '{name}' is an input of the configuration, too"))
        for tensor in model.inputs:
            if tensor.name == name and tensor.datatype is not datatype:
                message = f"batch input '{name}' is {datatype.config}, model provides {tensor.datatype.config}"
                problems.append(Problem("batch_input", message))
    dims = {tensor.name: tensor.inner_dims for tensor in (*config.input, *config.output)}

    def unrolled(tensors: Sequence[SignatureTensor], flat: Collection[str], path: str) -> tuple[SignatureTensor, ...]:
        found = []
        for tensor in tensors:
            if tensor.name not in flat:
                found.append(tensor)
                continue
            if tensor.shape not in ((), (-1,)):
                message = (
                    f"'{tensor.name}' is one array of all elements, shape [-1]; model provides {list(tensor.shape)}"
                )
                problems.append(Problem(path, message))
            found.append(replace(tensor, shape=(-1, *dims[tensor.name])))
        return tuple(found)

    inputs = [tensor for tensor in model.inputs if tensor.name not in plan.targets]
    return Signature(
        unrolled(inputs, plan.inputs, "input"), unrolled(model.outputs, plan.scattered, "batch_output")
    ), problems


def gather_flat(requests: Sequence[InferRequest], name: str) -> Array | None:
    """Return an input of all requests as one flat array; None if they omit it."""
    if name not in requests[0].inputs:
        return None
    return np.concatenate([request.inputs[name].array.reshape(-1) for request in requests])


def compute_input(kind: BatchInputKind, shapes: Sequence[Shape], datatype: DataType) -> Array:
    """Return a computed input.

    Args:
        kind: The computed quantity.
        shapes: Shape of the source in each request, at least one; all of the same rank.
        datatype: Datatype of the result.
    """
    counts = [prod(shape) for shape in shapes]
    values: object
    match kind:
        case BatchInputKind.BATCH_ELEMENT_COUNT:
            values = counts
        case BatchInputKind.BATCH_ACCUMULATED_ELEMENT_COUNT:
            values = list(accumulate(counts))
        case BatchInputKind.BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO:
            values = list(accumulate(counts, initial=0))
        case BatchInputKind.BATCH_MAX_ELEMENT_COUNT_AS_SHAPE:
            return np.zeros(max(counts), datatype.numpy)
        case BatchInputKind.BATCH_ITEM_SHAPE:
            return _item_shapes(shapes, datatype)
        case BatchInputKind.BATCH_ITEM_SHAPE_FLATTEN:
            return _item_shapes(shapes, datatype).reshape(-1)
        case _:
            assert_never(kind)
    return np.array(values, datatype.numpy)


def _item_shapes(shapes: Sequence[Shape], datatype: DataType) -> Array:
    """Return a row for each element of the batch: its shape."""
    rows = [shape[1:] for shape in shapes for _ in range(shape[0])]
    return np.array(rows, datatype.numpy).reshape(len(rows), len(shapes[0]) - 1)


def scatter_like(name: str, array: Array, shapes: Sequence[Shape]) -> list[Array]:
    """Return each request's part of an output: views with these shapes, in order.

    Args:
        name: Output name, for errors.
        array: The output of the whole batch.
        shapes: Shape of the source in each request.

    Raises:
        ServingError: INTERNAL: the model returned another number of elements.
    """
    counts = [prod(shape) for shape in shapes]
    if array.size != sum(counts):
        raise internal(
            f"output '{name}': expected {sum(counts)} elements, as many as its source input has in the batch, got an "
            f"array of shape {list(array.shape)}"
        )
    flat = array.reshape(-1)
    ends = accumulate(counts)
    return [flat[end - count : end].reshape(shape) for shape, count, end in zip(shapes, counts, ends, strict=True)]
