"""Records of measurements. `json_form` writes and reads them. Pure.

Durations and times are integers in nanoseconds; times within a level are relative to its start. A "response time" is
measured from the scheduled send time, a "service time" from the actual one: in a closed loop both are the same.
"""

from dataclasses import dataclass, field
from enum import Enum

from charonia.core.latency import LatencyHistogram
from charonia.tools.results.language import LanguageFigures
from charonia.tools.results.server import Gpu, MachineLoad, ModelInfo, Resources, ServerInfo, ServerSide

FORMAT = "charonia-perf"
VERSION = 1
"""Version of the JSON form: incremented when a reader of the old one would misread the new one."""

PERCENTILES = (50.0, 90.0, 95.0, 99.0)
"""Percentiles of every table."""


class LoadMode(Enum):
    """The meaning of a level's value."""

    CONCURRENCY = "concurrency"
    REQUEST_RATE = "request_rate"
    INTERVALS = "request_intervals"
    PERIODIC = "periodic_concurrency"


class Verdict(Enum):
    """How far a result can be trusted. Every result is reported, whatever its verdict."""

    STABLE = "stable"
    """The windows agree, or the confidence intervals are tight enough."""
    COMPLETE = "complete"
    """The requested number of requests was sent and answered."""
    UNSTABLE = "unstable"
    """The limit of windows or time came first."""
    DISTURBED = "disturbed"
    """The same, while other programs or the hypervisor took cores."""
    OVERLOADED = "overloaded"
    """The server did not keep up with the offered rate, and a backlog built up."""
    INTERRUPTED = "interrupted"
    """The user stopped the run."""
    SERVER_LOST = "server_lost"
    """The server stopped answering."""
    NO_REQUESTS = "no_requests"
    """No request was answered successfully."""


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """One point of a sweep.

    Attributes:
        mode: Meaning of `value`.
        value: Requests in flight, or requests per second.
    """

    mode: LoadMode
    value: float

    def __str__(self) -> str:
        return f"{'concurrency' if self.mode in _COUNTED else 'request rate'} {self.value:g}"


_COUNTED = (LoadMode.CONCURRENCY, LoadMode.PERIODIC)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and the confidence interval around it.

    Attributes:
        value: The estimate, in its own unit.
        low: Lower end of the interval; the value itself if there are too few samples.
        high: Upper end.
        confidence: Confidence level of the interval; 0 if there are too few samples.
    """

    value: float
    low: float
    high: float
    confidence: float = 0.95

    @property
    def relative_half_width(self) -> float:
        """Half the interval as a share of the value; infinite without an interval."""
        return (self.high - self.low) / 2 / self.value if self.confidence and self.value else float("inf")


@dataclass(frozen=True, slots=True)
class Window:
    """A measurement window.

    Attributes:
        begin_ns: Start.
        request_count: Successful requests.
        error_count: Failed requests.
        throughput: Inferences (batch items) per second.
        latency_ns: The stabilising latency: the mean or the chosen percentile.
        used: Whether it is part of the result.
    """

    begin_ns: int
    end_ns: int
    request_count: int
    error_count: int
    throughput: float
    latency_ns: float
    used: bool


@dataclass(frozen=True, slots=True)
class TimeBucket:
    """An interval of the time line, which covers the whole level, not only the windows of the result.

    Attributes:
        begin_ns: Start.
        sent_count: Requests sent.
        completed_count: Successful requests.
        error_count: Failed requests.
        p50_ns: Median response time of the successful requests.
        p99_ns: 99th percentile of it.
        max_ns: Longest response time.
    """

    begin_ns: int
    end_ns: int
    sent_count: int
    completed_count: int
    error_count: int
    p50_ns: int
    p99_ns: int
    max_ns: int


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """Failures of one kind.

    Attributes:
        kind: Name of the status (`UNAVAILABLE`, ...), or `TIMEOUT`, `CONNECTION`, `VALIDATION`.
        count: Number of failures.
        samples: A few different messages, at most `ERROR_SAMPLES_MAX`.
    """

    kind: str
    count: int
    samples: tuple[str, ...]


ERROR_SAMPLES_MAX = 3


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met their objectives.

    Attributes:
        objectives: The text of each, for example `latency:50ms`.
        good_count: Requests that met all of them.
        rate: Good requests per second.
        share: Share of good requests among all that ended, including failed ones.
    """

    objectives: tuple[str, ...]
    good_count: int
    rate: float
    share: float


@dataclass(frozen=True, slots=True)
class Offered:
    """The offered load of an open loop, and how much of it was achieved.

    Attributes:
        rate: Scheduled requests per second.
        sent_rate: Sent requests per second.
        achieved_rate: Completed requests per second, including failed ones.
        delayed_share: Share of requests sent more than 1 ms after their scheduled time.
        backlog_begin: Unanswered requests at the start of the result's windows.
        backlog_end: The same at their end.
    """

    rate: float
    sent_rate: float
    achieved_rate: float
    delayed_share: float
    backlog_begin: int
    backlog_end: int


@dataclass(frozen=True, slots=True)
class ClientTimes:
    """The client's own times, over the requests of the result.

    Attributes:
        send_ns: Mean time to pass a request to the operating system. Over gRPC, to put it into frames (marshalling).
        receive_ns: Mean time from the first byte of a response to its last. Over gRPC, to take it out of its frames
            (unmarshalling).
        overhead: CPU utilisation of the busiest worker, from 0 to 1.
        cpu_seconds: CPU time of all workers.
        process_count: Number of workers.
    """

    send_ns: float
    receive_ns: float
    overhead: float
    cpu_seconds: float
    process_count: int


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, kept on demand only.

    Attributes:
        begin_ns: Send time, nanoseconds since the epoch.
        response_ns: Times of the responses, nanoseconds since the epoch.
        stream: Stream of the input data.
        step: Step of that stream.
        sequence_id: Correlation id, 0 for none.
        error: Kind of its failure, "" for none.
    """

    begin_ns: int
    response_ns: tuple[int, ...]
    stream: int
    step: int
    sequence_id: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class LevelResult:
    """The result of one level.

    Attributes:
        level: The load.
        verdict: How far to trust it.
        reasons: Reasons of the verdict, and other remarks; one sentence each.
        duration_ns: Total length of the windows of the result.
        request_count: Successful requests in them.
        throughput: Inferences (batch items) per second.
        latency: Stabilising latency in nanoseconds: mean response time, or the chosen percentile.
        response_times: From the scheduled send time to the last response.
        service_times: From the actual send time to the last response.
        first_response_times: From the actual send time to the first response; only for streams.
        response_count: Responses; a decoupled model may send several per request.
        sequence_count: Sequences that ended.
        errors: Failures by kind, most frequent first.
        over_latency_limit: Whether the latency limit was reached.
        windows: All windows, in order.
        timeline: The whole level in intervals of equal length.
        client: The client's own times.
        server: The server's statistics.
        offered: The offered load, of an open loop only.
        goodput: Requests that met their objectives, if there are any.
        resources: Resources of the server, if it runs on this machine.
        gpus: GPUs of the metrics page.
        metrics: Other numbers of the metrics page at the end of the level, by name with labels.
        requests: All requests, if they are kept; not part of the JSON form.
        epoch_ns: Start of the level, nanoseconds since the epoch.
        machine_load: Who used the cores of the client's machine, None if it is unknown.
        language: Times to tokens and rates of tokens, of a language model only.
    """

    level: LoadLevel
    verdict: Verdict
    reasons: tuple[str, ...]
    duration_ns: int
    request_count: int
    throughput: Estimate
    latency: Estimate
    response_times: LatencyHistogram
    service_times: LatencyHistogram
    first_response_times: LatencyHistogram | None
    response_count: int
    sequence_count: int
    errors: tuple[ErrorKind, ...]
    over_latency_limit: bool
    windows: tuple[Window, ...]
    timeline: tuple[TimeBucket, ...]
    client: ClientTimes
    server: ServerSide
    offered: Offered | None = None
    goodput: Goodput | None = None
    resources: Resources | None = None
    gpus: tuple[Gpu, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    requests: tuple[RequestRecord, ...] = field(default=(), metadata={"json": False})
    epoch_ns: int = 0
    machine_load: MachineLoad | None = None
    language: LanguageFigures | None = None

    def percentile(self, percent: float) -> int:
        """Return the response time at a percentile, in nanoseconds."""
        return self.response_times.percentile(percent)

    @property
    def error_count(self) -> int:
        return sum(error.count for error in self.errors)

    @property
    def error_share(self) -> float:
        """Share of failed requests among all that ended."""
        ended = self.error_count + self.request_count
        return self.error_count / ended if ended else 0.0

    @property
    def response_rate(self) -> float:
        """Responses per second."""
        return self._rate(self.response_count)

    @property
    def sequence_rate(self) -> float:
        return self._rate(self.sequence_count)

    def _rate(self, count: int) -> float:
        return count * 1e9 / self.duration_ns if self.duration_ns else 0.0


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of the client.

    Attributes:
        host: Host name.
        system: Operating system and its version.
        processor: Name of the processor.
        core_count: Cores that the process may use.
        memory_bytes: Main memory.
        python: Python version.
    """

    host: str
    system: str
    processor: str
    core_count: int
    memory_bytes: int
    python: str


@dataclass(frozen=True, slots=True)
class PerfRun:
    """A whole run of the tool.

    Attributes:
        tool: Name and version of the tool.
        began_at: Start time, ISO 8601 with time zone.
        duration_ns: Length of the run.
        machine: The machine of the client.
        options: The effective options of the command line, by name.
        batch_size: Items in a request.
        stabilising_percentile: Percentile of `LevelResult.latency`, None for the mean.
        levels: The results of the levels, in order.
        notes: Remarks on the whole run.
        answer: Highest level within the latency limit; None if there is none, or no limit.
        command: The command line, "" if a program started the run.
    """

    tool: str
    began_at: str
    duration_ns: int
    machine: Machine
    server: ServerInfo
    model: ModelInfo
    options: dict[str, str]
    batch_size: int
    stabilising_percentile: float | None
    levels: tuple[LevelResult, ...]
    notes: tuple[str, ...] = ()
    answer: LoadLevel | None = None
    command: str = ""
