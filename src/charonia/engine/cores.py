"""How many cores this process may use, and what share of them an instance gets.

A process may use fewer cores than the machine has: its affinity mask names some of them, and a control group (what a
container or a Kubernetes CPU limit is made of) may allow only so much CPU time per period. Libraries that ask the
machine start too many threads then, and the threads of one model starve the others and the server.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from charonia.config.host_policy import HostPolicy, check_cores, parse_cores
from charonia.core.errors import unsupported


def usable_cores(process: Path = Path("/proc/self"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores that this process can keep busy, at least 1.

    The smaller of the affinity mask and the CPU quota of the control group, rounded down: a thread more than the quota
    has room for means that all of them are stopped for part of each period.

    Args:
        process: This process's folder of the proc file system.
        groups: Where control groups are mounted.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in _group_folders(process, groups) if (quota := _quota(folder)) is not None]
    return max(1, int(min([float(cores), *quotas])))


def share(cores: int, instances: int) -> int:
    """Return the threads that each of `instances` may use so that together they stay within `cores`; at least 1."""
    return max(1, cores // max(1, instances))


def _group_folders(process: Path, groups: Path) -> Iterator[Path]:
    """Yield the folders of this process's CPU control group and of the groups around it, versions 1 and 2."""
    try:
        lines = (process / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            mounts = [groups, groups / "unified"]
        elif "cpu" in controllers.split(","):
            mounts = [groups / "cpu", groups / controllers]
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
    except (OSError, ValueError, ZeroDivisionError):  # no such group here, or "max"
        return None
    return cores if cores > 0 else None


def bind_thread(cores: Sequence[int]) -> None:
    """Let the calling thread, and those that it starts from now on, run on these cores only."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def memory_nodes(folder: Path = Path("/sys/devices/system/node")) -> dict[int, tuple[int, ...]]:
    """Return the cores of each memory node (NUMA) of the machine; empty where that cannot be seen.

    Args:
        folder: Where the kernel describes them.
    """
    nodes: dict[int, tuple[int, ...]] = {}
    for path in folder.glob("node[0-9]*"):
        try:
            nodes[int(path.name.removeprefix("node"))] = parse_cores((path / "cpulist").read_text("ascii").strip())
        except (OSError, ValueError):  # a node without cores, or none at all
            continue
    return nodes


def policy_cores(policies: Mapping[str, HostPolicy]) -> dict[str, tuple[int, ...]]:
    """Return the cores of each host policy.

    Raises:
        ServingError: INVALID_ARG for cores that are not there, UNSUPPORTED where processes cannot be bound to cores.
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
