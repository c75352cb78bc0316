"""The target `ray` keeps to what targets promise, over the REST API, and leaves what others have."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.process import eventually
from tests.support.ray_dashboard import Plain, RayDashboard, ray_dashboard

from charonia.core.errors import Code, ServingError
from charonia.platform.artifacts.store import open_artifacts
from charonia.platform.deployments.spec import DeploymentSpec, Device
from charonia.platform.settings import RaySettings
from charonia.platform.targets.api import DeploymentTarget, PlacedModel, RevisionPhase, Workload
from charonia.platform.targets.ray.target import CHANGE_TRIES, RayTarget, open_ray
from charonia.testing.target_suite import TargetCase, TargetSuite

NAME = "default/reader"


@pytest.fixture
def dashboard() -> Iterator[RayDashboard]:
    with ray_dashboard() as found:
        yield found


class Stage:
    """A dashboard, a folder that the nodes have, too, and what is deployed."""

    def __init__(self, dashboard: RayDashboard, folder: Path) -> None:
        self.dashboard = dashboard
        self.data = folder / "data"
        self.data.mkdir()
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "model.onnx").write_bytes(b"weights")

    def target(self, **settings: str) -> RayTarget:
        given = RaySettings(**{"dashboard": self.dashboard.url, "folder": "/nodes", **settings})
        return open_ray(given, open_artifacts("", self.data), self.data)

    def workload(self, revision: int) -> Workload:
        model = PlacedModel("reader", {1: self.model}, f'name: "reader" # {revision}', 7, {1: "d"})
        return Workload(NAME, revision, DeploymentSpec.model_construct(name="reader", target="ray"), (model,))

    def repositories(self) -> set[str]:
        folder = self.data / "artifacts"
        return {path.relative_to(folder).as_posix() for path in folder.glob("repositories/default/reader/*")}

    def serve(self, target: RayTarget, revision: int = 1) -> None:
        target.apply(self.workload(revision))
        assert eventually(lambda: target.observe(NAME).serving == revision)


@pytest.fixture
def stage(dashboard: RayDashboard, tmp_path: Path) -> Stage:
    return Stage(dashboard, tmp_path)


class TestRayTarget(TargetSuite):
    @pytest.fixture
    def target_case(self, stage: Stage) -> TargetCase:
        fates: dict[str, str] = {}
        stage.dashboard.fate = lambda config: fates.get(config["name"].rpartition(":")[2], "RUNNING")

        def with_fate(revision: int, fate: str) -> Workload:
            fates[str(revision)] = fate
            return stage.workload(revision)

        def scale(target: DeploymentTarget, deployment: str, replicas: int) -> None:
            assert target.scale(deployment, replicas) == ""
            for name, details in stage.dashboard.applications.items():
                args = (details["deployed_app_config"] or {"args": {}})["args"]
                if details["status"] == "RUNNING" and args["max_replicas"] > args["min_replicas"]:
                    stage.dashboard.scale(name, replicas)

        return TargetCase(
            make=stage.target,
            workload=lambda revision: with_fate(revision, "RUNNING"),
            broken=lambda revision: with_fate(revision, "DEPLOY_FAILED"),
            slow=lambda revision: with_fate(revision, "DEPLOYING"),
            wait=lambda condition: eventually(condition, 10),
            scale=scale,
        )


def other(name: str, route: str, source: str = "declarative") -> Plain:
    config = {"name": name, "route_prefix": route, "import_path": "theirs:app", "args": {}}
    return {
        "name": name,
        "route_prefix": route,
        "status": "RUNNING",
        "message": "",
        "source": source,
        "deployed_app_config": config if source == "declarative" else None,
        "deployments": {},
    }


def test_what_others_have_is_passed_on(stage: Stage) -> None:
    stage.dashboard.applications = {
        "theirs": other("theirs", "/theirs"),
        "code": other("code", "/code", source="imperative"),
        "elsewhere:default:reader:7": other("elsewhere:default:reader:7", "/x"),
    }
    stage.dashboard.settings["proxy_location"] = "HeadOnly"
    target = stage.target()

    stage.serve(target)
    target.stop(NAME)

    for body in stage.dashboard.bodies:
        assert stage.dashboard.applications["theirs"]["deployed_app_config"] in body["applications"]
        assert "code" not in [config["name"] for config in body["applications"]]
        assert (body["proxy_location"], body["http_options"]["port"]) == ("HeadOnly", 8123)
    assert target.deployments() == [NAME]
    assert eventually(lambda: target.observe(NAME).phase is RevisionPhase.ABSENT)
    assert set(stage.dashboard.applications) == {"theirs", "code", "elsewhere:default:reader:7"}


def test_an_application_that_could_not_be_passed_on_keeps_everything_as_it_is(stage: Stage) -> None:
    stage.dashboard.applications = {"theirs": {**other("theirs", "/theirs"), "deployed_app_config": None}}

    with pytest.raises(ServingError, match="'theirs' is declared: a change would end it"):
        stage.target().apply(stage.workload(1))

    assert stage.dashboard.bodies == []


def test_what_was_changed_meanwhile_is_read_again(stage: Stage) -> None:
    target = stage.target()
    looks = iter(range(100))

    def change_often() -> None:
        name = f"theirs{next(looks)}"
        stage.dashboard.applications[name] = other(name, f"/{name}")

    stage.dashboard.before_look = change_often
    with pytest.raises(
        ServingError, match=f"other clients changed the applications of Ray {CHANGE_TRIES} times"
    ) as error:
        target.apply(stage.workload(1))
    assert error.value.code is Code.UNAVAILABLE
    assert stage.dashboard.bodies == []

    few = iter([change_often] * 3)
    stage.dashboard.before_look = lambda: next(few, lambda: None)()
    target.apply(stage.workload(1))
    assert len(stage.dashboard.bodies[0]["applications"]) == len(stage.dashboard.applications)


def test_repositories_stay_for_what_serves(stage: Stage) -> None:
    target = stage.target()
    stage.serve(target)
    stage.serve(target, 2)
    assert stage.repositories() == {"repositories/default/reader/2"}

    stage.dashboard.fate = lambda config: "DEPLOY_FAILED"
    target.apply(stage.workload(3))
    assert eventually(lambda: target.observe(NAME).phase is RevisionPhase.FAILED)
    assert stage.repositories() == {"repositories/default/reader/2"}
    assert target.observe(NAME).reason == "model 'reader': no such file"

    (config,) = (stage.data / "artifacts").glob("repositories/default/reader/2/*/reader/config.pbtxt")
    assert config.read_text() == 'name: "reader" # 2'
    (shown,) = stage.dashboard.bodies[-1]["applications"]
    assert shown["args"]["repository"] == f"/nodes/{config.parents[1].relative_to(stage.data / 'artifacts')}"


def test_addresses_and_logs(stage: Stage) -> None:
    target = stage.target(owner="own")
    stage.serve(target)

    assert target.observe(NAME).http == "http://127.0.0.1:8123/default/reader"
    assert target.log(NAME, 3) == "==> r0 <==\nn1 serve/own:default:reader:1-0.log 3\n"
    assert stage.target(owner="own", http="https://ray/").observe(NAME).http == "https://ray/default/reader"
    assert stage.target(owner="another").observe(NAME).phase is RevisionPhase.ABSENT


def test_what_does_not_fit_is_said(stage: Stage) -> None:
    target, one = stage.target(), stage.workload(1)
    asked = replace(
        one, spec=one.spec.model_copy(update={"keys": True, "device": Device(memory_mib=100, gpu_memory_mib=10)})
    )
    stage.dashboard.applications = {"theirs": other("theirs", "/default/reader", source="imperative")}

    problems = [problem.partition(":")[0] for problem in target.problems(asked)]
    assert problems == ["name", "keys", "device.memory_mib", "device.gpu_memory_mib"]
    with pytest.raises(ServingError, match="'theirs' of the Ray cluster has the route '/default/reader' already"):
        target.apply(one)
    assert stage.target(folder="").problems(one)[0].startswith("artifact store: the nodes of Ray cannot read")
    assert stage.dashboard.bodies == []


def test_a_token(stage: Stage) -> None:
    stage.dashboard.token = "secret"

    assert stage.target(token="secret").observe(NAME).phase is RevisionPhase.ABSENT
    with pytest.raises(ServingError, match="answers 401: no token") as error:
        stage.target().observe(NAME)
    assert error.value.code is Code.UNAVAILABLE


def test_a_cluster_that_is_away(stage: Stage) -> None:
    with pytest.raises(ServingError, match="does not answer") as error:
        stage.target(dashboard="http://127.0.0.1:1").observe(NAME)

    assert error.value.code is Code.UNAVAILABLE
