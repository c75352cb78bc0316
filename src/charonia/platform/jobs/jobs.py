"""Measurements: starts them as tasks and carries them out, and their API."""

import shutil
import sys
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from charonia.core.errors import internal, invalid, not_found, unavailable
from charonia.platform.database.connection import Database
from charonia.platform.database.tables import ProjectRow, RevisionRow, TaskRow
from charonia.platform.deployments.reads import find
from charonia.platform.deployments.spec import DeployedModel, DeploymentSpec
from charonia.platform.deployments.workloads import Workloads, with_steps
from charonia.platform.isolation.isolation import Isolation, PrivateFolders, SandboxAccess, collect
from charonia.platform.jobs.commands import (
    CSV_FILE,
    REPORT_FILE,
    TUNE_FILE,
    PerfJob,
    TuneJob,
    level_begun,
    levels,
    recommendation,
    seconds_left,
)
from charonia.platform.people import audit, projects
from charonia.platform.people.access import Principal, ProjectRole
from charonia.platform.people.calls import Caller
from charonia.platform.state import PlatformDep
from charonia.platform.targets.api import DeploymentTarget, make_model_folder
from charonia.platform.tasks import queue
from charonia.platform.tasks.routes import TaskBody
from charonia.platform.tasks.runner import Handler, TaskRun
from charonia.platform.values import Number, Text
from charonia.python_command import python_module

PERF, TUNE = "perf", "tune"
"""Kinds of tasks."""

PERF_S_MAX = 3600.0
SPARE_S = 600.0
"""Extra time beyond a search's budget, for starting servers and writing reports."""

_MEASURED = (0, 1, 2, 4)
"""Exit statuses of `charonia perf` with a result."""

_FOUND = (0, 2)
"""Exit statuses of `charonia tune` with a result."""


def start_perf(session: Session, who: Principal, project: str, job: PerfJob) -> TaskRow:
    """Add the task that measures a model of a deployment."""
    deployment = job.deployment
    row, _ = find(session, who, project, deployment, ProjectRole.DEPLOYER)
    spec = session.scalar(
        select(RevisionRow.spec).where(RevisionRow.deployment_id == row.id, RevisionRow.number == row.wanted)
    )
    names = [model["name"] for model in (spec or {}).get("models", [])]
    if job.model not in names:
        raise not_found(f"deployment '{deployment}' has no model '{job.model}'", hint=f"it has {', '.join(names)}")
    arguments = {"target": row.target, "job": job.model_dump()}
    audit.record(session, who, "job.perf", f"{project}/{deployment}/{job.model}", project_id=row.project_id)
    return queue.add(session, PERF, row.project_id, f"{deployment}/{job.model}", arguments, who.name)


def start_tune(session: Session, who: Principal, project: str, workloads: Workloads, job: TuneJob) -> TaskRow:
    """Add the task that searches the best configuration of a version of a model. See `start_perf`."""
    found, subject = projects.find(session, who, project, ProjectRole.DEPLOYER), f"{job.model}/{job.version}"
    if workloads.workload(session, found.id, "tune", 0, _trial(session, found.id, job)).runs_code:
        who.demand_code(project)
    audit.record(session, who, "job.tune", f"{project}/{subject}", project_id=found.id)
    return queue.add(session, TUNE, found.id, subject, {"job": job.model_dump()}, who.name)


def found(session: Session, project_id: int, model: str, version: int = 0) -> TaskRow | None:
    """Return the last completed search for a version of a model, or for any version if it is 0."""
    subject = TaskRow.subject == f"{model}/{version}" if version else TaskRow.subject.startswith(f"{model}/")
    query = select(TaskRow).where(
        TaskRow.kind == TUNE, TaskRow.project_id == project_id, TaskRow.state == "done", subject
    )
    return session.scalar(query.order_by(TaskRow.id.desc()).limit(1))


def perf_handler(targets: Mapping[str, DeploymentTarget], database: Database, isolation: Isolation) -> Handler:
    """Return the handler of tasks that measure a deployment."""

    def handle(run: TaskRun) -> Mapping[str, Any]:
        job = PerfJob(**run.arguments["job"])
        with database.reading() as session:
            project = session.get_one(ProjectRow, run.project_id).name
        seen = targets[run.arguments["target"]].observe(f"{project}/{job.deployment}")
        address = seen.grpc if job.protocol == "grpc" else seen.http
        if not address:
            raise unavailable(f"deployment '{job.deployment}' does not serve", hint="start it first")
        run.progress(0.02, f"{job.model} is measured")
        begun = 0

        def report(line: str) -> None:
            nonlocal begun
            load = level_begun(line)
            if load is not None:
                text = f"level {begun + 1} of {job.level_count}: {load} in flight"
                run.progress(0.05 + 0.9 * begun / job.level_count, text)
                begun += 1

        with isolation.room(run.project_id) as room:
            command = python_module("charonia", *job.command(address, str(room.home)))
            variables = isolation.environment(room, installs=False)
            status = run.run(
                isolation.command(command, room, SandboxAccess(project=run.project_id)),
                timeout_s=PERF_S_MAX,
                environment={**variables, "CHARONIA_API_KEY": seen.key},  # command lines are visible to other users
                folder=room.home,
                on_line=report,
            )
            _collect(room, run, CSV_FILE, REPORT_FILE)
        table = run.folder / CSV_FILE
        if status not in _MEASURED or not table.exists():
            raise internal(f"it could not be measured: charonia perf ended with status {status}", hint=_LOG)
        return {"levels": levels(table.read_text(encoding="utf-8"))}

    return handle


def tune_handler(workloads: Workloads, database: Database, isolation: Isolation) -> Handler:
    """Return the handler of tasks that search configurations."""

    def handle(run: TaskRun) -> Mapping[str, Any]:
        job = TuneJob(**run.arguments["job"])
        with database.reading() as session:
            spec = _trial(session, run.project_id, job)
            workload = workloads.workload(session, run.project_id, "tune", 0, spec)
        run.progress(0.02, "fetching the files of the model")
        workloads.place(workload)
        shutil.rmtree(run.folder / "repository", ignore_errors=True)
        for model in workload.models:
            make_model_folder(run.folder / "repository", model)

        def report(line: str) -> None:
            left = seconds_left(line)
            if left is not None:
                run.progress(max(0.05, min(0.95, 1 - left / (job.minutes * 60))), f"{left:.0f} s left at most")

        repository = run.folder / "repository"
        with isolation.room(run.project_id) as room:
            access = SandboxAccess(read=[repository], python=workload.python, project=run.project_id)
            arguments = job.command(str(repository), str(room.home))
            command = python_module("charonia", *arguments, python=workload.python or sys.executable)
            status = run.run(
                isolation.command(command, room, access),
                timeout_s=job.minutes * 60 + SPARE_S,
                environment=isolation.environment(room),
                folder=room.home,
                on_line=report,
            )
            _collect(room, run, TUNE_FILE, REPORT_FILE)
        shutil.rmtree(repository, ignore_errors=True)
        if status not in _FOUND:
            raise internal(f"nothing was found: charonia tune ended with status {status}", hint=_LOG)
        return recommendation((run.folder / TUNE_FILE).read_text(encoding="utf-8"), job.model)

    return handle


def _collect(room: PrivateFolders, run: TaskRun, *names: str) -> None:
    for name in names:
        collect(room.home / name, run.folder / name)


_LOG = "the log has the reason"


def _trial(session: Session, project_id: int, job: TuneJob) -> DeploymentSpec:
    if job.version < 1:
        raise invalid(f"version: expected the number of a version, got {job.version}")
    model = DeployedModel(name=job.model, versions=(job.version,))
    spec = DeploymentSpec(name="tune", models=(model,), environment=job.environment)
    return with_steps(session, project_id, spec).spec


router = APIRouter(prefix="/api/v1", tags=["jobs"])


class FoundBody(BaseModel):
    """The result of a search."""

    task: int = Field(description="The task, 0 if there was no search yet.")
    version: int = Field(description="The version that was measured.")
    result: dict[str, Any] = Field(
        description="`conclusion`, `sentences`, `gain`, `config`; `change`: members of the model in a specification."
    )


@router.post("/projects/{project}/jobs/perf", status_code=202)
def measure(platform: PlatformDep, who: Caller, project: Text, body: PerfJob) -> TaskBody:
    """Measure a model of a deployment under load."""
    with platform.database.transaction() as session:
        return TaskBody.of(start_perf(session, who, project, body))


@router.post("/projects/{project}/jobs/tune", status_code=202)
def search(platform: PlatformDep, who: Caller, project: Text, body: TuneJob) -> TaskBody:
    """Search the best configuration of a version of a model, on a separate server on the platform's machine."""
    with platform.database.transaction() as session:
        return TaskBody.of(start_tune(session, who, project, platform.workloads, body))


@router.get("/projects/{project}/models/{model}/found")
def get_found(platform: PlatformDep, who: Caller, project: Text, model: Text, version: Number = 0) -> FoundBody:
    """Return the result of the last search for a model, of one version or any."""
    with platform.database.reading() as session:
        owner = projects.find(session, who, project)
        task = found(session, owner.id, model, version)
    if task is None:
        return FoundBody(task=0, version=0, result={})
    return FoundBody(task=task.id, version=int(task.arguments["job"]["version"]), result=task.result)
