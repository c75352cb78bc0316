"""What a revision changes in a cluster, and what stays."""

import base64
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from tests.platform.targets.kubernetes.conftest import NAME, OBJECT, ClusterStage, serves, workload
from tests.support.kubernetes_api import Fault
from tests.support.kubernetes_controllers import Fate
from tests.support.process import eventually

from charonia.core.errors import ServingError
from charonia.platform.targets.api import RevisionPhase
from charonia.platform.targets.kubernetes.rollout import DeploymentSnapshot


def test_only_what_has_to_be_different_begins_pods_anew(stage: ClusterStage) -> None:
    target = stage.target()
    target.apply(workload(1, version=1))
    assert serves(target, 1)
    before = stage.api.names("pods")

    target.apply(workload(2, version=1, replicas=2))
    assert serves(target, 2)
    assert set(before) < set(stage.api.names("pods"))

    target.apply(workload(3, version=2, replicas=2))
    assert serves(target, 3)
    assert eventually(lambda: not set(before) & set(stage.api.names("pods")))


def test_how_traffic_is_split_is_changed_in_all_servers_that_run(stage: ClusterStage) -> None:
    target = stage.target()
    both: dict[str, Any] = {"version": 1, "replicas": 2}
    target.apply(workload(1, **both))
    assert serves(target, 1)
    before, told = stage.api.names("pods"), '{"weights": {"1": 100}}'

    target.apply(workload(2, traffic=told, **both))

    seen = target.observe(NAME)
    assert (seen.serving, seen.wanted_replicas, seen.scaled_by) == (2, 2, "")
    assert [replica.name for replica in seen.replicas] == before == stage.api.names("pods")
    assert all(f"/pods/{replica.name}:8000/proxy" in replica.http for replica in seen.replicas)
    assert all(replica.metrics.endswith(f"/pods/{replica.name}:8002/proxy/metrics") for replica in seen.replicas)
    path = "/v2/models/echo/traffic"
    said = {"weights": {"1": 100}, "sticky": None, "shadow": None}
    assert sorted(stage.api.served, key=str) == [(pod, "POST", path, said) for pod in before]
    [configs] = stage.repositories.configs.values()
    assert "traffic" in configs["echo"]


def test_traffic_that_a_server_is_not_told_of_is_no_revision(stage: ClusterStage) -> None:
    target = stage.target()
    target.apply(workload(1, version=1))
    assert serves(target, 1)
    stage.api.answer = lambda *_: web.Response(status=503)

    with pytest.raises(ServingError, match="503"):
        target.apply(workload(2, version=1, traffic='{"weights": {"1": 100}}'))

    assert target.observe(NAME).serving == 1
    [configs] = stage.repositories.configs.values()
    assert "traffic" not in configs["echo"]


def test_what_a_revision_no_longer_has_is_removed(stage: ClusterStage) -> None:
    target = stage.target()
    target.apply(workload(1, version=1, replicas={"max": 4}))
    assert serves(target, 1)
    assert stage.api.names("horizontalpodautoscalers") == [OBJECT]

    target.apply(workload(2, version=2))
    assert serves(target, 2)

    assert stage.api.names("horizontalpodautoscalers") == []
    assert stage.api.names("services") == [OBJECT]
    assert stage.api.names("secrets") == [f"{OBJECT}-keys", f"{OBJECT}-rev-2"]
    assert len(stage.repositories.configs) == 1


def test_a_revision_that_is_refused_half_way_leaves_nothing(stage: ClusterStage) -> None:
    target = stage.target()
    target.apply(workload(1))
    assert serves(target, 1)
    denied = {"message": 'admission webhook "policy" denied the request: images need a digest'}
    stage.api.faults.append(Fault("PATCH", f"/deployments/{OBJECT}?dryRun=All", 403, body=denied))

    with pytest.raises(ServingError, match="images need a digest"):
        target.apply(workload(2, replicas={"max": 4}))  # its autoscaler comes before its Deployment

    assert stage.api.names("horizontalpodautoscalers") == []
    assert stage.api.names("secrets") == [f"{OBJECT}-keys", f"{OBJECT}-rev-1"]
    service = stage.api.get("services", OBJECT)
    assert service is not None
    assert service["metadata"]["annotations"]["charonia.dev/revision"] == "1"
    assert serves(target, 1)
    target.apply(workload(2, replicas={"max": 4}))
    assert serves(target, 2)


def test_the_number_of_replicas_is_left_to_the_autoscaler(stage: ClusterStage) -> None:
    target = stage.target()
    target.apply(workload(1, version=1, replicas=3))
    assert serves(target, 1)

    target.apply(workload(2, version=1, replicas={"min": 2, "max": 6}))  # it has taken no part yet
    assert serves(target, 2)
    assert target.observe(NAME).scaled_by == "the autoscaler of the cluster"
    with_ours = stage.api.get("deployments", OBJECT)
    stage.api.change("deployments", OBJECT, ("spec", "replicas"), 5, manager="kube-controller-manager")
    target.apply(workload(3, version=2, replicas={"min": 2, "max": 6}))
    assert serves(target, 3)
    with_its = stage.api.get("deployments", OBJECT)

    assert with_ours is not None
    assert with_its is not None
    assert (with_ours["spec"]["replicas"], with_its["spec"]["replicas"]) == (3, 5)


def test_a_fixed_number_of_replicas_is_taken_back_from_the_autoscaler(stage: ClusterStage) -> None:
    target = stage.target()
    target.apply(workload(1, version=1, replicas={"min": 2, "max": 6}))
    assert serves(target, 1)
    stage.api.change("deployments", OBJECT, ("spec", "replicas"), 5, manager="kube-controller-manager")

    target.apply(workload(2, version=1, replicas=3))
    assert serves(target, 2)

    found = stage.api.get("deployments", OBJECT)
    assert found is not None
    assert found["spec"]["replicas"] == 3
    target.apply(workload(3, version=1, replicas=4))  # what was taken is ours as an update, too
    assert serves(target, 3)
    stage.api.change("deployments", OBJECT, ("spec", "replicas"), 7, manager="kubectl")
    with pytest.raises(ServingError, match=r'changed by another field manager: .*replicas.*conflict with "kubectl"'):
        target.apply(workload(4, version=2, replicas=3))


def test_a_pod_that_was_evicted_is_no_server_any_more_once_another_one_is_there(stage: ClusterStage) -> None:
    target = stage.target()
    target.apply(workload(1))
    assert serves(target, 1)
    [pod] = stage.api.all("pods")
    evicted = {"phase": "Failed", "reason": "Evicted", "message": "low on memory"}
    others = DeploymentSnapshot(stage.api.get("deployments", OBJECT), [pod, {**pod, "status": evicted}])
    alone = DeploymentSnapshot(stage.api.get("deployments", OBJECT), [{**pod, "status": evicted}])

    assert others.active_pods() == [pod]
    assert [each["status"] for each in alone.active_pods()] == [evicted]


def test_keys_are_those_of_now_also_when_an_earlier_revision_comes_back(stage: ClusterStage) -> None:
    target = stage.target()
    target.apply(workload(1, keys=True))
    assert serves(target, 1)
    key = target.observe(NAME).key

    target.set_keys(NAME, ["ada infer sha256:abc"])
    marks = {"2": Fate.SLOW}
    stage.nodes.fate = lambda pod: marks.get(pod["metadata"]["annotations"]["charonia.dev/template"], Fate.READY)
    second = workload(2, keys=True)
    target.apply(replace(second, keys=("ada infer sha256:abc",)))
    target.abandon(NAME)
    assert serves(target, 1)

    secret = stage.api.get("secrets", f"{OBJECT}-keys")
    assert secret is not None
    lines = base64.b64decode(secret["data"]["keys.txt"]).decode().splitlines()
    assert [line.split()[:2] for line in lines] == [["platform", "admin"], ["ada", "infer"]]
    assert key
    assert target.observe(NAME).key == key
    assert key not in str(secret)


def test_a_broken_revision_leaves_no_pod_of_its_own(stage: ClusterStage) -> None:
    target = stage.target()
    target.apply(workload(1))
    assert serves(target, 1)
    before = stage.api.names("pods")
    marks = {"2": Fate.CRASHES}
    stage.nodes.fate = lambda pod: marks.get(pod["metadata"]["annotations"]["charonia.dev/template"], Fate.READY)

    target.apply(workload(2))
    assert eventually(lambda: target.observe(NAME).phase is RevisionPhase.FAILED)
    seen = target.observe(NAME)

    assert (seen.serving, seen.applying) == (1, 2)
    assert "its server ends with exit code 1, 3 times so far" in seen.reason
    assert eventually(lambda: stage.api.names("pods") == before)
    assert all(replica.is_ready for replica in target.observe(NAME).replicas)


def test_the_log_is_that_of_all_servers(stage: ClusterStage) -> None:
    target = stage.target()
    target.apply(workload(1, replicas=2))
    assert serves(target, 1)
    one, other = stage.api.names("pods")
    stage.api.logs = {one: "a\nb\nc\n", other: "d\n"}

    assert sorted(target.log(NAME, 2).split("==> ")[1:]) == [f"{one} <==\nb\nc\n\n", f"{other} <==\nd\n"]
