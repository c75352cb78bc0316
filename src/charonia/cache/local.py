"""A response cache in the server's own memory."""

import logging
import secrets
import time
from collections.abc import Callable

from charonia.cache.api import KeptResponse, Key
from charonia.cache.lru import LruEntries
from charonia.stats.cache import CacheCounters, cache_families, local_families
from charonia.stats.families import Family

_log = logging.getLogger(__name__)

SPACE_BYTES = 16


class LocalCache:
    """Responses in memory. See `ResponseCache`.

    Args:
        byte_size_max: What all responses may take together, in bytes.
    """

    is_shared = False

    def __init__(self, byte_size_max: int) -> None:
        self._entries: LruEntries[KeptResponse] = LruEntries(byte_size_max)
        self._counters = CacheCounters()
        self._has_warned = False

    def get(self, key: Key, found: Callable[[KeptResponse | None], None]) -> None:
        """Look a response up, at once."""
        start = time.monotonic_ns()
        response = self._entries.get(key)
        self._counters.looked_up(response is not None, time.monotonic_ns() - start)
        found(response)

    def put(self, key: Key, response: KeptResponse, done: Callable[[], None]) -> None:
        """Keep a response, at once, unless it is larger than the cache."""
        start = time.monotonic_ns()
        if not self._entries.put(key, response, response.byte_size) and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "a response of model '%s' takes %d bytes and does not fit into the response cache of %d bytes",
                *(response.model_name, response.byte_size, self._entries.byte_size_max),
            )
        self._counters.inserted(time.monotonic_ns() - start)
        done()

    def forget(self, space: bytes) -> None:
        """Remove what was kept for a model version."""
        self._entries.forget(space)

    async def space(self, model: str, version: str, content: bytes) -> bytes:
        """Return a key space that was never used."""
        return secrets.token_bytes(SPACE_BYTES)

    def families(self) -> list[Family]:
        """Return its metrics."""
        entries = self._entries
        used = entries.byte_size / entries.byte_size_max
        return [*local_families(used, len(entries), entries.evictions), *cache_families(self._counters)]

    async def aclose(self) -> None:
        """Give back nothing: it goes with the server."""
