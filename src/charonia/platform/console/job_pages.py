"""The pages of jobs: all tasks of a project, and one with its log."""

from typing import Any

from fastapi import APIRouter, Response
from sqlalchemy import select

from charonia.core.errors import not_found
from charonia.platform.console.pages import ROWS_MAX, OnPage
from charonia.platform.console.text import date_text, duration_text, figure
from charonia.platform.database.connection import now
from charonia.platform.database.tables import TaskRow
from charonia.platform.environments import catalog
from charonia.platform.jobs import jobs
from charonia.platform.models import records
from charonia.platform.people import audit, projects
from charonia.platform.people.access import ProjectRole
from charonia.platform.tasks import queue
from charonia.platform.values import Number

router = APIRouter(prefix="/p/{project}/jobs")

TITLES = {
    catalog.KIND: "Build of an environment",
    records.ADD: "Import of a model",
    records.CHECK: "Check of a model",
    records.COLLECT: "Removal of unused files",
    jobs.PERF: "Load test",
    jobs.TUNE: "Search for a configuration",
}
"""Title of each kind of task."""

_HIDDEN = frozenset({"log"})


@router.get("")
def show_all(visit: OnPage, offset: Number = 0) -> Response:
    """List the tasks of a project, latest first."""
    with visit.platform.database.reading() as session:
        project = projects.find(session, visit.who, visit.project)
        query = select(TaskRow).where(TaskRow.project_id == project.id).order_by(TaskRow.id.desc())
        rows = session.scalars(query.limit(ROWS_MAX + 1).offset(offset)).all()
    values = {"jobs": [job(row) for row in rows[:ROWS_MAX]], "pages": visit.pages(offset, len(rows))}
    return visit.show("jobs.html", values)


@router.get("/{number}")
def show(visit: OnPage, number: Number) -> Response:
    return _page(visit, number)


@router.post("/{number}/cancel")
def cancel(visit: OnPage, number: Number) -> Response:
    """Cancel a task."""
    with visit.platform.database.transaction() as session:
        project = projects.find(session, visit.who, visit.project, ProjectRole.DEPLOYER)
        row = session.get(TaskRow, number)
        if row is None or row.project_id != project.id:
            raise not_found(f"job {number} does not exist in project '{visit.project}'")
        queue.cancel(session, number)
        audit.note(session, visit.who, "task.cancel", f"{visit.project}/{row.subject}", project_id=project.id)
    return _page(visit, number, block="live")


def job(row: TaskRow) -> dict[str, Any]:
    """Return the values of a task for pages."""
    is_open = row.state in ("waiting", "running")
    took = (row.ended or now()) - row.started if row.started else 0.0
    return {
        "id": row.id,
        "kind": row.kind,
        "title": TITLES.get(row.kind, row.kind.replace(".", " ")),
        "subject": row.subject,
        "state": row.state,
        "is_open": is_open,
        "progress": row.progress,
        "doing": ("is being cancelled" if row.is_cancelled else row.doing) if is_open else "",
        "reason": row.reason if row.state == "failed" else "",
        "author": row.author,
        "created": row.created,
        "started": date_text(row.started) if row.started else "",
        "took": duration_text(took) if took else "\N{EN DASH}",
    }


def _page(visit: OnPage, number: int, *, block: str = "") -> Response:
    with visit.platform.database.reading() as session:
        project = projects.find(session, visit.who, visit.project)
        row = session.get(TaskRow, number)
    if row is None or row.project_id != project.id:
        raise not_found(f"job {number} does not exist in project '{visit.project}'")
    folder = visit.platform.tasks.folder(number)
    files = sorted(path.name for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    results = [
        (name.replace("_", " ").capitalize(), figure(value) if isinstance(value, int | float) else value)
        for name, value in row.result.items()
        if isinstance(value, str | int | float)
    ]
    levels = row.result.get("levels", ())
    sentences = row.result.get("sentences", ())
    results = [(name, value) for name, value in results if name != "Config"]
    shown = {
        **job(row),
        "levels": levels,
        "sentences": sentences,
        "config": row.result.get("config", ""),
        "files": [name for name in files if name not in _HIDDEN],
        "results": results,
    }
    return visit.show("job.html", {"job": shown, "log": visit.task_log(number)}, block=block)
