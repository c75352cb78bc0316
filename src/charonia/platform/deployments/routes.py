"""The API of deployments."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Query, Response
from pydantic import BaseModel, Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from charonia.core.errors import invalid
from charonia.platform.deployments.figures import FiguresPoint
from charonia.platform.deployments.reads import (
    ChangePlan,
    DeploymentView,
    NewServerKey,
    RevisionView,
    ServerKeyView,
)
from charonia.platform.deployments.servers import ServerKeyRequest
from charonia.platform.deployments.spec import DeploymentChange
from charonia.platform.people.calls import Caller
from charonia.platform.state import Limit, Offset, PlatformDep
from charonia.platform.values import Amount, JsonObject, Number, RequestBody, Text, Time, shown


class _OfSpecification:
    """Describes a JSON object as a specification; `DeploymentChanges` reads it, for files, forms and calls alike."""

    def __get_pydantic_json_schema__(self, _: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(DeploymentChange.__pydantic_core_schema__)


Spec = Annotated[
    JsonObject, _OfSpecification(), Body(description="The specification, as in a file for `charonia apply`.")
]
ExpectedRevision = Annotated[
    Number | None,
    Query(
        description="Number of the latest revision that the caller has seen, 0 for none: if there is a newer one, the "
        "answer is 409.",
    ),
]
Note = Annotated[Text, Query(max_length=1000, description="A note about the change.")]

router = APIRouter(prefix="/api/v1/projects/{project}/deployments", tags=["deployments"])

NAMED = "/{name}"


class DeploymentList(BaseModel):
    """Deployments."""

    deployments: Sequence[DeploymentView]
    total: int = Field(description="Their total number.")


class RevisionList(BaseModel):
    """Revisions, latest first."""

    revisions: Sequence[RevisionView]
    total: int = Field(description="Their total number.")


class RevisionDifference(BaseModel):
    """Differences in words."""

    changes: Sequence[str]


class RollbackRequest(RequestBody):
    """The revision to roll back to."""

    to: Number = Field(default=0, description="Its number; 0 for the revision that served before the latest.")
    revision: Number | None = Field(default=None, description="The latest one that the caller has seen.")


class TrafficRequest(RequestBody):
    """A change of the traffic of a model, in the form of POST /v2/models/M/traffic."""

    model: Text
    weights: dict[Text, Amount] | None = Field(None, description="Weight by version.")
    sticky: Text | None = Field(None, description="The attribute that keeps a client on its version.")
    shadow: JsonObject | None = Field(None, description="Versions that get copies.")
    canary: JsonObject | None = Field(None, description="A plan that moves traffic to a version step by step.")
    action: Text | None = Field(None, description="The action on the running canary plan.")


class PointList(BaseModel):
    """Figures over time."""

    points: Sequence[FiguresPoint]


class LogTail(BaseModel):
    """The end of a log."""

    text: str


@router.get("")
def list_deployments(
    project: Text, platform: PlatformDep, who: Caller, search: Text = "", limit: Limit = 50, offset: Offset = 0
) -> DeploymentList:
    """List the deployments of a project by name."""
    found, total = platform.deployments.reads.list(who, project, search=search, limit=limit, offset=offset)
    return DeploymentList(deployments=found, total=total)


@router.post("", status_code=201)
def create_deployment(project: Text, platform: PlatformDep, who: Caller, spec: Spec, note: Note = "") -> ChangePlan:
    """Create a deployment."""
    return platform.deployments.changes.create(who, project, spec, note=note)


@router.get(NAMED)
def get_deployment(project: Text, name: Text, platform: PlatformDep, who: Caller) -> DeploymentView:
    """Return a deployment with its latest figures."""
    return platform.deployments.reads.get(who, project, name)


@router.put(NAMED)
def put_deployment(
    project: Text,
    name: Text,
    platform: PlatformDep,
    who: Caller,
    spec: Spec,
    dry_run: Annotated[bool, Query(description="Return the changes without applying them.")] = False,
    revision: ExpectedRevision = None,
    note: Note = "",
) -> ChangePlan:
    """Create or update a deployment."""
    value = {"name": name, **spec}
    if value["name"] != name:
        raise invalid(f"name: expected '{name}', as in the address, got {shown(value['name'])}")
    if dry_run:
        return platform.deployments.changes.plan(who, project, value)
    return platform.deployments.changes.change(who, project, value, note=note, revision=revision)


@router.delete(NAMED, status_code=202)
def delete_deployment(project: Text, name: Text, platform: PlatformDep, who: Caller) -> Response:
    """Stop a deployment and delete it; it remains visible until its servers have exited."""
    platform.deployments.changes.remove(who, project, name)
    return Response(status_code=202)


@router.post(f"{NAMED}/rollback")
def roll_back(
    project: Text, name: Text, platform: PlatformDep, who: Caller, asked: RollbackRequest | None = None
) -> ChangePlan:
    """Create a new revision with the content of an earlier one."""
    asked = asked or RollbackRequest()
    return platform.deployments.changes.rollback(who, project, name, to=asked.to, revision=asked.revision)


@router.post(f"{NAMED}/stop", status_code=202)
def stop_deployment(project: Text, name: Text, platform: PlatformDep, who: Caller) -> DeploymentView:
    """Stop the servers of a deployment; its revisions and its address stay."""
    platform.deployments.changes.stop(who, project, name)
    return platform.deployments.reads.get(who, project, name)


@router.post(f"{NAMED}/start", status_code=202)
def start_deployment(project: Text, name: Text, platform: PlatformDep, who: Caller) -> DeploymentView:
    """Start a deployment that was stopped or has failed."""
    platform.deployments.changes.start(who, project, name)
    return platform.deployments.reads.get(who, project, name)


@router.get(f"{NAMED}/revisions")
def list_revisions(
    project: Text, name: Text, platform: PlatformDep, who: Caller, limit: Limit = 50, offset: Offset = 0
) -> RevisionList:
    """List the revisions of a deployment, latest first."""
    found, total = platform.deployments.reads.revisions(who, project, name, limit=limit, offset=offset)
    return RevisionList(revisions=found, total=total)


@router.get(f"{NAMED}/revisions/{{number}}")
def get_revision(project: Text, name: Text, number: Number, platform: PlatformDep, who: Caller) -> RevisionView:
    """Return a revision."""
    return platform.deployments.reads.revision(who, project, name, number)


@router.get(f"{NAMED}/revisions/{{number}}/diff")
def get_difference(
    project: Text,
    name: Text,
    number: Number,
    platform: PlatformDep,
    who: Caller,
    to: Annotated[Number, Query(description="The other revision.")],
) -> RevisionDifference:
    """Return the differences of another revision."""
    return RevisionDifference(changes=platform.deployments.reads.difference(who, project, name, number, to))


@router.get(f"{NAMED}/figures")
def get_figures(
    project: Text,
    name: Text,
    platform: PlatformDep,
    who: Caller,
    since: Annotated[
        Time, Query(description="Only figures after this time, in seconds since the epoch; 0 for the last hour.")
    ] = 0.0,
) -> PointList:
    """Return figures of up to 31 days; requests for them raise their frequency to one every 5 s."""
    return PointList(points=platform.deployments.reads.figures(who, project, name, since))


@router.get(f"{NAMED}/log")
def get_log(
    project: Text,
    name: Text,
    platform: PlatformDep,
    who: Caller,
    lines: Annotated[Number, Query(ge=1, le=5000)] = 200,
    search: Annotated[Text, Query(description="Only entries with this text, such as the id of a request.")] = "",
    level: Annotated[
        Literal["", "error", "warning", "info"], Query(description="Only entries of this level, or a more severe one.")
    ] = "",
) -> LogTail:
    """Return the last lines of the log of the servers; a search covers its last 5,000 lines."""
    return LogTail(text=platform.deployments.servers.log(who, project, name, lines=lines, search=search, level=level))


@router.get(f"{NAMED}/explain")
def explain(
    project: Text, name: Text, model: Text, platform: PlatformDep, who: Caller, version: Number = 0
) -> dict[str, Any]:
    """Return the scheduler's activity and bottleneck for a model, as the server reports them."""
    document: dict[str, Any] = platform.deployments.servers.explain(who, project, name, model, version)
    return document


@router.get(f"{NAMED}/traffic")
def get_traffic(project: Text, name: Text, model: Text, platform: PlatformDep, who: Caller) -> dict[str, Any]:
    """Return the current traffic split of a model, as the server reports it."""
    document: dict[str, Any] = platform.deployments.servers.traffic(who, project, name, model)
    return document


@router.post(f"{NAMED}/traffic")
def set_traffic(project: Text, name: Text, asked: TrafficRequest, platform: PlatformDep, who: Caller) -> dict[str, Any]:
    """Change the traffic split of a model. Returns the plan of a new revision, or the answer of the server."""
    change = asked.model_dump(exclude_unset=True, exclude={"model"})
    found = platform.deployments.servers.set_traffic(who, project, name, asked.model, change)
    return asdict(found) if isinstance(found, ChangePlan) else dict(found or {})


@router.get(f"{NAMED}/keys")
def list_keys(project: Text, name: Text, platform: PlatformDep, who: Caller) -> Sequence[ServerKeyView]:
    """List the API keys of the servers of a deployment."""
    return platform.deployments.keys.list(who, project, name)


@router.post(f"{NAMED}/keys", status_code=201)
def add_key(project: Text, name: Text, asked: ServerKeyRequest, platform: PlatformDep, who: Caller) -> NewServerKey:
    """Create an API key of the servers of a deployment; it works immediately."""
    return platform.deployments.keys.add(who, project, name, asked)


@router.delete(f"{NAMED}/keys/{{key}}", status_code=204)
def remove_key(project: Text, name: Text, key: Text, platform: PlatformDep, who: Caller) -> Response:
    """Delete an API key; it stops working immediately."""
    platform.deployments.keys.remove(who, project, name, key)
    return Response(status_code=204)
