"""Applications of Ray Serve: what is declared for a workload, and what their details say."""

import pytest

from charonia.platform.deployments.spec import DeploymentSpec, Device, Replicas
from charonia.platform.targets.api import Replica, Workload
from charonia.platform.targets.ray.target import (
    Plain,
    application,
    deployment_of,
    doing,
    reason,
    replicas,
)
from charonia.ray import AppOptions
from charonia.server.access.rules import digest_of


def details(status: str, message: str = "", states: tuple[str, ...] = (), said: str = "") -> Plain:
    listed = [{"replica_id": state.lower(), "state": state} for state in states]
    deployments = {"charonia": {"message": message, "target_num_replicas": 2, "replicas": listed}}
    return {"status": status, "message": said, "deployments": deployments if states or message else {}}


def test_an_application_has_what_the_workload_asks_for() -> None:
    spec = DeploymentSpec.model_construct(
        name="reader",
        device=Device(cpu_cores=2, gpus=(0, 3)),
        replicas=Replicas(min=2, max=6),
        idle_unload_s=900,
    )
    found = application(
        "own", Workload("default/reader", 4, spec, (), packages=("torch==2.5",)), "s3://b/r", "secret", 9
    )

    assert found == {
        "name": "own:default:reader:4",
        "route_prefix": None,
        "import_path": "charonia.ray:app",
        "args": {
            "repository": "s3://b/r",
            "num_cpus": 2,
            "num_gpus": 2,
            "min_replicas": 2,
            "max_replicas": 6,
            "keys": [f"platform admin {digest_of('secret')}", "clients infer,read none"],
            "options": ["--model-idle-unload=900"],
            "autoscaling": {"initial_replicas": 6},
        },
        "runtime_env": {"pip": ["torch==2.5"]},
    }
    assert AppOptions(**found["args"]).max_replicas == 6  # charonia.ray takes it


def test_a_fixed_number_of_servers_is_not_scaled() -> None:
    found = application(
        "own", Workload("default/reader", 1, DeploymentSpec.model_construct(name="reader"), ()), "/models", "secret", 3
    )

    assert "autoscaling" not in found["args"]
    assert "runtime_env" not in found
    assert AppOptions(**found["args"]).num_cpus == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("own:default:reader.v1:12", ("default/reader.v1", 12)),
        ("other:default:reader:1", ("", 0)),
        ("own:default:reader", ("", 0)),
        ("own:default:reader:x", ("", 0)),
        ("default", ("", 0)),
    ],
)
def test_whose_an_application_is(name: str, expected: tuple[str, int]) -> None:
    assert deployment_of("own", name) == expected


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (
            details("DEPLOY_FAILED", "Error:\n\x1b[36mx\ncharonia.core.errors.ServingError: model 'a':\n no file"),
            "model 'a': no file",
        ),
        (
            details(
                "DEPLOY_FAILED", said="Deploying failed:\nTraceback\nModuleNotFoundError: No module named 'charonia'\n"
            ),
            "Ray: ModuleNotFoundError: No module named 'charonia'",
        ),
        (details("UNHEALTHY"), "Ray: UNHEALTHY"),
    ],
)
def test_why_an_application_fails(shown: Plain, expected: str) -> None:
    assert reason(shown) == expected


def test_what_an_application_does() -> None:
    assert doing(details("DEPLOYING")) == "Ray builds it"
    assert doing(details("DEPLOYING", states=("RUNNING", "STARTING"))) == "1 of 2 servers run"
    failed = "Retrying 2 more time(s). Error:\ncharonia.core.errors.ServingError: no file"
    assert doing(details("DEPLOYING", failed)) == "it is started again: no file"
    assert doing(details("DEPLOYING", "1 replicas wait\nfor 8 CPUs")) == "Ray: 1 replicas wait for 8 CPUs"


def test_servers() -> None:
    assert replicas(details("RUNNING", states=("RUNNING", "STARTING", "STOPPING"))) == (
        Replica("running", is_ready=True),
        Replica("starting", is_ready=False, doing="it starts"),
    )
    assert replicas(details("UNHEALTHY", "it hangs", ("STARTING",))) == (
        Replica("starting", is_ready=False, reason="Ray: it hangs"),
    )
    assert replicas(details("UNHEALTHY", "it hangs")) == (Replica("no server", is_ready=False, reason="Ray: it hangs"),)
