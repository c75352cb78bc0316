"""Adds, lists and cancels tasks."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session, joinedload

from charonia.core.errors import not_found, too_many, unavailable
from charonia.platform.database.connection import now
from charonia.platform.database.tables import ProjectRow, TaskRow
from charonia.platform.people import audit
from charonia.platform.people.access import Principal, ProjectRole
from charonia.platform.tasks.runner import ADDED, PROJECT_WAITING_MAX, WAITING_MAX


def add(
    session: Session, kind: str, project_id: int, subject: str, arguments: Mapping[str, Any], author: str = ""
) -> TaskRow:
    """Add a task, which begins after the transaction.

    Raises:
        TooManyError: Too many tasks of the project wait.
    """
    all_waiting = select(func.count()).select_from(TaskRow).where(TaskRow.state == "waiting")
    own = session.scalar(all_waiting.where(TaskRow.project_id == project_id)) or 0
    if own >= PROJECT_WAITING_MAX:
        raise too_many(
            f"{own} tasks of this project wait already, expected fewer than {PROJECT_WAITING_MAX}",
            hint="try again when some of them are done, or cancel some",
        )
    waiting = session.scalar(all_waiting) or 0
    if waiting >= WAITING_MAX:
        raise unavailable(
            f"{waiting} tasks wait already, expected fewer than {WAITING_MAX}", hint="cancel some of them"
        )
    task = TaskRow(
        kind=kind,
        project_id=project_id,
        subject=subject,
        arguments=dict(arguments),
        state="waiting",
        author=author,
        created=now(),
    )
    session.add(task)
    session.info[ADDED] = True
    session.flush()
    return task


def page(
    session: Session, project: ProjectRow, *, kind: str = "", before: int = 0, limit: int = 100
) -> Sequence[TaskRow]:
    """Return the tasks of a project, newest first.

    Args:
        kind: Only tasks of this kind, "" for all.
        before: Only tasks with a smaller number, 0 for all.
    """
    query = select(TaskRow).where(TaskRow.project_id == project.id).options(joinedload(TaskRow.project))
    if kind:
        query = query.where(TaskRow.kind == kind)
    if before:
        query = query.where(TaskRow.id < before)
    return session.scalars(query.order_by(TaskRow.id.desc()).limit(limit)).all()


def find(
    session: Session, who: Principal, number: int, role: ProjectRole = ProjectRole.VIEWER, project: str = ""
) -> TaskRow:
    """Return a task, of any project or of one."""
    task = session.get(TaskRow, number)
    if task is None or who.role(task.project.name) is None or project not in ("", task.project.name):
        raise not_found(f"task {number} does not exist")
    who.demand(role, task.project.name)
    return task


def cancel(session: Session, who: Principal, number: int) -> TaskRow:
    """Cancel a task: immediately if it waits, as soon as it notices if it runs. See `find`."""
    task = find(session, who, number, ProjectRole.DEPLOYER)
    if task.state == "waiting":
        task.state, task.ended, task.reason = "cancelled", now(), "it was cancelled"
    task.is_cancelled = True
    audit.record(session, who, "task.cancel", f"{task.project.name}/{task.subject}", project_id=task.project_id)
    return task
