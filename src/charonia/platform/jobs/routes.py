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
from charonia.platform.values import Amount, Number, RequestBody, Text

router = APIRouter(prefix="/api/v1", tags=["jobs"])


class MeasureRequest(RequestBody):
    """A measurement of a model of a deployment."""

    deployment: Text
    model: Text
    concurrency: Text = Field("1:16:5", description="Requests in flight: a number, or START:END[:STEP], a level each.")
    protocol: Text = Field("http", description="`http` or `grpc`.")
    batch_size: Number = Field(1, description="Items of a request.")
    is_language_model: bool = Field(False, description="Whether times to tokens are measured.")
    requests: Number = Field(0, description="Requests of the only level, 0 for as many as precise figures need.")


class SearchRequest(RequestBody):
    """A search for the best configuration of a version of a model."""

    model: Text
    version: Number
    minutes: Amount = Field(5.0, description="Time limit.")
    latency_budget_ms: Amount = Field(0.0, description="Largest p99 latency in milliseconds, 0 for none.")
    environment: Text = Field("", description="Environment to serve it in, empty for the platform's own Python.")


class FoundBody(BaseModel):
    """The result of a search."""

    task: int = Field(description="The task, 0 if there was no search yet.")
    version: int = Field(description="The version that was measured.")
    result: dict[str, Any] = Field(
        description="`conclusion`, `sentences`, `gain`, `config`; `change`: members of the model in a specification."
    )


@router.post("/projects/{project}/jobs/perf", status_code=202)
def measure(platform: Here, who: Caller, project: Text, body: MeasureRequest) -> TaskBody:
    """Measure a model of a deployment under load."""
    values = body.model_dump()
    deployment = values.pop("deployment")
    job = PerfJob(**values)
    with platform.database.transaction() as session:
        shown = TaskBody.of(jobs.start_perf(session, who, project, deployment, job))
    platform.tasks.wake()
    return shown


@router.post("/projects/{project}/jobs/tune", status_code=202)
def search(platform: Here, who: Caller, project: Text, body: SearchRequest) -> TaskBody:
    """Search the best configuration of a version of a model, on a separate server on the platform's machine."""
    job = TuneJob(**body.model_dump())
    with platform.database.transaction() as session:
        shown = TaskBody.of(jobs.start_tune(session, who, project, platform.workloads, job))
    platform.tasks.wake()
    return shown


@router.get("/projects/{project}/models/{model}/found")
def get_found(platform: Here, who: Caller, project: Text, model: Text, version: Number = 0) -> FoundBody:
    """Return the result of the last search for a model, of one version or any."""
    with platform.database.reading() as session:
        owner = projects.find(session, who, project)
        task = jobs.found(session, owner.id, model, version)
    if task is None:
        return FoundBody(task=0, version=0, result={})
    return FoundBody(task=task.id, version=int(task.arguments["job"]["version"]), result=task.result)
