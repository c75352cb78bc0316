"""Alerts: when they fire, what webhooks are told, and which servers are called."""

import json
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from charonia.core.errors import ServingError
from charonia.http_call import HttpAnswer
from charonia.platform.alerts.alerts import ATTEMPTS_MAX, RETRY_S, AlertRule, Alerts
from charonia.platform.database.connection import Database, now
from charonia.platform.database.tables import DeploymentRow, ProjectRow, TaskRow
from charonia.platform.deployments.figures import Figures, FiguresPoint
from charonia.platform.models.sources import AllowedHosts
from charonia.platform.people import audit, projects
from charonia.platform.people.access import Grant, NotPermittedError, Principal, ProjectRole
from charonia.platform.people.secrets import ProjectSecrets
from charonia.platform.values import problems_of

ADA = Principal.of("Ada", [Grant(ProjectRole.DEPLOYER, "default")])
EVE = Principal.of("Eve", [Grant(ProjectRole.VIEWER, "default")])
HOOK = "https://hooks.example/T0/s3cret"


class Scene:
    """A project with a deployment, and a webhook that a test lets fail."""

    def __init__(self, folder: Path) -> None:
        self.database = Database(f"sqlite:///{folder / 'platform.sqlite'}")
        self.database.migrate()
        self.status = 200
        self.calls: list[tuple[str, dict[str, str], Any]] = []
        self.figures = Figures()
        self.now_s = now()
        self.secrets = ProjectSecrets(folder)
        with self.database.transaction() as session:
            projects.ensure_default(session)
        with self.database.transaction() as session:
            project = session.query(ProjectRow).one()
            at = {"project_id": project.id, "created": now()}
            session.add(DeploymentRow(name="reader", target="local", state="ready", **at))
            self.secrets.put(session, ADA, "default", "hook", HOOK)
        self.alerts = self.platform(folder)

    def platform(self, folder: Path) -> Alerts:
        hosts = AllowedHosts(("hooks.example",))
        return Alerts(
            *(self.database, self.secrets, hosts, self.latest), data=folder, page="https://platform", send=self.send
        )

    def latest(self, deployment: int) -> FiguresPoint:
        return FiguresPoint(0.0, self.figures, {}, 0.0, 0.0, None, None)

    def send(self, method: str, url: str, headers: dict[str, str], body: bytes, **limits: object) -> HttpAnswer:
        self.calls.append((url, headers, json.loads(body)))
        return HttpAnswer(self.status, "", Message(), b"")  # type: ignore[arg-type] # headers are not read

    def pass_s(self, seconds: float, *others: Alerts) -> None:
        self.now_s += seconds
        for each in (self.alerts, *others):
            each.step(self.now_s)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_an_alert_fires_one_time_is_acknowledged_and_resolved(scene: Scene, tmp_path: Path) -> None:
    scene.alerts.create(
        ADA,
        "default",
        AlertRule(name="slow", condition="p99_ms", deployment="reader", threshold=100, for_s=30, secret="hook"),
    )
    second = scene.platform(tmp_path)  # over the same database
    scene.figures = Figures(p99_ms=250)
    scene.alerts.test(ADA, "default", "slow")
    ((url, _, body),) = scene.calls
    assert (url, body["state"], body["message"]) == (HOOK, "test", "This is a test.")
    scene.calls.clear()
    scene.pass_s(1, second)
    scene.pass_s(20, second)
    assert scene.calls == []
    scene.pass_s(10, second)
    scene.pass_s(10, second)

    ((url, headers, body),) = scene.calls
    assert (url, "Authorization" in headers) == (HOOK, False)
    assert (body["state"], body["alert"], body["subject"]) == ("firing", "slow", "deployment reader")
    assert body["message"] == "Deployment 'reader': 250 ms is the p99 latency (limit 100 ms)"
    (event,) = scene.alerts.events(EVE, "default")
    with pytest.raises(NotPermittedError):
        scene.alerts.acknowledge(EVE, "default", event.id)
    scene.alerts.acknowledge(ADA, "default", event.id)
    scene.figures = Figures(p99_ms=20)
    scene.pass_s(10, second)

    assert [call[2]["state"] for call in scene.calls] == ["firing", "resolved"]
    (event,) = scene.alerts.events(EVE, "default")
    assert (event.open, event.acknowledged_by, event.problem) == (None, "Ada", "")
    with scene.database.reading() as session:
        log = [(row.who, row.action, row.subject) for row in audit.entries(session, ADA)]
    assert log[:4] == [
        ("Ada", "alert.acknowledge", "default/slow"),
        ("platform", "alert.fire", "default/slow"),
        ("Ada", "alert.test", "default/slow"),
        ("Ada", "alert.create", "default/slow"),
    ]


def test_every_condition_says_what_is_wrong(scene: Scene) -> None:
    for name, more in (
        ("error_rate", {"threshold": 5}),
        ("not_ready", {}),
        ("job_failed", {}),
        ("disk", {"threshold": 100}),
    ):
        common = {"for_s": 0, "url": "https://hooks.example/", "secret": "hook", "format": "slack"}
        rule = AlertRule.model_validate({"name": name, "condition": name, **common, **more})
        scene.alerts.create(ADA, "default", rule)
    scene.pass_s(1)
    assert [event.alert.name for event in scene.alerts.events(ADA, "default")] == ["disk"]
    with scene.database.transaction() as session:
        row = session.query(DeploymentRow).one()
        row.state, row.reason = "failed", "its <server> has exited"
        task = {"state": "failed", "ended": now() + 1, "reason": "no memory"}
        session.add(TaskRow(kind="tune", subject="m/1", project_id=row.project_id, created=now(), **task))
    scene.figures = Figures(requests_per_s=10, errors_per_s=1)
    scene.pass_s(1)
    scene.pass_s(1)

    assert sorted(call[2]["text"] for call in scene.calls)[1:] == [
        "Deployment 'reader': 10 % of the requests fail (limit 5 %) (error_rate, firing) "
        "<https://platform/p/default/alerts|Open>",
        "Deployment 'reader': it is failed: its &lt;server&gt; has exited (not_ready, firing) "
        "<https://platform/p/default/alerts|Open>",
        "Job 1 (tune of m/1) has failed: no memory (job_failed, firing) <https://platform/p/default/alerts|Open>",
    ]
    assert {call[1]["Authorization"] for call in scene.calls} == {f"Bearer {HOOK}"}


def test_a_webhook_that_fails_is_called_a_number_of_times(scene: Scene) -> None:
    scene.alerts.create(ADA, "default", AlertRule(name="full", condition="disk", threshold=100, for_s=0, secret="hook"))
    scene.status = 500
    scene.pass_s(1)
    scene.pass_s(RETRY_S - 1)
    assert len(scene.calls) == 1
    for attempt in range(10):
        scene.pass_s(RETRY_S * 4**attempt)

    assert len(scene.calls) == ATTEMPTS_MAX
    (event,) = scene.alerts.events(ADA, "default")
    assert event.problem == "the webhook answers 500"


@pytest.mark.parametrize(
    "url", ["http://169.254.169.254/latest", "http://127.0.0.1:8080/", "https://hooks.example@10.0.0.1/", "file:///etc"]
)
def test_other_servers_are_not_called(scene: Scene, url: str) -> None:
    with pytest.raises(ServingError, match="expected"):
        scene.alerts.create(ADA, "default", AlertRule(name="a", condition="disk", threshold=1, url=url))
    scene.alerts.create(ADA, "default", AlertRule(name="a", condition="disk", threshold=100, for_s=0, secret="hook"))
    with scene.database.transaction() as session:
        scene.secrets.put(session, ADA, "default", "hook", url)

    scene.pass_s(1)

    assert scene.calls == []
    assert "expected" in scene.alerts.events(ADA, "default")[0].problem


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"condition": "load"}, "condition: expected 'error_rate', 'p99_ms', 'not_ready', 'job_failed' or 'disk'"),
        ({"format": "xml"}, "format: expected 'json' or 'slack', got 'xml'"),
        ({"threshold": 0.0}, "threshold: expected a number above 0, got 0.0"),
        ({"threshold": 101.0}, "threshold: expected at most 100 %, got 101.0"),
        ({"for_s": 10**6}, "for_s: expected a whole number from 0 to 86400, got 1000000"),
        ({"secret": ""}, "expected a url, or a secret with it"),
        ({"secret": "unknown"}, "secret 'unknown' does not exist"),
        ({"name": "a b"}, "alert: expected a name"),
    ],
)
def test_an_alert_that_could_not_be_told_is_refused(scene: Scene, wrong: dict[str, Any], says: str) -> None:
    good: dict[str, Any] = {"name": "a", "condition": "disk", "threshold": 5.0, "secret": "hook"}

    with pytest.raises((ServingError, ValidationError)) as caught:
        scene.alerts.create(ADA, "default", AlertRule(**{**good, **wrong}))

    error: Any = caught.value
    assert says in (error.message if isinstance(error, ServingError) else problems_of(error.errors())[0])
    with pytest.raises(NotPermittedError):
        scene.alerts.create(EVE, "default", AlertRule(**good))
