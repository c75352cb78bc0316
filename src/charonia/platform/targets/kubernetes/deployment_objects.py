"""This platform's objects in a cluster: reads and changes the objects of each deployment.

Objects of other owners are neither changed nor removed.
"""

import logging
import threading
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

from charonia.core.errors import ServingError, invalid, unavailable
from charonia.platform.targets.api import key_files
from charonia.platform.targets.kubernetes.api import Cluster
from charonia.platform.targets.kubernetes.objects import (
    DEPLOYMENT,
    OBJECT,
    OWNER,
    POD,
    RECORD,
    SECRET,
    TITLE,
    ObjectKind,
    Plain,
    Reference,
    RevisionRecord,
    annotations,
    from_secret,
    is_workload,
    keys_name,
    labels,
    object_name,
    reference,
    serving_note,
    takes_replicas,
    to_secret,
    tried,
    with_marks,
    with_replicas,
)
from charonia.platform.targets.kubernetes.rollout import DeploymentSnapshot

LISTED_S = 1.0
"""How long a list counts, unless this platform changes something in between."""

STALE_S_MAX = 30.0
"""How long the last list counts while the API server does not answer."""

AGAIN_S = 5.0
"""Pause between attempts while it does not."""


class ListedObjects:
    """The objects of a kind with a label: one list for all deployments. Any thread may ask."""

    def __init__(self, cluster: Cluster, kind: ObjectKind, labels: str) -> None:
        self._list = partial(cluster.list, kind, labels=labels)
        self._lock = threading.Lock()
        self._objects: Sequence[Plain] = ()
        self._failure: ServingError | None = None
        self._listed_s = self._next_s = float("-inf")

    def all(self) -> Sequence[Plain]:
        """Return the objects."""
        with self._lock:
            if time.monotonic() >= self._next_s:
                try:
                    self._objects, self._failure = self._list(), None
                    self._listed_s = time.monotonic()
                except ServingError as error:
                    self._failure = error
                self._next_s = time.monotonic() + (LISTED_S if self._failure is None else AGAIN_S)
            if self._failure is not None and time.monotonic() - self._listed_s > STALE_S_MAX:
                raise unavailable(self._failure.message, hint=self._failure.hint)
            return self._objects

    def invalidate(self) -> None:
        """Read the list again the next time."""
        with self._lock:  # a list that is being read may be older
            self._next_s = float("-inf")


_log = logging.getLogger(__name__)


class DeploymentObjects:
    """Reads and writes the objects of deployments. Any thread may call; only one at a time may write a deployment's.

    Args:
        owner: Name of this platform among all that use the namespace.

    Attributes:
        kinds: The kinds that are looked at, and the labels that they need beside the owner's.
    """

    kinds: ClassVar[Mapping[str, tuple[ObjectKind, str]]] = {
        "workloads": (DEPLOYMENT, ""),
        "pods": (POD, ""),
        "records": (SECRET, f",{RECORD}=true"),
    }

    def __init__(self, cluster: Cluster, owner: str) -> None:
        self.owner = owner
        self._cluster = cluster
        self._lists = {
            what: ListedObjects(cluster, kind, f"{OWNER}={owner}{selector}")
            for what, (kind, selector) in self.kinds.items()
        }

    def deployments(self) -> Sequence[str]:
        """Return the names of all deployments that have objects."""
        found = [*self._lists["records"].all(), *self._lists["workloads"].all()]
        return sorted({str(annotations(each)[TITLE]) for each in found if TITLE in annotations(each)})

    def dry_run(self, record: RevisionRecord) -> None:
        """Check whether all objects of a revision would be accepted, so that it is never applied in part."""
        present = {which: self._cluster.get(which) for which in record.references()}
        for which, found in present.items():
            if found is not None and labels(found).get(OWNER) != self.owner:
                raise invalid(
                    f"{which} in namespace '{self._cluster.namespace}' does not belong to this platform",
                    hint="remove it, or name the deployment differently",
                )
        for each in record.objects:
            self._cluster.apply(tried(each, present[reference(each)], record.replicas_min), is_trial=True)

    def put(self, record: RevisionRecord, serving: int, keys: Sequence[str]) -> None:
        """Apply all objects of a revision: its record first, its workload last."""
        self.apply_record(record)
        self.apply_keys(record.deployment, record.key, keys)
        self.apply_objects(record, serving)

    def apply_objects(self, record: RevisionRecord, serving: int) -> None:
        """Apply the objects of a record, the workload last.

        Args:
            serving: The revision that serves during the rollout.
        """
        for each in record.objects:
            wanted: Plain = each
            if is_workload(each):
                present = self._cluster.get(reference(each))
                wanted = with_marks(with_replicas(each, present, record.replicas_min), {}, serving_note(serving))
                if takes_replicas(wanted, present):
                    self._cluster.set_replicas(reference(each), wanted["spec"]["replicas"])
            self._cluster.apply(wanted)
        self.invalidate()

    def apply_record(self, record: RevisionRecord) -> None:
        """Store the record of a revision, in place of an earlier one."""
        self._cluster.apply(to_secret(record, self.owner), force=True)
        self.invalidate()

    def apply_keys(self, deployment: str, key: str, keys: Sequence[str]) -> None:
        """Write the file of API keys; servers reload it when it changes."""
        name = object_name(deployment)
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": keys_name(name), "annotations": {TITLE: deployment}},
            "data": {each: b64encode(text.encode()).decode() for each, text in key_files(key, keys).items()},
        }
        self._cluster.apply(with_marks(secret, {OWNER: self.owner, OBJECT: name}, {}), force=True)

    def delete(self, which: Reference) -> None:
        """Begin to remove an object, if there is one of ours."""
        found = self._cluster.get(which)
        if found is None:
            return
        if labels(found).get(OWNER) != self.owner:
            _log.warning("%s in namespace '%s' is not ours any more: not removed", which, self._cluster.namespace)
            return
        self._cluster.delete(found, which.kind)

    def snapshot(self, deployment: str, *, is_live: bool = False) -> DeploymentSnapshot:
        """Return the state of a deployment: from the last lists, or live from the API server."""
        found = self._found(deployment, is_live=is_live)
        return self._snapshot(next(iter(found["workloads"]), None), found)

    def _snapshot(self, workload: Plain | None, found: Mapping[str, Sequence[Plain]]) -> DeploymentSnapshot:
        return DeploymentSnapshot(workload, found["pods"], tuple(from_secret(each) for each in found["records"]))

    def _found(self, deployment: str, *, is_live: bool) -> Mapping[str, Sequence[Plain]]:
        """Return the objects of a deployment, by the name of their kind in `kinds`."""
        name = object_name(deployment)
        if not is_live:
            return {
                what: [each for each in listed.all() if labels(each).get(OBJECT) == name]
                for what, listed in self._lists.items()
            }
        self.invalidate()
        return {
            what: self._cluster.list(kind, labels=f"{OWNER}={self.owner}{selector},{OBJECT}={name}")
            for what, (kind, selector) in self.kinds.items()
        }

    def invalidate(self) -> None:
        """Read all lists again the next time: something has changed."""
        for listed in self._lists.values():
            listed.invalidate()
