"""Batching of arrays, for backends: inputs are concatenated, outputs are split, and `reshape` is applied to both."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from charonia.config.model import ModelConfig
from charonia.core.dtypes import DataType
from charonia.core.errors import internal
from charonia.core.request import InferRequest
from charonia.core.tensor import Array


class TensorPlan:
    """An input or output of the configuration, and how its arrays are reshaped on the way in or out.

    Attributes:
        source: Dimensions of the arrays before, without the batch; -1 for variable ones.
        target: Dimensions after; None for the same.
    """

    __slots__ = ("datatype", "name", "source", "target")

    def __init__(
        self, name: str, datatype: DataType | None, source: tuple[int, ...], target: tuple[int, ...] | None
    ) -> None:
        if datatype is None:
            raise ValueError(f"tensor {name!r} has no data type: the configuration was not validated")
        self.name = name
        self.datatype: DataType = datatype
        self.source = source
        self.target = target

    def reshape(self, array: Array, is_batched: bool) -> Array:
        """Return the array in the target dimensions; variable dimensions keep their order.

        Raises:
            ServingError: INTERNAL when the array does not have the source dimensions.
        """
        if self.target is None:
            return array
        lead = 1 if is_batched else 0
        shape = array.shape[lead:]
        if len(shape) != len(self.source) or any(dim not in (-1, n) for dim, n in zip(self.source, shape, strict=True)):
            batch = ["batch"] if is_batched else []
            raise internal(
                f"'{self.name}': expected an array of shape {[*batch, *self.source]}, got {list(array.shape)}",
                hint="the model's output differs from its configuration",
            )
        variable = iter(n for dim, n in zip(self.source, shape, strict=True) if dim == -1)
        target = (next(variable) if dim == -1 else dim for dim in self.target)
        return array.reshape((*array.shape[:lead], *target))


def input_plans(config: ModelConfig) -> list[TensorPlan]:
    """Return the plan of each input: from `dims` to the model's own shape."""
    return [TensorPlan(i.name, i.data_type, i.dims, i.reshape.shape if i.reshape else None) for i in config.input]


def output_plans(config: ModelConfig) -> list[TensorPlan]:
    """Return the plan of each output: from the model's own shape to `dims`."""
    return [TensorPlan(o.name, o.data_type, o.inner_dims, o.dims if o.reshape else None) for o in config.output]


def batch_sizes(requests: Sequence[InferRequest]) -> list[int]:
    """Return the batch size of each request of a model that batches: the first dimension of its inputs."""
    if len(requests) == 1:
        return [next(iter(requests[0].inputs.values())).shape[0]]
    return [next(iter(request.inputs.values())).shape[0] for request in requests]


def gather(requests: Sequence[InferRequest], name: str) -> Array | None:
    """Return an input of all requests as one array, along the first dimension.

    The array of a single request is not copied. None where the requests leave the input out: all requests of a batch
    have the same inputs.
    """
    if name not in requests[0].inputs:
        return None
    if len(requests) == 1:
        return requests[0].inputs[name].array
    return np.concatenate([request.inputs[name].array for request in requests])


def scatter(name: str, array: Array, sizes: Sequence[int]) -> list[Array]:
    """Return each request's part of an output, as views, in order.

    Raises:
        ServingError: INTERNAL when the output does not have one row for each row of the input.
    """
    total = sum(sizes)
    if array.ndim == 0 or array.shape[0] != total:
        raise internal(
            f"output '{name}': expected {total} rows for a batch of {total}, got an array of shape {list(array.shape)}",
            hint="a model whose rows depend on one another cannot batch: set max_batch_size to 0",
        )
    if len(sizes) == 1:
        return [array]
    if total == len(sizes):
        return [array[index : index + 1] for index in range(total)]
    return [array[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
