"""What the controllers and nodes of a cluster do to the objects of `KubernetesApi`, as far as deployments need it.

A Deployment gets pods, one more at a time, and loses old ones only when new ones are ready. What becomes of a pod is
its fate, which a test sets.

An InferenceService gets a Deployment, as KServe makes it in standard mode.
"""

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from enum import Enum

from tests.support.kubernetes_api import NAMESPACE, TICK_S, KubernetesApi, Plain

HASH = "pod-template-hash"


class Fate(Enum):
    READY = "ready"
    SLOW = "slow"
    CRASHES = "crashes"
    UNSCHEDULABLE = "unschedulable"
    NO_IMAGE = "no image"
    OUT_OF_MEMORY = "out of memory"


class Controllers:
    """The controllers. Use `controllers`.

    Attributes:
        refusal: Why no pods can be made, "" where they can.
        invalid: Why KServe cannot make a Deployment for an InferenceService, "" where it can.
    """

    def __init__(self, api: KubernetesApi) -> None:
        self.api = api
        self.fate: Callable[[Plain], Fate] = lambda pod: Fate.READY
        self.refusal = ""
        self.invalid = ""
        self._count = 0

    def step(self) -> None:
        with self.api.lock:
            self._serve()
            deployments = {each["metadata"]["uid"]: each for each in self.api.all("deployments")}
            for pod in self.api.all("pods"):
                if pod["metadata"].get("deletionTimestamp"):
                    self.api.delete("pods", pod["metadata"]["name"])
                elif pod["metadata"]["ownerReferences"][0]["uid"] not in deployments:
                    self._end(pod)
                else:
                    self._live(pod)
            for each in deployments.values():
                self._roll(each)

    def _serve(self) -> None:
        services = {each["metadata"]["uid"]: each for each in self.api.all("inferenceservices")}
        for each in self.api.all("deployments"):
            owners = each["metadata"].get("ownerReferences")
            if owners and owners[0]["uid"] not in services:
                self.api.delete("deployments", each["metadata"]["name"])
        for service in services.values():
            name = service["metadata"]["name"]
            if self.invalid:
                failure = {"reason": "InvalidPredictorSpec", "message": self.invalid}
                model = {"transitionStatus": "InvalidSpec", "lastFailureInfo": failure}
                self.api.set_status("inferenceservices", name, {"modelStatus": model})
                continue
            deployment = _deployment(service, self.api)
            present = self.api.get("deployments", deployment["metadata"]["name"])
            made = self.api.put("deployments", deployment, (present or {}).get("status"), manager="kserve")
            is_available = made.get("status", {}).get("availableReplicas", 0) > 0
            ready = {"type": "Ready", "status": str(is_available)}
            status: Plain = {
                "conditions": [ready if is_available else ready | {"message": "MinimumReplicasUnavailable"}]
            }
            if is_available:
                status["address"] = {"url": f"http://{name}-predictor.{NAMESPACE}.svc.cluster.local"}
            self.api.set_status("inferenceservices", name, status)

    def _roll(self, deployment: Plain) -> None:
        uid, spec = deployment["metadata"]["uid"], deployment["spec"]
        mark = hashlib.sha256(json.dumps(spec["template"], sort_keys=True).encode()).hexdigest()[:10]
        pods = [
            pod
            for pod in self.api.all("pods")
            if pod["metadata"]["ownerReferences"][0]["uid"] == uid and not pod["metadata"].get("deletionTimestamp")
        ]
        new = [pod for pod in pods if pod["metadata"]["labels"][HASH] == mark]
        old = sorted((pod for pod in pods if pod not in new), key=_is_ready)  # those that are not ready go first
        wanted = int(spec["replicas"])
        if len(new) < wanted and len(pods) < wanted + 1 and not self.refusal:
            self._begin(deployment, mark)
        elif len(new) > wanted:
            self._end(new[-1])
        elif old and sum(map(_is_ready, pods)) - _is_ready(old[0]) >= wanted:
            self._end(old[0])
        ready = sum(map(_is_ready, pods))
        conditions = [{"type": "Progressing", "status": "True", "reason": "ReplicaSetUpdated"}]
        if self.refusal and len(new) < wanted:
            conditions.append(
                {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": self.refusal}
            )
        status = {
            "observedGeneration": deployment["metadata"]["generation"],
            "replicas": len(pods),
            "updatedReplicas": len(new),
            "availableReplicas": ready,
            "conditions": conditions,
        }
        self.api.set_status("deployments", deployment["metadata"]["name"], status)

    def _begin(self, deployment: Plain, mark: str) -> None:
        self._count += 1
        name, template = deployment["metadata"]["name"], deployment["spec"]["template"]
        metadata = {
            "name": f"{name}-{mark}-{self._count}",
            "namespace": NAMESPACE,
            "labels": {**template["metadata"]["labels"], HASH: mark},
            "annotations": template["metadata"].get("annotations", {}),
            "ownerReferences": [{"uid": deployment["metadata"]["uid"], "kind": "Deployment", "name": name}],
        }
        pod = {"apiVersion": "v1", "metadata": metadata, "spec": template["spec"]}
        self.api.put("pods", pod, _status(pod, Fate.SLOW))

    def _live(self, pod: Plain) -> None:
        self.api.set_status("pods", pod["metadata"]["name"], _status(pod, self.fate(pod)))

    def _end(self, pod: Plain) -> None:
        self.api.set_meta("pods", pod["metadata"]["name"], deletionTimestamp="2026-01-01T00:00:00Z")


@contextlib.contextmanager
def controllers(api: KubernetesApi) -> Iterator[Controllers]:
    made, ending = Controllers(api), threading.Event()

    def run() -> None:
        while not ending.wait(TICK_S):
            made.step()

    thread = threading.Thread(target=run, name="kubernetes controllers")
    thread.start()
    try:
        yield made
    finally:
        ending.set()
        thread.join()


def _deployment(service: Plain, api: KubernetesApi) -> Plain:
    """Return the Deployment that KServe makes: its pods have all labels and annotations of the InferenceService."""
    about, predictor = service["metadata"], service["spec"]["predictor"]
    name = f"{about['name']}-predictor"
    runtime = api.get("servingruntimes", predictor["model"]["runtime"])
    assert runtime is not None
    container = runtime["spec"]["containers"][0]
    container = container | {"args": [*container["args"], predictor["model"]["storageUri"]]}
    labels = about["labels"] | {"serving.kserve.io/inferenceservice": about["name"]}
    notes = about["annotations"] | predictor.get("annotations", {})
    present = api.get("deployments", name)
    replicas = present["spec"]["replicas"] if present else 0
    metadata = {
        "name": name,
        "labels": labels,
        "annotations": notes,
        "ownerReferences": [{"uid": about["uid"], "kind": "InferenceService", "name": about["name"]}],
    }
    template = {"metadata": {"labels": labels, "annotations": notes}, "spec": {"containers": [container]}}
    bounded = min(max(replicas, predictor["minReplicas"]), predictor["maxReplicas"])
    return {"apiVersion": "apps/v1", "metadata": metadata, "spec": {"replicas": bounded, "template": template}}


def _is_ready(pod: Plain) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", ()))


def _status(pod: Plain, fate: Fate) -> Plain:
    container = pod["spec"]["containers"][0]
    placed = {"type": "PodScheduled", "status": "True"}
    about: Plain = {"name": container["name"], "image": container["image"], "ready": False, "restartCount": 0}
    if fate is Fate.UNSCHEDULABLE:
        message = "0/3 nodes are available: 1 node(s) had untolerated taint {gpu: true}, 2 Insufficient cpu."
        lacking = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        return {"phase": "Pending", "conditions": [lacking]}
    if fate is Fate.READY:
        about |= {"ready": True, "state": {"running": {}}}
        ready = [placed, {"type": "Ready", "status": "True"}]
        return {"phase": "Running", "podIP": "127.0.0.1", "conditions": ready, "containerStatuses": [about]}
    if fate is Fate.NO_IMAGE:
        message = f'Back-off pulling image "{container["image"]}"'
        about["state"] = {"waiting": {"reason": "ImagePullBackOff", "message": message}}
    elif fate in (Fate.CRASHES, Fate.OUT_OF_MEMORY):
        is_killed = fate is Fate.OUT_OF_MEMORY
        about["restartCount"] = 3
        about["state"] = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting"}}
        end = {"exitCode": 137 if is_killed else 1, "reason": "OOMKilled" if is_killed else "Error"}
        about["lastState"] = {"terminated": end}
    else:
        about["state"] = {"running": {}}
    return {"phase": "Running", "conditions": [placed], "containerStatuses": [about]}
