"""A client for servers that speak the KServe v2 protocol, over HTTP and gRPC."""

from charonia.client.async_client import AsyncClient, InferResult, SequencePart
from charonia.client.balancing.options import Balancing
from charonia.client.balancing.transport import EndpointStatus
from charonia.client.errors import ClientError
from charonia.client.sync_client import Client
from charonia.wire.answer import Failure
from charonia.wire.query import SharedMemoryRegion
from charonia.wire.transport import TlsOptions, WireOptions

__all__ = [
    "AsyncClient",
    "Balancing",
    "Client",
    "ClientError",
    "EndpointStatus",
    "Failure",
    "InferResult",
    "SequencePart",
    "SharedMemoryRegion",
    "TlsOptions",
    "WireOptions",
]
