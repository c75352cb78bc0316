"""Progress of a deployment, from its workload, its pods and the records of its revisions. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from charonia.platform.targets.kubernetes.marks import REVISION, SERVING, TEMPLATE, Plain, annotations, number_of
from charonia.platform.targets.kubernetes.reasons import is_hopeless, is_ready, refusal, unwell
from charonia.platform.targets.kubernetes.records import RevisionRecord

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
class Sight:
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
        return [pod for pod in self.living() if annotations(pod).get(TEMPLATE) == wanted]

    def living(self) -> list[Plain]:
        """Return the pods that are not terminating, newest last; pods that have exited only if there are no others."""
        pods = [pod for pod in self.pods if not pod["metadata"].get("deletionTimestamp")]
        running = [pod for pod in pods if (pod.get("status") or {}).get("phase") not in _ENDED]
        if self.workload is None or len(running) >= int(self.workload["spec"].get("replicas", 1)):
            pods = running
        return sorted(pods, key=lambda pod: (str(pod["metadata"].get("creationTimestamp")), pod["metadata"]["name"]))


def template_mark(workload: Plain) -> str:
    return str((workload["spec"]["template"]["metadata"].get("annotations") or {}).get(TEMPLATE, ""))


def rollout(sight: Sight, reason: Callable[[Plain], str]) -> Rollout:
    """Return the progress of a deployment.

    Args:
        reason: Returns why a pod does not answer, "" if nothing is wrong with it.
    """
    workload = sight.workload
    failed = max((each for each in sight.records if each.failure), key=lambda each: each.revision, default=None)
    if workload is None or workload["metadata"].get("deletionTimestamp"):
        if failed is not None:
            return Rollout(RolloutState.FAILED, applying=failed.revision, said=failed.failure)
        if sight.pods or workload is not None:
            return Rollout(RolloutState.ENDING, said="requests in flight are finished")
        return Rollout(RolloutState.ABSENT)
    revision, serving = number_of(workload, REVISION), number_of(workload, SERVING)
    if revision == serving:
        if failed is not None:
            return Rollout(RolloutState.FAILED, serving, failed.revision, failed.failure)
        return Rollout(RolloutState.STEADY, serving)
    if _is_complete(workload):
        return Rollout(RolloutState.DONE, revision)
    new = sight.new_pods()
    said = _told(workload, new, reason)
    if is_seen(workload) and (_is_late(workload) or any(is_hopeless(pod) for pod in unwell(new))):
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
    """Return the progress of the new pods, or their obstacle."""
    refused = refusal(workload)
    wrong = [f"{pod['metadata']['name']}: {why}" for pod in unwell(new) if (why := reason(pod))]
    if refused or wrong:
        return "\n".join([refused, *wrong[:NAMED_MAX]] if refused else wrong[:NAMED_MAX])
    ready, wanted = sum(map(is_ready, new)), int(workload["spec"].get("replicas", 1))
    return f"{ready} of {wanted} new pods are ready"
