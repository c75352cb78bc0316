"""Instances with padding: requests are padded to one shape, and outputs are cut. See `server.ragged.padding`."""

import copy
from collections.abc import Callable, Sequence
from typing import Protocol

from charonia.core.errors import ServingError
from charonia.core.request import CallFrame, InferRequest
from charonia.server.backends.api import AsyncInstance, BatchSink, BlockingInstance, Execution, Outputs, Result
from charonia.server.ragged.padding import Lengths, PaddedSize, PaddingPlan, cut, pad_batch
from charonia.server.scheduling.strategy import JoinDecision

PADDED_BYTES_MAX = 64 * 1024 * 1024
"""Largest padded input of a batch of several requests, in bytes; a request alone may have any size."""


class QueuedInput(Protocol):
    """A queued request, as the strategy sees it."""

    @property
    def request(self) -> InferRequest: ...


class PaddingStrategy:
    """Keeps a long request out of a batch of short ones. See `server.scheduling.strategy.Strategy`.

    Attributes:
        plan: The padded inputs and outputs.
        bytes_max: Most bytes of a padded input.
        entry_of: Returns the queued request with an id of the scheduler; set when the runner is made.
    """

    def __init__(self, plan: PaddingPlan, bytes_max: int = PADDED_BYTES_MAX) -> None:
        self.plan = plan
        self.bytes_max = bytes_max
        self.entry_of: Callable[[int], QueuedInput] | None = None

    def __call__(self) -> "PaddedGathering":
        return PaddedGathering(self)


class PaddedGathering:
    """One batch. See `server.scheduling.strategy.Gathering`."""

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

    def forget(self, sink: BatchSink) -> None:
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
        self._instance.forget(self._sink)
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
