"""Charonia: an inference server for Triton model repositories."""

from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

from charonia.core.errors import Code, ServingError

if TYPE_CHECKING:
    from charonia.config.server import ServerOptions
    from charonia.embedding import Server

__version__ = _version("charonia")

__all__ = ["Code", "Server", "ServerOptions", "ServingError", "__version__"]


def __getattr__(name: str) -> Any:
    # The server is imported when it is asked for, so that the command line and worker processes start quickly.
    if name == "Server":
        from charonia.embedding import Server

        return Server
    if name == "ServerOptions":
        from charonia.config.server import ServerOptions

        return ServerOptions
    raise AttributeError(f"module 'charonia' has no attribute {name!r}")
