"""What the engine asks of a response cache."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from charonia.core.dtypes import DataType
from charonia.core.request import ParameterValue
from charonia.core.response import InferResponse
from charonia.core.tensor import Array, Tensor
from charonia.server.metrics.metric_families import Family

ENTRY_OVERHEAD_BYTES = 512
"""Memory of an entry beside its tensors: its key, its place in the order, records and names."""

STRING_OVERHEAD_BYTES = 48
"""Memory of a string beside its bytes: its object and its place in the array."""


class Key(NamedTuple):
    """What a response is kept under.

    Attributes:
        space: Of the model version as it was loaded; another load has another one.
        digest: Of the request.
    """

    space: bytes
    digest: bytes


class KeptResponse:
    """A response without its request's id, in memory that nobody else can change.

    Attributes:
        model_name: Model that ran.
        model_version: Version that ran, as text.
        outputs: Output tensors.
        parameters: Response parameters.
        byte_size: Memory that it takes.
    """

    __slots__ = ("byte_size", "model_name", "model_version", "outputs", "parameters")

    def __init__(
        self, model_name: str, model_version: str, outputs: tuple[Tensor, ...], parameters: dict[str, ParameterValue]
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        self.outputs = outputs
        self.parameters = parameters
        self.byte_size = ENTRY_OVERHEAD_BYTES + sum(_byte_size(tensor) for tensor in outputs)

    @classmethod
    def of(cls, response: InferResponse) -> "KeptResponse":
        """Return a copy of a response."""
        outputs = tuple(Tensor(t.name, t.datatype, own_copy(t.array)) for t in response.outputs)
        return cls(response.model_name, response.model_version, outputs, dict(response.parameters))

    def response(self, request_id: str) -> InferResponse:
        """Return the response to another request; its arrays are shared, and read-only."""
        return InferResponse(self.model_name, self.model_version, request_id, list(self.outputs), dict(self.parameters))


class ResponseCache(Protocol):
    """Keeps responses. Everything here runs on the event loop's thread.

    Attributes:
        is_shared: Whether others, and the server after a restart, may find what is kept here.
    """

    is_shared: bool

    def get(self, key: Key, found: Callable[[KeptResponse | None], None]) -> None:
        """Look a response up and call `found`, at once or later, in any case."""
        ...

    def put(self, key: Key, response: KeptResponse, done: Callable[[], None]) -> None:
        """Keep a response, or not, and call `done`, at once or later, in any case."""
        ...

    def forget(self, space: bytes) -> None:
        """Give up what was kept for a model version: it is not asked for any more."""
        ...

    async def space(self, model: str, version: str, content: bytes) -> bytes:
        """Return the key space of a model version that is being loaded.

        Args:
            model: Name of the model.
            version: Its version, as text.
            content: Digest of its configuration and files; only where the cache is shared.
        """
        ...

    def families(self) -> list[Family]:
        """Return its metrics."""
        ...

    async def aclose(self) -> None:
        """Give back everything."""
        ...


def own_copy(array: Array) -> Array:
    """Return a read-only copy of an array."""
    copy: Array = np.array(array)
    copy.flags.writeable = False
    return copy


def _byte_size(tensor: Tensor) -> int:
    if tensor.datatype is DataType.BYTES:
        strings: list[bytes] = tensor.array.reshape(-1).tolist()
        return sum(map(len, strings)) + STRING_OVERHEAD_BYTES * len(strings)
    return tensor.array.nbytes
