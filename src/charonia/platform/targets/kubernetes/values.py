"""The values of the chart for a workload, and whether it fits into a cluster: nodes, quotas of the namespace. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from charonia.platform.settings import KubernetesSettings
from charonia.platform.targets.api import Workload, key_file
from charonia.platform.targets.fit import MIB, needs_of
from charonia.platform.targets.kubernetes.objects import Plain, keys_name, object_name

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
    return PodNeed(
        float(workload.spec.device.cpu_cores), needs_of(workload).memory_bytes, len(workload.spec.device.gpus)
    )


def unsupported_requests(workload: Workload) -> Iterator[str]:
    """Yield which requests of a workload pods cannot meet."""
    if workload.spec.device.gpu_memory_mib:
        yield "device.gpu_memory_mib: pods get whole GPUs: expected 0, or a slice of GPUs as gpu.resource in the values"
    if workload.variables:
        yield "variables, secrets: expected none at this target: --kubernetes-values sets 'env' and 'envFrom' of pods"


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


CPU_PERCENT = 80
"""Use of the requested CPU above which replicas are added, unless the file of values overrides it."""

_DIGEST = re.compile(r"(?P<repository>.+)@(?P<digest>sha256:[0-9a-f]{64})")
_TAG = re.compile(r"(?P<repository>.+):(?P<tag>[\w][\w.-]{0,127})")


def usual_values(workload: Workload) -> dict[str, Any]:
    """Return the defaults, which the file of values may override."""
    limits: dict[str, Any] = {"memory": None}
    return {
        # A server whose models cannot be loaded exits: its log has the reason, and the previous pods stay.
        "server": {"exitOnError": True},
        "resources": {"requests": {"memory": f"{-(-needs_of(workload).memory_bytes // MIB)}Mi"}, "limits": limits},
        "autoscaling": {"type": "hpa", "busyShare": 0, "waitRatio": 0, "cpuPercent": CPU_PERCENT},
    }


def chart_values(workload: Workload, repository: str, settings: KubernetesSettings) -> dict[str, Any]:
    """Return the values that a workload sets, which override the file of values.

    Args:
        repository: Address of its models, or their folder in the claim.
    """
    spec = workload.spec
    name = object_name(workload.deployment)
    values: dict[str, Any] = {
        "kind": "Deployment",
        "fullnameOverride": name,
        "models": _models(repository, settings),
        "probes": {"startupSeconds": max(2, round(spec.ready_within_s))},
        "gpu": {"count": len(spec.device.gpus)},
        "extraPackages": [],
        **_replicas(spec.replicas.min, spec.replicas.max),
    }
    requests: dict[str, str] = {}
    if spec.device.cpu_cores:
        requests["cpu"] = str(spec.device.cpu_cores)
    if spec.device.memory_mib:
        requests["memory"] = f"{spec.device.memory_mib}Mi"
        values["resources"] = {"limits": {"memory": f"{spec.device.memory_mib}Mi"}}
    if requests:
        values.setdefault("resources", {})["requests"] = requests
    image = dict(settings.images).get(spec.environment, "")
    if spec.environment and not image:
        values["extraPackages"] = list(workload.packages)
    if image or settings.image:
        values["image"] = image_values(image or settings.image)
    if spec.idle_unload_s:
        values["server"] = {"modelIdleUnloadSeconds": spec.idle_unload_s}
    values["apiKeys"] = {"existingSecret": keys_name(name), "file": "", "key": key_file(spec)}
    return values


def image_values(image: str) -> Mapping[str, str]:
    """Return how the chart names an image: "registry:5000/charonia:1.0", or with "@sha256:..."."""
    match = _DIGEST.fullmatch(image) or _TAG.fullmatch(image)
    return {"repository": image, "tag": "latest", "digest": ""} | (match.groupdict() if match else {})


def _models(repository: str, settings: KubernetesSettings) -> dict[str, Any]:
    if settings.claim:
        claim = {"create": False, "claimName": settings.claim, "readOnly": True}
        return {"type": "pvc", "path": repository, "pvc": claim}
    return {"type": "store", "store": {"uris": [repository], "existingSecret": settings.store_secret}}


def _replicas(least: int, most: int) -> dict[str, Any]:
    if least == most:
        return {"replicas": least, "autoscaling": {"type": "none"}}
    return {"replicas": least, "autoscaling": {"minReplicas": least, "maxReplicas": most}}
