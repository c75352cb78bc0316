"""Padding: requests of different shapes are padded to share a batch, and their outputs are cut. Pure.

The variable dimensions of an input are padded at their end, to the longest in the batch or to the next declared size
(bucket). A mask and the lengths tell the model which elements are not padding. An output is cut to the length of its
request.

Shapes start with the batch dimension; dimensions are counted without it.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from charonia.core.dtypes import DataType
from charonia.core.errors import internal
from charonia.core.tensor import Array, Tensor

Sizes = tuple[int, ...]
"""A size for each variable dimension of an input."""


@dataclass(frozen=True, slots=True)
class Companion:
    """An input that is computed from the lengths of another."""

    name: str
    datatype: DataType


@dataclass(frozen=True, slots=True)
class PaddedInput:
    """An input that is padded.

    Attributes:
        name: Input name.
        dims: Its variable dimensions, at least one, ascending.
        value: The padding value: a number, a boolean, or bytes.
        buckets: Sizes to pad to, ascending; longer ones keep their size. Empty for the longest in the batch.
        mask: 1 for elements of the request and 0 for padding, in the shape of the variable dimensions.
        length: The lengths of the variable dimensions.
    """

    name: str
    dims: tuple[int, ...]
    value: float | bytes = 0
    buckets: tuple[int, ...] = ()
    mask: Companion | None = None
    length: Companion | None = None


@dataclass(frozen=True, slots=True)
class CutOutput:
    """An output that is cut.

    Attributes:
        name: Output name.
        source: The padded input whose lengths apply.
        dims: The dimensions to cut.
        positions: For each of them, which of the source's variable dimensions it follows: an index into `dims` there.
        stride: Elements of the source for each element of the output, rounded up.
    """

    name: str
    source: str
    dims: tuple[int, ...]
    positions: tuple[int, ...]
    stride: int = 1


@dataclass(frozen=True, slots=True)
class PaddingPlan:
    """The inputs to pad and the outputs to cut."""

    inputs: tuple[PaddedInput, ...]
    outputs: tuple[CutOutput, ...] = ()

    @property
    def companions(self) -> frozenset[str]:
        """Names of the inputs that are computed if a request does not include them."""
        found = [companion for padded in self.inputs for companion in (padded.mask, padded.length)]
        return frozenset(companion.name for companion in found if companion is not None)

    @property
    def free(self) -> frozenset[str]:
        return frozenset(padded.name for padded in self.inputs) | self.companions


Lengths = dict[str, Sizes]
"""The lengths of one request's padded inputs, by name."""


def padded_size(longest: int, buckets: Sequence[int]) -> int:
    """Return the size to pad to."""
    index = bisect_left(buckets, longest)
    return buckets[index] if index < len(buckets) else longest


def pad(array: Array, sizes: Mapping[int, int], value: float | bytes) -> Array:
    """Return an array padded to these sizes; the array itself if it already has them.

    Args:
        array: With the batch dimension.
        sizes: New size by dimension, counted without the batch; none smaller than it is.
        value: The padding value.
    """
    shape = list(array.shape)
    for dim, size in sizes.items():
        shape[dim + 1] = size
    if tuple(shape) == array.shape:
        return array
    padded = np.full(shape, value, array.dtype)
    padded[tuple(slice(size) for size in array.shape)] = array
    return padded


class PaddedSize:
    """How much memory an input takes once the requests of a batch are padded; 8 bytes for each string."""

    __slots__ = ("_longest", "_padded", "_rows")

    def __init__(self, padded: PaddedInput) -> None:
        self._padded = padded
        self._longest = [0] * len(padded.dims)
        self._rows = 0

    def add(self, array: Array) -> int:
        """Add a request's array and return the total bytes."""
        shape = list(array.shape)
        shape[0] = self._rows = self._rows + shape[0]
        for index, dim in enumerate(self._padded.dims):
            self._longest[index] = max(self._longest[index], shape[dim + 1])
            shape[dim + 1] = padded_size(self._longest[index], self._padded.buckets)
        elements: int = prod(shape)
        return elements * array.itemsize


def pad_batch(
    plan: PaddingPlan, batch: Sequence[Mapping[str, Tensor]]
) -> tuple[list[dict[str, Tensor]], list[Lengths]]:
    """Return the padded inputs of each request, and their original lengths.

    Args:
        plan: The padding plan.
        batch: Inputs of each request by name, at least one request; an input is in all of them or in none.
    """
    inputs = [dict(tensors) for tensors in batch]
    lengths: list[Lengths] = [{} for _ in batch]
    for padded in plan.inputs:
        if padded.name not in batch[0]:
            continue
        for tensors, found in zip(inputs, lengths, strict=True):
            shape = tensors[padded.name].array.shape
            found[padded.name] = tuple(shape[dim + 1] for dim in padded.dims)
        longest = map(max, zip(*(found[padded.name] for found in lengths), strict=True))
        sizes = tuple(padded_size(size, padded.buckets) for size in longest)
        for tensors, found in zip(inputs, lengths, strict=True):
            given = tensors[padded.name]
            array = pad(given.array, dict(zip(padded.dims, sizes, strict=True)), padded.value)
            tensors[padded.name] = Tensor(given.name, given.datatype, array)
            _add_companions(padded, tensors, found[padded.name], sizes, array.shape[0])
    return inputs, lengths


def _add_companions(
    padded: PaddedInput, tensors: dict[str, Tensor], real: Sizes, sizes: Sizes, batch_size: int
) -> None:
    mask, length = padded.mask, padded.length
    if mask is not None:
        own = tensors.get(mask.name)
        array: Array = own.array if own is not None else np.ones((batch_size, *real), mask.datatype.numpy)
        tensors[mask.name] = Tensor(mask.name, mask.datatype, pad(array, dict(enumerate(sizes)), 0))
    if length is not None and length.name not in tensors:
        rows = np.tile(np.array(real, length.datatype.numpy), (batch_size, 1))
        tensors[length.name] = Tensor(length.name, length.datatype, rows)


def cut(plan: PaddingPlan, lengths: Lengths, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs of one request, cut to its lengths.

    Args:
        plan: The padding plan.
        lengths: The request's lengths.
        tensors: Its outputs from the model.

    Raises:
        ServingError: INTERNAL: an output is shorter than it should be.
    """
    outputs = {output.name: output for output in plan.outputs}
    return [
        _cut_one(outputs[tensor.name], lengths[outputs[tensor.name].source], tensor)
        if tensor.name in outputs and outputs[tensor.name].source in lengths
        else tensor
        for tensor in tensors
    ]


def _cut_one(output: CutOutput, real: Sizes, tensor: Tensor) -> Tensor:
    slices = [slice(None)] * tensor.array.ndim
    for dim, position in zip(output.dims, output.positions, strict=True):
        size = -(-real[position] // output.stride)
        if dim + 1 >= tensor.array.ndim or tensor.array.shape[dim + 1] < size:
            raise internal(
                f"output '{output.name}': expected at least {size} in dimension {dim}, to be cut to that, got an array "
                f"of shape {list(tensor.array.shape)}"
            )
        slices[dim + 1] = slice(size)
    return Tensor(tensor.name, tensor.datatype, tensor.array[tuple(slices)])
