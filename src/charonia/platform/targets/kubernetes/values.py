"""The values of the chart for a workload. Pure."""

import re
from collections.abc import Mapping
from typing import Any

from charonia.platform.settings import KubernetesSettings
from charonia.platform.targets.api import Workload, key_file
from charonia.platform.targets.fit import MIB, needs_of
from charonia.platform.targets.kubernetes.marks import keys_name, object_name

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
        "gpu": {"count": len(spec.gpus)},
        "extraPackages": [],
        **_replicas(spec.replicas_min, spec.replicas_max),
    }
    requests: dict[str, str] = {}
    if spec.cpu_cores:
        requests["cpu"] = str(spec.cpu_cores)
    if spec.memory_mib:
        requests["memory"] = f"{spec.memory_mib}Mi"
        values["resources"] = {"limits": {"memory": f"{spec.memory_mib}Mi"}}
    if requests:
        values.setdefault("resources", {})["requests"] = requests
    image = dict(settings.images).get(spec.environment, "")
    if spec.environment and not image:
        values["extraPackages"] = list(workload.packages)
    if image or settings.image:
        values["image"] = image_values(image or settings.image)
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
