"""Deployments and revisions as the console and the API show them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from charonia.platform.database.tables import DeploymentRow, RevisionRow
from charonia.platform.deployments.figures import FiguresPoint
from charonia.platform.deployments.spec import read_spec
from charonia.platform.deployments.spec_diff import changes


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A server of a deployment."""

    name: str
    is_ready: bool
    restarts: int
    reason: str
    doing: str = ""
    http: str = ""
    metrics: str = ""


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
    replicas: Sequence[ReplicaView]
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
    """

    changes: Sequence[str]
    problems: Sequence[str]
    revision: int
    spec: Mapping[str, Any]
    is_new: bool


@dataclass(frozen=True, slots=True)
class ServerKeyView:
    """An API key of the servers of a deployment, without the key."""

    name: str
    scopes: Sequence[str]
    author: str
    created: float


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
    return DeploymentView(
        project=project,
        name=row.name,
        target=row.target,
        state=row.state,
        reason=row.reason,
        doing=seen.get("doing", ""),
        revision=row.latest,
        wanted=row.wanted,
        serving=row.serving,
        spec=latest.spec,
        http=seen.get("http", ""),
        grpc=seen.get("grpc", ""),
        metrics=seen.get("metrics", ""),
        replicas=[ReplicaView(**replica) for replica in seen.get("replicas", ())],
        scaling=seen.get("scaling", ""),
        created=row.created,
        changed=latest.created,
        author=latest.author,
        latest_state=latest.state,
        latest_reason=latest.reason,
        figures=figures,
    )


def revision_view(row: RevisionRow, before: RevisionRow | None) -> RevisionView:
    return RevisionView(
        number=row.number,
        spec=row.spec,
        note=row.note,
        state=row.state,
        reason=row.reason,
        author=row.author,
        created=row.created,
        changes=changes(read_spec(before.spec) if before is not None else None, read_spec(row.spec)),
    )
