"""Loads one model version: backend, instances, scheduler, runner; and takes it down again."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from charonia.backends.api import LoadedModel, Placement, SelfChecking, SupervisedModel
from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig
from charonia.core.calls import Reply, Ticket
from charonia.core.errors import ServingError
from charonia.core.request import InferRequest
from charonia.engine.backends import Backends
from charonia.engine.clock import now_ns
from charonia.engine.configure import model_files
from charonia.engine.cores import share
from charonia.engine.lanes import AsyncLane, BlockingLane, make_lane
from charonia.engine.runner import ModelRunner
from charonia.engine.schedulers import make_scheduler
from charonia.repository.labels import read_labels
from charonia.repository.scan import ModelFolder
from charonia.stats.meter import Meter
from charonia.stats.model import WorkerState


class Runner(Protocol):
    """What runs the requests of one loaded version: a `ModelRunner` or an `EnsembleRunner`."""

    config: ModelConfig
    version: str
    meter: Meter

    @property
    def pending(self) -> int | None:
        """Number of requests that wait for an instance, None where there are none to wait for."""
        ...

    @property
    def in_flight(self) -> int:
        """Number of requests that are not answered."""
        ...

    def submit(self, request: InferRequest, reply: Reply) -> Ticket:
        """Take in a request; every outcome goes to `reply`."""
        ...

    async def drain(self) -> None:
        """Stop taking requests; return when every request in flight has been answered."""
        ...

    async def aclose(self) -> None:
        """Give back everything; to be called when drained."""
        ...

    def abandon(self, error: ServingError) -> None:
        """Answer everything in flight with `error`."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """A model version that answers.

    Attributes:
        runner: What runs its requests.
        model: The model in memory, None for an ensemble.
        labels: Class labels by output.
    """

    runner: Runner
    model: LoadedModel | None
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def workers(self) -> list[WorkerState]:
        """Return how its worker processes do; nothing for a model that computes in the server."""
        return self.model.workers() if isinstance(self.model, SupervisedModel) else []

    @property
    def problem(self) -> str:
        """What is wrong with its workers, "" while all are ready."""
        return "; ".join(f"instance '{w.instance}': {w.problem}" for w in self.workers() if w.problem)

    @property
    def is_down(self) -> bool:
        """Whether none of its workers is ready."""
        workers = self.workers()
        return bool(workers) and all(worker.problem for worker in workers)

    async def is_ready(self) -> bool:
        """Return whether the model says that it is ready; True for one that says nothing."""
        return not isinstance(self.model, SelfChecking) or await self.model.is_ready()

    async def retire(self) -> None:
        """Answer what is in flight, then give back everything."""
        await self.runner.drain()
        await self.runner.aclose()
        if self.model is not None:
            await self.model.aclose()


def placements(config: ModelConfig, cores: int) -> list[Placement]:
    """Return every instance of a complete configuration, with its share of the cores.

    Args:
        config: A normalised configuration: kinds are decided, groups named.
        cores: Cores that this process may use.
    """
    on_cpu = sum(g.count for g in config.instance_group if g.kind is not InstanceKind.KIND_GPU)
    threads = share(cores, max(1, on_cpu))
    placed = []
    for group in config.instance_group:
        devices = group.gpus if group.kind is InstanceKind.KIND_GPU else (0,)
        index = 0
        for device in devices:
            for _ in range(group.count):
                placed.append(Placement(f"{group.name}_{index}", group.kind, device, threads))
                index += 1
    return placed


async def load_version(
    folder: ModelFolder, version: int, config: ModelConfig, *, backends: Backends, cores: int
) -> LoadedVersion:
    """Load a version of a model; nothing is left behind when that fails.

    Raises:
        ServingError: With the reason.
    """
    started = now_ns()
    loop = asyncio.get_running_loop()
    labels = await asyncio.to_thread(read_labels, folder, config)
    backend = await backends.get(config.backend, config.name)
    model = await backend.load(model_files(folder, version), config, backends.settings(config.backend))
    lanes: list[BlockingLane | AsyncLane] = []
    try:
        placed = placements(config, cores)
        made = await asyncio.gather(*(model.create_instance(p) for p in placed), return_exceptions=True)
        for instance, placement in zip(made, placed, strict=True):
            if not isinstance(instance, BaseException):
                lanes.append(make_lane(instance, placement, loop, backends.busy_poll))
        for instance in made:
            if isinstance(instance, BaseException):
                raise instance
    except BaseException:
        for lane in lanes:
            await lane.aclose()
        await model.aclose()
        raise
    runner = ModelRunner(
        config,
        str(version),
        scheduler=make_scheduler(config),
        lanes=lanes,
        labels=labels,
        loop=loop,
        calls=backends.calls,
        busy_poll=backends.busy_poll,
    )
    runner.meter.load_seconds = (now_ns() - started) / 1e9
    runner.meter.statistics.memory = model.memory()
    return LoadedVersion(runner, model, labels)
