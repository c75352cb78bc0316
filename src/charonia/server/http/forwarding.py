"""Headers that become request parameters, by the names that they were sent under."""

from charonia.core.request import InferRequest
from charonia.server.access.header_forward import HeaderForward
from charonia.server.http.connection import HttpConnection
from charonia.server.http.exchange import Exchange
from charonia.server.http.traced import TimedConnection


class NamedConnection(HttpConnection):
    """A connection of a server that forwards headers: it keeps their names as they were sent."""

    remembers = False  # only the parser tells them

    def _reset(self) -> None:
        super()._reset()
        self._names: dict[bytes, bytes] = {}

    def on_header(self, name: bytes, value: bytes | None) -> None:
        """A header field, or a field of the trailer."""
        super().on_header(name, value)
        if not self._in_body:
            self._names[name.lower()] = name

    def _exchange(self) -> Exchange:
        exchange = super()._exchange()
        exchange.header_names = self._names
        return exchange


class NamedTimedConnection(NamedConnection, TimedConnection):
    """A connection of a server that forwards headers and may trace."""


def forward_headers(rule: HeaderForward, exchange: Exchange, request: InferRequest) -> None:
    """Make parameters of the headers that are forwarded. One of a name that the request gives too takes its place.

    Raises:
        ServingError: INVALID_ARG for a header that has a reserved name.
    """
    names = exchange.header_names or {}
    request.parameters.update(rule.parameters((names.get(key, key), value) for key, value in exchange.headers.items()))
