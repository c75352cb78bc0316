"""Deployments and revisions as the console and the API show them. Any thread may call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from charonia.core.errors import not_found
from charonia.platform.database.connection import Database, now
from charonia.platform.database.tables import DeploymentRow, RevisionRow, copied
from charonia.platform.deployments.collector import Collector
from charonia.platform.deployments.figures import FiguresPoint, KeyFigures
from charonia.platform.deployments.spec import changes, read_spec
from charonia.platform.people import projects
from charonia.platform.people.access import Principal, ProjectRole
from charonia.platform.targets.api import Replica

MARKS_MAX = 50
"""Most revisions that are marked in charts."""


@dataclass(frozen=True, slots=True)
class DeploymentView:
    """A deployment.

    Attributes:
        state: `starting`, `ready`, `updating`, `degraded`, `failed`, `stopping` or `stopped`.
        reason: The reason, for display; "" if all is well.
        revision: Number of the latest revision. A change names it.
        wanted: Number of the revision that is applied or serves; 0 if stopped.
        serving: Number of the revision that served last, 0 for none.
        http: Address of the protocol over HTTP, "" if nothing runs.
        scaling: The number of servers and its reason, "" if the number is fixed.
        created: When it was created, in seconds since the epoch.
        latest_state: State of the latest revision: `pending`, `serving`, `failed` or `replaced`.
        figures: The latest figures, None if there are none.
    """

    project: str
    name: str
    target: str
    state: str
    reason: str
    doing: str
    revision: int
    wanted: int
    serving: int
    spec: Mapping[str, Any]
    http: str
    grpc: str
    metrics: str
    replicas: Sequence[Replica]
    scaling: str
    created: float
    changed: float
    author: str
    latest_state: str
    latest_reason: str
    figures: FiguresPoint | None = None


@dataclass(frozen=True, slots=True)
class RevisionView:
    """A revision.

    Attributes:
        state: `pending`, `serving`, `failed` or `replaced`.
        created: When it was created, in seconds since the epoch.
        changes: Its changes to the previous revision, in words.
    """

    number: int
    spec: Mapping[str, Any]
    note: str
    state: str
    reason: str
    author: str
    created: float
    changes: Sequence[str]


@dataclass(frozen=True, slots=True)
class ChangePlan:
    """The effect of a change, planned or applied.

    Attributes:
        changes: In words; none if the deployment already matches.
        problems: Why it does not fit its target.
        revision: Number of the latest revision, including one created by the change; 0 without a deployment.
        spec: The complete specification, with numbers in place of "latest".
        steps: Models that the change does not name and that its models call: they are deployed with them.
        missing: Calls of models that the project does not have, a sentence each.
    """

    changes: Sequence[str]
    problems: Sequence[str]
    revision: int
    spec: Mapping[str, Any]
    is_new: bool
    steps: Sequence[str] = ()
    missing: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ServerKeyView:
    """An API key of the servers of a deployment, without the key."""

    name: str
    scopes: Sequence[str]
    author: str
    created: float
    requests_per_minute: int
    tokens_per_minute: int
    usage: KeyFigures | None = None


@dataclass(frozen=True, slots=True)
class NewServerKey:
    """A new key; it is shown only once."""

    name: str
    scopes: Sequence[str]
    key: str = field(repr=False)


def deployment_view(
    row: DeploymentRow, project: str, latest: RevisionRow, figures: FiguresPoint | None
) -> DeploymentView:
    """Return a deployment from its rows."""
    seen = row.observed
    observed = {name: seen.get(name, "") for name in ("doing", "http", "grpc", "metrics", "scaling")}
    return copied(
        DeploymentView,
        row,
        **observed,
        project=project,
        revision=row.latest,
        spec=latest.spec,
        replicas=[Replica(**replica) for replica in seen.get("replicas", ())],
        changed=latest.created,
        author=latest.author,
        latest_state=latest.state,
        latest_reason=latest.reason,
        figures=figures,
    )


def revision_view(row: RevisionRow, before: RevisionRow | None) -> RevisionView:
    """Return a revision with its changes to the one before."""
    found = changes(read_spec(before.spec) if before is not None else None, read_spec(row.spec))
    return copied(RevisionView, row, changes=found)


class DeploymentReads:
    """Reads deployments."""

    def __init__(self, database: Database, collector: Collector) -> None:
        self._database = database
        self._collector = collector

    def list(
        self, who: Principal, project: str, *, search: str = "", limit: int = 50, offset: int = 0
    ) -> tuple[Sequence[DeploymentView], int]:
        """Return deployments by name, and their total number."""
        with self._database.reading() as session:
            found = projects.find(session, who, project)
            chosen = (DeploymentRow.project_id == found.id) & DeploymentRow.name.contains(search, autoescape=True)
            count = session.scalar(select(func.count()).select_from(DeploymentRow).where(chosen)) or 0
            query = with_latest().where(chosen).order_by(DeploymentRow.name).limit(limit).offset(offset)
            rows = session.execute(query).all()
        return [deployment_view(row, project, latest, self._collector.latest(row.id)) for row, latest in rows], count

    def get(self, who: Principal, project: str, name: str) -> DeploymentView:
        """Return a deployment with its latest figures."""
        row, latest = self._found(who, project, name)
        return deployment_view(row, project, latest, self._collector.latest(row.id))

    def revisions(
        self, who: Principal, project: str, name: str, *, limit: int = 50, offset: int = 0
    ) -> tuple[Sequence[RevisionView], int]:
        """Return the revisions of a deployment, latest first, and their total number."""
        row, found = self._revisions(who, project, name, limit=limit + 1, offset=offset)
        pairs = zip(found, [*found[1:], None], strict=False)
        return [revision_view(one, former) for one, former in pairs][:limit], row.latest

    def revision(self, who: Principal, project: str, name: str, number: int) -> RevisionView:
        """Return a revision of a deployment."""
        _, rows = self._revisions(who, project, name, RevisionRow.number.in_((number, number - 1)))
        found = {one.number: one for one in rows}
        if number not in found:
            raise not_found(f"deployment '{name}' has no revision {number}")
        return revision_view(found[number], found.get(number - 1))

    def difference(self, who: Principal, project: str, name: str, before: int, after: int) -> Sequence[str]:
        """Return the changes of a revision, in words."""
        one, other = (self.revision(who, project, name, number) for number in (before, after))
        return changes(read_spec(one.spec), read_spec(other.spec))

    def figures(self, who: Principal, project: str, name: str, since_s: float = 0.0) -> Sequence[FiguresPoint]:
        """Return the figures of a deployment after a time, 0 for the last hour; this increases their frequency."""
        row, _ = self._found(who, project, name)
        recent = self._collector.since(row.id, since_s)
        return self._collector.history.since(row.id, since_s, recent, now()) if since_s else recent

    def marks(self, who: Principal, project: str, name: str, since_s: float) -> Sequence[tuple[float, int]]:
        """Return times and numbers of the revisions that were created after a time, the last `MARKS_MAX`."""
        _, found = self._revisions(who, project, name, RevisionRow.created > since_s, limit=MARKS_MAX)
        return [(one.created, one.number) for one in found]

    def is_quiet(self, who: Principal, project: str, name: str) -> bool:
        """Whether a deployment has had no request in the time that figures are kept."""
        row, _ = self._found(who, project, name)
        recent = self._collector.since(row.id, 0.0)
        return not any(point.all.requests_per_s for point in recent) and not self._collector.history.was_busy(row.id)

    def _revisions(
        self, who: Principal, project: str, name: str, *chosen: ColumnElement[bool], limit: int = 2, offset: int = 0
    ) -> tuple[DeploymentRow, Sequence[RevisionRow]]:
        """Return a deployment, and revisions of it, latest first."""
        with self._database.reading() as session:
            row, _ = find(session, who, project, name, ProjectRole.VIEWER)
            query = select(RevisionRow).where(RevisionRow.deployment_id == row.id, *chosen)
            found = session.scalars(query.order_by(RevisionRow.number.desc()).limit(limit).offset(offset)).all()
            return row, found

    def _found(self, who: Principal, project: str, name: str) -> tuple[DeploymentRow, RevisionRow]:
        with self._database.reading() as session:
            return find(session, who, project, name, ProjectRole.VIEWER)


def find(
    session: Session, who: Principal, project: str, name: str, role: ProjectRole
) -> tuple[DeploymentRow, RevisionRow]:
    """Return a deployment and its latest revision."""
    found = projects.find(session, who, project, role)
    query = with_latest().where(DeploymentRow.project_id == found.id, DeploymentRow.name == name)
    row = session.execute(query).first()
    if row is None:
        raise not_found(f"deployment '{name}' does not exist in project '{project}'")
    return row[0], row[1]


def with_latest() -> Any:
    """Return the query for deployments with their latest revisions."""
    join = (RevisionRow.deployment_id == DeploymentRow.id) & (RevisionRow.number == DeploymentRow.latest)
    return select(DeploymentRow, RevisionRow).join(RevisionRow, join)


def revision_of(session: Session, deployment_id: int, number: int) -> RevisionRow | None:
    """Return a revision, None if it does not exist."""
    query = select(RevisionRow).where(RevisionRow.deployment_id == deployment_id, RevisionRow.number == number)
    return session.scalar(query)
