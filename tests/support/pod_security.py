"""The `restricted` Pod Security Standard of Kubernetes, as a function of the specification of a pod."""

from collections.abc import Iterator
from typing import Any

VOLUME_TYPES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
"""Types of volumes that the standard permits."""

_HOST_FIELDS = ("hostNetwork", "hostPID", "hostIPC")
_SECCOMP = ("RuntimeDefault", "Localhost")
_PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def violations(spec: dict[str, Any]) -> list[str]:
    found = [field for field in _HOST_FIELDS if spec.get(field)]
    found += [
        f"volume {volume['name']}: {kind}"
        for volume in spec.get("volumes", [])
        for kind in volume.keys() - {"name"} - VOLUME_TYPES
    ]
    pod = spec.get("securityContext", {})
    found += [f"securityContext.{field}" for field in ("sysctls", "windowsOptions", "seLinuxOptions") if field in pod]
    for kind in ("initContainers", "containers", "ephemeralContainers"):
        for container in spec.get(kind, []):
            found += [f"{container['name']}: {reason}" for reason in _of_container(container, pod)]
    return found


def _of_container(container: dict[str, Any], pod: dict[str, Any]) -> Iterator[str]:
    own = container.get("securityContext", {})
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    if "ALL" not in own.get("capabilities", {}).get("drop", []):
        yield "capabilities.drop"
    if set(own.get("capabilities", {}).get("add", [])) - {"NET_BIND_SERVICE"}:
        yield "capabilities.add"
    if own.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
        yield "runAsNonRoot"
    if own.get("runAsUser", pod.get("runAsUser")) == 0:
        yield "runAsUser"
    if own.get("seccompProfile", pod.get("seccompProfile", {})).get("type") not in _SECCOMP:
        yield "seccompProfile"
    if own.get("procMount", "Default") != "Default":
        yield "procMount"
    if any(port.get("hostPort") for port in container.get("ports", [])):
        yield "hostPort"
    hooks = [container[probe] for probe in _PROBES if probe in container]
    hooks += container.get("lifecycle", {}).values()
    if any("host" in hook.get(action, {}) for hook in hooks for action in ("httpGet", "tcpSocket")):
        yield "host of a probe"
