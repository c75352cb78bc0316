"""The rate limiter, as the server's options have it. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class RateLimitMode(Enum):
    """Whether instances share counted resources."""

    OFF = "off"
    """An instance runs when it is idle; `rate_limiter` sections have no effect."""

    EXECUTION_COUNT = "execution_count"
    """An instance runs when it has its resources; of those that wait, the one that ran least comes first."""


@dataclass(frozen=True, slots=True)
class ResourceLimit:
    """How much there is of a resource.

    Attributes:
        name: The resource.
        count: How much there is of it.
        device: On which device, None for every device. Of a resource of the whole server it has no meaning.
    """

    name: str
    count: int
    device: int | None = None


@dataclass(frozen=True, slots=True)
class RateLimitOptions:
    """The rate limiter.

    Attributes:
        mode: Whether it is there.
        resources: How much there is of each resource; of others, the most that an instance needs.
    """

    mode: RateLimitMode = RateLimitMode.OFF
    resources: tuple[ResourceLimit, ...] = ()

    @property
    def is_on(self) -> bool:
        """Whether instances share resources."""
        return self.mode is RateLimitMode.EXECUTION_COUNT

    def problems(self) -> Iterator[str]:
        """Yield what is wrong."""
        seen: dict[tuple[str, int | None], int] = {}
        for limit in self.resources:
            before = seen.setdefault((limit.name, limit.device), limit.count)
            if before != limit.count:
                where = "" if limit.device is None else f" of device {limit.device}"
                yield f"--rate-limit-resource: '{limit.name}'{where} is given as {before} and as {limit.count}"
