"""From what an endpoint asks of its callers to what front ends do about it."""

from charonia.server.access.header_forward import HeaderForward
from charonia.server.access.options import AccessOptions
from charonia.server.access.rules import Gate, KeyRing

GRPC_HEADER_PREFIX = "triton-grpc-protocol-"
"""Begin of the headers of restrictions over gRPC. Source: Triton."""


def http_gate(options: AccessOptions, keys: KeyRing | None) -> Gate | None:
    """Return what decides about calls over HTTP, None where everybody may make all."""
    return Gate(options.restricted, keys, what="API") if options.restricted or keys is not None else None


def grpc_gate(options: AccessOptions, keys: KeyRing | None) -> Gate | None:
    """Return what decides about calls over gRPC, None where everybody may make all."""
    if not options.restricted and keys is None:
        return None
    return Gate(options.restricted, keys, what="protocol", prefix=GRPC_HEADER_PREFIX)


def forwarded_headers(options: AccessOptions) -> HeaderForward | None:
    """Return which headers become request parameters, None where none do."""
    return HeaderForward(options.header_forward_pattern) if options.header_forward_pattern else None
