"""The target `kubernetes`: the objects of the Helm chart for each deployment, in a namespace of a cluster.

What is there is kept in the cluster: a record of each revision (`records.py`), and annotations that say which one
serves. So a platform that starts again finds it, and goes on where the one before was cut off: each step may be
repeated. The pods of a new revision take the place of those before one by one; if they cannot be ready, what served is
applied again.
"""

import hashlib
import logging
import secrets
import threading
from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from charonia.core.errors import Code, ServingError, invalid, unavailable
from charonia.platform.targets.api import Observed, Replica, RevisionPhase, Workload
from charonia.platform.targets.kubernetes.addresses import Addresses
from charonia.platform.targets.kubernetes.api import Cluster
from charonia.platform.targets.kubernetes.fit import node_misfits, pod_need, quota_misfits
from charonia.platform.targets.kubernetes.marks import (
    DEPLOYMENT,
    NODE,
    OBJECT,
    OWNER,
    POD,
    QUOTA,
    RECORD,
    SECRET,
    TITLE,
    ObjectKind,
    Plain,
    Reference,
    annotations,
    is_ended_by_stop,
    is_workload,
    keys_name,
    labels,
    object_name,
    record_name,
    reference,
    with_marks,
)
from charonia.platform.targets.kubernetes.objects import prepared, same, serving_note, with_replicas
from charonia.platform.targets.kubernetes.pods import PodReasons
from charonia.platform.targets.kubernetes.reasons import is_ready, restarts
from charonia.platform.targets.kubernetes.records import RevisionRecord, from_secret, to_secret
from charonia.platform.targets.kubernetes.repositories import ModelRepositories
from charonia.platform.targets.kubernetes.rollout import Rollout, RolloutState, Sight, rollout
from charonia.platform.targets.kubernetes.values import KEYS_FILE
from charonia.platform.targets.kubernetes.watch import WatchedObjects
from charonia.platform.targets.live_traffic import change_traffic, traffic_of

_log = logging.getLogger(__name__)

LOG_PODS_MAX = 10
"""Most servers whose logs are shown together."""

_KEY_BYTES = 32
_PHASES = {
    RolloutState.ABSENT: RevisionPhase.ABSENT,
    RolloutState.ENDING: RevisionPhase.ENDING,
    RolloutState.FAILED: RevisionPhase.FAILED,
    RolloutState.BROKEN: RevisionPhase.FAILED,
    RolloutState.UNDER_WAY: RevisionPhase.STARTING,
    RolloutState.DONE: RevisionPhase.READY,
    RolloutState.STEADY: RevisionPhase.READY,
}


Renderer = Callable[[Workload, str], Sequence[Plain]]
"""Makes the objects of a workload: from it, and the address of its repository."""

_WATCHED = {
    "workloads": (DEPLOYMENT, ""),
    "pods": (POD, ""),
    "records": (SECRET, f",{RECORD}=true"),
}
"""What is looked at all the time: kinds, and what their labels have beside that of the owner."""


class KubernetesTarget:
    """Deployments in a namespace of a cluster. See `DeploymentTarget`.

    Args:
        cluster: The namespace.
        owner: Name of this platform among all that use the namespace.
        render: Makes objects.
        repositories: Where pods find models.
        addresses: How servers are reached.
        chart_problem: Returns why no objects can be made, "" if they can.
    """

    name = "kubernetes"

    def __init__(
        self,
        cluster: Cluster,
        owner: str,
        render: Renderer,
        repositories: ModelRepositories,
        addresses: Addresses,
        chart_problem: Callable[[], str] = lambda: "",
    ) -> None:
        self._chart_problem = chart_problem
        self._cluster = cluster
        self._owner = owner
        self._render = render
        self._repositories = repositories
        self._addresses = addresses
        self._reasons = PodReasons(cluster)
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._watches: dict[str, WatchedObjects] = {}
        self._beginning = threading.Lock()

    def close(self) -> None:
        """Stop looking; what runs goes on."""
        self._cluster.close()

    def problems(self, workload: Workload) -> Sequence[str]:
        """Return why a workload does not fit. See `DeploymentTarget`."""
        need, is_new = pod_need(workload), self._look(workload.deployment).workload is None
        replicas = workload.spec.replicas_min if is_new else 1  # one more at a time
        return [
            *filter(None, [self._repositories.problem(), self._chart_problem()]),
            *node_misfits(need, self._readable(NODE)),
            *quota_misfits(need, replicas, self._readable(QUOTA)),
        ]

    def apply(self, workload: Workload) -> None:
        """Begin to bring a workload about. See `DeploymentTarget`."""
        name, number = workload.deployment, workload.revision
        with self._locks[name]:
            sight = self._look(name, is_live=True)
            seen = rollout(sight, self._reasons.reason)
            if seen.state in (RolloutState.DONE, RolloutState.BROKEN):
                self._conclude(name, sight, seen)
                sight = self._look(name, is_live=True)
                seen = rollout(sight, self._reasons.reason)
            if seen.state is RolloutState.ENDING:
                raise unavailable(f"the servers of '{name}' end", hint="wait until they have ended")
            if seen.state is RolloutState.UNDER_WAY and seen.applying != number:
                raise unavailable(f"revision {seen.applying} of '{name}' is not over yet: {seen.said}")
            if number in (seen.serving, seen.applying if seen.state is RolloutState.UNDER_WAY else 0):
                return
            before = sight.record(seen.serving)
            record = self._prepare(workload, sight, before)
            if before is not None and same(record.objects, before.objects):
                self._change_traffic(record, before)
                serving = number
            else:
                self._repositories.configure(record.repository, record.configs)
                serving = seen.serving
            self._put(record, serving, workload.keys)

    def abandon(self, deployment: str) -> None:
        """Give up what is being brought about. See `DeploymentTarget`."""
        with self._locks[deployment]:
            sight = self._look(deployment, is_live=True)
            seen = rollout(sight, self._reasons.reason)
            if seen.state in (RolloutState.UNDER_WAY, RolloutState.BROKEN):
                self._restore(deployment, sight, seen)

    def observe(self, deployment: str) -> Observed:
        """Return what is there now. See `DeploymentTarget`."""
        sight = self._look(deployment)
        seen = rollout(sight, self._reasons.reason)
        lock = self._locks[deployment]
        if seen.state in (RolloutState.DONE, RolloutState.BROKEN) and lock.acquire(blocking=False):
            try:
                sight = self._look(deployment, is_live=True)
                seen = rollout(sight, self._reasons.reason)
                self._conclude(deployment, sight, seen)
                sight = self._look(deployment)
            finally:
                lock.release()
        if seen.state is RolloutState.ABSENT:
            return Observed()
        is_there = sight.workload is not None
        record = sight.record(seen.serving)
        name = object_name(deployment)
        is_failed = _PHASES[seen.state] is RevisionPhase.FAILED
        return Observed(
            serving=seen.serving,
            applying=seen.applying,
            phase=_PHASES[seen.state],
            doing="" if is_failed else seen.said,
            reason=seen.said if is_failed else "",
            http=self._addresses.http(name) if is_there else "",
            grpc=self._addresses.grpc(name) if is_there else "",
            metrics=self._addresses.metrics(name) if is_there else "",
            key=record.key if record is not None else "",
            replicas=tuple(self._replica(pod) for pod in sight.living()) if is_there else (),
        )

    def stop(self, deployment: str) -> None:
        """Begin to end a deployment. See `DeploymentTarget`."""
        with self._locks[deployment]:
            sight = self._look(deployment, is_live=True)
            for record in sight.records:
                for which in sorted(record.references(), key=str):
                    if is_ended_by_stop(which.kind):
                        self._delete(which)
                if record.failure:
                    self._apply_record(replace(record, failure=""))
            self._look(deployment, is_live=True)

    def remove(self, deployment: str) -> None:
        """Remove what is left of a deployment. See `DeploymentTarget`."""
        with self._locks[deployment]:
            sight = self._look(deployment, is_live=True)
            if sight.workload is not None:
                raise unavailable(f"the servers of '{deployment}' still run")
            if not sight.records:
                return
            self._repositories.forget(deployment, ())
            for which in {which for record in sight.records for which in record.references()}:
                self._delete(which)
            self._delete(Reference(SECRET, keys_name(object_name(deployment))))
            for record in sight.records:
                self._delete(_record_of(deployment, record.revision))
            self._look(deployment, is_live=True)

    def set_keys(self, deployment: str, keys: Sequence[str]) -> None:
        """Let these be the API keys. See `DeploymentTarget`."""
        with self._locks[deployment]:
            records = self._look(deployment, is_live=True).records
            key = next((record.key for record in records if record.key), "")
            if key:
                self._apply_keys(deployment, key, keys)

    def deployments(self) -> Sequence[str]:
        """Return the names of all deployments. See `DeploymentTarget`."""
        found = [*self._watched("records").all(), *self._watched("workloads").all()]
        return sorted({str(annotations(each)[TITLE]) for each in found if TITLE in annotations(each)})

    def log(self, deployment: str, lines: int) -> str:
        """Return the last lines of the logs. See `DeploymentTarget`."""
        pods = self._look(deployment).living()[-LOG_PODS_MAX:]
        texts = []
        for pod in pods:
            name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]["name"]
            text = self._cluster.log(name, container, lines)
            if not is_ready(pod) and restarts(pod):
                text = self._cluster.log(name, container, lines, previous=True) + text
            texts.append(f"==> {name} <==\n{text}" if len(pods) > 1 else text)
        return "\n".join(texts)

    def _readable(self, kind: ObjectKind) -> Sequence[Plain]:
        """Return the nodes, or the quotas of the namespace; none where the platform may not read them.

        Raises:
            ServingError: UNAVAILABLE when the API server cannot be reached.
        """
        try:
            return self._cluster.nodes(kind) if kind == NODE else self._cluster.list(kind)[0]
        except ServingError as error:
            if error.code is Code.UNAVAILABLE:
                raise
            return ()

    def _prepare(self, workload: Workload, sight: Sight, before: RevisionRecord | None) -> RevisionRecord:
        """Return the record of a revision, whose models are where its servers find them."""
        if problem := self._repositories.problem():
            raise invalid(problem)
        address = self._repositories.address(workload)
        rendered = self._render(workload, address)
        objects = prepared(
            rendered, self._owner, workload.deployment, workload.revision, before.objects if before is not None else ()
        )
        self._repositories.publish(workload)
        key = next((record.key for record in sight.records if record.key), "") or secrets.token_urlsafe(_KEY_BYTES)
        return RevisionRecord(
            deployment=workload.deployment,
            revision=workload.revision,
            objects=objects,
            repository=address,
            configs={model.name: model.config for model in workload.models},
            key=key if workload.spec.keys else "",
            replicas_min=workload.spec.replicas_min,
        )

    def _put(self, record: RevisionRecord, serving: int, keys: Sequence[str]) -> None:
        """Apply all objects of a revision; its record is there before them, its workload comes last."""
        present = {which: self._cluster.get(which) for which in record.references()}
        for which, found in present.items():
            if found is not None and labels(found).get(OWNER) != self._owner:
                raise invalid(
                    f"{which} in namespace '{self._cluster.namespace}' is not of this platform, and stays as it is",
                    hint="remove it, or name the deployment differently",
                )
        self._apply_record(record)
        if record.key:
            self._apply_keys(record.deployment, record.key, keys)
        self._apply_objects(record, serving)

    def _apply_objects(self, record: RevisionRecord, serving: int) -> None:
        for each in record.objects:
            wanted: Plain = each
            if is_workload(each):
                present = self._cluster.get(reference(each))
                wanted = with_marks(with_replicas(each, present, record.replicas_min), {}, serving_note(serving))
            applied = self._cluster.apply(wanted)
            if is_workload(each):
                self._watched("workloads").put(applied)

    def _conclude(self, deployment: str, sight: Sight, seen: Rollout) -> None:
        """Write down in the cluster what has become of a revision. It is done again if it is cut off."""
        if seen.state is RolloutState.BROKEN:
            self._restore(deployment, sight, seen, failure=seen.said)
        record = sight.record(seen.serving)
        if seen.state is RolloutState.DONE and record is not None:
            self._tidy(deployment, sight, record)
            self._apply_objects(replace(record, objects=[record.workload()]), record.revision)

    def _restore(self, deployment: str, sight: Sight, seen: Rollout, failure: str = "") -> None:
        """Apply what served before, in place of what is given up or has failed; end that where nothing served."""
        given_up, before = sight.record(seen.applying), sight.record(seen.serving)
        if given_up is not None and failure:
            self._apply_record(replace(given_up, failure=failure))
        if before is not None:
            if given_up is not None and given_up.repository == before.repository:
                self._repositories.configure(before.repository, before.configs)
            self._apply_objects(before, before.revision)
        elif given_up is not None:
            for which in sorted(given_up.references(), key=str):
                if is_ended_by_stop(which.kind):
                    self._delete(which)
        if before is not None and not failure:
            self._tidy(deployment, sight, before)
        self._look(deployment, is_live=True)

    def _tidy(self, deployment: str, sight: Sight, kept: RevisionRecord) -> None:
        """Remove what other revisions had and this one has not, and their records."""
        others = [record for record in sight.records if record.revision != kept.revision]
        for which in {which for record in others for which in record.references()} - kept.references():
            self._delete(which)
        self._repositories.forget(deployment, [kept.repository])
        for record in others:
            self._delete(_record_of(deployment, record.revision))

    def _change_traffic(self, record: RevisionRecord, before: RevisionRecord) -> None:
        """Change how traffic is split in all servers that run, and what those read that start later.

        Raises:
            ServingError: UNAVAILABLE if a server does not answer: it is tried again.
        """
        changed = [name for name, text in record.configs.items() if text != before.configs.get(name)]
        told: set[str] = set()
        for _ in range(2):  # those that started meanwhile may have read what was
            pods = self._look(record.deployment, is_live=True).new_pods()
            for pod in pods:
                address = self._addresses.pod_http(pod)
                if pod["metadata"]["uid"] not in told:
                    for name in changed:
                        change_traffic(address, before.key, name, traffic_of(record.configs[name]))
                    told.add(pod["metadata"]["uid"])
            self._repositories.configure(record.repository, record.configs)

    def _apply_record(self, record: RevisionRecord) -> None:
        self._watched("records").put(self._cluster.apply(to_secret(record, self._owner), force=True))

    def _apply_keys(self, deployment: str, key: str, keys: Sequence[str]) -> None:
        """Write the file of API keys; servers read it again when it changes."""
        name = object_name(deployment)
        digest = hashlib.sha256(key.encode()).hexdigest()
        text = "\n".join([f"platform admin sha256:{digest}", *keys]) + "\n"
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": keys_name(name), "annotations": {TITLE: deployment}},
            "data": {KEYS_FILE: b64encode(text.encode()).decode()},
        }
        self._cluster.apply(with_marks(secret, {OWNER: self._owner, OBJECT: name}, {}), force=True)

    def _delete(self, which: Reference) -> None:
        """Begin to remove an object, if there is one of ours."""
        found = self._cluster.get(which)
        if found is None:
            return
        if labels(found).get(OWNER) != self._owner:
            _log.warning("%s in namespace '%s' is not ours any more: it stays", which, self._cluster.namespace)
            return
        self._cluster.delete(found, which.kind)

    def _replica(self, pod: Plain) -> Replica:
        return Replica(pod["metadata"]["name"], is_ready(pod), restarts(pod), self._reasons.reason(pod))

    def _look(self, deployment: str, *, is_live: bool = False) -> Sight:
        """Return what there is of a deployment: as the watches know it, or as the API server says now."""
        name = object_name(deployment)
        found: dict[str, list[Plain]] = {}
        for what in ("workloads", "pods", "records"):
            watched = self._watched(what)
            known = watched.all()
            if is_live:
                kind, further = _WATCHED[what]
                listed, version = self._cluster.list(kind, labels=f"{OWNER}={self._owner}{further},{OBJECT}={name}")
                watched.put_all(listed, version, (OBJECT, name))
                known = listed
            found[what] = [each for each in known if labels(each).get(OBJECT) == name]
        return Sight(
            next(iter(found["workloads"]), None), found["pods"], tuple(from_secret(each) for each in found["records"])
        )

    def _watched(self, what: str) -> WatchedObjects:
        """Return the watch of workloads, pods or records, which begins when it is first asked for."""
        with self._beginning:
            if what not in self._watches:
                kind, further = _WATCHED[what]
                self._watches[what] = WatchedObjects(self._cluster, kind, f"{OWNER}={self._owner}{further}")
            return self._watches[what]


def _record_of(deployment: str, revision: int) -> Reference:
    return Reference(SECRET, record_name(object_name(deployment), revision))
