"""Handlers behind a gate: a call that may not be made never gets to its handler."""

from collections.abc import Sequence

from charonia.core.errors import invalid
from charonia.server.access.operations import operation_of_route
from charonia.server.access.rules import Gate, Operation
from charonia.server.http.exchange import Exchange
from charonia.server.http.routes import Handler, Route, Target
from charonia.wire.http_status import REFUSED


def guarded(routes: Sequence[Route], gate: Gate) -> list[Route]:
    """Return the routes behind a gate."""
    return [
        Route(route.path, {m: _guarded(h, operation_of_route(route.path), gate) for m, h in route.handlers.items()})
        for route in routes
    ]


def _guarded(handler: Handler, operation: Operation, gate: Gate) -> Handler:
    def check(exchange: Exchange, target: Target) -> None:
        refusal = gate.check(operation, exchange.headers.get)
        if refusal is None:
            handler(exchange, target)
        else:
            exchange.fail(invalid(refusal.message), REFUSED[refusal.kind])

    return check
