"""The changes in the repositories between two scans. Pure: the caller scans, and decides when.

A change counts when two consecutive scans agree on it: a model that is still being copied differs between scans.
Each model settles on its own, so a long copy does not delay the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from charonia.server.lifecycle.repository.scan import Scan


@dataclass(frozen=True, slots=True)
class Changes:
    """Names of the models that were added, changed or removed. False when there are none."""

    added: tuple[str, ...] = ()
    modified: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.modified or self.removed)


def diff(old: Mapping[str, object], new: Mapping[str, object]) -> Changes:
    """Compare two scans, each a mapping of names to model folders."""
    return Changes(
        added=tuple(sorted(new.keys() - old.keys())),
        modified=tuple(sorted(name for name in new.keys() & old.keys() if new[name] != old[name])),
        removed=tuple(sorted(old.keys() - new.keys())),
    )


class Watch:
    """Turns scans of the repositories into the changes to act on. A name that becomes ambiguous is a modified one."""

    def __init__(self) -> None:
        self._acted: dict[str, object] = {}
        self._last: dict[str, object] = {}

    def reset(self, scan: Scan) -> None:
        """Take a scan as the state that the server has acted on."""
        self._acted = _view(scan)
        self._last = _view(scan)

    def look(self, scan: Scan) -> Changes:
        """Compare with a new scan and return the changes that have settled; each is returned once."""
        seen = _view(scan)
        changes = diff(self._acted, seen)
        settled = Changes(
            added=self._agreed(changes.added, seen),
            modified=self._agreed(changes.modified, seen),
            removed=self._agreed(changes.removed, seen),
        )
        for name in (*settled.added, *settled.modified):
            self._acted[name] = seen[name]
        for name in settled.removed:
            del self._acted[name]
        self._last = seen
        return settled

    def forget(self, name: str) -> None:
        """Treat a model as new: the next scan reports it as a change."""
        self._acted.pop(name, None)

    @property
    def is_pending(self) -> bool:
        """Whether a change waits for the next scan to confirm it: a reason to scan again soon."""
        return bool(diff(self._acted, self._last))

    def _agreed(self, names: tuple[str, ...], seen: Mapping[str, object]) -> tuple[str, ...]:
        return tuple(name for name in names if self._last.get(name) == seen.get(name))


def _view(scan: Scan) -> dict[str, object]:
    return {**scan.models, **scan.ambiguous}
