"""The audit log: who changed what."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session, joinedload

from charonia.platform.database.connection import now
from charonia.platform.database.tables import AuditRow, ProjectRow
from charonia.platform.people.access import Grant, Principal, ProjectRole


def record(
    session: Session,
    who: Principal,
    action: str,
    subject: str,
    detail: Mapping[str, Any] | None = None,
    *,
    project_id: int | None = None,
) -> None:
    """Record a change, in the transaction that makes it.

    Args:
        action: A noun and a verb: "deployment.update".
        subject: The thing: "default/reader".
        detail: What changed, as JSON; no secrets.
        project_id: The project that it belongs to, None for none.
    """
    session.add(
        AuditRow(
            project_id=project_id,
            who=who.name,
            action=action,
            subject=subject,
            detail=dict(detail or {}),
            address=who.address,
            created=now(),
        )
    )


def entries(
    session: Session, who: Principal, *, project: str = "", before: int = 0, limit: int = 100
) -> Sequence[AuditRow]:
    """Return changes, latest first, with their projects.

    Args:
        who: The caller. Without a role in all projects, they see only changes in their projects.
        project: Only this project, "" for all.
        before: Only entries with a smaller id, 0 for all: the id of the last one that the caller has.
    """
    query = select(AuditRow).options(joinedload(AuditRow.project)).order_by(AuditRow.id.desc()).limit(limit)
    if project:
        who.demand(ProjectRole.VIEWER, project)
        query = query.join(AuditRow.project).where(ProjectRow.name == project)
    elif who.everywhere is None:
        query = query.join(AuditRow.project).where(ProjectRow.name.in_(who.roles))
    if before:
        query = query.where(AuditRow.id < before)
    return session.scalars(query).all()


def role_text(grant: Grant) -> str:
    """Return a role in words, for the log: "deployer in default, may run code"."""
    place = f"in {grant.project}" if grant.project else "everywhere"
    return f"{grant.role.name.lower()} {place}{', may run code' if grant.may_run_code else ''}"
