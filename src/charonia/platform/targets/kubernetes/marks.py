"""Names, labels and annotations of the platform's objects in a cluster. Pure."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
        """The API group, "" for the core."""
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
    """Return whether the pods of an object are the servers of a deployment."""
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
