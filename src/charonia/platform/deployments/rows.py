"""Deployments and their revisions in the tables."""

from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from charonia.core.errors import not_found
from charonia.platform.database.tables import DeploymentRow, RevisionRow
from charonia.platform.people import projects
from charonia.platform.people.access import Principal, ProjectRole


def find(
    session: Session, who: Principal, project: str, name: str, role: ProjectRole
) -> tuple[DeploymentRow, RevisionRow]:
    """Return a deployment and its newest revision.

    Raises:
        NotPermittedError: If the caller has not the role.
        ServingError: NOT_FOUND.
    """
    found = projects.find(session, who, project, role)
    query = with_latest().where(DeploymentRow.project_id == found.id, DeploymentRow.name == name)
    row = session.execute(query).first()
    if row is None:
        raise not_found(f"there is no deployment '{name}' in project '{project}'")
    return row[0], row[1]


def with_latest() -> Any:
    """Return the query for deployments with their newest revisions."""
    join = (RevisionRow.deployment_id == DeploymentRow.id) & (RevisionRow.number == DeploymentRow.latest)
    return select(DeploymentRow, RevisionRow).join(RevisionRow, join)


def row_of(session: Session, project_id: int, name: str, *, for_update: bool = False) -> DeploymentRow | None:
    """Return a deployment, None if there is none."""
    query = select(DeploymentRow).where(DeploymentRow.project_id == project_id, DeploymentRow.name == name)
    return session.scalar(query.with_for_update() if for_update else query)


def revision_of(session: Session, deployment_id: int, number: int) -> RevisionRow | None:
    """Return a revision, None if there is none."""
    query = select(RevisionRow).where(RevisionRow.deployment_id == deployment_id, RevisionRow.number == number)
    return session.scalar(query)
