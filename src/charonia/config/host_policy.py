"""Host policies: which cores the instances of a model run on (`--host-policy`)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from charonia.config.kinds import InstanceKind
from charonia.core.errors import invalid

CORE_MAX = 4095
NODE_MAX = 1023

_RANGE = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", re.ASCII)
_NODE = re.compile(r"[0-9]{1,4}", re.ASCII)


@dataclass(frozen=True, slots=True)
class HostPolicy:
    """Where instances run.

    Attributes:
        cores: Numbers of the cores, ascending; empty for those of the memory node, or all.
        node: Number of the memory node (NUMA), None for any.
    """

    cores: tuple[int, ...] = ()
    node: int | None = None


def parse_cores(text: str) -> tuple[int, ...]:
    """Return the cores of a list such as `0-3,8-11`, ascending.

    Raises:
        ValueError: It is no such list.
    """
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
        ValueError: A setting is not known, or its value is none.
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
    """Check that a policy names cores that there are.

    Args:
        name: Its name.
        policy: The policy.
        usable: Cores that this process may use.
        nodes: Cores by memory node.

    Raises:
        ServingError: INVALID_ARG when it does not.
    """
    missing = [core for core in policy.cores if core not in usable]
    if missing:
        raise invalid(
            f"--host-policy={name},cpu-cores: this process may not use core {', '.join(map(str, missing))}",
            hint=f"it may use {', '.join(map(str, sorted(usable)))}",
        )
    if policy.node is not None and policy.node not in nodes:
        raise invalid(
            f"--host-policy={name},numa-node={policy.node}: there is no such memory node",
            hint=f"there are {', '.join(map(str, sorted(nodes))) or 'none that can be seen'}",
        )
