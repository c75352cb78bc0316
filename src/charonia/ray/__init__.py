"""Charonia in Ray Serve: each replica of a deployment owns an engine; Ray places, heals and scales the replicas."""

try:
    import ray.serve as _serve  # noqa: F401
except ImportError as _error:
    from charonia.core.errors import unsupported as _unsupported
    from charonia.install_hint import extra_hint as _extra_hint

    raise _unsupported("charonia.ray needs the Python package ray[serve]", hint=_extra_hint("ray")) from _error

from charonia.ray.application import app
from charonia.ray.options import AppOptions
from charonia.ray.replica import add_grpc_services, addresses

__all__ = ["AppOptions", "add_grpc_services", "addresses", "app"]
