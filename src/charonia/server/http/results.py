"""Long requests: with `Prefer: respond-async` the answer is 202 at once, with an address of the result to come.

Results are in the memory of this process, for a while. Whoever polls or cancels needs the permission of inference, and
the key that the request had. Source: RFC 7240, section 4.1.
"""

import asyncio
import secrets
from collections.abc import Callable

from charonia.core.errors import ServingError, not_found, unavailable, unsupported
from charonia.core.request import Flow
from charonia.server.access.rules import Gate
from charonia.server.http.exchange import RETRY_AFTER_S, Exchange, Reshaped
from charonia.server.http.routes import Route, RouteTarget
from charonia.wire.json_text import dump

PATH = "/v2/results/"

RESPOND_ASYNC = b"respond-async"
"""The preference."""

RESULTS_MAX = 1000
"""Most results, also those to come; a further request is refused."""

RESULTS_BYTES_MAX = 256 * 1024 * 1024
"""Most bytes of all results; with more, the oldest ones are dropped."""

EXPIRY_S = 600.0
"""Time for which a result can be fetched, from when it is there."""

_ERRORS = 400
_APPLIED = b"Preference-Applied: respond-async\r\n"


class _Result:
    """A result, in the place of the connection of its exchange.

    Attributes:
        exchange: The exchange that runs the model.
        response: Its response, None while it runs.
        owner: Name of the key of the request, "" for none.
    """

    def __init__(self, outer: Exchange, owner: str, results: "Results") -> None:
        self.flow: Flow = outer.peer
        self.id = secrets.token_urlsafe(24)
        self.owner = owner
        self.response: Reshaped | None = None
        self.exchange = Exchange(self, outer.request)
        self.exchange.reshape = self._take
        self._results = results

    @property
    def size(self) -> int:
        return sum(map(len, self.response.body)) if self.response is not None else 0

    def answered(self, exchange: Exchange) -> None:
        self._results.finished(self)

    def progressed(self, exchange: Exchange) -> None:
        """Nothing: a stream has no result."""

    def unsent_bytes(self) -> int:
        return 0

    def _take(self, response: Reshaped) -> Reshaped:
        self.response = response._replace(body=[bytes(part) for part in response.body])
        return response


class Results:
    """The results of an endpoint.

    Args:
        gate: The gate of the endpoint.
        is_possible: Whether all requests reach this process.
    """

    def __init__(self, gate: Gate | None, is_possible: bool) -> None:
        self._gate = gate
        self._is_possible = is_possible
        self._results: dict[str, _Result] = {}
        self._bytes = 0

    def routes(self) -> list[Route]:
        return [Route(PATH + "{result}", {b"GET": self._get, b"DELETE": self._delete})]

    def run(self, exchange: Exchange, submit: Callable[[Exchange], None]) -> None:
        """Run a model, and answer with its response, or that there will be one if the client prefers that.

        Args:
            exchange: The request.
            submit: Passes the request to the engine; its exchange gets the response.

        Raises:
            ServingError: There are too many results, or the server has front ends in other processes.
        """
        if RESPOND_ASYNC not in exchange.request.headers.get(b"prefer", b""):
            submit(exchange)
            return
        if not self._is_possible:
            raise unsupported(
                "'Prefer: respond-async' needs a server of one process: results are in its memory",
                hint="--front-ends=0, or a request without this field",
            )
        if len(self._results) >= RESULTS_MAX:
            raise unavailable(f"there are {RESULTS_MAX} results", hint="cancel the ones not needed, or retry later")
        result = _Result(exchange, self._key(exchange), self)
        self._results[result.id] = result
        try:
            submit(result.exchange)
        except ServingError:
            self._drop(result)
            raise
        if result.response is not None and result.response.status >= _ERRORS:
            self._drop(result)
            exchange.respond(*result.response)
            return
        url = PATH + result.id
        document = {"id": result.id, "status": "running", "url": url}
        fields = b"Location: %b\r\n%bRetry-After: %d\r\n" % (url.encode(), _APPLIED, RETRY_AFTER_S)
        exchange.respond(202, [dump(document)], extra=fields)

    def finished(self, result: _Result) -> None:
        """A result is there."""
        if self._results.pop(result.id, None) is None:
            return
        self._results[result.id] = result  # in the order in which they are there
        result.exchange.request.body = b""
        self._bytes += result.size
        for other in list(self._results.values()):
            if self._bytes <= RESULTS_BYTES_MAX:
                break
            if other.response is not None:
                self._drop(other)
        asyncio.get_running_loop().call_later(EXPIRY_S, self._drop, result)

    def _get(self, exchange: Exchange, target: RouteTarget) -> None:
        result = self._find(exchange, target.model)
        if result.response is not None:
            exchange.respond(*result.response)
            return
        fields = b"Retry-After: %d\r\n" % RETRY_AFTER_S
        exchange.respond(202, [dump({"id": result.id, "status": "running"})], extra=fields)

    def _delete(self, exchange: Exchange, target: RouteTarget) -> None:
        result = self._find(exchange, target.model)
        self._drop(result)
        result.exchange.abandon()
        exchange.respond(200, [dump({"id": result.id, "status": "cancelled"})])

    def _find(self, exchange: Exchange, id: str) -> _Result:
        result = self._results.get(id)
        if result is None or result.owner != self._key(exchange):
            raise _unknown(id)
        return result

    def _drop(self, result: _Result) -> None:
        if self._results.pop(result.id, None) is not None:
            self._bytes -= result.size

    def _key(self, exchange: Exchange) -> str:
        flow = self._gate.flow(exchange.request.headers.get) if self._gate is not None else None
        return flow.name if flow is not None else ""


def _unknown(id: str) -> ServingError:
    return not_found(
        f"there is no result '{id:.64}'",
        hint=f"results are kept for {EXPIRY_S:.0f} s, until they are cancelled or the server ends",
    )
