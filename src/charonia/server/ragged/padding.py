"""Padding: requests of different shapes are padded to share a batch, and their outputs are cut. Pure.

The variable dimensions of an input are padded at their end, to the longest in the batch or to the next declared size
(bucket). A mask and the lengths tell the model which elements are not padding. An output is cut to the length of its
request.

Shapes start with the batch dimension; dimensions are counted without it.
"""

import copy
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np

from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, internal
from charonia.core.request import CallFrame, InferRequest
from charonia.core.tensor import Array, Tensor
from charonia.server.backends.api import AsyncInstance, BatchSink, BlockingInstance, Execution, Outputs, Result
from charonia.server.scheduling.dynamic import JoinDecision

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
    """Return the padded inputs of each request, and their original lengths."""
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
            tensor = tensors[padded.name]
            array = pad(tensor.array, dict(zip(padded.dims, sizes, strict=True)), padded.value)
            tensors[padded.name] = Tensor(tensor.name, tensor.datatype, array)
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


PADDED_BYTES_MAX = 64 * 1024 * 1024
"""Largest padded input of a batch of several requests, in bytes; a request alone may have any size."""


class QueuedInput(Protocol):
    """A queued request, as the strategy sees it."""

    @property
    def request(self) -> InferRequest: ...


class PaddingStrategy:
    """Keeps a long request out of a batch of short ones. See `server.scheduling.dynamic.Strategy`.

    Attributes:
        plan: The padded inputs and outputs.
        bytes_max: Most bytes of a padded input.
        entry_of: Returns the queued request with an id of the scheduler; set when the runner is made.
    """

    def __init__(self, plan: PaddingPlan, bytes_max: int = PADDED_BYTES_MAX) -> None:
        self.plan = plan
        self.bytes_max = bytes_max
        self.entry_of: Callable[[int], QueuedInput] | None = None

    def __call__(self) -> "PaddedBatchBuilder":
        return PaddedBatchBuilder(self)


class PaddedBatchBuilder:
    """One batch. See `server.scheduling.dynamic.BatchBuilder`."""

    __slots__ = ("_sizes", "_strategy")

    def __init__(self, strategy: PaddingStrategy) -> None:
        self._strategy = strategy
        self._sizes = {padded.name: PaddedSize(padded) for padded in strategy.plan.inputs}

    def take(self, id: int) -> JoinDecision:
        """Let a request join if the batch stays small enough."""
        if self._strategy.entry_of is None:
            return JoinDecision.FAILED
        inputs = self._strategy.entry_of(id).request.inputs
        sizes = [size.add(inputs[name].array) for name, size in self._sizes.items() if name in inputs]
        return JoinDecision.JOINS if max(sizes, default=0) <= self._strategy.bytes_max else JoinDecision.STAYS_OUT

    def end(self) -> None:
        """Do nothing: each batch has a separate object."""


class PaddedInstance:
    """A wrapper that adds padding to a blocking instance."""

    def __init__(self, instance: BlockingInstance, plan: PaddingPlan) -> None:
        self._instance = instance
        self._plan = plan

    def execute(self, requests: Sequence[InferRequest]) -> Execution:
        """Run the requests as one batch of one shape."""
        padded, lengths = _pad(self._plan, requests)
        execution = self._instance.execute(padded)
        results = [_cut(self._plan, *pair) for pair in zip(lengths, execution.results, strict=True)]
        return Execution(results, execution.input_end_ns, execution.output_start_ns)

    def close(self) -> None:
        self._instance.close()


class PaddedAsyncInstance:
    """A wrapper that adds padding to an asynchronous instance."""

    def __init__(self, instance: AsyncInstance, plan: PaddingPlan) -> None:
        self._instance = instance
        self._plan = plan
        self._sinks: dict[BatchSink, CuttingSink] = {}  # of running batches

    def start(self, requests: Sequence[InferRequest], sink: BatchSink) -> None:
        """Start the requests as one batch of one shape."""
        padded, lengths = _pad(self._plan, requests)
        cutting = self._sinks[sink] = CuttingSink(self, sink, self._plan, lengths)
        self._instance.start(padded, cutting)

    def cancel(self, sink: BatchSink, index: int) -> None:
        """Forward to the instance while the batch runs."""
        cutting = self._sinks.get(sink)
        if cutting is not None:
            self._instance.cancel(cutting, index)

    def discard(self, sink: BatchSink) -> None:
        self._sinks.pop(sink, None)

    async def aclose(self) -> None:
        await self._instance.aclose()


class CuttingSink:
    """A sink that cuts outputs and passes them to another."""

    __slots__ = ("_instance", "_lengths", "_plan", "_sink")

    def __init__(
        self, instance: PaddedAsyncInstance, sink: BatchSink, plan: PaddingPlan, lengths: list[Lengths]
    ) -> None:
        self._instance = instance
        self._sink = sink
        self._plan = plan
        self._lengths = lengths

    def respond(self, index: int, result: Result | None, final: bool) -> None:
        self._sink.respond(index, None if result is None else _cut(self._plan, self._lengths[index], result), final)

    def finish(
        self, input_end_ns: int, output_start_ns: int, error: ServingError | None = None, *, leaves_open: bool = False
    ) -> None:
        self._instance.discard(self._sink)
        self._sink.finish(input_end_ns, output_start_ns, error, leaves_open=leaves_open)

    def is_cancelled(self, index: int) -> bool:
        return self._sink.is_cancelled(index)

    def frame(self) -> CallFrame:
        """Return the call frame of requests that the model makes while it runs the batch."""
        return self._sink.frame()


def pad_instance(instance: BlockingInstance | AsyncInstance, plan: PaddingPlan) -> PaddedInstance | PaddedAsyncInstance:
    """Return a wrapper that adds padding to an instance."""
    if isinstance(instance, BlockingInstance):
        return PaddedInstance(instance, plan)
    return PaddedAsyncInstance(instance, plan)


def _pad(plan: PaddingPlan, requests: Sequence[InferRequest]) -> tuple[list[InferRequest], list[Lengths]]:
    inputs, lengths = pad_batch(plan, [request.inputs for request in requests])
    padded = []
    for request, tensors in zip(requests, inputs, strict=True):
        twin = copy.copy(request)  # the front end still uses the request itself
        twin.inputs = tensors
        padded.append(twin)
    return padded, lengths


def _cut(plan: PaddingPlan, lengths: Lengths, result: Result) -> Result:
    if isinstance(result, ServingError):
        return result
    try:
        return Outputs(cut(plan, lengths, result.tensors), result.parameters)
    except ServingError as error:
        return error
