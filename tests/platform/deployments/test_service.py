"""Deployments as people change them, over a target of records."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from pydantic import ValidationError
from sqlalchemy import select
from tests.platform.conftest import on_both
from tests.platform.deployments.conftest import ADA, Stage

from charonia.core.errors import Code, ServingError
from charonia.platform.database.tables import PlatformTable, SecretRow
from charonia.platform.deployments.servers import ServerKeyRequest, matching_entries
from charonia.platform.people.access import Grant, NotPermittedError, Principal, ProjectRole

from tests.support.platform_models import add_version  # isort: skip


@on_both
def test_a_deployment_is_created_and_gets_ready(stage: Stage) -> None:
    plan = stage.deployments.changes.create(ADA, "default", stage.spec())
    stage.pass_s(3)

    view = stage.deployments.reads.get(ADA, "default", "reader")
    assert plan.revision == 1
    assert plan.is_new
    assert (view.state, view.serving, view.wanted) == ("ready", 1, 1)
    assert view.spec["models"][0]["versions"] == [3]
    assert stage.target.applied[0].models[0].digests.keys() == {3}


@on_both
def test_the_second_of_two_who_change_the_same_revision_gets_a_conflict(stage: Stage) -> None:
    stage.deployments.changes.create(ADA, "default", stage.spec(versions=[1]))

    stage.deployments.changes.change(ADA, "default", stage.spec(versions=[2]), revision=1)
    with pytest.raises(ServingError, match="has revision 2, expected 1: it was changed in the meantime") as caught:
        stage.deployments.changes.change(ADA, "default", stage.spec(versions=[3]), revision=1)

    assert caught.value.code is Code.ALREADY_EXISTS
    assert stage.deployments.reads.get(ADA, "default", "reader").spec["models"][0]["versions"] == [2]


@on_both
def test_of_many_who_change_a_revision_at_the_same_time_one_succeeds(stage: Stage) -> None:
    stage.deployments.changes.create(ADA, "default", stage.spec(versions=[1]))

    def change(number: int) -> str:
        try:
            changed = stage.spec(versions=[2], ready_within_s=float(number + 1))
            stage.deployments.changes.change(ADA, "default", changed, revision=1)
        except ServingError as error:
            return error.code.name
        return "changed"

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(change, range(8)))

    assert sorted(found) == ["ALREADY_EXISTS"] * 7 + ["changed"]
    assert stage.deployments.reads.get(ADA, "default", "reader").revision == 2


def test_a_revision_that_fails_leaves_the_one_before(stage: Stage) -> None:
    stage.target.broken[2] = "model 'echo' cannot be loaded: no such file"
    stage.deployments.changes.create(ADA, "default", stage.spec(versions=[1]))
    stage.pass_s(3)

    stage.deployments.changes.change(ADA, "default", stage.spec(versions=[2]))
    stage.pass_s(5)

    view = stage.deployments.reads.get(ADA, "default", "reader")
    assert (view.state, view.serving, view.wanted, view.revision) == ("ready", 1, 1, 2)
    assert (view.latest_state, view.latest_reason) == ("failed", "model 'echo' cannot be loaded: no such file")


def test_a_revision_that_has_failed_is_under_way_again_when_it_is_started(stage: Stage) -> None:
    stage.target.broken[1] = "model 'echo' cannot be loaded: no such file"
    stage.deployments.changes.create(ADA, "default", stage.spec())
    stage.pass_s(5)
    failed = stage.deployments.reads.get(ADA, "default", "reader")
    stage.target.broken = {}

    stage.deployments.changes.start(ADA, "default", "reader")
    begun = stage.deployments.reads.get(ADA, "default", "reader")
    stage.pass_s(5)

    ready = stage.deployments.reads.get(ADA, "default", "reader")
    assert (failed.state, failed.latest_state) == ("failed", "failed")
    assert (begun.state, begun.latest_state, begun.latest_reason) == ("starting", "pending", "")
    assert (ready.state, ready.serving) == ("ready", 1)


def test_the_same_specification_again_changes_nothing(stage: Stage) -> None:
    stage.deployments.changes.create(ADA, "default", stage.spec())
    stage.pass_s(3)

    plan = stage.deployments.changes.change(ADA, "default", stage.spec())
    stage.pass_s(3)

    assert plan.changes == []
    assert plan.revision == 1
    assert len(stage.target.applied) == 1


def test_the_same_specification_again_tries_again_what_has_failed(stage: Stage) -> None:
    stage.target.broken[1] = "no such package"
    stage.deployments.changes.create(ADA, "default", stage.spec())
    stage.pass_s(5)
    assert stage.deployments.reads.get(ADA, "default", "reader").state == "failed"

    del stage.target.broken[1]
    stage.deployments.changes.change(ADA, "default", stage.spec())
    stage.pass_s(5)

    assert stage.deployments.reads.get(ADA, "default", "reader").state == "ready"


@on_both
def test_back_to_the_revision_before_is_a_new_revision(stage: Stage) -> None:
    stage.deployments.changes.create(ADA, "default", stage.spec(versions=[1]))
    stage.pass_s(3)
    stage.deployments.changes.change(ADA, "default", stage.spec(versions=[2]))
    stage.pass_s(3)

    plan = stage.deployments.changes.rollback(ADA, "default", "reader")
    stage.pass_s(3)

    revisions, total = stage.deployments.reads.revisions(ADA, "default", "reader")
    assert plan.changes == ["model 'echo': version 2 -> version 1"]
    assert total == 3
    assert [(one.number, one.state, one.note) for one in revisions] == [
        (3, "serving", "back to revision 1"),
        (2, "replaced", ""),
        (1, "replaced", ""),
    ]


@on_both
def test_a_deployment_is_stopped_started_and_removed(stage: Stage) -> None:
    stage.deployments.changes.create(ADA, "default", stage.spec())
    stage.pass_s(3)

    stage.deployments.changes.stop(ADA, "default", "reader")
    stage.pass_s(3)
    assert stage.deployments.reads.get(ADA, "default", "reader").state == "stopped"
    stage.deployments.changes.start(ADA, "default", "reader")
    stage.pass_s(3)
    assert stage.deployments.reads.get(ADA, "default", "reader").state == "ready"
    stage.deployments.changes.remove(ADA, "default", "reader")
    stage.pass_s(3)

    with pytest.raises(ServingError, match="deployment 'reader' does not exist in project 'default'"):
        stage.deployments.reads.get(ADA, "default", "reader")
    assert stage.target.servers == {}


def test_all_that_there_is_not_is_said_at_once(stage: Stage) -> None:
    add_version(stage.database, stage.data, "other", {"1/model": b""}, state="refused")
    models = [{"name": "echo", "versions": [1, 7]}, {"name": "nothing"}, {"name": "other"}]

    with pytest.raises(ServingError) as caught:
        stage.deployments.changes.plan(ADA, "default", {"name": "reader", "models": models, "environment": "none"})

    assert caught.value.message.splitlines() == [
        "models: version 7 of 'echo' does not exist, expected one of 1, 2, 3",
        "models: model 'nothing' does not exist",
        "models: 'other' has no ready version",
        "environment: 'none' does not exist",
    ]


def test_what_does_not_fit_is_refused_and_a_dry_run_says_it(stage: Stage) -> None:
    stage.target.misfits.append("memory: it needs 9 GiB")

    plan = stage.deployments.changes.plan(ADA, "default", stage.spec())
    with pytest.raises(ServingError, match="memory: it needs 9 GiB"):
        stage.deployments.changes.create(ADA, "default", stage.spec())

    assert plan.problems == ["memory: it needs 9 GiB"]
    assert stage.deployments.reads.list(ADA, "default") == ([], 0)


def test_viewers_may_look_and_deployers_may_not_run_code_without_permission(stage: Stage) -> None:
    add_version(stage.database, stage.data, "code", {"1/model.py": b"pass"}, runs_code=True)
    viewer = Principal.of("Vi", [Grant(ProjectRole.VIEWER, "default")])
    deployer = Principal.of("Dee", [Grant(ProjectRole.DEPLOYER, "default")])
    coder = Principal.of("Cody", [Grant(ProjectRole.DEPLOYER, "default", may_run_code=True)])
    spec = {"name": "reader", "models": [{"name": "code"}]}

    assert stage.deployments.changes.plan(viewer, "default", spec).is_new
    with pytest.raises(NotPermittedError):
        stage.deployments.changes.create(viewer, "default", stage.spec())
    with pytest.raises(NotPermittedError, match="may not use models that run code"):
        stage.deployments.changes.create(deployer, "default", spec)
    assert stage.deployments.changes.create(coder, "default", spec).revision == 1


def test_a_deployment_cannot_make_code_of_data_without_permission(stage: Stage) -> None:
    deployer = Principal.of("Dee", [Grant(ProjectRole.DEPLOYER, "default")])
    config = {"backend": "python", "default_model_filename": "model.onnx"}
    spec = stage.spec() | {"models": [{"name": "echo", "config": config}]}

    with pytest.raises(NotPermittedError, match="may not use models that run code"):
        stage.deployments.changes.create(deployer, "default", spec)


@on_both
def test_keys_of_servers_are_made_shown_once_and_removed(stage: Stage) -> None:
    stage.deployments.changes.create(ADA, "default", stage.spec(keys=True))
    stage.pass_s(3)

    made = stage.deployments.keys.add(
        ADA, "default", "reader", ServerKeyRequest(name="ci", scopes=("infer",), requests_per_minute=60)
    )
    server = stage.target.servers["default/reader"]
    (line,) = server.keys
    assert line.split()[:2] + line.split()[3:] == ["ci", "infer", "requests/min=60"]
    assert [key.requests_per_minute for key in stage.deployments.keys.list(ADA, "default", "reader")] == [60]
    with pytest.raises(ValidationError, match="expected a whole number from 0 to 1000000000"):
        ServerKeyRequest(name="more", scopes=("infer",), tokens_per_minute=10**10)
    assert made.key not in "".join(server.keys)
    stage.deployments.keys.remove(ADA, "default", "reader", "ci")

    assert list(server.keys) == []
    assert stage.deployments.keys.list(ADA, "default", "reader") == []


def _put(stage: Stage, name: str, value: str, who: Principal = ADA) -> None:
    with stage.database.transaction() as session:
        stage.workloads.secrets.put(session, who, "default", name, value)


def test_a_secret_reaches_servers_and_nothing_else(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    _put(stage, "hub", "s3cret-1")
    spec = stage.spec(variables={"LOG_LEVEL": "debug"}, secrets={"HF_TOKEN": "hub"})
    plan = stage.deployments.changes.create(ADA, "default", spec)
    stage.pass_s(3)

    assert stage.target.applied[0].variables == {"LOG_LEVEL": "debug", "HF_TOKEN": "s3cret-1"}
    assert "secrets none -> HF_TOKEN from 'hub'" in plan.changes
    with stage.database.reading() as session:
        rows = [str(list(session.execute(table.select()))) for table in PlatformTable.metadata.sorted_tables]
    seen = [*rows, repr(plan), repr(stage.target.applied), str(stage.deployments.reads.get(ADA, "default", "reader"))]
    assert not [each for each in [*seen, caplog.text] if "s3cret-1" in each]
    assert (stage.data / "secrets.key").stat().st_mode & 0o777 == 0o600

    _put(stage, "hub", "s3cret-2")
    stage.deployments.changes.stop(ADA, "default", "reader")
    stage.pass_s(5)
    stage.deployments.changes.start(ADA, "default", "reader")
    stage.pass_s(5)
    assert stage.target.applied[-1].variables["HF_TOKEN"] == "s3cret-2"


def test_a_secret_of_another_project_or_without_its_key_is_not_read(stage: Stage) -> None:
    _put(stage, "hub", "s3cret")
    with stage.database.transaction() as session:
        (row,) = session.scalars(select(SecretRow))
        session.add(SecretRow(project_id=row.project_id, name="copy", value=row.value, author="x", created=0.0))
    with pytest.raises(ServingError, match="secret 'copy' cannot be decrypted"):
        stage.deployments.changes.create(ADA, "default", stage.spec(secrets={"A": "copy"}))
    with pytest.raises(ServingError, match="secret 'none' does not exist"):
        stage.deployments.changes.create(ADA, "default", stage.spec(secrets={"A": "none"}))


def test_variables_need_the_permission_to_run_code(stage: Stage) -> None:
    deployer = Principal.of("Dee", [Grant(ProjectRole.DEPLOYER, "default")])

    with pytest.raises(NotPermittedError, match="may not use models that run code"):
        stage.deployments.changes.create(deployer, "default", stage.spec(variables={"OPENSSL_CONF": "/tmp/x"}))
    with pytest.raises(NotPermittedError):
        _put(stage, "hub", "x", Principal.of("Vi", [Grant(ProjectRole.VIEWER, "default")]))


LOG = """\
I1128 22:08:26.720496 1 serve.py:325] "serves"
E1128 22:08:27.000000 1 worker.py:10] "[request id: A-1] execute failed"
Traceback (most recent call last):
  ZeroDivisionError
W1128 22:08:28.000000 1 worker.py:11] "slow"
"""


@pytest.mark.parametrize(
    ("search", "level", "found"),
    [
        ("", "error", ["E", "Traceback", "ZeroDivisionError"]),
        ("a-1", "", ["E", "Traceback", "ZeroDivisionError"]),  # the whole entry
        ("zerodivision", "warning", ["E", "Traceback", "ZeroDivisionError"]),
        ("", "warning", ["E", "Traceback", "ZeroDivisionError", "W"]),
        ("serves", "warning", []),
    ],
)
def test_a_log_is_searched_by_entry(search: str, level: str, found: list[str]) -> None:
    lines = "".join(matching_entries(LOG, search, level)).splitlines()

    assert [line.strip().startswith(text) for line, text in zip(lines, found, strict=True)] == [True] * len(found)
