"""Routing: from a method and path to a handler, with the authorization of calls.

Each request goes through one function, `Router.handle`. The match of a URL is cached, with its operation for
authorization.
"""

import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, NamedTuple
from urllib.parse import unquote_to_bytes

from charonia.core.errors import ServingError, internal, invalid, not_found, turned_away
from charonia.server.access.rules import CHANGES, Gate, Operation, Refusal, operation_of_route
from charonia.server.facade import EnsureLoaded, LoadReports
from charonia.server.http.browsers import BrowserRules
from charonia.server.http.exchange import Exchange, Tasks
from charonia.server.http.limits import JSON_SIZE
from charonia.server.http.parser import Request
from charonia.wire.http_status import REFUSED
from charonia.wire.openai_answer import PATHS as OPENAI_PATHS
from charonia.wire.orca import FORMAT_HEADER, load_header_line

_log = logging.getLogger(__name__)

REMEMBERED_MAX = 1024
"""Number of URLs whose match is cached; with more, the cache is cleared."""

REMEMBERED_BYTES_MAX: Final = 512
"""Longest URL whose match is cached."""

_VERSION: Final = re.compile(r"[0-9]+", re.ASCII)
"""A version in a path."""

_NOT_LOADING: Final = ("/v1/models/{model}", "/ready", "/stats", "/load", "/unload", "/trace/setting", "/traffic")
"""Ends of paths that do not load the model on demand."""


class RouteTarget(NamedTuple):
    """The target of a request, from its path.

    Attributes:
        model: Name of the model, or of the shared memory region, or id of the result.
        version: Version of the model.
    """

    model: str = ""
    version: str = ""


_INFERENCE: Final = operation_of_route("/v2/models/{model}/generate")

Handler = Callable[[Exchange, RouteTarget], None]


class Route(NamedTuple):
    """A path pattern, with `{name}` for any segment, and the handler of each method.

    `{model}` or `{region}`, and `{version}`, a number, are the target.
    """

    path: str
    handlers: dict[bytes, Handler]


class Match(NamedTuple):
    """The match of a URL.

    Attributes:
        handlers: The route's handler of each method.
        operation: The operation to authorize; None without a gate.
        change: The operation of other methods than GET, where it is another one.
    """

    handlers: dict[bytes, Handler]
    operation: Operation | None
    target: RouteTarget
    change: Operation | None


def none_ready(model: str) -> Sequence[str]:
    """Default for routers without models."""
    return ()


def nothing_at(path: str) -> dict[bytes, Handler]:
    """Default for routers with a table only."""
    return {}


def _no_hint(path: str) -> str:
    return ""


class Router:
    """Answers exchanges by a table of routes.

    Attributes:
        load: Reports of the server's load, for requests with that header.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        hint: Callable[[str], str] = _no_hint,
        *,
        versions: Callable[[str], Sequence[str]] = none_ready,
        gate: Gate | None = None,
        browsers: BrowserRules | None = None,
        is_exiting: Callable[[], bool] = lambda: False,
        further: Callable[[str], dict[bytes, Handler]] = nothing_at,
    ) -> None:
        """Create a router.

        Args:
            routes: The table.
            hint: Returns the hint in the error for an unknown path.
            versions: Returns the versions of a model that are ready.
            gate: Authorizes calls; None to allow all.
            browsers: Decides about requests of browsers.
            is_exiting: Whether requests are refused because the server is shutting down.
            further: Returns the handlers of a path outside of the table, which need the permission of inference.
        """
        self._further = further
        self._hint = hint
        self._versions = versions
        self._gate = gate
        self._browsers = browsers if browsers is not None else BrowserRules()
        self._known_hosts = self._browsers.known_hosts
        self._is_exiting = is_exiting
        self.load: LoadReports | None = None
        self._routes = [
            (
                path.strip("/").split("/"),
                handlers,
                operation_of_route(path) if gate is not None else None,
                CHANGES.get(path),
            )
            for path, handlers in routes
        ]
        self._matches: dict[bytes, Match] = {}

    def handle(self, exchange: Exchange) -> None:
        request = exchange.request
        try:
            if not self.admit(exchange):
                return
            if self._is_exiting():
                raise turned_away("the server is shutting down")
            handlers, operation, target, change = self._matches.get(request.url) or self._match(request.url)
            handler = handlers.get(request.method)
            if handler is None:
                _refuse_method(exchange, b", ".join(handlers))
                return
            if operation is not None and self._gate is not None:
                if change is not None and request.method != b"GET":
                    operation = change
                refusal = self._gate.check(operation, request.headers.get)
                if refusal is not None:
                    exchange.fail(invalid(refusal.message), REFUSED[refusal.kind])
                    return
            if self.load is not None and FORMAT_HEADER in request.headers:
                self.load.request_report()
                exchange.load_line = partial(_load_line, self.load, request.headers[FORMAT_HEADER])
            handler(exchange, target)
        except ServingError as error:
            exchange.fail(error)
        except Exception as fault:  # a bug: it must not end the server
            _log.exception("%s failed", request.url.decode("latin-1"))
            exchange.fail(internal(f"the request failed: {type(fault).__name__}"))

    def admit(self, exchange: Exchange) -> bool:
        """Return whether a request may be handled if a page of a browser has sent it; if not, answer it."""
        request, hosts = exchange.request, self._known_hosts
        is_checked = request.by_page or (hosts and request.headers.get(b"host") not in hosts)
        return not is_checked or self._browsers.admit(exchange)

    def refusal(self, request: Request) -> Refusal | None:
        """Return why a caller may not send a request, None if it may."""
        operation = self._match(request.url).operation
        if operation is None or self._gate is None:
            return None
        return self._gate.check(operation, request.headers.get)

    def _match(self, url: bytes) -> Match:
        """Return the match of a URL, and cache it."""
        path = url.partition(b"?")[0]
        if path.startswith(OPENAI_PATHS):  # whose clients join base URLs and paths in different ways
            path = path.rstrip(b"/")
        if not path.startswith(b"/"):  # the form for proxies, http://host/path
            path = b"/" + path.partition(b"://")[2].partition(b"/")[2]
        try:
            segments = [unquote_to_bytes(segment).decode() for segment in path.removeprefix(b"/").split(b"/")]
        except UnicodeDecodeError as error:
            raise invalid("the URL is not UTF-8 text") from error
        if any("\0" in segment for segment in segments):
            raise invalid("the URL contains a NUL character (%00), which no name does")
        match = next(
            (
                Match(served if _is_served(target) else dict.fromkeys(served, self._no_version), needs, target, change)
                for pattern, served, needs, change in self._routes
                if (target := _target(pattern, segments)) is not None
            ),
            None,
        )
        if match is None and (further := self._further("/" + "/".join(segments))):
            return Match(further, _INFERENCE if self._gate is not None else None, RouteTarget(), None)
        if match is None:
            shown = path[:REMEMBERED_BYTES_MAX].decode("latin-1")
            raise not_found(f"there is nothing at {shown}", hint=self._hint(shown))
        if len(url) <= REMEMBERED_BYTES_MAX:
            if len(self._matches) >= REMEMBERED_MAX:
                self._matches.clear()
            self._matches[url] = match
        return match

    def _no_version(self, exchange: Exchange, target: RouteTarget) -> None:
        ready = self._versions(target.model)
        raise not_found(
            f"model '{target.model}': expected a number for the version, got '{target.version:.40}'",
            hint=f"versions that are ready: {', '.join(ready[:10])}" if ready else "",
        )


def on_demand(routes: Sequence[Route], demand: EnsureLoaded, tasks: Tasks) -> list[Route]:
    """Return the routes for a server that loads models on demand: routes of a model wait until it is loaded.

    Inference waits in the engine; metadata of a model, and raw requests, need its configuration first.
    """
    table = []
    for route in routes:
        if "{model}" in route.path and not route.path.endswith(_NOT_LOADING):
            only_raw = route.path.endswith("/infer")
            route = Route(route.path, {m: _waiting(h, demand, tasks, only_raw) for m, h in route.handlers.items()})
        table.append(route)
    return table


def _waiting(handler: Handler, demand: EnsureLoaded, tasks: Tasks, only_raw: bool) -> Handler:
    async def wait(loaded: Awaitable[None], exchange: Exchange, target: RouteTarget) -> None:
        await loaded
        if exchange.is_open:
            handler(exchange, target)

    def handle(exchange: Exchange, target: RouteTarget) -> None:
        loaded = None
        if not only_raw or exchange.request.headers.get(JSON_SIZE) == b"0":
            loaded = demand(target.model, target.version)
        if loaded is None:
            handler(exchange, target)
        else:
            tasks.start(exchange, wait(loaded, exchange, target))

    return handle


def _refuse_method(exchange: Exchange, allowed: bytes) -> None:
    method = exchange.request.method.decode()
    error = invalid(f"method {method} is not allowed here", hint=f"allowed: {allowed.decode()}")
    exchange.respond(405, [exchange.error_body(error, 405)], extra=b"Allow: %b\r\n" % allowed)


def _is_served(target: RouteTarget) -> bool:
    return not target.version or _VERSION.fullmatch(target.version) is not None


def _target(pattern: Sequence[str], segments: Sequence[str]) -> RouteTarget | None:
    if len(pattern) != len(segments):
        return None
    model = version = ""
    for expected, segment in zip(pattern, segments, strict=True):
        if not expected.startswith("{"):
            if expected != segment:
                return None
        elif not segment:
            return None
        elif expected in ("{model}", "{region}", "{result}"):
            model = segment
        elif expected == "{version}":
            version = segment
    return RouteTarget(model, version)


def _load_line(load: LoadReports, form: bytes) -> bytes:
    return load_header_line(load.latest(), form)


_INFER: Final = (
    "POST /v2/models/{0}/infer takes tensors and /v2/models/{0}/generate plain JSON, as KServe v2 and Triton do"
)
_LIST: Final = "GET /v2/models lists the models"
_OWN: Final = (
    "a model's routes end with infer, generate, generate_stream, ready, config, stats or explain: /v2/models/{0}/infer"
)

_HINTS: Final = tuple(
    (re.compile(pattern), hint)
    for pattern, hint in (
        (r"/v1(/v1)(/.*)", "the base URL of the client ends with {0} already: {0}{1}"),
        (
            r"(/(?:chat/completions|completions|responses|embeddings))",
            "the base URL of OpenAI's clients ends with /v1: /v1{0}",
        ),
        (r"/v1/models/([^/:]+)(?:/versions/\d+)?(?::.*)?", _INFER),  # TensorFlow Serving and KServe v1
        (r"/(?:predictions|explanations)/([^/]+)(?:/.*)?", _INFER),  # TorchServe
        (r"/(?:predict|invocations|infer|generate)", _INFER),  # LitServe, BentoML, SageMaker, text-generation-inference
        (r"/(?:v1/)?models", _LIST),
        (r"/v1/(?:chat/completions|completions|responses|embeddings)", f"--openai=true serves OpenAI's API; {_INFER}"),
        (r"/(?:ping|health|healthz|livez|live)", "GET /v2/health/live, GET /v2/health/ready"),
        (r"/(?:ready|readyz|readiness)", "GET /v2/health/ready"),
        (r"/(?:docs|redoc|swagger|openapi\.ya?ml)", "GET / is a page on the models, GET /openapi.json their document"),
        (r"/metrics", "metrics have a separate port: --metrics-port"),
        (r"/v2/models?/([^/]+)/.*", _OWN),
    )
)


def route_hint(path: str) -> str:
    """Return the hint of the error for a path that is not served."""
    for pattern, hint in _HINTS:
        match = pattern.fullmatch(path.rstrip("/"))
        if match is not None:
            return hint.format(*(match.groups() or ("MODEL",)))
    return "GET /v2 describes the server; metrics have a separate port"
