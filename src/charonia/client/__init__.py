"""A client for servers of the KServe v2 protocol, over HTTP and gRPC."""

from charonia.client.async_client import AsyncClient
from charonia.client.errors import ClientError
from charonia.client.model_requests import SequencePart
from charonia.client.query import SharedMemoryRegion
from charonia.client.sync_client import Client
from charonia.client.tensors import InferResult
from charonia.client.wire import Failure, TlsOptions, WireOptions

__all__ = [
    "AsyncClient",
    "Client",
    "ClientError",
    "Failure",
    "InferResult",
    "SequencePart",
    "SharedMemoryRegion",
    "TlsOptions",
    "WireOptions",
]
