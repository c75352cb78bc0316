"""Everything that `charonia perf` can be told, and the rules between the options.

The values are those of perf_analyzer's options, with its defaults. `PerfOptions` refuses what contradicts itself before
anything is sent, with a line for every problem. What depends on the model (batch size, shapes, decoupled) is checked
when the model is known.
"""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from charonia.core.errors import invalid
from charonia.tools.perf.api import Distribution, MeasurementMode, SharedMemory
from charonia.tools.results.records import LoadMode

SEQUENCE_ID_MAX = 2**32 - 1
"""Largest correlation id where `--sequence-id-range` names no end."""


GENERATED = ("random", "zero")
"""Sources of input data that are no files."""


class WireProtocol(Enum):
    """What requests are sent over."""

    HTTP = "http"
    GRPC = "grpc"


class TensorFormat(Enum):
    """How tensors travel over HTTP."""

    BINARY = "binary"
    JSON = "json"


class Compression(Enum):
    """Compression of gRPC messages."""

    NONE = "none"
    GZIP = "gzip"
    DEFLATE = "deflate"


class CallStyle(Enum):
    """Whether a caller waits for each answer. Here nobody does: it only says what the settings print."""

    SYNC = "sync"
    ASYNC = "async"


class CertificateFormat(Enum):
    """File format of certificates and keys."""

    PEM = "PEM"
    DER = "DER"


@dataclass(frozen=True, slots=True)
class IntRange:
    """Levels from `start` to `end`, `end` included, 0 for no end."""

    start: int = 1
    end: int = 1
    step: int = 1

    @property
    def is_single(self) -> bool:
        """Whether it is one level only."""
        return self.start == self.end


@dataclass(frozen=True, slots=True)
class FloatRange:
    """Rates from `start` to `end`, `end` included, 0 for no end; in requests/s."""

    start: float = 1.0
    end: float = 1.0
    step: float = 1.0

    @property
    def is_single(self) -> bool:
        """Whether it is one level only."""
        return self.start == self.end


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """Certificates by path, None where none was named.

    Attributes:
        enabled: Whether gRPC goes over TLS. HTTP does when its URL begins with `https://`.
        root: Certificates that vouch for the server.
        certificate: The client's own certificate (chain).
        key: Its private key.
        verify_peer: Whether the server's certificate must be vouched for.
        verify_host: Whether it must also be for the host that was asked.
        certificate_format: Format of `certificate`.
        key_format: Format of `key`.
    """

    enabled: bool = False
    root: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    verify_peer: bool = True
    verify_host: bool = True
    certificate_format: CertificateFormat = CertificateFormat.PEM
    key_format: CertificateFormat = CertificateFormat.PEM

    @property
    def names_files(self) -> bool:
        """Whether any file was named."""
        return (self.root, self.certificate, self.key) != (None, None, None)


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """Which model of which server, and how it is spoken to.

    Attributes:
        model: Model name.
        version: Model version, "" for the server's choice.
        protocol: What requests are sent over.
        url: `host:port` or a URL, "" for the default port of the protocol on this machine.
        streaming: Whether requests go through a bidirectional stream.
        batch_size: Items in a request.
        headers: Headers of HTTP requests, metadata of gRPC calls.
        parameters: Parameters of every request.
        input_format: How inputs travel over HTTP.
        output_format: How outputs travel over HTTP.
        compression: Compression of gRPC messages.
        shared_memory: Where tensors are put.
        output_region_bytes: Size of an output's shared memory where it cannot be known.
        request_timeout_ns: Time after which a request counts as failed, 0 for none.
        http_tls: TLS over HTTP.
        grpc_tls: TLS over gRPC.
    """

    model: str = ""
    version: str = ""
    protocol: WireProtocol = WireProtocol.HTTP
    url: str = ""
    streaming: bool = False
    batch_size: int = 1
    headers: tuple[tuple[str, str], ...] = ()
    parameters: tuple[tuple[str, bool | int | str], ...] = ()
    input_format: TensorFormat = TensorFormat.BINARY
    output_format: TensorFormat = TensorFormat.BINARY
    compression: Compression = Compression.NONE
    shared_memory: SharedMemory = SharedMemory.NONE
    output_region_bytes: int = 102_400
    request_timeout_ns: int = 0
    http_tls: TlsOptions = TlsOptions()
    grpc_tls: TlsOptions = TlsOptions()

    @property
    def address(self) -> str:
        """The URL without default: what was asked for, or the protocol's port on this machine."""
        return self.url or ("localhost:8001" if self.protocol is WireProtocol.GRPC else "localhost:8000")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How requests are sent. At most one of the four modes is set; none means a concurrency of 1.

    Attributes:
        concurrency: Requests in flight (closed loop).
        periodic: Concurrency that grows while it runs.
        rate: Requests/s that are sent whatever the answers do (open loop).
        intervals_us: Gaps between requests, repeated (open loop).
        distribution: How the gaps of `rate` are spread.
        request_period: Responses of each request after which `periodic` adds requests.
        call_style: How perf_analyzer would call; None for what the model asks for.
        seed: Of arrivals and of generated data.
        processes: Processes that send, 0 for as many as the machine has use for.
    """

    concurrency: IntRange | None = None
    periodic: IntRange | None = None
    rate: FloatRange | None = None
    intervals_us: tuple[int, ...] = ()
    distribution: Distribution = Distribution.CONSTANT
    request_period: int = 10
    call_style: CallStyle | None = None
    seed: int = 0
    processes: int = 0

    @property
    def mode(self) -> LoadMode:
        """Which mode is set."""
        if self.rate is not None:
            return LoadMode.REQUEST_RATE
        if self.intervals_us:
            return LoadMode.INTERVALS
        return LoadMode.PERIODIC if self.periodic is not None else LoadMode.CONCURRENCY

    @property
    def levels(self) -> IntRange | FloatRange:
        """The levels to measure; a single one for intervals."""
        return self.rate or self.periodic or self.concurrency or IntRange()


@dataclass(frozen=True, slots=True)
class MeasurementOptions:
    """How long a level is measured and what is made of it.

    Attributes:
        mode: When a level is measured well enough.
        interval_ms: Length of a window, before the fifth that is added to it.
        window_request_count: Least number of requests in a window of `COUNT_WINDOWS`.
        stability_percent: Largest spread of the last three windows.
        percentile: Percentile that must be stable and is reported, None for the mean.
        trials_max: Windows after which a level ends without being stable.
        warmup_request_count: Requests sent before a level, which do not count.
        request_count: Exact number of requests, 0 for none.
        latency_threshold_ms: Latency that ends a search, 0 for none.
        binary_search: Whether levels are halved in place of stepped through.
        goodput_latency_ns: Latency up to which a request counts as good, 0 for none.
    """

    mode: MeasurementMode = MeasurementMode.TIME_WINDOWS
    interval_ms: int = 5000
    window_request_count: int = 50
    stability_percent: float = 10.0
    percentile: float | None = None
    trials_max: int = 10
    warmup_request_count: int = 0
    request_count: int = 0
    latency_threshold_ms: int = 0
    binary_search: bool = False
    goodput_latency_ns: int = 0


@dataclass(frozen=True, slots=True)
class SequenceOptions:
    """Sequences of stateful models.

    Attributes:
        concurrent: Sequences at a time when requests are sent by a schedule.
        length: Requests of a sequence, where the data do not say.
        length_variation_percent: How far lengths deviate, evenly spread.
        id_start: First correlation id.
        id_end: The id behind the last.
        serial: Whether a sequence has one request in flight at a time.
        is_length_given: Whether `length` was asked for, and beats the data.
    """

    concurrent: int = 4
    length: int = 20
    length_variation_percent: float = 20.0
    id_start: int = 1
    id_end: int = SEQUENCE_ID_MAX
    serial: bool = False
    is_length_given: bool = False


@dataclass(frozen=True, slots=True)
class DataOptions:
    """What the requests hold.

    Attributes:
        sources: "random", "zero", a folder, or JSON files.
        shapes: Shape by input with variable dimensions, without the batch dimension.
        string_length: Characters of a generated string.
        string_data: Every generated string, "" for random ones.
        ranges: Lowest and highest generated value by input.
        validation_tolerance: Deviation of a floating-point output, absolute and relative, that still passes.
    """

    sources: tuple[str, ...] = ("random",)
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    string_length: int = 128
    string_data: str = ""
    ranges: tuple[tuple[str, float, float], ...] = ()
    validation_tolerance: float = 0.0

    @property
    def is_from_files(self) -> bool:
        """Whether nothing of it is generated."""
        return not any(source in GENERATED for source in self.sources)


@dataclass(frozen=True, slots=True)
class ServerSideOptions:
    """What is asked of the server beside inferences.

    Attributes:
        composing_models: Models with their version ("" for any) that a BLS model calls.
        collect_metrics: Whether the metrics page is read.
        metrics_url: Where it is, "" for port 8002 of the server's host.
        metrics_interval_ms: Time between two readings.
        trace_levels: What the server is told to trace; empty for what it does anyway.
        trace_rate: One of so many requests it is told to trace, None for what it does anyway.
        trace_count: So many traces it is told to make, -1 for no end; None for what it does anyway.
        log_frequency: So many traces it is told to put into a file, 0 for all; None for what it does anyway.
    """

    composing_models: tuple[tuple[str, str], ...] = ()
    collect_metrics: bool = False
    metrics_url: str = ""
    metrics_interval_ms: int = 1000
    trace_levels: tuple[str, ...] = ()
    trace_rate: int | None = None
    trace_count: int | None = None
    log_frequency: int | None = None

    @property
    def trace(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The settings of tracing that are given, by name in the protocol."""
        numbers = {
            "trace_rate": self.trace_rate,
            "trace_count": self.trace_count,
            "log_frequency": self.log_frequency,
        }
        levels = (("trace_level", self.trace_levels),) if self.trace_levels else ()
        return (*levels, *((name, (str(number),)) for name, number in numbers.items() if number is not None))


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What is written where.

    Attributes:
        csv: CSV file.
        verbose_csv: Whether it has further columns.
        profile_export: JSON file of every request.
        json: JSON file of the whole result, "-" for stdout.
        html: HTML page.
        verbosity: 0, 1 for a line a window, 2 for more.
        quiet: Whether stdout stays empty but for the final table.
        progress: Whether progress is shown where stderr is a terminal.
    """

    csv: Path | None = None
    verbose_csv: bool = False
    profile_export: Path | None = None
    json: Path | None = None
    html: Path | None = None
    verbosity: int = 0
    quiet: bool = False
    progress: bool = True


@dataclass(frozen=True, slots=True)
class PerfOptions:
    """All of it.

    Raises:
        ServingError: INVALID_ARG with a line for every rule that is broken.
    """

    target: TargetOptions = field(default_factory=TargetOptions)
    load: LoadOptions = LoadOptions()
    measurement: MeasurementOptions = MeasurementOptions()
    sequences: SequenceOptions = SequenceOptions()
    data: DataOptions = DataOptions()
    server: ServerSideOptions = ServerSideOptions()
    report: ReportOptions = ReportOptions()

    def __post_init__(self) -> None:
        problems = [*_target_problems(self), *_load_problems(self), *_count_problems(self), *_sequence_problems(self)]
        problems += _data_problems(self)
        problems += [*_server_problems(self), *_report_problems(self)]
        if problems:
            raise invalid("\n".join(problems))


def _target_problems(options: PerfOptions) -> list[str]:
    target = options.target
    problems = []
    if not target.model:
        problems.append("-m: expected the name of a model, got none (hint: charonia perf -m NAME -u HOST:PORT)")
    if target.streaming and target.protocol is not WireProtocol.GRPC:
        problems.append("--streaming: expected -i grpc with it, got -i http")
    if target.streaming and options.load.call_style is CallStyle.SYNC:
        problems.append("--streaming: expected --async with it, got --sync (hint: leave --sync out)")
    if target.shared_memory is not SharedMemory.NONE and TensorFormat.JSON in (
        target.input_format,
        target.output_format,
    ):
        problems.append("--shared-memory: expected binary tensors with it, got a tensor format of json")
    for kind, tls in (("https", target.http_tls), ("grpc", target.grpc_tls)):
        if (tls.certificate is None) != (tls.key is None):
            problems.append(f"--ssl-{kind}-...: expected a client certificate and its key, got one of them")
    return problems


def _load_problems(options: PerfOptions) -> list[str]:
    load, limit_ms = options.load, options.measurement.latency_threshold_ms
    modes = {
        "--concurrency-range": load.concurrency,
        "--periodic-concurrency-range": load.periodic,
        "--request-rate-range": load.rate,
        "--request-intervals": load.intervals_us or None,
    }
    given = {name: levels for name, levels in modes.items() if levels is not None}
    if len(given) > 1:
        return [f"{' and '.join(given)}: expected one way to send requests, got {len(given)}"]
    problems = []
    for name, levels in given.items():
        if isinstance(levels, tuple):
            continue
        if levels.end == 0 and limit_ms == 0:
            problems.append(f"{name}: expected --latency-threshold with a range without end, got none")
        if 0 < levels.end < levels.start:
            problems.append(f"{name}: expected an end of at least {levels.start:g}, got {levels.end:g}")
    if options.measurement.binary_search:
        problems += _search_problems(options)
    if load.periodic is not None:
        if (load.periodic.end - load.periodic.start) % load.periodic.step:
            problems.append(
                "--periodic-concurrency-range: expected a step that divides the range, got "
                f"{load.periodic.start}:{load.periodic.end}:{load.periodic.step}"
            )
        if not options.target.streaming or options.report.profile_export is None:
            problems.append("--periodic-concurrency-range: expected --streaming and --profile-export-file with it")
    return problems


def _search_problems(options: PerfOptions) -> list[str]:
    problems = []
    levels = options.load.levels
    if options.measurement.latency_threshold_ms == 0:
        problems.append("--binary-search: expected --latency-threshold with it, got none")
    if levels.end <= levels.start or options.load.mode not in (LoadMode.CONCURRENCY, LoadMode.REQUEST_RATE):
        problems.append(
            "--binary-search: expected --concurrency-range or --request-rate-range with start and end, "
            f"got {levels.start:g}:{levels.end:g}"
        )
    return problems


def _count_problems(options: PerfOptions) -> list[str]:
    count = options.measurement.request_count
    if count == 0:
        return []
    if not options.load.levels.is_single:
        return ["--request-count: expected a single level with it, got a range"]
    if count < options.load.levels.start:
        return [f"--request-count: expected at least the level, {options.load.levels.start:g}, got {count}"]
    return []


def _sequence_problems(options: PerfOptions) -> list[str]:
    sequences = options.sequences
    levels = options.load.levels
    available = sequences.id_end - sequences.id_start
    by_schedule = options.load.mode in (LoadMode.REQUEST_RATE, LoadMode.INTERVALS)
    needed = sequences.concurrent if by_schedule else max(levels.start, levels.end)
    if available < needed:
        return [
            f"--sequence-id-range: expected at least {needed:g} ids, one for each sequence at a time, got {available}"
        ]
    return []


def _data_problems(options: PerfOptions) -> list[str]:
    sources = options.data.sources
    others = [source for source in sources if source in GENERATED or Path(source).suffix.lower() != ".json"]
    if len(sources) > 1 and others:
        return [f"--input-data: expected JSON files where there is more than one, got {others[0]}"]
    return []


def _server_problems(options: PerfOptions) -> list[str]:
    server, default = options.server, ServerSideOptions()
    if server.collect_metrics:
        return []
    named = {
        "--metrics-url": server.metrics_url != default.metrics_url,
        "--metrics-interval": server.metrics_interval_ms != default.metrics_interval_ms,
    }
    return [f"{name}: expected --collect-metrics with it, got none" for name, is_given in named.items() if is_given]


def _report_problems(options: PerfOptions) -> list[str]:
    report = options.report
    problems = []
    seen: dict[Path, str] = {}
    for name, path in (
        ("-f", report.csv),
        ("--profile-export-file", report.profile_export),
        ("--json", report.json),
        ("--html", report.html),
    ):
        if path is None:
            continue
        if path in seen:
            problems.append(f"{name}: expected a file of its own, got that of {seen[path]}, {path}")
        seen[path] = name
    return problems
