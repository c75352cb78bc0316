"""The pages of jobs: all tasks of a project, and one with its log; measurements, which other pages start and offer."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Response
from sqlalchemy import select

from charonia.platform.console.deploy_form import form_of
from charonia.platform.console.pages import ROWS_MAX, OnPage
from charonia.platform.console.text import figure
from charonia.platform.database.tables import TaskRow
from charonia.platform.environments import catalog
from charonia.platform.jobs import jobs
from charonia.platform.models import records, registry
from charonia.platform.people import projects
from charonia.platform.tasks import queue
from charonia.platform.values import Number, Text

router = APIRouter(include_in_schema=False)

JOBS = "/p/{project}/jobs"

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


@router.get(JOBS)
def show_all(visit: OnPage, state: Text = "", offset: Number = 0) -> Response:
    """List the tasks of a project, latest first."""
    with visit.platform.database.reading() as session:
        project = projects.find(session, visit.who, visit.project)
        query = select(TaskRow).where(TaskRow.project_id == project.id).order_by(TaskRow.id.desc())
        if state:
            query = query.where(TaskRow.state == state)
        rows = session.scalars(query.limit(ROWS_MAX + 1).offset(offset)).all()
    values = {"jobs": rows[:ROWS_MAX], "titles": TITLES, "state": state, "pages": visit.pages(offset, len(rows))}
    return visit.show("jobs.html", values)


@router.get(JOBS + "/{number}")
def show(visit: OnPage, number: Number) -> Response:
    """Show a task."""
    with visit.platform.database.reading() as session:
        row = queue.find(session, visit.who, number, project=visit.project)
        model = row.subject.rpartition("/")[0]
        deployed = registry.names(registry.uses(session, row.project_id, model)) if row.kind == jobs.TUNE else ()
    folder = visit.platform.tasks.folder(number)
    files = sorted(path.name for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    results = {
        name.replace("_", " ").capitalize(): figure(value) if isinstance(value, int | float) else value
        for name, value in row.result.items()
        if isinstance(value, str | int | float) and name not in ("config", "conclusion", "gain")
    }
    values = {
        "job": row,
        "title": TITLES.get(row.kind, row.kind),
        "found": defaultdict(tuple, row.result),
        "files": [name for name in files if name not in _HIDDEN],
        "results": results,
        "settings": list(_settings(row.result.get("change") or {})),
        "apply": visit.path("deployments", deployed[0], "change") + "?"
        if deployed
        else f"{visit.path('deployments', 'new')}?{urlencode({'model': model})}&",
        "log": visit.task_log(number),
    }
    return visit.show("job.html", values)


def _settings(change: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings that a search recommends, by their path in a deployment's file."""
    for key, value in change.items():
        if isinstance(value, Mapping) and value:
            yield from _settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value)


def offer(task: TaskRow | None) -> dict[str, Any] | None:
    """Return the result of the search for a model as fields of the form; None without a search.

    `fields` is empty if the model's own configuration is the best.
    """
    if task is None or not task.result:
        return None
    result: Mapping[str, Any] = task.result
    change = result.get("change")
    named = ("instances_min", "max_batch_size", "max_queue_delay_us", "config")
    fields = form_of({"models": [{"name": "", **change}]})["models"][0] if change else {}
    return {
        "task": task.id,
        "text": next(iter(result.get("sentences", ())), ""),
        "fields": {name: fields[name] for name in named if fields and fields[name] != ""},
    }
