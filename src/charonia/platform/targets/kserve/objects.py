"""KServe objects of a workload: the objects of `charonia export kserve`, and the additions of a deployment. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from charonia.config.model import ModelConfig
from charonia.core.errors import invalid
from charonia.export.kserve import ExportedModels, kserve_objects
from charonia.export.options import KserveOptions, Mode
from charonia.platform.settings import KubernetesSettings
from charonia.platform.targets.api import Workload, key_file
from charonia.platform.targets.fit import MIB, needs_of
from charonia.platform.targets.kubernetes.marks import (
    MANAGER,
    OBJECT,
    OWNER,
    REVISION,
    TEMPLATE,
    TITLE,
    Plain,
    annotations,
    in_order,
    keys_name,
    object_name,
    with_marks,
)
from charonia.platform.targets.kubernetes.objects import MANAGED_BY

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
    arguments = ["--exit-on-error=true", f"--api-keys={KEYS_FOLDER}/{key_file(spec)}"]
    options = KserveOptions(
        name=name,
        runtime=name,
        storage_uri=address,
        image=dict(settings.images).get(spec.environment, "") or settings.image or IMAGE,
        mode=mode,
        replicas_min=spec.replicas_min,
        replicas_max=spec.replicas_max,
        cpu=str(spec.cpu_cores or 1),
        memory=f"{spec.memory_mib or -(-needs_of(workload).memory_bytes // MIB)}Mi",
        gpus=len(spec.gpus),
        arguments=tuple(arguments),
    )
    models = tuple(ModelConfig(name=model.name) for model in workload.models)  # served as one repository
    made: dict[str, Any] = kserve_objects(ExportedModels(name, models, is_repository=True), options)
    predictor = made["service"]["spec"]["predictor"]
    if mode is Mode.STANDARD:
        probe = predictor["model"]["startupProbe"]
        probe |= {"periodSeconds": PROBE_S, "failureThreshold": max(1, round(spec.ready_within_s / PROBE_S))}
        rolling = {"maxUnavailable": 0, "maxSurge": 1}
        predictor["deploymentStrategy"] = {"type": "RollingUpdate", "rollingUpdate": rolling}
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
