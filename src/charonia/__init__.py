"""Charonia: an inference server for Triton model repositories."""

from typing import TYPE_CHECKING, Any

from charonia import compiled

compiled.install()

from charonia.core.errors import Code, ServingError  # noqa: E402 # it may be compiled

if TYPE_CHECKING:
    from charonia.server.embedding import Server
    from charonia.server.options import ServerOptions
    from charonia.service import BadRequest, Request, Response, Shape, call, call_async, method, model, serve
    from charonia.version import __version__

__all__ = [
    "BadRequest",
    "Code",
    "Request",
    "Response",
    "Server",
    "ServerOptions",
    "ServingError",
    "Shape",
    "__version__",
    "call",
    "call_async",
    "method",
    "model",
    "serve",
]

_SERVICE = frozenset({"BadRequest", "Request", "Response", "Shape", "call", "call_async", "method", "model", "serve"})


def __getattr__(name: str) -> Any:
    # Imported on first use, so that the command line and worker processes start quickly.
    if name == "Server":
        from charonia.server.embedding import Server

        return Server
    if name == "__version__":
        from charonia.version import __version__

        return __version__
    if name == "ServerOptions":
        from charonia.server.options import ServerOptions

        return ServerOptions
    if name in _SERVICE:
        from charonia import service

        return getattr(service, name)
    raise AttributeError(f"module 'charonia' has no attribute {name!r}")
