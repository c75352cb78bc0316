"""Applies `reshape` around instances: their models see, and answer in, its shapes. See `server.backends.batch`.

A model may also answer in the shape of `dims`, as with Triton.
"""

import copy
from collections.abc import Sequence

from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError
from charonia.core.request import CallFrame, InferRequest
from charonia.core.tensor import Tensor
from charonia.server.backends.api import AsyncInstance, BatchSink, Outputs, Result
from charonia.server.backends.batch import TensorPlan, input_plans, output_plans


def reshaped(instance: AsyncInstance, config: ModelConfig) -> AsyncInstance:
    """Return the instance, wrapped if the configuration has `reshape`."""
    has_any = any(given.reshape for given in config.input) or any(output.reshape for output in config.output)
    return ReshapedInstance(instance, config) if has_any else instance


class ReshapedInstance:
    """An instance with `reshape` around it."""

    def __init__(self, instance: AsyncInstance, config: ModelConfig) -> None:
        self._instance = instance
        self._is_batched = config.max_batch_size > 0
        self._inputs = {plan.name: plan for plan in input_plans(config) if plan.target is not None}
        self._outputs = {plan.name: plan for plan in output_plans(config) if plan.target is not None}
        self._sinks: dict[BatchSink, ReshapingSink] = {}  # of batches with open requests

    def start(self, requests: Sequence[InferRequest], sink: BatchSink) -> None:
        """Start a batch with its inputs in the model's shapes."""
        mine = self._sinks[sink] = ReshapingSink(self, sink, len(requests))
        self._instance.start([self._twin(request) for request in requests], mine)

    def cancel(self, sink: BatchSink, index: int) -> None:
        """Pass it on while the request is open."""
        mine = self._sinks.get(sink)
        if mine is not None:
            self._instance.cancel(mine, index)
            mine.closed(index)

    def forget(self, sink: BatchSink) -> None:
        self._sinks.pop(sink, None)

    async def aclose(self) -> None:
        await self._instance.aclose()

    def answered(self, result: Result) -> Result:
        """Return an answer in the shapes of the configuration."""
        if isinstance(result, Outputs):
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

    def _twin(self, request: InferRequest) -> InferRequest:
        twin = copy.copy(request)  # the front end still uses the request itself
        twin.inputs = {
            name: Tensor(name, tensor.datatype, self._inputs[name].reshape(tensor.array, self._is_batched))
            if name in self._inputs
            else tensor
            for name, tensor in request.inputs.items()
        }
        return twin


class ReshapingSink:
    """A sink that reshapes responses for another sink."""

    __slots__ = ("_has_finished", "_instance", "_open", "_sink")

    def __init__(self, instance: ReshapedInstance, sink: BatchSink, count: int) -> None:
        self._instance = instance
        self._sink = sink
        self._open = set(range(count))
        self._has_finished = False

    def respond(self, index: int, result: Result | None, final: bool) -> None:
        """Pass on an answer, reshaped."""
        if final:
            self.closed(index)
        self._sink.respond(index, None if result is None else self._instance.answered(result), final)

    def closed(self, index: int) -> None:
        """Note that a request has its last response, or that its caller has gone."""
        self._open.discard(index)
        self._forget_if_over()

    def finish(
        self, input_end_ns: int, output_start_ns: int, error: ServingError | None = None, *, leaves_open: bool = False
    ) -> None:
        """Pass on the end."""
        self._has_finished = True
        if not leaves_open:
            self._open.clear()
        self._forget_if_over()
        self._sink.finish(input_end_ns, output_start_ns, error, leaves_open=leaves_open)

    def is_cancelled(self, index: int) -> bool:
        return self._sink.is_cancelled(index)

    def frame(self) -> CallFrame:
        """Return the caller of the requests that the model makes while it runs the batch."""
        return self._sink.frame()

    def _forget_if_over(self) -> None:
        if self._has_finished and not self._open:
            self._instance.forget(self._sink)
