"""The API of users, keys, projects and the audit log."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from charonia.platform.database.tables import AuditRow, KeyRow, UserRow, copied
from charonia.platform.people import audit, keys, login, projects, users
from charonia.platform.people.access import Grant, Principal, ProjectRole
from charonia.platform.people.calls import Caller
from charonia.platform.people.projects import kept
from charonia.platform.state import Limit, Offset, PlatformDep
from charonia.platform.values import Number, RequestBody, Text, Time

router = APIRouter(prefix="/api/v1", tags=["people"])


class RoleBody(RequestBody):
    """A role."""

    role: Literal["viewer", "deployer", "admin"]
    project: Text = Field("", description="Name of the project, empty for all.")
    may_run_code: bool = Field(False, description="Whether a deployer may use models that contain code.")

    def grant(self) -> Grant:
        return Grant(ProjectRole[self.role.upper()], self.project, self.may_run_code)

    @classmethod
    def of(cls, grant: Grant) -> "RoleBody":
        return cls.model_validate(
            {"role": grant.role.name.lower(), "project": grant.project, "may_run_code": grant.may_run_code}
        )


class ProjectBody(RequestBody):
    """A project."""

    name: Text


class KeyRequest(RequestBody):
    """A key to create."""

    name: Text
    roles: list[RoleBody]
    expires: Time = Field(0.0, description="Seconds since the epoch, 0 for never.")


class KeyBody(BaseModel):
    """A key, without the key itself."""

    name: str
    roles: list[RoleBody]
    created: float
    expires: float
    used: float = Field(description="Approximate time of last use; 0 for never.")

    @classmethod
    def of(cls, key: KeyRow, who: Principal) -> "KeyBody":
        roles = [RoleBody.of(grant) for grant in who.visible_roles(kept(key.grants))]
        return copied(cls, key, roles=roles)


class NewKeyBody(KeyBody):
    """A new key."""

    key: str = Field(description="The key. It is shown only once.")


class SecretBody(BaseModel):
    """A secret, without its value."""

    name: str
    author: str
    created: float = Field(description="When its value was entered, in seconds since the epoch.")


class SecretValue(RequestBody):
    """The value of a secret."""

    value: Text


class UserRequest(RequestBody):
    """A user who will sign in with links."""

    name: Text
    email: Text = ""


class UserBody(BaseModel):
    """A user."""

    id: int
    name: str
    email: str
    issuer: str = Field(description="Who authenticates them: a provider, or `local` for links.")
    roles: list[RoleBody]
    created: float

    @classmethod
    def of(cls, user: UserRow, who: Principal) -> "UserBody":
        roles = [RoleBody.of(grant) for grant in who.visible_roles(kept(user.grants))]
        return copied(cls, user, roles=roles)


class UserRoleBody(RequestBody):
    """The new role of a user in a project."""

    role: Literal["none", "viewer", "deployer", "admin"]
    project: Text = Field("", description="Name of the project, empty for all.")
    may_run_code: bool = False


class LinkBody(BaseModel):
    """A link that signs in a user, one time."""

    url: str


class CallerBody(BaseModel):
    """The caller."""

    name: str
    roles: list[RoleBody]


class AuditBody(BaseModel):
    """A change."""

    id: int
    time: float
    who: str
    action: str
    subject: str
    project: str
    detail: dict[str, Any]
    address: str

    @classmethod
    def of(cls, row: AuditRow) -> "AuditBody":
        return copied(cls, row, time=row.created, project=row.project.name if row.project else "")


@router.get("/me")
def me(who: Caller) -> CallerBody:
    """Return the caller and their roles."""
    return CallerBody(name=who.name, roles=[RoleBody.of(grant) for grant in who.grants()])


@router.get("/projects")
def list_projects(platform: PlatformDep, who: Caller, limit: Limit = 100, offset: Offset = 0) -> list[ProjectBody]:
    """List the projects in which the caller has a role."""
    with platform.database.reading() as session:
        return [ProjectBody(name=row.name) for row in projects.visible(session, who, offset=offset, limit=limit)]


@router.post("/projects", status_code=201)
def create_project(platform: PlatformDep, who: Caller, body: ProjectBody) -> ProjectBody:
    """Create a project."""
    with platform.database.transaction() as session:
        return ProjectBody(name=projects.create(session, who, body.name).name)


@router.get("/keys")
def list_keys(platform: PlatformDep, who: Caller, limit: Limit = 100, offset: Offset = 0) -> list[KeyBody]:
    """List API keys: those with a role in a project that the caller administers."""
    with platform.database.reading() as session:
        return [KeyBody.of(key, who) for key in keys.visible(session, who, offset=offset, limit=limit)]


@router.post("/keys", status_code=201)
def create_key(platform: PlatformDep, who: Caller, body: KeyRequest) -> NewKeyBody:
    """Create an API key."""
    grants = [role.grant() for role in body.roles]
    with platform.database.transaction() as session:
        key, secret = keys.create(session, who, body.name, grants, expires=body.expires)
        return NewKeyBody(key=secret, **KeyBody.of(key, who).model_dump())


@router.delete("/keys/{name}", status_code=204)
def revoke_key(platform: PlatformDep, who: Caller, name: Text) -> None:
    """Delete an API key; calls with it are refused from now on."""
    with platform.database.transaction() as session:
        keys.revoke(session, who, name)


@router.get("/users")
def list_users(platform: PlatformDep, who: Caller, limit: Limit = 100, offset: Offset = 0) -> list[UserBody]:
    """List the users who can sign in."""
    with platform.database.reading() as session:
        return [UserBody.of(user, who) for user in users.known(session, who, offset=offset, limit=limit)]


@router.post("/users", status_code=201)
def create_user(platform: PlatformDep, who: Caller, body: UserRequest) -> UserBody:
    """Create a user who signs in with links."""
    with platform.database.transaction() as session:
        return UserBody.of(users.create(session, who, body.name, body.email), who)


@router.post("/users/{id}/link", status_code=201)
def make_link(platform: PlatformDep, who: Caller, id: Number) -> LinkBody:
    """Create a link that signs a user in, one time, within a day."""
    with platform.database.transaction() as session:
        secret = users.link(session, who, id)
    return LinkBody(url=login.link(platform.settings, secret))


@router.put("/users/{id}/role")
def set_role(platform: PlatformDep, who: Caller, id: Number, body: UserRoleBody) -> UserBody:
    """Set the role of a user in one project or in all."""
    grant = None if body.role == "none" else Grant(ProjectRole[body.role.upper()], body.project, body.may_run_code)
    with platform.database.transaction() as session:
        return UserBody.of(users.set_role(session, who, id, body.project, grant), who)


@router.delete("/users/{id}", status_code=204)
def remove_user(platform: PlatformDep, who: Caller, id: Number) -> None:
    """Delete a user and end their sessions."""
    with platform.database.transaction() as session:
        users.remove(session, who, id)


@router.get("/projects/{project}/secrets")
def list_secrets(platform: PlatformDep, who: Caller, project: Text) -> list[SecretBody]:
    """List the secrets of a project, without their values."""
    with platform.database.reading() as session:
        return [copied(SecretBody, row) for row in platform.workloads.secrets.list(session, who, project)]


@router.put("/projects/{project}/secrets/{name}", status_code=204)
def put_secret(platform: PlatformDep, who: Caller, project: Text, name: Text, body: SecretValue) -> None:
    """Create a secret, or replace its value. No call returns it."""
    with platform.database.transaction() as session:
        platform.workloads.secrets.put(session, who, project, name, body.value)


@router.delete("/projects/{project}/secrets/{name}", status_code=204)
def remove_secret(platform: PlatformDep, who: Caller, project: Text, name: Text) -> None:
    """Delete a secret. Servers that run keep its value."""
    with platform.database.transaction() as session:
        platform.workloads.secrets.remove(session, who, project, name)


@router.get("/audit")
def list_changes(
    platform: PlatformDep,
    who: Caller,
    project: Text = "",
    before: Annotated[Number, Query(description="Only entries with a smaller id; 0 for the latest.")] = 0,
    limit: Limit = 100,
) -> list[AuditBody]:
    """List changes, latest first."""
    with platform.database.reading() as session:
        rows = audit.entries(session, who, project=project, before=before, limit=limit)
        return [AuditBody.of(row) for row in rows]
