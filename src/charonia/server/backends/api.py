"""What the engine asks of a backend, and nothing more.

A `Backend` completes configurations and loads model versions. A loaded version (`LoadedModel`) makes instances. An
instance executes one batch at a time and comes in one of two forms:

- `BlockingInstance`: `execute` computes and returns. The engine gives it a thread of its own, or runs it in place on
  the event loop while measurements show its executions to be very short. For libraries that release the GIL.
- `AsyncInstance`: `start` returns immediately and reports to a `BatchSink` from the event loop's thread. For work that
  happens in another process. A sink takes any number of responses for a request of a decoupled model, also after the
  instance has become idle, so decoupled models need no third form.

The engine never calls a blocking instance with a batch before the last one has finished; an asynchronous one may be
given batches ahead of time and runs them one after the other. The engine never passes a request that breaks the
configuration, and calls `close` only on an idle instance. The conformance suite `charonia.testing.backend_suite` is the
specification in code.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig
from charonia.core.errors import Code, ServingError
from charonia.core.request import CallFrame, InferRequest
from charonia.core.response import Execution as Execution
from charonia.core.response import Outputs as Outputs
from charonia.core.response import Reply, Ticket
from charonia.core.response import Result as Result
from charonia.core.statistics import MemoryUsage, WorkerState
from charonia.server.metrics.custom import CustomMetrics
from charonia.server.metrics.devices import MemoryAccount, PinnedMemory


class Rescheduled(ServingError):  # noqa: N818 # an error only where no scheduler grants it
    """A model with iterative sequences asks to get a request again; from any other model it is an error."""

    def __init__(self) -> None:
        super().__init__(
            Code.INVALID_ARG,
            "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, which needs iterative sequences",
            hint="set sequence_batching { iterative_sequence: true } in its configuration",
        )


@runtime_checkable
class BlockingInstance(Protocol):
    """An instance that computes in the calling thread."""

    def execute(self, requests: Sequence[InferRequest]) -> Execution:
        """Run the requests as one batch.

        Raises:
            ServingError: The whole batch failed. Any other exception is reported as INTERNAL.
        """

    def close(self) -> None:
        """Release all resources. Called once, from any thread, when idle."""


class BatchSink(Protocol):
    """Where an `AsyncInstance` reports one batch. Called on the event loop's thread only."""

    def respond(self, index: int, result: Result | None, final: bool) -> None:
        """Answer request `index` of the batch; before or after `finish`.

        `result` None with `final` says that no (more) responses follow. A model that is not decoupled answers once:
        its first response counts, and later ones are ignored. So is every response to a request that is over.
        """

    def finish(
        self, input_end_ns: int, output_start_ns: int, error: ServingError | None = None, *, leaves_open: bool = False
    ) -> None:
        """The instance is idle again. Called once.

        Args:
            input_end_ns: Monotonic time at which the inputs were in place and computing began.
            output_start_ns: Monotonic time at which computing ended and handling of outputs began.
            error: The answer to requests without a final response; None for an INTERNAL error that says so.
            leaves_open: Requests without a final response get no error but stay open: the instance owes each of them
                a final `respond`, even when it fails.
        """

    def is_cancelled(self, index: int) -> bool:
        """Whether the caller of request `index` has gone."""

    def frame(self) -> CallFrame:
        """Return the caller of requests that the model makes while it runs this batch; call it before `finish`.

        Always the same one. From the first call on, the deadlock detector counts the instance as waiting for others.
        """


@runtime_checkable
class AsyncInstance(Protocol):
    """An instance that computes elsewhere."""

    def start(self, requests: Sequence[InferRequest], sink: BatchSink) -> None:
        """Start to run the requests as one batch, and return. Never raises: failures go to the sink."""

    def cancel(self, sink: BatchSink, index: int) -> None:
        """The caller of request `index` of the batch of `sink` has gone; the model may learn of it. Best effort.

        The batch may have finished and left the request open.
        """

    async def aclose(self) -> None:
        """Release all resources."""


@runtime_checkable
class Restartable(Protocol):
    """An `AsyncInstance` whose worker is restarted when it ends."""

    def keep_warm(self, batches: Sequence[Sequence[InferRequest]]) -> None:
        """Have each later worker complete these batches before it gets requests."""

    def when_lost(self, lost: Callable[[], None]) -> None:
        """Call `lost` whenever a worker has ended, with what its model remembered; then its batches fail.

        So do those that it has not begun, which another worker would otherwise run.
        """


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one instance runs.

    Attributes:
        name: Instance name, `<group>_<index>`.
        kind: KIND_CPU, KIND_GPU or KIND_MODEL; AUTO has been resolved.
        device_id: GPU of a KIND_GPU instance, else 0.
        threads: Cores that this instance may use for one execution: the share of the thread budget. At least 1.
        cores: Numbers of the cores that it is bound to, empty for any.
    """

    name: str
    kind: InstanceKind
    device_id: int = 0
    threads: int = 1
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The folders of a model version. A backend reads there and writes nothing."""

    model_dir: Path
    version: int
    version_dir: Path


@dataclass(frozen=True, slots=True)
class Completion:
    """A completed configuration, and a sentence for each thing that was inferred.

    For example "input 'x': FP32 [3, 48, -1], from the graph".
    """

    config: ModelConfig
    notes: tuple[str, ...] = ()


class Models(Protocol):
    """The server's models, for a model that calls others. All methods run on the event loop's thread."""

    def infer(self, request: InferRequest, reply: Reply) -> Ticket:
        """Run a request. A faulty request does not raise: every outcome goes to `reply`."""

    async def model_ready(self, name: str, version: str = "") -> bool:
        """Whether a version of a model is ready, which a model with `is_ready` decides itself.

        Raises:
            ServingError: NOT_FOUND for an unknown model, INVALID_ARG for a version that is not a number.
        """

    def is_loadable(self, name: str) -> bool:
        """Whether a request for this model, not loaded yet, would load it and wait."""

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        """Return the complete configuration in use.

        Raises:
            ServingError: NOT_FOUND, INVALID_ARG, or UNAVAILABLE when the model is not ready.
        """

    async def load_model(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load or reload a model; returns when it is ready.

        Raises:
            ServingError: UNAVAILABLE unless in explicit mode; INVALID_ARG with the reason when the model fails to load.
        """

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        """Start to unload a model.

        Raises:
            ServingError: UNAVAILABLE unless in explicit mode.
        """


class BusyPolling(Protocol):
    """Busy polling, as far as it concerns backends."""

    @property
    def worker_ns(self) -> int:
        """How long a worker process polls for its next batch, after an answer, before it sleeps."""

    def thread_runs(self) -> None:
        """A thread of this process has started to compute: it needs the GIL, which a polling loop would hold."""

    def thread_done(self) -> None:
        """The thread has finished."""


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """Settings of `--backend-config` that apply to a backend: its own and the global ones, as text.

    Attributes:
        default_max_batch_size: What auto-complete writes where batching is possible (`default-max-batch-size`).
        models: The server's models, None where a model cannot call others (tests).
        metrics: Where custom metrics of models go, None where they are not shown (tests).
        busy_poll: Busy polling, None where it is off.
        pinned: Account of the pinned memory of all models, None for the default limit (tests).
        gpu_pools: Where a backend that keeps blocks of a GPU's memory shows their account, by number of the GPU.
    """

    values: Mapping[str, str] = field(default_factory=dict)
    default_max_batch_size: int = 4
    verbose: bool = False
    models: Models | None = None
    metrics: CustomMetrics | None = None
    busy_poll: BusyPolling | None = None
    pinned: PinnedMemory | None = None
    gpu_pools: dict[int, MemoryAccount] = field(default_factory=dict)


class LoadedModel(Protocol):
    """A model version in memory."""

    async def create_instance(self, placement: Placement) -> BlockingInstance | AsyncInstance:
        """Make one more instance. Called on the event loop; blocking work belongs in a thread.

        Raises:
            ServingError: With the reason to show as the model's state.
        """

    def memory(self) -> list[MemoryUsage]:
        """Return the memory that this version takes, as far as it is known."""

    async def aclose(self) -> None:
        """Release all resources; all instances are closed."""


@runtime_checkable
class SupervisedModel(Protocol):
    """A `LoadedModel` whose instances compute in worker processes, which are restarted when they end."""

    def workers(self) -> list[WorkerState]:
        """Return the current state of each instance's worker."""

    def is_failing(self) -> bool:
        """Return whether every worker has failed to start several times in a row. Cheap: health checks ask it."""


@runtime_checkable
class SelfChecking(Protocol):
    """A `LoadedModel` that decides itself whether it is ready."""

    async def is_ready(self) -> bool:
        """Return its decision; never raises, and answers within seconds."""


class Backend(Protocol):
    """Loads and runs models of one kind."""

    name: str

    def uses_gpus(self) -> bool:
        """Whether instances of KIND_AUTO run on GPUs, where there are any."""

    async def complete(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Completion:
        """Fill in what the configuration leaves open from the model itself.

        Raises:
            ServingError: The model cannot be read, or contradicts the configuration.
        """

    async def load(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> LoadedModel:
        """Load a version for a complete, validated configuration.

        Raises:
            ServingError: With the reason to show as the model's state, also for settings that are not supported.
        """

    async def aclose(self) -> None:
        """Release what all models of this backend share. Called once, at shutdown."""
