"""The API of environments."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, Field

from charonia.config.backends import Preset, presets
from charonia.platform.database.tables import EnvironmentRow, TaskRow, copied
from charonia.platform.environments import builder, catalog
from charonia.platform.environments.catalog import EnvironmentRequest
from charonia.platform.people import projects
from charonia.platform.people.calls import Caller
from charonia.platform.state import Limit, Offset, PlatformDep
from charonia.platform.values import Text

router = APIRouter(prefix="/api/v1", tags=["environments"])


class ChoicesBody(BaseModel):
    """The choices for a new environment."""

    presets: Sequence[Preset]
    pythons: list[str] = Field(description="Versions of Python; the first is the default.")


class EnvironmentBody(BaseModel):
    """An environment."""

    name: str
    python: str
    requirements: str
    imports: list[str]
    state: str = Field(description="`waiting`, `building`, `ready` or `failed`.")
    reason: str = Field(description="Why it has failed.")
    packages: list[Annotated[list[str], Field(min_length=2, max_length=2)]] = Field(
        description="Name and version of all installed packages."
    )
    size: int = Field(description="Bytes on the disk.")
    created: float
    task: int = Field(description="The task that built it last; 0 for none.")

    @classmethod
    def of(cls, row: EnvironmentRow, task: TaskRow | None = None) -> "EnvironmentBody":
        return copied(cls, row, task=task.id if task else 0)


@router.get("/environments/choices")
def list_choices(who: Caller) -> ChoicesBody:
    """List the choices for a new environment."""
    return ChoicesBody(presets=presets(), pythons=list(builder.pythons()))


@router.get("/projects/{project}/environments")
def list_environments(
    platform: PlatformDep, who: Caller, project: Text, limit: Limit = 100, offset: Offset = 0
) -> list[EnvironmentBody]:
    """List the environments of a project, by name; `packages` and `task` only come with a single one."""
    with platform.database.reading() as session:
        found = catalog.page(session, projects.find(session, who, project), limit=limit, offset=offset)
        return [EnvironmentBody.of(row).model_copy(update={"packages": []}) for row in found]


@router.post("/projects/{project}/environments", status_code=202)
def create_environment(platform: PlatformDep, who: Caller, project: Text, body: EnvironmentRequest) -> EnvironmentBody:
    """Build an environment. Its packages run code, so this needs the permission for code."""
    with platform.database.transaction() as session:
        return EnvironmentBody.of(*catalog.add(session, who, project, body))


@router.get("/projects/{project}/environments/{name}")
def get_environment(platform: PlatformDep, who: Caller, project: Text, name: Text) -> EnvironmentBody:
    """Return an environment."""
    with platform.database.reading() as session:
        row = catalog.get(session, projects.find(session, who, project), name)
        return EnvironmentBody.of(row, catalog.newest_task(session, row))


@router.post("/projects/{project}/environments/{name}/rebuild", status_code=202)
def rebuild_environment(platform: PlatformDep, who: Caller, project: Text, name: Text) -> EnvironmentBody:
    """Rebuild an environment that has failed, or was built by another release of the platform."""
    with platform.database.transaction() as session:
        return EnvironmentBody.of(*catalog.rebuild(session, who, project, name))


@router.delete("/projects/{project}/environments/{name}", status_code=204)
def remove_environment(platform: PlatformDep, who: Caller, project: Text, name: Text) -> None:
    """Delete an environment that no deployment uses."""
    with platform.database.transaction() as session:
        catalog.remove(session, who, project, name)
    with platform.database.reading() as session:
        catalog.sweep(session, platform.settings.data / "environments")
