"""Alerts: conditions of a project, told to a webhook when they hold for some time and when they hold no longer.

An alert fires for each thing that its condition holds for, such as a deployment. Several platforms over one database
tell each event one time: a row claims what fires, and an attempt is claimed before it is sent.
"""

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator
from sqlalchemy import delete, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, joinedload

from charonia.core.errors import ServingError, conflict, invalid, not_found, unavailable
from charonia.http_call import NO_ANSWER, HttpAnswer, http_call, is_http_url
from charonia.platform.database.connection import Database, now
from charonia.platform.database.lease import RepeatedStep
from charonia.platform.database.tables import AlertEventRow, AlertRow, DeploymentRow, ProjectRow, TaskRow, named
from charonia.platform.deployments.figures import FiguresPoint
from charonia.platform.models.sources import ANY, AllowedHosts
from charonia.platform.people import audit, projects
from charonia.platform.people.access import Principal, ProjectRole
from charonia.platform.people.secrets import ProjectSecrets
from charonia.platform.values import Amount, RequestBody, Text, Whole, check_name, refused

_log = logging.getLogger(__name__)

CONDITIONS = {
    "error_rate": "% of the requests fail",
    "p99_ms": "ms is the p99 latency",
    "not_ready": "",
    "job_failed": "",
    "disk": "% of the platform's disk are free",
}
"""The figure that a condition compares with its threshold, "" if it has none."""

LOOK_S = 10.0
"""Interval between checks of all conditions."""

FOR_S_MAX = 86_400

ALERTS_MAX = 100
"""Most alerts of a project."""

EVENTS_MAX = 200
"""Events of an alert that are kept, the latest."""

ATTEMPTS_MAX = 5
"""Attempts to send an event. Each pause between them is 4 times as long as the last."""

RETRY_S = 10.0
SENT_AT_ONCE = 20
"""Most events that are sent in one check."""

ANSWER_S_MAX = 5.0
ANSWER_BYTES_MAX = 1024

JOB_S = 86_400.0
"""Time for which a failed job is a condition."""

_PLATFORM = Principal("platform", everywhere=ProjectRole.ADMIN)
_STEADY = ("ready", "stopped", "stopping")


class AlertRule(RequestBody):
    """An alert to create."""

    name: Text
    condition: Literal["error_rate", "p99_ms", "not_ready", "job_failed", "disk"]
    deployment: Text = Field(default="", description="Only this deployment, empty for all of the project.")
    threshold: Amount = Field(
        default=0.0,
        validate_default=True,
        description="Percent of requests, milliseconds, or percent of free disk space.",
    )
    for_s: Annotated[int, Whole(0, FOR_S_MAX)] = Field(
        default=60, description="How long the condition must hold, in seconds."
    )
    url: Text = Field(default="", description="Address of the webhook, empty if it is the value of the secret.")
    secret: Text = Field(default="", description="Secret of the project: the webhook's address, or its bearer token.")
    format: Literal["json", "slack"] = "json"

    @field_validator("threshold")
    @classmethod
    def _is_possible(cls, threshold: float, info: ValidationInfo) -> float:
        figure = CONDITIONS.get(info.data.get("condition", ""), "")
        if figure and not threshold:
            raise refused("a number above 0", threshold)
        if figure.startswith("%") and threshold > 100:
            raise refused("at most 100 %", threshold)
        return threshold


class Alerts:
    """The alerts of a platform, checked in its loop.

    Args:
        latest: Returns the latest figures of a deployment.
        data: The data folder, whose disk is watched.
        page: Address of the platform for browsers.
        send: Makes a call; raises as `http_call`.
        has_turn: Whether this platform checks them now.
    """

    def __init__(
        self,
        database: Database,
        secrets: ProjectSecrets,
        hosts: AllowedHosts,
        latest: Callable[[int], FiguresPoint | None],
        *,
        data: Path,
        page: str,
        send: Callable[..., HttpAnswer] = http_call,
        has_turn: Callable[[], bool] = lambda: True,
    ) -> None:
        self._database = database
        self._secrets = secrets
        self._hosts = hosts
        self._latest = latest
        self._data = data
        self._page = page
        self._send = send
        self._since: dict[tuple[int, str], float] = {}
        self.loop = RepeatedStep("alerts", lambda: self.step(time.time()), LOOK_S, has_turn)

    def list(self, who: Principal, project: str) -> Sequence[AlertRow]:
        with self._database.reading() as session:
            found = projects.find(session, who, project)
            return session.scalars(
                select(AlertRow).where(AlertRow.project_id == found.id).order_by(AlertRow.name)
            ).all()

    def events(self, who: Principal, project: str, *, limit: int = 100) -> Sequence[AlertEventRow]:
        """Return the latest events of a project, with their alerts, latest first."""
        with self._database.reading() as session:
            found = projects.find(session, who, project)
            query = select(AlertEventRow).join(AlertEventRow.alert).where(AlertRow.project_id == found.id)
            query = query.options(joinedload(AlertEventRow.alert)).order_by(AlertEventRow.id.desc()).limit(limit)
            return session.scalars(query).all()

    def create(self, who: Principal, project: str, rule: AlertRule) -> None:
        """Create an alert. Raises ServingError."""
        check_name("alert", rule.name)
        is_admin = who.everywhere is ProjectRole.ADMIN
        with self._database.transaction() as session:
            found = projects.find(session, who, project, ProjectRole.DEPLOYER)
            names = session.scalars(select(AlertRow.name).where(AlertRow.project_id == found.id)).all()
            if rule.name in names:
                raise conflict(f"alert '{rule.name}' already exists")
            if len(names) >= ALERTS_MAX:
                raise unavailable(f"project '{project}' has {len(names)} alerts", hint="delete some of them")
            row = AlertRow(project_id=found.id, any_host=is_admin, author=who.name, created=now())
            for name in AlertRule.model_fields:
                setattr(row, name, getattr(rule, name))
            self._checked(row, self._target(session, row)[0])
            session.add(row)
            detail = {"condition": rule.condition, "deployment": rule.deployment, "threshold": rule.threshold}
            audit.record(session, who, "alert.create", f"{project}/{rule.name}", detail, project_id=found.id)

    def remove(self, who: Principal, project: str, name: str) -> None:
        """Delete an alert and its events."""
        with self._database.transaction() as session:
            found = projects.find(session, who, project, ProjectRole.DEPLOYER)
            row = _named(session, found, name)
            session.execute(delete(AlertEventRow).where(AlertEventRow.alert_id == row.id))
            session.delete(row)
            audit.record(session, who, "alert.remove", f"{project}/{name}", project_id=found.id)

    def test(self, who: Principal, project: str, name: str) -> None:
        """Send a message to the webhook of an alert that says that it is a test. Raises ServingError if that fails."""
        with self._database.transaction() as session:
            found = projects.find(session, who, project, ProjectRole.DEPLOYER)
            rule = _named(session, found, name)
            url, token = self._target(session, rule)
            event = AlertEventRow(alert=rule, subject="test", message="This is a test.", created=now())
            body = self._body(event, "test")
            audit.record(session, who, "alert.test", f"{project}/{name}", project_id=found.id)
        if problem := self._post(rule, url, token, body):
            raise unavailable(f"alert '{name}': {problem}")

    def acknowledge(self, who: Principal, project: str, number: int) -> None:
        """Acknowledge an event."""
        with self._database.transaction() as session:
            found = projects.find(session, who, project, ProjectRole.DEPLOYER)
            row = session.get(AlertEventRow, number)
            if row is None or row.alert.project_id != found.id:
                raise not_found(f"project '{project}' has no event {number}")
            if not row.acknowledged_by:
                row.acknowledged_by = who.name
                subject = f"{project}/{row.alert.name}"
                audit.record(session, who, "alert.acknowledge", subject, {"of": row.subject}, project_id=found.id)

    def step(self, now_s: float) -> None:
        """Check all conditions, and send what is to be told."""
        with self._database.reading() as session:
            rules = {row.id: row for row in session.scalars(select(AlertRow).options(joinedload(AlertRow.project)))}
            active = {(row.id, of): text for row in rules.values() for of, text in self._active(session, row, now_s)}
        self._since = {key: self._since.get(key, now_s) for key in active}
        held = {key: active[key] for key, since_s in self._since.items() if now_s - since_s >= rules[key[0]].for_s}
        self._record(rules, held, set(active))
        for number in self._due(now_s):
            self._deliver(number, now_s)

    def _active(self, session: Session, rule: AlertRow, now_s: float) -> Iterator[tuple[str, str]]:
        """Yield each thing that the condition of an alert holds for now, and a sentence about it."""
        if rule.condition == "disk":
            usage = shutil.disk_usage(self._data)
            if (free := 100 * usage.free / usage.total) < rule.threshold:
                yield "disk", f"{free:.3g} {CONDITIONS['disk']}{_limit(rule)}"
        elif rule.condition == "job_failed":
            since = max(rule.created, now_s - JOB_S)
            query = select(TaskRow).where(TaskRow.project_id == rule.project_id, TaskRow.state == "failed")
            for task in session.scalars(query.where(TaskRow.ended > since).order_by(TaskRow.id.desc()).limit(100)):
                yield f"job {task.id}", f"Job {task.id} ({task.kind} of {task.subject}) has failed: {task.reason[:500]}"
        else:
            rows = select(DeploymentRow).where(DeploymentRow.project_id == rule.project_id)
            for row in session.scalars(rows.where(DeploymentRow.name == rule.deployment) if rule.deployment else rows):
                if text := self._problem(rule, row):
                    yield f"deployment {row.name}", f"Deployment '{row.name}': {text}"

    def _problem(self, rule: AlertRow, row: DeploymentRow) -> str:
        if rule.condition == "not_ready":
            return "" if row.state in _STEADY else f"it is {row.state}{f': {row.reason[:500]}' if row.reason else ''}"
        point = self._latest(row.id)
        if point is None:
            return ""
        figures = point.all
        value = figures.p99_ms
        if rule.condition == "error_rate":
            value = 100 * figures.errors_per_s / figures.requests_per_s if figures.requests_per_s else None
        is_bad = value is not None and value > rule.threshold
        return f"{value:.3g} {CONDITIONS[rule.condition]}{_limit(rule)}" if is_bad else ""

    def _record(
        self, rules: Mapping[int, AlertRow], held: Mapping[tuple[int, str], str], active: set[tuple[int, str]]
    ) -> None:
        """Begin the events of what holds for long enough, and end those of what holds no longer."""
        with self._database.reading() as session:
            found = session.execute(select(AlertEventRow.alert_id, AlertEventRow.subject, AlertEventRow.open))
            known = {
                (alert, subject): is_open or ""
                for alert, subject, is_open in found.all()
                if is_open or "job " in subject
            }
        for alert, subject in held.keys() - known.keys():
            self._begin(rules[alert], subject, held[alert, subject])
        ended = {key for key, is_open in known.items() if is_open} - active
        for alert, subject in ended:
            is_job = alert in rules and rules[alert].condition == "job_failed"
            with self._database.transaction() as session:
                session.execute(
                    update(AlertEventRow)
                    .where(AlertEventRow.alert_id == alert, AlertEventRow.open == subject)
                    .values(open=None, ended=now(), unsent="" if is_job else "resolved", attempts=0, next=0.0)
                )

    def _begin(self, rule: AlertRow, subject: str, text: str) -> None:
        try:
            with self._database.transaction() as session:
                event = AlertEventRow(alert_id=rule.id, subject=subject, open=subject, message=text, created=now())
                event.unsent = "firing"
                session.add(event)
                session.flush()
                old = select(AlertEventRow.id).where(AlertEventRow.alert_id == rule.id, AlertEventRow.open.is_(None))
                outdated = session.scalars(old.order_by(AlertEventRow.id.desc()).offset(EVENTS_MAX)).all()
                session.execute(delete(AlertEventRow).where(AlertEventRow.id.in_(outdated)))
                name = f"{rule.project.name}/{rule.name}"
                audit.record(session, _PLATFORM, "alert.fire", name, {"of": subject}, project_id=rule.project_id)
        except (IntegrityError, ServingError) as error:  # another platform over this database was first, or it is busy
            _log.info("alert '%s' of %s: %s", rule.name, subject, type(error).__name__)

    def _due(self, now_s: float) -> Sequence[int]:
        query = select(AlertEventRow.id).where(AlertEventRow.unsent != "", AlertEventRow.next <= now_s)
        with self._database.reading() as session:
            return session.scalars(query.order_by(AlertEventRow.id).limit(SENT_AT_ONCE)).all()

    def _deliver(self, number: int, now_s: float) -> None:
        """Send an event, unless another platform does; after the last attempt, the problem stays."""
        with self._database.transaction() as session:
            event = session.get(AlertEventRow, number)
            if event is None or not event.unsent:
                return
            is_last = event.attempts + 1 >= ATTEMPTS_MAX
            state, attempts = event.unsent, event.attempts
            values = {
                "attempts": attempts + 1,
                "next": now_s + RETRY_S * 4**attempts,
                "unsent": "" if is_last else state,
            }
            this = (AlertEventRow.id == number, AlertEventRow.attempts == attempts, AlertEventRow.unsent == state)
            claimed = session.execute(update(AlertEventRow).where(*this).values(**values).returning(AlertEventRow.id))
            if claimed.first() is None:
                return
            rule, body = event.alert, self._body(event, state)
            problem = ""
            try:
                url, token = self._target(session, rule)
            except ServingError as error:
                problem = error.message
            session.expunge_all()
        if not problem:
            problem = self._post(rule, url, token, body)
        with self._database.transaction() as session:
            sent = {"problem": problem} if problem else {"problem": "", "unsent": "", "next": 0.0}
            after = AlertEventRow.attempts == attempts + 1
            session.execute(update(AlertEventRow).where(AlertEventRow.id == number, after).values(**sent))

    def _post(self, rule: AlertRow, url: str, token: str, body: bytes) -> str:
        """Call a webhook, and return why that failed, "" for success; never its address, which may be a secret."""
        headers = {"Content-Type": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        try:
            self._checked(rule, url)
            answer = self._send("POST", url, headers, body, timeout_s=ANSWER_S_MAX, bytes_max=ANSWER_BYTES_MAX)
        except ServingError as error:
            return error.message
        except NO_ANSWER as error:
            return f"the webhook cannot be called: {getattr(error, 'strerror', None) or type(error).__name__}"
        is_good = HTTPStatus.OK <= answer.status < HTTPStatus.MULTIPLE_CHOICES
        return "" if is_good else f"the webhook answers {answer.status}"

    def _target(self, session: Session, rule: AlertRow) -> tuple[str, str]:
        """Return the address of the webhook of an alert, and its token."""
        secret = self._secrets.value(session, rule.project_id, rule.secret).strip() if rule.secret else ""
        if not (rule.url or secret):
            raise invalid(f"alert '{rule.name}': expected a url, or a secret with it")
        return (rule.url, secret) if rule.url else (secret, "")

    def _checked(self, rule: AlertRow, url: str) -> None:
        """Check that the platform may call a server."""
        if not is_http_url(url):  # it can be secret
            raise invalid(f"alert '{rule.name}': expected https://... or http://... as the webhook's address")
        parts = urlsplit(url)
        hosts = AllowedHosts((ANY,)) if rule.any_host else self._hosts
        host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else parts.hostname
        hosts.check(f"{parts.scheme}://{host}")

    def _body(self, event: AlertEventRow, state: str) -> bytes:
        rule = event.alert
        page = f"{self._page}/p/{rule.project.name}/alerts"
        if rule.format == "slack":
            text = f"{event.message} ({rule.name}, {state})"
            for character, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
                text = text.replace(character, escaped)
            return json.dumps({"text": f"{text} <{page}|Open>"}).encode()
        content: dict[str, Any] = {
            "state": state, "alert": rule.name, "project": rule.project.name, "condition": rule.condition,
            "subject": event.subject, "message": event.message, "since": event.created, "url": page,
        }  # fmt: skip
        return json.dumps(content).encode()


def _named(session: Session, project: ProjectRow, name: str) -> AlertRow:
    row = named(session, AlertRow, project.id, name)
    if row is None:
        raise not_found(f"project '{project.name}' has no alert '{name}'")
    return row


def open_count(session: Session, project_id: int) -> int:
    """Return how many events of a project are not acknowledged."""
    query = select(func.count(AlertEventRow.id)).join(AlertEventRow.alert).where(AlertRow.project_id == project_id)
    return session.scalar(query.where(AlertEventRow.open.is_not(None), AlertEventRow.acknowledged_by == "")) or 0


def _limit(rule: AlertRow) -> str:
    unit = CONDITIONS[rule.condition].split()[0]
    return f" (limit {rule.threshold:g} {unit})"
