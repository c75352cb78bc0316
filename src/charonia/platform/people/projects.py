"""Projects, the groups of resources; and the roles of keys and users in them."""

from collections.abc import Iterable, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from charonia.core.errors import conflict, not_found
from charonia.platform.database.connection import now
from charonia.platform.database.tables import GrantRow, ProjectRow
from charonia.platform.people import audit
from charonia.platform.people.access import Grant, Principal, ProjectRole
from charonia.platform.values import check_name

DEFAULT = "default"
"""The project that always exists."""


def create(session: Session, who: Principal, name: str) -> ProjectRow:
    """Create a project."""
    who.demand(ProjectRole.ADMIN)
    check_name("project", name)
    if _find(session, name) is not None:
        raise conflict(f"project '{name}' already exists")
    project = ProjectRow(name=name, created=now())
    session.add(project)
    session.flush()
    audit.record(session, who, "project.create", name, project_id=project.id)
    return project


def visible(session: Session, who: Principal, *, offset: int = 0, limit: int = 100) -> Sequence[ProjectRow]:
    """Return the projects in which the caller has a role, by name."""
    query = select(ProjectRow).order_by(ProjectRow.name).offset(offset).limit(limit)
    if who.everywhere is None:
        query = query.where(ProjectRow.name.in_(who.roles))
    return session.scalars(query).all()


def find(session: Session, who: Principal, name: str, role: ProjectRole = ProjectRole.VIEWER) -> ProjectRow:
    """Return a project in which the caller has a role."""
    who.demand(role, name)
    project = _find(session, name)
    if project is None:
        raise not_found(f"project '{name}' does not exist")
    return project


def ensure_default(session: Session) -> None:
    if _find(session, DEFAULT) is None:
        session.add(ProjectRow(name=DEFAULT, created=now()))


def _find(session: Session, name: str) -> ProjectRow | None:
    return session.scalar(select(ProjectRow).where(ProjectRow.name == name))


def kept(rows: Iterable[GrantRow]) -> list[Grant]:
    return [
        Grant(ProjectRole[row.role.upper()], row.project.name if row.project else "", row.may_run_code) for row in rows
    ]


def new_rows(session: Session, who: Principal, grants: Sequence[Grant]) -> list[GrantRow]:
    """Return rows for roles that the caller grants."""
    demand_all(who, grants)
    names = {grant.project for grant in grants} - {""}
    projects = {row.name: row for row in session.scalars(select(ProjectRow).where(ProjectRow.name.in_(names)))}
    for name in sorted(names - projects.keys()):
        raise not_found(f"project '{name}' does not exist")
    return [
        GrantRow(
            project=projects.get(grant.project),
            role=grant.role.name.lower(),
            may_run_code=grant.may_run_code,
            created=now(),
        )
        for grant in grants
    ]


def demand_all(who: Principal, grants: Iterable[Grant]) -> None:
    """Check that the caller may grant and revoke these roles."""
    for project in {grant.project for grant in grants}:
        who.demand(ProjectRole.ADMIN, project)
