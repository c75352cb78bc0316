"""The tables.

Times are seconds since the epoch, UTC. JSON columns are for values that are only read and written as a whole.
"""

from typing import Any, ClassVar, TypeVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Connection,
    ForeignKey,
    Index,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    event,
    insert,
    select,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

NAME_CHARS_MAX = 128

_T = TypeVar("_T")


class PlatformTable(DeclarativeBase):
    """Base of all tables."""

    type_annotation_map: ClassVar[dict[Any, Any]] = {dict[str, Any]: JSON, list[Any]: JSON}
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    created: Mapped[float]


class ProjectRow(PlatformTable):
    """Groups models, environments and deployments, and is the scope of roles."""

    __tablename__ = "projects"
    name: Mapped[str] = mapped_column(String(NAME_CHARS_MAX), unique=True)


class ModelRow(PlatformTable):
    """A model. It has the same name in servers."""

    __tablename__ = "models"
    __table_args__ = (UniqueConstraint("project_id", "name"),)
    project_id: Mapped[int] = mapped_column(ForeignKey("projects.id"), index=True)
    name: Mapped[str] = mapped_column(String(NAME_CHARS_MAX))
    owner: Mapped[str] = mapped_column(String(NAME_CHARS_MAX), default="")
    description: Mapped[str] = mapped_column(Text, default="")
    tags: Mapped[list[Any]] = mapped_column(default=list)
    links: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """ServiceAddresses by label."""
    follows: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """The branch that it follows: see `models.follow`."""
    last_number: Mapped[int] = mapped_column(default=0)
    """Number of the version that was added last; numbers are not reused."""

    project: Mapped[ProjectRow] = relationship()
    versions: Mapped[list["VersionRow"]] = relationship(
        back_populates="model", order_by="VersionRow.number", cascade="all, delete-orphan"
    )


class VersionRow(PlatformTable):
    """An immutable version of a model.

    `files` maps paths within the folder of the model to `{"sha256", "size"}`; `digest` is the hash of that mapping.
    `report` is the result of the check: see `models.records`.
    """

    __tablename__ = "versions"
    __table_args__ = (UniqueConstraint("model_id", "number"),)
    model_id: Mapped[int] = mapped_column(ForeignKey("models.id", ondelete="CASCADE"))
    number: Mapped[int]
    state: Mapped[str] = mapped_column(String(16))
    """`arriving`, `checking`, `ready` or `refused`."""
    reason: Mapped[str] = mapped_column(Text, default="")
    digest: Mapped[str] = mapped_column(String(64), default="", index=True)
    size: Mapped[int] = mapped_column(BigInteger, default=0)
    files: Mapped[dict[str, Any]] = mapped_column(default=dict)
    source: Mapped[str] = mapped_column(Text, default="")
    """Its source: "upload of FILE", an address, a folder."""
    notes: Mapped[str] = mapped_column(Text, default="")
    backend: Mapped[str] = mapped_column(String(64), default="")
    runs_code: Mapped[bool] = mapped_column(default=False)
    """Whether it is not known to be data: loading it may run its code."""
    report: Mapped[dict[str, Any]] = mapped_column(default=dict)
    author: Mapped[str] = mapped_column(String(NAME_CHARS_MAX), default="")

    model: Mapped[ModelRow] = relationship(back_populates="versions")


class UploadRow(PlatformTable):
    """A file being uploaded in pieces. Received bytes are in the data folder: see `artifacts.uploads`."""

    __tablename__ = "uploads"
    key: Mapped[str] = mapped_column(String(64), unique=True)
    project_id: Mapped[int] = mapped_column(ForeignKey("projects.id"))
    path: Mapped[str] = mapped_column(Text)
    """Name of the file, including its folder in an upload of a folder."""
    batch: Mapped[str] = mapped_column(String(64), index=True)
    """Identifier shared by all files of one version."""
    size: Mapped[int] = mapped_column(BigInteger)
    is_taken: Mapped[bool] = mapped_column(default=False)
    """Whether a version is being created from it: uploads to it are refused."""
    author: Mapped[str] = mapped_column(String(NAME_CHARS_MAX), default="")


class EnvironmentRow(PlatformTable):
    """A Python version with packages. Environments of equal digest share a folder."""

    __tablename__ = "environments"
    __table_args__ = (UniqueConstraint("project_id", "name"),)
    project_id: Mapped[int] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str] = mapped_column(String(NAME_CHARS_MAX))
    python: Mapped[str] = mapped_column(String(16))
    requirements: Mapped[str] = mapped_column(Text)
    imports: Mapped[list[Any]] = mapped_column(default=list)
    """Modules that a build imports to test itself."""
    digest: Mapped[str] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16))
    """`waiting`, `building`, `ready` or `failed`."""
    packages: Mapped[list[Any]] = mapped_column(default=list)
    """Installed packages: `[name, version]`."""
    size: Mapped[int] = mapped_column(BigInteger, default=0)
    reason: Mapped[str] = mapped_column(Text, default="")

    project: Mapped[ProjectRow] = relationship()


class DeploymentRow(PlatformTable):
    """A deployment. `wanted` is the number of the revision that the reconciler applies; 0 for none."""

    __tablename__ = "deployments"
    __table_args__ = (UniqueConstraint("project_id", "name"),)
    project_id: Mapped[int] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str] = mapped_column(String(NAME_CHARS_MAX))
    target: Mapped[str] = mapped_column(String(32))
    latest: Mapped[int] = mapped_column(default=0)
    """Number of the latest revision. A change names the revision it is based on, and is refused if it is outdated."""
    wanted: Mapped[int] = mapped_column(default=0)
    serving: Mapped[int] = mapped_column(default=0)
    """Number of the revision that answers; 0 for none."""
    state: Mapped[str] = mapped_column(String(16))
    """`starting`, `ready`, `updating`, `degraded`, `failed`, `stopping` or `stopped`."""
    reason: Mapped[str] = mapped_column(Text, default="")
    observed: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """The target's last observation: addresses, processes, memory. See `targets.api.Observed`."""
    removed: Mapped[bool] = mapped_column(default=False)
    generation: Mapped[int] = mapped_column(default=0)
    """Counts changes of the wanted state: the reconciler does not store results for an earlier one."""
    begun: Mapped[float] = mapped_column(default=0.0)
    """When the wanted revision was applied. With the next three, see `deployments.reconcile.DesiredState`."""
    attempts: Mapped[int] = mapped_column(default=0)
    ready: Mapped[float] = mapped_column(default=0.0)
    failure: Mapped[str] = mapped_column(Text, default="")
    canaries: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """Who started the running canary plan, or what is to begin, by model. See `deployments.service`."""

    project: Mapped[ProjectRow] = relationship()
    revisions: Mapped[list["RevisionRow"]] = relationship(
        back_populates="deployment", order_by="RevisionRow.number", cascade="all, delete-orphan"
    )


class RevisionRow(PlatformTable):
    """A specification of a deployment: past, serving or pending. See `deployments.spec`."""

    __tablename__ = "revisions"
    __table_args__ = (UniqueConstraint("deployment_id", "number"),)
    deployment_id: Mapped[int] = mapped_column(ForeignKey("deployments.id", ondelete="CASCADE"))
    number: Mapped[int]
    spec: Mapped[dict[str, Any]]
    note: Mapped[str] = mapped_column(Text, default="")
    state: Mapped[str] = mapped_column(String(16))
    """`pending`, `serving`, `failed` or `replaced`."""
    reason: Mapped[str] = mapped_column(Text, default="")
    author: Mapped[str] = mapped_column(String(NAME_CHARS_MAX), default="")

    deployment: Mapped[DeploymentRow] = relationship(back_populates="revisions")


class HistoryRow(PlatformTable):
    """The figures of a deployment in an interval, which ended at `created`. See `deployments.history`."""

    __tablename__ = "history"
    __table_args__ = (Index("ix_history_deployment_id_step_created", "deployment_id", "step", "created"),)
    deployment_id: Mapped[int] = mapped_column(ForeignKey("deployments.id", ondelete="CASCADE"))
    step: Mapped[int]
    """Length of the interval in seconds."""
    is_busy: Mapped[bool]
    data: Mapped[dict[str, Any]]


class LeaseRow(PlatformTable):
    """Which platform reconciles. There is one row. See `database.lease`."""

    __tablename__ = "lease"
    holder: Mapped[str] = mapped_column(String(NAME_CHARS_MAX))
    until: Mapped[float]


@event.listens_for(LeaseRow.__table__, "after_create")
def _add_lease(table: Any, connection: Connection, **_: object) -> None:
    connection.execute(insert(table).values(holder="", until=0.0, created=0.0))


class SecretRow(PlatformTable):
    """A secret of a project. See `people.secrets`."""

    __tablename__ = "secrets"
    __table_args__ = (UniqueConstraint("project_id", "name"),)
    project_id: Mapped[int] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str] = mapped_column(String(NAME_CHARS_MAX))
    value: Mapped[str] = mapped_column(Text)
    """Encrypted with the key file."""
    author: Mapped[str] = mapped_column(String(NAME_CHARS_MAX), default="")


class ServerKeyRow(PlatformTable):
    """An API key of the servers of a deployment. Only its SHA-256 is stored."""

    __tablename__ = "server_keys"
    __table_args__ = (UniqueConstraint("deployment_id", "name"),)
    deployment_id: Mapped[int] = mapped_column(ForeignKey("deployments.id", ondelete="CASCADE"))
    name: Mapped[str] = mapped_column(String(NAME_CHARS_MAX))
    scopes: Mapped[list[Any]]
    """Of `infer`, `read` and `admin`."""
    digest: Mapped[str] = mapped_column(String(64))
    author: Mapped[str] = mapped_column(String(NAME_CHARS_MAX), default="")
    requests_per_minute: Mapped[int] = mapped_column(default=0)
    tokens_per_minute: Mapped[int] = mapped_column(default=0)


class AlertRow(PlatformTable):
    """An alert of a project. See `alerts.alerts`."""

    __tablename__ = "alerts"
    __table_args__ = (UniqueConstraint("project_id", "name"),)
    project_id: Mapped[int] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str] = mapped_column(String(NAME_CHARS_MAX))
    condition: Mapped[str] = mapped_column(String(16))
    deployment: Mapped[str] = mapped_column(String(NAME_CHARS_MAX))
    threshold: Mapped[float]
    for_s: Mapped[int]
    url: Mapped[str] = mapped_column(Text)
    secret: Mapped[str] = mapped_column(String(NAME_CHARS_MAX))
    format: Mapped[str] = mapped_column(String(16))
    any_host: Mapped[bool]
    """Whether an administrator of all projects has created it: its webhook may be anywhere."""
    author: Mapped[str] = mapped_column(String(NAME_CHARS_MAX), default="")

    project: Mapped[ProjectRow] = relationship()


class AlertEventRow(PlatformTable):
    """What the condition of an alert held for."""

    __tablename__ = "alert_events"
    __table_args__ = (UniqueConstraint("alert_id", "open"),)
    alert_id: Mapped[int] = mapped_column(ForeignKey("alerts.id", ondelete="CASCADE"))
    subject: Mapped[str] = mapped_column(String(2 * NAME_CHARS_MAX))
    open: Mapped[str | None] = mapped_column(String(2 * NAME_CHARS_MAX))
    """The subject while the condition holds for it, then nothing: it is open one time only."""
    message: Mapped[str] = mapped_column(Text)
    ended: Mapped[float] = mapped_column(default=0.0)
    acknowledged_by: Mapped[str] = mapped_column(String(NAME_CHARS_MAX), default="")
    unsent: Mapped[str] = mapped_column(String(16), default="")
    """`firing` or `resolved`: what the webhook is to be told, empty for nothing."""
    attempts: Mapped[int] = mapped_column(default=0)
    next: Mapped[float] = mapped_column(default=0.0)
    """When the next attempt is."""
    problem: Mapped[str] = mapped_column(Text, default="")

    alert: Mapped[AlertRow] = relationship()


class TaskRow(PlatformTable):
    """Long-running work. See `tasks.runner`."""

    __tablename__ = "tasks"
    __table_args__ = (Index("ix_tasks_subject", "kind", "subject"),)
    kind: Mapped[str] = mapped_column(String(32))
    project_id: Mapped[int] = mapped_column(ForeignKey("projects.id"), index=True)
    subject: Mapped[str] = mapped_column(String(3 * NAME_CHARS_MAX))
    """Its object: "model/version", "environment", "deployment"."""
    arguments: Mapped[dict[str, Any]] = mapped_column(default=dict)
    state: Mapped[str] = mapped_column(String(16), index=True)
    """`waiting`, `running`, `done`, `failed` or `cancelled`."""
    progress: Mapped[float] = mapped_column(default=0.0)
    """From 0 to 1."""
    doing: Mapped[str] = mapped_column(Text, default="")
    reason: Mapped[str] = mapped_column(Text, default="")
    result: Mapped[dict[str, Any]] = mapped_column(default=dict)
    started: Mapped[float] = mapped_column(default=0.0)
    ended: Mapped[float] = mapped_column(default=0.0)
    is_cancelled: Mapped[bool] = mapped_column(default=False)
    attempts: Mapped[int] = mapped_column(default=0)
    author: Mapped[str] = mapped_column(String(NAME_CHARS_MAX), default="")

    project: Mapped[ProjectRow] = relationship()


class KeyRow(PlatformTable):
    """An API key of the platform. Only its SHA-256 is stored."""

    __tablename__ = "keys"
    name: Mapped[str] = mapped_column(String(NAME_CHARS_MAX), unique=True)
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    expires: Mapped[float] = mapped_column(default=0.0)
    used: Mapped[float] = mapped_column(default=0.0)

    grants: Mapped[list["GrantRow"]] = relationship(cascade="all, delete-orphan", lazy="selectin")


class UserRow(PlatformTable):
    """A user who signed in through OIDC, or the owner of this machine."""

    __tablename__ = "users"
    __table_args__ = (UniqueConstraint("issuer", "subject"),)
    issuer: Mapped[str] = mapped_column(String(255))
    subject: Mapped[str] = mapped_column(String(255))
    name: Mapped[str] = mapped_column(String(NAME_CHARS_MAX))
    email: Mapped[str] = mapped_column(String(255), default="")

    grants: Mapped[list["GrantRow"]] = relationship(cascade="all, delete-orphan", lazy="selectin")


class GrantRow(PlatformTable):
    """A role of a key or a user in a project, or in all projects."""

    __tablename__ = "grants"
    key_id: Mapped[int | None] = mapped_column(ForeignKey("keys.id", ondelete="CASCADE"), index=True)
    user_id: Mapped[int | None] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"), index=True)
    project_id: Mapped[int | None] = mapped_column(ForeignKey("projects.id", ondelete="CASCADE"))
    role: Mapped[str] = mapped_column(String(16))
    """`viewer`, `deployer` or `admin`."""
    may_run_code: Mapped[bool] = mapped_column(default=False)
    """Whether a deployer may add and deploy models that contain code."""

    project: Mapped[ProjectRow | None] = relationship(lazy="joined")


class SessionRow(PlatformTable):
    """A signed-in browser."""

    __tablename__ = "sessions"
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"))
    csrf: Mapped[str] = mapped_column(String(64))
    expires: Mapped[float]

    user: Mapped[UserRow] = relationship()


class LoginLinkRow(PlatformTable):
    """A link that signs in one user, one time."""

    __tablename__ = "login_links"
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"))
    expires: Mapped[float]


class CallRow(PlatformTable):
    """A change with an idempotency key. See `platform.idempotency`."""

    __tablename__ = "calls"
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    """Of the caller and the key."""
    request: Mapped[str] = mapped_column(String(64))
    """Digest of method, address and body."""
    answer: Mapped[str] = mapped_column(Text, default="")
    """Encrypted with the key; "" while there is none."""


class AuditRow(PlatformTable):
    """A change: who made it, and of what."""

    __tablename__ = "audit"
    project_id: Mapped[int | None] = mapped_column(ForeignKey("projects.id"), index=True)
    who: Mapped[str] = mapped_column(String(NAME_CHARS_MAX))
    action: Mapped[str] = mapped_column(String(64))
    """A verb and a noun: "deployment.update"."""
    subject: Mapped[str] = mapped_column(String(3 * NAME_CHARS_MAX))
    detail: Mapped[dict[str, Any]] = mapped_column(default=dict)
    address: Mapped[str] = mapped_column(String(64), default="")

    project: Mapped[ProjectRow | None] = relationship()


def named(session: Session, kind: type[_T], project_id: int, name: str, *, for_update: bool = False) -> _T | None:
    """Return the row of a table of resources with a name in a project, None if it does not exist."""
    columns: Any = kind
    query = select(kind).where(columns.project_id == project_id, columns.name == name)
    return session.scalar(query.with_for_update() if for_update else query)


def copied(kind: type[_T], row: object, **more: Any) -> _T:
    """Return a record: a dataclass or a pydantic model, whose other fields the row has under the same names."""
    names: Any = getattr(kind, "model_fields", None) or getattr(kind, "__dataclass_fields__", {})
    return kind(**{name: getattr(row, name) for name in names if name not in more}, **more)
