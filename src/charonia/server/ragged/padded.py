"""Instances whose requests are padded to one shape, and their outputs cut back. See `server.ragged.padding`."""

import copy
from collections.abc import Callable, Sequence
from typing import Protocol

from charonia.core.caller import CallFrame
from charonia.core.errors import ServingError
from charonia.core.request import InferRequest
from charonia.server.backends.api import AsyncInstance, BatchSink, BlockingInstance, Execution, Outputs, Result
from charonia.server.ragged.padding import Lengths, PaddedSize, PaddingPlan, cut, pad_batch
from charonia.server.scheduling.strategy import JoinDecision

PADDED_BYTES_MAX = 64 * 1024 * 1024
"""Requests join a batch as long as each of its padded inputs takes no more; a request alone may take any size."""


class QueuedInput(Protocol):
    """What the strategy needs of a request in the queue."""

    @property
    def request(self) -> InferRequest:
        """The request."""
        ...


class PaddingStrategy:
    """Keeps one long request from making all others of its batch as large. See `server.scheduling.strategy.Strategy`.

    Attributes:
        plan: What is padded.
        bytes_max: Most bytes of a padded input.
        entry_of: Returns the request with an id of the scheduler; set by whoever submits to that.
    """

    def __init__(self, plan: PaddingPlan, bytes_max: int = PADDED_BYTES_MAX) -> None:
        self.plan = plan
        self.bytes_max = bytes_max
        self.entry_of: Callable[[int], QueuedInput] | None = None

    def __call__(self) -> "PaddedGathering":
        """Begin a batch."""
        return PaddedGathering(self)


class PaddedGathering:
    """One batch. See `server.scheduling.strategy.Gathering`."""

    __slots__ = ("_sizes", "_strategy")

    def __init__(self, strategy: PaddingStrategy) -> None:
        self._strategy = strategy
        self._sizes = {padded.name: PaddedSize(padded) for padded in strategy.plan.inputs}

    def take(self, id: int) -> JoinDecision:
        """Take a request that leaves the batch small enough."""
        if self._strategy.entry_of is None:
            return JoinDecision.FAILED
        inputs = self._strategy.entry_of(id).request.inputs
        sizes = [size.add(inputs[name].array) for name, size in self._sizes.items() if name in inputs]
        return JoinDecision.JOINS if max(sizes, default=0) <= self._strategy.bytes_max else JoinDecision.STAYS_OUT

    def end(self) -> None:
        """Do nothing: it is made anew for each batch."""


class PaddedInstance:
    """A blocking instance with padding around it."""

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
        """Close the instance."""
        self._instance.close()


class PaddedAsyncInstance:
    """An asynchronous instance with padding around it."""

    def __init__(self, instance: AsyncInstance, plan: PaddingPlan) -> None:
        self._instance = instance
        self._plan = plan
        self._sinks: dict[BatchSink, CuttingSink] = {}  # of batches that run

    def start(self, requests: Sequence[InferRequest], sink: BatchSink) -> None:
        """Start the requests as one batch of one shape."""
        padded, lengths = _pad(self._plan, requests)
        cutting = self._sinks[sink] = CuttingSink(self, sink, self._plan, lengths)
        self._instance.start(padded, cutting)

    def cancel(self, sink: BatchSink, index: int) -> None:
        """Pass it on while the batch runs."""
        cutting = self._sinks.get(sink)
        if cutting is not None:
            self._instance.cancel(cutting, index)

    def forget(self, sink: BatchSink) -> None:
        """A batch is over."""
        self._sinks.pop(sink, None)

    async def aclose(self) -> None:
        """Close the instance."""
        await self._instance.aclose()


class CuttingSink:
    """A sink that cuts what goes into another."""

    __slots__ = ("_instance", "_lengths", "_plan", "_sink")

    def __init__(
        self, instance: PaddedAsyncInstance, sink: BatchSink, plan: PaddingPlan, lengths: list[Lengths]
    ) -> None:
        self._instance = instance
        self._sink = sink
        self._plan = plan
        self._lengths = lengths

    def respond(self, index: int, result: Result | None, final: bool) -> None:
        """Pass on an answer, cut."""
        self._sink.respond(index, None if result is None else _cut(self._plan, self._lengths[index], result), final)

    def finish(
        self, input_end_ns: int, output_start_ns: int, error: ServingError | None = None, *, leaves_open: bool = False
    ) -> None:
        """Pass on the end."""
        self._instance.forget(self._sink)
        self._sink.finish(input_end_ns, output_start_ns, error, leaves_open=leaves_open)

    def is_cancelled(self, index: int) -> bool:
        """Whether a request is answered, so that no caller waits for it."""
        return self._sink.is_cancelled(index)

    def frame(self) -> CallFrame:
        """Return what the requests come from that the model makes while it runs the batch."""
        return self._sink.frame()


def pad_instance(instance: BlockingInstance | AsyncInstance, plan: PaddingPlan) -> PaddedInstance | PaddedAsyncInstance:
    """Return an instance with padding around it."""
    if isinstance(instance, BlockingInstance):
        return PaddedInstance(instance, plan)
    return PaddedAsyncInstance(instance, plan)


def _pad(plan: PaddingPlan, requests: Sequence[InferRequest]) -> tuple[list[InferRequest], list[Lengths]]:
    inputs, lengths = pad_batch(plan, [request.inputs for request in requests])
    padded = []
    for request, tensors in zip(requests, inputs, strict=True):
        twin = copy.copy(request)  # the request itself is still the front end's
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
