"""The interface of a response cache: keys, cached responses and the `ResponseCache` protocol.

A key is a digest of everything that a model may see and that may change its answer: the names, datatypes, shapes and
bytes of the inputs in the order they were sent, the requested outputs, and the parameters where a model gets them. Each
part is written with its length or number in front, so no two requests have the same encoding, which is hashed with
SHA-256. A faster hash without cryptographic strength would let a client construct two requests with the same key.
"""

import struct
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import NamedTuple, Protocol

import numpy as np

from charonia.core.dtypes import DataType
from charonia.core.request import InferRequest, ParameterValue
from charonia.core.response import InferResponse
from charonia.core.tensor import Array, Tensor
from charonia.server.metrics.metric_families import Family, family

ENTRY_OVERHEAD_BYTES = 512
"""Memory of an entry besides its tensors: its key, its place in the LRU order, records and names."""

STRING_OVERHEAD_BYTES = 48
"""Memory of a string besides its bytes: its object and its place in the array."""


class CacheKey(NamedTuple):
    """The key of a cached response.

    Attributes:
        namespace: Cache namespace of the model version; each load has its own.
        digest: Digest of the request.
    """

    namespace: bytes
    digest: bytes


class CachedResponse:
    """A response without its request's id, in separate read-only memory.

    Attributes:
        model_name: The model that ran.
        model_version: The version that ran, as text.
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
    def of(cls, response: InferResponse) -> "CachedResponse":
        """Return a copy of a response."""
        outputs = tuple(Tensor(t.name, t.datatype, own_copy(t.array)) for t in response.outputs)
        return cls(response.model_name, response.model_version, outputs, dict(response.parameters))

    def response(self, request_id: str) -> InferResponse:
        """Return the response for another request; its arrays are shared and read-only."""
        return InferResponse(self.model_name, self.model_version, request_id, list(self.outputs), dict(self.parameters))


class ResponseCache(Protocol):
    """Stores responses. All methods run on the event loop's thread.

    Attributes:
        is_shared: Whether other servers, and this one after a restart, may find the entries.
    """

    is_shared: bool

    def get(self, key: CacheKey, found: Callable[[CachedResponse | None], None]) -> None:
        """Look up a response; `found` is called in every case, immediately or later."""

    def put(self, key: CacheKey, response: CachedResponse, done: Callable[[], None]) -> None:
        """Store a response if possible; `done` is called in every case, immediately or later."""

    def evict_namespace(self, namespace: bytes) -> None:
        """Drop the entries of an unused namespace."""

    async def namespace(self, model: str, version: str, content: bytes) -> bytes:
        """Return the cache namespace of a model version that is being loaded.

        Args:
            model: Name of the model.
            version: Its version, as text.
            content: Digest of its configuration and files; only where the cache is shared.
        """

    def families(self) -> list[Family]: ...

    async def aclose(self) -> None: ...


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


class CacheCounters:
    """Look-ups and insertions.

    Attributes:
        hits: Look-ups that found a response.
        misses: Look-ups that found none.
        lookup_ns: Total time of look-ups.
        put_ns: Total time of insertions.
    """

    def __init__(self) -> None:
        self.hits = 0
        self.misses = 0
        self.lookup_ns = 0
        self.put_ns = 0

    def looked_up(self, is_hit: bool, duration_ns: int) -> None:
        """Count a look-up."""
        self.lookup_ns += duration_ns
        self.hits += is_hit
        self.misses += not is_hit

    def inserted(self, duration_ns: int) -> None:
        self.put_ns += duration_ns


def cache_families(counters: CacheCounters) -> list[Family]:
    return _plain(
        ("nv_cache_num_lookups", "gauge", "Look-ups in the response cache", counters.hits + counters.misses),
        ("nv_cache_num_hits", "gauge", "Look-ups that found a response", counters.hits),
        ("nv_cache_num_misses", "gauge", "Look-ups that found none", counters.misses),
        ("nv_cache_lookup_duration", "gauge", "Total time of look-ups in microseconds", counters.lookup_ns // 1000),
        ("nv_cache_insertion_duration", "gauge", "Total time of insertions in microseconds", counters.put_ns // 1000),
    )  # fmt: skip


def local_families(used: float, entries: int, evictions: int) -> list[Family]:
    """Return the metrics of a cache in memory: the share in use, 0 to 1, its entries and evictions."""
    return _plain(
        ("nv_cache_util", "gauge", "Share of the response cache in use, 0 to 1", used),
        ("nv_cache_num_entries", "gauge", "Responses in the cache", entries),
        ("nv_cache_num_evictions", "gauge", "Responses evicted from the cache", evictions),
    )


def remote_families(is_up: bool, errors: int, skipped: int) -> list[Family]:
    """Return the metrics of a cache in another server: whether it is up, failed operations, skipped operations."""
    return _plain(
        ("charonia_cache_up", "gauge", "Whether the cache server responds", int(is_up)),
        ("charonia_cache_errors_total", "counter", "Look-ups and insertions that failed", errors),
        ("charonia_cache_skipped_total", "counter", "Look-ups and insertions that were skipped", skipped),
    )


def _plain(*rows: tuple[str, str, str, float]) -> list[Family]:
    return [family(name, kind, text, (value, {})) for name, kind, text, value in rows]


_LENGTH = struct.Struct("<Q")
_INTEGERS = struct.Struct("<q")

# A tag for each type: 1, 1.0, True and "1" are different values.
_TAGS: dict[type, bytes] = {bool: b"b", int: b"i", float: b"f", str: b"s"}


def request_digest(request: InferRequest, *, with_parameters: bool) -> bytes:
    """Return the digest of a request.

    Args:
        request: The request; its arrays must not change during the call.
        with_parameters: Whether the model gets the parameters of a request.
    """
    digest = sha256()
    head = [_INTEGERS.pack(len(request.inputs))]
    tensors = request.inputs.values()
    for tensor in tensors:
        head += (_text(tensor.name), _text(tensor.datatype.wire), _shape(tensor.array.shape))
    head.append(_INTEGERS.pack(len(request.outputs)))
    for output in request.outputs:
        head += (_text(output.name), _INTEGERS.pack(output.classification))
    if with_parameters:
        head.append(_INTEGERS.pack(len(request.parameters)))
        head += [_text(key) + _value(value) for key, value in sorted(request.parameters.items())]
        head += (_value(request.correlation_id), _value(request.flags))
    digest.update(_part(b"".join(head)))
    for tensor in tensors:
        if tensor.datatype is DataType.BYTES:
            digest.update(_part(_strings(tensor.array)))
        else:
            array = tensor.array if tensor.array.flags.c_contiguous else np.ascontiguousarray(tensor.array)
            digest.update(array.reshape(-1).view(np.uint8).data)  # its size is known from datatype and shape
    return digest.digest()


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(8 * t.array.size if t.datatype is DataType.BYTES else t.array.nbytes for t in tensors)


def is_private(array: Array) -> bool:
    """Whether an array is a view of immutable bytes: of a received message, not of shared memory."""
    base: object = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    return isinstance(base.obj if isinstance(base, memoryview) else base, bytes)


def _part(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _text(text: str) -> bytes:
    return _part(text.encode(errors="surrogatepass"))


def _shape(shape: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(shape) + 1}q", len(shape), *shape)


def _value(value: ParameterValue) -> bytes:
    return _TAGS[type(value)] + _text(value.hex() if isinstance(value, float) else str(value))


def _strings(array: Array) -> bytes:
    strings = array.reshape(-1).tolist()
    lengths = np.fromiter(map(len, strings), "<u8", len(strings))
    return lengths.tobytes() + b"".join(strings)
