"""The cores of this process: how many it may use, the share of an instance, and host policies (`--host-policy`).

A process may use fewer cores than the machine has: its affinity mask may exclude some, and its control group (a
container's or a Kubernetes CPU limit) may have a quota of CPU time per period. Libraries that count the cores of the
machine then start too many threads, and the threads of one model starve the others and the server. A host policy binds
the threads and processes of an instance to the cores that it names.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from charonia.config.kinds import InstanceKind
from charonia.core.errors import invalid, unsupported

CORE_MAX = 4095
NODE_MAX = 1023

_RANGE = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", re.ASCII)
_NODE = re.compile(r"[0-9]{1,4}", re.ASCII)


@dataclass(frozen=True, slots=True)
class HostPolicy:
    """The cores that instances run on.

    Attributes:
        cores: Numbers of the cores, ascending; empty for all of the NUMA node, or of the machine.
        node: Number of the NUMA node, None for any.
    """

    cores: tuple[int, ...] = ()
    node: int | None = None


def parse_cores(text: str) -> tuple[int, ...]:
    """Return the cores of a list such as `0-3,8-11`, ascending. Raises ValueError: The text is not such a list."""
    cores: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match is not None else (1, 0)
        if low > high or high > CORE_MAX:
            raise ValueError(f"expected cores such as 0-3 or 0-3,8-11 up to {CORE_MAX}, got '{text}'")
        cores.update(range(low, high + 1))
    return tuple(sorted(cores))


def read_policies(settings: Sequence[tuple[str, str, str]]) -> dict[str, HostPolicy]:
    """Return the policies by name; of a setting given more than once, the last counts.

    Args:
        settings: Name of the policy, name of the setting (`cpu-cores` or `numa-node`), value.

    Raises:
        ValueError: A setting is unknown, or its value invalid.
    """
    policies: dict[str, HostPolicy] = {}
    for name, setting, value in settings:
        policy = policies.get(name, HostPolicy())
        if not name:
            raise ValueError(f"expected <policy>,<setting>=<value>, got '{setting}={value}'")
        if setting == "cpu-cores":
            policies[name] = replace(policy, cores=parse_cores(value))
        elif setting == "numa-node":
            if not _NODE.fullmatch(value.strip()) or int(value) > NODE_MAX:
                raise ValueError(f"expected the number of a memory node up to {NODE_MAX}, got '{value}'")
            policies[name] = replace(policy, node=int(value))
        else:
            raise ValueError(f"expected the setting cpu-cores or numa-node, got '{setting}'")
    return policies


def policy_name(group_policy: str, kind: InstanceKind, device: int) -> str:
    """Return the name of the policy of an instance: that of its group, or the default of its kind."""
    if group_policy:
        return group_policy
    if kind is InstanceKind.KIND_GPU:
        return f"gpu_{device}"
    return "model" if kind is InstanceKind.KIND_MODEL else "cpu"


def check_cores(name: str, policy: HostPolicy, usable: frozenset[int], nodes: Mapping[int, tuple[int, ...]]) -> None:
    """Check that the cores of a policy exist.

    Args:
        usable: Cores that this process may use.
        nodes: Cores by memory node.

    Raises:
        ServingError: INVALID_ARG when they do not.
    """
    missing = [core for core in policy.cores if core not in usable]
    if missing:
        raise invalid(
            f"--host-policy={name},cpu-cores: this process may not use core {', '.join(map(str, missing))}",
            hint=f"it may use {', '.join(map(str, sorted(usable)))}",
        )
    if policy.node is not None and policy.node not in nodes:
        raise invalid(
            f"--host-policy={name},numa-node={policy.node}: this memory node does not exist",
            hint=f"there are {', '.join(map(str, sorted(nodes))) or 'none that can be seen'}",
        )


@contextlib.contextmanager
def bound_to(cores: Sequence[int]) -> Iterator[None]:
    """Bind the calling thread to these cores for a while; threads and processes that it starts inherit that.

    Args:
        cores: Numbers of the cores; empty for any, which changes nothing.
    """
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def usable_cores(limit: int = 0, *, process: Path = Path("/proc/self"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores that this server may use: `limit` by `--cpu-cores`, or all that it can keep busy.

    The smaller of the affinity mask and the CPU quota of the control group, rounded down: with one thread more than the
    quota allows, all of them are throttled for part of each period.

    Args:
        limit: The number of `--cpu-cores`, 0 for none.
        process: This process's folder of the proc file system.
        groups: Mount point of control groups.
    """
    if limit:
        return limit
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in control_groups("cpu", process, groups) if (quota := _quota(folder)) is not None]
    return max(1, int(min([float(cores), *quotas])))


def cores_for_models(cores: int, front_ends: int) -> int:
    """Return the cores that models may use beside front ends in separate processes.

    A front end keeps up to one core busy, so each takes one from the models, of whose cores at least half stay theirs.
    """
    return max(1, cores - front_ends, cores // 2)


def share(cores: int, instances: int) -> int:
    """Return the threads that each of `instances` may use so that all together do not exceed `cores`; at least 1."""
    return max(1, cores // max(1, instances))


def control_groups(controller: str, process: Path, groups: Path) -> Iterator[Path]:
    """Yield the folders of a process's control group for "cpu" or "memory" and of its parents, versions 1 and 2."""
    try:
        lines = (process / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            mounts = [groups, groups / "unified"]
        elif controller in controllers.split(","):
            mounts = [groups / controller, groups / controllers]
        else:
            continue
        # Inside a container the path may be the host's, of which only the mount's own folder exists here.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for mount in mounts:
            for depth in range(len(parts), -1, -1):
                yield mount.joinpath(*parts[:depth])


def _quota(folder: Path) -> float | None:
    """Return the cores that a control group may use, or None where it has no limit."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
        cores = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no such group, or "max"
        return None
    return cores if cores > 0 else None


def bind_thread(cores: Sequence[int]) -> None:
    """Bind the calling thread, and threads that it starts from now on, to these cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def memory_nodes(folder: Path = Path("/sys/devices/system/node")) -> dict[int, tuple[int, ...]]:
    """Return the cores of each memory node (NUMA) of the machine; empty where the system does not report it.

    Args:
        folder: The kernel's description of the nodes.
    """
    nodes: dict[int, tuple[int, ...]] = {}
    for path in folder.glob("node[0-9]*"):
        try:
            nodes[int(path.name.removeprefix("node"))] = parse_cores((path / "cpulist").read_text("ascii").strip())
        except (OSError, ValueError):  # not a node, or a node without cores
            continue
    return nodes


def policy_cores(policies: Mapping[str, HostPolicy]) -> dict[str, tuple[int, ...]]:
    """Return the cores of each host policy.

    Raises:
        ServingError: INVALID_ARG for cores that do not exist, UNSUPPORTED where processes cannot be bound to cores.
    """
    if not policies:
        return {}
    if not hasattr(os, "sched_setaffinity"):
        raise unsupported("--host-policy: this system cannot bind threads to cores")
    usable, nodes = frozenset(os.sched_getaffinity(0)), memory_nodes()
    found = {}
    for name, policy in policies.items():
        check_cores(name, policy, usable, nodes)
        of_node = usable.intersection(nodes[policy.node]) if policy.node is not None else usable
        found[name] = policy.cores or tuple(sorted(of_node))
    return found
