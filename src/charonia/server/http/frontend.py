"""The HTTP endpoints: the KServe v2 protocol with OpenAI's API, and the metrics page."""

import asyncio
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from charonia.core.errors import ServingError
from charonia.core.response import InferResponse
from charonia.server.access.rules import Gate
from charonia.server.access_log import AccessEntry, AccessLog
from charonia.server.facade import NO_SERVICES, Engine, Services
from charonia.server.http.browsers import BrowserRules
from charonia.server.http.connection import EndpointState, HttpConnection
from charonia.server.http.control import ControlHandlers, SharedMemoryHandlers, StatusHandlers
from charonia.server.http.exchange import Exchange, Tasks
from charonia.server.http.inference import InferenceHandlers
from charonia.server.http.kserve_v1 import KserveV1Handlers
from charonia.server.http.limits import JSON_SIZE, HttpLimits
from charonia.server.http.mounts import Mounts
from charonia.server.http.page import PageHandlers
from charonia.server.http.results import Results
from charonia.server.http.routes import (
    Handler,
    Route,
    Router,
    RouteTarget,
    none_ready,
    nothing_at,
    on_demand,
    route_hint,
)
from charonia.server.listening import QUIET_S, drain, drain_gradually, listen, port_of
from charonia.server.openai.routes import OpenaiHandlers

__all__ = ["HttpFrontend", "HttpLimits", "MetricsFrontend", "protocol_routes"]

_log = logging.getLogger(__name__)

SWEEP_S = 1.0
"""Period of the sweep for slow and idle connections, which is the resolution of their time limits."""

METRICS_TYPE = b"text/plain; charset=utf-8"

NOTICE_S = 0.1
"""Time at shutdown in which idle connections stay open: the client of a request in transit then learns that it did not
run; from a closed connection it could not tell."""


class HttpEndpoint:
    """A listening socket, its connections and a route table.

    Attributes:
        shared: What the connections share.
        handle: Answers a request, now or later. Never raises.
        admit: Returns whether a request may be handled if a page of a browser has sent it; if not, answers it.
        refusal: Returns why a caller may not send a request, None if it may.
        port: Listening port, once started.
        accepted_count: Connections accepted.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        limits: HttpLimits,
        *,
        hint: Callable[[str], str],
        versions: Callable[[str], Sequence[str]] = none_ready,
        gate: Gate | None = None,
        browsers: BrowserRules | None = None,
        access_log: AccessLog | None = None,
        is_exiting: Callable[[], bool] = lambda: False,
        further: Callable[[str], dict[bytes, Handler]] = nothing_at,
    ) -> None:
        singular = frozenset({JSON_SIZE}) | (gate.singular if gate is not None else frozenset())
        self.shared = EndpointState(limits, singular, is_logged=access_log is not None)
        self._router = Router(
            routes, hint, versions=versions, gate=gate, browsers=browsers, is_exiting=is_exiting, further=further
        )
        self.handle, self.admit, self.refusal = self._router.handle, self._router.admit, self._router.refusal
        self.port = 0
        self.accepted_count = 0
        self._access_log = access_log
        self._connections: set[HttpConnection] = set()
        self._servers: list[asyncio.AbstractServer] = []
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(
        self,
        host: str,
        port: int,
        ssl: ssl.SSLContext | None = None,
        reuse_port: bool = False,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Listen. See `listening.listen`."""
        self._servers = await listen(self.connect, host, port, ssl=ssl, reuse_port=reuse_port, descriptors=descriptors)
        self.port = port_of(self._servers[0])
        self._sweep()

    def connect(self) -> HttpConnection:
        return HttpConnection(self)

    def stop_accepting(self) -> None:
        """Accept no more connections. Idle ones stay open until `drain`; a request on them is their last."""
        self.release_sockets()
        for connection in list(self._connections):
            if connection.uses() is None or connection.untaken()[0]:
                connection.wind_down()

    async def drain_gradually(self, timeout_s: float) -> None:
        self.release_sockets()
        await drain_gradually(self._connections, HttpConnection.uses, QUIET_S, timeout_s)

    async def ask_to_reconnect(self, timeout_s: float) -> None:
        """Serve as before for a while, and ask clients to leave: the next response of each connection is its last."""
        self.shared.is_closing = True
        await drain_gradually(self._connections, HttpConnection.uses, QUIET_S, timeout_s, least_s=timeout_s)

    def release_sockets(self) -> None:
        """Stop accepting connections; another process may. The next response of each connection is its last."""
        self.shared.is_closing = True
        while self._servers:
            self._servers.pop().close()

    def recheck(self) -> None:
        for connection in list(self._connections):
            connection.recheck(self.refusal)

    async def drain(self, timeout_s: float) -> bool:
        self.stop_accepting()
        if self._connections:
            await asyncio.sleep(min(NOTICE_S, timeout_s))
        return await drain(self._connections, timeout_s)

    async def close(self) -> None:
        self.stop_accepting()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connection in list(self._connections):
            connection.abort()
        await asyncio.sleep(0)

    @property
    def open_count(self) -> int:
        return len(self._connections)

    @property
    def request_count(self) -> int:
        """Requests received."""
        return self.shared.request_count

    # The connections' calls.

    def opened(self, connection: HttpConnection) -> bool:
        self._connections.add(connection)
        self.accepted_count += 1
        return len(self._connections) <= self.shared.limits.connections_max

    def closed(self, connection: HttpConnection) -> None:
        self._connections.discard(connection)

    def finished(self, exchange: Exchange) -> None:
        """Write the access log's line."""
        if self._access_log is None:
            return
        request, outcome = exchange.request, exchange.outcome
        response = outcome if isinstance(outcome, InferResponse) else None
        self._access_log.write(
            AccessEntry(
                "http",
                f"{request.method.decode('latin-1')} {request.url.decode('latin-1')}",
                exchange.status,
                model=exchange.model,
                version=response.model_version if response is not None else exchange.version,
                request_id=exchange.request_id,
                bytes_in=len(request.body),
                bytes_out=exchange.bytes_out,
                duration_ns=time.monotonic_ns() - exchange.received_ns if exchange.received_ns else 0,
                execution=response.execution if response is not None else None,
                usage=exchange.usage,
                first_ns=exchange.first_ns - exchange.received_ns if exchange.first_ns else 0,
            )
        )

    def _sweep(self) -> None:
        self._sweeper = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)
        self.shared.now_s = time.monotonic()
        for connection in list(self._connections):
            try:
                connection.check_time(self.shared.now_s)
            except Exception:  # a bug: it must not stop the sweep
                _log.exception("%r is closed after a fault", connection)
                connection.abort()


class HttpFrontend(HttpEndpoint):
    """The KServe v2 protocol over HTTP/1.1.

    Attributes:
        results: Results of requests that were answered before they ran.
    """

    def __init__(
        self,
        engine: Engine,
        limits: HttpLimits,
        *,
        access_log: AccessLog | None = None,
        services: Services = NO_SERVICES,
    ) -> None:
        tasks = Tasks(limits.body_bytes_max)
        gate = services.http_gate
        hidden = gate.singular if gate is not None else frozenset[bytes]()
        mounts = Mounts(services.mounts, hidden, services.page_scheme or "http", tasks)
        self.results = results = Results(services, tasks)
        models_at = InferenceHandlers(engine, limits, services, tasks, results).at_path
        super().__init__(
            protocol_routes(engine, limits, services, results),
            limits,
            hint=route_hint,
            versions=partial(_ready_versions, engine),
            gate=services.http_gate,
            browsers=BrowserRules(services.cors_origins, services.allowed_hosts),
            access_log=access_log,
            is_exiting=engine.is_exiting,
            further=lambda path: models_at(path) or mounts.at(path),
        )
        self.shared.allows_websockets = bool(services.mounts)
        self.shared.is_traced = services.tracer is not None
        self.shared.keeps_names = services.http_headers is not None
        self.shared.lend = services.lend
        self._router.load = services.load

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self.results.close)


def _ready_versions(engine: Engine, model: str) -> Sequence[str]:
    try:
        return engine.model_metadata(model).versions
    except ServingError:  # no version is
        return ()


def protocol_routes(
    engine: Engine, limits: HttpLimits, services: Services = NO_SERVICES, results: Results | None = None
) -> list[Route]:
    """Return the routes of the KServe v2 protocol, its extensions, OpenAI's API and KServe's v1 protocol."""
    tasks = Tasks(limits.body_bytes_max)
    results = results or Results(services, tasks)
    openai = OpenaiHandlers(engine, limits, services, tasks).routes() if services.has_openai else []
    routes = [
        *InferenceHandlers(engine, limits, services, tasks, results).routes(),
        *results.routes(),
        *StatusHandlers(engine, services, tasks).routes(),
        *ControlHandlers(engine, services, tasks).routes(),
        *SharedMemoryHandlers(services.regions, tasks).routes(),
        *PageHandlers(engine, limits, services, tasks).routes(),
        *KserveV1Handlers(engine, limits, services, tasks).routes(),  # before OpenAI's, whose models it lists as well
        *openai,
    ]
    return on_demand(routes, services.demand, tasks) if services.demand is not None else routes


class MetricsFrontend(HttpEndpoint):
    """The metrics page."""

    def __init__(
        self,
        render: Callable[[], bytes],
        collect: Callable[[], Awaitable[None]],
        allowed_hosts: Sequence[str] | None = None,
    ) -> None:
        """Create a front end."""
        tasks = Tasks(HttpLimits().body_bytes_max)

        async def answer(exchange: Exchange) -> None:
            await collect()
            exchange.respond(200, [render()], METRICS_TYPE)

        def page(exchange: Exchange, target: RouteTarget) -> None:
            tasks.start(exchange, answer(exchange))

        def hint(path: str) -> str:
            return "GET /metrics has the metrics"

        rules = BrowserRules(hosts=allowed_hosts)
        super().__init__([Route("/metrics", {b"GET": page})], HttpLimits(), hint=hint, browsers=rules)
