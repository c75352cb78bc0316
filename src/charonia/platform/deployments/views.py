"""Deployments and revisions as pages and the API show them."""

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
        project: Its project.
        name: Its name.
        target: Where it runs.
        state: `starting`, `ready`, `updating`, `degraded`, `failed`, `stopping` or `stopped`.
        reason: Why, in words; "" where all is well.
        doing: What its target does now.
        revision: Number of the newest revision. A change names it.
        wanted: Number of the one that is brought about, or serves; 0 where it is stopped.
        serving: Number of the one that served last, 0 for none.
        spec: The specification of the newest revision.
        http: Address of the protocol over HTTP, "" where nothing runs.
        grpc: Address of the protocol over gRPC.
        metrics: Address of the metrics.
        replicas: Its servers.
        scaling: How many servers there are and why, "" where their number is fixed.
        created: When it was created, in seconds since the epoch.
        changed: When its newest revision was made.
        author: Who made that.
        latest_state: State of the newest revision: `pending`, `serving`, `failed` or `replaced`.
        latest_reason: Why it has failed.
        figures: The latest figures; None where there are none.
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
        number: Its number.
        spec: Its specification.
        note: What its author says about it.
        state: `pending`, `serving`, `failed` or `replaced`.
        reason: Why it has failed.
        author: Who made it.
        created: When, in seconds since the epoch.
        changes: What it changes in the one before, in words.
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
    """What a change would do, or has done.

    Attributes:
        changes: In words; none where the deployment is so already.
        problems: Why it does not fit where it is to run.
        revision: Number of the newest revision, with that of a change that was made; 0 where there is no deployment.
        spec: The specification with all that it leaves open.
        is_new: Whether the deployment is created.
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
    """A key that was made; it is shown this once."""

    name: str
    scopes: Sequence[str]
    key: str = field(repr=False)


def deployment_view(
    row: DeploymentRow, project: str, latest: RevisionRow, figures: FiguresPoint | None
) -> DeploymentView:
    """Return a deployment as it is shown."""
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
