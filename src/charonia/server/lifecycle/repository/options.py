"""Options of the repositories: stores, and models that are loaded when they are needed."""

from collections.abc import Iterator
from dataclasses import dataclass

MEMORY_MB_MAX = 2**31 - 1
WAITING_MAX = 1_000_000
WAIT_SECS_MAX = 86_400
DOWNLOADS_MAX = 256


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How repositories in object stores are read.

    Attributes:
        cache: Folder of what was fetched, "" for the user's cache.
        cache_mb: MiB that it keeps; what is in use is never removed.
        downloads: Parts of files that are fetched at a time.
    """

    cache: str = ""
    cache_mb: int = 65_536
    downloads: int = 8


@dataclass(frozen=True, slots=True)
class AutoOptions:
    """How models are loaded when they are needed, in control mode AUTO.

    Attributes:
        memory_mb: MiB that the loaded models may take together, 0 for a share of what this process may use.
        pinned: Models that are loaded at start and stay.
        waiting_max: Requests that wait for one model.
        wait_secs: Longest time that a request waits for its model, in seconds.
    """

    memory_mb: int = 0
    pinned: tuple[str, ...] = ()
    waiting_max: int = 1000
    wait_secs: int = 300

    def problems(self, *, is_auto: bool) -> Iterator[str]:
        """Yield what is wrong; `is_auto` says whether the control mode is AUTO."""
        if self != AutoOptions() and not is_auto:
            yield (
                "--model-memory-budget, --pin-model, --auto-queue-size and --auto-wait-secs need "
                "--model-control-mode=auto"
            )
