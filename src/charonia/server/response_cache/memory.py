"""A response cache in the server's own memory: an LRU map bounded by its number of bytes."""

import logging
import secrets
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from charonia.server.metrics.metric_families import Family
from charonia.server.response_cache.api import CacheCounters, CachedResponse, CacheKey, cache_families, local_families

_log = logging.getLogger(__name__)

NAMESPACE_BYTES = 16

_T = TypeVar("_T")


class LruEntries(Generic[_T]):
    """A map that evicts the least recently used entries to stay within a number of bytes.

    Attributes:
        byte_size: Their total size.
        evictions: Number of evicted entries.
    """

    def __init__(self, byte_size_max: int) -> None:
        self.byte_size_max = byte_size_max
        self.byte_size = 0
        self.evictions = 0
        self._entries: dict[CacheKey, tuple[_T, int]] = {}  # the least recently used one is first
        self._namespaces: dict[bytes, set[CacheKey]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: CacheKey) -> _T | None:
        """Return an entry and mark it as the most recently used."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        self._entries[key] = entry
        return entry[0]

    def put(self, key: CacheKey, value: _T, byte_size: int) -> bool:
        """Insert or replace an entry; return whether it fits at all."""
        if key in self._entries:
            self._remove(key)
        if byte_size > self.byte_size_max:
            return False
        while self.byte_size + byte_size > self.byte_size_max:
            self._remove(next(iter(self._entries)))
            self.evictions += 1
        self._entries[key] = (value, byte_size)
        self._namespaces.setdefault(key.namespace, set()).add(key)
        self.byte_size += byte_size
        return True

    def evict_namespace(self, namespace: bytes) -> None:
        for key in tuple(self._namespaces.get(namespace, ())):
            self._remove(key)

    def _remove(self, key: CacheKey) -> None:
        _, byte_size = self._entries.pop(key)
        self.byte_size -= byte_size
        keys = self._namespaces[key.namespace]
        keys.discard(key)
        if not keys:
            del self._namespaces[key.namespace]


class LocalCache:
    """Responses in memory. See `ResponseCache`.

    Args:
        byte_size_max: Largest total size of the responses, in bytes.
    """

    is_shared = False

    def __init__(self, byte_size_max: int) -> None:
        self._entries: LruEntries[CachedResponse] = LruEntries(byte_size_max)
        self._counters = CacheCounters()
        self._has_warned = False

    def get(self, key: CacheKey, found: Callable[[CachedResponse | None], None]) -> None:
        start = time.monotonic_ns()
        response = self._entries.get(key)
        self._counters.looked_up(response is not None, time.monotonic_ns() - start)
        found(response)

    def put(self, key: CacheKey, response: CachedResponse, done: Callable[[], None]) -> None:
        """Store a response, unless it is larger than the cache."""
        start = time.monotonic_ns()
        if not self._entries.put(key, response, response.byte_size) and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "a response of model '%s' takes %d bytes and does not fit into the response cache of %d bytes",
                response.model_name, response.byte_size, self._entries.byte_size_max,
            )  # fmt: skip
        self._counters.inserted(time.monotonic_ns() - start)
        done()

    def evict_namespace(self, namespace: bytes) -> None:
        self._entries.evict_namespace(namespace)

    async def namespace(self, model: str, version: str, content: bytes) -> bytes:
        """Return a new namespace: the entries of earlier loads are never found again."""
        return secrets.token_bytes(NAMESPACE_BYTES)

    def families(self) -> list[Family]:
        entries = self._entries
        used = entries.byte_size / entries.byte_size_max
        return [*local_families(used, len(entries), entries.evictions), *cache_families(self._counters)]

    async def aclose(self) -> None:
        """Do nothing: the memory is freed with the object."""
