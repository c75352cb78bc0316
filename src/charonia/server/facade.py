"""The facade that front ends call. Plain records in, plain records out.

`Engine` runs models; `Services` are the optional services beside it. Everything here runs on the event loop's thread.
`Engine` is a Protocol because a front end reaches an engine in its own process, one in another process through
`front_ends/remote_engine.py`, or in tests a fake. Calls on the request path return immediately; calls that only
the engine can answer are awaited.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError, invalid
from charonia.core.metadata import ModelIndexEntry, ModelMetadata, ServerMetadata
from charonia.core.request import FLOW_NAME_LENGTH_MAX, Flow, InferRequest
from charonia.core.response import InferResponse, Outcome, Reply, Ticket
from charonia.core.statistics import ModelStatistics, TokenUsage
from charonia.server.access.options import HeaderForward
from charonia.server.access.rules import Gate
from charonia.server.request_log import RequestRecorder
from charonia.server.shared_memory.registry import RegionRegistry
from charonia.server.tracing.requests import Tracing
from charonia.wire.log_settings import LogOptions
from charonia.wire.orca import Load
from charonia.wire.tensors import Lend

NO_LOG_CONTROL = "changing log settings is not offered by this server: its log is that of the program it runs in"
"""The error where the log belongs to the embedding program."""


class TrafficControl(Protocol):
    """How requests without a version are split among the versions of models."""

    @property
    def sticky(self) -> Mapping[str, tuple[bytes, ...]]:
        """By model, the headers of which the first that a request has keeps its client on a version."""

    async def show(self, model: str) -> "Document":
        """Return the traffic of a model.

        Raises:
            ServingError: The model does not exist.
        """

    async def change(self, model: str, document: dict[str, object]) -> "Document":
        """Change the traffic of a model, and return it. Raises ServingError."""

    async def reset(self, model: str) -> "Document":
        """Forget what requests have changed, and return the traffic of a model. Raises ServingError."""


class LogControl(Protocol):
    """The server's log."""

    @property
    def options(self) -> LogOptions: ...

    async def change(self, options: LogOptions) -> None: ...


Document = Mapping[str, object]
"""A JSON document."""

EnsureLoaded = Callable[[str, str], Awaitable[None] | None]
"""Returns an awaitable that ends when a model, given by name and version, is loaded; None where it is loaded."""


class LoadReports(Protocol):
    """The load of the server, in the process of a front end."""

    def request_report(self) -> None:
        """A request needs a report with its response."""

    def latest(self) -> Load:
        """Return the latest report, without waiting."""

    async def report(self) -> Load:
        """Return a new report. Raises ServingError."""


@dataclass(frozen=True, slots=True)
class Services:
    """The services of a front end beside the engine; a service that is None is not offered.

    Attributes:
        regions: Shared memory of clients.
        tracing: Traces of requests.
        request_log: Samples of requests with their answers.
        log: The server's log.
        http_gate: Permits or refuses calls over HTTP; None where every client may make every call.
        grpc_gate: The same for gRPC.
        http_headers: Headers of HTTP requests that become request parameters.
        grpc_headers: The same for gRPC.
        rate_limits: Returns the resources of the rate limiter and their holders.
        demand: Loads a model that a request names; None where models are not loaded on demand.
        explain: Explains what limits a model, given by name and version, and what to change.
        folders: Returns where the files of a model, given by name and version, lie: the folder of its version, and its
            own.
        count_tokens: Counts the tokens of a request of a flow to a model, given by name, that does not report them
            itself.
        page_scheme: Scheme of the HTTP endpoint, "http" or "https", for the page that shows the models; "" for no page.
        metrics_port: Port of the metrics endpoint, for the page; 0 for none.
        controls_models: Whether models are loaded and unloaded on request.
        sequences: Returns the slots and the backlog of a model, given by name and version, that works on sequences.
        cors_origins: Origins of pages in browsers that may call the server over HTTP.
        allowed_hosts: Hosts that HTTP requests may be for, besides local ones; None for all.
        traffic: How requests without a version are split.
        lend: Lends memory for the bodies of requests with large tensors, from which the engine reads them.
        has_openai: Whether OpenAI's API is served over HTTP.
        load: Reports of the server's load.
        has_kserve_v1: Whether KServe's v1 protocol is, too.
        mlflow_model: Model that MLflow's `/invocations` runs, "" for none.
        has_health_documents: Whether every health answer has a document, which clients of KServe read.
        fairness_header: Header, in lower case, by whose value clients share busy models fairly; b"" for none.
        keeps_results: Whether results can be kept for later: no other server shares the address.
        relay_result: Asks other front ends for a result, with HTTP method, id and owner; None where there are none.
        mounts: Sockets of the applications beside the models, by path.
    """

    regions: RegionRegistry | None = None
    tracing: Tracing | None = None
    request_log: RequestRecorder | None = None
    log: LogControl | None = None
    http_gate: Gate | None = None
    grpc_gate: Gate | None = None
    http_headers: HeaderForward | None = None
    grpc_headers: HeaderForward | None = None
    rate_limits: Callable[[], Awaitable[Document]] | None = None
    demand: EnsureLoaded | None = None
    page_scheme: str = ""
    metrics_port: int = 0
    controls_models: bool = False
    sequences: Callable[[str, str], Awaitable[Document]] | None = None
    explain: Callable[[str, str], Awaitable[Document]] | None = None
    folders: Callable[[str, str], Awaitable[list[str]]] | None = None
    count_tokens: Callable[[str, TokenUsage, Flow], Awaitable[None]] | None = None
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = None
    traffic: TrafficControl | None = None
    lend: Lend | None = None
    has_openai: bool = True
    load: LoadReports | None = None
    has_kserve_v1: bool = False
    mlflow_model: str = ""
    has_health_documents: bool = False
    fairness_header: bytes = b""
    keeps_results: bool = True
    relay_result: Callable[[str, str, str], Awaitable[list[Any] | None]] | None = None
    mounts: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_named_flows(self) -> bool:
        """Whether more than their addresses distinguishes clients."""
        return bool(self.fairness_header) or (self.http_gate is not None and self.http_gate.knows_keys)

    def flow(self, peer: Flow, gate: Gate | None, header: Callable[[bytes], bytes | None]) -> Flow:
        """Return the flow of a request.

        Args:
            peer: The flow of the client's address.
            gate: The gate of the protocol.
            header: Returns the value of a header by its lower-case name.
        """
        flow = (gate.flow(header) if gate is not None else None) or peer
        value = header(self.fairness_header) if self.fairness_header else None
        if value:
            return flow._replace(name=value[:FLOW_NAME_LENGTH_MAX].decode("latin-1"), weight=1)
        return flow

    @property
    def tracer(self) -> Tracing | None:
        """The tracing service, None where no request can ever be traced."""
        return self.tracing if self.tracing is not None and self.tracing.can_trace else None

    def affinity(self, model: str, header: Callable[[bytes], bytes | None]) -> str:
        """Return what stands for the client of a request, "" where the traffic of its model does not keep clients.

        Args:
            header: Returns the value of a header by its lower-case name.
        """
        for name in self.traffic.sticky.get(model, ()) if self.traffic is not None else ():
            value = header(name)
            if value:
                return blake2b(value, digest_size=16).hexdigest()
        return ""


NO_SERVICES = Services()
"""The engine only."""


class Engine(Protocol):
    """A server's models."""

    def infer(self, request: InferRequest, reply: Reply) -> Ticket:
        """Run a request. Never raises for a request's fault: every outcome goes to `reply`."""

    def is_live(self) -> bool:
        """Whether the server can answer at all."""

    def is_ready(self) -> bool:
        """Whether the server is ready for inference (false while it starts and from the moment it shuts down)."""

    def is_exiting(self) -> bool:
        """Whether the server is shutting down."""

    async def model_ready(self, name: str, version: str = "") -> bool:
        """Whether a version of the model is loaded, and ready by its own check, if it has one.

        An unknown model is not ready: programs wait in a loop for one that is still to come.

        Raises:
            ServingError: INVALID_ARG for a version that is not a number.
        """

    def server_metadata(self) -> ServerMetadata:
        """Return name, version and extensions of the server."""

    def model_metadata(self, name: str, version: str = "") -> ModelMetadata:
        """Return a model's tensors and ready versions.

        Raises:
            ServingError: NOT_FOUND, INVALID_ARG, or UNAVAILABLE when it is not ready.
        """

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        """Return the complete configuration in use. Raises as `model_metadata`."""

    def models_at(self, path: str) -> Mapping[bytes, str]:
        """Return the models that have this path of the HTTP endpoint as their own, by HTTP method."""

    async def model_statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        """Return statistics of all loaded models, of one, or of one version.

        Raises:
            ServingError: INVALID_ARG when the requested model or version is not loaded.
        """

    async def repository_index(self, ready_only: bool = False) -> list[ModelIndexEntry]:
        """Return every model in the repositories with the state of its versions."""

    async def load_model(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load or reload a model; returns when it is ready, or failed.

        Args:
            config: Configuration as JSON text to use instead of the model's own.
            files: Content by path relative to the model's folder; the folder on disk is then ignored. Needs `config`.

        Raises:
            ServingError: UNAVAILABLE unless in explicit mode; INVALID_ARG with the reason when the model fails to load.
        """

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        """Start to unload a model: requests in flight finish. Unknown names are accepted.

        Raises:
            ServingError: UNAVAILABLE unless in explicit mode.
        """


def first_error(engine: Engine, services: Services, model: str, version: str, error: ServingError) -> ServingError:
    """Return why a request that cannot be read is refused: a model that is not there counts first."""
    if services.demand is None:  # otherwise the model may be one that is loaded on demand
        try:
            engine.model_config(model, version)
        except ServingError as unknown:
            return unknown
    return error


def known_model(engine: Engine, model: str) -> None:
    """Check that the name is empty or that of a model that is ready.

    Raises:
        ServingError: INVALID_ARG.
    """
    if model:
        try:
            engine.model_config(model)
        except ServingError as error:
            raise invalid(f"Request for unknown model : {model}", hint=error.message) from error


class SingleResponse:
    """Collects the outcomes of a request to a decoupled model, and refuses unless there is exactly one response.

    Front ends need it only when the first outcome is not final.

    Args:
        refusal: The answer to a request with no response, or more than one.

    Attributes:
        is_over: Whether the last outcome has arrived.
    """

    __slots__ = ("_refusal", "_response", "is_over")

    def __init__(self, refusal: ServingError) -> None:
        self._refusal = refusal
        self._response: InferResponse | None = None
        self.is_over = False

    def take(self, outcome: Outcome, final: bool) -> InferResponse | ServingError | None:
        """Take an outcome; return the answer, None while it is undecided. Not to be called after an answer."""
        self.is_over = final
        if isinstance(outcome, ServingError):
            return outcome
        if outcome is not None:
            if self._response is not None:
                return self._refusal
            self._response = outcome
        if not final:
            return None
        return self._response if self._response is not None else self._refusal

    def settle(self, future: "asyncio.Future[InferResponse]", outcome: Outcome, final: bool) -> None:
        """Take an outcome, as a reply does; settle a future with the answer."""
        if future.done():
            return
        answer = self.take(outcome, final)
        if isinstance(answer, ServingError):
            future.set_exception(answer)
        elif answer is not None:
            future.set_result(answer)
