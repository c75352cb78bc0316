"""The target `kubernetes`: the objects of the Helm chart for each deployment, in a namespace of a cluster.

State is kept in the cluster: a record of each revision, and annotations that say which one serves. A
restarted platform finds it and continues where the previous process was interrupted: each step may be repeated. The
pods of a new revision replace the previous ones one by one; if they cannot be ready, the previous revision is applied
again.
"""

import contextlib
import json
import secrets
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from charonia.core.errors import Code, ServingError, invalid, unavailable
from charonia.platform.artifacts.store import ArtifactStore
from charonia.platform.data_folder import private_text
from charonia.platform.settings import KubernetesSettings
from charonia.platform.targets.api import Observed, Replica, RevisionPhase, Workload
from charonia.platform.targets.kubernetes.api import Cluster
from charonia.platform.targets.kubernetes.deployment_objects import DeploymentObjects
from charonia.platform.targets.kubernetes.objects import (
    EVENT,
    NODE,
    QUOTA,
    SECRET,
    ObjectKind,
    Plain,
    Reference,
    RevisionRecord,
    ServiceAddresses,
    is_ended_by_stop,
    keys_name,
    note_name,
    object_name,
    prepared,
    record_name,
    same,
)
from charonia.platform.targets.kubernetes.repositories import ModelRepositories, open_repositories
from charonia.platform.targets.kubernetes.rollout import (
    LOG_LINES,
    DeploymentSnapshot,
    Rollout,
    RolloutState,
    has_started,
    is_ready,
    needs_log,
    pod_reason,
    restarts,
    rollout,
)
from charonia.platform.targets.kubernetes.values import (
    chart_values,
    node_misfits,
    pod_need,
    quota_misfits,
    unsupported_requests,
    usual_values,
)
from charonia.platform.targets.server_calls import change_traffic, traffic_of

LOG_PODS_MAX = 10
"""Most servers whose logs are shown together."""

AUTOSCALER = "the autoscaler of the cluster"

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
"""Creates the objects of a workload, given the address of its repository."""


class KubernetesTarget:
    """Deployments in a namespace of a cluster. See `DeploymentTarget`.

    Args:
        owner: Name of this platform among all that use the namespace.
        problem: Returns why a workload cannot be rendered, "" if it can.
        prepare: Puts labels and annotations on objects, as `prepared`.
    """

    def __init__(
        self,
        cluster: Cluster,
        owner: str,
        render: Renderer,
        repositories: ModelRepositories,
        addresses: ServiceAddresses,
        problem: Callable[[Workload], str] = lambda _: "",
        *,
        name: str = "kubernetes",
        objects: Callable[[Cluster, str], DeploymentObjects] = DeploymentObjects,
        prepare: Callable[..., list[dict[str, Any]]] = prepared,
    ) -> None:
        self.name = name
        self._problem = problem
        self._cluster = cluster
        self._objects = objects(cluster, owner)
        self._prepare_objects = prepare
        self._render = render
        self._repositories = repositories
        self._addresses = addresses
        self._reasons = PodReasons(cluster)
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)

    def close(self) -> None:
        """Stop watching; deployments continue to run."""
        self._cluster.close()

    def problems(self, workload: Workload) -> Sequence[str]:
        need, is_new = pod_need(workload), self._objects.snapshot(workload.deployment).workload is None
        replicas = workload.spec.replicas.min if is_new else 1  # one more at a time
        return [
            *filter(None, [self._repositories.problem(), self._problem(workload)]),
            *unsupported_requests(workload),
            *node_misfits(need, self._readable(NODE)),
            *quota_misfits(need, replicas, self._readable(QUOTA)),
        ]

    def apply(self, workload: Workload) -> None:
        name, number = workload.deployment, workload.revision
        with self._locks[name]:
            snapshot = self._objects.snapshot(name, is_live=True)
            seen = rollout(snapshot, self._reasons.reason)
            if seen.state in (RolloutState.DONE, RolloutState.BROKEN):
                self._conclude(name, snapshot, seen)
                snapshot = self._objects.snapshot(name, is_live=True)
                seen = rollout(snapshot, self._reasons.reason)
            if seen.state is RolloutState.ENDING:
                raise unavailable(f"the servers of '{name}' are stopping", hint="wait until they have stopped")
            if seen.state is RolloutState.UNDER_WAY and seen.applying != number:
                raise unavailable(f"revision {seen.applying} of '{name}' is still being applied: {seen.said}")
            if number in (seen.serving, seen.applying if seen.state is RolloutState.UNDER_WAY else 0):
                return
            before = snapshot.record(seen.serving)
            record = self._prepare(workload, snapshot, before)
            self._objects.dry_run(record)
            if before is not None and same(record.objects, before.objects):
                self._change_traffic(record, before)
                serving = number
            else:
                self._repositories.configure(record.repository, record.configs)
                serving = seen.serving
            self._objects.put(record, serving, workload.keys)

    def scale(self, deployment: str, replicas: int) -> str:
        """Do nothing: a fixed number is part of the revision, otherwise the cluster decides. See `DeploymentTarget`."""
        return ""

    def abandon(self, deployment: str) -> None:
        with self._locks[deployment]:
            snapshot = self._objects.snapshot(deployment, is_live=True)
            seen = rollout(snapshot, self._reasons.reason)
            if seen.state in (RolloutState.UNDER_WAY, RolloutState.BROKEN):
                self._restore(deployment, snapshot, seen)

    def observe(self, deployment: str) -> Observed:
        snapshot = self._objects.snapshot(deployment)
        seen = rollout(snapshot, self._reasons.reason)
        lock = self._locks[deployment]
        if seen.state in (RolloutState.DONE, RolloutState.BROKEN) and lock.acquire(blocking=False):
            try:
                snapshot = self._objects.snapshot(deployment, is_live=True)
                seen = rollout(snapshot, self._reasons.reason)
                self._conclude(deployment, snapshot, seen)
                snapshot = self._objects.snapshot(deployment)
            finally:
                lock.release()
        if seen.state is RolloutState.ABSENT:
            return Observed()
        is_there = snapshot.workload is not None
        pods = (
            snapshot.active_pods() if seen.state is RolloutState.UNDER_WAY else snapshot.new_pods()
        )  # others are terminating
        record = snapshot.record(seen.serving)
        name = object_name(deployment)
        is_failed = _PHASES[seen.state] is RevisionPhase.FAILED
        return Observed(
            serving=seen.serving,
            applying=seen.applying,
            phase=_PHASES[seen.state],
            doing="" if is_failed else seen.said,
            reason=seen.said if is_failed else "",
            http=self._addresses.http(name, snapshot.workload) if snapshot.workload is not None else "",
            grpc=self._addresses.grpc(name) if is_there else "",
            metrics=self._addresses.metrics(name) if is_there else "",
            key=record.key if record is not None else "",
            replicas=tuple(map(self._replica, pods)) if is_there else (),
            wanted_replicas=int(snapshot.workload["spec"].get("replicas", 1)) if snapshot.workload is not None else 0,
            scaled_by="" if record is None or record.has_fixed_replicas() else AUTOSCALER,
        )

    def stop(self, deployment: str) -> None:
        with self._locks[deployment]:
            snapshot = self._objects.snapshot(deployment, is_live=True)
            for record in snapshot.records:
                for which in sorted(record.references(), key=str):
                    if is_ended_by_stop(which.kind):
                        self._objects.delete(which)
                if record.failure:
                    self._objects.apply_record(replace(record, failure=""))
            self._objects.snapshot(deployment, is_live=True)

    def remove(self, deployment: str) -> None:
        with self._locks[deployment]:
            snapshot = self._objects.snapshot(deployment, is_live=True)
            if snapshot.workload is not None:
                raise unavailable(f"the servers of '{deployment}' still run")
            if not snapshot.records:
                return
            self._repositories.remove_except(deployment, ())
            for which in {which for record in snapshot.records for which in record.references()}:
                self._objects.delete(which)
            for name in (keys_name(object_name(deployment)), note_name(object_name(deployment))):
                self._objects.delete(Reference(SECRET, name))
            for record in snapshot.records:
                self._objects.delete(_record_of(deployment, record.revision))
            self._objects.snapshot(deployment, is_live=True)

    def set_keys(self, deployment: str, keys: Sequence[str]) -> None:
        with self._locks[deployment]:
            records = self._objects.snapshot(deployment, is_live=True).records
            key = next((record.key for record in records if record.key), "")
            if key:
                self._objects.apply_keys(deployment, key, keys)

    def deployments(self) -> Sequence[str]:
        return self._objects.deployments()

    def log(self, deployment: str, lines: int) -> str:
        pods = self._objects.snapshot(deployment).active_pods()[-LOG_PODS_MAX:]
        texts = []
        for pod in pods:
            name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]["name"]
            text = self._cluster.log(name, container, lines)
            if not is_ready(pod) and restarts(pod):
                text = self._cluster.log(name, container, lines, previous=True) + text
            texts.append(f"==> {name} <==\n{text}" if len(pods) > 1 else text)
        return "\n".join(texts)

    def _readable(self, kind: ObjectKind) -> Sequence[Plain]:
        """Return the nodes, or the quotas of the namespace; none if the platform may not read them."""
        try:
            return self._cluster.nodes(kind) if kind == NODE else self._cluster.list(kind)
        except ServingError as error:
            if error.code is Code.UNAVAILABLE:
                raise
            return ()

    def _prepare(
        self, workload: Workload, snapshot: DeploymentSnapshot, before: RevisionRecord | None
    ) -> RevisionRecord:
        if problem := self._repositories.problem():
            raise invalid(problem)
        address = self._repositories.address(workload)
        rendered = self._render(workload, address)
        present = before.objects if before is not None else ()
        objects = self._prepare_objects(rendered, self._objects.owner, workload.deployment, workload.revision, present)
        self._repositories.publish(workload)
        key = next((record.key for record in snapshot.records if record.key), "") or secrets.token_urlsafe(_KEY_BYTES)
        return RevisionRecord(
            deployment=workload.deployment,
            revision=workload.revision,
            objects=objects,
            repository=address,
            configs={model.name: model.config for model in workload.models},
            key=key,
            replicas_min=workload.spec.replicas.min,
        )

    def _conclude(self, deployment: str, snapshot: DeploymentSnapshot, seen: Rollout) -> None:
        """Record the outcome of a revision in the cluster. Repeated if it is interrupted."""
        if seen.state is RolloutState.BROKEN:
            self._restore(deployment, snapshot, seen, failure=seen.said)
        record = snapshot.record(seen.serving)
        if seen.state is RolloutState.DONE and record is not None:
            self._tidy(deployment, snapshot, record)
            self._objects.apply_objects(replace(record, objects=[record.workload()]), record.revision)

    def _restore(self, deployment: str, snapshot: DeploymentSnapshot, seen: Rollout, failure: str = "") -> None:
        """Apply the serving revision again, in place of a cancelled or failed one; stop if nothing served."""
        given_up, before = snapshot.record(seen.applying), snapshot.record(seen.serving)
        if given_up is not None and failure:
            self._objects.apply_record(replace(given_up, failure=failure))
        if before is not None:
            if given_up is not None and given_up.repository == before.repository:
                self._repositories.configure(before.repository, before.configs)
            self._objects.apply_objects(before, before.revision)
        elif given_up is not None:
            for which in sorted(given_up.references(), key=str):
                if is_ended_by_stop(which.kind):
                    self._objects.delete(which)
        if before is not None:
            self._tidy(deployment, snapshot, before, failed=seen.applying if failure else 0)
        self._objects.snapshot(deployment, is_live=True)

    def _tidy(self, deployment: str, snapshot: DeploymentSnapshot, kept: RevisionRecord, failed: int = 0) -> None:
        """Remove objects of other revisions that this one lacks, and their records except that of a failed one."""
        others = [record for record in snapshot.records if record.revision != kept.revision]
        for which in {which for record in others for which in record.references()} - kept.references():
            self._objects.delete(which)
        self._repositories.remove_except(deployment, [kept.repository])
        for record in others:
            if record.revision != failed:
                self._objects.delete(_record_of(deployment, record.revision))

    def _change_traffic(self, record: RevisionRecord, before: RevisionRecord) -> None:
        """Change the traffic split in all running servers, and in the configuration that later servers read."""
        changed = [name for name, text in record.configs.items() if text != before.configs.get(name)]
        told: dict[str, str] = {}
        try:
            for _ in range(2):  # servers that started during the first pass may have read the old split
                for pod in self._objects.snapshot(record.deployment, is_live=True).new_pods():
                    if pod["metadata"]["uid"] not in told:
                        address = told[pod["metadata"]["uid"]] = self._addresses.pod_http(pod)
                        self._tell(address, before.key, record.configs, changed)
                self._repositories.configure(record.repository, record.configs)
        except ServingError:
            self._repositories.configure(before.repository, before.configs)
            for address in told.values():
                with contextlib.suppress(ServingError):  # retried with the revision
                    self._tell(address, before.key, before.configs, changed)
            raise

    def _tell(self, address: str, key: str, configs: Mapping[str, str], models: Sequence[str]) -> None:
        for name in models:
            change_traffic(address, key, name, traffic_of(configs[name]))

    def _replica(self, pod: Plain) -> Replica:
        is_well, reason = is_ready(pod), self._reasons.reason(pod)
        if not is_well and not reason and has_started(pod):
            reason = "it answers, but not all of its models are ready"
        return Replica(
            name=pod["metadata"]["name"],
            is_ready=is_well,
            restarts=restarts(pod),
            reason=reason,
            doing="" if is_well or reason else "it starts",
            http=self._addresses.pod_http(pod),
            metrics=self._addresses.pod_metrics(pod),
        )


def _record_of(deployment: str, revision: int) -> Reference:
    return Reference(SECRET, record_name(object_name(deployment), revision))


ASKED_S = 3.0
"""Pause between two queries about an unchanged pod."""

PODS_MAX = 2000
"""Most pods whose reasons are remembered."""


class PodReasons:
    """Explains why pods do not answer. Any thread may ask."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[tuple[object, object], tuple[float, str]] = {}
        self._lock = threading.Lock()

    def reason(self, pod: Plain) -> str:
        """Return why a pod does not answer, "" if nothing is wrong with it."""
        if is_ready(pod):
            return ""
        state, now_s = (pod["metadata"].get("uid"), pod["metadata"].get("resourceVersion")), time.monotonic()
        with self._lock:
            asked_s, text = self._known.get(state, (-ASKED_S, ""))
            if now_s - asked_s < ASKED_S:
                return text
            if len(self._known) >= PODS_MAX:
                self._known.clear()
        text = self._ask(pod)
        with self._lock:
            self._known[state] = (now_s, text)
        return text

    def _ask(self, pod: Plain) -> str:
        name, log = pod["metadata"]["name"], ""
        container = needs_log(pod)
        if container:
            with contextlib.suppress(ServingError):
                log = self._cluster.log(name, container, LOG_LINES, previous=restarts(pod) > 0)
        found = pod_reason(pod, log=log)
        if found:
            return found
        with contextlib.suppress(ServingError):
            fields = f"involvedObject.name={name},type=Warning"
            events = sorted(self._cluster.list(EVENT, fields=fields), key=_time)
            return pod_reason(pod, events)
        return ""


def _time(event: Plain) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


OWNER_FILE = "kubernetes-owner"
"""File of the data folder with the name of this platform, if no setting has it."""


def open_kubernetes(settings: KubernetesSettings, store: ArtifactStore, data: Path) -> KubernetesTarget:
    """Return the target, without contacting the cluster."""
    cluster = Cluster(settings)
    chart = Chart(settings.chart, settings.helm, settings.values)

    def render(workload: Workload, repository: str) -> Sequence[Plain]:
        name = object_name(workload.deployment)
        values = chart_values(workload, repository, settings)
        return chart.render(name, cluster.namespace, usual_values(workload), values)

    return KubernetesTarget(
        cluster,
        owner_of(settings, data),
        render,
        open_repositories(store, settings.claim),
        ServiceAddresses(cluster.namespace, settings.proxy),
        lambda _: chart.problem(),
    )


def owner_of(settings: KubernetesSettings, data: Path) -> str:
    """Return the name of this platform among all that use the namespace: from the setting, or from its data folder."""
    return settings.owner or private_text(data / OWNER_FILE, 8)


HELM_S_MAX = 30.0
"""Longest time of a run."""

_HERE = Path(__file__).parents
_PLACES = (_HERE[3] / "deploy" / "helm" / "charonia", _HERE[5] / "deploy" / "helm" / "charonia")
"""Of the wheel, and of a checkout."""

_INSTALL = "install Helm 3.14 or newer (https://helm.sh), or name the program with --helm"


class Chart:
    """The chart.

    Args:
        folder: Its path, "" for the chart that comes with Charonia.
        values: Path of an additional file of values, "" for none.
    """

    def __init__(self, folder: str, helm: str, values: str) -> None:
        self._folder = Path(folder).expanduser() if folder else next(filter(Path.is_dir, _PLACES), _PLACES[-1])
        self._helm = helm
        self._values = Path(values).expanduser() if values else None

    def problem(self) -> str:
        """Return why it cannot be rendered, "" if it can."""
        if not (self._folder / "Chart.yaml").is_file():
            return f"--kubernetes-chart: there is no chart in '{self._folder}'"
        if self._values is not None and not self._values.is_file():
            return f"--kubernetes-values: the file '{self._values}' does not exist"
        try:
            subprocess.run([self._helm, "version"], capture_output=True, timeout=HELM_S_MAX, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            return f"--helm: '{self._helm}' cannot be run: {error} (hint: {_INSTALL})"
        return ""

    def render(self, name: str, namespace: str, usual: Mapping[str, Any], values: Mapping[str, Any]) -> Sequence[Plain]:
        """Return the objects of the chart.

        Args:
            usual: Values that the file of values may override.
        """
        with tempfile.TemporaryDirectory(prefix="charonia-chart-") as folder:
            files = [Path(folder) / "usual.json", *([self._values] if self._values else []), Path(folder) / "own.json"]
            files[0].write_text(json.dumps(usual), encoding="utf-8")
            files[-1].write_text(json.dumps(values), encoding="utf-8")
            command = [self._helm, "template", name, str(self._folder), f"--namespace={namespace}", "--skip-tests"]
            try:
                ended = subprocess.run(
                    [*command, *(f"--values={path}" for path in files)],
                    capture_output=True,
                    text=True,
                    timeout=HELM_S_MAX,
                    check=False,
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise unavailable(f"'{self._helm}' cannot be run: {error}", hint=_INSTALL) from None
        if ended.returncode:
            raise invalid(f"the chart does not take these values: {' '.join(ended.stderr.split())}")
        return [each for each in yaml.load_all(ended.stdout, yaml.CSafeLoader) if each]
