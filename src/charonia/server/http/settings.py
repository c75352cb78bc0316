"""The routes of the settings that can be changed at run time: tracing and the log."""

from charonia.core.errors import unsupported
from charonia.server.facade import NO_LOG_CONTROL, Engine, LogControl, Services, known_model
from charonia.server.http.exchange import Exchange
from charonia.server.http.routes import Handler, Route, Target
from charonia.server.http.work import Work
from charonia.server.tracing.requests import NO_TRACING, Tracing
from charonia.wire import log_settings, trace_settings
from charonia.wire.json_text import dump


class SettingsHandlers:
    """The routes `/v2/trace/setting`, `/v2/models/{model}/trace/setting` and `/v2/logging`."""

    def __init__(self, engine: Engine, services: Services, work: Work) -> None:
        """Make the handlers.

        Args:
            engine: Says which models there are.
            services: What is offered.
            work: Runs what takes a while.
        """
        self._engine = engine
        self._services = services
        self._work = work

    def routes(self) -> list[Route]:
        """Return the routes."""
        trace: dict[bytes, Handler] = {b"GET": self._trace, b"POST": self._change_trace}
        return [
            Route("/v2/trace/setting", trace),
            Route("/v2/models/{model}/trace/setting", trace),
            Route("/v2/logging", {b"GET": self._log, b"POST": self._change_log}),
        ]

    def _trace(self, exchange: Exchange, target: Target) -> None:
        tracing = self._tracing()
        known_model(self._engine, target.model)
        exchange.respond(200, [dump(trace_settings.describe(tracing.settings(target.model)))])

    def _change_trace(self, exchange: Exchange, target: Target) -> None:
        async def answer() -> None:
            tracing = self._tracing()
            known_model(self._engine, target.model)
            tracing.change(target.model, trace_settings.decode_json(await self._work.body(exchange)))
            self._trace(exchange, target)

        self._work.start(exchange, answer())

    def _log(self, exchange: Exchange, target: Target) -> None:
        exchange.respond(200, [dump(log_settings.describe(self._log_control().options))])

    def _change_log(self, exchange: Exchange, target: Target) -> None:
        async def answer() -> None:
            control = self._log_control()
            control.change(log_settings.decode_json(await self._work.body(exchange), control.options))
            self._log(exchange, target)

        self._work.start(exchange, answer())

    def _tracing(self) -> Tracing:
        if self._services.tracing is None:
            raise unsupported(NO_TRACING)
        return self._services.tracing

    def _log_control(self) -> LogControl:
        if self._services.log is None:
            raise unsupported(NO_LOG_CONTROL, hint="change the settings of `logging` there")
        return self._services.log
