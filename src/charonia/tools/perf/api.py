"""What a run of the load generator takes, what it tells while it runs, and how it is stopped.

These records know nothing of a command line. `charonia.tools.perf.run.run` takes them and returns a `records.Run`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from charonia.core.request import InferRequest
from charonia.core.tensor import Tensor
from charonia.tools.results.records import LevelResult, LoadLevel, LoadMode, PerfRun, Window
from charonia.wire.transport import WireOptions


class InputSource(Protocol):
    """The requests to send. It can be pickled, as other processes need it; the same arguments give the same data.

    A stream is a list of steps: a sequence plays one stream from its first step on; other load plays the steps of all
    streams, one stream after the other, over and over.

    Attributes:
        batch_size: Items of each request.
        stream_count: Number of streams, at least one.
    """

    batch_size: int
    stream_count: int

    def step_count(self, stream: int) -> int:
        """Return how many steps a stream has, at least one."""
        ...

    def request(self, stream: int, step: int) -> InferRequest:
        """Return the request of a step, with all that it takes but its id and its place in a sequence.

        It has the model's name and version, inputs with the batch dimension, the outputs asked for and the parameters.
        """
        ...

    def expected(self, stream: int, step: int) -> Mapping[str, Tensor] | None:
        """Return the outputs by name that the answer to a step has to hold, None where there is nothing to compare."""
        ...


class Distribution(Enum):
    """How the requests of an open loop are spread over time."""

    CONSTANT = "constant"
    POISSON = "poisson"


class MeasurementMode(Enum):
    """What decides when a level has been measured."""

    TIME_WINDOWS = "time_windows"
    """Windows of equal length until the last three agree."""
    COUNT_WINDOWS = "count_windows"
    """Windows of at least so many requests until the last three agree."""
    ADAPTIVE = "adaptive"
    """Until the confidence intervals of throughput and latency are tight."""


class SharedMemory(Enum):
    """Where tensors are put."""

    NONE = "none"
    SYSTEM = "system"


@dataclass(frozen=True, slots=True)
class MeasuredTarget:
    """What is measured, and how it is reached.

    Attributes:
        url: With scheme (`http://`, `https://`, `grpc://`, `grpcs://`), host and port.
        model: Model name.
        version: Model version, "" for the server's choice.
        wire: Settings of the connections; `wire.timeout_s` is the limit of a request.
        streaming: Whether requests go over ModelStreamInfer (gRPC).
        json_inputs: Whether inputs go as JSON (HTTP).
        json_outputs: Whether outputs come as JSON (HTTP).
        shared_memory: Where tensors are put.
        output_bytes: Room for an output of unknown size in shared memory.
    """

    url: str
    model: str
    version: str = ""
    wire: WireOptions = field(default_factory=WireOptions)
    streaming: bool = False
    json_inputs: bool = False
    json_outputs: bool = False
    shared_memory: SharedMemory = SharedMemory.NONE
    output_bytes: int = 102_400

    @property
    def protocol(self) -> str:
        """`http` or `grpc`, by the scheme."""
        return "grpc" if self.url.startswith("grpc") else "http"


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The levels of a run, and how load is made.

    Attributes:
        mode: What the numbers below say.
        start: First level.
        end: Last level; infinite where the latency limit ends the sweep.
        step: From one level to the next; the precision of a binary search.
        binary_search: Whether the largest level within the latency limit is searched for.
        distribution: How an open loop spreads its requests.
        intervals_ns: Gaps between requests of `LoadMode.INTERVALS`, over and over.
        seed: Of everything that is drawn at random: arrivals, lengths of sequences, streams.
        process_count_max: Most processes that send load.
        request_period: Responses of each request before the next step of `LoadMode.PERIODIC`.
    """

    mode: LoadMode = LoadMode.CONCURRENCY
    start: float = 1.0
    end: float = 1.0
    step: float = 1.0
    binary_search: bool = False
    distribution: Distribution = Distribution.CONSTANT
    intervals_ns: tuple[int, ...] = ()
    seed: int = 0
    process_count_max: int = 4
    request_period: int = 10


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """How sequences are made.

    Attributes:
        concurrent: Sequences that run at a time under an open loop; under a closed one it is the concurrency.
        length: Requests of a sequence.
        length_from_data: Whether a sequence has as many requests as its stream of data has steps, and no `length`.
        variation: Largest difference from `length`, as a share of it (0.2: from 80 % to 120 %).
        first_id: First correlation id.
        id_count: Ids in use, over and over.
        serial: Whether requests of a sequence never overlap under an open loop.
    """

    concurrent: int = 4
    length: int = 20
    length_from_data: bool = False
    variation: float = 0.2
    first_id: int = 1
    id_count: int = 2**32 - 2
    serial: bool = False


@dataclass(frozen=True, slots=True)
class ServiceObjective:
    """A limit that a good request keeps.

    Attributes:
        text: As the user wrote it.
        latency_ns: Longest response time.
    """

    text: str
    latency_ns: int


@dataclass(frozen=True, slots=True)
class MeasurePlan:
    """When a level has been measured.

    Attributes:
        mode: What decides.
        interval_ms: Length of a window; real windows are 1.2 times as long, as in perf_analyzer.
        window_request_count: Requests of a window in `COUNT_WINDOWS`.
        stability: Largest difference among three windows, as a share (0.1: 10 %).
        percentile: Percentile that stabilises and that limits apply to; None for the mean.
        trials_max: Most windows.
        request_count: Send exactly so many requests in a single window; 0 for windows or `ADAPTIVE`.
        warmup_request_count: Requests before the first window that are not measured.
        latency_limit_ns: The sweep ends at a level that reaches it; 0 for none.
        objectives: What makes a request good.
        precision: Half-width that `ADAPTIVE` wants of a confidence interval, as a share of the value.
        confidence: Of the intervals.
        time_max_s: Longest time of a level in `ADAPTIVE`.
        time_min_s: Shortest time of it.
    """

    mode: MeasurementMode = MeasurementMode.TIME_WINDOWS
    interval_ms: int = 5000
    window_request_count: int = 50
    stability: float = 0.1
    percentile: float | None = None
    trials_max: int = 10
    request_count: int = 0
    warmup_request_count: int = 0
    latency_limit_ns: int = 0
    objectives: tuple[ServiceObjective, ...] = ()
    precision: float = 0.05
    confidence: float = 0.95
    time_max_s: float = 30.0
    time_min_s: float = 1.0


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """What is asked of the server beside the load.

    Attributes:
        composing: Models (name, version or "") whose statistics belong to those of the model that is measured.
        metrics_url: The metrics page, "" for not reading it.
        metrics_interval_ms: How often it is read.
        resources: Whether the server's processes are looked at where they are on this machine.
        trace: Settings of tracing that the server gets before the load, values by name; nothing leaves them alone.
    """

    composing: tuple[tuple[str, str], ...] = ()
    metrics_url: str = ""
    metrics_interval_ms: int = 1000
    resources: bool = True
    trace: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class RunSettings:
    """All of a run but its input data.

    Attributes:
        target: What is measured.
        load: The levels.
        measure: When a level has been measured.
        sequences: How sequences are made, None for a model without.
        server: What is asked of the server.
        keep_requests: Whether `LevelResult.requests` is filled; it takes memory.
        tolerance: Of floating-point numbers in answers that are compared with validation data, absolute and relative.
        options: The options in force by name, for the record of the run.
        command: The command line for the record of the run, "" where a program starts it.
    """

    target: MeasuredTarget
    load: LoadPlan = LoadPlan()
    measure: MeasurePlan = MeasurePlan()
    sequences: SequencePlan | None = None
    server: ServerPlan = ServerPlan()
    keep_requests: bool = False
    tolerance: float = 0.0
    options: Mapping[str, str] = field(default_factory=dict)
    command: str = ""


@dataclass(frozen=True, slots=True)
class LevelBegun:
    """A level begins.

    Attributes:
        level: The level.
        number: Its number in the run, from 1.
        count: Levels of the run, 0 where that depends on what is measured.
    """

    level: LoadLevel
    number: int
    count: int


@dataclass(frozen=True, slots=True)
class LevelTick:
    """How a level goes on, a few times a second. Rates and latencies are of the time since the last tick.

    Attributes:
        level: The level.
        elapsed_s: Time since the level began.
        left_s: Time left at most, None where nobody knows.
        rate: Inferences a second.
        p50_ns: Median response time.
        p99_ns: 99th percentile of it.
        in_flight: Requests without an answer.
        error_count: Failures since the level began.
        window: Number of the window that runs, from 1; 0 before the first.
        window_count_max: Most windows, 0 where there is no limit.
    """

    level: LoadLevel
    elapsed_s: float
    left_s: float | None
    rate: float
    p50_ns: int
    p99_ns: int
    in_flight: int
    error_count: int
    window: int
    window_count_max: int


@dataclass(frozen=True, slots=True)
class WindowDone:
    """A window ended.

    Attributes:
        level: The level.
        number: Its number, from 1.
        window: What was measured in it.
        deviation_ns: Sample standard deviation of its response times.
    """

    level: LoadLevel
    number: int
    window: Window
    deviation_ns: float


@dataclass(frozen=True, slots=True)
class LevelDone:
    """A level was measured.

    Attributes:
        result: What was found.
        run: The whole run so far, this level included.
    """

    result: LevelResult
    run: PerfRun


Event = LevelBegun | LevelTick | WindowDone | LevelDone
Progress = Callable[[Event], None]
"""Is told what happens, on the thread that runs the measurement; quick, or it is measured."""


def silent(event: Event) -> None:
    """Take a progress event, and do nothing."""


class StopRequest:
    """A wish to end the run early, with what has been measured. Safe to set from a signal handler and other threads."""

    def __init__(self) -> None:
        self.requested = False

    def request(self) -> None:
        """Ask for the end."""
        self.requested = True
