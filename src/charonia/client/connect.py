"""From a URL to a wire."""

from typing import cast

from charonia.client.endpoint import parse_url
from charonia.client.grpc_wire import GrpcWire
from charonia.client.http_wire import HttpWire
from charonia.client.wire import Wire, WireOptions

_DEFAULT = WireOptions()


def connect(url: str, options: WireOptions = _DEFAULT) -> Wire:
    """Return a wire to the server at a URL, still without connections; to be called on the event loop.

    Args:
        url: `HOST:PORT` or `http://HOST:PORT` for HTTP, `grpc://HOST:PORT` for gRPC; `https://`, `grpcs://` with TLS.
        options: Settings and limits.

    Raises:
        ServingError: INVALID_ARG for a URL or options that cannot be used.
    """
    endpoint = parse_url(url)
    wire = GrpcWire(endpoint, options) if endpoint.protocol == "grpc" else HttpWire(endpoint, options)
    return cast(Wire, wire)  # each sends what it prepared itself, which the interface cannot say
