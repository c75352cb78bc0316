"""Warm-up: every instance runs the samples of the configuration on its own executor before it gets a request.

Warm-up runs bypass the scheduler and its statistics. An `AsyncInstance` whose worker may be restarted keeps the
samples, and runs them again before the new worker gets requests.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from charonia.config.model import ModelConfig, ModelWarmup, WarmupInput
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, internal
from charonia.core.raw_data import from_file, zeros
from charonia.core.request import CallFrame, InferRequest
from charonia.core.tensor import Array, Tensor
from charonia.server.backends.api import Execution, Result
from charonia.server.execution.executor import Executor

_log = logging.getLogger(__name__)

RANDOM_SEED = 20_260
"""Random data is the same at every load, so that a load that works once works again."""


@dataclass(frozen=True, slots=True)
class WarmupSample:
    """A batch that every instance runs before it gets requests.

    Attributes:
        name: Its name.
        path: Its path in the configuration.
        requests: The batch: as many equal requests as its batch size, of one batch element each.
        count: How often it is run.
    """

    name: str
    path: str
    requests: tuple[InferRequest, ...]
    count: int


def samples(config: ModelConfig, version: str, files: Mapping[str, bytes]) -> list[WarmupSample]:
    """Return the samples of a complete, validated configuration, without those of batch size 0.

    Raises:
        ServingError: INVALID_ARG, beginning with the path: the content of a file does not fit the input.
    """
    random = np.random.default_rng(RANDOM_SEED)
    found = []
    for index, sample in enumerate(config.model_warmup):
        if sample.batch_size:
            path = f"model_warmup[{index}]"
            inputs = _inputs(config, sample, path, files, random)
            requests = tuple(
                InferRequest(config.name, dict(inputs), model_version=version) for _ in range(sample.batch_size)
            )
            found.append(WarmupSample(sample.name, path, requests, max(1, sample.count)))
    return found


def _inputs(
    config: ModelConfig, sample: ModelWarmup, path: str, files: Mapping[str, bytes], random: np.random.Generator
) -> dict[str, Tensor]:
    lead = (1,) if config.max_batch_size > 0 else ()
    inputs = {}
    for name, given in sample.inputs.items():
        datatype = given.data_type
        if datatype is None:
            raise ValueError(f"warm-up input {name!r} has no data type: the configuration was not validated")
        array = _array(given, datatype, f"{path}.inputs[{name}]", files, random)
        inputs[name] = Tensor(name, datatype, array.reshape(lead + given.dims))
    return inputs


def _array(
    given: WarmupInput, datatype: DataType, path: str, files: Mapping[str, bytes], random: np.random.Generator
) -> Array:
    if given.input_data_file is not None:
        subject = f"{path}.input_data_file: '{given.input_data_file}'"
        return from_file(files[given.input_data_file], datatype, given.dims, subject)
    # Strings are empty: there is no sensible distribution of random ones.
    if given.random_data and datatype is not DataType.BYTES:
        return _random(datatype, prod(given.dims), random)
    return zeros(datatype, (prod(given.dims),))


def _random(datatype: DataType, count: int, random: np.random.Generator) -> Array:
    """Return random values: from 0 to 1 for floating point, over the whole range for integers."""
    if datatype is DataType.BF16:
        bits: Array = (random.random(count, np.float32).view("<u4") >> 16).astype(datatype.numpy)
        return bits
    if datatype.numpy.kind == "f":
        fractions: Array = random.random(count).astype(datatype.numpy)
        return fractions
    if datatype is DataType.BOOL:
        return random.integers(0, 2, count).astype(datatype.numpy)
    integers: Array = np.frombuffer(random.bytes(count * datatype.byte_size), datatype.numpy)
    return integers


class WarmupBatch:
    """A run of a sample on an executor.

    Attributes:
        requests: The requests of the sample.
        done: Set when every request has its last response and the executor is idle: None, or the first error.
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
        """Take a response: only errors matter, the content is ignored."""
        if isinstance(result, ServingError):
            self._error = self._error or result
        if final:
            self._open.discard(index)
            self._look()

    def finish(
        self, input_end_ns: int, output_start_ns: int, error: ServingError | None = None, *, leaves_open: bool = False
    ) -> None:
        """The executor is idle again."""
        if not leaves_open:
            if self._open:
                self._error = self._error or error or internal("the model sent no response")
            self._open.clear()
        self._is_idle = True
        self._look()

    def is_cancelled(self, index: int) -> bool:
        """Return False: warm-up has no callers that could leave."""
        return False

    def frame(self) -> CallFrame:
        """Return the caller of the requests that the model makes while the sample runs."""
        return self._frame

    def _look(self) -> None:
        if self._is_idle and not self._open and not self.done.done():
            self.done.set_result(self._error)


async def warm(
    config: ModelConfig, version: str, executors: Sequence[Executor], samples: Sequence[WarmupSample]
) -> None:
    """Run every sample on every instance: instances in parallel, the samples of one in order.

    Raises:
        ServingError: INVALID_ARG, beginning with the sample's path, when one fails.
    """
    if not samples:
        return
    outcomes = await asyncio.gather(
        *(_warm_instance(config, version, executor, samples) for executor in executors), return_exceptions=True
    )
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    _log.info("warmed '%s' version %s: %d samples on %d instances", config.name, version, len(samples), len(executors))


async def _warm_instance(
    config: ModelConfig, version: str, executor: Executor, samples: Sequence[WarmupSample]
) -> None:
    for sample in samples:
        for _ in range(sample.count):
            batch = WarmupBatch(sample.requests, config.name, version)
            executor.run(batch)
            error = await batch.done
            if error is not None:
                raise ServingError(
                    error.code,
                    f"{sample.path}: failed to run warmup sample '{sample.name}' on instance "
                    f"'{executor.placement.name}': {error.message}",
                    hint=error.hint,
                )
    executor.keep_warm([sample.requests for sample in samples for _ in range(sample.count)])
