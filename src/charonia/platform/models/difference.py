"""Differences between two versions: their configurations and files. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from charonia.platform.artifacts.manifest import Manifest


@dataclass(frozen=True, slots=True)
class ChangedValue:
    """A field of the configuration that differs.

    Attributes:
        path: Its path: "input[0].dims".
        before: Its value in the first version, None if absent.
        after: Its value in the second one.
    """

    path: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class VersionDifference:
    """Differences between two versions.

    Attributes:
        after: Number of the second.
        added: Files that only the second one has.
        removed: Files that only the first one has.
    """

    before: int
    after: int
    config: list[ChangedValue]
    added: list[str]
    removed: list[str]
    changed: list[str]


def changed_values(before: Any, after: Any, path: str = "") -> Iterator[ChangedValue]:
    """Yield the differences between two JSON values. Entries of lists with names are compared by name."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from changed_values(before.get(key), after.get(key), f"{path}.{key}" if path else key)
    elif isinstance(before, list) and isinstance(after, list) and _named(before) and _named(after):
        first, second = ({entry["name"]: entry for entry in entries} for entries in (before, after))
        for name in [*first, *(name for name in second if name not in first)]:
            yield from changed_values(first.get(name), second.get(name), f"{path}[{name}]")
    elif before != after:
        yield ChangedValue(path, before, after)


def compare_files(before: Manifest, after: Manifest) -> tuple[list[str], list[str], list[str]]:
    """Return the paths that were added, removed, and changed."""
    changed = [path for path in before.keys() & after.keys() if before[path].sha256 != after[path].sha256]
    return sorted(after.keys() - before.keys()), sorted(before.keys() - after.keys()), sorted(changed)


def _named(entries: list[Any]) -> bool:
    names = [entry.get("name") if isinstance(entry, Mapping) else None for entry in entries]
    return all(names) and len(set(names)) == len(names)
