"""The rate limiter's shell: makes instances compete for resources, and wakes their schedulers."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from charonia.config.model import InstanceGroup, ModelConfig
from charonia.server.backends.api import Placement
from charonia.server.rate_limiter.options import ResourceLimit
from charonia.server.rate_limiter.overview import InstanceState, PoolState, RateLimitView, Shortage
from charonia.server.rate_limiter.resources import SERVER_WIDE, Arbiter, LimitedScheduler, Member, Need, ResourcePool
from charonia.server.scheduling.api import Scheduler


class Claim:
    """The claim of one model version's instances to resources.

    Args:
        arbiter: Distributes the resources.
        members: The instances, in order of their numbers.
    """

    def __init__(self, arbiter: Arbiter, members: Sequence[Member]) -> None:
        self._arbiter = arbiter
        self._members = members
        self._scheduler: LimitedScheduler | None = None

    def scheduler(self, inner: Scheduler, *, wants: Callable[[int], bool] | None = None) -> Scheduler:
        """Return a scheduler that uses an instance only when it holds its resources.

        Args:
            inner: The scheduler of requests.
            wants: Whether it has a request for an instance, if requests are bound to instances.
        """
        self._scheduler = LimitedScheduler(inner, dict(enumerate(self._members)), self._arbiter, wants=wants)
        return self._scheduler

    def is_blocked_by(self, instance: int, holders: "Iterable[tuple[Claim, int]]") -> bool:
        """Whether an instance cannot run while these instances, of any model, hold their resources."""
        return self._arbiter.is_blocked_by(
            self._members[instance], [holder._members[number] for holder, number in holders]
        )

    def shortage(self, now_ns: int) -> Shortage:
        """Return how long instances have waited so far, and for which resources they wait now."""
        found = self._arbiter.waited_for(self._members)
        pools = {pool for member in self._members for pool in member.pools}
        holders = {member.model for members in found.values() for member in members}
        return Shortage(
            self._scheduler.short_ns(now_ns) if self._scheduler is not None else 0,
            tuple(sorted(map(_title, pools))),
            tuple(sorted(map(_title, found))),
            tuple(sorted(holders)),
        )

    def wake(self, loop: asyncio.AbstractEventLoop, nudge: Callable[[], None]) -> None:
        """From now on call `nudge` when an instance may run."""

        def granted() -> None:
            loop.call_soon(nudge)

        for member in self._members:
            member.granted = granted

    def release(self) -> None:
        """Release all resources: the version is gone."""
        self._arbiter.leave(self._members)


class RateLimits:
    """The resources of one server.

    Args:
        limits: Explicit capacities; the default is the most that one instance needs.
    """

    def __init__(self, limits: Iterable[ResourceLimit] = ()) -> None:
        self._arbiter = Arbiter(limits)

    def claim(self, config: ModelConfig, version: str, placed: Sequence[Placement]) -> Claim | None:
        """Return the claim of a version, None if its configuration has no `rate_limiter` section.

        Raises:
            ServingError: INVALID_ARG, beginning with the path: an instance could never run.
        """
        if not any(group.rate_limiter is not None for group in config.instance_group):
            return None
        groups = {group.name: (index, group) for index, group in enumerate(config.instance_group)}
        members = []
        for placement in placed:
            index, group = groups[placement.name.rpartition("_")[0]]
            priority = group.rate_limiter.priority if group.rate_limiter is not None else 0
            needs = _needs(group, f"instance_group[{index}]", placement.device_id)
            members.append(Member(config.name, version, placement.name, needs, max(1, priority)))
        self._arbiter.join(members)
        return Claim(self._arbiter, members)

    def view(self) -> RateLimitView:
        """Return which instances hold resources and which wait."""
        arbiter = self._arbiter
        held = arbiter.held
        return RateLimitView(
            [
                PoolState(pool.name, _device(pool), capacity, held[pool], arbiter.is_explicit(pool))
                for pool, capacity in sorted(arbiter.capacity.items())
            ],
            [
                InstanceState(
                    member.model, member.version, member.instance, member.state.value,
                    member.priority, member.executions,
                    tuple((need.pool.name, _device(need.pool), need.units) for need in member.needs),
                )
                for member in arbiter.members
            ],
        )  # fmt: skip


def _needs(group: InstanceGroup, path: str, device: int) -> tuple[Need, ...]:
    needs: dict[ResourcePool, Need] = {}
    for index, resource in enumerate(group.rate_limiter.resources if group.rate_limiter is not None else ()):
        pool = ResourcePool(resource.name, SERVER_WIDE if resource.global_ else device)
        before = needs[pool].units if pool in needs else 0
        if resource.count:
            where = f"{path}.rate_limiter.resources[{index}].count"
            needs[pool] = Need(pool, before + resource.count, where)
    return tuple(needs.values())


def _title(pool: ResourcePool) -> str:
    return f"{pool.name} of device {pool.device}" if pool.device > 0 else pool.name


def _device(pool: ResourcePool) -> int | None:
    return None if pool.device == SERVER_WIDE else pool.device
