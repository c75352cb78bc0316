"""The API server that is busy, away, forgetful or of another opinion; and what is not ours."""

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tests.platform.targets.kubernetes.conftest import NAME, OBJECT, ClusterStage, serves, workload
from tests.support.kubernetes_api import Fault, kubeconfig
from tests.support.kubernetes_controllers import Fate
from tests.support.process import eventually

from charonia.core.errors import Code, ServingError
from charonia.platform.settings import KubernetesSettings
from charonia.platform.targets.api import RevisionPhase
from charonia.platform.targets.kubernetes import api, deployment_objects
from charonia.platform.targets.kubernetes.api import Cluster
from charonia.platform.targets.kubernetes.objects import Plain


class KilledError(BaseException):
    """The process has ended."""


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "RETRY_S", 0.01)
    monkeypatch.setattr(deployment_objects, "LISTED_S", 0.05)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("PATCH", "/deployments/", 500, times=2),
        Fault("PATCH", "/services/", 503),
        Fault("PATCH", "/secrets/", 429, headers={"Retry-After": "0"}),
        Fault("GET", "/deployments", 0, times=2),
        Fault("PATCH", "/deployments/", 0, is_done=True),  # it was applied, and the answer is lost
        Fault("PATCH", "/secrets/", 409, body={"reason": "Conflict", "message": "the object has been modified"}),
    ],
    ids=str,
)
def test_a_request_that_fails_for_a_while_is_repeated(stage: ClusterStage, fault: Fault) -> None:
    target = stage.target()
    stage.api.faults.append(fault)

    target.apply(workload(1))

    assert serves(target, 1)
    assert fault not in stage.api.faults


def test_an_api_server_that_is_not_able_to_answer_is_unavailable(stage: ClusterStage) -> None:
    target = stage.target()
    stage.api.faults.append(Fault("PATCH", "/deployments/", 500, times=api.RETRIES_MAX + 1))

    with pytest.raises(ServingError, match="is unavailable") as raised:
        target.apply(workload(1))

    assert raised.value.code is Code.UNAVAILABLE
    target.apply(workload(1))
    assert serves(target, 1)


def test_what_the_platform_may_not_do_names_the_role(stage: ClusterStage) -> None:
    said = {"message": 'deployments.apps is forbidden: User "p" cannot patch resource "deployments"'}
    stage.api.faults.append(Fault("PATCH", "/deployments/", 403, body=said))

    with pytest.raises(ServingError, match=r"cannot patch resource.*the Role that the platform needs") as raised:
        stage.target().apply(workload(1))

    assert raised.value.code is Code.INVALID_ARG


@pytest.mark.parametrize("said", ['admission webhook "policy" denied the request: no', "exceeded quota: team"])
def test_what_admission_refuses_is_no_matter_of_the_role(stage: ClusterStage, said: str) -> None:
    stage.api.faults.append(Fault("PATCH", f"/deployments/{OBJECT}?dryRun", 403, body={"message": said}))

    with pytest.raises(ServingError, match=f"Deployment '{OBJECT}': Kubernetes refuses it: {said}") as raised:
        stage.target().apply(workload(1))

    assert (raised.value.code, raised.value.hint) == (Code.INVALID_ARG, "")


def with_token_program(stage: ClusterStage, folder: Path, token: str) -> None:
    """Let the kubeconfig name a program that makes tokens, as those of clouds do."""
    said = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": token},
    }
    (folder / "credential").write_text(json.dumps(said))
    program = {"apiVersion": said["apiVersion"], "command": "cat", "args": [str(folder / "credential")]}
    document = json.loads(kubeconfig(stage.api))
    document["users"] = [{"name": "u", "user": {"exec": program}}]
    stage.config.write_text(json.dumps(document))


def test_a_token_that_has_expired_is_made_anew(stage: ClusterStage, tmp_path: Path) -> None:
    stage.api.token = "first"
    with_token_program(stage, tmp_path, "first")
    target = stage.target()
    target.apply(workload(1))
    assert serves(target, 1)

    stage.api.token = "second"
    with_token_program(stage, tmp_path, "second")
    target.apply(workload(2))

    assert serves(target, 2)


def test_who_is_not_known_to_the_cluster_is_asked_to_sign_in(stage: ClusterStage, tmp_path: Path) -> None:
    stage.api.token = "first"
    with_token_program(stage, tmp_path, "first")
    target = stage.target()
    target.apply(workload(1))
    assert serves(target, 1)

    stage.api.token = "second"
    (tmp_path / "credential").write_text("no credential")

    with pytest.raises(ServingError, match="the cluster does not know who asks") as raised:
        target.apply(workload(2))

    assert raised.value.code is Code.UNAVAILABLE


def test_nodes_that_may_not_be_read_are_not_compared(stage: ClusterStage) -> None:
    node = {"apiVersion": "v1", "metadata": {"name": "one"}}
    stage.api.put("nodes", node, {"allocatable": {"cpu": "2", "memory": "4Gi"}})
    target, large = stage.target(), workload(1, device={"cpu_cores": 8})

    assert list(target.problems(large)) == ["device.cpu_cores: the largest node of the cluster has 2, got 8"]
    stage.api.faults.append(Fault("GET", "/nodes", 403))
    assert list(target.problems(large)) == []


def test_a_namespace_that_may_not_be_read_says_which_role_is_missing(stage: ClusterStage) -> None:
    said = {"message": 'secrets is forbidden: User "p" cannot list resource "secrets" in the namespace "models"'}
    stage.api.faults.append(Fault("GET", "/secrets", 403, times=10_000, body=said))
    target = stage.target()

    with pytest.raises(ServingError, match=r"cannot list resource.*the Role that the platform needs") as raised:
        target.observe(NAME)

    assert raised.value.code is Code.UNAVAILABLE


def test_a_namespace_that_is_not_there_is_named(stage: ClusterStage) -> None:
    document = json.loads(kubeconfig(stage.api))
    document["contexts"][0]["context"]["namespace"] = "nowhere"
    stage.config.write_text(json.dumps(document))

    with pytest.raises(ServingError, match=r'namespaces "nowhere" not found.*does the namespace exist') as raised:
        stage.target().apply(workload(1))

    assert raised.value.code is Code.NOT_FOUND


def test_what_was_seen_does_not_count_for_ever(stage: ClusterStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment_objects, "STALE_S_MAX", 0.05)
    monkeypatch.setattr(deployment_objects, "AGAIN_S", 0.05)
    target = stage.target()
    target.apply(workload(1))
    assert serves(target, 1)

    stage.api.faults.append(Fault("GET", "labelSelector", 503, times=10_000))

    def is_away() -> bool:
        try:
            target.observe(NAME)
        except ServingError as error:
            return error.code is Code.UNAVAILABLE
        return False

    assert eventually(is_away)
    stage.api.faults.clear()
    assert eventually(lambda: not is_away())
    assert serves(target, 1)


def test_what_somebody_else_has_changed_is_not_taken_from_them(stage: ClusterStage) -> None:
    target = stage.target()
    target.apply(workload(1))
    assert serves(target, 1)
    container = ("spec", "template", "spec", "containers", ("name", "server"), "image")
    stage.api.change("deployments", OBJECT, container, "charonia:debug")

    with pytest.raises(ServingError) as raised:
        target.apply(workload(2))

    assert raised.value.code is Code.ALREADY_EXISTS
    assert f"Deployment '{OBJECT}' was changed by another field manager" in raised.value.message
    assert 'conflict with "kubectl-edit"' in raised.value.message
    assert serves(target, 1)


def test_objects_of_others_stay_as_they_are(stage: ClusterStage) -> None:
    service = {"apiVersion": "v1", "metadata": {"name": OBJECT}, "spec": {"selector": {"app": "shop"}}}
    before = stage.api.put("services", service)

    with pytest.raises(
        ServingError, match=f"Service '{OBJECT}' in namespace 'models' does not belong to this platform"
    ):
        stage.target().apply(workload(1))

    assert stage.api.get("services", OBJECT) == before
    assert stage.api.names("deployments") == []


def test_two_platforms_share_a_namespace_and_do_not_see_each_other(stage: ClusterStage) -> None:
    one, other = stage.target("one"), stage.target("other")
    one.apply(workload(1))
    assert serves(one, 1)

    assert list(other.deployments()) == []
    assert other.observe(NAME).phase is RevisionPhase.ABSENT
    other.remove(NAME)
    with pytest.raises(ServingError, match="does not belong to this platform"):
        other.apply(workload(1))
    assert serves(one, 1)


def test_an_object_that_is_not_ours_any_more_is_not_removed(stage: ClusterStage) -> None:
    target = stage.target()
    target.apply(workload(1))
    assert serves(target, 1)
    stage.api.change("services", OBJECT, ("metadata", "labels", "charonia.dev/platform"), "somebody")

    target.stop(NAME)
    assert eventually(lambda: target.observe(NAME).phase is RevisionPhase.ABSENT)
    target.remove(NAME)

    assert stage.api.names("services") == [OBJECT]
    assert stage.api.names("secrets") == stage.api.names("deployments") == []


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_platform_that_is_killed_while_it_applies_is_followed_by_one_that_goes_on(
    stage: ClusterStage, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = stage.target()
    target.apply(workload(1, keys=True))
    assert serves(target, 1)
    writes = itertools.count(1)
    real = target._cluster._asked

    async def asked(method: str, *arguments: Any, **more: Any) -> Plain:
        is_trial = ("dryRun", "All") in arguments[1]
        if method != "GET" and not is_trial and next(writes) == cut:
            raise KilledError
        return await real(method, *arguments, **more)

    monkeypatch.setattr(target._cluster, "_asked", asked)
    with contextlib.suppress(KilledError):
        target.apply(workload(2, keys=True))
        serves(target, 2)
    after = stage.target()

    assert after.observe(NAME).serving in (1, 2)
    if after.observe(NAME).serving == 1:
        after.apply(workload(2, keys=True))
    assert serves(after, 2)
    assert [each for each in stage.api.names("secrets") if "-rev-" in each] == [f"{OBJECT}-rev-2"]
    assert after.observe(NAME).key


def test_a_pod_that_waits_for_a_node_says_what_is_missing(stage: ClusterStage) -> None:
    stage.nodes.fate = lambda pod: Fate.UNSCHEDULABLE
    target = stage.target()

    target.apply(workload(1))

    expected = "it waits for a node: 0/3 nodes are available"
    assert eventually(lambda: expected in target.observe(NAME).doing), target.observe(NAME)
    seen = target.observe(NAME)
    assert seen.phase is RevisionPhase.STARTING
    assert seen.replicas[0].reason.endswith("(hint: no node has enough cpu free: ask for less, or add a node)")
    stage.nodes.fate = lambda pod: Fate.READY
    assert serves(target, 1)
    assert target.observe(NAME).replicas[0].reason == ""


@pytest.mark.parametrize("text", ["", "no: [yaml", "kind: Config\ncurrent-context: away\n"])
def test_a_kubeconfig_that_cannot_be_used_is_said_at_the_start(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config"
    if text:
        path.write_text(text)

    with pytest.raises(ServingError, match=f"--kubernetes: '{path}' cannot be used: ") as raised:
        Cluster(KubernetesSettings(str(path)))

    assert raised.value.code is Code.INVALID_ARG


def test_outside_of_a_pod_there_is_no_cluster_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    with pytest.raises(ServingError, match="--kubernetes: 'in-cluster' cannot be used: "):
        Cluster(KubernetesSettings("in-cluster"))
