"""What a measurement found: plain frozen records without I/O. `json_form` writes and reads them. Pure.

Durations and times are integers in nanoseconds; times within a level count from the level's begin. A "response time"
starts when the request was meant to be sent, a "service time" when it was sent: under a closed loop both are the same.
"""

from dataclasses import dataclass, field
from enum import Enum

from charonia.core.latency import LatencyHistogram
from charonia.tools.results.server import Gpu, ModelInfo, Resources, ServerInfo, ServerSide

FORMAT = "charonia-perf"
VERSION = 1
"""Version of the JSON form: raised when a reader of the old one would misunderstand the new one."""

PERCENTILES = (50.0, 90.0, 95.0, 99.0)
"""Percentiles that every table prints."""


class LoadMode(Enum):
    """What a level's value says."""

    CONCURRENCY = "concurrency"
    REQUEST_RATE = "request_rate"
    INTERVALS = "request_intervals"
    PERIODIC = "periodic_concurrency"


class Verdict(Enum):
    """How far a result can be trusted. Every result is reported, whatever its verdict."""

    STABLE = "stable"
    """The windows agree, or the confidence intervals are as tight as asked for."""
    COMPLETE = "complete"
    """The number of requests asked for was sent and answered."""
    UNSTABLE = "unstable"
    """The limit of windows or time came first."""
    OVERLOADED = "overloaded"
    """The server did not keep up with the offered rate: requests piled up."""
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
        mode: What `value` says.
        value: Requests in flight, or requests a second.
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
        low: Lower end of the interval; the value itself where there are too few samples for one.
        high: Upper end.
        confidence: Probability that the interval holds the true value; 0 where there are too few samples for one.
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
    """One trial.

    Attributes:
        begin_ns: Time of its begin.
        end_ns: Time of its end.
        request_count: Requests completed in it, successfully.
        error_count: Requests that failed in it.
        throughput: Inferences a second (batch items).
        latency_ns: The stabilising latency: mean or the percentile asked for.
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
    """A piece of the time line, of everything that was measured at this level, before the result's windows too.

    Attributes:
        begin_ns: Time of its begin.
        end_ns: Time of its end.
        sent_count: Requests sent in it.
        completed_count: Requests completed in it, successfully.
        error_count: Requests failed in it.
        p50_ns: Median response time of the completed ones.
        p99_ns: 99th percentile of them.
        max_ns: Slowest of them.
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
        count: How many.
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
        rate: Good requests a second.
        share: Good ones among all that ended, failed ones included.
    """

    objectives: tuple[str, ...]
    good_count: int
    rate: float
    share: float


@dataclass(frozen=True, slots=True)
class Offered:
    """What an open loop asked of the server, and what came of it.

    Attributes:
        rate: Requests a second that were planned.
        sent_rate: Requests a second that were sent.
        achieved_rate: Requests a second that were answered, failures included.
        delayed_share: Share of requests sent more than 1 ms after their time.
        backlog_begin: Requests waiting for an answer when the windows of the result began.
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
    """What the client itself spent, over the requests of the result.

    Attributes:
        send_ns: Mean time to hand over a request.
        receive_ns: Mean time from the first byte of a response to its last.
        overhead: Share of the time in which the client's busiest process was computing, from 0 to 1.
        cpu_seconds: CPU time of all of the client's processes.
        process_count: Number of processes that sent load.
    """

    send_ns: float
    receive_ns: float
    overhead: float
    cpu_seconds: float
    process_count: int


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, kept only where they are asked for.

    Attributes:
        begin_ns: When it was sent, nanoseconds since the epoch.
        response_ns: When each response came, nanoseconds since the epoch.
        stream: Which stream of the input data.
        step: Which step of that stream.
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
    """What was measured at one level.

    Attributes:
        level: The load.
        verdict: How far to trust it.
        reasons: Why the verdict is what it is, and what else a reader has to know; one sentence each.
        duration_ns: Length of the windows of the result together.
        request_count: Requests answered successfully in them.
        throughput: Inferences a second (batch items).
        latency: Stabilising latency in nanoseconds: mean response time, or the percentile asked for.
        response_times: From the intended send time to the last response.
        service_times: From the actual send time to the last response.
        first_response_times: From the actual send time to the first response; only for streams.
        response_count: Responses, more than requests where the model is decoupled.
        sequence_count: Sequences that ended.
        errors: Failures by kind, most frequent first.
        over_latency_limit: Whether the latency limit was reached.
        windows: Every trial, in order.
        timeline: The whole level in pieces of equal length.
        client: The client's own times.
        server: The server's account.
        offered: Open loop only.
        goodput: Where objectives were given.
        resources: Where the server runs on this machine.
        gpus: From the metrics page.
        metrics: Other numbers of the metrics page, at the end of the level, by name with labels.
        requests: Every request, where they are kept; not part of the JSON form.
        epoch_ns: Begin of the level, nanoseconds since the epoch.
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

    def percentile(self, percent: float) -> int:
        """Return the response time at a percentile, in nanoseconds."""
        return self.response_times.percentile(percent)

    @property
    def error_count(self) -> int:
        """Requests that failed."""
        return sum(error.count for error in self.errors)

    @property
    def error_share(self) -> float:
        """Failed requests among all that ended."""
        ended = self.error_count + self.request_count
        return self.error_count / ended if ended else 0.0

    @property
    def response_rate(self) -> float:
        """Responses a second."""
        return self._rate(self.response_count)

    @property
    def sequence_rate(self) -> float:
        """Sequences a second."""
        return self._rate(self.sequence_count)

    def _rate(self, count: int) -> float:
        return count * 1e9 / self.duration_ns if self.duration_ns else 0.0


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the client ran.

    Attributes:
        host: Its name.
        system: Operating system and its version.
        processor: Name of the processor.
        core_count: Cores that the process may use.
        memory_bytes: Main memory.
        python: Version of Python.
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
        tool: Name and version of what measured.
        began_at: Begin, ISO 8601 with time zone.
        duration_ns: Length of the run.
        machine: Where the client ran.
        server: Which server.
        model: Which model.
        options: The command line's options that were in force, by name.
        batch_size: Items of a request.
        stabilising_percentile: Percentile that `LevelResult.latency` is, None for the mean.
        levels: One result a level, in the order they were measured.
        notes: What a reader has to know about the whole run.
        answer: Level that a search found best within the latency limit, None for a sweep or where none was.
        command: The command line, "" where a program started the run.
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
