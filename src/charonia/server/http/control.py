"""Routes for the state of the server and its models, and for changes at run time."""

from charonia.config.json_form import to_json
from charonia.core.errors import invalid, not_found, unavailable, unsupported
from charonia.server.facade import (
    NO_LOG_CONTROL,
    Engine,
    LogControl,
    Services,
    TrafficControl,
    known_model,
)
from charonia.server.http.exchange import Exchange, Tasks
from charonia.server.http.routes import Route, RouteTarget
from charonia.server.shared_memory.registry import RegionRegistry
from charonia.server.tracing.requests import NO_TRACING, Tracing
from charonia.wire import log_settings, trace_settings, v2_control
from charonia.wire.json_text import dump, parse_object
from charonia.wire.orca import load_document
from charonia.wire.shared_memory import (
    decode_cuda_register,
    decode_system_register,
    describe_cuda,
    describe_system,
    disabled,
)

_MODEL = "/v2/models/{model}"
_REPOSITORY = "/v2/repository/models/{model}"
_NAMED_REPOSITORY = "/v2/repository/{repository}"


class StatusHandlers:
    """Health, metadata, configurations and statistics."""

    def __init__(self, engine: Engine, services: Services, tasks: Tasks) -> None:
        self._engine = engine
        self._services = services
        self._tasks = tasks

    def routes(self) -> list[Route]:
        """Return the routes."""
        later = self._tasks.document
        table = [
            Route("/v2", {b"GET": self._server}),
            Route("/v2/health/live", {b"GET": self._live}),
            Route("/v2/health/ready", {b"GET": self._ready}),
            Route("/v2/models", {b"GET": later(self._models)}),
            Route("/v2/models/stats", {b"GET": later(self._statistics)}),
            Route("/v2/ratelimit", {b"GET": later(self._rate_limits)}),
            Route("/v2/load", {b"GET": later(self._load)}),
        ]
        for base in (_MODEL, _MODEL + "/versions/{version}"):
            table += [
                Route(base, {b"GET": self._model}),
                Route(base + "/ready", {b"GET": self._model_ready}),
                Route(base + "/config", {b"GET": self._config}),
                Route(base + "/stats", {b"GET": later(self._statistics)}),
                Route(base + "/sequences", {b"GET": later(self._sequences)}),
                Route(base + "/explain", {b"GET": later(self._explain)}),
            ]
        return table

    def _live(self, exchange: Exchange, target: RouteTarget) -> None:
        self._health(exchange, "live", self._engine.is_live())

    def _ready(self, exchange: Exchange, target: RouteTarget) -> None:
        self._health(exchange, "ready", self._engine.is_ready())

    def _health(self, exchange: Exchange, question: str, answer: bool) -> None:
        """Answer with a status; scripts compare what curl prints, so the document of KServe comes on request only."""
        accepted = exchange.request.headers.get(b"accept", b"")
        is_document = self._services.has_health_documents or b"application/json" in accepted
        exchange.respond(200 if answer else 400, [dump({question: answer})] if is_document else [])

    def _model_ready(self, exchange: Exchange, target: RouteTarget) -> None:
        async def answer() -> None:
            if not await self._engine.model_ready(*target):
                raise invalid("Model version not ready")
            self._health(exchange, "ready", True)

        self._tasks.start(exchange, answer())

    def _server(self, exchange: Exchange, target: RouteTarget) -> None:
        _json(exchange, v2_control.server_metadata(self._engine.server_metadata()))

    async def _models(self, exchange: Exchange, target: RouteTarget) -> object:
        """Return the names of the ready models, as KServe's own servers do."""
        return {"models": sorted({each.name for each in await self._engine.repository_index(ready_only=True)})}

    def _model(self, exchange: Exchange, target: RouteTarget) -> None:
        _json(exchange, v2_control.model_metadata(self._engine.model_metadata(*target)))

    def _config(self, exchange: Exchange, target: RouteTarget) -> None:
        _json(exchange, to_json(self._engine.model_config(*target)))

    async def _statistics(self, exchange: Exchange, target: RouteTarget) -> object:
        return v2_control.statistics(await self._engine.model_statistics(*target))

    async def _sequences(self, exchange: Exchange, target: RouteTarget) -> object:
        if self._services.sequences is None:
            raise not_found("sequences are not shown here")
        return await self._services.sequences(*target)

    async def _explain(self, exchange: Exchange, target: RouteTarget) -> object:
        if self._services.explain is None:
            raise not_found("models are not explained here")
        return await self._services.explain(*target)

    async def _load(self, exchange: Exchange, target: RouteTarget) -> object:
        if self._services.load is None:
            raise not_found("the load of this server is not reported here")
        return load_document(await self._services.load.report())

    async def _rate_limits(self, exchange: Exchange, target: RouteTarget) -> object:
        if self._services.rate_limits is None:
            raise unavailable("the rate limiter is off", hint="start the server with --rate-limit=execution_count")
        return await self._services.rate_limits()


class ControlHandlers:
    """The repository, and the settings of tracing, logging and traffic. Bodies may be compressed."""

    def __init__(self, engine: Engine, services: Services, tasks: Tasks) -> None:
        self._engine = engine
        self._services = services
        self._tasks = tasks

    def routes(self) -> list[Route]:
        later = self._tasks.document
        trace = {b"GET": later(self._trace), b"POST": later(self._change_trace)}
        traffic = {b"GET": later(self._traffic), b"POST": later(self._change_traffic), b"DELETE": later(self._reset)}
        return [
            Route("/v2/repository/index", {b"POST": later(self._index)}),
            Route(_REPOSITORY + "/load", {b"POST": later(self._load)}),
            Route(_REPOSITORY + "/unload", {b"POST": later(self._unload)}),
            Route(_NAMED_REPOSITORY + "/index", {b"POST": _named_repository}),
            Route(_NAMED_REPOSITORY + "/models/{model}/load", {b"POST": _named_repository}),
            Route(_NAMED_REPOSITORY + "/models/{model}/unload", {b"POST": _named_repository}),
            Route("/v2/trace/setting", trace),
            Route(_MODEL + "/trace/setting", trace),
            Route("/v2/logging", {b"GET": self._log, b"POST": later(self._change_log)}),
            Route(_MODEL + "/traffic", traffic),
        ]

    async def _index(self, exchange: Exchange, target: RouteTarget) -> object:
        ready_only = v2_control.decode_index(await self._tasks.body(exchange.request))
        return v2_control.index(await self._engine.repository_index(ready_only))

    async def _load(self, exchange: Exchange, target: RouteTarget) -> None:
        exchange.model = target.model
        config, files = v2_control.decode_load(await self._tasks.body(exchange.request))
        await self._engine.load_model(target.model, config, files or None)

    async def _unload(self, exchange: Exchange, target: RouteTarget) -> None:
        exchange.model = target.model
        dependents = v2_control.decode_unload(await self._tasks.body(exchange.request))
        await self._engine.unload_model(target.model, dependents)

    async def _trace(self, exchange: Exchange, target: RouteTarget) -> object:
        tracing = self._tracing(target.model)
        return trace_settings.describe(await tracing.settings(target.model))

    async def _change_trace(self, exchange: Exchange, target: RouteTarget) -> object:
        tracing = self._tracing(target.model)
        await tracing.change(target.model, trace_settings.decode_json(await self._tasks.body(exchange.request)))
        return await self._trace(exchange, target)

    def _log(self, exchange: Exchange, target: RouteTarget) -> None:
        _json(exchange, log_settings.describe(self._log_control().options))

    async def _change_log(self, exchange: Exchange, target: RouteTarget) -> object:
        control = self._log_control()
        body = await self._tasks.body(exchange.request)
        await control.change(log_settings.decode_json(body, control.options))
        return log_settings.describe(control.options)

    async def _traffic(self, exchange: Exchange, target: RouteTarget) -> object:
        return await self._traffic_of(exchange, target).show(target.model)

    async def _change_traffic(self, exchange: Exchange, target: RouteTarget) -> object:
        traffic = self._traffic_of(exchange, target)
        return await traffic.change(target.model, parse_object(await self._tasks.body(exchange.request)))

    async def _reset(self, exchange: Exchange, target: RouteTarget) -> object:
        return await self._traffic_of(exchange, target).reset(target.model)

    def _tracing(self, model: str) -> Tracing:
        if self._services.tracing is None:
            raise unsupported(NO_TRACING)
        known_model(self._engine, model)
        return self._services.tracing

    def _log_control(self) -> LogControl:
        if self._services.log is None:
            raise unsupported(NO_LOG_CONTROL, hint="change the settings of `logging` there")
        return self._services.log

    def _traffic_of(self, exchange: Exchange, target: RouteTarget) -> TrafficControl:
        exchange.model = target.model
        if self._services.traffic is None:
            raise unsupported("traffic between versions is not offered here")
        return self._services.traffic


class SharedMemoryHandlers:
    """Registration of clients' system and CUDA shared memory; `regions` is None where shared memory is off."""

    def __init__(self, regions: RegionRegistry | None, tasks: Tasks) -> None:
        self._given = regions
        self._tasks = tasks

    def routes(self) -> list[Route]:
        later, routes = self._tasks.document, []
        for base, describe, register, unregister in (
            ("/v2/systemsharedmemory", self._system, self._register_system, self._unregister_system),
            ("/v2/cudasharedmemory", self._cuda, self._register_cuda, self._unregister_cuda),
        ):
            region = base + "/region/{region}"
            routes += [
                Route(base + "/status", {b"GET": later(describe)}),
                Route(region + "/status", {b"GET": later(describe)}),
                Route(region + "/register", {b"POST": later(register)}),
                Route(region + "/unregister", {b"POST": later(unregister)}),
                Route(base + "/unregister", {b"POST": later(unregister)}),
            ]
        return routes

    async def _system(self, exchange: Exchange, target: RouteTarget) -> object:
        return describe_system(self._regions.system(target.model)) if self._given or target.model else []

    async def _cuda(self, exchange: Exchange, target: RouteTarget) -> object:
        return describe_cuda(self._regions.cuda(target.model)) if self._given or target.model else []

    async def _register_system(self, exchange: Exchange, target: RouteTarget) -> None:
        body = await self._tasks.body(exchange.request)
        await self._regions.register_system(decode_system_register(target.model, body))

    async def _register_cuda(self, exchange: Exchange, target: RouteTarget) -> None:
        body = await self._tasks.body(exchange.request)
        await self._regions.register_cuda(decode_cuda_register(target.model, body))

    async def _unregister_system(self, exchange: Exchange, target: RouteTarget) -> None:
        await self._regions.unregister_system(target.model)

    async def _unregister_cuda(self, exchange: Exchange, target: RouteTarget) -> None:
        await self._regions.unregister_cuda(target.model)

    @property
    def _regions(self) -> RegionRegistry:
        if self._given is None:
            raise disabled()
        return self._given


def _json(exchange: Exchange, document: object) -> None:
    exchange.respond(200, [dump(document)])


def _named_repository(exchange: Exchange, target: RouteTarget) -> None:
    raise unsupported("'repository_name' specification is not supported", hint="leave it out of the path")
