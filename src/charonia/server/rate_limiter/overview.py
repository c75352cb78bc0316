"""The rate limiter's resources and instances as records, as JSON and as metrics. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from charonia.server.metrics.metric_families import Family, family


@dataclass(frozen=True, slots=True)
class PoolState:
    """A resource of one device, or of the server.

    Attributes:
        device: The device, None for a resource of the whole server.
        in_use: The units in use.
        is_explicit: Whether the capacity was set on the command line; otherwise it is the most that an instance needs.
    """

    name: str
    device: int | None
    capacity: int
    in_use: int
    is_explicit: bool


@dataclass(frozen=True, slots=True)
class InstanceState:
    """An instance that the rate limiter controls.

    Attributes:
        version: The version, as text.
        instance: Its name.
        state: "idle", "waiting" or "running".
        priority: Weight of its executions.
        executions: Number of executions.
        needs: Name, device (None for the whole server) and count of each resource that it holds while it runs.
    """

    model: str
    version: str
    instance: str
    state: str
    priority: int
    executions: int
    needs: tuple[tuple[str, int | None, int], ...]


@dataclass(frozen=True, slots=True)
class RateLimitView:
    """All resources and all instances."""

    pools: Sequence[PoolState]
    instances: Sequence[InstanceState]


def view_json(view: RateLimitView) -> dict[str, object]:
    """Return a view as a JSON document: resources with their holders and waiting instances, then all instances."""
    return {
        "resources": [
            {
                "name": pool.name,
                "device": "global" if pool.device is None else pool.device,
                "capacity": pool.capacity,
                "explicit": pool.is_explicit,
                "in_use": pool.in_use,
                "holders": _with(view, pool, "running"),
                "waiting": _with(view, pool, "waiting"),
            }
            for pool in view.pools
        ],
        "instances": [
            {
                "model": instance.model,
                "version": instance.version,
                "instance": instance.instance,
                "state": instance.state,
                "priority": instance.priority,
                "executions": instance.executions,
            }
            for instance in view.instances
        ],
    }


def families(view: RateLimitView) -> list[Family]:
    """Return the metrics of a view."""
    pools = [(pool, {"resource": pool.name, "device": _device(pool.device)}) for pool in view.pools]
    members = [(i, {"model": i.model, "version": i.version, "model_instance": i.instance}) for i in view.instances]
    return [
        family(
            "charonia_rate_limit_capacity", "gauge", "Capacity of a resource",
            *((pool.capacity, labels) for pool, labels in pools),
        ),
        family(
            "charonia_rate_limit_in_use", "gauge", "Units of a resource in use",
            *((pool.in_use, labels) for pool, labels in pools),
        ),
        family(
            "charonia_rate_limit_waiting", "gauge", "Whether an instance waits for its resources",
            *((int(instance.state == "waiting"), labels) for instance, labels in members),
        ),
        family(
            "charonia_rate_limit_executions_total", "counter", "Executions of an instance",
            *((instance.executions, labels) for instance, labels in members),
        ),
    ]  # fmt: skip


def _with(view: RateLimitView, pool: PoolState, state: str) -> list[dict[str, object]]:
    return [
        {"model": i.model, "version": i.version, "instance": i.instance, "count": count}
        for i in view.instances
        if i.state == state
        for name, device, count in i.needs
        if (name, device) == (pool.name, pool.device)
    ]


def _device(device: int | None) -> str:
    return "global" if device is None else str(device)


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
