"""Records of measurements. `json_form` writes and reads them. Pure.

Durations and times are integers in nanoseconds; times within a level are relative to its start. A "response time" is
measured from the scheduled send time, a "service time" from the actual one: in a closed loop both are the same.
"""

import math
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from statistics import NormalDist

from charonia.core.latency import LatencyHistogram
from charonia.core.metadata import PRODUCT, USUAL_NAME, ServerMetadata
from charonia.tools.results.language import LanguageFigures


@dataclass(frozen=True, slots=True)
class ServerModel:
    """The server's statistics of one model, over the windows of the result.

    The `_ns` fields are sums over the requests (`success_count` of them, or cache hits and misses).

    Attributes:
        queue_count: Requests that waited in a queue, the divisor of the queue and compute sums.
        composing: Models of an ensemble, or those named on the command line.
    """

    name: str
    version: str
    inference_count: int
    execution_count: int
    success_count: int
    fail_count: int
    success_ns: int
    queue_ns: int
    compute_input_ns: int
    compute_infer_ns: int
    compute_output_ns: int
    queue_count: int
    cache_hit_count: int = 0
    cache_hit_ns: int = 0
    cache_miss_count: int = 0
    cache_miss_ns: int = 0
    composing: tuple["ServerModel", ...] = ()

    @property
    def request_ns(self) -> float:
        """Mean time of a request in the server."""
        return self.success_ns / self.success_count if self.success_count else 0.0

    @property
    def overhead_ns(self) -> float:
        """Mean time of a request outside of queue, compute and cache."""
        return max(0.0, self.request_ns - self.mean(sum(self.sums_ns.values())) - self.cache_ns)

    @property
    def cache_ns(self) -> float:
        """Mean time of a request in the cache."""
        return (self.cache_hit_ns + self.cache_miss_ns) / self.success_count if self.success_count else 0.0

    @property
    def sums_ns(self) -> dict[str, int]:
        """The sums of queue and compute times by phase."""
        return {
            "queue": self.queue_ns,
            "compute input": self.compute_input_ns,
            "compute infer": self.compute_infer_ns,
            "compute output": self.compute_output_ns,
        }

    def mean(self, total_ns: int) -> float:
        """Return the mean per request of one of the queue and compute sums."""
        return total_ns / self.queue_count if self.queue_count else 0.0


@dataclass(frozen=True, slots=True)
class ServerSide:
    """The server's statistics over the windows of the result.

    Attributes:
        model: Statistics of the model, None if the server has none.
        other_traffic: Whether the server counted clearly more requests than this client sent.
    """

    model: ServerModel | None
    other_traffic: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, from the server's metrics page, over the windows of the result.

    Attributes:
        utilization: Mean share of busy time, from 0 to 1; None if unknown.
        power_watts: Mean power; None if unknown.
        memory_used_bytes: Highest use of memory; None if unknown.
        memory_total_bytes: Size of memory; None if unknown.
    """

    uuid: str
    utilization: float | None
    power_watts: float | None
    memory_used_bytes: float | None
    memory_total_bytes: float | None

    @property
    def memory_free_bytes(self) -> float | None:
        """The memory that is free when the most is used; None if unknown."""
        used, total = self.memory_used_bytes, self.memory_total_bytes
        return None if used is None or total is None else total - used


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources that the server's processes used over the windows of the result, if they run on this machine.

    Attributes:
        cpu_seconds: CPU time, including child processes.
        cpu_cores: CPU time per second: 1.5 means one and a half cores busy.
    """

    cpu_seconds: float
    cpu_cores: float
    rss_bytes: int
    process_count: int


OTHERS_MIN = 0.2
"""Cores that other programs take, from which on they may have disturbed a measurement that needed all cores."""

IDLE_SHARE_MAX = 0.15
"""Share of idle cores above which other programs have taken nothing that was needed."""

STOLEN_SHARE_MIN = 0.03
"""Share of the cores that the hypervisor takes, from which on that is worth a remark."""


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """Who used the cores of the client's machine over the windows of the result; CPU time per second.

    Attributes:
        core_count: Cores that the load generator may use.
        other_cores: Used by programs other than the load generator and the server.
        stolen_cores: Given to other virtual machines by the hypervisor, although a program wanted to run here.
    """

    core_count: int
    idle_cores: float
    other_cores: float
    stolen_cores: float

    @property
    def disturbance(self) -> str:
        """A sentence on the programs that used cores which the measurement needed, "" if there were none."""
        took = []
        if self.other_cores >= OTHERS_MIN and self.idle_cores <= IDLE_SHARE_MAX * self.core_count:
            took.append(f"other programs took {self.other_cores:.1f}")
        if self.stolen_cores >= STOLEN_SHARE_MIN * self.core_count:
            took.append(f"the hypervisor took {self.stolen_cores:.2g} (steal time)")
        if not took:
            return ""
        return f"Of {self.core_count} cores, {' and '.join(took)} during the measurement."


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The measured server.

    Attributes:
        protocol: `http` or `grpc`.
        name: Its name, from its metadata; `charonia` for one that goes by the protocol's usual name.
    """

    url: str
    protocol: str
    name: str
    version: str
    extensions: tuple[str, ...] = ()

    @classmethod
    def of(cls, url: str, protocol: str, metadata: ServerMetadata) -> "ServerInfo":
        """Return the information in a server's metadata."""
        is_charonia = metadata.name == USUAL_NAME and PRODUCT in metadata.extensions
        return cls(url, protocol, PRODUCT if is_charonia else metadata.name, metadata.version, metadata.extensions)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The measured model.

    Attributes:
        version: Requested version, "" for the server's choice.
        max_batch_size: From its configuration, 0 for a model that does not support batching.
        decoupled: Whether a request may have any number of responses.
    """

    name: str
    version: str
    platform: str
    max_batch_size: int
    decoupled: bool
    sequence: bool
    cached: bool


@lru_cache(maxsize=1024)
def student(confidence: float, freedom: float = math.inf) -> float:
    """Return the half-width of a confidence interval in standard errors.

    Source: Abramowitz and Stegun, 26.7.5, within 1 % from 3 degrees of freedom on and within 0.1 % from 9 on; closed
    forms for 1 and 2.

    Args:
        freedom: Degrees of freedom; infinite for the normal distribution.
    """
    if freedom == 1:
        return math.tan(math.pi / 2 * confidence)
    if freedom == 2:
        return confidence * math.sqrt(2 / (1 - confidence**2))
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


PERCENTILES = (50.0, 90.0, 95.0, 99.0)
"""Percentiles of every table."""


class LoadMode(Enum):
    """The meaning of a level's value."""

    CONCURRENCY = "concurrency"
    REQUEST_RATE = "request_rate"
    INTERVALS = "request_intervals"
    PERIODIC = "periodic_concurrency"

    @property
    def is_rate(self) -> bool:
        """Whether it is of an open loop: requests are sent at scheduled times."""
        return self in (LoadMode.REQUEST_RATE, LoadMode.INTERVALS)


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

    @property
    def text(self) -> str:
        return self.value.replace("_", " ")


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
        return f"{'request rate' if self.mode.is_rate else 'concurrency'} {self.value:g}"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and the confidence interval around it.

    Attributes:
        value: The estimate, in its own unit.
        low: Lower end of the interval; the value itself if there are too few samples.
        confidence: Confidence level of the interval; 0 if there are too few samples.
    """

    value: float
    low: float
    high: float
    confidence: float = 0.95

    @classmethod
    def exact(cls, value: float) -> "Estimate":
        """Return a value without an interval."""
        return cls(value, value, value, 0.0)

    def scaled(self, factor: float) -> "Estimate":
        """Return the estimate in another unit, or of something that varies as this does."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor, self.confidence)

    @property
    def relative_half_width(self) -> float:
        """Half the interval as a share of the value; infinite without an interval."""
        return (self.high - self.low) / 2 / self.value if self.confidence and self.value else float("inf")


@dataclass(frozen=True, slots=True)
class Window:
    """A measurement window.

    Attributes:
        throughput: Inferences (batch items) per second.
        latency_ns: The stabilising latency: the mean or the chosen percentile.
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
    """An interval of the time line, which covers the whole level, not only the windows of the result."""

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
        rate: Good requests per second.
        share: Share of good requests among all that ended, including failed ones.
    """

    objectives: tuple[str, ...]
    good_count: int
    rate: float
    share: float


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """The offered load of an open loop, and how much of it was achieved.

    Attributes:
        rate: Scheduled requests per second.
        sent_rate: Sent requests per second.
        achieved_rate: Completed requests per second, including failed ones.
        delayed_share: Share of requests sent more than 1 ms after their scheduled time.
        delay_p99_ns: 99th percentile of the time from the scheduled sending to the actual one.
    """

    rate: float
    sent_rate: float
    achieved_rate: float
    delayed_share: float
    backlog_begin: int
    backlog_end: int
    delay_p99_ns: int = 0


@dataclass(frozen=True, slots=True)
class ClientTimes:
    """The client's own times, over the requests of the result.

    Attributes:
        send_ns: Mean time to pass a request to the operating system. Over gRPC, to put it into frames (marshalling).
        receive_ns: Mean time from the first byte of a response to its last. Over gRPC, to take it out of its frames
            (unmarshalling).
        overhead: CPU utilisation of the busiest worker, from 0 to 1, without polling for the next request or response.
        cpu_seconds: CPU time of all workers, without polling.
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
        reasons: Reasons of the verdict, and other remarks; one sentence each.
        throughput: Inferences (batch items) per second.
        latency: Stabilising latency in nanoseconds: mean response time, or the chosen percentile.
        first_response_times: From the actual send time to the first response; only for streams.
        response_count: Responses; a decoupled model may send several per request.
        errors: Failures by kind, most frequent first.
        offered: The offered load, of an open loop only.
        goodput: Requests that met their objectives, if there are any.
        resources: Resources of the server, if it runs on this machine.
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
    offered: OfferedLoad | None = None
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
    def wait_ns(self) -> float:
        """Mean time between the end of a request and the start of its response."""
        return max(0.0, self.service_times.mean - self.client.send_ns - self.client.receive_ns)

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
    def token_rate(self) -> Estimate:
        """Output tokens per second of a language model, which vary as its requests do."""
        rate, requests = self.language.output_rate if self.language is not None else 0.0, self.throughput
        return requests.scaled(rate / requests.value) if requests.value else Estimate.exact(rate)

    @property
    def sequence_rate(self) -> float:
        return self._rate(self.sequence_count)

    def _rate(self, count: int) -> float:
        return count * 1e9 / self.duration_ns if self.duration_ns else 0.0


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of the client.

    Attributes:
        core_count: Cores that the process may use.
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
        options: The effective options of the command line, by name.
        stabilising_percentile: Percentile of `LevelResult.latency`, None for the mean.
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
