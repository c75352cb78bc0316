"""This platform's objects in a cluster: reads and changes the objects of each deployment.

Objects of other owners are neither changed nor removed.
"""

import asyncio
import logging
import threading
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import ClassVar

from charonia.core.errors import ServingError, invalid, unavailable
from charonia.platform.targets.api import key_files
from charonia.platform.targets.kubernetes.api import OPENED, Cluster, ExpiredError
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
from charonia.platform.targets.kubernetes.rollout import Sight

RECONNECT_S = 0.2
"""Pause before a broken watch is restarted; it doubles each time."""

RECONNECT_S_MAX = 15.0

STALE_S_MAX = 30.0
"""How long results remain valid after the watch has failed."""

FIRST_S_MAX = 20.0
"""Time for the first list."""


class WatchedObjects:
    """The objects of a kind with a label. Any thread may ask."""

    def __init__(self, cluster: Cluster, kind: ObjectKind, labels: str) -> None:
        self._cluster = cluster
        self._kind = kind
        self._labels = labels
        self._objects: dict[str, Plain] = {}
        self._version = 0
        self._lock = threading.Lock()
        self._is_tried = threading.Event()
        self._is_listed = False
        self._failed_s = 0.0
        self._failure: ServingError | None = None
        cluster.begin(self._follow())

    def all(self) -> Sequence[Plain]:
        """Return the objects."""
        is_tried, failure = self._is_tried.wait(FIRST_S_MAX), self._failure
        if failure is not None and (not self._is_listed or time.monotonic() - self._failed_s > STALE_S_MAX):
            raise unavailable(failure.message, hint=failure.hint)
        if not is_tried:
            raise unavailable(f"the cluster has not said within {FIRST_S_MAX:g} s which {self._kind.plural} it has")
        with self._lock:
            return list(self._objects.values())

    def put(self, found: Plain) -> None:
        """Store the result of a call, unless the watch has a newer one."""
        with self._lock:
            if _version(found) > self._version:
                self._keep(found)

    def put_all(self, found: Sequence[Plain], version: str, label: tuple[str, str]) -> None:
        """Store all objects that have a label, from a list of that version."""
        listed = int(version) if version.isdecimal() else 0
        with self._lock:
            if listed < self._version:
                return
            names = {each["metadata"]["name"] for each in found}
            for name, known in list(self._objects.items()):
                is_one = (known["metadata"].get("labels") or {}).get(label[0]) == label[1]
                if is_one and name not in names and _version(known) <= listed:
                    del self._objects[name]
            for each in found:
                self._keep(each)

    def _keep(self, found: Plain) -> None:
        known = self._objects.get(found["metadata"]["name"])
        if known is None or _version(known) <= _version(found):
            self._objects[found["metadata"]["name"]] = found

    async def _follow(self) -> None:
        pause_s = RECONNECT_S
        version = ""
        while True:
            try:
                if not version:
                    version = await self._list()
                begun_s = time.monotonic()
                async for kind, found in self._cluster.watched(self._kind, self._labels, version):
                    self._failure = None
                    if kind == OPENED:
                        continue
                    version = str(found["metadata"].get("resourceVersion", version))
                    self._note(kind, found)
                    pause_s = RECONNECT_S
                if time.monotonic() - begun_s >= RECONNECT_S_MAX:
                    continue  # the server has ended it on schedule
            except ExpiredError:
                version = ""
            except ServingError as error:
                self._fail(error)
            except Exception as error:
                _log.exception("watch of %s failed", self._kind.plural)
                version = ""
                self._fail(unavailable(f"the watch of {self._kind.plural} has failed: {error}"))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RECONNECT_S_MAX)

    async def _list(self) -> str:
        found, version = await self._cluster.listed(self._kind, labels=self._labels)
        with self._lock:
            self._objects = {each["metadata"]["name"]: each for each in found}
            self._version = int(version) if version.isdecimal() else 0
        self._failure, self._is_listed = None, True
        self._is_tried.set()
        return version

    def _note(self, kind: str, found: Plain) -> None:
        with self._lock:
            self._version = max(self._version, _version(found))
            if kind == "DELETED":
                known = self._objects.get(found["metadata"]["name"])
                if known is not None and known["metadata"].get("uid") == found["metadata"].get("uid"):
                    del self._objects[found["metadata"]["name"]]
            elif kind != "BOOKMARK":
                self._keep({**found, "apiVersion": self._kind.api, "kind": self._kind.kind})

    def _fail(self, error: ServingError) -> None:
        if self._failure is None:
            self._failed_s = time.monotonic()
        self._failure = error
        self._is_tried.set()


def _version(found: Plain) -> int:
    text = str(found["metadata"].get("resourceVersion", "0"))
    return int(text) if text.isdecimal() else 0


_log = logging.getLogger(__name__)


class OwnObjects:
    """Reads and writes the objects of deployments. Any thread may call; only one at a time may write a deployment's.

    Args:
        owner: Name of this platform among all that use the namespace.

    Attributes:
        watched: The watched kinds, and the labels that they need beside the owner's.
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
        """Return the names of all deployments that have objects."""
        found = [*self._watched("records").all(), *self._watched("workloads").all()]
        return sorted({str(annotations(each)[TITLE]) for each in found if TITLE in annotations(each)})

    def try_out(self, record: RevisionRecord) -> None:
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
            applied = self._cluster.apply(wanted)
            if is_workload(each):
                self._watched("workloads").put(applied)

    def apply_record(self, record: RevisionRecord) -> None:
        """Store the record of a revision, in place of an earlier one."""
        self._watched("records").put(self._cluster.apply(to_secret(record, self.owner), force=True))

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

    def look(self, deployment: str, *, is_live: bool = False) -> Sight:
        """Return the state of a deployment: from the watches, or live from the API server."""
        found = self._found(deployment, is_live=is_live)
        return self._sight(next(iter(found["workloads"]), None), found)

    def _sight(self, workload: Plain | None, found: Mapping[str, Sequence[Plain]]) -> Sight:
        return Sight(workload, found["pods"], tuple(from_secret(each) for each in found["records"]))

    def _found(self, deployment: str, *, is_live: bool) -> Mapping[str, Sequence[Plain]]:
        """Return the objects of a deployment, by name of their watch."""
        name = object_name(deployment)
        found: dict[str, list[Plain]] = {}
        for what, (kind, selector) in self.watched.items():
            watched = self._watched(what)
            known = watched.all()
            if is_live:
                listed, version = self._cluster.list(kind, labels=f"{OWNER}={self.owner}{selector},{OBJECT}={name}")
                watched.put_all(listed, version, (OBJECT, name))
                known = listed
            found[what] = [each for each in known if labels(each).get(OBJECT) == name]
        return found

    def _watched(self, what: str) -> WatchedObjects:
        """Return one of the watches, which starts on first use."""
        with self._beginning:
            if what not in self._watches:
                kind, selector = self.watched[what]
                self._watches[what] = WatchedObjects(self._cluster, kind, f"{OWNER}={self.owner}{selector}")
            return self._watches[what]
