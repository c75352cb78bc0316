"""Queries of the client: an encoded request, and a decoder for its answer.

A dialect makes the queries of one protocol. The clients send them and wait for the answers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from charonia.core.errors import internal
from charonia.core.metadata import ModelIndexEntry, ModelMetadata, ServerMetadata
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse
from charonia.wire.answer import Answer
from charonia.wire.grpc_codec import GrpcRequest
from charonia.wire.http_codec import HttpRequest

T = TypeVar("T")
R = TypeVar("R", HttpRequest, GrpcRequest)
Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class SharedMemoryRegion:
    """A registered region of system shared memory.

    Attributes:
        name: Name that requests use.
        key: Name of the memory object, as `shm_open` takes it.
        offset: Where the region begins in the object, in bytes.
    """

    name: str
    key: str
    byte_size: int
    offset: int = 0


TRACE_LEVEL = "trace_level"
"""The only trace setting with several values."""

TraceChange = Mapping[str, str | int | Sequence[str] | None]
"""New values by the name of a trace setting; None resets it."""


def trace_texts(change: TraceChange) -> dict[str, list[str]]:
    """Return a change with every value as a list of strings, an empty one to clear a setting."""
    texts: dict[str, list[str]] = {}
    for name, value in change.items():
        if value is None:
            texts[name] = []
        else:
            texts[name] = [str(value)] if isinstance(value, str | int) else [str(each) for each in value]
    return texts


@dataclass(frozen=True, slots=True)
class Query(Generic[R, T]):
    """A request and the decoder of its answer.

    Attributes:
        request: The request to send.
        decode: Decodes a successful, valid answer.
    """

    request: R
    decode: Callable[[Answer], T]

    def read(self, answer: Answer) -> T:
        """Decode a successful answer.

        Raises:
            ServingError: INTERNAL for an answer that violates the protocol; any code for an error in a stream.
        """
        try:
            return self.decode(answer)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise internal(f"the server's response does not follow the protocol: {error!r:.200}") from error


class Dialect(Protocol[R]):
    """The queries of one protocol."""

    def live(self) -> Query[R, bool]:
        """Whether the server responds."""

    def ready(self) -> Query[R, bool]:
        """Whether the server accepts inference requests."""

    def model_ready(self, model: str, version: str) -> Query[R, bool]:
        """Whether a model accepts inference requests."""

    def server_metadata(self) -> Query[R, ServerMetadata]:
        """Name, version and extensions of the server."""

    def model_metadata(self, model: str, version: str) -> Query[R, ModelMetadata]:
        """A model's tensors."""

    def model_config(self, model: str, version: str) -> Query[R, Json]:
        """A model's configuration."""

    def statistics(self, model: str, version: str) -> Query[R, list[Json]]: ...

    def index(self, ready: bool) -> Query[R, list[ModelIndexEntry]]: ...

    def load(self, model: str, config: str, files: Mapping[str, bytes]) -> Query[R, None]: ...

    def unload(self, model: str, dependents: bool) -> Query[R, None]: ...

    def register(self, region: SharedMemoryRegion) -> Query[R, None]:
        """Register a region of shared memory."""

    def unregister(self, name: str) -> Query[R, None]:
        """Unregister a region, or all."""

    def regions(self, name: str) -> Query[R, list[SharedMemoryRegion]]: ...

    def trace_settings(self, model: str, change: TraceChange) -> Query[R, Json]:
        """The trace settings of a model, or with "" of the server, after an optional change."""

    def traffic(self, model: str, change: Mapping[str, object]) -> Query[R, Json]:
        """The traffic between the versions of a model, after an optional change."""

    def reset_traffic(self, model: str) -> Query[R, Json]:
        """Forget what requests have changed of the traffic of a model."""

    def infer(self, request: InferRequest) -> Query[R, InferResponse]:
        """Run a model that sends one response."""

    def stream(self, request: InferRequest) -> Query[R, InferResponse]:
        """Run a model that sends any number of responses; each is decoded individually."""
