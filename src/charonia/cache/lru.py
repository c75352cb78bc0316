"""Entries by key within a number of bytes; the ones that were used longest ago make room. Pure."""

from typing import Generic, TypeVar

from charonia.cache.api import Key

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
