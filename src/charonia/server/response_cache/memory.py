"""A response cache in the server's own memory.

Entries by key within a number of bytes; the ones that were used longest ago make room.
"""

import logging
import secrets
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from charonia.server.metrics.metric_families import Family
from charonia.server.response_cache.api import KeptResponse, Key
from charonia.server.response_cache.metrics import CacheCounters, cache_families, local_families

_T = TypeVar("_T")


class LruEntries(Generic[_T]):
    """A bounded map.

    Args:
        byte_size_max: What all entries may take together.

    Attributes:
        byte_size: What they take.
        evictions: Entries that had to make room.
    """

    def __init__(self, byte_size_max: int) -> None:
        self.byte_size_max = byte_size_max
        self.byte_size = 0
        self.evictions = 0
        self._entries: dict[Key, tuple[_T, int]] = {}  # the one that was used last is last
        self._spaces: dict[bytes, set[Key]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> _T | None:
        """Return an entry, and remember that it was used."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        self._entries[key] = entry
        return entry[0]

    def put(self, key: Key, value: _T, byte_size: int) -> bool:
        """Keep an entry, in place of an earlier one; return whether it fits at all."""
        if key in self._entries:
            self._remove(key)
        if byte_size > self.byte_size_max:
            return False
        while self.byte_size + byte_size > self.byte_size_max:
            self._remove(next(iter(self._entries)))
            self.evictions += 1
        self._entries[key] = (value, byte_size)
        self._spaces.setdefault(key.space, set()).add(key)
        self.byte_size += byte_size
        return True

    def forget(self, space: bytes) -> None:
        """Remove every entry of a key space."""
        for key in tuple(self._spaces.get(space, ())):
            self._remove(key)

    def _remove(self, key: Key) -> None:
        _, byte_size = self._entries.pop(key)
        self.byte_size -= byte_size
        keys = self._spaces[key.space]
        keys.discard(key)
        if not keys:
            del self._spaces[key.space]


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
