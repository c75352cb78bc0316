"""The load generator's interface: its settings, its progress events, and how to stop it.

These records are independent of the command line. `charonia.tools.perf.run.run` takes them and returns a `PerfRun`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from charonia.core.request import InferRequest
from charonia.core.tensor import Tensor
from charonia.tools.perf.language.plan import LanguagePlan
from charonia.tools.results.records import LevelResult, LoadLevel, LoadMode, PerfRun, Window
from charonia.wire.transport import WireOptions


class InputSource(Protocol):
    """The requests to send. It can be pickled for the workers; the same arguments give the same data.

    A stream is a list of steps. A sequence runs through one stream from its first step; other load cycles through the
    steps of all streams, stream by stream.
    """

    batch_size: int
    stream_count: int

    def step_count(self, stream: int) -> int:
        """Return how many steps a stream has, at least one."""

    def request(self, stream: int, step: int) -> InferRequest:
        """Return the request of a step, complete except for its id and its place in a sequence.

        It has the model's name and version, inputs with the batch dimension, requested outputs and parameters.
        """

    def expected(self, stream: int, step: int) -> Mapping[str, Tensor] | None:
        """Return the expected outputs of a step by name, None without validation data."""


class Distribution(Enum):
    """Distribution of the gaps between requests of an open loop."""

    CONSTANT = "constant"
    POISSON = "poisson"


class MeasurementMode(Enum):
    """The criterion that ends the measurement of a level."""

    TIME_WINDOWS = "time_windows"
    """Windows of equal length, until the last three agree."""
    COUNT_WINDOWS = "count_windows"
    """Windows of a minimum number of requests, until the last three agree."""
    ADAPTIVE = "adaptive"
    """Until the confidence intervals of throughput and latency are tight enough."""


class SharedMemory(Enum):
    """Where the tensors of requests and responses are."""

    NONE = "none"
    SYSTEM = "system"


@dataclass(frozen=True, slots=True)
class MeasuredTarget:
    """The model to measure, and how to reach it.

    Attributes:
        url: With scheme (`http://`, `https://`, `grpc://`, `grpcs://`), host and port.
        version: Model version, "" for the server's choice.
        transport: Settings of the connections; `transport.timeout_s` is the limit of a request.
    """

    url: str
    model: str
    version: str = ""
    transport: WireOptions = field(default_factory=WireOptions)
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
    """The levels of a run, and their load.

    Attributes:
        end: Last level; infinite if the latency limit ends the sweep.
        step: From one level to the next; the precision of a binary search.
        binary_search: Whether to search for the highest level within the latency limit.
        distribution: Distribution of the gaps between requests of an open loop.
        intervals_ns: Gaps between requests of `LoadMode.INTERVALS`, repeated.
        seed: Seed of all random choices: arrivals, lengths of sequences, streams.
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
    """Settings of sequences.

    Attributes:
        concurrent: Concurrent sequences of an open loop; in a closed loop it is the concurrency.
        length_from_data: Whether a sequence has a request for each step of its stream, instead of `length`.
        variation: Largest difference from `length`, as a share of it (0.2: from 80 % to 120 %).
        serial: Whether requests of a sequence never overlap in an open loop.
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
    """A limit that a good request meets.

    Attributes:
        limit: Longest time in nanoseconds, or lowest rate.
        figure: The limited figure: `latency`, or another field of `LanguageFigures` for a language model.
    """

    text: str
    limit: float
    figure: str = "latency"


@dataclass(frozen=True, slots=True)
class MeasurePlan:
    """When the measurement of a level ends.

    Attributes:
        interval_ms: Length of a window; actual windows are 1.2 times as long, as in perf_analyzer.
        window_request_count: Minimum of requests in a window of `COUNT_WINDOWS`.
        stability: Largest difference among three windows, as a share (0.1: 10 %).
        percentile: Percentile that must stabilise and that limits apply to; None for the mean.
        request_count: Send exactly this number of requests in one window; 0 for windows or `ADAPTIVE`.
        warmup_request_count: Requests before the first window, which are not measured.
        latency_limit_ns: The sweep ends at a level that reaches it; 0 for none.
        precision: Half-width of a confidence interval that `ADAPTIVE` requires, as a share of the value.
        time_max_s: Longest time of a level in `ADAPTIVE`.
        time_min_s: Shortest time of a level in `ADAPTIVE`.
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
    """Observation of the server beside the load.

    Attributes:
        composing: Models (name, version or "") whose statistics are part of the measured model's.
        metrics_url: URL of the metrics page, "" to skip it.
        resources: Whether to sample the server's processes if they are on this machine.
        trace: Trace settings to apply before the load, values by name; empty to leave them unchanged.
    """

    composing: tuple[tuple[str, str], ...] = ()
    metrics_url: str = ""
    metrics_interval_ms: int = 1000
    resources: bool = True
    trace: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings of a run, without its input data.

    Attributes:
        sequences: Settings of sequences, None for a stateless model.
        language: How a language model is measured, None for other models.
        keep_requests: Whether to fill `LevelResult.requests`, which takes memory.
        tolerance: Absolute and relative tolerance of floating-point outputs compared with validation data.
        options: The effective options by name, for the record of the run.
        command: The command line for the record of the run, "" if a program started it.
    """

    target: MeasuredTarget
    load: LoadPlan = LoadPlan()
    measure: MeasurePlan = MeasurePlan()
    sequences: SequencePlan | None = None
    language: LanguagePlan | None = None
    server: ServerPlan = ServerPlan()
    keep_requests: bool = False
    tolerance: float = 0.0
    options: Mapping[str, str] = field(default_factory=dict)
    command: str = ""


@dataclass(frozen=True, slots=True)
class LevelStarted:
    """A level starts.

    Attributes:
        number: Its number in the run, from 1.
        count: Levels of the run, 0 if it depends on the results.
    """

    level: LoadLevel
    number: int
    count: int
    run: PerfRun


@dataclass(frozen=True, slots=True)
class LevelTick:
    """Progress of a level, a few times a second. Rates and latencies are of the time since the last tick.

    Attributes:
        left_s: Upper limit of the time left, None if unknown.
        rate: Inferences per second.
        window: Number of the current window, from 1; 0 before the first.
        window_count_max: Limit of windows, 0 for none.
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
        number: Its number, from 1.
    """

    level: LoadLevel
    number: int
    window: Window
    deviation_ns: float


@dataclass(frozen=True, slots=True)
class LevelDone:
    """A level was measured."""

    result: LevelResult
    run: PerfRun


Event = LevelStarted | LevelTick | WindowDone | LevelDone
Progress = Callable[[Event], None]
"""Receives the events, on the thread of the measurement; it must be fast to not disturb the measurement."""


def silent(event: Event) -> None:
    """Ignore an event."""
