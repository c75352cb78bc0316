"""The servers of deployments: their logs, explanations and traffic, merged over all of them; their API keys.

Any thread may call.
"""

import hashlib
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints
from sqlalchemy import delete, select

from charonia.core.errors import ServingError, conflict, not_found, unavailable, unsupported
from charonia.platform.database.connection import Database, now
from charonia.platform.database.tables import DeploymentRow, ServerKeyRow, copied
from charonia.platform.deployments.changes import DeploymentChanges
from charonia.platform.deployments.figures import FiguresPoint
from charonia.platform.deployments.reads import ChangePlan, DeploymentReads, NewServerKey, ServerKeyView, find
from charonia.platform.deployments.workloads import Workloads
from charonia.platform.people import audit
from charonia.platform.people.access import Principal, ProjectRole
from charonia.platform.targets.api import DeploymentTarget, Observed, RevisionPhase
from charonia.platform.targets.server_calls import ask, model_path
from charonia.platform.values import RequestBody, Text, Whole, expected
from charonia.wire.traffic import SETTINGS, read_change

LOG_LINES_MAX = 5000
"""Most lines of a log that are read, and searched."""

LOG_LEVELS = {"error": "E", "warning": "EW", "info": "EWI"}
"""The initial letters of entries of each level, and of more severe ones."""

_ENTRY = re.compile(r"(?:([EWIV])\d{4} |==> ).*")

UNDER_WAY = ("running", "paused")
"""States of a canary plan that has not ended."""


class DeploymentServers:
    """Calls the servers of deployments."""

    def __init__(
        self,
        database: Database,
        targets: Mapping[str, DeploymentTarget],
        reads: DeploymentReads,
        changes: DeploymentChanges,
    ) -> None:
        self._database = database
        self._targets = targets
        self._reads = reads
        self._changes = changes

    def log(
        self, who: Principal, project: str, name: str, *, lines: int = 200, search: str = "", level: str = ""
    ) -> str:
        """Return the last lines of the log of a deployment.

        Args:
            search: Only entries with this text, such as the id of a request; the case does not count.
            level: Only entries of this level of `LOG_LEVELS` or a more severe one, "" for all.
        """
        target, key = self._target(who, project, name, ProjectRole.VIEWER)
        if not search and not level:
            return target.log(key, min(lines, LOG_LINES_MAX))
        found = matching_entries(target.log(key, LOG_LINES_MAX), search, level)
        return "".join("".join(found).splitlines(keepends=True)[-lines:])

    def observe(self, who: Principal, project: str, name: str) -> Observed:
        """Return the current observation of a deployment's target, with CPU time and memory."""
        target, key = self._target(who, project, name, ProjectRole.VIEWER)
        return target.observe(key)

    def explain(self, who: Principal, project: str, name: str, model: str, version: int = 0) -> Any:
        """Return the scheduler's activity and bottleneck for a model, as the server reports them.

        For several servers, it is the report of the first one, and `servers` has the activity of each.
        """
        what = f"versions/{version}/explain" if version else "explain"
        answers = self._ask(who, project, name, ProjectRole.VIEWER, model_path(model, what))
        first = next(iter(answers.values()))
        return {**first, "servers": answers} if len(answers) > 1 else first

    def traffic(self, who: Principal, project: str, name: str, model: str) -> Any:
        """Return the current traffic split of a model over all servers, with the canary plan."""
        answers = self._ask(who, project, name, ProjectRole.VIEWER, model_path(model, "traffic"))
        return merged_traffic(list(answers.values()))

    def set_traffic(
        self, who: Principal, project: str, name: str, model: str, change: Mapping[str, Any], *, note: str = ""
    ) -> ChangePlan | Any:
        """Change the traffic split of a model.

        Weights, stickiness and shadow versions create a revision. A canary plan, and actions on one, go to the server.

        Args:
            change: In the form of the server's own API.

        Returns:
            The plan of the change, or the answer of the server.
        """
        who.demand(ProjectRole.DEPLOYER, project)
        read_change(dict(change))
        view = self._reads.get(who, project, name)
        spec = self._reads.revision(who, project, name, view.wanted or view.revision).spec
        if model not in [deployed["name"] for deployed in spec["models"]]:
            raise not_found(f"deployment '{name}' has no model '{model}'")
        if "weights" in change:
            self._demand_no_plan(who, project, name, model)
        if not change.keys() <= set(SETTINGS):
            answers = self._ask(who, project, name, ProjectRole.DEPLOYER, model_path(model, "traffic"), change)
            with self._database.transaction() as session:
                row, _ = find(session, who, project, name, ProjectRole.DEPLOYER)
                if "canary" in change:
                    row.canaries = {**row.canaries, model: who.name}
                detail = {"model": model, "change": dict(change)}
                audit.record(session, who, "deployment.traffic", f"{project}/{name}", detail, project_id=row.project_id)
            return merged_traffic(list(answers.values()))
        models = [
            {**deployed, "traffic": _with(deployed.get("traffic", {}), change)}
            if deployed["name"] == model
            else deployed
            for deployed in spec["models"]
        ]
        value = {**spec, "models": models}
        return self._changes.change(who, project, value, note=note or f"traffic of '{model}'", revision=view.revision)

    def _demand_no_plan(self, who: Principal, project: str, name: str, model: str) -> None:
        """Refuse weights while a canary plan sets them: their revision would end it."""
        try:
            canary = self.traffic(who, project, name, model).get("canary")
        except ServingError:
            return  # no server has one
        if canary is not None and canary["state"] in UNDER_WAY:
            raise conflict(
                f"weights: the canary plan of version {canary['plan']['version']} of '{model}' sets them",
                hint="promote or abort it first",
            )

    def _target(self, who: Principal, project: str, name: str, role: ProjectRole) -> tuple[DeploymentTarget, str]:
        with self._database.reading() as session:
            row, _ = find(session, who, project, name, role)
        target = self._targets.get(row.target)
        if target is None:
            raise unavailable(f"deployment '{name}' is for the target '{row.target}', which this platform lacks")
        return target, f"{project}/{name}"

    def _ask(
        self,
        who: Principal,
        project: str,
        name: str,
        role: ProjectRole,
        path: str,
        change: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Call all ready servers of a deployment, to read or to change something in all of them.

        Returns:
            Their answers by the name of the server.
        """
        target, key = self._target(who, project, name, role)
        seen = target.observe(key)
        if not seen.http or seen.phase is RevisionPhase.ABSENT:
            raise unavailable(f"deployment '{name}' is not running", hint="start it, or wait until it is ready")
        servers = {one.name: one.http for one in seen.replicas if one.http and one.is_ready} or {"": seen.http}
        if change and "" in servers and (seen.wanted_replicas > 1 or seen.scaled_by):
            raise unsupported(
                f"deployment '{name}' may have several servers, which cannot be reached one by one",
                hint="create a revision with other weights, or reduce it to one server",
            )
        answers: dict[str, Any] = {}
        try:
            for server, address in servers.items():
                answers[server] = ask(address, path, key=seen.key, body=change)
        except ServingError:
            if change and "canary" in change:  # a plan runs in all of them, or in none
                for server in answers:
                    ask(servers[server], path, key=seen.key, body={"action": "abort"})
            raise
        return answers


def matching_entries(text: str, search: str, level: str) -> list[str]:
    """Return the entries of a log with a text and a level, each with its continuation lines; arguments as for `log`."""
    entries: list[tuple[str, list[str]]] = []
    for line in text.splitlines(keepends=True):
        begins = _ENTRY.match(line)
        if begins or not entries:
            entries.append(((begins and begins[1]) or "", [line]))
        else:
            entries[-1][1].append(line)
    letters = LOG_LEVELS.get(level, "")
    wholes = ["".join(lines) for letter, lines in entries if not letters or (letter and letter in letters)]
    return [whole for whole in wholes if search.casefold() in whole.casefold()]


def _with(traffic: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return traffic settings with a change; null removes a member."""
    return {key: value for key, value in {**traffic, **change}.items() if value is not None}


_COUNTS = ("requests", "errors", "in_flight")
_SHADOW_COUNTS = ("sent", "compared", "different", "failed", "dropped")
_STATES = ("rolled_back", "aborted", "running", "paused", "finished")
"""States of a canary plan by precedence: one server that rolls back decides for all."""


def merged_traffic(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the traffic split of a model, merged from the answers of all servers.

    Counts are summed; a percentile is the slowest server's; settings are the first server's.
    """
    first = dict(answers[0])
    if len(answers) == 1:
        return first
    of_all = [{each["version"]: each for each in answer["versions"]} for answer in answers]
    first["versions"] = [
        _version([versions[number] for versions in of_all if number in versions])
        for number in dict.fromkeys(number for versions in of_all for number in versions)
    ]
    plans = [answer["canary"] for answer in answers if answer.get("canary")]
    first["canary"] = min(plans, key=lambda plan: _STATES.index(plan["state"]), default=None)
    deciding = next((answer for answer in answers if answer.get("canary") is first["canary"]), answers[0])
    entries = {(entry["time"], entry["text"]): entry for answer in answers for entry in answer["history"]}
    return {**first, "weights": deciding["weights"], "history": [entries[key] for key in sorted(entries)]}


def _version(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    version: dict[str, Any] = {**found[0], "is_ready": all(each["is_ready"] for each in found)}
    version.update({name: sum(each[name] for each in found) for name in _COUNTS})
    version["latency_us"] = _slowest([each["latency_us"] for each in found])
    shadows = [each["shadow"] for each in found if each["shadow"]]
    if shadows:
        counts = {name: sum(each[name] for each in shadows) for name in _SHADOW_COUNTS}
        rate = counts["different"] / counts["compared"] if counts["compared"] else 0.0
        slowest = _slowest([each["latency_us"] for each in shadows])
        version["shadow"] = {**shadows[0], **counts, "difference_rate": rate, "latency_us": slowest}
    return version


def _slowest(latencies: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {
        key: max(each.get(key, 0.0) for each in latencies)
        for key in dict.fromkeys(k for each in latencies for k in each)
    }


SERVER_KEYS_MAX = 1000
"""Most API keys of a deployment."""


_KEY_BYTES = 32

PER_MINUTE_MAX = 1_000_000_000
"""Largest limit of a key a minute."""

PerMinute = Annotated[int, Whole(0, PER_MINUTE_MAX)]


class ServerKeyRequest(RequestBody):
    """An API key to create."""

    name: Annotated[
        Text, StringConstraints(pattern=r"^[A-Za-z0-9_.@-]{1,128}$"), expected("1 to 128 of letters, digits and _.@-")
    ]
    scopes: Annotated[
        tuple[Literal["infer", "read", "admin"], ...],
        Field(strict=False, min_length=1),
        AfterValidator(lambda scopes: tuple(sorted(set(scopes)))),
    ] = ("infer", "read")
    requests_per_minute: PerMinute = Field(default=0, description="Limit of its requests, 0 for none.")
    tokens_per_minute: PerMinute = Field(default=0, description="Limit of its tokens of language models, 0 for none.")


class ServerKeys:
    """The API keys of servers.

    Args:
        latest: Returns the latest figures of a deployment.
    """

    def __init__(
        self,
        database: Database,
        targets: Mapping[str, DeploymentTarget],
        workloads: Workloads,
        latest: Callable[[int], FiguresPoint | None],
    ) -> None:
        self._database = database
        self._latest = latest
        self._targets = targets
        self._workloads = workloads

    def list(self, who: Principal, project: str, name: str) -> Sequence[ServerKeyView]:
        with self._database.reading() as session:
            row, _ = find(session, who, project, name, ProjectRole.DEPLOYER)
            query = select(ServerKeyRow).where(ServerKeyRow.deployment_id == row.id).order_by(ServerKeyRow.name)
            point = self._latest(row.id)
            return [
                copied(ServerKeyView, key, usage=point.keys.get(key.name) if point is not None else None)
                for key in session.scalars(query.limit(SERVER_KEYS_MAX))
            ]

    def add(self, who: Principal, project: str, name: str, wanted: ServerKeyRequest) -> NewServerKey:
        """Create an API key of the servers of a deployment; it works immediately."""
        secret = secrets.token_urlsafe(_KEY_BYTES)
        with self._database.transaction() as session:
            row, _ = find(session, who, project, name, ProjectRole.DEPLOYER)
            of_this = ServerKeyRow.deployment_id == row.id
            names = session.scalars(select(ServerKeyRow.name).where(of_this)).all()
            if wanted.name in names:
                raise conflict(f"deployment '{name}' already has a key '{wanted.name}'")
            if len(names) >= SERVER_KEYS_MAX:
                raise unavailable(f"deployment '{name}' has {len(names)} keys", hint="delete some of them")
            digest = hashlib.sha256(secret.encode()).hexdigest()
            values = wanted.model_dump()
            session.add(ServerKeyRow(deployment_id=row.id, digest=digest, author=who.name, created=now(), **values))
            detail = {"key": values.pop("name"), **values}
            audit.record(session, who, "deployment.key.add", f"{project}/{name}", detail, project_id=row.project_id)
        self._set_keys(row, project)
        return NewServerKey(wanted.name, wanted.scopes, secret)

    def remove(self, who: Principal, project: str, name: str, key_name: str) -> None:
        """Delete an API key of the servers of a deployment; it stops working immediately."""
        with self._database.transaction() as session:
            row, _ = find(session, who, project, name, ProjectRole.DEPLOYER)
            of_key = (ServerKeyRow.deployment_id == row.id) & (ServerKeyRow.name == key_name)
            found = session.execute(delete(ServerKeyRow).where(of_key).returning(ServerKeyRow.id))
            if found.first() is None:
                raise not_found(f"deployment '{name}' has no key '{key_name}'")
            detail = {"key": key_name}
            audit.record(session, who, "deployment.key.remove", f"{project}/{name}", detail, project_id=row.project_id)
        self._set_keys(row, project)

    def _set_keys(self, row: DeploymentRow, project: str) -> None:
        with self._database.reading() as session:
            lines = self._workloads.key_lines(session, row.project_id, row.name)
        target = self._targets.get(row.target)
        if target is not None:
            target.set_keys(f"{project}/{row.name}", lines)
