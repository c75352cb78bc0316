"""Which handler answers which method and path."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from charonia.core.errors import ServingError, invalid, not_found
from charonia.server.http.exchange import Exchange

REMEMBERED_MAX = 1024
"""Most URLs whose match is remembered; at more the router starts again."""

REMEMBERED_BYTES_MAX = 512
"""Longest URL whose match is remembered."""


class Target(NamedTuple):
    """What a path names besides its route.

    Attributes:
        model: Name of the model, or of the shared memory region.
        version: Version of the model.
    """

    model: str = ""
    version: str = ""


Handler = Callable[[Exchange, Target], None]


class Route(NamedTuple):
    """A path, with `{name}` for any segment, and the handler of each method.

    `{model}` or `{region}`, and `{version}`, name the target.
    """

    path: str
    handlers: dict[bytes, Handler]


class Match(NamedTuple):
    """A URL's route and target."""

    handlers: dict[bytes, Handler]
    target: Target


class MethodNotAllowedError(Exception):
    """The path exists, but not with this method.

    Attributes:
        allowed: The methods that it has.
        error: What to tell the client.
    """

    def __init__(self, method: bytes, allowed: Iterable[bytes]) -> None:
        self.allowed = b", ".join(allowed)
        self.error: ServingError = invalid(
            f"method {method.decode()} is not allowed here", hint=f"allowed: {self.allowed.decode()}"
        )
        super().__init__(str(self.error))


class Router:
    """Matches URLs against a table of routes.

    Args:
        routes: The table.
        hint: What to try in place of a path that is not there.
    """

    def __init__(self, routes: Sequence[Route], hint: str = "") -> None:
        self._hint = hint
        self._routes = [(route.path.strip("/").split("/"), route.handlers) for route in routes]
        self._matches: dict[bytes, Match] = {}

    def find(self, method: bytes, url: bytes) -> tuple[Handler, Target]:
        """Return the handler of a request and what its path names.

        Raises:
            ServingError: NOT_FOUND for an unknown path, INVALID_ARG for one that is not text.
            MethodNotAllowedError: The path has no such method.
        """
        match = self._matches.get(url)
        if match is None:
            match = self._match(url)
            if len(url) <= REMEMBERED_BYTES_MAX:
                if len(self._matches) >= REMEMBERED_MAX:
                    self._matches.clear()
                self._matches[url] = match
        handler = match.handlers.get(method)
        if handler is None:
            raise MethodNotAllowedError(method, match.handlers)
        return handler, match.target

    def _match(self, url: bytes) -> Match:
        path = url.partition(b"?")[0]
        if not path.startswith(b"/"):  # the form for proxies, http://host/path
            path = b"/" + path.partition(b"://")[2].partition(b"/")[2]
        try:
            segments = [unquote_to_bytes(segment).decode() for segment in path.removeprefix(b"/").split(b"/")]
        except UnicodeDecodeError as error:
            raise invalid("the URL is not UTF-8 text") from error
        for pattern, handlers in self._routes:
            target = _target(pattern, segments)
            if target is not None:
                return Match(handlers, target)
        raise not_found(f"there is nothing at {path[:REMEMBERED_BYTES_MAX].decode('latin-1')}", hint=self._hint)


def _target(pattern: Sequence[str], segments: Sequence[str]) -> Target | None:
    if len(pattern) != len(segments):
        return None
    model = version = ""
    for expected, segment in zip(pattern, segments, strict=True):
        if not expected.startswith("{"):
            if expected != segment:
                return None
        elif not segment:
            return None
        elif expected in ("{model}", "{region}"):
            model = segment
        elif expected == "{version}":
            version = segment
    return Target(model, version)
