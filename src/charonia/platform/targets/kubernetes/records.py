"""The record of a revision: a Secret with all of its objects, so that what served before can be applied again. Pure."""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from charonia.core.errors import invalid
from charonia.platform.targets.kubernetes.marks import (
    FAILURE,
    INFERENCE_SERVICE,
    OBJECT,
    OWNER,
    RECORD,
    REVISION,
    TITLE,
    Plain,
    Reference,
    annotations,
    number_of,
    object_name,
    record_name,
    reference,
)

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
