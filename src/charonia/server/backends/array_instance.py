"""The instance of a library that takes arrays and returns arrays: batching around one call.

What such a library fails on is one request's fault or everyone's, and it does not say whose: a batch that fails is run
again, each request alone.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import repeat

from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError, internal
from charonia.core.request import InferRequest
from charonia.core.tensor import Array, Tensor
from charonia.server.backends.api import Execution, Outputs, Result
from charonia.server.backends.batch import batch_sizes, gather, input_plans, output_plans, scatter


class ArrayInstance(ABC):
    """A `BlockingInstance` whose model is one call, `run`.

    Args:
        config: The complete configuration.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.is_batched = config.max_batch_size > 0
        self.inputs = input_plans(config)
        self.outputs = output_plans(config)
        self.names = tuple(plan.name for plan in self.outputs)
        self._by_name = {plan.name: plan for plan in self.outputs}
        self._is_closed = False

    @abstractmethod
    def run(self, names: Sequence[str], feed: dict[str, Array]) -> Sequence[Array]:
        """Run the model once.

        Args:
            names: The outputs that are asked for.
            feed: Array of each input that is given, in the model's own shape; BYTES as objects of `bytes`.

        Returns:
            The array of each output in `names`, in their order; no later call may change it.

        Raises:
            ServingError: The model failed.
        """

    def execute(self, requests: Sequence[InferRequest]) -> Execution:
        """Run the requests as one batch; if it fails, each one alone, so that a bad request fails alone."""
        if len(requests) == 1 or self.is_batched:
            try:
                return self._execute(requests)
            except ServingError:
                if len(requests) == 1:
                    raise
        start = time.monotonic_ns()
        results = [self._execute_alone(request) for request in requests]
        return Execution(results, start, time.monotonic_ns())

    def close(self) -> None:
        """Run nothing more. A library's own resources are released by the class that holds them."""
        self._is_closed = True

    def feed(self, requests: Sequence[InferRequest]) -> dict[str, Array]:
        """Return the array of each input that the requests give."""
        feed = {}
        for plan in self.inputs:
            array = gather(requests, plan.name)
            if array is not None:
                feed[plan.name] = plan.reshape(array, self.is_batched)
        return feed

    def parts(self, name: str, array: Array, requests: Sequence[InferRequest]) -> list[Array]:
        """Return each request's part of an output, in the configured shape."""
        array = self._by_name[name].reshape(array, self.is_batched)
        return scatter(name, array, batch_sizes(requests)) if self.is_batched else [array]

    def _execute_alone(self, request: InferRequest) -> Result:
        try:
            return self._execute([request]).results[0]
        except ServingError as error:
            return error

    def _execute(self, requests: Sequence[InferRequest]) -> Execution:
        if self._is_closed:
            raise internal("the instance is closed")
        feed = self.feed(requests)
        names = self._wanted(requests)
        input_end_ns = time.monotonic_ns()
        arrays = self.run(names, feed)
        output_start_ns = time.monotonic_ns()
        answers: list[list[Tensor]] = list(map(list, repeat((), len(requests))))
        for name, array in zip(names, arrays, strict=True):
            datatype = self._by_name[name].datatype
            for answer, part in zip(answers, self.parts(name, array, requests), strict=True):
                answer.append(Tensor(name, datatype, part))
        return Execution(list(map(Outputs, answers)), input_end_ns, output_start_ns)

    def _wanted(self, requests: Sequence[InferRequest]) -> tuple[str, ...]:
        """Return the outputs that at least one request asks for; a model need not compute the others."""
        if len(self.names) == 1:
            return self.names
        asked: set[str] = set()
        for request in requests:
            if not request.outputs:
                return self.names
            asked.update(output.name for output in request.outputs)
        return tuple(name for name in self.names if name in asked)
