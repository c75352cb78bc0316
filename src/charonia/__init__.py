"""Charonia: an inference server for Triton model repositories."""

from typing import TYPE_CHECKING, Any

from charonia.core.errors import Code, ServingError

if TYPE_CHECKING:
    from charonia.server.embedding import Server
    from charonia.server.options import ServerOptions

    __version__: str

__all__ = ["Code", "Server", "ServerOptions", "ServingError", "__version__"]


def __getattr__(name: str) -> Any:
    # Imported on first use, so that the command line and worker processes start quickly.
    if name == "Server":
        from charonia.server.embedding import Server

        return Server
    if name == "__version__":
        from importlib.metadata import version

        return version("charonia")
    if name == "ServerOptions":
        from charonia.server.options import ServerOptions

        return ServerOptions
    raise AttributeError(f"module 'charonia' has no attribute {name!r}")
