"""Which handler answers which method and path."""

from collections.abc import Callable, Sequence
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from charonia.core.errors import ServingError, invalid, not_found
from charonia.frontends.http.exchange import Exchange

MATCH_CACHE_MAX = 4096
"""Most URLs whose match is remembered; clients choose URLs, so this has a limit."""


class Target(NamedTuple):
    """What a path names besides its route."""

    model: str = ""
    version: str = ""


Handler = Callable[[Exchange, Target], None]


class Route(NamedTuple):
    """A path, with `{model}` and `{version}` for segments that name these, and the handler of each method."""

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

    def __init__(self, method: bytes, path: str, allowed: Sequence[bytes]) -> None:
        super().__init__(path)
        self.allowed = b", ".join(allowed)
        self.error: ServingError = invalid(
            f"method {method.decode('latin-1')} is not allowed for {path}", hint=f"allowed: {self.allowed.decode()}"
        )


class Router:
    """Matches URLs against a table of routes."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = [(route.path.strip("/").split("/"), route.handlers) for route in routes]
        self._cache: dict[bytes, Match] = {}

    def find(self, method: bytes, url: bytes) -> tuple[Handler, Target]:
        """Return the handler of a request and what its path names.

        Raises:
            ServingError: NOT_FOUND for an unknown path, INVALID_ARG for one that is not text.
            MethodNotAllowedError: The path has no such method.
        """
        match = self._cache.get(url)
        if match is None:
            match = self._match(url)
            if len(self._cache) >= MATCH_CACHE_MAX:
                self._cache.clear()
            self._cache[url] = match
        handler = match.handlers.get(method)
        if handler is None:
            raise MethodNotAllowedError(method, url.decode("latin-1"), list(match.handlers))
        return handler, match.target

    def _match(self, url: bytes) -> Match:
        path = url.partition(b"?")[0]
        try:
            segments = [unquote_to_bytes(segment).decode() for segment in path.removeprefix(b"/").split(b"/")]
        except UnicodeDecodeError as error:
            raise invalid(f"the URL {url!r} is not UTF-8 text") from error
        for pattern, handlers in self._routes:
            target = _target(pattern, segments)
            if target is not None:
                return Match(handlers, target)
        raise not_found(f"there is nothing at {path.decode('latin-1')}", hint="GET /v2 describes the server")


def _target(pattern: Sequence[str], segments: Sequence[str]) -> Target | None:
    if len(pattern) != len(segments):
        return None
    model = version = ""
    for expected, segment in zip(pattern, segments, strict=True):
        if expected == "{model}" and segment:
            model = segment
        elif expected == "{version}" and segment:
            version = segment
        elif expected != segment:
            return None
    return Target(model, version)
