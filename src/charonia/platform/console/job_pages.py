"""The pages of jobs: all tasks of a project, and one with its log; measurements, which other pages start and offer."""

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Response
from sqlalchemy import select

from charonia.core.errors import invalid
from charonia.platform.console.deploy_form import FormFields, form_of, number, text_of
from charonia.platform.console.pages import ROWS_MAX, OnPage, Sent, Visit, go
from charonia.platform.console.text import date_text, duration_text, figure
from charonia.platform.database.connection import now
from charonia.platform.database.tables import TaskRow
from charonia.platform.environments import catalog
from charonia.platform.jobs import jobs
from charonia.platform.jobs.commands import PerfJob, TuneJob
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
    found = [job(row) for row in rows[:ROWS_MAX]]
    values = {"jobs": found, "state": state, "pages": visit.pages(offset, len(rows))}
    return visit.show("jobs.html", values)


@router.get(JOBS + "/{number}")
def show(visit: OnPage, number: Number) -> Response:
    return _page(visit, number)


@router.post(JOBS + "/{number}/cancel")
def cancel(visit: OnPage, number: Number) -> Response:
    """Cancel a task."""
    with visit.platform.database.transaction() as session:
        queue.cancel(session, visit.who, number, visit.project)
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
        row = queue.find(session, visit.who, number, project=visit.project)
        model = row.subject.rpartition("/")[0]
        deployed = registry.names(registry.uses(session, row.project_id, model)) if row.kind == jobs.TUNE else ()
    folder = visit.platform.tasks.folder(number)
    files = sorted(path.name for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    results = [
        (name.replace("_", " ").capitalize(), figure(value) if isinstance(value, int | float) else value)
        for name, value in row.result.items()
        if isinstance(value, str | int | float)
    ]
    levels = row.result.get("levels", ())
    sentences = row.result.get("sentences", ())
    results = [(name, value) for name, value in results if name not in ("Config", "Conclusion", "Gain")]
    shown = {
        **job(row),
        "levels": levels,
        "sentences": sentences,
        "versions": row.result.get("versions", ()),
        "variants": row.result.get("variants", ()),
        "config": row.result.get("config", ""),
        "files": [name for name in files if name not in _HIDDEN],
        "results": results,
        "settings": list(_settings(row.result.get("change") or {})),
        "apply": visit.path("deployments", deployed[0], "change") + "?"
        if deployed
        else f"{visit.path('deployments', 'new')}?{urlencode({'model': model})}&",
    }
    return visit.show("job.html", {"job": shown, "log": visit.task_log(number)}, block=block)


def _settings(change: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings that a search recommends, by their path in a deployment's file."""
    for key, value in change.items():
        if isinstance(value, Mapping) and value:
            yield from _settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value)


@router.post("/p/{project}/deployments/{name}/measure")
def measure(visit: OnPage, name: Text, sent: Sent) -> Response:
    """Measure a model of a deployment."""
    protocol = text_of(sent, "protocol") or "http"
    job = PerfJob(
        deployment=name, model=text_of(sent, "model"), concurrency=text_of(sent, "concurrency"), protocol=protocol
    )
    with visit.platform.database.transaction() as session:
        task = jobs.start_perf(session, visit.who, visit.project, job)
    return _started(visit, task)


@router.post("/p/{project}/models/{name}/versions/{version}/search")
def search(visit: OnPage, name: Text, version: Number, sent: Sent) -> Response:
    """Search the best configuration of a version."""
    job = TuneJob(
        model=name,
        version=version,
        minutes=_of(sent, "minutes", 5.0),
        latency_budget_ms=_of(sent, "latency_budget_ms", 0.0),
        environment=text_of(sent, "environment"),
    )
    with visit.platform.database.transaction() as session:
        task = jobs.start_tune(session, visit.who, visit.project, visit.platform.workloads, job)
    return _started(visit, task)


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


def _started(visit: Visit, task: TaskRow) -> Response:
    visit.platform.tasks.wake()
    return go(visit.path("jobs", task.id))


def _of(sent: FormFields, name: str, default: float) -> float:
    value = number(sent, name)
    if value is None:
        return default
    if isinstance(value, int | float):
        return float(value)
    raise invalid(f"{name}: expected a number, got '{value}'")
