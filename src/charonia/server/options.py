"""Server options as frozen records, with the defaults of `charonia serve`.

The command line creates a `ServerOptions`, and an embedding program can do so too. This module checks rules between
fields, and reports all problems together; the text forms of values (`<backend>,<key>=<value>`, boolean words) belong to
the command line.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from charonia.core.errors import invalid
from charonia.core.metadata import USUAL_NAME
from charonia.server.access.options import AccessOptions
from charonia.server.files.options import FileOptions
from charonia.server.http.limits import HttpLimits
from charonia.server.machine.cores import HostPolicy
from charonia.server.model_options import ALL_MODELS, AutoOptions, ControlMode, ReadyWhen, StoreSettings
from charonia.server.rate_limiter.options import RateLimitOptions
from charonia.server.response_cache.options import CacheOptions
from charonia.server.tracing.sampling import TraceOptions
from charonia.wire.log_settings import AccessLogFormat, LogOptions
from charonia.wire.orca import LOAD_METRICS

PORT_MAX = 65535
CPU_CORES_MAX = 4096
FRONT_ENDS_MAX = 64
FRONT_ENDS_AUTO = -1
"""Value of `ServerOptions.front_ends` with which `charonia serve` chooses the number."""

GRPC_INPUT_BYTES_MAX = 2**31 - 1
"""Protobuf's limit for one message."""

LOOPBACK = "127.0.0.1"
ALL_INTERFACES = "0.0.0.0"

WILDCARD_ADDRESSES = frozenset({"", ALL_INTERFACES, "::", "*"})
"""Addresses that mean every interface."""


class CompressionLevel(Enum):
    """How hard gRPC responses are compressed."""

    NONE = "none"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


@dataclass(frozen=True, slots=True)
class EndpointTls:
    """TLS of one endpoint.

    Attributes:
        enabled: Whether clients must use TLS.
        mutual: Whether clients must present a certificate; implies `enabled`.
        certificate: Path of the server's certificate chain, PEM.
        key: Path of its private key, PEM.
        root: Path of the certificates that client certificates are checked against, PEM.
    """

    enabled: bool = False
    mutual: bool = False
    certificate: str = ""
    key: str = ""
    root: str = ""

    @property
    def active(self) -> bool:
        """Whether the endpoint speaks TLS."""
        return self.enabled or self.mutual

    def problems(self, prefix: str) -> Iterator[str]:
        """Yield all problems; `prefix` is the endpoint's, "http" or "grpc"."""
        if self.active:
            for name, path in (("cert", self.certificate), ("key", self.key)):
                if not path:
                    yield f"--{prefix}-use-ssl needs --{prefix}-server-{name}"
        if self.mutual and not self.root:
            yield f"--{prefix}-use-ssl-mutual needs --{prefix}-root-cert, to check the certificates of clients"


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """The HTTP endpoint.

    Attributes:
        enabled: Whether it is there.
        address: Address to listen on.
        port: Port to listen on, 0 for any free one.
        reuse_port: Whether several processes may listen on the port.
        descriptors: Bound sockets of this process to listen on in place of address and port.
        limits: Its limits, of each front end.
        page: Whether there are a page that shows the models, and their OpenAPI document.
        openai: Whether OpenAI's API is served.
        kserve_v1: Whether KServe's v1 protocol is served.
        mlflow_model: Model that MLflow's `/invocations` runs, "" for none.
        cors_origins: Origins of pages in browsers that may call the server; "*" for every one.
        allowed_hosts: Hosts that requests may be for, besides local ones; "*" for every one, and with none all but on
            the loopback interface.
        access: Requirements for callers.
    """

    enabled: bool = True
    address: str = "0.0.0.0"
    port: int = 8000
    reuse_port: bool = False
    descriptors: tuple[int, ...] = ()
    limits: HttpLimits = field(default_factory=lambda: HttpLimits(stream_keep_alive_s=15.0))
    page: bool = True
    openai: bool = True
    kserve_v1: bool = False
    mlflow_model: str = ""
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    tls: EndpointTls = EndpointTls()
    access: AccessOptions = field(default_factory=AccessOptions)


@dataclass(frozen=True, slots=True)
class CloudOptions:
    """Endpoints for clouds, each with a separate port, and otherwise with the options of HTTP.

    Attributes:
        sagemaker: Whether SageMaker's routes are served.
        sagemaker_port: Port of SageMaker's routes.
        safe_ports: First and last port that other endpoints may have beside SageMaker's; None for any.
        vertex_ai: Whether Vertex AI's routes are served.
        vertex_ai_port: Port of Vertex AI's routes.
        vertex_ai_model: Model that its predictions run; "" for the only one.
    """

    sagemaker: bool = False
    sagemaker_port: int = 8080
    safe_ports: tuple[int, int] | None = None
    vertex_ai: bool = False
    vertex_ai_port: int = 8080
    vertex_ai_model: str = ""


@dataclass(frozen=True, slots=True)
class GrpcOptions:
    """The gRPC endpoint. Times are in ms, as on the command line.

    Attributes:
        enabled: Whether it is there.
        address: Address to listen on.
        port: Port to listen on, 0 for any free one.
        reuse_port: Whether several processes may listen on the port.
        descriptors: Bound sockets of this process to listen on in place of address and port.
        input_bytes_max: Largest request message, as received and after decompression, in bytes.
        connections_max: Most connections of each front end.
        response_compression: Compression of inference responses for clients that accept one.
        keepalive_time_ms: Idle time of a connection after which the server sends a ping.
        keepalive_timeout_ms: Time to wait for the acknowledgement before the connection is closed.
        keepalive_permit_without_calls: Whether pings are sent and accepted while no call is open.
        http2_max_pings_without_data: Pings sent while no data is sent; 0 for no limit.
        http2_min_recv_ping_interval_without_data_ms: Pings that a client sends faster than this are strikes.
        http2_max_ping_strikes: Strikes after which the connection is closed; 0 for no limit.
        max_connection_age_ms: Age at which the server asks a client to close its connection; 0 for none.
        max_connection_age_grace_ms: Time that open calls then have; 0 for no limit.
        access: Requirements for callers.
    """

    enabled: bool = True
    address: str = "0.0.0.0"
    port: int = 8001
    reuse_port: bool = False
    descriptors: tuple[int, ...] = ()
    input_bytes_max: int = GRPC_INPUT_BYTES_MAX
    connections_max: int = 16_384
    response_compression: CompressionLevel = CompressionLevel.NONE
    keepalive_time_ms: int = 7_200_000
    keepalive_timeout_ms: int = 20_000
    keepalive_permit_without_calls: bool = False
    http2_max_pings_without_data: int = 2
    http2_min_recv_ping_interval_without_data_ms: int = 300_000
    http2_max_ping_strikes: int = 2
    max_connection_age_ms: int = 0
    max_connection_age_grace_ms: int = 0
    tls: EndpointTls = EndpointTls()
    access: AccessOptions = field(default_factory=AccessOptions)


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """The metrics endpoint.

    Attributes:
        enabled: Whether it is there.
        address: Address to listen on, "" for the HTTP endpoint's.
        port: Port to listen on, 0 for any free one.
        descriptors: Bound sockets of this process to listen on in place of address and port.
        interval_ms: Shortest time between two samples of CPU figures.
        cpu: Whether to include CPU figures.
        counter_latencies: Whether to report latencies as counters.
        histogram_latencies: Whether to report latencies as histograms.
        summary_latencies: Whether to report latencies as summaries.
        summary_quantiles: Quantiles of summaries, from 0 to 1.
        gpu: Whether to include figures of GPUs, if there are any.
        load: Names of the metrics in reports of the server's load.
    """

    enabled: bool = True
    address: str = ""
    port: int = 8002
    descriptors: tuple[int, ...] = ()
    interval_ms: int = 2000
    cpu: bool = True
    counter_latencies: bool = True
    histogram_latencies: bool = True
    summary_latencies: bool = False
    summary_quantiles: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)
    gpu: bool = True
    load: tuple[str, ...] = LOAD_METRICS


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The repositories, and when models are loaded.

    Attributes:
        repositories: Paths of model repositories, and URIs of those in object stores.
        files: How files are served that the command line names in place of a repository.
        control_mode: When models are loaded.
        poll_secs: Polling interval of the repositories in modes POLL and AUTO, in seconds; read `poll_interval_secs`.
        load: Models to load at startup in modes EXPLICIT and AUTO; `ALL_MODELS` alone for every one.
        config_name: `<model>/configs/<name>.pbtxt` is used where it exists; "" for config.pbtxt.
        auto_complete: Whether missing configuration is filled in from the models themselves.
        load_thread_count: Limit of concurrent model loads.
        load_retry_count: Retries after a load has failed.
        namespacing: Whether repositories are namespaces of models.
        agents: Folder of repository agents, "" for the built-in ones only.
        strict_versions: Whether one version that fails to load keeps the others of that load from answering.
        stores: How repositories in object stores are read.
        auto: How models are loaded in mode AUTO.
    """

    repositories: tuple[str, ...] = ()
    files: FileOptions = field(default_factory=FileOptions)
    control_mode: ControlMode = ControlMode.NONE
    poll_secs: int = 15
    load: tuple[str, ...] = ()
    config_name: str = ""
    auto_complete: bool = True
    load_thread_count: int = 4
    load_retry_count: int = 0
    namespacing: bool = False
    agents: str = ""
    strict_versions: bool = False
    stores: StoreSettings = field(default_factory=StoreSettings)
    auto: AutoOptions = field(default_factory=AutoOptions)

    @property
    def poll_interval_secs(self) -> int:
        """Polling interval of the repositories in seconds, 0 unless the mode is POLL or AUTO."""
        return self.poll_secs if self.control_mode in (ControlMode.POLL, ControlMode.AUTO) else 0

    def problems(self) -> Iterator[str]:
        """Yield the problems."""
        yield from self.files.problems()
        if self.load and self.control_mode not in (ControlMode.EXPLICIT, ControlMode.AUTO):
            yield "Use of '--load-model' requires setting '--model-control-mode=explicit' as well."
        if ALL_MODELS in self.load and len(set(self.load)) > 1:
            yield f"Wildcard model name '{ALL_MODELS}' must be the ONLY startup model if specified at all."
        if "/" in self.config_name or self.config_name in (".", ".."):
            yield f"--model-config-name: expected a name without '/', got '{self.config_name}'"
        if self.control_mode is ControlMode.POLL and self.poll_secs < 1:
            yield f"--repository-poll-secs: expected at least 1 with --model-control-mode=poll, got {self.poll_secs}"
        yield from self.auto.problems(is_auto=self.control_mode is ControlMode.AUTO)


REPLICA_HOST = "127.0.0.1"
"""Address of the HTTP endpoint of one of several servers that share their listening sockets."""

BUSY_POLL_US = 1000
"""Default of `ServerOptions.busy_poll_us`: well above a slow small request, so slowness does not prevent polling."""

BUSY_POLL_US_MAX = 10_000

CLIENT_SHM_BYTES = 16 * 2**30
"""Default of `ServerOptions.client_shm_bytes_max`."""


@dataclass(frozen=True, slots=True)
class RequestLogOptions:
    """The request log.

    Attributes:
        target: Folder, or address of an object store; "" for none.
        sample: Share of the requests that are logged.
        bytes_max: Size of all files in the folder; the oldest ones are removed.
        headers: Names of the headers that are written.
        redact: Names of inputs, outputs and parameters whose values are left out.
        hook: `FILE.py:FUNCTION` that gets each record and returns the one to write, "" for none.
    """

    target: str = ""
    sample: float = 1.0
    bytes_max: int = 1024 * 1024 * 1024
    headers: tuple[str, ...] = ()
    redact: tuple[str, ...] = ()
    hook: str = ""

    def problems(self) -> Iterator[str]:
        if not self.target and self != RequestLogOptions():
            yield "--request-log-...: expected --request-log=FOLDER, too; nothing is logged"


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """All options of `charonia serve`.

    Attributes:
        id: Server name in the server metadata.
        exit_delay_secs: Seconds to keep accepting requests after shutdown starts; asks clients to leave.
        exit_timeout_secs: Seconds that requests in flight have at shutdown.
        exit_on_error: Whether a model that fails to load at startup ends the server.
        readiness: Which models have to be ready for the server to be ready.
        models: Repositories and loading.
        http: HTTP endpoint.
        grpc: gRPC endpoint.
        clouds: Endpoints for clouds.
        metrics: Metrics endpoint.
        request_log: The request log.
        trace: Tracing of requests.
        cache: Response cache.
        backends: Settings by backend name and key; the backend name "" holds those for every backend.
        backend_directory: Folder of backends written in Python, "" for none.
        front_ends: Processes that take requests, 0 for the process that runs the models, `FRONT_ENDS_AUTO` for as
            many as `charonia serve` chooses. An embedded server is always one process.
        replica_port: HTTP port of this server alone, on the loopback interface, where others may share its listening
            sockets; 0 where none may.
        beside: Process id of a server whose listening sockets this one shares, 0 for separate sockets.
        memory_limit_mib: Memory that the engine may have, with its workers and the front ends, in MiB; 0 for no limit.
        cpu_cores: Cores that models may use, 0 for all that this process may use, except the cores of front ends.
        pinned_memory_bytes: Limit of memory pinned for copies to and from GPUs, in bytes.
        host_policies: Cores that instances run on, by policy.
        busy_poll_us: Longest time in us that the server busy-polls between requests of a lone client, 0 for never.
        api_keys: Path of the file of API keys, "" if none is needed.
        fairness_header: Header by whose value clients share busy models fairly; "" for their keys or addresses.
        client_shm: Whether clients may register shared memory.
        client_shm_bytes_max: Limit of all their regions together, in bytes.

    Raises:
        ServingError: INVALID_ARG with every violated rule.
    """

    id: str = USUAL_NAME
    exit_delay_secs: int = 0
    exit_timeout_secs: int = 30
    exit_on_error: bool = True
    readiness: ReadyWhen = ReadyWhen.ALL_MODELS
    models: ModelOptions = ModelOptions()
    http: HttpOptions = HttpOptions()
    grpc: GrpcOptions = GrpcOptions()
    clouds: CloudOptions = CloudOptions()
    metrics: MetricsOptions = MetricsOptions()
    log: LogOptions = field(default_factory=LogOptions)
    request_log: RequestLogOptions = RequestLogOptions()
    trace: TraceOptions = field(default_factory=TraceOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    rate_limit: RateLimitOptions = field(default_factory=RateLimitOptions)
    backends: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    backend_directory: str = ""
    front_ends: int = 0
    replica_port: int = 0
    beside: int = 0
    memory_limit_mib: int = 0
    cpu_cores: int = 0
    pinned_memory_bytes: int = 256 * 1024 * 1024
    host_policies: Mapping[str, HostPolicy] = field(default_factory=dict)
    busy_poll_us: int = BUSY_POLL_US
    api_keys: str = ""
    fairness_header: str = ""
    client_shm: bool = False
    client_shm_bytes_max: int = CLIENT_SHM_BYTES

    def __post_init__(self) -> None:
        found = [*self.models.problems(), *self.http.tls.problems("http"), *self.grpc.tls.problems("grpc")]
        if self.front_ends and (self.clouds.sagemaker or self.clouds.vertex_ai):
            found.append("--allow-sagemaker, --allow-vertex-ai: expected --front-ends=0, a server of one process")
        if self.http.limits.responses_stored_max and self.front_ends not in (0, 1):
            found.append("--stored-responses: expected --front-ends=1 at most, each front end would store its own")
        found += self._guard_problems()
        found += [
            *self.request_log.problems(),
            *self.trace.problems(),
            *self.cache.problems(),
            *self.rate_limit.problems(),
            *self._port_collisions(),
        ]
        if self.log.access_file and self.log.access is AccessLogFormat.NONE:
            found.append("--access-log-file: expected --access-log=text or --access-log=json, too; nothing is logged")
        found += self.http.access.problems("--http-restricted-api", "--http-header-forward-pattern")
        found += self.grpc.access.problems("--grpc-restricted-protocol", "--grpc-header-forward-pattern")
        if found:
            raise invalid("\n".join(found))

    @property
    def metrics_address(self) -> str:
        """Address that the metrics endpoint listens on."""
        return self.metrics.address or self.http.address

    def _guard_problems(self) -> Iterator[str]:
        if self.replica_port and self.front_ends < 1:
            yield "--replica-port: expected --front-ends=1 or more, too"
        if self.replica_port and not self.http.enabled:
            yield "--replica-port: expected an HTTP endpoint, got --allow-http=false"
        if self.beside and not self.replica_port:
            yield "--beside: expected --replica-port, too"

    def _port_collisions(self) -> Iterator[str]:
        endpoints = [
            (name, address, port)
            for name, enabled, address, port in (
                ("http", self.http.enabled, self.http.address, self.http.port),
                ("grpc", self.grpc.enabled, self.grpc.address, self.grpc.port),
                ("metrics", self.metrics.enabled, self.metrics_address, self.metrics.port),
                ("sagemaker", self.clouds.sagemaker, self.http.address, self.clouds.sagemaker_port),
                ("vertex-ai", self.clouds.vertex_ai, self.http.address, self.clouds.vertex_ai_port),
                ("replica", True, REPLICA_HOST, self.replica_port),
            )
            if enabled and port
        ]
        safe = self.clouds.safe_ports if self.clouds.sagemaker else None
        for name, _, port in endpoints if safe is not None else ():
            if safe is not None and name not in ("sagemaker", "replica") and not safe[0] <= port <= safe[1]:
                yield (
                    f"The server cannot listen to {name.upper()} requests at port {port}, allowed port range is "
                    f"[{safe[0]}, {safe[1]}] (hint: --{name}-port, --sagemaker-safe-port-range)"
                )
        for index, (name, address, port) in enumerate(endpoints):
            for other, other_address, other_port in endpoints[:index]:
                if port == other_port and _overlap(address, other_address):
                    yield f"--{name}-port: port {port} is already that of --{other}-port"


def _overlap(one: str, other: str) -> bool:
    return one == other or one in WILDCARD_ADDRESSES or other in WILDCARD_ADDRESSES
