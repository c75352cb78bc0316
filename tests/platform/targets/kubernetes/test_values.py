"""From a workload to the values of the chart, and to objects: with the real Helm."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.platform.targets.kubernetes.conftest import NAME, OBJECT, workload
from tests.support.kubernetes_tools import tool

from charonia.core.errors import ServingError
from charonia.platform.settings import KubernetesSettings
from charonia.platform.targets.api import Workload
from charonia.platform.targets.kubernetes.objects import prepared, reference
from charonia.platform.targets.kubernetes.target import Chart
from charonia.platform.targets.kubernetes.values import chart_values, image_values, usual_values

SETTINGS = KubernetesSettings("config", image="registry:5000/charonia:1.0", store_secret="store")


@pytest.mark.parametrize(
    ("image", "repository", "tag", "digest"),
    [
        ("charonia", "charonia", "latest", ""),
        ("registry:5000/charonia", "registry:5000/charonia", "latest", ""),
        ("registry:5000/charonia:1.0-cuda", "registry:5000/charonia", "1.0-cuda", ""),
        (f"charonia@sha256:{64 * 'a'}", "charonia", "latest", f"sha256:{64 * 'a'}"),
    ],
)
def test_images(image: str, repository: str, tag: str, digest: str) -> None:
    assert image_values(image) == {"repository": repository, "tag": tag, "digest": digest}


def test_what_a_workload_says_is_in_the_values() -> None:
    asked = workload(
        1,
        device={"cpu_cores": 2, "gpus": (0, 1), "memory_mib": 2048},
        replicas={"min": 2, "max": 5},
        keys=True,
        idle_unload_s=900,
    )

    values = chart_values(asked, "s3://bucket/r", SETTINGS)

    assert values["models"] == {"type": "store", "store": {"uris": ["s3://bucket/r"], "existingSecret": "store"}}
    assert values["resources"] == {"requests": {"cpu": "2", "memory": "2048Mi"}, "limits": {"memory": "2048Mi"}}
    assert values["gpu"] == {"count": 2}
    assert values["autoscaling"] == {"minReplicas": 2, "maxReplicas": 5}
    assert values["apiKeys"]["existingSecret"] == f"{OBJECT}-keys"
    assert values["probes"] == {"startupSeconds": 600}
    assert values["server"] == {"modelIdleUnloadSeconds": 900}


def test_an_environment_is_an_image_or_packages_that_are_installed() -> None:
    asked = replace(workload(1, environment="pytorch"), packages=("torch>=2.9", "--extra-index-url https://p.example"))
    with_image = replace(SETTINGS, images=(("pytorch", "charonia:torch"),))

    assert chart_values(asked, "r", SETTINGS)["extraPackages"] == list(asked.packages)
    assert chart_values(asked, "r", with_image)["extraPackages"] == []
    assert chart_values(asked, "r", with_image)["image"]["tag"] == "torch"
    assert chart_values(workload(1), "r", with_image)["image"]["tag"] == "1.0"


def objects_of(asked: Workload, settings: KubernetesSettings = SETTINGS) -> dict[str, dict[str, Any]]:
    """Return the objects that Helm makes of a workload, by kind and name."""
    chart = Chart(settings.chart, str(tool("helm")), settings.values)
    assert chart.problem() == ""
    values = chart_values(asked, "s3://bucket/r", settings)
    rendered = chart.render(OBJECT, "models", usual_values(asked), values)
    return {str(reference(each)): each for each in prepared(rendered, "me", NAME, 1, ())}


def test_the_chart_makes_all_objects_and_its_workload_is_the_last() -> None:
    found = objects_of(workload(1, device={"memory_mib": 300}, keys=True, idle_unload_s=900))

    assert list(found)[-1] == f"Deployment '{OBJECT}'"
    assert f"Service '{OBJECT}'" in found
    assert f"Service '{OBJECT}-headless'" in found
    assert {each["metadata"]["labels"]["charonia.dev/platform"] for each in found.values()} == {"me"}
    deployment = found[f"Deployment '{OBJECT}'"]
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    pod = deployment["spec"]["template"]
    server = pod["spec"]["containers"][0]
    assert "--model-repository=s3://bucket/r" in server["args"]
    assert {"--exit-on-error=true", "--model-idle-unload=900"} <= set(server["args"])
    assert server["resources"]["limits"] == {"memory": "300Mi"}
    assert server["envFrom"] == [{"secretRef": {"name": "store"}}]
    assert {"name": "api-keys", "secret": {"secretName": f"{OBJECT}-keys", "defaultMode": 0o440}} in pod["spec"][
        "volumes"
    ]
    assert pod["metadata"]["labels"]["charonia.dev/deployment"] == OBJECT
    assert pod["metadata"]["annotations"]["charonia.dev/template"] == "1"


def test_bounds_of_replicas_make_an_autoscaler_of_the_cpu(tmp_path: Path) -> None:
    found = objects_of(workload(1, replicas={"min": 2, "max": 5}))
    (tmp_path / "values.yaml").write_text("autoscaling: {type: keda, busyShare: 0.5}\n")
    with_keda = objects_of(
        workload(1, replicas={"min": 2, "max": 5}), replace(SETTINGS, values=str(tmp_path / "values.yaml"))
    )

    scaler = found[f"HorizontalPodAutoscaler '{OBJECT}'"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 5)
    assert [each["resource"]["target"]["averageUtilization"] for each in scaler["metrics"]] == [80]
    assert "replicas" not in found[f"Deployment '{OBJECT}'"]["spec"]
    assert f"ScaledObject '{OBJECT}'" in with_keda


def test_the_tune_job_of_the_chart_is_no_part_of_a_deployment(tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text("tune: {enabled: true, models: [echo], server: other}\n")

    with pytest.raises(ServingError, match=r"got Job of batch/v1 \(hint: remove the setting that creates it"):
        objects_of(workload(1), replace(SETTINGS, values=str(tmp_path / "values.yaml")))


def test_what_the_file_of_values_says_holds_unless_the_deployment_says_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(
        yaml.safe_dump({"nodeSelector": {"pool": "models"}, "resources": {"limits": {"memory": "9Gi"}}, "replicas": 7})
    )
    settings = replace(SETTINGS, values=str(path))

    usual = objects_of(workload(1), settings)[f"Deployment '{OBJECT}'"]["spec"]
    said = objects_of(workload(1, device={"memory_mib": 300}), settings)[f"Deployment '{OBJECT}'"]["spec"]

    assert usual["replicas"] == 1
    assert usual["template"]["spec"]["nodeSelector"] == {"pool": "models"}
    limits = [each["template"]["spec"]["containers"][0]["resources"]["limits"] for each in (usual, said)]
    assert limits == [{"memory": "9Gi"}, {"memory": "300Mi"}]


def test_values_that_the_chart_does_not_take_are_refused_with_its_words(tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text("replica: 7\n")

    with pytest.raises(ServingError, match=r"the chart does not take these values: .*replica"):
        objects_of(workload(1), replace(SETTINGS, values=str(path)))


def test_what_is_missing_to_render_is_said(tmp_path: Path) -> None:
    assert "--helm: '/nowhere/helm' cannot be run" in Chart("", "/nowhere/helm", "").problem()
    assert "install Helm" in Chart("", "/nowhere/helm", "").problem()
    assert Chart("/nowhere", "helm", "").problem() == "--kubernetes-chart: there is no chart in '/nowhere'"
    assert "--kubernetes-values: the file" in Chart("", "helm", str(tmp_path / "no.yaml")).problem()
