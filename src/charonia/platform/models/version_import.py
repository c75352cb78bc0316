"""Adds versions: the task that imports the files of a version and checks it."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from sqlalchemy import select
from sqlalchemy.orm import Session

from charonia.config.pbtxt import render
from charonia.core.errors import ServingError, internal, invalid
from charonia.platform.artifacts import manifest
from charonia.platform.artifacts.blobs import demand_room
from charonia.platform.artifacts.manifest import Blob
from charonia.platform.artifacts.store import ArtifactStore
from charonia.platform.artifacts.uploads import UploadFolder
from charonia.platform.database.connection import Database, now
from charonia.platform.database.tables import (
    EnvironmentRow,
    ModelRow,
    ProjectRow,
    TaskRow,
    UploadRow,
    VersionRow,
    named,
)
from charonia.platform.isolation.isolation import Isolation
from charonia.platform.models import uploads as upload_rows
from charonia.platform.models.check import CheckingPython, absent_module, first_look, full_check
from charonia.platform.models.code import trusting
from charonia.platform.models.layout import (
    CONFIG,
    MLMODEL,
    NETWORK,
    Arrangement,
    arrange,
    model_root,
    repository_models,
)
from charonia.platform.models.records import (
    ADD,
    ARRIVING,
    CHECK,
    CHECKING,
    COLLECT,
    READY,
    REFUSED,
    AddedVersion,
    VersionReport,
)
from charonia.platform.models.registry import DetailsBody, collect_later, create, drop_attempt, drop_failed
from charonia.platform.models.sources import (
    ANY,
    START_BYTES,
    AllowedHosts,
    IncomingFiles,
    SourceReader,
    VersionSource,
    open_source,
    unpacked,
)
from charonia.platform.people import audit, keys, projects
from charonia.platform.people.access import Grant, Principal, ProjectRole, permits
from charonia.platform.people.secrets import ProjectSecrets
from charonia.platform.tasks import queue
from charonia.platform.tasks.runner import CancelledTaskError, Handler, TaskRun
from charonia.platform.values import OLDER_PYTHONS, check_name

LOOK_S = 0.5
"""Pause between two reports of progress."""

LEFT_OUT_LISTED_MAX = 100
"""Files that were left out and that a report lists."""

MLMODEL_BYTES_MAX = 1024 * 1024

ARRIVED = 0.8
"""Progress of a task when the files have arrived; the rest is the check."""


def add(
    session: Session,
    uploads: UploadFolder,
    who: Principal,
    project: str,
    name: str,
    source: VersionSource,
    notes: str = "",
    roll: Mapping[str, str] = MappingProxyType({}),
) -> AddedVersion:
    """Add a version of a model, which is created if it does not exist.

    Args:
        roll: `deployment` that gets the version when it is ready, and the `strategy` of that; {} for none.
    """
    found = projects.find(session, who, project, ProjectRole.DEPLOYER)
    check_name("model", name)
    source.check()
    if source.kind == "folder":
        who.demand(ProjectRole.ADMIN)
    # One after the other: the model may exist by then, and each version gets its own number.
    session.execute(select(ProjectRow.id).where(ProjectRow.id == found.id).with_for_update())
    if source.kind == "upload":
        upload_rows.take(session, uploads, found, source.place)
    drop_failed(session, found.id)
    row = _begin(session, who, found, name, source.shown if source.kind != "upload" else "upload", notes)
    arguments = {
        "version": row.id,
        "source": source.model_dump(),
        "may_run_code": permits(who.demand_code, project),
        "may_read_folders": permits(who.demand, ProjectRole.ADMIN),
        "roll": {**roll, "who": who.name, "by": who.id, "project": project} if roll else {},
    }
    task = queue.add(session, ADD, found.id, f"{name}/{row.number}", arguments, who.name)
    detail = {**source.model_dump(), "place": source.shown}
    audit.record(session, who, "version.add", f"{project}/{name}/{row.number}", detail, project_id=found.id)
    return AddedVersion(name, row.number, task.id)


def _begin(
    session: Session, who: Principal, project: ProjectRow, name: str, source: str, notes: str = ""
) -> VersionRow:
    """Create a version without files, and its model if that does not exist."""
    owner = named(session, ModelRow, project.id, name) or create(session, who, project.name, name, DetailsBody())
    owner.last_number += 1
    row = VersionRow(
        model_id=owner.id,
        number=owner.last_number,
        state=ARRIVING,
        source=source,
        notes=notes,
        author=who.name,
        created=now(),
    )
    session.add(row)
    session.flush()
    return row


@dataclass(frozen=True, slots=True)
class VersionTasks:
    """Carries out the tasks of the registry.

    Attributes:
        environments: Folder of the environments, a folder by project and digest each.
        hosts: Servers that versions may be read from. Administrators of all projects may name any.
        isolation: Confines checks, and what unpacks archives.
        secrets: Credentials of stores, by name.
        trusted: Backends of other packages whose records say which models are data.
        roll_out: Gives a deployment a version of a model: caller, project, deployment, model and number, strategy.
    """

    database: Database
    store: ArtifactStore
    uploads: UploadFolder
    environments: Path
    hosts: AllowedHosts
    isolation: Isolation
    secrets: ProjectSecrets
    trusted: tuple[str, ...] = ()
    roll_out: Callable[[Principal, str, str, tuple[str, int], str], object] = lambda *_: None

    def add(self, run: TaskRun) -> Mapping[str, Any]:
        """Import the files of a version, and check it. It may run again after the platform exited in the middle.

        A repository becomes a version of each of its models; a task each checks them.
        """
        with self._settling(run):
            added = run.arguments.get("added")
            version, name = (None, "") if added else self._version(run)
            if version is not None and version.state == ARRIVING:
                with self.store.adding():
                    added = self._import(run, version, name)
                if self.store.is_collection_due:
                    with self.database.transaction() as session:
                        collect_later(session, run.project_id)
            self._drop_uploads(run)
            result = {"versions": added} if added else self._check(run)
        return self._rolled_out(run, result)

    def check(self, run: TaskRun) -> Mapping[str, Any]:
        """Check a version again."""
        with self._settling(run):
            result = self._check(run)
        return self._rolled_out(run, result)

    def _rolled_out(self, run: TaskRun, result: Mapping[str, Any]) -> Mapping[str, Any]:
        """Give a version that is ready to the deployment of its model. If this fails, the version stays ready."""
        roll = run.arguments.get("roll")
        if not roll or result.get("state") != READY:
            return result
        _, name = self._version(run)
        with self.database.reading() as session:
            who = keys.standing_deployer(session, roll.get("by", ""), roll["who"], roll["project"])
        self.roll_out(who, roll["project"], roll["deployment"], (name, int(result["version"])), roll["strategy"])
        return {**result, "deployment": roll["deployment"]}

    def collect(self, run: TaskRun) -> Mapping[str, Any]:
        """Remove files that belong to no version, and abandoned uploads."""
        with self.database.transaction() as session:
            given_up = upload_rows.remove_abandoned(session, self.uploads)
            drop_failed(session, run.project_id)
        removed = self.store.collect(self._used)
        if removed is None:
            return {"postponed": True, "uploads": given_up}
        return {"files": removed[0], "bytes": removed[1], "uploads": given_up}

    def _import(self, run: TaskRun, version: VersionRow, name: str) -> list[dict[str, Any]]:
        """Put the files into the store; return the versions of the models of a repository, none for one model."""
        source = VersionSource(**run.arguments["source"])
        progress = _ImportProgress(run)
        with self.database.reading() as session:
            query = select(UploadRow).where(UploadRow.batch == source.place, UploadRow.project_id == run.project_id)
            sent = {row.path: row.key for row in session.scalars(query)} if source.kind == "upload" else {}
        if source.kind == "upload" and not sent:
            raise internal("the uploaded files are missing", hint="upload them again")
        self.uploads.seal(list(sent.values()))
        is_admin = bool(run.arguments["may_read_folders"])
        hosts = AllowedHosts((ANY,)) if is_admin else self.hosts
        with self.database.reading() as session:
            secret = self.secrets.value(session, run.project_id, source.secret) if source.secret else ""
        within = self.store, self.isolation, progress.advance
        reader = SourceReader(self.uploads, *within, hosts, is_admin, secret)
        with open_source(source, sent, reader) as (files, title), unpacked(files, *within) as inner:
            sizes = inner.sizes()
            several = repository_models(list(sizes))
            if several:
                self._demand_fit(version, name, several)
            found = dict[str, Arrangement]()
            for each, paths in (several or {name: list(sizes)}).items():
                with _about(each if several else ""):
                    found[each] = _arranged(inner, paths, source.take)
            progress.total = sum(sizes[path] for each in found.values() for path in each.files.values())
            demand_room(self.store.local.folder, progress.total, what=f"model '{name}'")
            run.log(f"{sum(len(each.files) for each in found.values())} files, {progress.total} bytes, from {title}")
            blobs = {
                each: {
                    path: inner.keep(at, self.store, progress.advance) for path, at in sorted(arranged.files.items())
                }
                | {path: self.store.add([content], what=path) for path, content in arranged.made.items()}
                for each, arranged in found.items()
            }
        reports = dict[str, VersionReport]()
        for each, arranged in found.items():
            with _about(each if several else ""):
                reports[each] = self._inspect(run, version.id, each, blobs[each], arranged)
        if several:
            return self._arrived_together(run, version.id, blobs, reports, title)
        self._arrived(version.id, blobs[name], reports[name], title)
        return []

    def _demand_fit(self, version: VersionRow, name: str, models: Mapping[str, object]) -> None:
        """Refuse a repository as a version of an existing model that it does not have."""
        for each in models:
            check_name("model", each)
        with self.database.reading() as session:
            others = select(VersionRow.id).where(VersionRow.model_id == version.model_id, VersionRow.digest != "")
            if name not in models and session.scalar(others.limit(1)) is not None:
                raise invalid(
                    f"expected a version of model '{name}', got a repository with {', '.join(models)}",
                    hint="leave out the name to add its models",
                )

    def _inspect(
        self, run: TaskRun, version_id: int, name: str, blobs: dict[str, Blob], found: Arrangement
    ) -> VersionReport:
        """Return the report of the files of a model; add the configuration of a pickled estimator to them."""
        may_run_code = bool(run.arguments["may_run_code"])
        if CONFIG not in blobs and may_run_code and (config := trusting(blobs)) is not None:
            blobs[CONFIG] = self.store.add([render(config).encode()], what=CONFIG)
        report = replace(
            first_look(name, blobs, self.store, self.trusted), left_out=list(found.left_out[:LEFT_OUT_LISTED_MAX])
        )
        if report.code and not may_run_code:
            self._change(version_id, report=report.to_json(), runs_code=True)
            raise invalid(
                f"the model is not known to be data: {'; '.join(report.code[:10])}",
                hint="you need the permission to use models that run code",
            )
        return report

    def _arrived(self, version_id: int, blobs: Mapping[str, Blob], report: VersionReport, title: str) -> None:
        """Record the files of a version, which has none before this."""
        with self.database.transaction() as session:
            row = session.get_one(VersionRow, version_id)
            number = _same(session, row.model_id, blobs)
            if not number:
                _record(row, blobs, report, title)
            row.report = replace(report, same_as=number).to_json()
        if number:
            raise invalid(f"version {number} has the same files", hint="use that one")

    def _arrived_together(
        self,
        run: TaskRun,
        version_id: int,
        blobs: Mapping[str, Mapping[str, Blob]],
        reports: Mapping[str, VersionReport],
        title: str,
    ) -> list[dict[str, Any]]:
        """Replace a version by one of each model of a repository, in one transaction; unchanged models keep theirs."""
        added = []
        with self.database.transaction() as session:
            project = session.scalars(select(ProjectRow).where(ProjectRow.id == run.project_id).with_for_update()).one()
            own = session.get_one(VersionRow, version_id)
            who = Principal.of(own.author, [Grant(ProjectRole.DEPLOYER, project.name)])
            for name, files in blobs.items():
                owner = select(ModelRow.id).where(ModelRow.project_id == project.id, ModelRow.name == name)
                number, task = _same(session, session.scalar(owner) or 0, files), 0
                if not number:
                    row = own if name == own.model.name else _begin(session, who, project, name, title, own.notes)
                    _record(row, files, reports[name], title)
                    number, subject = row.number, f"{name}/{row.number}"
                    arguments = {key: run.arguments.get(key) for key in ("may_run_code", "roll")} | {"version": row.id}
                    task = queue.add(session, CHECK, project.id, subject, arguments, who.name).id
                    audit.record(session, who, "version.add", f"{project.name}/{subject}", project_id=project.id)
                added.append({"model": name, "number": number, "task": task})
            if own.state == ARRIVING:
                drop_attempt(session, own)
            record = session.get_one(TaskRow, run.id)
            record.arguments = {**record.arguments, "added": added}  # if the platform exits now, this is done
        return added

    def _check(self, run: TaskRun) -> Mapping[str, Any]:
        version, name = self._version(run)
        if version.state != CHECKING:
            return {"version": version.number, "state": version.state}
        run.progress(ARRIVED, "checking")
        files = manifest.from_json(version.files)
        earlier = VersionReport.from_json(version.report)
        report = replace(first_look(name, files, self.store, self.trusted), left_out=earlier.left_out)
        python = self._python(run, report)
        if report.code and not run.arguments.get("may_run_code"):
            warning = "not checked: the model is not known to be data, and the caller may not run code"
            report = replace(report, warnings=[warning])
        elif python is None:
            missing = ", ".join(need.name for need in report.needs)
            warning = f"it needs {missing}, which neither the platform nor an environment has: it is not checked"
            report = replace(report, warnings=[warning])
        else:
            report = replace(report, **self._checked(run, name, files, python))
        self._change(
            version.id,
            state=READY,
            backend=report.backend,
            runs_code=bool(report.code),
            report=report.to_json(),
            reason="",
        )
        return {"version": version.number, "state": READY}

    def _checked(self, run: TaskRun, name: str, files: manifest.Manifest, python: CheckingPython) -> Mapping[str, Any]:
        """Return the result of a check, repeated with an environment if the code imports packages that only it has."""
        failure: ServingError | None = None
        found: Mapping[str, Any] = {}
        try:
            found = full_check(run, name, files, self.store, python, self.isolation)
            message = "\n".join(found.get("warnings", ()))
        except ServingError as error:
            failure, message = error, error.message
        module = absent_module(message)
        other = self._having(run, {module}) if module else None
        if other is not None:
            run.log(f"environment '{other.name}' has {module}")
            return full_check(run, name, files, self.store, other, self.isolation)
        if failure is not None:
            raise failure
        return found

    def _python(self, run: TaskRun, report: VersionReport) -> CheckingPython | None:
        """Return an interpreter with the packages that a version needs, None for none."""
        if all(need.is_here for need in report.needs):
            return CheckingPython()
        return self._having(run, {need.name for need in report.needs})

    def _having(self, run: TaskRun, wanted: set[str]) -> CheckingPython | None:
        """Return the interpreter of an environment that has these packages, None for none."""
        with self.database.reading() as session:
            query = select(EnvironmentRow).where(
                EnvironmentRow.project_id == run.project_id,
                EnvironmentRow.state == "ready",
                EnvironmentRow.python.not_in(OLDER_PYTHONS),
            )
            rows = session.scalars(query.order_by(EnvironmentRow.id.desc())).all()
        for row in rows:
            python = self.environments / str(row.project_id) / row.digest / "bin" / "python"
            if wanted <= {str(package[0]).lower().replace("_", "-") for package in row.packages} and python.exists():
                return CheckingPython(row.name, python)
        return None

    def _version(self, run: TaskRun) -> tuple[VersionRow, str]:
        with self.database.reading() as session:
            row = session.get(VersionRow, int(run.arguments["version"]))
            if row is None:
                raise internal("the version was removed")
            return row, row.model.name

    def _change(self, version_id: int, **values: Any) -> None:
        with self.database.transaction() as session:
            row = session.get_one(VersionRow, version_id)
            for key, value in values.items():
                setattr(row, key, value)

    def _drop_uploads(self, run: TaskRun) -> None:
        """Remove uploaded files that are now in the store."""
        source = VersionSource(**run.arguments["source"])
        if source.kind == "upload":
            with self.database.transaction() as session:
                query = select(UploadRow).where(UploadRow.batch == source.place)
                upload_rows.remove(session, self.uploads, session.scalars(query).all())

    @contextmanager
    def _settling(self, run: TaskRun) -> Iterator[None]:
        """Record why a version is not ready, unless the platform exits and the task will run again."""
        try:
            yield
        except ServingError as error:
            self._refuse(run, error.message, error.hint)
            raise
        except CancelledTaskError:
            with self.database.reading() as session:
                is_cancelled = session.scalar(select(TaskRow.is_cancelled).where(TaskRow.id == run.id))
            if is_cancelled:
                self._refuse(run, "it was cancelled", "")
            raise
        except Exception as error:
            self._refuse(run, f"{type(error).__name__}: {error}", "")
            raise

    def _refuse(self, run: TaskRun, problem: str, hint: str) -> None:
        with self.database.transaction() as session:
            row = session.get(VersionRow, int(run.arguments["version"]))
            if row is None:
                return
            row.state, row.reason = REFUSED, problem
            row.report = {**row.report, "problem": problem, "hint": hint}
            source = run.arguments.get("source", {})
            if source.get("kind") == "upload":  # the upload still exists: a new attempt can use it
                rows = session.scalars(select(UploadRow).where(UploadRow.batch == source["place"])).all()
                self.uploads.unseal([upload.key for upload in rows])
                for upload in rows:
                    upload.is_taken = False
            with contextlib.suppress(ServingError):  # too many tasks wait: a later task collects
                collect_later(session, run.project_id)

    def _used(self) -> set[str]:
        with self.database.reading() as session:
            return {
                entry["sha256"]
                for files in session.scalars(select(VersionRow.files)).yield_per(100)
                for entry in files.values()
            }


def _same(session: Session, model_id: int, blobs: Mapping[str, Blob]) -> int:
    """Return the number of the version of a model that has these files, 0 for none."""
    same = select(VersionRow.number).where(VersionRow.model_id == model_id, VersionRow.state != REFUSED)
    return session.scalar(same.where(VersionRow.digest == manifest.digest(blobs)).limit(1)) or 0


def _record(row: VersionRow, blobs: Mapping[str, Blob], report: VersionReport, title: str) -> None:
    row.state, row.digest, row.files = CHECKING, manifest.digest(blobs), manifest.to_json(blobs)
    row.size, row.source, row.report = manifest.size(blobs), title, report.to_json()
    row.backend, row.runs_code = report.backend, bool(report.code)


@contextmanager
def _about(model: str) -> Iterator[None]:
    """Name the model of a repository in errors; "" for no repository."""
    try:
        yield
    except ServingError as error:
        if not model:
            raise
        raise ServingError(error.code, f"model '{model}': {error.message}", hint=error.hint) from error


def version_handlers(work: VersionTasks) -> dict[str, Handler]:
    return {ADD: work.add, CHECK: work.check, COLLECT: work.collect}


class _ImportProgress:
    """Reports progress, and notices a cancellation, from time to time.

    Attributes:
        total: Expected bytes, 0 while unknown.
    """

    def __init__(self, run: TaskRun) -> None:
        self.total = 0
        self._run = run
        self._got = 0
        self._reported_s = time.monotonic()

    def advance(self, count: int) -> None:
        """Count bytes that have arrived."""
        self._got += count
        if time.monotonic() - self._reported_s > LOOK_S:
            self._reported_s = time.monotonic()
            share = min(1.0, self._got / self.total) if self.total else 0.0
            self._run.progress(ARRIVED * share, f"{self._got >> 20} MiB have arrived")


def _arranged(files: IncomingFiles, paths: list[str], take: int) -> Arrangement:
    mlmodel = f"{model_root(paths)}{MLMODEL}"
    flavours = None
    if mlmodel in paths:
        try:
            document = yaml.safe_load(files.read(mlmodel, MLMODEL_BYTES_MAX))
        except yaml.YAMLError as error:
            raise invalid(f"{mlmodel} is not YAML: {error}") from None
        flavours = document.get("flavors") if isinstance(document, dict) else None
        if not isinstance(flavours, dict):
            raise invalid(f"{mlmodel}: expected flavors, there are none")
    network = f"{model_root(paths)}{NETWORK}"
    text = files.read(network, MLMODEL_BYTES_MAX).decode(errors="replace") if network in paths else ""
    return arrange(paths, lambda path: files.read(path, START_BYTES), take=take, flavours=flavours, network=text)
