"""The route that shows the slots and the backlog of a model that works on sequences."""

from collections.abc import Callable

from charonia.core.errors import not_found
from charonia.server.http.exchange import Exchange
from charonia.server.http.routes import Route, Target
from charonia.server.sequences.overview import ModelSequences, sequences_json
from charonia.wire.json_text import dump


class SequenceHandlers:
    """`GET /v2/models/{model}/sequences`.

    Args:
        view: Returns the sequences of a model by name and version, None where nobody offers them.
    """

    def __init__(self, view: Callable[[str, str], ModelSequences] | None) -> None:
        self._view = view

    def routes(self) -> list[Route]:
        """Return the routes."""
        model = "/v2/models/{model}"
        return [Route(f"{base}/sequences", {b"GET": self._show}) for base in (model, model + "/versions/{version}")]

    def _show(self, exchange: Exchange, target: Target) -> None:
        if self._view is None:
            raise not_found("sequences are not shown here")
        exchange.respond(200, [dump(sequences_json(self._view(target.model, target.version)))])
