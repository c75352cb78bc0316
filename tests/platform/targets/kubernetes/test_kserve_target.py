"""The target `kserve` keeps to what targets promise, in a cluster whose controllers do what KServe does."""

from dataclasses import replace
from typing import Any

import pytest
from tests.platform.targets.kubernetes.conftest import NAME, OBJECT, ClusterStage, serves, workload
from tests.support.kubernetes_api import NAMESPACE, Fault, Plain
from tests.support.kubernetes_controllers import Fate
from tests.support.process import eventually

from charonia.core.errors import ServingError
from charonia.platform.targets.api import DeploymentTarget, RevisionPhase, Workload
from charonia.platform.targets.kubernetes.objects import object_name
from charonia.testing.target_suite import TargetCase, TargetSuite

PREDICTOR = f"{OBJECT}-predictor"


class TestKserveTarget(TargetSuite):
    @pytest.fixture
    def target_case(self, stage: ClusterStage) -> TargetCase:
        fates: dict[str, Fate] = {}

        def fate(pod: Plain) -> Fate:
            return fates.get(pod["metadata"]["annotations"]["charonia.dev/template"], Fate.READY)

        def with_fate(revision: int, fate: Fate) -> Workload:
            fates[str(revision)] = fate
            return workload(revision)

        def scale(target: DeploymentTarget, deployment: str, replicas: int) -> None:
            assert target.scale(deployment, replicas) == ""
            name = object_name(deployment)
            service, present = (
                stage.api.get("inferenceservices", name),
                stage.api.get("deployments", f"{name}-predictor"),
            )
            most = service["spec"]["predictor"]["maxReplicas"] if service else 0
            if present and present["spec"]["replicas"] != replicas <= most:
                stage.api.change("deployments", f"{name}-predictor", ("spec", "replicas"), replicas)

        stage.nodes.fate = fate
        return TargetCase(
            make=stage.kserve_target,
            workload=lambda revision: with_fate(revision, Fate.READY),
            broken=lambda revision: with_fate(revision, Fate.CRASHES),
            slow=lambda revision: with_fate(revision, Fate.SLOW),
            wait=lambda condition: eventually(condition, 10),
            scale=scale,
        )


def test_an_inference_service_that_kserve_refuses_says_why(stage: ClusterStage) -> None:
    stage.nodes.invalid = "the runtime does not support the protocol"
    target = stage.kserve_target()

    target.apply(workload(1))

    assert eventually(lambda: target.observe(NAME).phase is RevisionPhase.FAILED, 10), target.observe(NAME)
    seen = target.observe(NAME)
    assert seen.reason == "KServe: the runtime does not support the protocol"
    assert stage.api.names("inferenceservices") == []
    stage.nodes.invalid = ""
    target.apply(workload(2))
    assert serves(target, 2), target.observe(NAME)


def test_a_pod_without_a_node_says_why_and_what_serves_stays(stage: ClusterStage) -> None:
    target = stage.kserve_target()
    target.apply(workload(1))
    assert serves(target, 1)
    before = stage.api.names("pods")
    stage.nodes.fate = lambda pod: (
        Fate.UNSCHEDULABLE if pod["metadata"]["annotations"]["charonia.dev/template"] == "2" else Fate.READY
    )

    target.apply(workload(2))

    expected = "no node has enough cpu free"
    assert eventually(lambda: expected in target.observe(NAME).doing, 10), target.observe(NAME)
    assert target.observe(NAME).serving == 1
    target.abandon(NAME)
    assert serves(target, 1)
    assert eventually(lambda: stage.api.names("pods") == before, 10)


def test_the_runtime_of_a_service_that_is_refused_is_that_of_the_one_that_serves(stage: ClusterStage) -> None:
    target = stage.kserve_target()
    target.apply(workload(1))
    assert serves(target, 1)
    before, pods = stage.api.get("servingruntimes", OBJECT), stage.api.names("pods")
    assert before is not None
    denied = {"message": 'admission webhook "inferenceservice.kserve" denied the request: no'}
    stage.api.faults.append(Fault("PATCH", f"/inferenceservices/{OBJECT}?dryRun=All", 403, body=denied))

    with pytest.raises(ServingError, match="denied the request"):
        target.apply(workload(2, device={"memory_mib": 4096}))  # which the runtime says

    after = stage.api.get("servingruntimes", OBJECT)
    assert after is not None
    assert after["spec"] == before["spec"]
    assert serves(target, 1)
    assert stage.api.names("pods") == pods


def test_pods_stay_when_bounds_or_traffic_change(stage: ClusterStage) -> None:
    target = stage.kserve_target()
    target.apply(workload(1))
    assert serves(target, 1)
    before = stage.api.names("pods")

    target.apply(workload(2, version=1, replicas={"max": 3}))
    assert serves(target, 2)
    target.apply(workload(3, version=1, replicas={"max": 3}, traffic='{"weights": {"1": 1}}'))
    assert serves(target, 3)

    assert stage.api.names("pods") == before
    bounds = stage.api.get("inferenceservices", OBJECT)
    assert bounds is not None
    assert bounds["spec"]["predictor"]["maxReplicas"] == 3
    assert [(name, method) for name, method, *_ in stage.api.served] == [(before[0], "POST")]


def test_its_address_is_that_of_the_inference_service(stage: ClusterStage) -> None:
    target = stage.kserve_target()
    target._addresses = replace(target._addresses, proxy="")
    target.apply(workload(1))

    assert serves(target, 1)
    seen = target.observe(NAME)
    assert (seen.http, seen.grpc) == (f"http://{PREDICTOR}.{NAMESPACE}.svc.cluster.local", "")
    assert seen.replicas[0].http == "http://127.0.0.1:8080"


def test_neither_target_takes_what_the_other_has(stage: ClusterStage) -> None:
    ours, others = stage.kserve_target(), stage.target()
    ours.apply(workload(1))
    assert serves(ours, 1)

    assert (list(ours.deployments()), list(others.deployments())) == ([NAME], [])
    with pytest.raises(ServingError, match="does not belong to this platform"):
        stage.kserve_target(owner="another").apply(workload(1))


def test_a_service_of_the_same_name_that_was_there_before_does_not_count(stage: ClusterStage) -> None:
    target = stage.kserve_target()
    target.apply(workload(1))
    assert serves(target, 1)
    service: dict[str, Any] = stage.api.get("inferenceservices", OBJECT) or {}
    stage.api.delete("inferenceservices", OBJECT)  # by somebody
    assert eventually(lambda: target.observe(NAME).phase is RevisionPhase.ABSENT, 10)
    spec = {key: service[key] for key in ("apiVersion", "spec")}
    kept = {key: service["metadata"][key] for key in ("name", "labels", "annotations")}
    stage.api.put("inferenceservices", {**spec, "metadata": kept})

    assert eventually(lambda: target.observe(NAME).serving == 0, 10)
    target.apply(workload(1))
    assert serves(target, 1)


def test_a_cluster_without_kserve_is_named(stage: ClusterStage) -> None:
    body = {"message": "the server could not find the requested resource"}
    stage.api.faults.append(Fault("GET", "inferenceservices", 404, times=1000, body=body))

    with pytest.raises(ServingError, match="inferenceservices: the server could not find") as caught:
        stage.kserve_target().problems(workload(1))

    assert "are the required CRDs installed?" in caught.value.hint
