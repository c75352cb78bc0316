"""Changes of deployments: each creates a revision, which the reconciler applies. Any thread may call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from charonia.core.errors import Code, ServingError, conflict, invalid, not_found, unavailable
from charonia.platform.database.connection import Database, now
from charonia.platform.database.tables import DeploymentRow, RevisionRow, named
from charonia.platform.deployments.reads import ChangePlan, find, revision_of
from charonia.platform.deployments.spec import (
    DeploymentSpec,
    Strategy,
    changes,
    changes_traffic_only,
    read_change,
    read_spec,
    rolled_out,
)
from charonia.platform.deployments.workloads import Workloads, with_steps
from charonia.platform.people import audit, projects
from charonia.platform.people.access import Principal, ProjectRole
from charonia.platform.targets.api import DeploymentTarget, Workload

DEPLOYMENTS_MAX = 1000
"""Most deployments of a platform."""

ATTEMPTS_MAX = 5
"""Most attempts at a change that others, such as pushes of other models, overtake."""

CLUSTERS = {"kubernetes": "kubernetes", "kserve": "kubernetes", "ray": "ray"}
"""Targets that need a cluster, and the option that configures it."""


class DeploymentChanges:
    """Changes deployments."""

    def __init__(
        self,
        database: Database,
        targets: Mapping[str, DeploymentTarget],
        workloads: Workloads,
        wake: Callable[[], None],
    ) -> None:
        self._database = database
        self._targets = targets
        self._workloads = workloads
        self._wake = wake

    def plan(self, who: Principal, project: str, value: object) -> ChangePlan:
        """Return the changes of a specification, and why it does not fit. Changes nothing."""
        return self._planned(who, project, *read_change(value), ProjectRole.VIEWER)[0]

    def create(self, who: Principal, project: str, value: object, *, note: str = "") -> ChangePlan:
        return self._put(who, project, *read_change(value), note=note, revision=0)

    def change(
        self, who: Principal, project: str, value: object, *, note: str = "", revision: int | None = None
    ) -> ChangePlan:
        """Create or update a deployment. A specification that changes nothing has no effect.

        Args:
            revision: Number of the latest revision that the caller has seen, 0 for none; None to skip this check.
        """
        return self._put(who, project, *read_change(value), note=note, revision=revision)

    def give(self, who: Principal, project: str, name: str, version: tuple[str, int], strategy: str) -> None:
        """Give a deployment a version, by model and number, of a model that it has; else nothing changes."""
        model, number = version
        for attempt in range(ATTEMPTS_MAX):
            with self._database.reading() as session:
                _, latest = find(session, who, project, name, ProjectRole.DEPLOYER)
                spec = dict(latest.spec)
            if model not in [each["name"] for each in spec["models"]]:
                return
            changed = {"versions": [number], "traffic": {}}
            models = [{**each, **(changed if each["name"] == model else {})} for each in spec["models"]]
            value = {**spec, "models": models, "strategy": strategy}
            try:
                self.change(who, project, value, note=f"version {number} of {model}, after a push")
            except ServingError as error:
                if error.code is not Code.ALREADY_EXISTS or attempt == ATTEMPTS_MAX - 1:
                    raise
            else:
                return

    def rollback(
        self, who: Principal, project: str, name: str, *, to: int = 0, revision: int | None = None
    ) -> ChangePlan:
        """Create a new revision with the content of an earlier one.

        Args:
            to: Its number; 0 for the last revision that served before the latest.
            revision: As for `change`.
        """
        with self._database.reading() as session:
            row, _ = find(session, who, project, name, ProjectRole.DEPLOYER)
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
        return self._put(who, project, spec, Strategy(), note=f"back to revision {chosen.number}", revision=revision)

    def stop(self, who: Principal, project: str, name: str) -> None:
        """Stop the servers of a deployment; its revisions and its address stay."""
        with self._database.transaction() as session:
            row, _ = find(session, who, project, name, ProjectRole.DEPLOYER)
            if row.wanted:
                _set_desired(row, 0, "stopping")
                audit.record(session, who, "deployment.stop", f"{project}/{name}", project_id=row.project_id)
        self._wake()

    def start(self, who: Principal, project: str, name: str) -> None:
        """Start a deployment that was stopped or has failed, with the latest revision that is not known to fail."""
        with self._database.transaction() as session:
            row, latest = find(session, who, project, name, ProjectRole.DEPLOYER)
            _demand_kept(row)
            wanted = row.serving if latest.state == "failed" and row.serving else row.latest
            if row.wanted != wanted or row.failure:
                if latest.state == "failed" and wanted == row.latest:
                    latest.state, latest.reason = "pending", ""
                _set_desired(row, wanted, "starting")
                detail = {"revision": wanted}
                audit.record(session, who, "deployment.start", f"{project}/{name}", detail, project_id=row.project_id)
        self._wake()

    def remove(self, who: Principal, project: str, name: str) -> None:
        """Stop a deployment and delete it with its revisions; it remains visible until its servers have exited."""
        with self._database.transaction() as session:
            row, _ = find(session, who, project, name, ProjectRole.DEPLOYER)
            if not row.removed:
                row.removed = True
                _set_desired(row, 0, "stopping")
                audit.record(session, who, "deployment.remove", f"{project}/{name}", project_id=row.project_id)
        self._wake()

    def _planned(
        self, who: Principal, project: str, spec: DeploymentSpec, strategy: Strategy, role: ProjectRole
    ) -> tuple[ChangePlan, Workload, Mapping[str, int]]:
        """Return the effect of a change, its workload, and the versions that begin as canaries, by model."""
        who.demand(role, project)
        if spec.target not in self._targets:
            raise invalid(
                f"target: expected one of {', '.join(self._targets)}, got '{spec.target}'",
                hint=f"`charonia platform --{CLUSTERS[spec.target]}` gives it a cluster"
                if spec.target in CLUSTERS
                else "",
            )
        with self._database.reading() as session:
            found = projects.find(session, who, project, role)
            pipelines = with_steps(session, found.id, spec)
            row = named(session, DeploymentRow, found.id, spec.name)
            key, number = f"{project}/{spec.name}", row.latest + 1 if row is not None else 1
            workload = self._workloads.workload(session, found.id, key, number, pipelines.spec)
            latest = None if row is None else revision_of(session, row.id, row.latest)
            before = None if latest is None else read_spec(latest.spec)
            canaries: Mapping[str, int] = {}
            if before is not None and row is not None and strategy.kind:
                spec, canaries = rolled_out(before, workload.spec, strategy, row.canaries)
                workload = self._workloads.workload(session, found.id, key, number, spec)
        changed = changes(before, workload.spec)
        problems: Sequence[str] = ()
        if before is not None and before.target != spec.target:
            raise invalid(f"target: '{spec.name}' runs at '{before.target}' and cannot move, got '{spec.target}'")
        if before is None or (changed and not changes_traffic_only(before, workload.spec)):
            problems = self._targets[spec.target].problems(workload)
        number = row.latest if row is not None else 0
        begun = [f"a canary plan moves requests to version {canaries[model]} of '{model}'" for model in canaries]
        ended = [f"the canary plan of '{model}' ends" for model in (row.canaries if row and changed else ())]
        plan = ChangePlan(
            [*changed, *ended, *begun],
            problems,
            number,
            workload.spec.model_dump(mode="json"),
            is_new=row is None,
            steps=pipelines.steps,
            missing=pipelines.missing,
        )
        return plan, workload, canaries

    def _put(
        self,
        who: Principal,
        project: str,
        spec: DeploymentSpec,
        strategy: Strategy,
        *,
        note: str,
        revision: int | None,
    ) -> ChangePlan:
        plan, workload, canaries = self._planned(who, project, spec, strategy, ProjectRole.DEPLOYER)
        project_id = workload.project_id
        if workload.runs_code:
            who.demand_code(project)
        if plan.problems:
            raise invalid("\n".join(plan.problems), hint="a dry run shows what fits")
        with self._database.transaction() as session:
            row = named(session, DeploymentRow, project_id, spec.name, for_update=True)
            number = row.latest if row is not None else 0
            if number != (plan.revision if revision is None else revision):
                raise _conflict(spec.name, number, plan.revision if revision is None else revision)
            if row is None:
                row = _new_row(session, project_id, spec)
            _demand_kept(row)
            if not plan.changes:
                self._try_again(session, who, project, row)
                return plan
            if len(plan.changes) > len(canaries):
                _add_revision(session, row, plan, note, who)
            begun = {
                model: {
                    "who": who.name,
                    "by": who.id,
                    "revision": row.latest,
                    "plan": {**strategy.plan, "version": version},
                }
                for model, version in canaries.items()
            }
            row.canaries = {**row.canaries, **begun}
            detail = {"revision": row.latest, "changes": list(plan.changes), "note": note}
            action = "deployment.create" if plan.is_new else "deployment.change"
            audit.record(session, who, action, f"{project}/{spec.name}", detail, project_id=project_id)
        self._wake()
        return replace(plan, revision=row.latest)

    def _try_again(self, session: Session, who: Principal, project: str, row: DeploymentRow) -> None:
        """Make the latest revision wanted again if it has failed: the cause may be gone."""
        latest = revision_of(session, row.id, row.latest)
        if latest is None or latest.state != "failed":
            return
        latest.state, latest.reason = "pending", ""
        _set_desired(row, row.latest, "updating" if row.serving else "starting")
        detail = {"revision": row.latest}
        audit.record(session, who, "deployment.retry", f"{project}/{row.name}", detail, project_id=row.project_id)
        self._wake()


def _new_row(session: Session, project_id: int, spec: DeploymentSpec) -> DeploymentRow:
    count = session.scalar(select(func.count()).select_from(DeploymentRow)) or 0
    if count >= DEPLOYMENTS_MAX:
        raise unavailable(f"expected fewer than {DEPLOYMENTS_MAX} deployments, got {count}", hint="delete some")
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
    _set_desired(row, row.latest, "updating" if row.serving else "starting")


def _set_desired(row: DeploymentRow, revision: int, state: str) -> None:
    """Set the wanted revision, 0 for none."""
    row.wanted, row.state, row.reason = revision, state, ""
    row.generation += 1
    row.begun, row.attempts, row.ready, row.failure = 0.0, 0, 0.0, ""


def _demand_kept(row: DeploymentRow) -> None:
    if row.removed:
        raise conflict(f"deployment '{row.name}' is being removed", hint="wait until it is gone")


def _conflict(name: str, number: int, seen: int) -> ServingError:
    if not seen:
        return conflict(f"deployment '{name}' already exists", hint="change it, or choose another name")
    return conflict(
        f"deployment '{name}' has revision {number}, expected {seen}: it was changed in the meantime",
        hint="review the new revision, then apply your change to it",
    )
