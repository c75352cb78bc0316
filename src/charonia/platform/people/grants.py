"""Roles of keys and users: granting and storing them."""

from collections.abc import Iterable, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from charonia.core.errors import not_found
from charonia.platform.database.connection import now
from charonia.platform.database.tables import GrantRow, ProjectRow
from charonia.platform.people.access import Grant, Principal, ProjectRole


def kept(rows: Iterable[GrantRow]) -> list[Grant]:
    """Return the roles of a key or a user from its rows."""
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
