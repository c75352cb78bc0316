"""The API of measurements."""

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from charonia.platform.jobs import jobs
from charonia.platform.jobs.commands import PerfJob, TuneJob
from charonia.platform.people import projects
from charonia.platform.people.calls import Caller
from charonia.platform.state import Here
from charonia.platform.tasks.routes import TaskBody
from charonia.platform.values import Number, Text

router = APIRouter(prefix="/api/v1", tags=["jobs"])


class FoundBody(BaseModel):
    """The result of a search."""

    task: int = Field(description="The task, 0 if there was no search yet.")
    version: int = Field(description="The version that was measured.")
    result: dict[str, Any] = Field(
        description="`conclusion`, `sentences`, `gain`, `config`; `change`: members of the model in a specification."
    )


@router.post("/projects/{project}/jobs/perf", status_code=202)
def measure(platform: Here, who: Caller, project: Text, body: PerfJob) -> TaskBody:
    """Measure a model of a deployment under load."""
    with platform.database.transaction() as session:
        return TaskBody.of(jobs.start_perf(session, who, project, body))


@router.post("/projects/{project}/jobs/tune", status_code=202)
def search(platform: Here, who: Caller, project: Text, body: TuneJob) -> TaskBody:
    """Search the best configuration of a version of a model, on a separate server on the platform's machine."""
    with platform.database.transaction() as session:
        return TaskBody.of(jobs.start_tune(session, who, project, platform.workloads, body))


@router.get("/projects/{project}/models/{model}/found")
def get_found(platform: Here, who: Caller, project: Text, model: Text, version: Number = 0) -> FoundBody:
    """Return the result of the last search for a model, of one version or any."""
    with platform.database.reading() as session:
        owner = projects.find(session, who, project)
        task = jobs.found(session, owner.id, model, version)
    if task is None:
        return FoundBody(task=0, version=0, result={})
    return FoundBody(task=task.id, version=int(task.arguments["job"]["version"]), result=task.result)
