"""The objects of this platform in a cluster: what there is of a deployment, and changes of it.

What is not of this platform is neither changed nor removed.
"""

import logging
import threading
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import ClassVar

from charonia.core.errors import invalid
from charonia.platform.targets.api import key_files
from charonia.platform.targets.kubernetes.api import Cluster
from charonia.platform.targets.kubernetes.marks import (
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
    annotations,
    is_workload,
    keys_name,
    labels,
    object_name,
    reference,
    with_marks,
)
from charonia.platform.targets.kubernetes.objects import serving_note, takes_replicas, tried, with_replicas
from charonia.platform.targets.kubernetes.records import RevisionRecord, from_secret, to_secret
from charonia.platform.targets.kubernetes.rollout import Sight
from charonia.platform.targets.kubernetes.watch import WatchedObjects

_log = logging.getLogger(__name__)


class OwnObjects:
    """Reads and writes the objects of deployments. Any thread may call; one at a time writes those of a deployment.

    Args:
        cluster: Where they are.
        owner: Name of this platform among all that use the namespace.

    Attributes:
        watched: What is looked at all the time: kinds, and what their labels have beside that of the owner.
    """

    watched: ClassVar[Mapping[str, tuple[ObjectKind, str]]] = {
        "workloads": (DEPLOYMENT, ""),
        "pods": (POD, ""),
        "records": (SECRET, f",{RECORD}=true"),
    }

    def __init__(self, cluster: Cluster, owner: str) -> None:
        self.owner = owner
        self._cluster = cluster
        self._watches: dict[str, WatchedObjects] = {}
        self._beginning = threading.Lock()

    def deployments(self) -> Sequence[str]:
        """Return the names of all deployments that there is anything of."""
        found = [*self._watched("records").all(), *self._watched("workloads").all()]
        return sorted({str(annotations(each)[TITLE]) for each in found if TITLE in annotations(each)})

    def try_out(self, record: RevisionRecord) -> None:
        """Find out whether all objects of a revision would be taken, so that none is left half there.

        Raises:
            ServingError: INVALID_ARG if an object of somebody else has the name of one of them; as `Cluster.apply`.
        """
        present = {which: self._cluster.get(which) for which in record.references()}
        for which, found in present.items():
            if found is not None and labels(found).get(OWNER) != self.owner:
                raise invalid(
                    f"{which} in namespace '{self._cluster.namespace}' is not of this platform, and stays as it is",
                    hint="remove it, or name the deployment differently",
                )
        for each in record.objects:
            self._cluster.apply(tried(each, present[reference(each)], record.replicas_min), is_trial=True)

    def put(self, record: RevisionRecord, serving: int, keys: Sequence[str]) -> None:
        """Apply all objects of a revision; its record is there before them, its workload comes last.

        Raises:
            ServingError: As `Cluster.apply`.
        """
        self.apply_record(record)
        self.apply_keys(record.deployment, record.key, keys)
        self.apply_objects(record, serving)

    def apply_objects(self, record: RevisionRecord, serving: int) -> None:
        """Apply the objects of a record, the workload last.

        Args:
            record: The record.
            serving: The revision that serves meanwhile.
        """
        for each in record.objects:
            wanted: Plain = each
            if is_workload(each):
                present = self._cluster.get(reference(each))
                wanted = with_marks(with_replicas(each, present, record.replicas_min), {}, serving_note(serving))
                if takes_replicas(wanted, present):
                    self._cluster.set_replicas(reference(each), wanted["spec"]["replicas"])
            applied = self._cluster.apply(wanted)
            if is_workload(each):
                self._watched("workloads").put(applied)

    def apply_record(self, record: RevisionRecord) -> None:
        """Write down a revision, in place of what was written down of it."""
        self._watched("records").put(self._cluster.apply(to_secret(record, self.owner), force=True))

    def apply_keys(self, deployment: str, key: str, keys: Sequence[str]) -> None:
        """Write the file of API keys; servers read it again when it changes."""
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
            _log.warning("%s in namespace '%s' is not ours any more: it stays", which, self._cluster.namespace)
            return
        self._cluster.delete(found, which.kind)

    def look(self, deployment: str, *, is_live: bool = False) -> Sight:
        """Return what there is of a deployment: as the watches know it, or as the API server says now."""
        found = self._found(deployment, is_live=is_live)
        return self._sight(next(iter(found["workloads"]), None), found)

    def _sight(self, workload: Plain | None, found: Mapping[str, Sequence[Plain]]) -> Sight:
        return Sight(workload, found["pods"], tuple(from_secret(each) for each in found["records"]))

    def _found(self, deployment: str, *, is_live: bool) -> Mapping[str, Sequence[Plain]]:
        """Return what there is of a deployment among all that is watched."""
        name = object_name(deployment)
        found: dict[str, list[Plain]] = {}
        for what, (kind, further) in self.watched.items():
            watched = self._watched(what)
            known = watched.all()
            if is_live:
                listed, version = self._cluster.list(kind, labels=f"{OWNER}={self.owner}{further},{OBJECT}={name}")
                watched.put_all(listed, version, (OBJECT, name))
                known = listed
            found[what] = [each for each in known if labels(each).get(OBJECT) == name]
        return found

    def _watched(self, what: str) -> WatchedObjects:
        """Return the watch of one of `watched`, which begins when it is first asked for."""
        with self._beginning:
            if what not in self._watches:
                kind, further = self.watched[what]
                self._watches[what] = WatchedObjects(self._cluster, kind, f"{OWNER}={self.owner}{further}")
            return self._watches[what]
