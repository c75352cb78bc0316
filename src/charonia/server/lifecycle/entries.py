"""The state of a model and of its versions, and which models a name means.

A model's key is its name; with namespaces, its repository and its name. A name that is unique among the repositories
reaches its model without the repository; a step of an ensemble means the model of the ensemble's own repository first.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from charonia.config.model import ModelConfig
from charonia.config.parameters import INSTANCES_MAX, INSTANCES_MIN
from charonia.core.errors import invalid
from charonia.core.metadata import ModelState, model_key, name_of, namespace_of
from charonia.server.execution.version_runner import Runner
from charonia.server.lifecycle.ensemble_dependencies import Composition
from charonia.server.lifecycle.loader import LoadedVersion
from charonia.server.lifecycle.provision import ProvidedFiles
from charonia.server.lifecycle.repository.scan import Fingerprint, Scan

UNLOADED = "unloaded"
"""Reason that the index gives for a version that was unloaded."""

_BOUNDS = {INSTANCES_MIN, INSTANCES_MAX}

AMBIGUOUS = "model appears in two or more repositories"
"""Beginning of the reason that the index gives for a name that two repositories have."""


@dataclass(frozen=True, slots=True)
class VersionContent:
    """Source of a loaded version; with an equal one, it need not be loaded again.

    Attributes:
        config: Its complete configuration.
        files: Fingerprint of its files and of the files that all versions share.
    """

    config: ModelConfig
    files: Fingerprint


@dataclass(slots=True)
class VersionEntry:
    """The state of a version.

    `loaded` stays set while it answers, even during a reload; `provided` has its files, `content` what they held.
    """

    state: ModelState = ModelState.UNKNOWN
    reason: str = ""
    loaded: LoadedVersion | None = None
    provided: ProvidedFiles | None = None
    content: VersionContent | None = None

    def answers_from(self, content: VersionContent | None) -> bool:
        return content is not None and self.content == content and self.loaded is not None and not self.loaded.problem

    def differs_in_instances_only(self, content: VersionContent) -> bool:
        """Whether it answers without a problem, from content that differs in groups and numbers of instances only."""
        if self.content is None:
            return False
        own = self.content.config
        bounds = {key: own.parameters[key] for key in _BOUNDS & own.parameters.keys()}
        parameters = {key: text for key, text in content.config.parameters.items() if key not in _BOUNDS} | bounds
        config = replace(content.config, instance_group=own.instance_group, parameters=parameters)
        return self.answers_from(replace(content, config=config))

    @property
    def problem(self) -> str:
        """Why it does not answer, or which of its workers fail while it does; "" when all is well."""
        return self.reason or (self.loaded.problem if self.loaded is not None else "")


@dataclass(slots=True)
class ModelEntry:
    """The state of a model.

    Attributes:
        name: Its key: its name, or with namespaces its repository and name.
        failure: Why the model as a whole could not be loaded, "" when it could or was not tried.
        versions: Its versions that were ever selected.
        provided: Its files, while they are in use.
        composition: The composition of an ensemble that answers or should.
        override: The configuration of an earlier load request, which holds while the folder has this fingerprint.
        is_expected: Whether its failure makes the server not ready; that of a load request that cannot begin does not.
    """

    name: str
    failure: str = ""
    versions: dict[int, VersionEntry] = field(default_factory=dict)
    provided: ProvidedFiles | None = None
    composition: Composition | None = None
    override: tuple[ModelConfig, Fingerprint] | None = None
    is_expected: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def take_files(self, provided: ProvidedFiles) -> None:
        """Use these files, and give back the former ones except those of versions that still answer."""
        before, self.provided = self.provided, provided
        if before is not None:
            used = [v.provided for v in self.versions.values() if v.loaded is not None]
            provided.earlier, unused = before.split(lambda each: each in used)
            for each in unused:
                await each.ended()

    def record_unusable(self, reasons: Mapping[int, str]) -> None:
        """Record versions that cannot be loaded, and why; a version that answers still does."""
        for version, reason in reasons.items():
            entry = self.versions.setdefault(version, VersionEntry())
            if entry.loaded is None:
                entry.state, entry.reason = ModelState.UNAVAILABLE, reason

    @property
    def wanted(self) -> bool:
        """Whether the model should be answering: it was loaded, or loading it failed."""
        return bool(self.failure) or any(
            v.loaded is not None or v.state is ModelState.LOADING or v.reason not in ("", UNLOADED)
            for v in self.versions.values()
        )

    @property
    def is_ready(self) -> bool:
        """Whether all of its wanted versions answer, and the workers of none keep failing to start."""
        has_failed = self.failure and self.is_expected
        return not has_failed and all(
            not v.loaded.is_failing if v.loaded is not None else v.reason == UNLOADED or v.state is ModelState.UNLOADING
            for v in self.versions.values()
        )

    @property
    def instances(self) -> int:
        """Instances of the version that has the most, where their number follows the load; 0 where none does."""
        versions = [version.loaded for version in self.versions.values() if version.loaded is not None]
        return max((each.scaling.count for each in versions if each.scaling is not None), default=0)

    @property
    def is_loaded(self) -> bool:
        return any(v.loaded is not None for v in self.versions.values())

    @property
    def problem(self) -> str:
        """Why the model or a version of it could not be loaded; "" where nothing went wrong."""
        reasons = [
            f"version {version} is at UNAVAILABLE state: {entry.reason};"
            for version, entry in sorted(self.versions.items())
            if entry.reason not in ("", UNLOADED)
        ]
        return self.failure or " ".join(reasons)

    def reason(self, version: int) -> str:
        """Return why a version does not answer, or which of its workers fail while it does; "" when all is well."""
        entry = self.versions[version]
        is_later = self.failure and self.is_expected and entry.reason == UNLOADED
        return self.failure if is_later else entry.problem


def keys_of(name: str, found: Scan) -> list[str]:
    """Return the keys that a name, or a key, means among the models that were found."""
    if name in found.models or name in found.ambiguous:
        return [name]
    return [key for key in found.models if name_of(key) == name]


def with_namespaces(config: ModelConfig, namespace: str, found: Scan) -> ModelConfig:
    """Return an ensemble's configuration with the namespace of the model of each step.

    Raises:
        ServingError: INVALID_ARG for a step that names a namespace where there are none.
    """
    scheduling = config.ensemble_scheduling
    if scheduling is None:
        return config
    steps = []
    for index, step in enumerate(scheduling.step):
        if step.model_namespace and not namespace:
            raise invalid(
                f"ensemble_scheduling.step[{index}].model_namespace: there is no namespace '{step.model_namespace}'",
                hint="--model-namespacing=true makes a namespace of every repository",
            )
        own = step.model_namespace or namespace
        if namespace and not step.model_namespace and model_key(own, step.model_name) not in found.models:
            others = keys_of(step.model_name, found)
            own = namespace_of(others[0]) if len(others) == 1 else own
        steps.append(replace(step, model_namespace=own))
    return replace(config, ensemble_scheduling=replace(scheduling, step=tuple(steps)))


def folders_of(models: Iterable[ModelEntry], runner: Runner) -> list[str]:
    """Return where the files of a version that answers lie: its own folder and the model's; nothing without files."""
    for model in models:
        for number, entry in model.versions.items():
            provided = entry.provided or model.provided
            if entry.loaded is not None and entry.loaded.runner is runner and provided is not None:
                return [str(provided.folder.path / str(number)), str(provided.folder.path)]
    return []
