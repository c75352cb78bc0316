"""The route that shows who holds which resource of the rate limiter."""

from collections.abc import Callable

from charonia.core.errors import unavailable
from charonia.server.http.exchange import Exchange
from charonia.server.http.routes import Route, Target
from charonia.server.rate_limiter.overview import RateLimitView, view_json
from charonia.wire.json_text import dump


class RateLimitHandlers:
    """`GET /v2/ratelimit`.

    Args:
        view: Returns who holds what, None without a rate limiter.
    """

    def __init__(self, view: Callable[[], RateLimitView] | None) -> None:
        self._view = view

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [Route("/v2/ratelimit", {b"GET": self._show})]

    def _show(self, exchange: Exchange, target: Target) -> None:
        if self._view is None:
            raise unavailable("the rate limiter is off", hint="start the server with --rate-limit=execution_count")
        exchange.respond(200, [dump(view_json(self._view()))])
