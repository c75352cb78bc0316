"""The part of the protocol that each route and gRPC method belongs to, and the scope that a key needs for it.

Source: Triton's restricted APIs; scopes exist only in Charonia.
"""

from typing import NamedTuple

from charonia.server.access.rules import Api, Operation, Scope


class _Group(NamedTuple):
    api: Api
    scope: Scope | None
    routes: tuple[str, ...]
    methods: tuple[str, ...]
    changes: tuple[str, ...] = ()


_MODEL = "/v2/models/{model}"
_REPOSITORY = "/v2/repository/models/{model}"
_NAMED = "/v2/repository/{repository}"
_SYSTEM = "/v2/systemsharedmemory"
_CUDA = "/v2/cudasharedmemory"

_TABLE = (
    _Group(
        Api.HEALTH,
        None,
        ("/v2/health/live", "/v2/health/ready", f"{_MODEL}/ready", "/health"),
        ("ServerLive", "ServerReady", "ModelReady", "Check", "Watch"),
    ),
    _Group(
        Api.METADATA,
        Scope.READ,
        ("/v2", "/v2/models", _MODEL),
        ("ServerMetadata", "ModelMetadata", "ServerReflectionInfo"),
    ),
    _Group(Api.METADATA, Scope.READ, ("/openapi.json", "/samples/{model}"), ()),
    # The page is the same on every server: it fetches its content with other calls.
    _Group(Api.METADATA, None, ("/", "/page.css", "/page.js"), ()),
    _Group(Api.METADATA, Scope.READ, ("/v1/models", "/v1/models/{model}", "/version"), ()),
    _Group(
        Api.INFERENCE,
        Scope.INFER,
        (
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/embeddings",
            "/v1/responses",
            "/v1/messages",
            "/v1/rerank",
            "/v1/score",
            "/tokenize",
            "/detokenize",
        ),
        (),
        ("/v1/models/{model}",),
    ),
    _Group(
        Api.INFERENCE,
        Scope.INFER,
        (
            *(f"{_MODEL}/infer", f"{_MODEL}/generate", f"{_MODEL}/generate_stream"),
            *("/v2/results/{result}", "/invocations"),
        ),
        ("ModelInfer", "ModelStreamInfer"),
    ),
    _Group(
        Api.SHARED_MEMORY,
        Scope.INFER,
        tuple(
            base + path
            for base in (_SYSTEM, _CUDA)
            for path in (
                "/status",
                "/region/{region}/status",
                "/region/{region}/register",
                "/region/{region}/unregister",
                "/unregister",
            )
        ),
        tuple(
            f"{kind}SharedMemory{what}" for kind in ("System", "Cuda") for what in ("Status", "Register", "Unregister")
        ),
    ),
    _Group(Api.MODEL_CONFIG, Scope.READ, (f"{_MODEL}/config",), ("ModelConfig",)),
    _Group(Api.MODEL_REPOSITORY, Scope.READ, ("/v2/repository/index", f"{_NAMED}/index"), ("RepositoryIndex",)),
    _Group(
        Api.MODEL_REPOSITORY,
        Scope.ADMIN,
        (
            f"{_REPOSITORY}/load",
            f"{_REPOSITORY}/unload",
            f"{_NAMED}/models/{{model}}/load",
            f"{_NAMED}/models/{{model}}/unload",
            "/v1/models/{model}/load",
            "/v1/models/{model}/unload",
        ),
        ("RepositoryModelLoad", "RepositoryModelUnload", "ModelTrafficChange", "ModelTrafficReset"),
        (f"{_MODEL}/traffic",),
    ),
    _Group(
        Api.STATISTICS,
        Scope.READ,
        (
            "/v2/models/stats",
            f"{_MODEL}/stats",
            f"{_MODEL}/sequences",
            f"{_MODEL}/explain",
            "/v2/ratelimit",
            f"{_MODEL}/traffic",
            "/v2/load",
        ),
        ("ModelStatistics", "ModelTraffic", "StreamCoreMetrics"),
    ),
    _Group(Api.TRACE, Scope.ADMIN, ("/v2/trace/setting", f"{_MODEL}/trace/setting"), ("TraceSetting",)),
    _Group(Api.LOGGING, Scope.ADMIN, ("/v2/logging",), ("LogSettings",)),
)

ROUTES: dict[str, Operation] = {path: Operation(g.api, g.scope) for g in _TABLE for path in g.routes}
"""Operation by route, without a version."""

CHANGES: dict[str, Operation] = {path: Operation(g.api, g.scope) for g in _TABLE for path in g.changes}
"""Operation by route of other methods than GET, where it is another one."""

METHODS: dict[str, Operation] = {name: Operation(g.api, g.scope) for g in _TABLE for name in g.methods}
"""Operation by gRPC method, without its service."""


def operation_of_route(path: str) -> Operation:
    return ROUTES[path.replace("/versions/{version}", "")]
