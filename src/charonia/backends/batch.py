"""Requests that run together: their tensors as one array, and the one array of an output as each request's part."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from charonia.core.errors import internal
from charonia.core.request import InferRequest
from charonia.core.tensor import Array


def batch_sizes(requests: Sequence[InferRequest]) -> list[int]:
    """Return the batch size of each request of a model that batches: the first dimension of its inputs."""
    if len(requests) == 1:
        return [next(iter(requests[0].inputs.values())).shape[0]]
    return [next(iter(request.inputs.values())).shape[0] for request in requests]


def gather(requests: Sequence[InferRequest], name: str) -> Array | None:
    """Return an input of all requests as one array, along the first dimension.

    The array of a lone request is taken as it is, without a copy. None where the requests leave the input out: those
    that share a batch have the same inputs.
    """
    if name not in requests[0].inputs:
        return None
    if len(requests) == 1:
        return requests[0].inputs[name].array
    return np.concatenate([request.inputs[name].array for request in requests])


def scatter(name: str, array: Array, sizes: Sequence[int]) -> list[Array]:
    """Return each request's part of an output: views, in order.

    Args:
        name: Output name, for errors.
        array: The output of the whole batch.
        sizes: Batch size of each request.

    Raises:
        ServingError: INTERNAL when the model did not answer one row for each that it was given.
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
