"""The objects of KServe that a workload becomes, and how far an InferenceService is."""

from dataclasses import replace
from typing import Any

import pytest
from tests.platform.targets.kubernetes.conftest import NAME, OBJECT, workload
from tests.support.kserve_sdk import needs_sdk, through_the_models

from charonia.core.errors import ServingError
from charonia.platform.settings import KubernetesSettings
from charonia.platform.targets.api import Workload
from charonia.platform.targets.kserve.objects import as_workload, kserve_prepared, kserve_problem, kserve_rendered, note
from charonia.platform.targets.kubernetes.objects import RevisionRecord, annotations
from charonia.platform.targets.kubernetes.rollout import DeploymentSnapshot, RolloutState, rollout

ADDRESS = "s3://bucket/repositories/default/reader/abc"


def rendered(made: Workload, address: str = ADDRESS, **settings: Any) -> list[dict[str, Any]]:
    return kserve_rendered(made, address, KubernetesSettings("config", **settings))


def prepared(made: Workload, before: list[dict[str, Any]] | None = None, **settings: Any) -> list[dict[str, Any]]:
    return kserve_prepared(rendered(made, **settings), "platform", NAME, made.revision, before or [])


def mark(objects: list[dict[str, Any]]) -> str:
    return str(objects[-1]["spec"]["predictor"]["annotations"]["charonia.dev/template"])


def test_a_workload_is_a_runtime_and_an_inference_service() -> None:
    made = workload(
        1,
        device={"cpu_cores": 2, "memory_mib": 512, "gpus": (0, 1)},
        replicas={"min": 2, "max": 6},
        ready_within_s=60.0,
    )
    made = replace(made, spec=made.spec.model_copy(update={"idle_unload_s": 900}))

    runtime, service = rendered(made, image="registry/charonia:1")

    assert (runtime["kind"], runtime["metadata"]["name"]) == ("ServingRuntime", OBJECT)
    container = runtime["spec"]["containers"][0]
    assert container["image"] == "registry/charonia:1"
    assert container["resources"]["limits"] == {"cpu": "2", "memory": "512Mi", "nvidia.com/gpu": "2"}
    assert {"--exit-on-error=true", "--model-idle-unload=900"} <= set(container["args"])
    assert "--api-keys=/etc/charonia/keys/open-keys.txt" in container["args"]
    assert service["metadata"]["annotations"] == {"serving.kserve.io/deploymentMode": "RawDeployment"}
    predictor = service["spec"]["predictor"]
    assert (predictor["minReplicas"], predictor["maxReplicas"]) == (2, 6)
    assert predictor["deploymentStrategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert (predictor["model"]["runtime"], predictor["model"]["storageUri"]) == (OBJECT, ADDRESS)
    assert predictor["model"]["startupProbe"]["failureThreshold"] == 12


def test_keys_are_mounted_and_the_store_is_opened_with_the_secret_of_the_service_account() -> None:
    account, runtime, service = rendered(workload(1, keys=True), store_secret="store")

    assert (account["kind"], account["secrets"]) == ("ServiceAccount", [{"name": "store"}])
    predictor = service["spec"]["predictor"]
    assert predictor["serviceAccountName"] == account["metadata"]["name"]
    assert "--api-keys=/etc/charonia/keys/keys.txt" in runtime["spec"]["containers"][0]["args"]
    assert predictor["volumes"][0]["secret"]["secretName"] == f"{OBJECT}-keys"
    assert predictor["model"]["volumeMounts"][0]["mountPath"] == "/etc/charonia/keys"


def test_models_in_a_claim_have_its_address_and_other_stores_are_refused() -> None:
    (*_, service) = rendered(workload(1), "repositories/default/reader/abc", claim="models")

    assert service["spec"]["predictor"]["model"]["storageUri"] == "pvc://models/repositories/default/reader/abc"
    with pytest.raises(ServingError, match="expected a store that KServe reads"):
        rendered(workload(1), "as://account/container/abc")


def test_knative_has_its_own_probes_and_revisions() -> None:
    (*_, service) = rendered(workload(1), kserve_mode="knative")

    assert service["metadata"]["annotations"] == {"serving.kserve.io/deploymentMode": "Serverless"}
    assert not {"deploymentStrategy", "terminationGracePeriodSeconds"} & service["spec"]["predictor"].keys()
    assert "startupProbe" not in service["spec"]["predictor"]["model"]


@needs_sdk
def test_kserve_knows_every_field_of_the_objects() -> None:
    made = workload(
        1, keys=True, device={"cpu_cores": 2, "memory_mib": 512, "gpus": (0,)}, replicas={"min": 2, "max": 6}
    )
    objects = [
        each
        for mode in ("standard", "knative")
        for each in prepared(made, store_secret="store", kserve_mode=mode)
        if each["apiVersion"].startswith("serving.kserve.io/")
    ]

    assert len(objects) == 4
    assert through_the_models(objects) == objects


def test_what_kserve_cannot_do_is_refused() -> None:
    settings = KubernetesSettings("config", images=(("ocr", "registry/ocr:1"),))

    assert kserve_problem(workload(1, environment="ocr"), settings) == ""
    assert "expected an image for 'tables'" in kserve_problem(workload(1, environment="tables"), settings)
    assert "KServe waits 600 s at most" in kserve_problem(workload(1, ready_within_s=601.0), settings)


def test_pods_are_begun_anew_only_if_they_have_to_be_different() -> None:
    first = prepared(workload(1))
    scaled = prepared(workload(2, version=1, replicas={"max": 3}), first)
    larger = prepared(workload(3, version=1, device={"memory_mib": 4096}), scaled)
    other = prepared(workload(4, version=1, device={"memory_mib": 4096}), larger, image="charonia:2")

    assert [mark(each) for each in (first, scaled, larger, other)] == ["1", "1", "3", "4"]
    assert first[-1]["metadata"]["labels"]["charonia.dev/platform"] == "platform"
    assert "charonia.dev/revision" not in annotations(first[-1])  # KServe gives pods its annotations
    assert [RevisionRecord(NAME, 1, each).has_fixed_replicas() for each in (first, scaled)] == [True, False]


def seen(service: dict[str, Any], deployment: dict[str, Any] | None, uid: str = "u") -> tuple[RolloutState, str]:
    service = {**service, "metadata": {**service["metadata"], "uid": "u", "generation": 2}}
    noted = note({"metadata": {"uid": uid}}, "platform", NAME, 2, 1)
    workload = as_workload(service, noted, [deployment] if deployment else [])
    found = rollout(DeploymentSnapshot(workload), lambda pod: "")
    return found.state, found.said


def made_for(mark: str, available: int) -> dict[str, Any]:
    status = {"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1, "availableReplicas": available}
    template = {"metadata": {"annotations": {"charonia.dev/template": mark}}}
    return {"metadata": {"generation": 1}, "spec": {"replicas": 1, "template": template}, "status": status}


def test_a_revision_is_ready_when_its_deployment_and_the_service_are() -> None:
    service, ready = prepared(workload(2))[-1], {"conditions": [{"type": "Ready", "status": "True"}]}
    waits = {"conditions": [{"type": "Ready", "status": "False", "message": "no gateway"}]}

    assert seen(service, None) == (RolloutState.UNDER_WAY, "0 of 1 new pods are ready")
    assert seen(service | {"status": ready}, made_for("1", 1))[0] is RolloutState.UNDER_WAY  # that of the one before
    assert seen(service | {"status": ready}, made_for("2", 0))[0] is RolloutState.UNDER_WAY
    assert seen(service | {"status": waits}, made_for("2", 1)) == (RolloutState.UNDER_WAY, "KServe: no gateway")
    assert seen(service | {"status": ready}, made_for("2", 1))[0] is RolloutState.DONE
    assert seen(service, made_for("2", 1), uid="before")[0] is RolloutState.STEADY  # nothing is known of it


def test_a_runtime_that_kserve_has_not_seen_yet_is_waited_for() -> None:
    service = prepared(workload(2))[-1]
    failed = {"reason": "RuntimeNotRecognized", "message": "Waiting for runtime to become available"}
    status = {"modelStatus": {"transitionStatus": "InvalidSpec", "lastFailureInfo": failed}}

    assert seen(service | {"status": status}, None)[0] is RolloutState.UNDER_WAY
    failed["reason"] = "NoSupportingRuntime"
    assert seen(service | {"status": status}, None)[0] is RolloutState.BROKEN


@pytest.mark.parametrize("mode", ["Serverless", "Knative"])
def test_a_revision_that_knative_gives_up_has_failed_but_not_one_that_it_starts(mode: str) -> None:
    service = prepared(workload(2), kserve_mode="knative")[-1]
    service["metadata"]["annotations"]["serving.kserve.io/deploymentMode"] = mode  # KServe rewrites it
    message = "Revision failed with message: container exits"
    failed: dict[str, Any] = {"conditions": [{"type": "PredictorReady", "status": "False", "message": message}]}

    assert seen(service | {"status": failed}, None) == (RolloutState.BROKEN, f"KServe: {message}")
    failed["conditions"][0]["status"] = "Unknown"
    assert seen(service | {"status": failed}, None)[0] is RolloutState.UNDER_WAY
