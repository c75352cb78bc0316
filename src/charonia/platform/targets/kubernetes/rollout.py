"""Progress of a deployment, and why pods fail, in a sentence with a hint, from the status in Kubernetes. Pure."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from charonia.platform.targets.kubernetes.objects import (
    REVISION,
    SERVING,
    TEMPLATE,
    Plain,
    RevisionRecord,
    annotations,
    number_of,
    template_mark,
)

RESTARTS_MAX = 3
"""A server that has exited this often before it was ever ready has failed."""

LOG_LINES = 5
"""Lines of the log of a server that has exited."""

TEXT_CHARS_MAX = 600
"""Length limit of messages from Kubernetes."""

KSERVE = "charonia.dev/kserve"
"""Condition of a workload that KServe created: KServe's own message."""

_OOM_EXIT = 137
_PULL = ("ImagePullBackOff", "ErrImagePull", "RegistryUnavailable", "ImageInspectError")
_NEVER = ("InvalidImageName", "ErrImageNeverPull")
_CONFIG = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_MOUNT = ("FailedMount", "FailedAttachVolume")
_MISSING = re.compile(r"Insufficient ([\w./-]*\w)")


def pod_reason(pod: Plain, events: Sequence[Plain] = (), log: str = "") -> str:
    """Return why a pod does not answer, "" where nothing is wrong or it only needs more time.

    Args:
        log: Last lines of the container that has exited, "" if unknown.
    """
    status = pod.get("status") or {}
    if status.get("reason") == "Evicted":
        return f"it was evicted from its node: {_said(status)} (hint: memory_mib reserves memory for it)"
    if status.get("phase") == "Failed" and status.get("reason"):
        return f"its node has refused it, {status['reason']}: {_said(status)}"
    place = _condition(pod, "PodScheduled")
    if place.get("status") == "False":
        return _unplaced(place)
    for container in _containers(pod):
        found = _container_reason(pod, container, log)
        if found:
            return found
    if _is_out_of_sight(pod):
        return "its node no longer reports (hint: `kubectl get nodes` says which are not ready)"
    return _from_events(events)


def needs_log(pod: Plain) -> str:
    """Return the container whose last log belongs to the reason of a pod, "" for none."""
    for container in _containers(pod):
        if _last_end(container) and not container.get("ready") and not _is_fine(container):
            return str(container["name"])
    return ""


def never_becomes_ready(pod: Plain) -> bool:
    """Return whether a new pod will never be ready."""
    containers = _containers(pod)
    waiting = [(each.get("state") or {}).get("waiting") or {} for each in containers]
    if any(each.get("reason") in _NEVER for each in waiting):
        return True
    return any(
        each.get("restartCount", 0) >= RESTARTS_MAX and not each.get("ready") and not _is_fine(each)
        for each in containers
    )


def refusal(deployment: Plain) -> str:
    """Return why no pods can be created for a workload, "" if they can."""
    for condition in (deployment.get("status") or {}).get("conditions") or ():
        if condition.get("type") == KSERVE:
            return f"KServe: {_said(condition)}"
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            said = _said(condition)
            if "exceeded quota" in said:
                return f"no pod can be made, the quota of the namespace is used up: {said}"
            if "denied the request" in said or "is forbidden" in said or "violates PodSecurity" in said:
                return f"no pod can be made, the cluster's admission forbids it: {said}"
            return f"no pod can be made: {said}"
    return ""


def _unplaced(condition: Plain) -> str:
    said = _said(condition)
    hint = ""
    if "unbound immediate PersistentVolumeClaims" in said or "persistentvolumeclaim" in said:
        return f"it waits for its volume: {said} (hint: `kubectl get pvc` says which claim is not bound)"
    lacks = sorted(set(_MISSING.findall(said)))
    if lacks:
        what = ", ".join(lacks)
        hint = f" (hint: no node has enough {what} free: ask for less, or add a node)"
    elif "untolerated taint" in said:
        hint = " (hint: give pods a toleration in the file of values)"
    elif "node affinity" in said or "node selector" in said:
        hint = " (hint: no node has the labels that the file of values asks for)"
    return f"it waits for a node: {said}{hint}"


def _container_reason(pod: Plain, container: Plain, log: str) -> str:
    waiting = (container.get("state") or {}).get("waiting") or {}
    reason = str(waiting.get("reason", ""))
    image = container.get("image", "")
    if reason in _NEVER:
        return f"its image '{image}' cannot be used, {reason}: {_said(waiting)} (hint: --kubernetes-image)"
    if reason in _PULL:
        return (
            f"its image '{image}' cannot be pulled, {reason}: {_said(waiting)} "
            "(hint: check its name, and whether the cluster may read it)"
        )
    if reason in _CONFIG:
        return f"its container cannot be made, {reason}: {_said(waiting)} (hint: is a Secret or ConfigMap missing?)"
    end = _last_end(container)
    if not end or container.get("ready") or _is_fine(container):
        return ""
    if end.get("reason") == "OOMKilled":
        limit = _memory_limit(pod, str(container["name"]))
        allowed = f"the {limit} that it may use" if limit else "what its node has free"
        return f"it was killed because it needed more memory than {allowed}, OOMKilled (hint: raise memory_mib)"
    code = end.get("exitCode", 0)
    killed = " (killed)" if code == _OOM_EXIT else ""
    what = "its server" if container in _main(pod) else f"its step '{container['name']}'"
    often = container.get("restartCount", 0)
    again = f", {often} times so far" if often > 1 else ""
    lines = "\n".join(log.strip().splitlines()[-LOG_LINES:]) or (_said(end) if end.get("message") else "")
    return f"{what} ends with exit code {code}{killed}{again}" + (f":\n{lines}" if lines else "")


def _from_events(events: Sequence[Plain]) -> str:
    for event in reversed(events):
        reason, said = event.get("reason"), _said(event)
        if reason in _MOUNT:
            return f"a volume cannot be mounted: {said} (hint: does the Secret or the claim exist?)"
        if reason == "FailedCreatePodSandBox":
            return f"its node cannot start it: {said}"
        if reason == "Unhealthy" and not said.startswith("Readiness"):
            return f"it does not answer: {said}"
    return ""


def _is_out_of_sight(pod: Plain) -> bool:
    """Return whether a pod counts as not ready although its node last reported all of its containers as ready."""
    is_told = bool(_main(pod)) and all(container.get("ready") for container in _main(pod))
    gates = (pod.get("spec") or {}).get("readinessGates")
    return is_told and not gates and _condition(pod, "Ready").get("status") == "False"


def _is_fine(container: Plain) -> bool:
    """Return whether a container has exited as expected: a step before the server."""
    state = container.get("state") or {}
    if "running" in state:
        return not container.get("restartCount")
    return bool((state.get("terminated") or {}).get("exitCode") == 0)


def _last_end(container: Plain) -> Plain:
    state, last = container.get("state") or {}, container.get("lastState") or {}
    return state.get("terminated") or last.get("terminated") or {}


def _memory_limit(pod: Plain, name: str) -> str:
    spec = pod.get("spec") or {}
    for container in [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]:
        if container["name"] == name:
            return str(((container.get("resources") or {}).get("limits") or {}).get("memory", ""))
    return ""


def _condition(pod: Plain, kind: str) -> Plain:
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition.get("type") == kind:
            found: Plain = condition
            return found
    return {}


def _main(pod: Plain) -> Sequence[Plain]:
    return (pod.get("status") or {}).get("containerStatuses") or ()


def _containers(pod: Plain) -> list[Plain]:
    return [*((pod.get("status") or {}).get("initContainerStatuses") or ()), *_main(pod)]


def _said(found: Plain) -> str:
    text = " ".join(str(found.get("message") or found.get("reason") or "no reason is given").split())
    return text if len(text) <= TEXT_CHARS_MAX else f"{text[: TEXT_CHARS_MAX - 3]}..."


def restarts(pod: Plain) -> int:
    return sum(int(container.get("restartCount", 0)) for container in _main(pod))


def is_ready(pod: Plain) -> bool:
    """Return whether a pod gets requests."""
    return _condition(pod, "Ready").get("status") == "True" and not pod["metadata"].get("deletionTimestamp")


def has_started(pod: Plain) -> bool:
    """Return whether the server of a pod has tried to load its models, and listens."""
    return any(container.get("started") for container in _main(pod))


def unhealthy(pods: Sequence[Plain]) -> Iterator[Plain]:
    for pod in pods:
        if not is_ready(pod):
            yield pod


_ENDED = ("Failed", "Succeeded")

NAMED_MAX = 3
"""Most pods that a sentence names."""


class RolloutState(Enum):
    """State of a deployment."""

    ABSENT = "absent"
    ENDING = "ending"
    FAILED = "failed"
    """A revision has failed; the previous one serves, if there is one."""
    UNDER_WAY = "under way"
    BROKEN = "broken"
    """The revision being applied will never be ready."""
    DONE = "done"
    """The revision being applied is ready."""
    STEADY = "steady"


@dataclass(frozen=True, slots=True)
class Rollout:
    """Progress of a deployment.

    Attributes:
        serving: The revision that answers, 0 for none.
        applying: The revision being applied, or one that has failed; 0 for none.
        said: The current step, or the obstacle, for display.
    """

    state: RolloutState
    serving: int = 0
    applying: int = 0
    said: str = ""


@dataclass(frozen=True, slots=True)
class DeploymentSnapshot:
    """The objects of a deployment.

    Attributes:
        workload: The object whose pods are its servers, None where there is none.
    """

    workload: Plain | None = None
    pods: Sequence[Plain] = ()
    records: Sequence[RevisionRecord] = field(default_factory=tuple)

    def record(self, revision: int) -> RevisionRecord | None:
        return next((each for each in self.records if each.revision == revision), None)

    def new_pods(self) -> list[Plain]:
        """Return the pods of the workload's current template."""
        if self.workload is None:
            return []
        wanted = template_mark(self.workload)
        return [pod for pod in self.active_pods() if annotations(pod).get(TEMPLATE) == wanted]

    def active_pods(self) -> list[Plain]:
        """Return the pods that are not terminating, newest last; pods that have exited only if there are no others."""
        pods = [pod for pod in self.pods if not pod["metadata"].get("deletionTimestamp")]
        running = [pod for pod in pods if (pod.get("status") or {}).get("phase") not in _ENDED]
        if self.workload is None or len(running) >= int(self.workload["spec"].get("replicas", 1)):
            pods = running
        return sorted(pods, key=lambda pod: (str(pod["metadata"].get("creationTimestamp")), pod["metadata"]["name"]))


def rollout(snapshot: DeploymentSnapshot, reason: Callable[[Plain], str]) -> Rollout:
    """Return the progress of a deployment.

    Args:
        reason: Returns why a pod does not answer, "" if nothing is wrong with it.
    """
    workload = snapshot.workload
    failed = max((each for each in snapshot.records if each.failure), key=lambda each: each.revision, default=None)
    if workload is None or workload["metadata"].get("deletionTimestamp"):
        if failed is not None:
            return Rollout(RolloutState.FAILED, applying=failed.revision, said=failed.failure)
        if snapshot.pods or workload is not None:
            return Rollout(RolloutState.ENDING, said="requests in flight are finished")
        return Rollout(RolloutState.ABSENT)
    revision, serving = number_of(workload, REVISION), number_of(workload, SERVING)
    if revision == serving:
        if failed is not None:
            return Rollout(RolloutState.FAILED, serving, failed.revision, failed.failure)
        return Rollout(RolloutState.STEADY, serving)
    if _is_complete(workload):
        return Rollout(RolloutState.DONE, revision)
    new = snapshot.new_pods()
    said = _told(workload, new, reason)
    if is_seen(workload) and (_is_late(workload) or any(never_becomes_ready(pod) for pod in unhealthy(new))):
        return Rollout(RolloutState.BROKEN, serving, revision, said)
    return Rollout(RolloutState.UNDER_WAY, serving, revision, said)


def is_seen(workload: Plain) -> bool:
    """Return whether the status of a workload is about the latest change."""
    return int((workload.get("status") or {}).get("observedGeneration", 0)) >= int(workload["metadata"]["generation"])


def _is_complete(workload: Plain) -> bool:
    status = workload.get("status") or {}
    updated = int(status.get("updatedReplicas", 0))
    return (
        is_seen(workload)
        and updated >= int(workload["spec"].get("replicas", 1))
        and int(status.get("replicas", 0)) == updated
        and int(status.get("availableReplicas", 0)) >= updated
    )


def _is_late(workload: Plain) -> bool:
    return any(
        condition.get("type") == "Progressing" and condition.get("reason") == "ProgressDeadlineExceeded"
        for condition in (workload.get("status") or {}).get("conditions") or ()
    )


def _told(workload: Plain, new: Sequence[Plain], reason: Callable[[Plain], str]) -> str:
    refused = refusal(workload)
    wrong = [f"{pod['metadata']['name']}: {why}" for pod in unhealthy(new) if (why := reason(pod))]
    if refused or wrong:
        return "\n".join([refused, *wrong[:NAMED_MAX]] if refused else wrong[:NAMED_MAX])
    ready, wanted = sum(map(is_ready, new)), int(workload["spec"].get("replicas", 1))
    return f"{ready} of {wanted} new pods are ready"
