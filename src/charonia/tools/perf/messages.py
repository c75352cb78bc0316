"""The messages between the measuring process and its workers, pickled over a socket pair."""

from dataclasses import dataclass

from charonia.tools.perf.api import InputSource, RunSettings
from charonia.tools.perf.shared_memory import SharedLayout
from charonia.tools.results.records import LoadLevel


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """First message to a worker.

    Attributes:
        settings: The run.
        source: Its input data.
        process: Number of the worker, from 0.
        process_count: Number of workers.
        layout: Locations of tensors in shared memory, None if requests contain them.
    """

    settings: RunSettings
    source: InputSource
    process: int
    process_count: int
    layout: SharedLayout | None = None


@dataclass(frozen=True, slots=True)
class Begin:
    """Prepare a load: the reply is `WorkerReady`, and `Go` starts it.

    Attributes:
        level: The load of all workers together.
        request_count: Requests of all workers together; 0 for no limit.
    """

    level: LoadLevel
    request_count: int = 0


@dataclass(frozen=True, slots=True)
class Go:
    """Start the prepared load.

    Attributes:
        begin_ns: Monotonic time of its start.
    """

    begin_ns: int


@dataclass(frozen=True, slots=True)
class End:
    """Stop the load, wait for requests in flight, and send a last `Chunk`.

    Attributes:
        wait_s: Time to wait for answers; requests still in flight are then cancelled.
    """

    wait_s: float


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker has opened its connections and is ready to start."""


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker failed.

    Attributes:
        code: Name of the error's code.
        message: The error.
        hint: What to do about it.
    """

    code: str
    message: str
    hint: str = ""
