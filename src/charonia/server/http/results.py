"""Long requests: with `Prefer: respond-async` the answer is 202 at once, with an address of the result to come.

Results are in the memory of the process that received the request, for a while. With several front ends, one that does
not know a result asks the others through the engine. Whoever polls or cancels needs the permission of inference, and
the key that the request had. A function reports its progress in a file, whose path is part of its HTTP request.
Source: RFC 7240, section 4.1.
"""

import asyncio
import json
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from charonia.core.errors import ServingError, not_found, unavailable, unsupported
from charonia.core.request import Flow
from charonia.server.facade import Services
from charonia.server.http.exchange import JSON_TYPE, RETRY_AFTER_S, Exchange, Reshaped, Tasks
from charonia.server.http.routes import Route, RouteTarget
from charonia.server.machine.private_folder import PrivateFolder
from charonia.wire.json_text import dump

PATH = "/v2/results/"

RESPOND_ASYNC = b"respond-async"
"""The preference."""

RESULTS_MAX = 1000
"""Most results, also those to come; another request is refused."""

RESULTS_BYTES_MAX = 256 * 1024 * 1024
"""Most bytes of all results; with more, the oldest ones are dropped."""

EXPIRY_S = 600.0
"""Time for which a result can be fetched, from when it is there."""

RELAYED_BYTES_MAX = 32 * 1024 * 1024
"""Largest result that one front end gets from another."""

PROGRESS_BYTES_MAX = 16 * 1024
"""What is read of a report of progress."""

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

    def progress(self) -> dict[str, Any]:
        """Return the last progress that the function has reported."""
        with suppress(OSError, ValueError), open(self.exchange.progress_file, "rb") as file:
            return {**json.loads(file.read(PROGRESS_BYTES_MAX))}  # nothing yet is a ValueError
        return {}

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
        services: Services of the endpoint.
        tasks: Tasks of its requests.
    """

    def __init__(self, services: Services, tasks: Tasks) -> None:
        self._gate = services.http_gate
        self._is_possible = services.keeps_results
        self._relay = services.relay_result
        self._tasks = tasks
        self._folder: PrivateFolder | None = None
        self._results: dict[str, _Result] = {}
        self._bytes = 0

    def routes(self) -> list[Route]:
        return [Route(PATH + "{result}", {b"GET": self._asked, b"DELETE": self._asked})]

    def close(self) -> None:
        """Remove the files of progress."""
        if self._folder is not None:
            self._folder.remove()

    def run(self, exchange: Exchange, submit: Callable[[Exchange], None]) -> None:
        """Run a model, and answer with its response, or that there will be one if the client prefers that.

        Args:
            exchange: The request.
            submit: Passes the request to the engine; its exchange gets the response.

        Raises:
            ServingError: There are too many results, or several servers share the address.
        """
        if RESPOND_ASYNC not in exchange.request.headers.get(b"prefer", b""):
            submit(exchange)
            return
        if not self._is_possible:
            raise unsupported(
                "'Prefer: respond-async' needs an address that no other server shares: results are in its memory",
                hint="a server without --replica-port, or a request without this field",
            )
        if len(self._results) >= RESULTS_MAX:
            raise unavailable(f"there are {RESULTS_MAX} results", hint="cancel the ones not needed, or retry later")
        result = _Result(exchange, self._key(exchange), self)
        self._results[result.id] = result
        if self._folder is None:
            self._folder = PrivateFolder()
        file = self._folder.path / result.id
        file.touch()  # while it is there, a function writes to it
        result.exchange.progress_file = str(file)
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
        _remove(result)
        self._bytes += result.size
        for other in list(self._results.values()):
            if self._bytes <= RESULTS_BYTES_MAX:
                break
            if other.response is not None:
                self._drop(other)
        asyncio.get_running_loop().call_later(EXPIRY_S, self._drop, result)

    def answer(self, method: str, id: str, owner: str) -> Reshaped | None:
        """Return the response to a poll or a cancellation, None if the result is not in this process."""
        result = self._results.get(id)
        if result is None or result.owner != owner:
            return None
        if method == "DELETE":
            self._drop(result)
            result.exchange.abandon()
            return _state(200, id, "cancelled")
        if result.response is not None:
            return result.response
        return _state(202, id, "running", result.progress(), b"Retry-After: %d\r\n" % RETRY_AFTER_S)

    def relayed(self, method: str, id: str, owner: str) -> list[Any] | None:
        """Return `answer` for another process."""
        answer = self.answer(method, id, owner)
        if answer is None:
            return None
        body = b"".join(answer.body)
        if len(body) > RELAYED_BYTES_MAX:
            raise unavailable(
                f"the result has {len(body)} bytes, and front ends pass on at most {RELAYED_BYTES_MAX}",
                hint="poll on the connection of the request, or serve with --front-ends=0",
            )
        return [answer.status, body, answer.content_type, answer.extra]

    def _asked(self, exchange: Exchange, target: RouteTarget) -> None:
        question = exchange.request.method.decode(), target.model, self._key(exchange)
        answer = self.answer(*question)
        if answer is not None:
            exchange.respond(*answer)
        elif self._relay is not None:
            self._tasks.start(exchange, self._ask(exchange, *question))
        else:
            raise _unknown(target.model)

    async def _ask(self, exchange: Exchange, method: str, id: str, owner: str) -> None:
        assert self._relay is not None
        answer = await self._relay(method, id, owner)
        if answer is None:
            raise _unknown(id)
        status, body, content_type, extra = answer
        exchange.respond(status, [body], content_type, extra)

    def _drop(self, result: _Result) -> None:
        if self._results.pop(result.id, None) is not None:
            self._bytes -= result.size
            _remove(result)

    def _key(self, exchange: Exchange) -> str:
        flow = self._gate.flow(exchange.request.headers.get) if self._gate is not None else None
        return flow.name if flow is not None else ""


def _state(status: int, id: str, state: str, more: dict[str, Any] | None = None, extra: bytes = b"") -> Reshaped:
    return Reshaped(status, [dump({"id": id, "status": state, **(more or {})})], JSON_TYPE, extra)


def _remove(result: _Result) -> None:
    with suppress(OSError):
        Path(result.exchange.progress_file).unlink(missing_ok=True)


def _unknown(id: str) -> ServingError:
    return not_found(
        f"there is no result '{id:.64}'",
        hint=f"results are kept for {EXPIRY_S:.0f} s, until they are cancelled or the server ends",
    )
