"""Deployments over a target of records, with a model of three versions."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fake_target import FakeTarget
from tests.support.platform_models import add_version

from charonia.platform.artifacts.store import open_artifacts
from charonia.platform.database.connection import Database
from charonia.platform.deployments.service import Deployments
from charonia.platform.deployments.workloads import Workloads
from charonia.platform.people.access import Grant, Principal, ProjectRole

ADA = Principal.of("Ada", [Grant(ProjectRole.ADMIN)])


class Stage:
    """Deployments, with time that passes when a test says so."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.database = Database(f"sqlite:///{data / 'platform.sqlite'}")
        self.database.migrate()
        self.target = FakeTarget()
        self.workloads = Workloads(data, open_artifacts("", data))
        self.deployments = Deployments(self.database, {"local": self.target}, self.workloads)
        self.now_s = 1_000_000.0

    def restart(self) -> None:
        """Let the platform be killed, and start again."""
        self.deployments.close()
        self.deployments = Deployments(self.database, {"local": self.target}, self.workloads)

    def pass_s(self, seconds: float, step_s: float = 0.5) -> None:
        """Let time pass, with the reconciler at work."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += step_s
            self.target.pass_s(step_s)
            self.deployments.reconciler.step(self.now_s)

    def spec(self, name: str = "reader", versions: object = "latest", **more: object) -> dict[str, object]:
        model = {"name": "echo", "versions": versions}
        return {"name": name, "models": [model], **more}


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    for content in (b"one", b"two", b"three"):
        add_version(stage.database, tmp_path, "echo", {"config.pbtxt": b'backend: "identity"', "1/model": content})
    yield stage
    stage.deployments.close()
    stage.database.close()
