"""Models and their versions: listed, created, changed, compared, deleted; tags, and deployments that use them."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field, StringConstraints
from sqlalchemy import ColumnElement, Select, String, cast, func, or_, select
from sqlalchemy.orm import Session

from charonia.core.errors import conflict, invalid, not_found
from charonia.platform.artifacts.manifest import Manifest, from_json
from charonia.platform.database.connection import now
from charonia.platform.database.tables import (
    DeploymentRow,
    ModelRow,
    ProjectRow,
    RevisionRow,
    TaskRow,
    VersionRow,
    copied,
    named,
)
from charonia.platform.models.pipeline import PipelineModel
from charonia.platform.models.records import (
    ADD,
    ARRIVING,
    CHECK,
    CHECKING,
    COLLECT,
    READY,
    REFUSED,
    AddedVersion,
    ModelPage,
    ModelRecord,
    ModelSummary,
    VersionFile,
    VersionRecord,
    VersionReport,
    VersionSummary,
)
from charonia.platform.people import audit, projects
from charonia.platform.people.access import Principal, ProjectRole, permits
from charonia.platform.tasks import queue
from charonia.platform.values import RequestBody, Text, check_name, expected


@dataclass(frozen=True, slots=True)
class ChangedValue:
    """A field of the configuration that differs.

    Attributes:
        path: Its path: "input[0].dims".
        before: Its value in the first version, None if absent.
        after: Its value in the second one.
    """

    path: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class VersionDifference:
    """Differences between two versions.

    Attributes:
        after: Number of the second.
        added: Files that only the second one has.
        removed: Files that only the first one has.
    """

    before: int
    after: int
    config: list[ChangedValue]
    added: list[str]
    removed: list[str]
    changed: list[str]


def changed_values(before: Any, after: Any, path: str = "") -> Iterator[ChangedValue]:
    """Yield the differences between two JSON values. Entries of lists with names are compared by name."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from changed_values(before.get(key), after.get(key), f"{path}.{key}" if path else key)
    elif isinstance(before, list) and isinstance(after, list) and _named(before) and _named(after):
        first, second = ({entry["name"]: entry for entry in entries} for entries in (before, after))
        for name in [*first, *(name for name in second if name not in first)]:
            yield from changed_values(first.get(name), second.get(name), f"{path}[{name}]")
    elif before != after:
        yield ChangedValue(path, before, after)


def compare_files(before: Manifest, after: Manifest) -> tuple[list[str], list[str], list[str]]:
    """Return the paths that were added, removed, and changed."""
    changed = [path for path in before.keys() & after.keys() if before[path].sha256 != after[path].sha256]
    return sorted(after.keys() - before.keys()), sorted(before.keys() - after.keys()), sorted(changed)


def _named(entries: list[Any]) -> bool:
    names = [entry.get("name") if isinstance(entry, Mapping) else None for entry in entries]
    return all(names) and len(set(names)) == len(names)


VERSIONS_LISTED_MAX = 200
"""Most versions of a model that are listed, latest first."""

FAILED_S_MAX = 3600.0
"""An attempt to add a version that failed this long ago is removed. Lists of models leave it out from the start."""

_FAILED = (VersionRow.state == REFUSED) & (VersionRow.digest == "")

_SUMMARY = (
    VersionRow.model_id,
    VersionRow.number,
    VersionRow.state,
    VersionRow.created,
    VersionRow.author,
    VersionRow.size,
    VersionRow.backend,
    VersionRow.runs_code,
    VersionRow.reason,
)


IS_LISTED = ~ModelRow.versions.any() | ModelRow.versions.any(~_FAILED)
"""Whether a model has more than failed attempts."""


NOTES_CHARS_MAX = 20_000


TAGS_MAX = 50
LINKS_MAX = 50
LABEL_CHARS_MAX = 200
ADDRESS_CHARS_MAX = 2000

Label = Annotated[
    Text,
    StringConstraints(pattern=r"\S", max_length=LABEL_CHARS_MAX),
    expected(f"1 to {LABEL_CHARS_MAX} characters"),
]
Address = Annotated[
    Text,
    StringConstraints(pattern=r"^https?://", max_length=ADDRESS_CHARS_MAX),
    expected("an address that begins with https:// or http://"),
]


class DetailsBody(RequestBody):
    """Descriptive fields of a model; omitted ones are unchanged."""

    owner: Text | None = Field(default=None, max_length=128)
    description: Text | None = Field(default=None, max_length=NOTES_CHARS_MAX)
    tags: Annotated[list[Label], Field(max_length=TAGS_MAX)] | None = None
    links: Annotated[dict[Label, Address], Field(max_length=LINKS_MAX)] | None = Field(
        default=None, description="Addresses by label."
    )


def models(
    session: Session,
    who: Principal,
    project: str,
    *,
    search: str = "",
    tag: str = "",
    sort: str = "",
    limit: int = 50,
    offset: int = 0,
) -> ModelPage:
    """Return the models of a project by name.

    Args:
        search: Part of the name, the owner, the description or a tag; "" for all.
        tag: A tag that they have, "" for any.
        sort: "owner", "versions" or "changed" in place of the name; "-" before it for descending.
    """
    found = projects.find(session, who, project)
    query = select(ModelRow).where(ModelRow.project_id == found.id, IS_LISTED)
    if search:
        places = (ModelRow.name, ModelRow.owner, ModelRow.description)
        query = query.where(
            or_(
                *(func.lower(place).contains(search.lower(), autoescape=True) for place in places),
                func.lower(cast(ModelRow.tags, String)).contains(tag_text(search.lower()), autoescape=True),
            )
        )
    if tag:
        query = query.where(cast(ModelRow.tags, String).contains(f'"{tag_text(tag)}"', autoescape=True))
    total = session.scalar(select(func.count()).select_from(query.subquery())) or 0
    rows = session.scalars(query.order_by(*_order(sort)).limit(limit).offset(offset)).all()
    every = session.scalars(select(ModelRow.tags).where(ModelRow.project_id == found.id))
    return ModelPage(_summaries(session, project, rows), total, tag_counts(every))


def _order(sort: str) -> Iterator[ColumnElement[Any]]:
    keys: Mapping[str, ColumnElement[Any]]
    keys = {"versions": func.count(), "changed": func.max(VersionRow.created)}
    columns: Mapping[str, ColumnElement[Any]]
    columns = {"name": func.lower(ModelRow.name), "owner": func.lower(ModelRow.owner)}
    key, column = (found.get(sort.removeprefix("-")) for found in (keys, columns))
    if key is not None:
        column = select(key).where(VersionRow.model_id == ModelRow.id).scalar_subquery()
    if column is not None:
        yield column.desc() if sort.startswith("-") else column.asc()
    yield ModelRow.name.asc()


def model(session: Session, who: Principal, project: str, name: str) -> ModelRecord:
    """Return a model with its versions."""
    row = find(session, projects.find(session, who, project), name)
    numbers = select(*_SUMMARY).where(VersionRow.model_id == row.id).order_by(VersionRow.number.desc())
    versions = [_summary(each) for each in session.execute(numbers.limit(VERSIONS_LISTED_MAX))]
    deployments = names(uses(session, row.project_id, name))
    return copied(ModelRecord, row, project=project, versions=_settled(session, row, versions), deployments=deployments)


def version(session: Session, who: Principal, project: str, name: str, number: int) -> VersionRecord:
    """Return a version of a model."""
    owner, row = _own_version(session, who, project, name, number)
    task = newest_task(session, owner.project_id, owner.name, number)
    (state,) = _settled(session, owner, [_summary(row)])
    report = VersionReport.from_json(row.report | ({"problem": state.problem} if state.problem else {}))
    newest = _newest_ready(session, owner)
    return copied(
        VersionRecord,
        row,
        model=name,
        project=project,
        state=state.state,
        report=report,
        files=[VersionFile(path, blob.size, blob.sha256) for path, blob in from_json(row.files).items()],
        task=task.id if task is not None else 0,
        deployments=names(u for u in uses(session, owner.project_id, name) if u.has(number, newest)),
    )


def pipeline(session: Session, project_id: int, roots: Mapping[str, int]) -> dict[str, PipelineModel]:
    """Return models by name, with all models that they call: the given versions, or the latest that is ready for 0."""
    found: dict[str, PipelineModel] = {}
    waiting = list(roots)
    while waiting:
        of_project = (ModelRow.project_id == project_id) & ModelRow.name.in_(waiting)
        newest = select(ModelRow.name, func.max(VersionRow.number)).join(VersionRow.model)
        newest = newest.where(of_project, VersionRow.state == READY).group_by(ModelRow.name)
        numbers = dict(session.execute(newest).all()) | {n: v for n, v in roots.items() if v}
        chosen = or_(*((ModelRow.name == name) & (VersionRow.number == numbers.get(name, 0)) for name in waiting))
        rows = select(ModelRow.name, VersionRow.number, VersionRow.report).join(VersionRow.model)
        found |= {name: PipelineModel(name) for name in waiting}
        for name, number, report in session.execute(rows.where(of_project, chosen)):
            found[name] = PipelineModel(name, number, VersionReport.from_json(report))
        called = [each for name in waiting for each in found[name].report.calls]
        waiting = [name for name in dict.fromkeys(called) if name not in found]
    return found


def compare(session: Session, who: Principal, project: str, name: str, before: int, after: int) -> VersionDifference:
    """Return the differences between two versions of a model."""
    owner = find(session, projects.find(session, who, project), name)
    first, second = find_version(session, owner, before), find_version(session, owner, after)
    config, other = (VersionReport.from_json(row.report).config for row in (first, second))
    added, removed, changed = compare_files(from_json(first.files), from_json(second.files))
    return VersionDifference(before, after, list(changed_values(config, other)), added, removed, changed)


def create(session: Session, who: Principal, project: str, name: str, details: DetailsBody) -> ModelRow:
    """Create a model without versions."""
    found = projects.find(session, who, project, ProjectRole.DEPLOYER)
    check_name("model", name)
    if named(session, ModelRow, found.id, name) is not None:
        raise conflict(f"model '{name}' already exists", hint="add a version to it")
    row = ModelRow(project_id=found.id, name=name, owner=who.name, created=now(), tags=[], links={})
    _apply(row, details)
    session.add(row)
    session.flush()
    audit.record(session, who, "model.create", f"{project}/{name}", project_id=found.id)
    return row


def change(session: Session, who: Principal, project: str, name: str, details: DetailsBody) -> None:
    """Change the descriptive fields of a model."""
    found = projects.find(session, who, project, ProjectRole.DEPLOYER)
    row = find(session, found, name)
    changed = {"changed": _apply(row, details)}
    audit.record(session, who, "model.change", f"{project}/{name}", changed, project_id=found.id)


def delete(session: Session, who: Principal, project: str, name: str) -> None:
    """Delete a model with all its versions."""
    found = projects.find(session, who, project, ProjectRole.DEPLOYER)
    row = find(session, found, name)
    users = names(uses(session, found.id, name))
    if users:
        raise conflict(f"model '{name}' is deployed by {', '.join(users)}", hint="remove it there first")
    _demand_idle(session, row)
    session.delete(row)
    collect_later(session, found.id)
    audit.record(session, who, "model.delete", f"{project}/{name}", project_id=found.id)


def annotate(session: Session, who: Principal, project: str, name: str, number: int, notes: str) -> None:
    """Set the notes of a version."""
    owner, row = _own_version(session, who, project, name, number, ProjectRole.DEPLOYER)
    row.notes = notes
    audit.record(session, who, "version.annotate", f"{project}/{name}/{number}", project_id=owner.project_id)


def delete_version(session: Session, who: Principal, project: str, name: str, number: int) -> None:
    """Delete a version; its number is not reused."""
    owner, row = _own_version(session, who, project, name, number, ProjectRole.DEPLOYER)
    newest = _newest_ready(session, owner)
    users = names(use for use in uses(session, owner.project_id, name) if use.has(number, newest))
    if users:
        raise conflict(
            f"version {number} of '{name}' is deployed by {', '.join(users)}",
            hint="give these deployments another version first",
        )
    _demand_idle(session, owner, number)
    session.delete(row)
    collect_later(session, owner.project_id)
    audit.record(session, who, "version.delete", f"{project}/{name}/{number}", project_id=owner.project_id)


def check_again(session: Session, who: Principal, project: str, name: str, number: int) -> AddedVersion:
    """Check a version again, with the current environments."""
    owner, row = _own_version(session, who, project, name, number, ProjectRole.DEPLOYER)
    if row.runs_code:
        who.demand_code(project)
    _demand_idle(session, owner, number)
    if not row.digest:
        raise invalid(f"version {number} of '{name}' has no files: they have not arrived", hint="add it again")
    row.state, row.reason = CHECKING, ""
    arguments = {"version": row.id, "may_run_code": permits(who.demand_code, project)}
    added = queue.add(session, CHECK, owner.project_id, f"{name}/{number}", arguments, who.name)
    audit.record(session, who, "version.check", f"{project}/{name}/{number}", project_id=owner.project_id)
    return AddedVersion(name, number, added.id)


def find(session: Session, project: ProjectRow, name: str) -> ModelRow:
    """Return a model."""
    row = named(session, ModelRow, project.id, name)
    if row is None:
        raise not_found(f"model '{name}' does not exist in project '{project.name}'")
    return row


def find_version(session: Session, owner: ModelRow, number: int) -> VersionRow:
    """Return a version of a model."""
    row = session.scalar(select(VersionRow).where(VersionRow.model_id == owner.id, VersionRow.number == number))
    if row is None:
        raise not_found(f"version {number} of model '{owner.name}' does not exist")
    return row


def _own_version(
    session: Session, who: Principal, project: str, name: str, number: int, role: ProjectRole = ProjectRole.VIEWER
) -> tuple[ModelRow, VersionRow]:
    owner = find(session, projects.find(session, who, project, role), name)
    return owner, find_version(session, owner, number)


def newest_task(session: Session, project_id: int, name: str, number: int) -> TaskRow | None:
    return session.scalar(_tasks(project_id, name, number).order_by(TaskRow.id.desc()).limit(1))


def collect_later(session: Session, project_id: int) -> None:
    """Add the task that removes files that belong to no version, unless one waits."""
    waiting = select(TaskRow.id).where(TaskRow.kind == COLLECT, TaskRow.state == "waiting")
    if session.scalar(waiting.limit(1)) is None:
        queue.add(session, COLLECT, project_id, "files that no version has", {})


def drop_failed(session: Session, project_id: int) -> None:
    """Remove attempts to add a version that failed a while ago, with the models that have nothing else."""
    query = select(VersionRow).join(VersionRow.model).where(ModelRow.project_id == project_id)
    for row in session.scalars(query.where(VersionRow.digest == "", VersionRow.created < now() - FAILED_S_MAX)):
        task = newest_task(session, project_id, row.model.name, row.number)
        if task is None or task.ended:
            drop_attempt(session, row)


def drop_attempt(session: Session, row: VersionRow) -> None:
    """Remove a version that has no files, and its model if that has nothing else."""
    owner = row.model
    owner.versions.remove(row)
    if not (owner.versions or owner.description or owner.tags or owner.links or owner.follows):
        session.delete(owner)


def _tasks(project_id: int, name: str, number: int) -> Select[TaskRow]:
    """Return the query for the tasks about a version, or about any for 0."""
    query = select(TaskRow).where(TaskRow.project_id == project_id, TaskRow.kind.in_((ADD, CHECK)))
    subject = (
        TaskRow.subject == f"{name}/{number}" if number else TaskRow.subject.startswith(f"{name}/", autoescape=True)
    )
    return query.where(subject)


def _newest_ready(session: Session, owner: ModelRow) -> int:
    query = select(func.max(VersionRow.number)).where(VersionRow.model_id == owner.id, VersionRow.state == READY)
    return session.scalar(query) or 0


def _summaries(session: Session, project: str, rows: Sequence[ModelRow]) -> list[ModelSummary]:
    ids = [row.id for row in rows]
    counts = (
        select(
            VersionRow.model_id.label("id"),
            func.count().label("version_count"),
            func.max(VersionRow.number).label("newest"),
        )
        .where(VersionRow.model_id.in_(ids), ~_FAILED)
        .group_by(VersionRow.model_id)
        .subquery()
    )
    query = select(counts.c.version_count, *_SUMMARY).join(
        counts, (VersionRow.model_id == counts.c.id) & (VersionRow.number == counts.c.newest)
    )
    latest = {row.model_id: row for row in session.execute(query)}
    return [
        copied(
            ModelSummary,
            row,
            project=project,
            version_count=latest[row.id].version_count if row.id in latest else 0,
            latest=_summary(latest[row.id]) if row.id in latest else None,
        )
        for row in rows
    ]


def _summary(row: Any) -> VersionSummary:
    return copied(VersionSummary, row, problem=row.reason)


def _settled(session: Session, owner: ModelRow, versions: Sequence[VersionSummary]) -> list[VersionSummary]:
    """Return the versions, corrected for one whose task was cancelled before it started: it will never be ready."""
    found = []
    for each in versions:
        if each.state in (ARRIVING, CHECKING):
            task = newest_task(session, owner.project_id, owner.name, each.number)
            if task is None or task.state in ("failed", "cancelled"):
                reason = task.reason if task is not None else "its task was removed"
                found.append(replace(each, state=REFUSED, problem=reason))
                continue
        found.append(each)
    return found


def _apply(row: ModelRow, details: DetailsBody) -> list[str]:
    """Change the given fields of a model, and return their names."""
    fields = details.model_dump(include=set(DetailsBody.model_fields), exclude_none=True)
    for name, value in fields.items():
        setattr(row, name, sorted(set(value)) if name == "tags" else value)
    return list(fields)


def _demand_idle(session: Session, owner: ModelRow, number: int = 0) -> None:
    """Check that no task is about a version of a model, or about any for 0."""
    tasks = _tasks(owner.project_id, owner.name, number)
    task = session.scalar(tasks.where(TaskRow.state.in_(("waiting", "running"))).limit(1))
    if task is not None:
        raise conflict(f"'{task.subject}' is on its way", hint=f"wait for task {task.id}, or cancel it")


def tag_counts(tags: Iterable[Sequence[str]]) -> dict[str, int]:
    """Return all tags with the number of models that have them, the most frequent first."""
    counts = Counter(tag for each in tags for tag in each)
    return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))


def tag_text(text: str) -> str:
    """Return a text with the escapes of the JSON of tags."""
    return json.dumps(text)[1:-1]


@dataclass(frozen=True, slots=True)
class Use:
    """A deployment that uses a model.

    Attributes:
        versions: The versions of the model; none for the latest.
    """

    deployment: str
    versions: frozenset[int]

    def has(self, number: int, newest: int) -> bool:
        """Return whether it uses a version; `newest` is the latest one that is ready."""
        return number in self.versions or (not self.versions and number == newest)


def uses(session: Session, project_id: int, model: str) -> list[Use]:
    """Return the deployments whose desired or serving revision uses a model, one entry for each revision."""
    rows = session.execute(
        select(DeploymentRow.name, RevisionRow.spec)
        .join(RevisionRow.deployment)
        .where(DeploymentRow.project_id == project_id, ~DeploymentRow.removed)
        .where(RevisionRow.number.in_([DeploymentRow.latest, DeploymentRow.wanted, DeploymentRow.serving]))
        .order_by(DeploymentRow.name)
    )
    return [
        Use(name, _numbers(entry.get("versions")))
        for name, spec in rows
        for entry in spec.get("models", [])
        if entry.get("name") == model
    ]


def names(found: Iterable[Use]) -> list[str]:
    return list(dict.fromkeys(use.deployment for use in found))


def _numbers(versions: object) -> frozenset[int]:
    return frozenset(map(int, versions)) if isinstance(versions, list | tuple) else frozenset()
