"""Routes for the state of the server and its models, and for changes at run time."""

from collections.abc import Awaitable, Callable, Sequence

from charonia.config.json_form import to_json
from charonia.core.errors import invalid, not_found, unavailable, unsupported
from charonia.server.facade import (
    NO_LOG_CONTROL,
    Document,
    Engine,
    LogControl,
    Services,
    TrafficControl,
    known_model,
)
from charonia.server.http.exchange import Exchange, Tasks
from charonia.server.http.routes import Handler, Route, RouteTarget
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

Describe = Callable[[RegionRegistry, str], Sequence[object]]
Unregister = Callable[[RegionRegistry, str], Awaitable[None]]


class StatusHandlers:
    """Health, metadata, configurations and statistics."""

    def __init__(self, engine: Engine, services: Services, tasks: Tasks) -> None:
        self._engine = engine
        self._services = services
        self._tasks = tasks

    def routes(self) -> list[Route]:
        """Return the routes."""
        table = [
            Route("/v2", {b"GET": self._server}),
            Route("/v2/health/live", {b"GET": self._live}),
            Route("/v2/health/ready", {b"GET": self._ready}),
            Route("/v2/models", {b"GET": self._models}),
            Route("/v2/models/stats", {b"GET": self._statistics}),
            Route("/v2/ratelimit", {b"GET": self._rate_limits}),
            Route("/v2/load", {b"GET": self._load}),
        ]
        for base in (_MODEL, _MODEL + "/versions/{version}"):
            table += [
                Route(base, {b"GET": self._model}),
                Route(base + "/ready", {b"GET": self._model_ready}),
                Route(base + "/config", {b"GET": self._config}),
                Route(base + "/stats", {b"GET": self._statistics}),
                Route(base + "/sequences", {b"GET": self._sequences}),
                Route(base + "/explain", {b"GET": self._explain}),
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

    def _models(self, exchange: Exchange, target: RouteTarget) -> None:
        """Answer with the names of the ready models, as KServe's own servers do."""

        async def document() -> Document:
            return {"models": sorted({each.name for each in await self._engine.repository_index(ready_only=True)})}

        self._document(exchange, document())

    def _model(self, exchange: Exchange, target: RouteTarget) -> None:
        _json(exchange, v2_control.model_metadata(self._engine.model_metadata(*target)))

    def _config(self, exchange: Exchange, target: RouteTarget) -> None:
        _json(exchange, to_json(self._engine.model_config(*target)))

    def _statistics(self, exchange: Exchange, target: RouteTarget) -> None:
        async def answer() -> None:
            _json(exchange, v2_control.statistics(await self._engine.model_statistics(*target)))

        self._tasks.start(exchange, answer())

    def _sequences(self, exchange: Exchange, target: RouteTarget) -> None:
        if self._services.sequences is None:
            raise not_found("sequences are not shown here")
        self._document(exchange, self._services.sequences(*target))

    def _explain(self, exchange: Exchange, target: RouteTarget) -> None:
        if self._services.explain is None:
            raise not_found("models are not explained here")
        self._document(exchange, self._services.explain(*target))

    def _load(self, exchange: Exchange, target: RouteTarget) -> None:
        load = self._services.load
        if load is None:
            raise not_found("the load of this server is not reported here")

        async def document() -> Document:
            return load_document(await load.report())

        self._document(exchange, document())

    def _rate_limits(self, exchange: Exchange, target: RouteTarget) -> None:
        if self._services.rate_limits is None:
            raise unavailable("the rate limiter is off", hint="start the server with --rate-limit=execution_count")
        self._document(exchange, self._services.rate_limits())

    def _document(self, exchange: Exchange, document: Awaitable[Document]) -> None:
        async def answer() -> None:
            _json(exchange, await document)

        self._tasks.start(exchange, answer())


class ControlHandlers:
    """The repository, and the settings of tracing and logging. Requests with a body, perhaps compressed, are tasks."""

    def __init__(self, engine: Engine, services: Services, tasks: Tasks) -> None:
        self._engine = engine
        self._services = services
        self._tasks = tasks

    def routes(self) -> list[Route]:
        trace: dict[bytes, Handler] = {b"GET": self._trace, b"POST": self._change_trace}
        return [
            Route("/v2/repository/index", {b"POST": self._index}),
            Route(_REPOSITORY + "/load", {b"POST": self._load}),
            Route(_REPOSITORY + "/unload", {b"POST": self._unload}),
            Route(_NAMED_REPOSITORY + "/index", {b"POST": _named_repository}),
            Route(_NAMED_REPOSITORY + "/models/{model}/load", {b"POST": _named_repository}),
            Route(_NAMED_REPOSITORY + "/models/{model}/unload", {b"POST": _named_repository}),
            Route("/v2/trace/setting", trace),
            Route(_MODEL + "/trace/setting", trace),
            Route("/v2/logging", {b"GET": self._log, b"POST": self._change_log}),
        ]

    def _index(self, exchange: Exchange, target: RouteTarget) -> None:
        async def answer() -> None:
            ready_only = v2_control.decode_index(await self._tasks.body(exchange.request))
            _json(exchange, v2_control.index(await self._engine.repository_index(ready_only)))

        self._tasks.start(exchange, answer())

    def _load(self, exchange: Exchange, target: RouteTarget) -> None:
        async def answer() -> None:
            config, files = v2_control.decode_load(await self._tasks.body(exchange.request))
            await self._engine.load_model(target.model, config, files or None)
            exchange.respond(200, [])

        exchange.model = target.model
        self._tasks.start(exchange, answer())

    def _unload(self, exchange: Exchange, target: RouteTarget) -> None:
        async def answer() -> None:
            dependents = v2_control.decode_unload(await self._tasks.body(exchange.request))
            await self._engine.unload_model(target.model, dependents)
            exchange.respond(200, [])

        exchange.model = target.model
        self._tasks.start(exchange, answer())

    def _trace(self, exchange: Exchange, target: RouteTarget) -> None:
        tracing = self._tracing()
        known_model(self._engine, target.model)

        async def answer() -> None:
            _json(exchange, trace_settings.describe(await tracing.settings(target.model)))

        self._tasks.start(exchange, answer())

    def _change_trace(self, exchange: Exchange, target: RouteTarget) -> None:
        async def answer() -> None:
            tracing = self._tracing()
            known_model(self._engine, target.model)
            await tracing.change(target.model, trace_settings.decode_json(await self._tasks.body(exchange.request)))
            self._trace(exchange, target)

        self._tasks.start(exchange, answer())

    def _log(self, exchange: Exchange, target: RouteTarget) -> None:
        _json(exchange, log_settings.describe(self._log_control().options))

    def _change_log(self, exchange: Exchange, target: RouteTarget) -> None:
        async def answer() -> None:
            control = self._log_control()
            body = await self._tasks.body(exchange.request)
            await control.change(log_settings.decode_json(body, control.options))
            self._log(exchange, target)

        self._tasks.start(exchange, answer())

    def _tracing(self) -> Tracing:
        if self._services.tracing is None:
            raise unsupported(NO_TRACING)
        return self._services.tracing

    def _log_control(self) -> LogControl:
        if self._services.log is None:
            raise unsupported(NO_LOG_CONTROL, hint="change the settings of `logging` there")
        return self._services.log


class TrafficHandlers:
    """How requests without a version are split among the versions of a model."""

    def __init__(self, traffic: TrafficControl | None, tasks: Tasks) -> None:
        """Create the handlers.

        Args:
            traffic: The traffic; None where it is not offered.
            tasks: Runs slow work.
        """
        self._traffic = traffic
        self._tasks = tasks

    def routes(self) -> list[Route]:
        return [Route(_MODEL + "/traffic", {b"GET": self._show, b"POST": self._change, b"DELETE": self._reset})]

    def _show(self, exchange: Exchange, target: RouteTarget) -> None:
        self._answer(exchange, target, self._offered().show(target.model))

    def _change(self, exchange: Exchange, target: RouteTarget) -> None:
        traffic = self._offered()

        async def change() -> Document:
            return await traffic.change(target.model, parse_object(await self._tasks.body(exchange.request)))

        self._answer(exchange, target, change())

    def _reset(self, exchange: Exchange, target: RouteTarget) -> None:
        self._answer(exchange, target, self._offered().reset(target.model))

    def _answer(self, exchange: Exchange, target: RouteTarget, document: Awaitable[Document]) -> None:
        async def answer() -> None:
            _json(exchange, await document)

        exchange.model = target.model
        self._tasks.start(exchange, answer())

    def _offered(self) -> TrafficControl:
        if self._traffic is None:
            raise unsupported("traffic between versions is not offered here")
        return self._traffic


class SharedMemoryHandlers:
    """Registration of clients' system and CUDA shared memory."""

    def __init__(self, regions: RegionRegistry | None, tasks: Tasks) -> None:
        """Create the handlers.

        Args:
            regions: The registered regions; None where shared memory is off.
            tasks: Runs slow work.
        """
        self._regions = regions
        self._tasks = tasks

    def routes(self) -> list[Route]:
        return [
            *_kind_routes(
                "/v2/systemsharedmemory",
                self._status(lambda regions, name: describe_system(regions.system(name))),
                self._register_system,
                self._unregister(lambda regions, name: regions.unregister_system(name)),
            ),
            *_kind_routes(
                "/v2/cudasharedmemory",
                self._status(lambda regions, name: describe_cuda(regions.cuda(name))),
                self._register_cuda,
                self._unregister(lambda regions, name: regions.unregister_cuda(name)),
            ),
        ]

    def _status(self, describe: Describe) -> Handler:
        def handler(exchange: Exchange, target: RouteTarget) -> None:
            if self._regions is None and target.model:
                raise disabled()
            _json(exchange, describe(self._regions, target.model) if self._regions is not None else [])

        return handler

    def _unregister(self, unregister: Unregister) -> Handler:
        def handler(exchange: Exchange, target: RouteTarget) -> None:
            regions = self._offered()

            async def answer() -> None:
                await unregister(regions, target.model)
                exchange.respond(200, [])

            self._tasks.start(exchange, answer())

        return handler

    def _register_system(self, exchange: Exchange, target: RouteTarget) -> None:
        regions = self._offered()

        async def answer() -> None:
            body = await self._tasks.body(exchange.request)
            await regions.register_system(decode_system_register(target.model, body))
            exchange.respond(200, [])

        self._tasks.start(exchange, answer())

    def _register_cuda(self, exchange: Exchange, target: RouteTarget) -> None:
        regions = self._offered()

        async def answer() -> None:
            body = await self._tasks.body(exchange.request)
            await regions.register_cuda(decode_cuda_register(target.model, body))
            exchange.respond(200, [])

        self._tasks.start(exchange, answer())

    def _offered(self) -> RegionRegistry:
        if self._regions is None:
            raise disabled()
        return self._regions


def _kind_routes(base: str, status: Handler, register: Handler, unregister: Handler) -> list[Route]:
    region = base + "/region/{region}"
    return [
        Route(base + "/status", {b"GET": status}),
        Route(region + "/status", {b"GET": status}),
        Route(region + "/register", {b"POST": register}),
        Route(region + "/unregister", {b"POST": unregister}),
        Route(base + "/unregister", {b"POST": unregister}),
    ]


def _json(exchange: Exchange, document: object) -> None:
    exchange.respond(200, [dump(document)])


def _named_repository(exchange: Exchange, target: RouteTarget) -> None:
    raise unsupported("'repository_name' specification is not supported", hint="leave it out of the path")
