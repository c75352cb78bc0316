"""What the measuring process and those that send load tell each other, pickled over a socket pair."""

from dataclasses import dataclass

from charonia.tools.perf.api import InputSource, RunSettings
from charonia.tools.perf.shared_memory import SharedLayout
from charonia.tools.results.records import LoadLevel


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """First message to a process.

    Attributes:
        settings: All of the run.
        source: Its input data.
        process: Number of the process, from 0.
        process_count: How many there are.
        layout: Where tensors lie in shared memory, None where they travel in the messages.
    """

    settings: RunSettings
    source: InputSource
    process: int
    process_count: int
    layout: SharedLayout | None = None


@dataclass(frozen=True, slots=True)
class Begin:
    """Get ready for a load: the answer is `WorkerReady`, and `Go` starts it.

    Attributes:
        level: The load of all processes together.
        request_count: Requests of all processes together; 0 for no end.
    """

    level: LoadLevel
    request_count: int = 0


@dataclass(frozen=True, slots=True)
class Go:
    """Start the load that was prepared.

    Attributes:
        begin_ns: Monotonic time of its begin.
    """

    begin_ns: int


@dataclass(frozen=True, slots=True)
class End:
    """Stop the load, wait for what is in flight, and say so with a last `Chunk`.

    Attributes:
        wait_s: How long to wait for answers; what is still in flight then is given up.
    """

    wait_s: float


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A process is ready to begin, its connections are made."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A process cannot go on.

    Attributes:
        code: Name of the error's code.
        message: What went wrong.
        hint: What to do about it.
    """

    code: str
    message: str
    hint: str = ""
