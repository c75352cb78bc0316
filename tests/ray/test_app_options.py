"""The options of `charonia.ray.app`, without a cluster."""

import inspect
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kubernetes_validate
import pytest
import ray
import yaml
from pydantic import ValidationError
from ray.serve import Application
from ray.serve.schema import ServeDeploySchema
from tests.deploy.helm.admission import amount, problems
from tests.support.crds import needs_crds, problems_by_crd
from tests.support.pod_security import violations

import charonia.ray
from charonia.ray import AppOptions
from charonia.server.model_options import ControlMode

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray" / "serve.yaml"


def test_options_of_charonia_serve_are_those_of_each_replica() -> None:
    options = AppOptions(repository=["a", "b"], options=["--model-control-mode=auto", "--id=x"], num_cpus=2, drain_s=7)

    server = options.server_options()

    assert server.models.repositories == (str(Path.cwd() / "a"), str(Path.cwd() / "b"))
    assert server.models.control_mode is ControlMode.AUTO
    assert (server.id, server.cpu_cores, server.exit_timeout_secs) == ("x", 2, 7)


def test_less_than_a_core_is_one_thread() -> None:
    assert AppOptions(repository="a", num_cpus=0.5).server_options().cpu_cores == 1


def test_texts_of_serve_run_are_read_as_the_types_of_the_fields() -> None:
    texts = {
        "repository": "a",
        "num_cpus": "0.5",
        "max_replicas": "4",
        "options": "--id='a b' --strict-readiness=false",
    }

    options = AppOptions.model_validate(texts)

    assert (options.num_cpus, options.max_replicas) == (0.5, 4)
    assert options.options == ["--id=a b", "--strict-readiness=false"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "repository"),
        ({"repository": "a", "replicas": 2}, "replicas"),
        ({"repository": "a", "num_cpus": 0}, "num_cpus"),
        ({"repository": "a", "min_replicas": 3, "max_replicas": 2}, "expected at least min_replicas"),
        ({"repository": "a", "options": ["--no-such-option"]}, "--no-such-option"),
        ({"repository": "a", "options": ["--front-ends=2"]}, "a replica is one process"),
        ({"repository": "a", "models_per_replica": 2}, "--model-control-mode=auto or explicit"),
        ({"repository": "a", "autoscaling": {"downscale_delay_s": 1}}, "max_replicas"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        charonia.ray.app(**given)


def test_a_fixed_number_of_replicas() -> None:
    (deployment,) = deployments(charonia.ray.app(repository="a", min_replicas=3, num_gpus=1, name="vision"))

    assert deployment.name == "vision"
    assert deployment.num_replicas == 3
    assert deployment.ray_actor_options == {"num_cpus": 1.0, "num_gpus": 1.0}
    assert deployment.max_ongoing_requests == 256


def test_replicas_by_requests_in_flight() -> None:
    app = charonia.ray.app(
        repository="a", max_replicas=4, target_ongoing_requests=8, autoscaling={"downscale_delay_s": 5}
    )

    (deployment,) = deployments(app)
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 4)
    assert (scaling.target_ongoing_requests, scaling.downscale_delay_s) == (8, 5)


@pytest.mark.parametrize(
    ("given", "look_back_s"),
    [
        ({}, 30),
        ({"downscale_delay_s": 600}, 30),
        ({"downscale_delay_s": 20}, 20),
        ({"downscale_delay_s": 6}, 11),
        ({"downscale_delay_s": 6, "look_back_period_s": 40}, 40),
    ],
)
def test_idle_replicas_stay_little_longer_than_a_short_delay_says(given: dict[str, float], look_back_s: float) -> None:
    with warnings.catch_warnings(action="error"):  # Ray warns about a period that is too short
        (deployment,) = deployments(charonia.ray.app(repository="a", max_replicas=2, autoscaling=given))

    assert deployment._deployment_config.autoscaling_config.look_back_period_s == look_back_s


def test_replicas_run_on_rays_event_loop_in_the_environment_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    program = {"pip": ["pillow"], "env_vars": {"AWS_REGION": "eu-central-1"}}
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(runtime_env=program))

    (deployment,) = deployments(charonia.ray.app(repository="a"))

    assert deployment.ray_actor_options["runtime_env"] == {
        "pip": ["pillow"],
        "env_vars": {"AWS_REGION": "eu-central-1", "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"},
    }


def test_ray_takes_it_for_a_builder_with_typed_arguments() -> None:
    (parameter,) = inspect.signature(charonia.ray.app).parameters.values()

    assert parameter.annotation is AppOptions
    assert isinstance(charonia.ray.app(AppOptions(repository=str(Path("a")))), Application)


def test_the_example_is_a_file_that_ray_takes() -> None:
    config = ServeDeploySchema.model_validate(yaml.safe_load(EXAMPLE.read_text(encoding="utf-8")))

    (application,) = config.applications
    assert application.import_path == "charonia.ray:app"
    assert AppOptions.model_validate(application.args).max_replicas == 8


@pytest.fixture(scope="module")
def service() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((EXAMPLE.parent / "rayservice.yaml").read_text(encoding="utf-8"))
    return found


def groups(service: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = service["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def test_the_rayservice_deploys_an_application_that_its_workers_have_room_for(service: dict[str, Any]) -> None:
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"])).applications
    options = AppOptions.model_validate(application.args)
    head, workers = groups(service)
    (server,) = workers["template"]["spec"]["containers"]

    assert application.import_path == "charonia.ray:app"
    assert head["rayStartParams"]["num-cpus"] == "0"
    for replicas, pods in (("min_replicas", "minReplicas"), ("max_replicas", "maxReplicas")):
        cores = amount(server["resources"]["requests"]["cpu"]) * workers[pods]
        assert getattr(options, replicas) * options.num_cpus == cores
    assert options.repositories == [mount["mountPath"] for mount in server["volumeMounts"]]
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] > 2 * options.drain_s
    assert service["spec"]["rayClusterDeletionDelaySeconds"] > 2 * options.drain_s


@pytest.mark.parametrize("release", ["1.31", "1.34", "1.37"])
def test_the_pods_of_the_rayservice_are_valid_and_have_no_privilege(service: dict[str, Any], release: str) -> None:
    for group in groups(service):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": group["template"]["spec"]}

        kubernetes_validate.validate(pod, release, strict=True)
        assert violations(pod["spec"]) == []
        assert problems([pod]) == []


@needs_crds
def test_the_rayservice_fits_the_published_schema_of_kuberay(service: dict[str, Any]) -> None:
    assert problems_by_crd(service) == []


def deployments(app: Application) -> list:  # type: ignore[type-arg]
    return [app._bound_deployment]
