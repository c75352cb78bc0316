"""An InferenceService in the shape of a Deployment, so that the same rules apply to both. Pure.

The Deployment that KServe or Knative creates owns the pods, and a note says which revision serves.
"""

from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from charonia.platform.targets.kserve.objects import pods_mark
from charonia.platform.targets.kubernetes.marks import (
    OBJECT,
    OWNER,
    RECORD,
    REVISION,
    SERVING,
    TEMPLATE,
    TITLE,
    Plain,
    annotations,
    note_name,
    object_name,
)
from charonia.platform.targets.kubernetes.reasons import KSERVE
from charonia.platform.targets.kubernetes.rollout import template_mark

NOTE = "current"
"""Value of the label of a note, where a record has "true"."""

_UID = "uid"
_KNATIVE = ("Serverless", "Knative")
"""The mode as we write it, and as KServe 0.16 and later rewrite it."""


def note(service: Plain, owner: str, deployment: str, revision: int, serving: int) -> dict[str, Any]:
    """Return the Secret that says which revision an InferenceService belongs to, and which one serves.

    It is applied after the InferenceService, because annotations on the InferenceService would change its pods.

    Args:
        deployment: "PROJECT/NAME".
        serving: The revision that serves during the rollout.
    """
    name = object_name(deployment)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "charonia.dev/note",
        "metadata": {
            "name": note_name(name),
            "labels": {OWNER: owner, OBJECT: name, RECORD: NOTE},
            "annotations": {TITLE: deployment, REVISION: str(revision), SERVING: str(serving)},
        },
        "data": {_UID: b64encode(service["metadata"]["uid"].encode()).decode()},
    }


def as_workload(service: Plain | None, found: Plain | None, made: Sequence[Plain]) -> Plain | None:
    """Return an InferenceService as a Deployment, None where there is none.

    Args:
        found: The note about it; a note about an earlier object of the same name does not count.
        made: The Deployments created for it; Knative creates one for each revision.
    """
    if service is None:
        return None
    notes = {}
    if found is not None and found["data"][_UID] == b64encode(service["metadata"]["uid"].encode()).decode():
        notes = {name: annotations(found)[name] for name in (REVISION, SERVING)}
    mark = pods_mark(service)
    deployment = next((each for each in made if template_mark(each) == mark), None)
    told, status = service.get("status") or {}, (deployment or {}).get("status") or {}
    failure = _failure(service)
    is_seen = deployment is not None and (
        int(status.get("observedGeneration", 0)) >= int(deployment["metadata"]["generation"])
    )
    conditions = [*(status.get("conditions") or ())]
    ready = _condition(service, "Ready")
    if failure or ready.get("status") == "False":
        conditions.append({"type": KSERVE, "status": "False", "message": failure or ready.get("message", "")})
    if failure:
        conditions.append({"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"})
    generation = int(service["metadata"]["generation"])
    least = service["spec"]["predictor"]["minReplicas"]
    return {
        "metadata": {**service["metadata"], "annotations": {**annotations(service), **notes}},
        "spec": {
            "replicas": deployment["spec"].get("replicas", 1) if deployment is not None else least,
            "template": {"metadata": {"annotations": {TEMPLATE: mark}}},
        },
        "status": {
            **status,
            "observedGeneration": generation if is_seen or failure else 0,
            "availableReplicas": status.get("availableReplicas", 0) if ready.get("status") == "True" else 0,
            "conditions": conditions,
            "address": str((told.get("address") or {}).get("url") or told.get("url") or ""),
        },
    }


def _failure(service: Plain) -> str:
    """Return why an InferenceService will never be ready, "" if it still can.

    Its `observedGeneration` is the generation of the object that KServe created for it, not its own.
    """
    status = service.get("status") or {}
    model = status.get("modelStatus") or {}
    failed = model.get("lastFailureInfo") or {}
    # KServe does not know a newly created runtime immediately: it waits for it.
    if model.get("transitionStatus") == "InvalidSpec" and failed.get("reason") != "RuntimeNotRecognized":
        return str(failed.get("message") or failed.get("reason") or "the InferenceService is not valid")
    predictor = _condition(service, "PredictorReady")
    if annotations(service).get("serving.kserve.io/deploymentMode") in _KNATIVE and (
        predictor.get("status") == "False"  # while a revision starts, Knative says Unknown
    ):
        return str(predictor.get("message") or predictor.get("reason"))
    return ""


def _condition(service: Plain, kind: str) -> Plain:
    conditions = (service.get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if each.get("type") == kind), {})
