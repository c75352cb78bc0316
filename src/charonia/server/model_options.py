"""Options of models: which are loaded when, object stores, and models loaded on demand."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

MEMORY_MB_MAX = 2**31 - 1
WAITING_MAX = 1_000_000
WAIT_SECS_MAX = 86_400
IDLE_SECS_MAX = 2_592_000
DOWNLOADS_MAX = 256

ALL_MODELS = "*"
"""In `load_models`: everything in the repositories."""


class ReadyWhen(Enum):
    """Which models have to be ready for the server to be ready."""

    ALL_MODELS = "true"
    """All that should be loaded."""

    AT_START = "start"
    """The models of the startup, until each has been ready: a later load or failure does not count."""

    ANY_TIME = "false"
    """None."""


class ControlMode(Enum):
    """When models are loaded."""

    NONE = "none"
    """All models at startup, and no change after that."""

    POLL = "poll"
    """As NONE, then every change in the repositories."""

    EXPLICIT = "explicit"
    """`load_models` at startup, then as requested through the repository API."""

    AUTO = "auto"
    """Each model on demand; the least recently used models are evicted when memory is short."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How repositories in object stores are read.

    Attributes:
        cache: Folder of fetched files, "" for the user's cache.
        cache_mb: Its size limit in MiB; files in use are never evicted.
        downloads: Limit of concurrent downloads of parts of files.
    """

    cache: str = ""
    cache_mb: int = 65_536
    downloads: int = 8


@dataclass(frozen=True, slots=True)
class AutoOptions:
    """How models are loaded on demand: all of them in control mode AUTO, else those that were unloaded while idle.

    Attributes:
        memory_mb: Memory limit of all loaded models in MiB, 0 for a share of what this process may use.
        pinned: Models that are loaded at startup and never evicted.
        waiting_max: Requests that wait for one model.
        wait_secs: Longest time that a request waits for its model, in seconds.
        idle_secs: Time in seconds after which an unused model is unloaded, 0 for never.
    """

    memory_mb: int = 0
    pinned: tuple[str, ...] = ()
    waiting_max: int = 1000
    wait_secs: int = 300
    idle_secs: int = 0

    def problems(self, *, is_auto: bool) -> Iterator[str]:
        """Yield all problems; `is_auto`: whether the control mode is AUTO."""
        if is_auto or self == AutoOptions():
            return
        if self.memory_mb or not self.idle_secs:
            yield (
                "--model-memory-budget needs --model-control-mode=auto, and --pin-model, --auto-queue-size and "
                "--auto-wait-secs need it or --model-idle-unload"
            )
