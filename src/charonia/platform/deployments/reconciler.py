"""Reconciles deployments: observes each one, decides (`reconcile.py`), acts, and records the result."""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sqlalchemy import delete, select, update

from charonia.core.errors import Code, ServingError, internal, invalid
from charonia.platform.database.connection import Database, now
from charonia.platform.database.lease import PlatformLease, RepeatedStep
from charonia.platform.database.tables import DeploymentRow, ProjectRow, RevisionRow, copied
from charonia.platform.deployments.reconcile import DesiredState, NextStep, Step, decide, refused
from charonia.platform.deployments.scaler import Scaler
from charonia.platform.deployments.spec import Replicas, read_spec
from charonia.platform.deployments.workloads import Workloads
from charonia.platform.targets.api import DeploymentTarget, Observed, RevisionPhase

_log = logging.getLogger(__name__)

STEADY_S = 10.0
"""Interval between observations of a steady deployment."""

MOVING_S = 0.3
"""Interval between observations of a deployment in transition."""

SHARED_S = 2.0
"""Interval between searches for changes that were made through another platform over the database."""

ORPHANS_S = 60.0
"""Interval between searches for orphans, which run without a record."""

AT_ONCE = 8
"""Deployments that are observed at the same time: a target may take long to answer."""

_STEADY = ("ready", "stopped")


@dataclass(frozen=True, slots=True)
class _StoredDeployment:
    """The stored state of a deployment."""

    id: int
    project_id: int
    project: str
    name: str
    target: str
    generation: int
    state: str
    reason: str
    observed: Mapping[str, Any]
    wanted: DesiredState
    bounds: Replicas


@dataclass(slots=True)
class _Schedule:
    """When a deployment is observed next, and its wanted state at the last observation."""

    next_s: float = 0.0
    generation: int = field(default=-1)


class Reconciler:
    """Reconciles the deployments of a platform, in a thread of the one that holds the lease."""

    def __init__(
        self,
        database: Database,
        targets: Mapping[str, DeploymentTarget],
        workloads: Workloads,
        scaler: Scaler,
        lease: PlatformLease,
    ) -> None:
        self._database = database
        self._targets = targets
        self._workloads = workloads
        self._scaler = scaler
        self._schedules: dict[int, _Schedule] = {}
        self._orphans_s = 0.0
        self._pause_s_max = SHARED_S if lease.is_shared else STEADY_S
        self._loop = RepeatedStep("reconciler", self._next, 1.0, lease.is_held)
        self.wake = self._loop.wake
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="reconciler")

    def start(self) -> None:
        self._loop.start()
        self.wake()

    def close(self) -> None:
        """Stop reconciling; deployments continue to run."""
        self._loop.close()
        self._pool.shutdown(cancel_futures=True)

    def step(self, now_s: float) -> float:
        """Process the deployments that are due, and return the time of the next step."""
        rows = self._read()
        for gone in self._schedules.keys() - {row.id for row in rows}:
            del self._schedules[gone]
        due = [row for row in rows if self._is_due(row, now_s)]
        for row, pause_s in zip(due, self._pool.map(lambda row: self._reconcile(row, now_s), due), strict=True):
            self._schedules[row.id] = _Schedule(now_s + pause_s, row.generation)
        if now_s >= self._orphans_s:
            self._orphans_s = now_s + ORPHANS_S
            self._remove_orphans({(row.target, f"{row.project}/{row.name}") for row in rows})
        next_s = min((schedule.next_s for schedule in self._schedules.values()), default=now_s + STEADY_S)
        return max(next_s, now_s + MOVING_S)  # deployments that are due soon are processed together

    def _next(self) -> float:
        return min(max(0.01, self.step(now()) - now()), self._pause_s_max)

    def _is_due(self, row: _StoredDeployment, now_s: float) -> bool:
        schedule = self._schedules.get(row.id)
        return schedule is None or schedule.next_s <= now_s or schedule.generation != row.generation

    def _reconcile(self, row: _StoredDeployment, now_s: float) -> float:
        try:
            observation = self._target(row).observe(_key(row))
            decision = self._execute(row, observation, decide(row.wanted, observation, now_s), now_s)
            scaling = self._scale(row, observation, decision, now_s)
        except ServingError as error:
            self._record(row, replace(_as_is(row), reason=str(error)))
            return 1.0
        except Exception as error:  # of a target: other deployments are not affected
            _log.exception("deployment %s: its target has failed", _key(row))
            self._record(row, replace(_as_is(row), reason=f"the target has failed: {error}"))
            return STEADY_S
        if decision.step is Step.REMOVE:
            return MOVING_S
        self._record(row, decision, _plain(observation, scaling))
        is_steady = decision.state in _STEADY and not any(replica.doing for replica in observation.replicas)
        return STEADY_S if decision.step is Step.NONE and is_steady else MOVING_S

    def _scale(self, row: _StoredDeployment, observation: Observed, decision: NextStep, now_s: float) -> str:
        """Scale a running deployment; return why it has its number of servers."""
        if decision.step is not Step.NONE or not decision.wanted.revision or observation.phase is RevisionPhase.ABSENT:
            return ""
        return self._scaler.scale(row.id, _key(row), self._target(row), observation, row.bounds, now_s)

    def _execute(self, row: _StoredDeployment, observation: Observed, decision: NextStep, now_s: float) -> NextStep:
        target, key = self._target(row), _key(row)
        match decision.step:
            case Step.APPLY:
                try:
                    self._apply(target, row, decision.wanted.revision)
                except ServingError as error:
                    if error.code is not Code.UNAVAILABLE:
                        return refused(decision.wanted, observation, str(error), now_s)
                    raise
            case Step.ABANDON:
                target.abandon(key)
            case Step.STOP:
                target.stop(key)
            case Step.REMOVE:
                target.remove(key)
                self._delete(row)
        return decision

    def _apply(self, target: DeploymentTarget, row: _StoredDeployment, number: int) -> None:
        with self._database.reading() as session:
            revision = session.scalar(
                select(RevisionRow).where(RevisionRow.deployment_id == row.id, RevisionRow.number == number)
            )
            if revision is None:
                raise internal(f"deployment '{row.name}' has no revision {number}")
            spec = read_spec(revision.spec)
            workload = self._workloads.workload(session, row.project_id, _key(row), number, spec)
        self._workloads.place(workload)
        target.apply(workload)

    def _target(self, row: _StoredDeployment) -> DeploymentTarget:
        target = self._targets.get(row.target)
        if target is None:
            raise invalid(f"target: expected one of {', '.join(self._targets)}, got '{row.target}'")
        return target

    def _read(self) -> Sequence[_StoredDeployment]:
        query = (
            select(DeploymentRow, ProjectRow.name, RevisionRow.spec)
            .join(ProjectRow, ProjectRow.id == DeploymentRow.project_id)
            .outerjoin(
                RevisionRow,
                (RevisionRow.deployment_id == DeploymentRow.id) & (RevisionRow.number == DeploymentRow.wanted),
            )
        )
        with self._database.reading() as session:
            return [_stored(row, project, spec or {}) for row, project, spec in session.execute(query)]

    def _record(self, row: _StoredDeployment, decision: NextStep, observation: Mapping[str, Any] | None = None) -> None:
        """Record the current state, unless it is unchanged, or the wanted state has changed in between."""
        observed = row.observed if observation is None else observation
        before = (row.state, row.reason, row.wanted, row.observed)
        if before == (decision.state, decision.reason, decision.wanted, observed) and not decision.outcomes:
            return
        wanted = decision.wanted
        values = {
            "state": decision.state,
            "reason": decision.reason,
            "observed": observed,
            "wanted": wanted.revision,
            "serving": wanted.serving,
            "begun": wanted.begun_s,
            "attempts": wanted.attempts,
            "ready": wanted.ready_s,
            "failure": wanted.failure,
        }
        with self._database.transaction() as session:
            of_this = (DeploymentRow.id == row.id) & (DeploymentRow.generation == row.generation)
            found = session.execute(update(DeploymentRow).where(of_this).values(**values).returning(DeploymentRow.id))
            if found.first() is None:
                return
            for number, reason in decision.outcomes.items():
                own = RevisionRow.deployment_id == row.id
                outdated = own & (RevisionRow.number < number) & (RevisionRow.state == "pending")
                never = {"state": "failed", "reason": f"revision {number} followed before it was ready"}
                session.execute(update(RevisionRow).where(outdated).values(never))
                if not reason:
                    others = own & (RevisionRow.number != number) & (RevisionRow.state == "serving")
                    session.execute(update(RevisionRow).where(others).values(state="replaced"))
                session.execute(
                    update(RevisionRow)
                    .where(own, RevisionRow.number == number)
                    .values(state="failed" if reason else "serving", reason=reason)
                )

    def _delete(self, row: _StoredDeployment) -> None:
        with self._database.transaction() as session:
            session.execute(delete(DeploymentRow).where(DeploymentRow.id == row.id, DeploymentRow.removed))

    def _remove_orphans(self, known: set[tuple[str, str]]) -> None:
        """Stop deployments without a record: their removal was interrupted, or the database was lost."""
        for name, target in self._targets.items():
            try:
                for key in target.deployments():
                    if (name, key) not in known:
                        _log.warning("'%s' runs at '%s' without a record: it is removed", key, name)
                        is_gone = target.observe(key).phase is RevisionPhase.ABSENT
                        (target.remove if is_gone else target.stop)(key)
                        self._orphans_s = 0.0
            except ServingError as error:
                _log.error("target '%s': %s", name, error)


def _key(row: _StoredDeployment) -> str:
    return f"{row.project}/{row.name}"


def _as_is(row: _StoredDeployment) -> NextStep:
    return NextStep(Step.NONE, row.state, row.reason, row.wanted)


def _plain(observation: Observed, scaling: str) -> dict[str, Any]:
    """Return the part of an observation that is stored: without constantly changing values."""
    return {
        "http": observation.http,
        "grpc": observation.grpc,
        "metrics": observation.metrics,
        "doing": observation.doing,
        "replicas": [asdict(replica) for replica in observation.replicas],
        "scaling": scaling,
    }


def _stored(row: DeploymentRow, project: str, spec: Mapping[str, Any]) -> _StoredDeployment:
    return copied(
        _StoredDeployment,
        row,
        project=project,
        wanted=DesiredState(
            revision=row.wanted,
            serving=row.serving,
            is_removed=row.removed,
            ready_within_s=spec.get("ready_within_s", 0.0),
            begun_s=row.begun,
            attempts=row.attempts,
            ready_s=row.ready,
            failure=row.failure,
        ),
        bounds=Replicas(**spec.get("replicas", {})),
    )
