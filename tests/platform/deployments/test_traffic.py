"""Traffic of deployments: changes of weights are revisions, canary plans are the server's, and end as a revision."""

from typing import Any

import pytest
from tests.platform.conftest import on_both
from tests.platform.deployments.conftest import ADA, Stage

from charonia.core.errors import ServingError, unavailable
from charonia.platform.database.tables import DeploymentRow, UserRow

PLAN = {"version": 2, "stable": 1}


@pytest.fixture
def server(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the server answers about traffic, and what it was asked for."""
    state: dict[str, Any] = {"weights": {"1": 100.0}, "canary": None, "asked": [], "is_away": False}

    def ask(address: str, path: str, *, key: str = "", body: object = None, method: object = None) -> Any:
        assert path == "/v2/models/echo/traffic"
        if state["is_away"]:
            raise unavailable("it does not answer")
        if body is not None:
            state["asked"].append(body)
            state["canary"] = {"plan": PLAN, "state": "running", "reason": ""}
        return {"weights": state["weights"], "canary": state["canary"]}

    monkeypatch.setattr("charonia.platform.deployments.servers.ask", ask)
    stage.deployments.changes.create(ADA, "default", _spec(stage))
    stage.pass_s(3)
    return state


def _spec(stage: Stage) -> dict[str, Any]:
    spec = stage.spec(versions=[1, 2])
    spec["models"][0]["traffic"] = {"weights": {"1": 100}, "sticky": "key"}  # type: ignore[index]
    return spec


def traffic(stage: Stage) -> Any:
    return stage.deployments.reads.get(ADA, "default", "reader").spec["models"][0]["traffic"]


@on_both
def test_new_weights_are_a_revision_and_the_rest_stays(stage: Stage, server: dict[str, Any]) -> None:
    stage.deployments.servers.set_traffic(ADA, "default", "reader", "echo", {"weights": {"1": 90, "2": 10}})

    assert traffic(stage) == {"weights": {"1": 90, "2": 10}, "sticky": "key"}
    assert stage.deployments.reads.get(ADA, "default", "reader").revision == 2
    assert server["asked"] == []  # the target tells the server


def test_a_member_that_is_null_is_taken_out(stage: Stage, server: dict[str, Any]) -> None:
    stage.deployments.servers.set_traffic(ADA, "default", "reader", "echo", {"sticky": None})

    assert traffic(stage) == {"weights": {"1": 100}}


@on_both
def test_a_canary_plan_goes_to_the_server_and_its_end_is_a_revision(stage: Stage, server: dict[str, Any]) -> None:
    stage.deployments.servers.set_traffic(ADA, "default", "reader", "echo", {"canary": PLAN})
    assert server["asked"] == [{"canary": PLAN}]
    stage.deployments.canaries.step()
    assert stage.deployments.reads.get(ADA, "default", "reader").revision == 1

    server["is_away"] = True
    stage.deployments.canaries.step()
    server.update(is_away=False, weights={"1": 0.0, "2": 100.0})
    server["canary"] = {"plan": PLAN, "state": "finished", "reason": "version 2 has all requests"}
    stage.deployments.canaries.step()
    stage.deployments.canaries.step()

    revision = stage.deployments.reads.revision(ADA, "default", "reader", 2)
    assert revision.note == "canary of version 2 of 'echo': finished: version 2 has all requests"
    assert revision.author == "Ada"
    assert traffic(stage) == {"weights": {"1": 0.0, "2": 100.0}, "sticky": "key"}
    assert stage.deployments.reads.get(ADA, "default", "reader").revision == 2


def test_a_plan_needs_all_servers(stage: Stage, server: dict[str, Any]) -> None:
    stage.target.servers["default/reader"].count = 2

    with pytest.raises(ServingError, match="may have several servers, which cannot be reached one by one"):
        stage.deployments.servers.set_traffic(ADA, "default", "reader", "echo", {"canary": PLAN})

    assert server["asked"] == []


def test_a_plan_that_has_ended_with_its_server_changes_nothing(stage: Stage, server: dict[str, Any]) -> None:
    stage.deployments.servers.set_traffic(ADA, "default", "reader", "echo", {"canary": PLAN})
    server["canary"] = None

    stage.deployments.canaries.step()
    server["canary"] = {"plan": PLAN, "state": "aborted", "reason": "an earlier one"}
    stage.deployments.canaries.step()

    assert stage.deployments.reads.get(ADA, "default", "reader").revision == 1


def test_a_model_that_is_not_deployed_is_not_found(stage: Stage, server: dict[str, Any]) -> None:
    with pytest.raises(ServingError, match="has no model 'other'"):
        stage.deployments.servers.set_traffic(ADA, "default", "reader", "other", {"weights": {"1": 1}})


def test_a_version_deployed_by_canary_gets_requests_when_it_is_ready(stage: Stage, server: dict[str, Any]) -> None:
    change = stage.spec(versions=[3], strategy={"canary": {"steps": [5, 100]}})
    plan = stage.deployments.changes.change(ADA, "default", change)
    assert plan.changes[-1] == "a canary plan moves requests to version 3 of 'echo'"
    assert plan.spec["models"][0]["versions"] == [1, 3]
    stage.deployments.canaries.step()
    assert server["asked"] == []  # the revision does not serve yet

    stage.pass_s(5)
    stage.deployments.canaries.step()
    stage.deployments.canaries.step()

    assert server["asked"] == [{"canary": {"steps": [5, 100], "version": 3}}]
    again = stage.deployments.changes.change(ADA, "default", change)
    assert (again.changes, again.revision) == ([], 2)
    other = stage.deployments.changes.plan(ADA, "default", stage.spec(versions=[2]))
    assert other.changes[-1] == "the canary plan of 'echo' ends"


def test_a_canary_of_somebody_who_is_no_longer_a_deployer_does_not_begin(stage: Stage, server: dict[str, Any]) -> None:
    stage.deployments.changes.change(ADA, "default", stage.spec(versions=[3], strategy="canary"))
    with stage.database.transaction() as session:
        session.query(UserRow).one().grants[0].role = "viewer"

    stage.pass_s(5)
    stage.deployments.canaries.step()

    assert server["asked"] == []
    with stage.database.reading() as session:
        assert session.query(DeploymentRow).one().canaries == {}


def test_a_loaded_version_without_requests_gets_them_by_canary_without_a_revision(
    stage: Stage, server: dict[str, Any]
) -> None:
    stage.deployments.changes.change(ADA, "default", stage.spec(versions=[2], strategy="canary"))
    stage.deployments.canaries.step()

    assert server["asked"] == [{"canary": {"version": 2}}]
    assert stage.deployments.reads.get(ADA, "default", "reader").revision == 1


def test_a_canary_whose_revision_is_followed_by_another_does_not_begin(stage: Stage, server: dict[str, Any]) -> None:
    stage.deployments.changes.change(ADA, "default", stage.spec(versions=[3], strategy="canary"))
    stage.deployments.changes.rollback(ADA, "default", "reader", to=1)
    stage.pass_s(5)
    stage.deployments.canaries.step()
    stage.deployments.canaries.step()

    assert server["asked"] == []


def test_weights_are_refused_while_a_plan_sets_them(stage: Stage, server: dict[str, Any]) -> None:
    stage.deployments.servers.set_traffic(ADA, "default", "reader", "echo", {"canary": PLAN})

    with pytest.raises(ServingError, match="the canary plan of version 2 of 'echo' sets them"):
        stage.deployments.servers.set_traffic(ADA, "default", "reader", "echo", {"weights": {"1": 1}})
