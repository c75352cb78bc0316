"""Routes about a model wait until it is loaded, where models are loaded when they are needed.

Inference waits in the engine by itself; what is said about a model, and raw requests, need its configuration first.
"""

from collections.abc import Awaitable, Sequence

from charonia.server.facade import Demand
from charonia.server.http.connection import JSON_SIZE
from charonia.server.http.exchange import Exchange
from charonia.server.http.routes import Handler, Route, Target
from charonia.server.http.work import Work

_AT_ONCE = ("/ready", "/stats", "/load", "/unload", "/trace/setting")
"""Ends of paths that say how things are and do not change them."""


def on_demand(routes: Sequence[Route], demand: Demand | None, work: Work) -> list[Route]:
    """Return the routes, with those waiting that need the model.

    Args:
        routes: All routes.
        demand: Loads models; None where they are loaded by other rules, and no route waits.
        work: The tasks of the endpoint.
    """
    if demand is None:
        return list(routes)
    table = []
    for route in routes:
        if "{model}" in route.path and not route.path.endswith(_AT_ONCE):
            is_infer = route.path.endswith("/infer")
            handlers = {method: _waiting(h, demand, work, only_raw=is_infer) for method, h in route.handlers.items()}
            route = Route(route.path, handlers)
        table.append(route)
    return table


def _waiting(handler: Handler, demand: Demand, work: Work, *, only_raw: bool) -> Handler:
    async def wait(loaded: Awaitable[None], exchange: Exchange, target: Target) -> None:
        await loaded
        if exchange.is_open:
            handler(exchange, target)

    def handle(exchange: Exchange, target: Target) -> None:
        loaded = None
        if not only_raw or exchange.headers.get(JSON_SIZE) == b"0":
            loaded = demand(target.model, target.version)
        if loaded is None:
            handler(exchange, target)
        else:
            work.start(exchange, wait(loaded, exchange, target))

    return handle
