"""The options of `charonia.ray.app`, without a cluster."""

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import yaml
from pydantic import ValidationError
from ray.serve import Application
from ray.serve.schema import ServeDeploySchema

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


def deployments(app: Application) -> list:  # type: ignore[type-arg]
    return [app._bound_deployment]
