"""The platform's objects in a cluster: names, labels, addresses, records of revisions, changes of the chart's. Pure."""

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from charonia.core.errors import invalid

MANAGER = "charonia-platform"
"""Field manager of the platform."""

OWNER = "charonia.dev/platform"
"""Label of all objects that a platform creates: which platform. Objects without it are never touched."""

OBJECT = "charonia.dev/deployment"
"""Label: name of the objects of a deployment."""

RECORD = "charonia.dev/record"
"""Label of the Secrets that record the objects of a revision, or which one serves."""

TITLE = "charonia.dev/title"
"""Annotation: "PROJECT/NAME"."""

REVISION = "charonia.dev/revision"
"""Annotation: the revision that an object is of."""

SERVING = "charonia.dev/serving"
"""Annotation of a workload: the revision that served when this one was applied, then this one."""

FAILURE = "charonia.dev/failure"
"""Annotation of a record: why its revision has failed."""

TEMPLATE = "charonia.dev/template"
"""Annotation of pods: the revision that last changed their template."""

HOOK = "helm.sh/hook"

NAME_CHARS_MAX = 40
"""Length of the readable part of a name: with the suffixes that Kubernetes adds for pods it stays below 63."""

_DIGEST_CHARS = 8

Plain = Mapping[str, Any]
"""An object of Kubernetes as JSON."""


@dataclass(frozen=True, slots=True)
class ObjectKind:
    """A kind of objects.

    Attributes:
        api: Its API: "v1", "apps/v1".
    """

    api: str
    kind: str
    plural: str

    @property
    def group(self) -> str:
        return self.api.rpartition("/")[0]


DEPLOYMENT = ObjectKind("apps/v1", "Deployment", "deployments")
INFERENCE_SERVICE = ObjectKind("serving.kserve.io/v1beta1", "InferenceService", "inferenceservices")
POD = ObjectKind("v1", "Pod", "pods")
SECRET = ObjectKind("v1", "Secret", "secrets")
EVENT = ObjectKind("v1", "Event", "events")
NODE = ObjectKind("v1", "Node", "nodes")
QUOTA = ObjectKind("v1", "ResourceQuota", "resourcequotas")

APPLIED = (
    ObjectKind("v1", "ServiceAccount", "serviceaccounts"),
    SECRET,
    ObjectKind("v1", "ConfigMap", "configmaps"),
    ObjectKind("v1", "PersistentVolumeClaim", "persistentvolumeclaims"),
    ObjectKind("v1", "Service", "services"),
    ObjectKind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    ObjectKind("networking.k8s.io/v1", "Ingress", "ingresses"),
    ObjectKind("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes"),
    ObjectKind("gateway.networking.k8s.io/v1", "GRPCRoute", "grpcroutes"),
    ObjectKind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    ObjectKind("monitoring.coreos.com/v1", "PodMonitor", "podmonitors"),
    ObjectKind("monitoring.coreos.com/v1", "PrometheusRule", "prometheusrules"),
    ObjectKind("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers"),
    ObjectKind("keda.sh/v1alpha1", "ScaledObject", "scaledobjects"),
    DEPLOYMENT,
    ObjectKind("serving.kserve.io/v1alpha1", "ServingRuntime", "servingruntimes"),
    INFERENCE_SERVICE,
)
"""Kinds of a deployment's objects in the order in which they are applied: the workload is last."""

_SCALERS = ("HorizontalPodAutoscaler", "ScaledObject")
_KINDS = {(kind.api, kind.kind): kind for kind in APPLIED}


@dataclass(frozen=True, slots=True)
class Reference:
    """Identifies an object: its kind, and its name in the namespace of the platform."""

    kind: ObjectKind
    name: str

    def __str__(self) -> str:
        return f"{self.kind.kind} '{self.name}'"


def object_name(deployment: str) -> str:
    """Return the readable, unique name of the objects of a deployment "PROJECT/NAME"."""
    readable = re.sub(r"[^a-z0-9]+", "-", deployment.rpartition("/")[2])[:NAME_CHARS_MAX].strip("-")
    digest = hashlib.sha256(deployment.encode()).hexdigest()[:_DIGEST_CHARS]
    return f"c-{readable}-{digest}"  # a Service's name begins with a letter


def record_name(name: str, revision: int) -> str:
    return f"{name}-rev-{revision}"


def keys_name(name: str) -> str:
    return f"{name}-keys"


def note_name(name: str) -> str:
    """Return the name of the Secret that says which revision serves, where the workload cannot say it."""
    return f"{name}-serves"


def reference(found: Plain) -> Reference:
    """Return the reference of an object."""
    kind = _KINDS.get((found["apiVersion"], found["kind"]))
    if kind is None:
        raise invalid(
            f"chart: expected objects of {', '.join(each.kind for each in APPLIED)}, "
            f"got {found['kind']} of {found['apiVersion']}",
            hint="remove the setting that creates it from the file of values",
        )
    return Reference(kind, found["metadata"]["name"])


def in_order(objects: Sequence[Plain]) -> list[Plain]:
    """Return objects in the order in which they are applied, without tests and other hooks of Helm."""
    kept = [each for each in objects if HOOK not in (each["metadata"].get("annotations") or {})]
    return sorted(kept, key=lambda each: APPLIED.index(reference(each).kind))


def is_ended_by_stop(kind: ObjectKind) -> bool:
    """Return whether stopping a deployment removes objects of a kind; its Service and its Secrets stay."""
    return kind in (DEPLOYMENT, INFERENCE_SERVICE) or kind.kind in _SCALERS


def labels(found: Plain) -> Plain:
    return found["metadata"].get("labels") or {}


def annotations(found: Plain) -> Plain:
    return found["metadata"].get("annotations") or {}


def number_of(found: Plain, annotation: str) -> int:
    """Return the number in an annotation, 0 where there is none."""
    text = str(annotations(found).get(annotation, "0"))
    return int(text) if text.isdecimal() else 0


def is_workload(found: Plain) -> bool:
    return (found["apiVersion"], found["kind"]) == (DEPLOYMENT.api, DEPLOYMENT.kind)


def with_marks(found: Plain, own_labels: Mapping[str, str], notes: Mapping[str, str]) -> dict[str, Any]:
    """Return an object, or a pod template, with added labels and annotations."""
    metadata = found.get("metadata") or {}
    return {
        **found,
        "metadata": {
            **metadata,
            "labels": {**(metadata.get("labels") or {}), **own_labels},
            "annotations": {**(metadata.get("annotations") or {}), **notes},
        },
    }


HTTP = 8000
GRPC = 8001
METRICS = 8002


@dataclass(frozen=True, slots=True)
class ServiceAddresses:
    """Addresses of services and pods of a namespace.

    Attributes:
        proxy: Address of a `kubectl proxy`, "" if the platform runs in the cluster itself.
    """

    namespace: str
    proxy: str = ""
    http_port: int = HTTP

    def http(self, name: str, workload: Plain) -> str:
        """Return the address of a deployment's HTTP endpoint, from its name and its workload."""
        if self.proxy:
            return f"{self._proxied('services', name)}:http/proxy"
        return f"http://{name}.{self.namespace}.svc:{HTTP}"

    def grpc(self, name: str) -> str:
        """Return the address of its gRPC endpoint, "" behind a `kubectl proxy`, which passes HTTP only."""
        return "" if self.proxy else f"{name}.{self.namespace}.svc:{GRPC}"

    def metrics(self, name: str) -> str:
        """Return the address of the metrics of one of its servers."""
        if self.proxy:
            return f"{self._proxied('services', name)}-headless:metrics/proxy/metrics"
        return f"http://{name}-headless.{self.namespace}.svc:{METRICS}/metrics"

    def pod_http(self, pod: Plain) -> str:
        return self._pod(pod, self.http_port)

    def pod_metrics(self, pod: Plain) -> str:
        """Return the address of a pod's metrics, "" while it has none."""
        address = self._pod(pod, METRICS)
        return f"{address}/metrics" if address else ""

    def _pod(self, pod: Plain, port: int) -> str:
        if self.proxy:
            return f"{self._proxied('pods', pod['metadata']['name'])}:{port}/proxy"
        ip = str((pod.get("status") or {}).get("podIP", ""))
        host = f"[{ip}]" if ":" in ip else ip
        return f"http://{host}:{port}" if ip else ""

    def _proxied(self, kind: str, name: str) -> str:
        return f"{self.proxy.rstrip('/')}/api/v1/namespaces/{self.namespace}/{kind}/{name}"


@dataclass(frozen=True, slots=True)
class KserveAddresses(ServiceAddresses):
    """Addresses of InferenceServices and their pods: only HTTP, as KServe reports it."""

    http_port: int = 8080

    def http(self, name: str, workload: Plain) -> str:
        """Return the address in the status of an InferenceService, "" while it has none. See `ServiceAddresses`."""
        if self.proxy:
            return f"{self._proxied('services', name)}-predictor:80/proxy"
        return str(workload["status"]["address"]).rstrip("/")

    def grpc(self, name: str) -> str:
        """Return "": KServe exposes one port."""
        return ""

    def metrics(self, name: str) -> str:
        """Return "": only pods have metrics."""
        return ""


RECORD_BYTES_MAX = 900_000
"""Kubernetes accepts Secrets of up to 1 MiB."""

_CONTENT = "content"


@dataclass(frozen=True, slots=True)
class RevisionRecord:
    """A revision as it was applied.

    Attributes:
        deployment: "PROJECT/NAME".
        objects: Its objects, in the order in which they are applied.
        repository: Address of its models for its servers.
        configs: The configuration of each of its models.
        key: The API key of the platform, "" in records of earlier releases.
        failure: Why it failed, "" if it did not.
    """

    deployment: str
    revision: int
    objects: Sequence[Plain]
    repository: str = ""
    configs: Mapping[str, str] = field(default_factory=dict)
    key: str = field(default="", repr=False)
    failure: str = ""
    replicas_min: int = 1

    def references(self) -> set[Reference]:
        return {reference(each) for each in self.objects}

    def has_fixed_replicas(self) -> bool:
        """Return whether it sets the number of servers itself."""
        workload = self.workload()
        if reference(workload).kind == INFERENCE_SERVICE:
            predictor = workload["spec"]["predictor"]
            return bool(predictor["minReplicas"] == predictor["maxReplicas"])
        return "replicas" in workload["spec"]

    def workload(self) -> Plain:
        """Return the object whose pods are its servers."""
        return self.objects[-1]


def to_secret(record: RevisionRecord, owner: str) -> dict[str, Any]:
    """Return the Secret of a record."""
    content = {
        "objects": list(record.objects),
        "repository": record.repository,
        "configs": dict(record.configs),
        "key": record.key,
        "replicas_min": record.replicas_min,
    }
    packed = base64.b64encode(gzip.compress(json.dumps(content, sort_keys=True).encode(), mtime=0)).decode()
    if len(packed) > RECORD_BYTES_MAX:
        raise invalid(
            f"revision {record.revision} of '{record.deployment}': expected objects of at most {RECORD_BYTES_MAX} "
            f"bytes, got {len(packed)}"
        )
    name = object_name(record.deployment)
    notes = {TITLE: record.deployment, REVISION: str(record.revision)}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "charonia.dev/revision",
        "metadata": {
            "name": record_name(name, record.revision),
            "labels": {OWNER: owner, OBJECT: name, RECORD: "true"},
            "annotations": notes | ({FAILURE: record.failure} if record.failure else {}),
        },
        "data": {_CONTENT: packed},
    }


def from_secret(secret: Plain) -> RevisionRecord:
    """Return the record in a Secret."""
    content = json.loads(gzip.decompress(base64.b64decode(secret["data"][_CONTENT])))
    return RevisionRecord(
        deployment=annotations(secret)[TITLE],
        revision=number_of(secret, REVISION),
        objects=content["objects"],
        repository=content["repository"],
        configs=content["configs"],
        key=content["key"],
        failure=str(annotations(secret).get(FAILURE, "")),
        replicas_min=content["replicas_min"],
    )


SCALER = "kube-controller-manager"
"""Field manager of autoscalers."""

MANAGED_BY = "app.kubernetes.io/managed-by"


def prepared(
    rendered: Sequence[Plain], owner: str, deployment: str, revision: int, before: Sequence[Plain]
) -> list[dict[str, Any]]:
    """Return the objects of a revision, in order, with labels and annotations.

    Args:
        deployment: "PROJECT/NAME".
        before: The objects of the serving revision, if any. Pods restart only if their template changes.
    """
    own = {OWNER: owner, OBJECT: object_name(deployment)}
    notes = {TITLE: deployment, REVISION: str(revision)}
    objects = [with_marks(each, own | {MANAGED_BY: MANAGER}, notes) for each in in_order(rendered)]
    workload = objects[-1]
    template = with_marks(workload["spec"]["template"], own, {TEMPLATE: ""})
    mark = str(revision)
    if before and template == with_marks(before[-1]["spec"]["template"], {}, {TEMPLATE: ""}):
        mark = template_mark(before[-1])
    workload["spec"] = {**workload["spec"], "template": with_marks(template, {}, {TEMPLATE: mark})}
    return objects


def same(one: Sequence[Plain], other: Sequence[Plain]) -> bool:
    """Return whether the objects of two revisions differ only in the number of the revision."""
    return _bare(one) == _bare(other)


def with_replicas(wanted: Plain, present: Plain | None, least: int) -> Plain:
    """Return a workload that leaves its number of replicas to its autoscaler.

    A field that we have set, and then omit, falls back to 1. Until another field manager owns it, we repeat its value.

    Args:
        wanted: The workload; returned unchanged if it sets the number of replicas.
        present: The workload in the cluster, None if there is none.
    """
    if "replicas" in wanted["spec"]:
        return wanted
    if present is not None and not _owns_replicas(present, MANAGER):
        return wanted
    count = least if present is None else max(int(present["spec"].get("replicas", 1)), least)
    return {**wanted, "spec": {**wanted["spec"], "replicas": count}}


def takes_replicas(wanted: Plain, present: Plain | None) -> bool:
    """Return whether a workload sets its number of replicas again after an autoscaler owned it, so it is taken over.

    Taking it over makes it ours by update, and a later apply would conflict: it is updated as well.
    """
    if present is None or wanted["spec"].get("replicas") in (None, present["spec"].get("replicas")):
        return False
    return _owns_replicas(present, SCALER) or _owns_replicas(present, MANAGER, ("Update",))


def tried(wanted: Plain, present: Plain | None, least: int) -> Plain:
    """Return an object for a dry run: a workload omits replicas that have yet to be taken over.

    Args:
        present: The object in the cluster, None if there is none.
    """
    if not is_workload(wanted):
        return wanted
    said = with_replicas(wanted, present, least)
    if not takes_replicas(said, present):
        return said
    return {**said, "spec": {key: value for key, value in said["spec"].items() if key != "replicas"}}


def serving_note(revision: int) -> Mapping[str, str]:
    return {SERVING: str(revision)}


def _owns_replicas(present: Plain, manager: str, operations: Sequence[str] = ("Apply", "Update")) -> bool:
    return any(
        entry.get("manager") == manager
        and entry.get("operation") in operations
        and "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
        for entry in present["metadata"].get("managedFields") or ()
    )


def _bare(objects: Sequence[Plain]) -> list[str]:
    return [json.dumps(with_marks(each, {}, {REVISION: "", SERVING: ""}), sort_keys=True) for each in objects]


def template_mark(workload: Plain) -> str:
    return str((workload["spec"]["template"]["metadata"].get("annotations") or {}).get(TEMPLATE, ""))
