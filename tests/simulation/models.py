"""Simulated models, whose answers are known: they compute in simulated time, and check the limits of each batch.

A model's OUTPUT[0] is INPUT[0] * 3 + generation * 1000 + version, where the generation is in a file of the version; a
sequence's is the sum of its inputs so far. INPUT[1] is the number of the request, INPUT[3] a fault to commit.
"""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tests.simulation.machine import MACHINE, PROCESS
from tests.simulation.workers import environment

from charonia.config.model import ModelConfig
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, invalid
from charonia.core.request import SEQUENCE_END, SEQUENCE_START, InferRequest
from charonia.core.statistics import MemoryUsage
from charonia.core.tensor import Tensor
from charonia.server.backends.api import (
    BackendSettings,
    BatchSink,
    Completion,
    Execution,
    ModelFiles,
    Outputs,
    Placement,
)
from charonia.server.backends.workers.instance import PythonInstance
from charonia.server.backends.workers.process import WorkerProcess

GENERATION = "generation.txt"
FAILS, RAISES = -1, -2
FAULT = "a fault of the library"
REFUSED = "the model refuses this request"


class Record:
    """What models have done.

    Attributes:
        executed: How often each request was computed.
        started_ns: When it began to be, the last time.
        problems: Broken limits.
        open: Instances that exist.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(f"models {seed}")
        self.executed: Counter[int] = Counter()
        self.started_ns: dict[int, int] = {}
        self.problems: list[str] = []
        self.open: Counter[str] = Counter()


RECORD = Record(0)


def begin(seed: int) -> Record:
    global RECORD
    RECORD = Record(seed)
    return RECORD


class _Work:
    """What instances of a version share."""

    def __init__(self, config: ModelConfig, files: ModelFiles) -> None:
        self.name, self.version = config.name, files.version
        self.size_max = max(config.max_batch_size, 1)
        try:
            text = (files.version_dir / GENERATION).read_text()
        except OSError as error:
            raise invalid(f"model '{config.name}': its file cannot be read: {error.strerror}") from error
        if text.startswith("bad"):
            raise invalid(f"model '{config.name}': the file of generation {text.split()[1]} is damaged")
        self.generation = int(text)
        self.cost_us = int(config.parameters["cost_us"])
        self.is_sequence = config.sequence_batching is not None
        self.is_batched = config.max_batch_size > 0

    def offset(self) -> int:
        return self.generation * 1000 + self.version

    def begin_batch(self, requests: Sequence[InferRequest]) -> float:
        """Count the requests; return how long they take."""
        rows = 0
        for request in requests:
            value = request.inputs["INPUT"].array.reshape(-1, 4)
            rows += len(value)
            RECORD.executed[int(value[0, 1])] += 1
            RECORD.started_ns[int(value[0, 1])] = MACHINE.now_ns
        if rows > self.size_max:
            RECORD.problems.append(f"{self.name}: a batch of {rows} rows, at most {self.size_max} are allowed")
        return self.cost_us * (1 + 0.1 * rows) * (1 + RECORD.chance.random() ** 8 * 20) / 1e6

    def answer(self, request: InferRequest, sums: dict[object, int]) -> Outputs:
        value = request.inputs["INPUT"].array.reshape(-1, 4)
        fault = int(value[0, 3])
        if fault == RAISES:
            raise RuntimeError("a fault of the model")
        if fault == FAILS:
            raise invalid(REFUSED)
        result = value.astype(np.int32)
        result[:, 0] = value[:, 0] * 3
        if self.is_sequence:
            key = request.correlation_id
            if request.inputs["START"].array.reshape(-1)[0]:
                if key in sums and request.flags & SEQUENCE_START == 0:
                    RECORD.problems.append(f"{self.name}: START for a request that does not start sequence {key}")
                sums[key] = 0
            elif key not in sums:
                raise invalid(f"sequence {key} is not known to this instance")
            sums[key] += int(value[0, 0])
            result[:, 0] = sums[key]
            if request.flags & SEQUENCE_END:
                del sums[key]
        else:
            result[:, 0] += np.int32(self.offset())
        return Outputs([Tensor("OUTPUT", DataType.INT32, result if self.is_batched else result.reshape(4))])


class _Instance:
    def __init__(self, work: _Work, name: str) -> None:
        self._work = work
        self._name = f"{PROCESS.get()} {work.name} version {work.version} generation {work.generation} {name}"
        self._is_busy = self._is_closed = False
        self._sums: dict[object, int] = {}
        RECORD.open[self._name] += 1

    def _enter(self) -> None:
        if self._is_busy or self._is_closed:
            RECORD.problems.append(f"{self._name}: runs a batch while {'closed' if self._is_closed else 'busy'}")
        self._is_busy = True

    def close(self) -> None:
        if self._is_closed or self._is_busy:
            RECORD.problems.append(f"{self._name}: closed while {'busy' if self._is_busy else 'closed'}")
        self._is_closed = True
        RECORD.open[self._name] -= 1
        MACHINE.may_fail(f"close of {self._name}", RuntimeError(FAULT))


class Blocking(_Instance):
    """Computes in a thread, or in place."""

    def execute(self, requests: Sequence[InferRequest]) -> Execution:
        self._enter()
        try:
            start = time.monotonic_ns()
            time.sleep(self._work.begin_batch(requests))
            MACHINE.may_fail(f"execution of {self._name}", RuntimeError(FAULT), MemoryError(FAULT))
            results: list[Outputs | Exception] = []
            for request in requests:
                try:
                    results.append(self._work.answer(request, self._sums))
                except RuntimeError:
                    raise
                except Exception as error:
                    results.append(error)
            return Execution(results, start, time.monotonic_ns())  # type: ignore[arg-type]
        finally:
            self._is_busy = False


class Elsewhere(_Instance):
    """Computes beside the event loop; of a decoupled model, INPUT[2] is the number of responses."""

    def __init__(self, work: _Work, name: str, *, is_decoupled: bool) -> None:
        super().__init__(work, name)
        self._is_decoupled = is_decoupled
        self._start_ns = 0
        self._queue: list[tuple[Sequence[InferRequest], BatchSink]] = []
        self._loop = asyncio.get_running_loop()

    def start(self, requests: Sequence[InferRequest], sink: BatchSink) -> None:
        self._queue.append((requests, sink))
        if len(self._queue) == 1:
            self._next()

    def cancel(self, sink: BatchSink, index: int) -> None:
        """Continue: nothing is stopped."""

    async def aclose(self) -> None:
        self.close()

    def _next(self) -> None:
        self._enter()
        requests, _ = self._queue[0]
        self._start_ns = time.monotonic_ns()
        self._loop.call_later(self._work.begin_batch(requests), self._done)

    def _done(self) -> None:
        requests, sink = self._queue[0]  # until its answers are given, which may bring the next batch
        error = None
        for index, request in enumerate(requests):
            try:
                answer = self._work.answer(request, self._sums)
            except RuntimeError as fault:
                error = invalid(str(fault))
                break
            except Exception as fault:
                sink.respond(index, fault, True)  # type: ignore[arg-type]
                continue
            count = int(request.inputs["INPUT"].array.reshape(-1)[2]) if self._is_decoupled else 1
            for _ in range(count):
                sink.respond(index, answer, not self._is_decoupled)
            if self._is_decoupled:
                sink.respond(index, None, True)
        del self._queue[0]
        self._is_busy = False
        sink.finish(self._start_ns, time.monotonic_ns(), error)
        if self._queue and not self._is_busy:
            self._next()


class Worked(PythonInstance):
    """Computes in a worker process."""

    def __init__(self, work: _Work, name: str) -> None:
        sums: dict[object, int] = {}  # those of a worker that has ended are no longer asked for

        def compute(requests: Sequence[InferRequest]) -> tuple[float, list[Outputs | ServingError]]:
            took_s = work.begin_batch(requests)
            results: list[Outputs | ServingError] = []
            for request in requests:
                try:
                    results.append(work.answer(request, sums))
                except (ServingError, RuntimeError) as error:
                    results.append(error if isinstance(error, ServingError) else invalid(str(error)))
            return took_s, results

        started = environment(compute, RECORD.chance)
        super().__init__(
            name,
            lambda take, ended: WorkerProcess(name, environment=started, on_message=take, on_end=ended),
            ("load",),
            output_names=("OUTPUT",),
            start_s_max=10.0,
            execute_s_max=5.0,
        )
        self._counted = f"{PROCESS.get()} {work.name} version {work.version} generation {work.generation} {name}"
        RECORD.open[self._counted] += 1

    async def aclose(self) -> None:
        await super().aclose()
        RECORD.open[self._counted] -= 1
        MACHINE.may_fail(f"close of {self._counted}", RuntimeError(FAULT))


async def _load_for(seconds: float, model: str) -> None:
    """Pass the time of a part of a load, which continues when who has asked for it has gone."""
    MACHINE.may_fail(f"load of {model}", RuntimeError(FAULT), MemoryError(FAULT))
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        if PROCESS.get().startswith("engine"):
            RECORD.problems.append(f"a load of {model} was broken off")
        raise


class _Loaded:
    def __init__(self, config: ModelConfig, work: _Work) -> None:
        self._config, self._work = config, work

    async def create_instance(self, placement: Placement) -> Blocking | Elsewhere | Worked:
        await _load_for(RECORD.chance.random() * 0.2, self._config.name)
        kind = self._config.parameters["kind"]
        if kind == "blocking":
            return Blocking(self._work, placement.name)
        if kind == "worker":
            instance = Worked(self._work, placement.name)
            await instance.open()
            return instance
        return Elsewhere(self._work, placement.name, is_decoupled=self._config.is_decoupled)

    def memory(self) -> list[MemoryUsage]:
        return [MemoryUsage("CPU", 0, 1 << 20)]

    async def aclose(self) -> None:
        """Nothing is shared."""


class SimulatedBackend:
    """The backend `simulated`."""

    name = "simulated"

    def uses_gpus(self) -> bool:
        return False

    async def complete(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Completion:
        return Completion(config)

    async def load(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> _Loaded:
        await _load_for(RECORD.chance.random() * 0.3, config.name)
        return _Loaded(config, await asyncio.to_thread(_Work, config, files))

    async def aclose(self) -> None:
        """Nothing is shared."""


def write_generation(folder: Path, version: int, generation: int, *, is_bad: bool = False) -> None:
    path = folder / str(version) / GENERATION
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"bad {generation}" if is_bad else str(generation))
    os.utime(path, ns=(generation * 10**9, generation * 10**9))
    os.utime(path.parent, ns=(generation * 10**9, generation * 10**9))
