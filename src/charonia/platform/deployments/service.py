"""Deployments: what people, pages and the API do with them. Any thread may call."""

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from charonia.core.errors import Code, ServingError, invalid, not_found, unavailable
from charonia.platform.database.connection import Database, now
from charonia.platform.database.tables import DeploymentRow, RevisionRow, ServerKeyRow
from charonia.platform.deployments.collector import Collector
from charonia.platform.deployments.figures import Point
from charonia.platform.deployments.reconciler import Reconciler
from charonia.platform.deployments.server_calls import ask, model_path
from charonia.platform.deployments.spec import DeploymentSpec
from charonia.platform.deployments.spec_diff import changes, changes_traffic_only
from charonia.platform.deployments.spec_form import read_spec, write_spec
from charonia.platform.deployments.views import (
    ChangePlan,
    DeploymentView,
    NewServerKey,
    RevisionView,
    ServerKeyView,
    deployment_view,
    revision_view,
)
from charonia.platform.deployments.workloads import Named, Workloads
from charonia.platform.people import audit, projects
from charonia.platform.people.access import Principal, ProjectRole
from charonia.platform.targets.api import DeploymentTarget, Observed, RevisionPhase

DEPLOYMENTS_MAX = 1000
"""Most deployments of a platform."""

SERVER_KEYS_MAX = 1000
"""Most API keys of a deployment."""

LOG_LINES_MAX = 5000

SCOPES = ("infer", "read", "admin")

_KEY_BYTES = 32
_KEY_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,128}")
_SETTINGS = ("weights", "sticky", "shadow")


class Deployments:
    """The deployments of a platform.

    Args:
        database: Where they are written down.
        targets: Where they run, by name.
        workloads: Makes workloads.
    """

    def __init__(self, database: Database, targets: Mapping[str, DeploymentTarget], workloads: Workloads) -> None:
        self._database = database
        self._targets = targets
        self._workloads = workloads
        self.reconciler = Reconciler(database, targets, workloads)
        self.collector = Collector(self._metrics_pages)

    def start(self) -> None:
        """Begin to bring about what is wanted, and to collect figures."""
        with self._database.reading() as session:
            self._workloads.sweep(session)
        self.reconciler.start()
        self.collector.start()

    def close(self) -> None:
        """Stop; what runs goes on."""
        self.reconciler.close()
        self.collector.close()

    def targets(self) -> Sequence[str]:
        """Return the names of the places where deployments can run."""
        return list(self._targets)

    def list(
        self, who: Principal, project: str, *, search: str = "", limit: int = 50, offset: int = 0
    ) -> tuple[Sequence[DeploymentView], int]:
        """Return deployments by name, and how many there are.

        Raises:
            NotPermittedError: If the caller has no role in the project.
            ServingError: NOT_FOUND if there is no such project.
        """
        with self._database.reading() as session:
            found = projects.find(session, who, project)
            chosen = (DeploymentRow.project_id == found.id) & DeploymentRow.name.contains(search, autoescape=True)
            count = session.scalar(select(func.count()).select_from(DeploymentRow).where(chosen)) or 0
            query = _with_latest().where(chosen).order_by(DeploymentRow.name).limit(limit).offset(offset)
            rows = session.execute(query).all()
        return [deployment_view(row, project, latest, self.collector.latest(row.id)) for row, latest in rows], count

    def get(self, who: Principal, project: str, name: str) -> DeploymentView:
        """Return a deployment with its latest figures.

        Raises:
            NotPermittedError: If the caller has no role in the project.
            ServingError: NOT_FOUND.
        """
        with self._database.reading() as session:
            row, latest = self._find(session, who, project, name, ProjectRole.VIEWER)
        return deployment_view(row, project, latest, self.collector.latest(row.id))

    def plan(self, who: Principal, project: str, value: object) -> ChangePlan:
        """Return what a specification would change, and why it does not fit. Nothing is changed.

        Raises:
            NotPermittedError: If the caller has no role in the project.
            ServingError: INVALID_ARG with all that is wrong with it; NOT_FOUND if there is no such project.
        """
        return self._planned(who, project, read_spec(value), ProjectRole.VIEWER)[0]

    def create(self, who: Principal, project: str, value: object, *, note: str = "") -> ChangePlan:
        """Create a deployment.

        Raises:
            NotPermittedError: If the caller is no deployer, or may not deploy code and a model holds some.
            ServingError: INVALID_ARG with all that is wrong; ALREADY_EXISTS; NOT_FOUND if there is no such project.
        """
        return self._put(who, project, read_spec(value), note=note, revision=0)

    def change(
        self, who: Principal, project: str, value: object, *, note: str = "", revision: int | None = None
    ) -> ChangePlan:
        """Let a deployment be so, created if it is not there. A specification that changes nothing does nothing.

        Args:
            who: Who asks for it.
            project: Its project.
            value: The specification.
            note: What they say about the change.
            revision: Number of the newest revision that they have seen, 0 for none; None if it does not matter.

        Raises:
            NotPermittedError: As `create`.
            ServingError: As `create`; ALREADY_EXISTS also if somebody else has made a revision meanwhile.
        """
        return self._put(who, project, read_spec(value), note=note, revision=revision)

    def rollback(
        self, who: Principal, project: str, name: str, *, to: int = 0, revision: int | None = None
    ) -> ChangePlan:
        """Make a new revision that is as an earlier one was.

        Args:
            who: Who asks for it.
            project: The project.
            name: The deployment.
            to: Number of the earlier one; 0 for the one that served before the newest.
            revision: As for `change`.

        Raises:
            NotPermittedError: As `create`.
            ServingError: As `change`; NOT_FOUND if there is no such revision.
        """
        with self._database.reading() as session:
            row, _ = self._find(session, who, project, name, ProjectRole.DEPLOYER)
            of_this = RevisionRow.deployment_id == row.id
            if to:
                chosen = session.scalar(select(RevisionRow).where(of_this, RevisionRow.number == to))
            else:
                good = RevisionRow.state.in_(("replaced", "serving"))
                query = select(RevisionRow).where(of_this, good, RevisionRow.number < row.latest)
                chosen = session.scalar(query.order_by(RevisionRow.number.desc()).limit(1))
        if chosen is None:
            raise not_found(f"deployment '{name}' has no {f'revision {to}' if to else 'earlier revision that served'}")
        spec = read_spec(chosen.spec)
        return self._put(who, project, spec, note=f"back to revision {chosen.number}", revision=revision)

    def stop(self, who: Principal, project: str, name: str) -> None:
        """End the servers of a deployment; its revisions and its address stay.

        Raises:
            NotPermittedError: If the caller is no deployer.
            ServingError: NOT_FOUND.
        """
        with self._database.transaction() as session:
            row, _ = self._find(session, who, project, name, ProjectRole.DEPLOYER)
            if row.wanted:
                _want(row, 0, "stopping")
                audit.note(session, who, "deployment.stop", f"{project}/{name}", project_id=row.project_id)
        self.reconciler.wake()

    def begin(self, who: Principal, project: str, name: str) -> None:
        """Start a deployment that was stopped or has failed, with the newest revision that is not known to fail.

        Raises:
            NotPermittedError: If the caller is no deployer.
            ServingError: NOT_FOUND; UNAVAILABLE while it is removed.
        """
        with self._database.transaction() as session:
            row, latest = self._find(session, who, project, name, ProjectRole.DEPLOYER)
            _demand_kept(row)
            wanted = row.serving if latest.state == "failed" and row.serving else row.latest
            if row.wanted != wanted or row.failure:
                _want(row, wanted, "starting")
                detail = {"revision": wanted}
                audit.note(session, who, "deployment.start", f"{project}/{name}", detail, project_id=row.project_id)
        self.reconciler.wake()

    def remove(self, who: Principal, project: str, name: str) -> None:
        """End a deployment and remove it with its revisions; it is there until its servers have ended.

        Raises:
            NotPermittedError: If the caller is no deployer.
            ServingError: NOT_FOUND.
        """
        with self._database.transaction() as session:
            row, _ = self._find(session, who, project, name, ProjectRole.DEPLOYER)
            if not row.removed:
                row.removed = True
                _want(row, 0, "stopping")
                audit.note(session, who, "deployment.remove", f"{project}/{name}", project_id=row.project_id)
        self.reconciler.wake()

    def revisions(
        self, who: Principal, project: str, name: str, *, limit: int = 50, offset: int = 0
    ) -> tuple[Sequence[RevisionView], int]:
        """Return the revisions of a deployment, the newest first, and how many there are.

        Raises:
            NotPermittedError: If the caller has no role in the project.
            ServingError: NOT_FOUND.
        """
        with self._database.reading() as session:
            row, _ = self._find(session, who, project, name, ProjectRole.VIEWER)
            query = (
                select(RevisionRow)
                .where(RevisionRow.deployment_id == row.id, RevisionRow.number <= row.latest - offset)
                .order_by(RevisionRow.number.desc())
                .limit(limit + 1)
            )
            found = session.scalars(query).all()
        before = [*found[1:], None]
        return [revision_view(one, former) for one, former in zip(found, before, strict=True)][:limit], row.latest

    def revision(self, who: Principal, project: str, name: str, number: int) -> RevisionView:
        """Return a revision of a deployment.

        Raises:
            NotPermittedError: If the caller has no role in the project.
            ServingError: NOT_FOUND.
        """
        with self._database.reading() as session:
            row, _ = self._find(session, who, project, name, ProjectRole.VIEWER)
            query = select(RevisionRow).where(
                RevisionRow.deployment_id == row.id, RevisionRow.number.in_((number, number - 1))
            )
            found = {one.number: one for one in session.scalars(query)}
        if number not in found:
            raise not_found(f"deployment '{name}' has no revision {number}")
        return revision_view(found[number], found.get(number - 1))

    def difference(self, who: Principal, project: str, name: str, before: int, after: int) -> Sequence[str]:
        """Return what is different in a revision, in words.

        Raises:
            NotPermittedError: If the caller has no role in the project.
            ServingError: NOT_FOUND.
        """
        one, other = (self.revision(who, project, name, number) for number in (before, after))
        return changes(read_spec(one.spec), read_spec(other.spec))

    def figures(self, who: Principal, project: str, name: str, since_s: float = 0.0) -> Sequence[Point]:
        """Return the figures of a deployment after a time, at most those of an hour; they become more frequent.

        Raises:
            NotPermittedError: If the caller has no role in the project.
            ServingError: NOT_FOUND.
        """
        with self._database.reading() as session:
            row, _ = self._find(session, who, project, name, ProjectRole.VIEWER)
        return self.collector.since(row.id, since_s)

    def log(self, who: Principal, project: str, name: str, *, lines: int = 200) -> str:
        """Return the last lines of the log of a deployment.

        Raises:
            NotPermittedError: If the caller has no role in the project.
            ServingError: NOT_FOUND; UNAVAILABLE when its target cannot be reached.
        """
        target, key = self._target(who, project, name, ProjectRole.VIEWER)
        return target.log(key, min(lines, LOG_LINES_MAX))

    def observe(self, who: Principal, project: str, name: str) -> Observed:
        """Return what the target of a deployment sees now, with CPU time and memory.

        Raises:
            NotPermittedError: If the caller has no role in the project.
            ServingError: NOT_FOUND; UNAVAILABLE when its target cannot be reached.
        """
        target, key = self._target(who, project, name, ProjectRole.VIEWER)
        return target.observe(key)

    def explain(self, who: Principal, project: str, name: str, model: str, version: int = 0) -> Any:
        """Return what the scheduler of the server does for a model, and what limits it: the server's own words.

        Raises:
            NotPermittedError: If the caller has no role in the project.
            ServingError: NOT_FOUND; UNAVAILABLE while nothing serves.
        """
        what = f"versions/{version}/explain" if version else "explain"
        return self._ask(who, project, name, ProjectRole.VIEWER, model_path(model, what))

    def traffic(self, who: Principal, project: str, name: str, model: str) -> Any:
        """Return how the requests of a model are split among its versions now, with the canary plan.

        Raises:
            NotPermittedError: If the caller has no role in the project.
            ServingError: NOT_FOUND; UNAVAILABLE while nothing serves.
        """
        return self._ask(who, project, name, ProjectRole.VIEWER, model_path(model, "traffic"))

    def set_traffic(
        self, who: Principal, project: str, name: str, model: str, change: Mapping[str, Any]
    ) -> ChangePlan | Any:
        """Change how the requests of a model are split.

        Weights, stickiness and shadow versions make a new revision. A canary plan, and what is done with one, goes
        to the server.

        Args:
            who: Who asks for it.
            project: The project.
            name: The deployment.
            model: The model.
            change: As the server's own API takes it.

        Returns:
            The plan of the change, or the answer of the server.

        Raises:
            NotPermittedError: If the caller is no deployer.
            ServingError: NOT_FOUND; INVALID_ARG; UNAVAILABLE while nothing serves.
        """
        view = self.get(who, project, name)
        spec = read_spec(self.revision(who, project, name, view.wanted or view.revision).spec)
        if model not in [deployed.name for deployed in spec.models]:
            raise not_found(f"deployment '{name}' has no model '{model}'")
        if not change.keys() <= set(_SETTINGS):
            answer = self._ask(who, project, name, ProjectRole.DEPLOYER, model_path(model, "traffic"), change)
            with self._database.transaction() as session:
                row, _ = self._find(session, who, project, name, ProjectRole.DEPLOYER)
                detail = {"model": model, "change": dict(change)}
                audit.note(session, who, "deployment.traffic", f"{project}/{name}", detail, project_id=row.project_id)
            return answer
        models = [
            replace(deployed, traffic=_with(deployed.traffic, change)) if deployed.name == model else deployed
            for deployed in spec.models
        ]
        value = write_spec(replace(spec, models=tuple(models)))
        return self.change(who, project, value, note=f"traffic of '{model}'", revision=view.revision)

    def keys(self, who: Principal, project: str, name: str) -> Sequence[ServerKeyView]:
        """Return the API keys of the servers of a deployment.

        Raises:
            NotPermittedError: If the caller is no deployer.
            ServingError: NOT_FOUND.
        """
        with self._database.reading() as session:
            row, _ = self._find(session, who, project, name, ProjectRole.DEPLOYER)
            query = select(ServerKeyRow).where(ServerKeyRow.deployment_id == row.id).order_by(ServerKeyRow.name)
            return [
                ServerKeyView(key.name, key.scopes, key.author, key.created)
                for key in session.scalars(query.limit(SERVER_KEYS_MAX))
            ]

    def add_key(self, who: Principal, project: str, name: str, key_name: str, scopes: Sequence[str]) -> NewServerKey:
        """Make an API key of the servers of a deployment; it works at once.

        Raises:
            NotPermittedError: If the caller is no deployer.
            ServingError: NOT_FOUND; INVALID_ARG; ALREADY_EXISTS.
        """
        if not _KEY_NAME.fullmatch(key_name):
            raise invalid(f"name of a key: expected up to 128 of letters, digits and _.@-, got '{key_name}'")
        if not scopes or not set(scopes) <= set(SCOPES):
            raise invalid(f"scopes: expected some of {', '.join(SCOPES)}, got {', '.join(scopes) or 'none'}")
        secret = secrets.token_urlsafe(_KEY_BYTES)
        with self._database.transaction() as session:
            row, _ = self._find(session, who, project, name, ProjectRole.DEPLOYER)
            of_this = ServerKeyRow.deployment_id == row.id
            names = session.scalars(select(ServerKeyRow.name).where(of_this)).all()
            if key_name in names:
                raise ServingError(Code.ALREADY_EXISTS, f"deployment '{name}' has a key '{key_name}' already")
            if len(names) >= SERVER_KEYS_MAX:
                raise unavailable(f"deployment '{name}' has {len(names)} keys", hint="remove some of them")
            digest = hashlib.sha256(secret.encode()).hexdigest()
            session.add(
                ServerKeyRow(
                    deployment_id=row.id,
                    name=key_name,
                    scopes=sorted(set(scopes)),
                    digest=digest,
                    author=who.name,
                    created=now(),
                )
            )
            detail = {"key": key_name, "scopes": sorted(set(scopes))}
            audit.note(session, who, "deployment.key.add", f"{project}/{name}", detail, project_id=row.project_id)
        self._set_keys(row, project)
        return NewServerKey(key_name, sorted(set(scopes)), secret)

    def remove_key(self, who: Principal, project: str, name: str, key_name: str) -> None:
        """Remove an API key of the servers of a deployment; it stops working at once.

        Raises:
            NotPermittedError: If the caller is no deployer.
            ServingError: NOT_FOUND.
        """
        with self._database.transaction() as session:
            row, _ = self._find(session, who, project, name, ProjectRole.DEPLOYER)
            of_key = (ServerKeyRow.deployment_id == row.id) & (ServerKeyRow.name == key_name)
            found = session.execute(delete(ServerKeyRow).where(of_key).returning(ServerKeyRow.id))
            if found.first() is None:
                raise not_found(f"deployment '{name}' has no key '{key_name}'")
            detail = {"key": key_name}
            audit.note(session, who, "deployment.key.remove", f"{project}/{name}", detail, project_id=row.project_id)
        self._set_keys(row, project)

    def _set_keys(self, row: DeploymentRow, project: str) -> None:
        with self._database.reading() as session:
            lines = self._workloads.key_lines(session, row.project_id, row.name)
        target = self._targets.get(row.target)
        if target is not None:
            target.set_keys(f"{project}/{row.name}", lines)

    def _planned(
        self, who: Principal, project: str, spec: DeploymentSpec, role: ProjectRole
    ) -> tuple[ChangePlan, Named, int]:
        """Return the plan of a change, what the specification names, and the id of the project.

        Raises:
            NotPermittedError, ServingError: As `plan`.
        """
        if spec.target not in self._targets:
            raise invalid(f"target: expected one of {', '.join(self._targets)}, got '{spec.target}'")
        with self._database.reading() as session:
            found = projects.find(session, who, project, role)
            named = self._workloads.named(session, found.id, spec)
            row = _row(session, found.id, spec.name)
            latest = None if row is None else _revision(session, row.id, row.latest)
        before = None if latest is None else read_spec(latest.spec)
        changed = changes(before, named.spec)
        problems: Sequence[str] = ()
        if before is not None and before.target != spec.target:
            raise invalid(f"target: '{spec.name}' runs at '{before.target}' and cannot move, got '{spec.target}'")
        if before is None or (changed and not changes_traffic_only(before, named.spec)):
            number = row.latest + 1 if row is not None else 1
            workload = self._workloads.workload(project, number, named)
            problems = self._targets[spec.target].problems(workload)
        number = row.latest if row is not None else 0
        plan = ChangePlan(changed, problems, number, write_spec(named.spec), is_new=row is None)
        return plan, named, found.id

    def _put(
        self, who: Principal, project: str, spec: DeploymentSpec, *, note: str, revision: int | None
    ) -> ChangePlan:
        plan, named, project_id = self._planned(who, project, spec, ProjectRole.DEPLOYER)
        if named.runs_code:
            who.demand_code(project)
        if plan.problems:
            raise invalid("\n".join(plan.problems), hint="a dry run shows what fits")
        with self._database.transaction() as session:
            row = _row(session, project_id, spec.name, for_update=True)
            number = row.latest if row is not None else 0
            if number != (plan.revision if revision is None else revision):
                raise _conflict(spec.name, number, plan.revision if revision is None else revision)
            if row is None:
                row = _new_row(session, project_id, spec)
            _demand_kept(row)
            if not plan.changes:
                self._try_again(session, who, project, row)
                return plan
            _add_revision(session, row, plan, note, who)
            detail = {"revision": row.latest, "changes": list(plan.changes), "note": note}
            action = "deployment.create" if plan.is_new else "deployment.change"
            audit.note(session, who, action, f"{project}/{spec.name}", detail, project_id=project_id)
        self.reconciler.wake()
        return replace(plan, revision=row.latest)

    def _try_again(self, session: Session, who: Principal, project: str, row: DeploymentRow) -> None:
        """Want the newest revision again if it has failed: what it failed for may be different now."""
        latest = _revision(session, row.id, row.latest)
        if latest is None or latest.state != "failed":
            return
        latest.state, latest.reason = "pending", ""
        _want(row, row.latest, "updating" if row.serving else "starting")
        detail = {"revision": row.latest}
        audit.note(session, who, "deployment.retry", f"{project}/{row.name}", detail, project_id=row.project_id)
        self.reconciler.wake()

    def _find(
        self, session: Session, who: Principal, project: str, name: str, role: ProjectRole
    ) -> tuple[DeploymentRow, RevisionRow]:
        """Return a deployment and its newest revision.

        Raises:
            NotPermittedError: If the caller has not the role.
            ServingError: NOT_FOUND.
        """
        found = projects.find(session, who, project, role)
        query = _with_latest().where(DeploymentRow.project_id == found.id, DeploymentRow.name == name)
        row = session.execute(query).first()
        if row is None:
            raise not_found(f"there is no deployment '{name}' in project '{project}'")
        return row[0], row[1]

    def _target(self, who: Principal, project: str, name: str, role: ProjectRole) -> tuple[DeploymentTarget, str]:
        with self._database.reading() as session:
            row, _ = self._find(session, who, project, name, role)
        target = self._targets.get(row.target)
        if target is None:
            raise unavailable(f"deployment '{name}' is for the target '{row.target}', which this platform has not")
        return target, f"{project}/{name}"

    def _ask(
        self,
        who: Principal,
        project: str,
        name: str,
        role: ProjectRole,
        path: str,
        body: Mapping[str, Any] | None = None,
    ) -> Any:
        target, key = self._target(who, project, name, role)
        seen = target.observe(key)
        if not seen.http or seen.phase is RevisionPhase.ABSENT:
            raise unavailable(f"deployment '{name}' is not running", hint="start it, or wait until it is ready")
        return ask(seen.http, path, key=seen.key, body=body)

    def _metrics_pages(self) -> Mapping[int, str]:
        with self._database.reading() as session:
            query = select(DeploymentRow.id, DeploymentRow.observed["metrics"].as_string())
            return {number: page or "" for number, page in session.execute(query)}


def _with_latest() -> Any:
    join = (RevisionRow.deployment_id == DeploymentRow.id) & (RevisionRow.number == DeploymentRow.latest)
    return select(DeploymentRow, RevisionRow).join(RevisionRow, join)


def _row(session: Session, project_id: int, name: str, *, for_update: bool = False) -> DeploymentRow | None:
    query = select(DeploymentRow).where(DeploymentRow.project_id == project_id, DeploymentRow.name == name)
    return session.scalar(query.with_for_update() if for_update else query)


def _revision(session: Session, deployment_id: int, number: int) -> RevisionRow | None:
    query = select(RevisionRow).where(RevisionRow.deployment_id == deployment_id, RevisionRow.number == number)
    return session.scalar(query)


def _new_row(session: Session, project_id: int, spec: DeploymentSpec) -> DeploymentRow:
    count = session.scalar(select(func.count()).select_from(DeploymentRow)) or 0
    if count >= DEPLOYMENTS_MAX:
        raise unavailable(f"there are {count} deployments, expected fewer than {DEPLOYMENTS_MAX}", hint="remove some")
    row = DeploymentRow(
        project_id=project_id,
        name=spec.name,
        target=spec.target,
        latest=0,
        generation=0,
        state="starting",
        created=now(),
    )
    session.add(row)
    session.flush()
    return row


def _add_revision(session: Session, row: DeploymentRow, plan: ChangePlan, note: str, who: Principal) -> None:
    row.latest += 1
    session.add(
        RevisionRow(
            deployment_id=row.id,
            number=row.latest,
            spec=dict(plan.spec),
            note=note,
            state="pending",
            author=who.name,
            created=now(),
        )
    )
    _want(row, row.latest, "updating" if row.serving else "starting")


def _want(row: DeploymentRow, revision: int, state: str) -> None:
    """Let a revision be wanted from now on, 0 for none."""
    row.wanted, row.state, row.reason = revision, state, ""
    row.generation += 1
    row.begun, row.attempts, row.ready, row.failure = 0.0, 0, 0.0, ""


def _demand_kept(row: DeploymentRow) -> None:
    if row.removed:
        raise unavailable(f"deployment '{row.name}' is being removed", hint="wait until it is gone")


def _conflict(name: str, number: int, seen: int) -> ServingError:
    if not seen:
        return ServingError(
            Code.ALREADY_EXISTS, f"there is a deployment '{name}' already", hint="change it, or choose another name"
        )
    return ServingError(
        Code.ALREADY_EXISTS,
        f"deployment '{name}' has revision {number}, expected {seen}: somebody else has changed it",
        hint="look at what they have changed, then make your change to that",
    )


def _with(traffic: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return traffic settings with a change; a member that is null is taken out."""
    return {key: value for key, value in {**traffic, **change}.items() if value is not None}
