"""The target `kserve`: objects as `charonia export kserve` writes them; an InferenceService as a Deployment.

The same rules then apply to both. The Deployment that KServe or Knative creates owns the pods, and a note says which
revision serves.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from charonia.config.model import ModelConfig
from charonia.core.errors import invalid
from charonia.export.kserve import ExportedModels, kserve_objects
from charonia.export.options import KserveOptions, Mode
from charonia.platform.artifacts.store import ArtifactStore
from charonia.platform.settings import KubernetesSettings
from charonia.platform.targets.api import Workload, key_file
from charonia.platform.targets.fit import MIB, needs_of
from charonia.platform.targets.kubernetes.api import Cluster
from charonia.platform.targets.kubernetes.deployment_objects import DeploymentObjects
from charonia.platform.targets.kubernetes.objects import (
    INFERENCE_SERVICE,
    MANAGED_BY,
    MANAGER,
    OBJECT,
    OWNER,
    RECORD,
    REVISION,
    SECRET,
    SERVING,
    TEMPLATE,
    TITLE,
    KserveAddresses,
    ObjectKind,
    Plain,
    RevisionRecord,
    annotations,
    in_order,
    keys_name,
    note_name,
    object_name,
    reference,
    template_mark,
    with_marks,
)
from charonia.platform.targets.kubernetes.repositories import ModelRepositories, open_repositories
from charonia.platform.targets.kubernetes.rollout import KSERVE, DeploymentSnapshot
from charonia.platform.targets.kubernetes.target import KubernetesTarget, owner_of

KEYS_FOLDER = "/etc/charonia/keys"
"""Where servers find the file of API keys."""

READY_S_MAX = 600
"""KServe waits this long for a Deployment to be ready, and has no setting for it."""

PROBE_S = 5
"""Pause between two startup probes."""

IMAGE = "charonia"
"""Image of servers where no setting names one."""

_SCHEMES = ("s3://", "gs://", "pvc://")
"""Stores that KServe reads under the addresses that the platform has for them."""

NOTE = "current"
"""Value of the label of a note, where a record has "true"."""

_UID = "uid"
_KNATIVE = ("Serverless", "Knative")
"""The mode as we write it, and as KServe 0.16 and later rewrite it."""


def kserve_problem(workload: Workload, settings: KubernetesSettings) -> str:
    """Return why a workload cannot be served by KServe, "" if it can."""
    spec = workload.spec
    if spec.environment and spec.environment not in dict(settings.images):
        return (
            f"environment: KServe installs no packages: expected an image for '{spec.environment}' "
            "(hint: --kubernetes-images names it)"
        )
    if spec.ready_within_s > READY_S_MAX:
        return f"ready_within_s: KServe waits {READY_S_MAX} s at most, got {spec.ready_within_s:g}"
    return ""


def kserve_rendered(workload: Workload, repository: str, settings: KubernetesSettings) -> list[dict[str, Any]]:
    """Return the ServiceAccount, the runtime and the InferenceService of a workload.

    Args:
        repository: Address of its models, or their folder in the claim.
    """
    spec, name = workload.spec, object_name(workload.deployment)
    address = f"pvc://{settings.claim}/{repository}" if settings.claim else repository
    if not address.startswith(_SCHEMES):
        raise invalid(f"--artifacts: expected a store that KServe reads, {', '.join(_SCHEMES)}, got '{address}'")
    mode = Mode(settings.kserve_mode)
    options = KserveOptions(
        name=name,
        runtime=name,
        storage_uri=address,
        image=dict(settings.images).get(spec.environment, "") or settings.image or IMAGE,
        mode=mode,
        replicas_min=spec.replicas.min,
        replicas_max=spec.replicas.max,
        cpu=str(spec.device.cpu_cores or 1),
        memory=f"{spec.device.memory_mib or -(-needs_of(workload).memory_bytes // MIB)}Mi",
        gpus=len(spec.device.gpus),
        arguments=(
            "--exit-on-error=true", f"--api-keys={KEYS_FOLDER}/{key_file(spec)}",
            *([f"--model-idle-unload={spec.idle_unload_s}"] if spec.idle_unload_s else []),
        ),
    )  # fmt: skip
    models = tuple(ModelConfig(name=model.name) for model in workload.models)  # served as one repository
    made: dict[str, Any] = kserve_objects(ExportedModels(name, models, is_repository=True), options)
    predictor = made["service"]["spec"]["predictor"]
    if mode is Mode.STANDARD:
        probe = predictor["model"]["startupProbe"]
        probe |= {"periodSeconds": PROBE_S, "failureThreshold": max(1, round(spec.ready_within_s / PROBE_S))}
    predictor["model"]["volumeMounts"] = [{"name": "api-keys", "mountPath": KEYS_FOLDER, "readOnly": True}]
    predictor["volumes"] = [{"name": "api-keys", "secret": {"secretName": keys_name(name), "defaultMode": 0o440}}]
    if not settings.store_secret:
        return [made["runtime"], made["service"]]
    predictor["serviceAccountName"] = name
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}
    return [account | {"secrets": [{"name": settings.store_secret}]}, made["runtime"], made["service"]]


def kserve_prepared(
    rendered: Sequence[Plain], owner: str, deployment: str, revision: int, before: Sequence[Plain]
) -> list[dict[str, Any]]:
    """Return the objects of a revision with labels and annotations. See `objects.prepared`.

    KServe gives pods the labels and annotations of the InferenceService, so nothing that changes while they run may be
    there.
    """
    own = {OWNER: owner, OBJECT: object_name(deployment), MANAGED_BY: MANAGER}
    *others, service = in_order(rendered)
    objects = [with_marks(each, own, {TITLE: deployment, REVISION: str(revision)}) for each in others]
    mark = str(revision)
    if before and _pods(objects, service) == _pods(before[:-1], before[-1]):
        mark = pods_mark(before[-1])
    predictor = {**service["spec"]["predictor"], "annotations": {TEMPLATE: mark}}
    return [*objects, with_marks({**service, "spec": {"predictor": predictor}}, own, {TITLE: deployment})]


def pods_mark(service: Plain) -> str:
    return str(service["spec"]["predictor"]["annotations"][TEMPLATE])


def _pods(others: Sequence[Plain], service: Plain) -> list[object]:
    """Return everything that determines the pods."""
    bounds = ("minReplicas", "maxReplicas", "annotations")
    predictor: Mapping[str, Any] = service["spec"]["predictor"]
    mode = annotations(service).get("serving.kserve.io/deploymentMode")
    runtimes = [each["spec"] for each in others if each["kind"] == "ServingRuntime"]
    return [mode, runtimes, {key: value for key, value in predictor.items() if key not in bounds}]


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


NAME = "kserve"


def open_kserve(settings: KubernetesSettings, store: ArtifactStore, data: Path) -> KubernetesTarget:
    """Return the target, without contacting the cluster. See `open_kubernetes`."""
    owner = owner_of(settings, data)
    return kserve_target(Cluster(settings), settings, owner, open_repositories(store, settings.claim))


def kserve_target(
    cluster: Cluster, settings: KubernetesSettings, owner: str, repositories: ModelRepositories
) -> KubernetesTarget:
    """Return the target in a namespace.

    Args:
        owner: Name of this platform; the objects of the target `kubernetes` have a different owner.
    """
    return KubernetesTarget(
        cluster,
        f"{owner}.{NAME}",
        lambda workload, repository: kserve_rendered(workload, repository, settings),
        repositories,
        KserveAddresses(cluster.namespace, settings.proxy),
        lambda workload: kserve_problem(workload, settings),
        name=NAME,
        objects=KserveObjects,
        prepare=kserve_prepared,
    )


class KserveObjects(DeploymentObjects):
    """Reads and writes the objects of deployments. See `DeploymentObjects`."""

    kinds: ClassVar[Mapping[str, tuple[ObjectKind, str]]] = {
        **DeploymentObjects.kinds,
        "services": (INFERENCE_SERVICE, ""),
        "notes": (SECRET, f",{RECORD}={NOTE}"),
    }

    def apply_objects(self, record: RevisionRecord, serving: int) -> None:
        """Apply the objects of a record, then record their revision in the note. See `DeploymentObjects`."""
        for each in record.objects:
            applied = self._cluster.apply(each)
            if reference(each).kind == INFERENCE_SERVICE:
                noted = note(applied, self.owner, record.deployment, record.revision, serving)
                self._cluster.apply(noted, force=True)
        self.invalidate()

    def snapshot(self, deployment: str, *, is_live: bool = False) -> DeploymentSnapshot:
        """Return the state of a deployment. See `DeploymentObjects`."""
        found = self._found(deployment, is_live=is_live)
        service, noted = (next(iter(found[what]), None) for what in ("services", "notes"))
        return self._snapshot(as_workload(service, noted, found["workloads"]), found)
