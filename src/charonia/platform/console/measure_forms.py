"""Starts measurements from the pages of deployments and models, and offers their results."""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Response

from charonia.core.errors import invalid
from charonia.platform.console.deploy_form import FormFields, form_of, number, text_of
from charonia.platform.console.pages import OnPage, Sent, Visit, go
from charonia.platform.database.tables import TaskRow
from charonia.platform.jobs import jobs
from charonia.platform.jobs.commands import PerfJob, TuneJob
from charonia.platform.people import audit, projects
from charonia.platform.people.access import ProjectRole
from charonia.platform.values import Number, Text

router = APIRouter(prefix="/p/{project}")


@router.post("/deployments/{name}/measure")
def measure(visit: OnPage, name: Text, sent: Sent) -> Response:
    """Measure a model of a deployment."""
    job = PerfJob(text_of(sent, "model"), text_of(sent, "concurrency"), text_of(sent, "protocol") or "http")
    with visit.platform.database.transaction() as session:
        project = projects.find(session, visit.who, visit.project, ProjectRole.DEPLOYER)
        task = jobs.start_perf(session, project, name, job, visit.who.name)
        audit.note(session, visit.who, "job.perf", f"{visit.project}/{task.subject}", project_id=project.id)
    return _started(visit, task)


@router.post("/models/{name}/versions/{version}/search")
def search(visit: OnPage, name: Text, version: Number, sent: Sent) -> Response:
    """Search the best configuration of a version."""
    job = TuneJob(
        name,
        version,
        minutes=_of(sent, "minutes", 5.0),
        latency_budget_ms=_of(sent, "latency_budget_ms", 0.0),
        environment=text_of(sent, "environment"),
    )
    with visit.platform.database.transaction() as session:
        project = projects.find(session, visit.who, visit.project, ProjectRole.DEPLOYER)
        task = jobs.start_tune(session, project, visit.platform.workloads, job, visit.who)
        audit.note(session, visit.who, "job.tune", f"{visit.project}/{task.subject}", project_id=project.id)
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
