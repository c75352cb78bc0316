"""The route that explains what limits a model and what to change."""

from collections.abc import Callable

from charonia.core.errors import not_found
from charonia.server.explain.explanation import Explanation, explanation_json
from charonia.server.http.exchange import Exchange
from charonia.server.http.routes import Route, Target
from charonia.wire.json_text import dump


class ExplainHandlers:
    """`GET /v2/models/{model}/explain`.

    Args:
        explain: Explains a model by name and version, None where nobody offers it.
    """

    def __init__(self, explain: Callable[[str, str], Explanation] | None) -> None:
        self._explain = explain

    def routes(self) -> list[Route]:
        """Return the routes."""
        model = "/v2/models/{model}"
        return [Route(f"{base}/explain", {b"GET": self._show}) for base in (model, model + "/versions/{version}")]

    def _show(self, exchange: Exchange, target: Target) -> None:
        if self._explain is None:
            raise not_found("models are not explained here")
        exchange.respond(200, [dump(explanation_json(self._explain(target.model, target.version)))])
