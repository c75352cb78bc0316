"""The environments of a project: added, built, listed, removed; and presets to choose from."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from charonia.config.backends import Preset
from charonia.core.errors import conflict, invalid, not_found
from charonia.platform.database.connection import Database, now
from charonia.platform.database.tables import DeploymentRow, EnvironmentRow, ProjectRow, RevisionRow, TaskRow, named
from charonia.platform.environments import builder
from charonia.platform.environments.requirements import check_python, read_requirements, read_script
from charonia.platform.isolation.isolation import Isolation
from charonia.platform.people import audit, keys, projects
from charonia.platform.people.access import Principal, ProjectRole
from charonia.platform.tasks import queue
from charonia.platform.tasks.runner import Handler, TaskRun
from charonia.platform.values import OLDER_PYTHONS, RequestBody, Text, check_name

KIND = "environment"
"""Kind of the task that builds an environment."""


class EnvironmentRequest(RequestBody):
    """An environment to build."""

    name: Text
    requirements: Text = Field(default="", description="Packages, a line each, in the syntax of pip.")
    script: Text = Field(
        default="", description="A Python file with its dependencies (PEP 723), instead of requirements."
    )
    python: Text = Field(default="", description="Version of Python, empty for the platform's own.")
    imports: list[Text] = Field(default=[], description="Modules to test it with, besides its packages' own.")


def preset_request(preset: Preset) -> EnvironmentRequest:
    return EnvironmentRequest(name=preset.name, requirements=preset.requirements, imports=list(preset.imports))


def add(
    session: Session,
    who: Principal,
    project: str,
    wanted: EnvironmentRequest,
    deployment: Mapping[str, Any] | None = None,
) -> tuple[EnvironmentRow, TaskRow]:
    """Add an environment, and the task that builds it. Its packages run code.

    Args:
        deployment: The specification of a deployment that the caller creates when it is built; None for none.
    """
    found = _to_build(session, who, project)
    name = check_name("environment", wanted.name)
    stated, lines = read_script(wanted.script) if wanted.script else ("", wanted.requirements)
    python = check_python(wanted.python or stated, builder.pythons())
    required = read_requirements(lines)
    if required.extras and python in OLDER_PYTHONS:
        raise invalid(f"requirements: expected no extras of charonia with Python {python}, whose models run in workers")
    digest = required.digest(python, builder.release(), wanted.imports)
    if named(session, EnvironmentRow, found.id, name) is not None:
        raise conflict(f"environment: '{name}' already exists", hint="choose another name")
    row = EnvironmentRow(
        project_id=found.id,
        name=name,
        python=python,
        requirements=lines,
        imports=wanted.imports,
        digest=digest,
        state="waiting",
        created=now(),
    )
    session.add(row)
    return row, _build(session, who, found, row, deployment, "environment.create")


def rebuild(
    session: Session, who: Principal, project: str, name: str, deployment: Mapping[str, Any] | None = None
) -> tuple[EnvironmentRow, TaskRow]:
    """Rebuild an environment that has failed, or was built by another release of the platform. See `add`."""
    found = _to_build(session, who, project)
    row = get(session, found, name)
    if row.state in ("waiting", "building"):
        raise conflict(f"environment '{row.name}' is being built", hint="wait, or cancel its job")
    row.digest = read_requirements(row.requirements).digest(row.python, builder.release(), row.imports)
    row.state, row.reason = "waiting", ""
    return row, _build(session, who, found, row, deployment, "environment.rebuild")


def get(session: Session, project: ProjectRow, name: str) -> EnvironmentRow:
    """Return an environment."""
    row = named(session, EnvironmentRow, project.id, name)
    if row is None:
        raise not_found(f"environment '{name}' does not exist in project '{project.name}'")
    return row


def page(session: Session, project: ProjectRow, *, limit: int, offset: int = 0) -> Sequence[EnvironmentRow]:
    """Return environments by name."""
    query = select(EnvironmentRow).where(EnvironmentRow.project_id == project.id).order_by(EnvironmentRow.name)
    return session.scalars(query.limit(limit).offset(offset)).all()


def newest_task(session: Session, row: EnvironmentRow) -> TaskRow | None:
    """Return the task that built it last."""
    query = select(TaskRow).where(
        TaskRow.kind == KIND, TaskRow.project_id == row.project_id, TaskRow.subject == row.name
    )
    return session.scalar(query.order_by(TaskRow.id.desc()).limit(1))


def remove(session: Session, who: Principal, project: str, name: str) -> None:
    """Delete an environment; `sweep` removes its folder."""
    row = get(session, projects.find(session, who, project, ProjectRole.DEPLOYER), name)
    specs = session.execute(
        select(DeploymentRow.name, RevisionRow.spec)
        .join(RevisionRow.deployment)
        .where(DeploymentRow.project_id == row.project_id, ~DeploymentRow.removed)
        .where((DeploymentRow.wanted != 0) | (DeploymentRow.serving != 0))
    )
    users = sorted({name for name, spec in specs if spec.get("environment") == row.name})
    if users:
        raise conflict(
            f"environment '{row.name}' is used by {', '.join(users)}",
            hint="stop or remove these deployments first",
        )
    session.delete(row)
    audit.record(session, who, "environment.remove", f"{project}/{name}", project_id=row.project_id)


def sweep(session: Session, folder: Path) -> None:
    """Remove the folders of deleted environments."""
    rows = session.execute(select(EnvironmentRow.project_id, EnvironmentRow.digest))
    kept = {builder.folder_of(folder, project_id, digest) for project_id, digest in rows}
    for path in folder.glob("*/*"):
        if path.is_dir() and path not in kept:
            builder.remove(path)


def handler(
    database: Database, folder: Path, isolation: Isolation, deploy: Callable[[Principal, str, Any], object]
) -> Handler:
    """Return the handler of tasks that build environments.

    Args:
        deploy: Creates a deployment in a project.
    """

    def change(environment_id: int, **values: Any) -> None:
        with database.transaction() as session:
            row = session.get(EnvironmentRow, environment_id)
            for key, value in values.items() if row is not None else ():
                setattr(row, key, value)

    def handle(run: TaskRun) -> Mapping[str, Any]:
        number = int(run.arguments["environment"])
        with database.reading() as session:
            row = session.get(EnvironmentRow, number)
        if row is None:
            raise not_found("the environment was removed")
        change(number, state="building", reason="")
        wanted = read_requirements(row.requirements)
        try:
            path = builder.folder_of(folder, row.project_id, row.digest)
            made = builder.build(run, path, row.python, wanted, row.imports, isolation)
        except BaseException as error:
            change(number, state="failed", reason=str(error) or "it was cancelled")
            raise
        change(number, state="ready", packages=made["packages"], size=made["size"])
        if wanted_next := run.arguments.get("deployment"):
            project = str(run.arguments["project"])
            with database.reading() as session:  # with the permissions of now
                who = keys.standing_deployer(session, run.arguments.get("by", ""), run.arguments["who"], project)
            deploy(who, project, wanted_next)
        return {"packages": len(made["packages"]), "size": made["size"]}

    return handle


def _to_build(session: Session, who: Principal, project: str) -> ProjectRow:
    who.demand_code(project)
    return projects.find(session, who, project, ProjectRole.DEPLOYER)


def _build(
    session: Session,
    who: Principal,
    project: ProjectRow,
    row: EnvironmentRow,
    deployment: Mapping[str, Any] | None,
    action: str,
) -> TaskRow:
    session.flush()
    arguments: dict[str, Any] = {"environment": row.id}
    if deployment is not None:
        arguments |= {"deployment": dict(deployment), "project": project.name, "who": who.name, "by": who.id}
    detail = {"for": deployment["name"]} if deployment else {}
    audit.record(session, who, action, f"{project.name}/{row.name}", detail, project_id=project.id)
    return queue.add(session, KIND, project.id, row.name, arguments, who.name)
