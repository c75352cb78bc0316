"""Warms instances: each runs the model's samples on its own lane before it gets a request.

The runs go past the scheduler and its statistics. Instances of an `AsyncInstance` kind whose worker may come back get
the samples to keep, and run them again before the new worker gets requests.
"""

import asyncio
import logging
from collections.abc import Sequence

from charonia.backends.api import Execution, Result
from charonia.config.model import ModelConfig
from charonia.core.caller import CallFrame
from charonia.core.errors import ServingError, internal
from charonia.core.request import InferRequest
from charonia.engine.lanes import AsyncLane, BlockingLane
from charonia.engine.warmup_data import Sample

_log = logging.getLogger(__name__)


class WarmupBatch:
    """A run of a sample on a lane.

    Attributes:
        requests: What is run.
        done: Set when every request has its last response and the lane is idle: None, or the first error.
    """

    def __init__(self, requests: Sequence[InferRequest], model: str, version: str) -> None:
        self.requests = requests
        self.done: asyncio.Future[ServingError | None] = asyncio.get_running_loop().create_future()
        self._frame = CallFrame(model, version)
        self._open = set(range(len(requests)))
        self._is_idle = False
        self._error: ServingError | None = None

    def executed(self, execution: Execution | ServingError, start_ns: int, end_ns: int) -> None:
        """A blocking instance ran the batch."""
        if isinstance(execution, ServingError):
            self.finish(start_ns, end_ns, execution)
            return
        for index, result in enumerate(execution.results):
            self.respond(index, result, True)
        self.finish(execution.input_end_ns, execution.output_start_ns)

    def respond(self, index: int, result: Result | None, final: bool) -> None:
        """Take a response: what a model answers is not looked at, unless it is an error."""
        if isinstance(result, ServingError):
            self._error = self._error or result
        if final:
            self._open.discard(index)
            self._look()

    def finish(
        self, input_end_ns: int, output_start_ns: int, error: ServingError | None = None, *, leaves_open: bool = False
    ) -> None:
        """The lane is idle again."""
        if not leaves_open:
            if self._open:
                self._error = self._error or error or internal("the model sent no response")
            self._open.clear()
        self._is_idle = True
        self._look()

    def is_cancelled(self, index: int) -> bool:
        """Nobody leaves."""
        return False

    def frame(self) -> CallFrame:
        """Return who makes requests while the sample runs."""
        return self._frame

    def _look(self) -> None:
        if self._is_idle and not self._open and not self.done.done():
            self.done.set_result(self._error)


async def warm(
    config: ModelConfig, version: str, lanes: Sequence[BlockingLane | AsyncLane], samples: Sequence[Sample]
) -> None:
    """Run every sample on every lane: lanes at the same time, the samples of one in order.

    Raises:
        ServingError: INVALID_ARG, beginning with the sample's path, when one fails.
    """
    if not samples:
        return
    outcomes = await asyncio.gather(
        *(_warm_lane(config, version, lane, samples) for lane in lanes), return_exceptions=True
    )
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    _log.info("warmed '%s' version %s: %d samples on %d instances", config.name, version, len(samples), len(lanes))


async def _warm_lane(
    config: ModelConfig, version: str, lane: BlockingLane | AsyncLane, samples: Sequence[Sample]
) -> None:
    for sample in samples:
        for _ in range(sample.count):
            batch = WarmupBatch(sample.requests, config.name, version)
            lane.run(batch)
            error = await batch.done
            if error is not None:
                raise ServingError(
                    error.code,
                    f"{sample.path}: failed to run warmup sample '{sample.name}' on instance '{lane.placement.name}': "
                    f"{error.message}",
                    hint=error.hint,
                )
    lane.keep_warm([sample.requests for sample in samples for _ in range(sample.count)])
