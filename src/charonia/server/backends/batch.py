"""Batching of arrays, for backends: inputs are concatenated, outputs are split, and `reshape` is applied to both."""

import copy
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from charonia.config.model import ModelConfig
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, internal
from charonia.core.request import InferRequest
from charonia.core.tensor import Array, Tensor
from charonia.server.backends.api import Outputs, Result


class TensorPlan:
    """An input or output of the configuration, and how its arrays are reshaped on the way in or out.

    Attributes:
        source: Dimensions of the arrays before, without the batch; -1 for variable ones.
        target: Dimensions after; None for the same.
    """

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
        variable = iter([n for dim, n in zip(self.source, shape, strict=True) if dim == -1])
        target = [next(variable) if dim == -1 else dim for dim in self.target]
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
        return list(array.reshape(total, 1, *array.shape[1:]))
    return [array[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def tensors_of(name: str, datatype: DataType, parts: Sequence[Array]) -> list[Tensor]:
    """Return the tensors of an output, one for each request."""
    return [Tensor(name, datatype, part) for part in parts]


class ModelShapes:
    """`reshape` of a configuration: its shapes outside, and those of the model."""

    def __init__(self, config: ModelConfig) -> None:
        self._is_batched = config.max_batch_size > 0
        self._inputs = {plan.name: plan for plan in input_plans(config) if plan.target is not None}
        self._outputs = {plan.name: plan for plan in output_plans(config) if plan.target is not None}

    @staticmethod
    def of(config: ModelConfig) -> "ModelShapes | None":
        """Return the shapes, None for a configuration without `reshape`."""
        shapes = ModelShapes(config)
        return shapes if shapes._inputs or shapes._outputs else None

    def in_model_shapes(self, request: InferRequest) -> InferRequest:
        """Return a request with its inputs in the model's shapes."""
        copied = copy.copy(request)  # the front end still uses the request itself
        copied.inputs = dict(request.inputs)
        for name, plan in self._inputs.items():
            if name in copied.inputs:
                tensor = copied.inputs[name]
                copied.inputs[name] = Tensor(name, tensor.datatype, plan.reshape(tensor.array, self._is_batched))
        return copied

    def answered(self, result: Result) -> Result:
        """Return an answer in the shapes of the configuration."""
        if not isinstance(result, Outputs):
            return result
        tensors = []
        for tensor in result.tensors:
            plan = self._outputs.get(tensor.name)
            if plan is not None and not self._is_as_configured(plan, tensor.shape):
                try:
                    array = plan.reshape(tensor.array, self._is_batched)
                except ServingError as error:
                    return error
                tensor = Tensor(tensor.name, tensor.datatype, array)
            tensors.append(tensor)
        result.tensors = tensors
        return result

    def _is_as_configured(self, plan: TensorPlan, shape: tuple[int, ...]) -> bool:
        shape, dims = shape[1 if self._is_batched else 0 :], plan.target or ()
        return len(shape) == len(dims) and all(dim in (-1, size) for dim, size in zip(dims, shape, strict=True))
