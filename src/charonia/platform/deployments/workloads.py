"""Resolves a specification to a target's workload: models with their files, the environment, API keys."""

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from charonia.config import json_form, pbtxt
from charonia.config.backends import ENSEMBLE, PYTHON
from charonia.core.errors import ServingError, invalid
from charonia.platform.artifacts.blobs import disk_faults
from charonia.platform.artifacts.manifest import Manifest, from_json
from charonia.platform.artifacts.store import ArtifactStore
from charonia.platform.database.tables import (
    DeploymentRow,
    EnvironmentRow,
    ModelRow,
    ServerKeyRow,
    VersionRow,
    named,
)
from charonia.platform.deployments.spec import MODELS_MAX, DeployedModel, DeploymentSpec
from charonia.platform.environments.builder import folder_of, python_of
from charonia.platform.environments.requirements import read_requirements
from charonia.platform.models.code import may_make_code
from charonia.platform.people.secrets import ProjectSecrets
from charonia.platform.targets.api import PlacedModel, Workload
from charonia.platform.targets.server_calls import TRAFFIC
from charonia.platform.values import OLDER_PYTHONS

CONFIG = "config.pbtxt"

_LISTED = 20
"""Most versions that a message names."""


@dataclass(frozen=True, slots=True)
class Pipelines:
    """A specification with the models that its models call.

    Attributes:
        steps: Names of the models that were added.
        missing: Calls of models that the project does not have, a sentence each.
    """

    spec: DeploymentSpec
    steps: Sequence[str] = ()
    missing: Sequence[str] = ()


class Workloads:
    """Creates workloads."""

    def __init__(self, data: Path, store: ArtifactStore) -> None:
        self.secrets = ProjectSecrets(data)
        self._data = data
        self._store = store

    def workload(
        self, session: Session, project_id: int, deployment: str, revision: int, spec: DeploymentSpec
    ) -> Workload:
        """Return a workload; its files need not be on this machine. Reads configurations from the store.

        Args:
            deployment: "PROJECT/NAME".
        """
        problems: list[str] = []
        rows = _models(session, project_id, [model.name for model in spec.models])
        models = [_versions(model, rows.get(model.name), problems) for model in spec.models]
        environment = _environment(session, project_id, spec.environment, problems)
        is_older = environment is not None and environment.python in OLDER_PYTHONS
        if environment is not None and is_older:
            has_python = any(version.backend == PYTHON for _, versions in models for version in versions.values())
            if spec.target != "local" or not has_python:
                problems.append(
                    f"environment: '{environment.name}' has Python {environment.python}, which only runs Python models "
                    "at the target local"
                )
        variables = {**spec.variables}
        for variable, name in spec.secrets.items():
            try:
                variables[variable] = self.secrets.value(session, project_id, name)
            except ServingError as error:
                problems.append(f"secrets.{variable}: {error.message}")
        if problems:
            raise invalid("\n".join(problems))
        spec = spec.model_copy(update={"models": tuple(model for model, _ in models)})
        runs_code = bool(variables) or any(  # a variable can make a library load a file
            may_make_code(model.config) or any(version.runs_code for version in versions.values())
            for model, versions in models
        )
        keys = self.key_lines(session, project_id, spec.name) if spec.keys else ()
        folder = folder_of(self._data / "environments", project_id, environment.digest) if environment else None
        python = python_of(folder) if folder and not is_older else None
        packages = read_requirements(environment.requirements).lines if environment else ()
        workers = folder if is_older else None
        return Workload(
            deployment=deployment,
            revision=revision,
            spec=spec,
            models=tuple(self._placed(model, versions, workers) for model, versions in models),
            python=python,
            keys=keys,
            packages=packages,
            project_id=project_id,
            variables=variables,
            runs_code=runs_code,
        )

    def key_lines(self, session: Session, project_id: int, name: str) -> tuple[str, ...]:
        """Return the lines of the file of API keys of a deployment's servers."""
        query = (
            select(ServerKeyRow)
            .join(DeploymentRow, DeploymentRow.id == ServerKeyRow.deployment_id)
            .where(DeploymentRow.project_id == project_id, DeploymentRow.name == name)
            .order_by(ServerKeyRow.id)
        )
        return tuple(map(_key_line, session.scalars(query)))

    def place(self, workload: Workload) -> None:
        """Put the files of all versions into folders of this machine, unless they exist already."""
        for model in workload.models:
            for number, folder in model.versions.items():
                self._place(f"files of version {number}", folder, model.files[number])

    def sweep(self, session: Session) -> None:
        """Remove the folders of deleted versions."""
        folder = self._data / "versions"
        known = set(session.scalars(select(VersionRow.digest)))
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name not in known:
                shutil.rmtree(path, ignore_errors=True)

    def _placed(self, model: DeployedModel, versions: Mapping[int, VersionRow], workers: Path | None) -> PlacedModel:
        config = from_json(versions[max(versions)].files).get(CONFIG)
        text = "" if config is None else self._store.fetch(config).read_text(encoding="utf-8")
        try:
            is_python = versions[max(versions)].backend == PYTHON
            changed = configured(text, model, sorted(versions), workers if is_python else None)
        except ServingError as error:
            raise invalid(f"model '{model.name}': {error.message}", hint=error.hint) from error
        return PlacedModel(
            name=model.name,
            versions={number: self._data / "versions" / version.digest for number, version in versions.items()},
            config=changed,
            size=sum(version.size for version in versions.values()),
            digests={number: version.digest for number, version in versions.items()},
            files={number: from_json(version.files) for number, version in versions.items()},
        )

    def _place(self, what: str, folder: Path, files: Manifest) -> None:
        if folder.exists():
            return
        with disk_faults(what, folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".new-"))
        try:
            self._store.materialise(files, made)
            with disk_faults(what, folder):
                made.rename(folder)
        except ServingError:
            if not folder.exists():  # another thread was faster
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)


def _environment(session: Session, project_id: int, name: str, problems: list[str]) -> EnvironmentRow | None:
    if not name:
        return None
    row = named(session, EnvironmentRow, project_id, name)
    if row is None:
        problems.append(f"environment: '{name}' does not exist")
    elif row.state != "ready":
        problems.append(f"environment: '{name}' is {row.state}, expected one that is ready")
    return row


def with_steps(session: Session, project_id: int, spec: DeploymentSpec) -> Pipelines:
    """Return a specification with the latest versions of the models that its models call, and those that they call.

    An ensemble without a step is refused. A Python model may do without a model, so its missing calls are only named.
    """
    found = {model.name: model for model in spec.models}
    callers = dict[str, tuple[str, VersionRow]]()
    missing, problems = list[str](), list[str]()
    waiting = list(found)
    while waiting:
        rows = _models(session, project_id, waiting)
        called = dict[str, tuple[str, VersionRow]]()
        for name in waiting:
            lacking = list[str]()
            _, versions = _versions(found.get(name, DeployedModel(name=name)), rows.get(name), lacking)
            if name in callers and lacking:
                caller, version = callers[name]
                text = (
                    f"'{caller}' calls '{name}', which {'has no ready version' if name in rows else 'does not exist'}"
                )
                (problems if version.backend == ENSEMBLE else missing).append(text)
                continue
            if name in callers:
                found[name] = DeployedModel(name=name)
            for version in versions.values():
                called |= {each: (name, version) for each in version.report.get("calls", ()) if each not in called}
        waiting = [name for name in called if name not in found and name not in callers]
        callers = {**called, **callers}
    if problems:
        raise invalid("\n".join(f"models: {text}" for text in problems), hint="add its repository: all its models")
    if len(found) > MODELS_MAX:
        raise invalid(f"models: expected at most {MODELS_MAX} with all that they call, got {len(found)}")
    steps = [name for name in found if name in callers and name not in {model.name for model in spec.models}]
    return Pipelines(spec.model_copy(update={"models": tuple(found.values())}), steps, missing)


def _models(session: Session, project_id: int, names: Sequence[str]) -> Mapping[str, Mapping[int, VersionRow]]:
    found: dict[str, dict[int, VersionRow]] = {}
    query = (
        select(ModelRow.name, VersionRow)
        .outerjoin(VersionRow, VersionRow.model_id == ModelRow.id)
        .where(ModelRow.project_id == project_id, ModelRow.name.in_(names))
        .order_by(VersionRow.number)
    )
    for name, version in session.execute(query):
        versions = found.setdefault(name, {})
        if version is not None:
            versions[version.number] = version
    return found


def _versions(
    model: DeployedModel, rows: Mapping[int, VersionRow] | None, problems: list[str]
) -> tuple[DeployedModel, Mapping[int, VersionRow]]:
    """Return a model with numbers in place of "latest", and its versions."""
    if rows is None:
        problems.append(f"models: model '{model.name}' does not exist")
        return model, {}
    ready = [number for number, row in rows.items() if row.state == "ready"]
    numbers = model.versions or tuple(ready[-1:])
    if not numbers:
        problems.append(f"models: '{model.name}' has no ready version")
    for number in numbers:
        if number not in rows:
            known = ", ".join(map(str, list(rows)[-_LISTED:])) or "none"
            problems.append(f"models: version {number} of '{model.name}' does not exist, expected one of {known}")
        elif number not in ready:
            problems.append(f"models: version {number} of '{model.name}' is {rows[number].state}, expected ready")
    return model.model_copy(update={"versions": numbers}), {
        number: rows[number] for number in numbers if number in rows
    }


WORKERS = "EXECUTION_ENV_PATH"
INSTANCES_MIN = "INSTANCES_MIN"
INSTANCES_MAX = "INSTANCES_MAX"


def configured(text: str, model: DeployedModel, versions: Sequence[int], workers: Path | None = None) -> str:
    """Return a model's config.pbtxt.

    Args:
        text: The config.pbtxt of its latest version, "" if it has none: the server completes it from the model.
        workers: The folder of an environment for its workers, unless it names one itself.
    """
    members = json_form.to_json(pbtxt.parse(text))
    members["name"] = model.name
    members["version_policy"] = {"specific": {"versions": list(versions)}}
    _set_batching(members, model)
    _set_instances(members, model)
    if workers is not None:
        _parameters(members).setdefault(WORKERS, {"string_value": str(workers)})
    if model.traffic:
        _parameters(members)[TRAFFIC] = {"string_value": json.dumps(model.traffic, sort_keys=True)}
    return pbtxt.render(json_form.from_json(json.dumps(_merged(members, model.config))))


def _set_batching(members: dict[str, Any], model: DeployedModel) -> None:
    batch_size, delay_us = model.batching.max_batch_size, model.batching.max_queue_delay_microseconds
    if batch_size is not None:
        members["max_batch_size"] = batch_size
    if delay_us is not None:
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in members:
                raise invalid(
                    f"model '{model.name}': batching.max_queue_delay_microseconds is for models with dynamic batching, "
                    f"and this one has {other}",
                    hint="set its own fields in 'config'",
                )
        members.setdefault("dynamic_batching", {})["max_queue_delay_microseconds"] = delay_us


def _set_instances(members: dict[str, Any], model: DeployedModel) -> None:
    bounds = model.instances
    if not bounds.max:
        return
    least = max(1, bounds.min)
    groups: list[dict[str, Any]] = members.setdefault("instance_group", [])
    if not groups:
        groups.append({})
    if len(groups) > 1:
        raise invalid(
            f"model '{model.name}': expected one instance group to set the number of instances, got {len(groups)}",
            hint="set 'instance_group' in 'config'",
        )
    groups[0]["count"] = least
    if bounds.max > bounds.min:
        _parameters(members)[INSTANCES_MIN] = {"string_value": str(least)}
        _parameters(members)[INSTANCES_MAX] = {"string_value": str(bounds.max)}


def _parameters(members: dict[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] = members.setdefault("parameters", {})
    return parameters


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object with changes: objects are merged, everything else is replaced."""
    merged = dict(base)
    for key, value in changes.items():
        before = merged.get(key)
        is_object = isinstance(value, Mapping) and isinstance(before, Mapping)
        merged[key] = _merged(before, value) if is_object else value  # type: ignore[arg-type] # both are mappings
    return merged


def _key_line(key: ServerKeyRow) -> str:
    limits = {"requests/min": key.requests_per_minute, "tokens/min": key.tokens_per_minute}
    line = f"{key.name} {','.join(key.scopes)} sha256:{key.digest}"
    return line + "".join(f" {name}={limit}" for name, limit in limits.items() if limit)
