"""Whether a workload fits into a cluster: resources of its nodes, and quotas of the namespace. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from charonia.platform.targets.api import Workload
from charonia.platform.targets.fit import MIB, needs_of
from charonia.platform.targets.kubernetes.marks import Plain

_QUANTITY = re.compile(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([a-zA-Z]*)")
_UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18} | {
    f"{letter}i": float(1024 ** (power + 1)) for power, letter in enumerate("KMGTPE")
}


@dataclass(frozen=True, slots=True)
class PodNeed:
    """Resources that a server requests."""

    cores: float
    memory_bytes: int
    gpus: int
    gpu_resource: str = "nvidia.com/gpu"


def pod_need(workload: Workload) -> PodNeed:
    return PodNeed(float(workload.spec.cpu_cores), needs_of(workload).memory_bytes, len(workload.spec.gpus))


def asked_in_vain(workload: Workload) -> Iterator[str]:
    """Yield which requests of a workload pods cannot meet."""
    if workload.spec.gpu_memory_mib:
        yield "device.gpu_memory_mib: pods get whole GPUs: expected 0, or a slice of GPUs as gpu.resource in the values"


def quantity(text: object) -> float:
    """Return a quantity of Kubernetes as a number: "500m" is 0.5, "1Gi" is 2**30; 0.0 if it is not a quantity."""
    match = _QUANTITY.fullmatch(str(text))
    return float(match[1]) * _UNITS.get(match[2], 1.0) if match else 0.0


def node_misfits(need: PodNeed, nodes: Sequence[Plain]) -> Iterator[str]:
    """Yield why no node can run such a server, not even an idle one; nothing if the nodes are unknown."""
    open_nodes = [node for node in nodes if not (node.get("spec") or {}).get("unschedulable")]
    offers = [(node.get("status") or {}).get("allocatable") or {} for node in open_nodes]
    if not offers or any(_fits(need, offer) for offer in offers):
        return
    most_cores, most_bytes = (max(quantity(offer.get(what, 0)) for offer in offers) for what in ("cpu", "memory"))
    most_gpus = max(quantity(offer.get(need.gpu_resource, 0)) for offer in offers)
    found = []
    if need.cores > most_cores:
        found.append(f"device.cpu_cores: the largest node of the cluster has {most_cores:g}, got {need.cores:g}")
    if need.memory_bytes > most_bytes:
        found.append(
            f"memory: a server needs {need.memory_bytes / MIB:.0f} MiB, and the largest node of the cluster has "
            f"{most_bytes / MIB:.0f} MiB"
        )
    if need.gpus > most_gpus:
        found.append(f"device.gpus: the node with the most GPUs in the cluster has {most_gpus:g}, got {need.gpus}")
    yield from found or ["device: no node of the cluster has enough cores, memory and GPUs together"]


def quota_misfits(need: PodNeed, replicas: int, quotas: Sequence[Plain]) -> Iterator[str]:
    """Yield which quota of the namespace leaves too little for so many servers."""
    wanted: Mapping[str, float] = {
        "requests.cpu": need.cores * replicas,
        "cpu": need.cores * replicas,
        "requests.memory": float(need.memory_bytes * replicas),
        "memory": float(need.memory_bytes * replicas),
        f"requests.{need.gpu_resource}": float(need.gpus * replicas),
        "pods": float(replicas),
    }
    for each in quotas:
        status = each.get("status") or {}
        for what, amount in wanted.items():
            hard = (status.get("hard") or {}).get(what)
            left = quantity(hard) - quantity((status.get("used") or {}).get(what, 0))
            if hard is not None and amount > left:
                yield (
                    f"quota '{each['metadata']['name']}' of the namespace: {what} {_shown(what, amount)} is needed, "
                    f"and {_shown(what, max(0.0, left))} of {hard} is left"
                )


def _fits(need: PodNeed, offer: Plain) -> bool:
    return (
        need.cores <= quantity(offer.get("cpu", 0))
        and need.memory_bytes <= quantity(offer.get("memory", 0))
        and need.gpus <= quantity(offer.get(need.gpu_resource, 0))
    )


def _shown(what: str, amount: float) -> str:
    return f"{amount / MIB:.0f}Mi" if "memory" in what else f"{amount:g}"
