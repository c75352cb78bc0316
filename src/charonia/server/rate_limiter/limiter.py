"""The rate limiter's shell: makes instances compete for resources, and wakes their schedulers."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from charonia.config.model import InstanceGroup, ModelConfig
from charonia.server.backends.api import Placement
from charonia.server.metrics.metric_families import Family, family
from charonia.server.rate_limiter.options import ResourceLimit
from charonia.server.rate_limiter.resources import (
    SERVER_WIDE,
    Arbiter,
    LimitedScheduler,
    Member,
    MemberState,
    Need,
    ResourcePool,
)
from charonia.server.scheduling.api import Scheduler


@dataclass(frozen=True, slots=True)
class Shortage:
    """The resources for which instances of a model version wait.

    Attributes:
        short_ns: Time since the version was loaded during which at least one of them waited.
        needs: All resources that they need.
        resources: Those for which some wait now.
        holders: Models whose instances hold these.
    """

    short_ns: int = 0
    needs: tuple[str, ...] = ()
    resources: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()


NO_SHORTAGE = Shortage()


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

    def document(self) -> dict[str, object]:
        """Return a JSON document: resources with their holders and waiting instances, then all instances."""
        arbiter = self._arbiter
        return {
            "resources": [
                {
                    "name": pool.name,
                    "device": _device(pool),
                    "capacity": capacity,
                    "explicit": arbiter.is_explicit(pool),
                    "in_use": arbiter.held[pool],
                    "holders": self._with(pool, MemberState.RUNNING),
                    "waiting": self._with(pool, MemberState.WAITING),
                }
                for pool, capacity in sorted(arbiter.capacity.items())
            ],
            "instances": [
                {
                    "model": member.model,
                    "version": member.version,
                    "instance": member.instance,
                    "state": member.state.value,
                    "priority": member.priority,
                    "executions": member.executions,
                }
                for member in arbiter.members
            ],
        }

    def families(self) -> list[Family]:
        """Return the metrics of resources and instances."""
        arbiter = self._arbiter
        pools = [(p, {"resource": p.name, "device": str(_device(p))}) for p in sorted(arbiter.capacity)]
        members = [(m, {"model": m.model, "version": m.version, "model_instance": m.instance}) for m in arbiter.members]
        return [
            family(
                "charonia_rate_limit_capacity", "gauge", "Capacity of a resource",
                *((arbiter.capacity[pool], labels) for pool, labels in pools),
            ),
            family(
                "charonia_rate_limit_in_use", "gauge", "Units of a resource in use",
                *((arbiter.held[pool], labels) for pool, labels in pools),
            ),
            family(
                "charonia_rate_limit_waiting", "gauge", "Whether an instance waits for its resources",
                *((int(member.state is MemberState.WAITING), labels) for member, labels in members),
            ),
            family(
                "charonia_rate_limit_executions_total", "counter", "Executions of an instance",
                *((member.executions, labels) for member, labels in members),
            ),
        ]  # fmt: skip

    def _with(self, pool: ResourcePool, state: MemberState) -> list[dict[str, object]]:
        return [
            {"model": member.model, "version": member.version, "instance": member.instance, "count": need.units}
            for member in self._arbiter.members
            if member.state is state
            for need in member.needs
            if need.pool == pool
        ]


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


def _device(pool: ResourcePool) -> int | str:
    return "global" if pool.device == SERVER_WIDE else pool.device
