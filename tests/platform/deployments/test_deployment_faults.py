"""What goes wrong while a revision is brought about: the one before serves on, and the reason is said."""

import errno
import os
from pathlib import Path

import pytest
from tests.platform.deployments.conftest import ADA, Stage

from charonia.core.errors import unavailable
from charonia.platform.artifacts.store import ArtifactStore
from charonia.platform.deployments.reads import DeploymentView


def look(stage: Stage) -> DeploymentView:
    return stage.deployments.reads.get(ADA, "default", "reader")


@pytest.fixture
def serving(stage: Stage) -> Stage:
    """Revision 1 of a deployment serves version 1."""
    stage.deployments.changes.create(ADA, "default", stage.spec(versions=[1], ready_within_s=10.0))
    stage.pass_s(3)
    assert look(stage).serving == 1
    return stage


def test_what_never_becomes_ready_times_out_and_the_one_before_stays(serving: Stage) -> None:
    serving.target.start_s = 3600.0

    serving.deployments.changes.change(ADA, "default", serving.spec(versions=[2], ready_within_s=10.0))
    serving.pass_s(8)
    before = look(serving)
    serving.pass_s(8)

    after = look(serving)
    assert (before.state, before.serving, before.latest_state) == ("updating", 1, "pending")
    assert (after.state, after.serving, after.latest_state) == ("ready", 1, "failed")
    assert "10 s" in after.latest_reason
    assert serving.target.servers["default/reader"].serving == 1
    assert serving.target.servers["default/reader"].applying == 0


def test_a_first_revision_that_never_becomes_ready_has_failed(stage: Stage) -> None:
    stage.target.start_s = 3600.0

    stage.deployments.changes.create(ADA, "default", stage.spec(ready_within_s=10.0))
    stage.pass_s(20)

    view = look(stage)
    assert (view.state, view.serving, view.latest_state) == ("failed", 0, "failed")
    assert "10 s" in view.reason


def test_a_store_that_is_away_is_waited_for(serving: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise unavailable("artifact store 's3://models' does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(ArtifactStore, "materialise", away)
        serving.deployments.changes.change(ADA, "default", serving.spec(versions=[2]))
        serving.pass_s(5)
        without = look(serving)
    serving.pass_s(5)

    assert (without.serving, without.latest_state) == (1, "pending")
    assert without.reason == "artifact store 's3://models' does not answer"
    assert (look(serving).state, look(serving).serving, look(serving).reason) == ("ready", 2, "")


def test_a_full_disk_leaves_nothing_half(serving: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = sorted((serving.data / "versions").rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", full)
        serving.deployments.changes.change(ADA, "default", serving.spec(versions=[2]))
        serving.pass_s(5)
        without = look(serving)
        left = sorted((serving.data / "versions").rglob("*"))
    serving.pass_s(5)

    assert (without.serving, without.latest_state) == (1, "pending")
    assert "there is no room left" in without.reason
    assert left == before
    assert (look(serving).state, look(serving).serving) == ("ready", 2)
