"""Server options of the rate limiter. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class RateLimitMode(Enum):
    """Whether instances share counted resources."""

    OFF = "off"
    """An instance runs when it is idle; `rate_limiter` sections have no effect."""

    EXECUTION_COUNT = "execution_count"
    """An instance runs when it has its resources; among waiting instances, the least executed is next."""


@dataclass(frozen=True, slots=True)
class ResourceLimit:
    """The capacity of a resource.

    Attributes:
        name: The resource.
        count: Its capacity.
        device: The device, None for every device. Ignored for a resource of the whole server.
    """

    name: str
    count: int
    device: int | None = None


@dataclass(frozen=True, slots=True)
class RateLimitOptions:
    """The rate limiter.

    Attributes:
        mode: Whether it is on.
        resources: Capacities; the default is the most that an instance needs.
    """

    mode: RateLimitMode = RateLimitMode.OFF
    resources: tuple[ResourceLimit, ...] = ()

    @property
    def is_on(self) -> bool:
        return self.mode is RateLimitMode.EXECUTION_COUNT

    def problems(self) -> Iterator[str]:
        """Yield all problems."""
        seen: dict[tuple[str, int | None], int] = {}
        for limit in self.resources:
            before = seen.setdefault((limit.name, limit.device), limit.count)
            if before != limit.count:
                where = "" if limit.device is None else f" of device {limit.device}"
                yield f"--rate-limit-resource: '{limit.name}'{where} is given as {before} and as {limit.count}"
