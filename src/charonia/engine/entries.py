"""Where the models of a server stand."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from charonia.core.metadata import ModelIndexEntry, ModelState
from charonia.core.names import name_of
from charonia.engine.composition import Composition
from charonia.engine.loader import LoadedVersion
from charonia.engine.provision import Provided
from charonia.repository.scan import Scan

UNLOADED = "unloaded"
"""Reason that the index gives for a version that was unloaded."""

AMBIGUOUS = "model appears in two or more repositories"
"""Beginning of the reason that the index gives for a name that two repositories have."""


@dataclass(slots=True)
class VersionEntry:
    """Where one version stands. `loaded` stays set while it answers, also during a reload; `provided` has its files."""

    state: ModelState = ModelState.UNKNOWN
    reason: str = ""
    loaded: LoadedVersion | None = None
    provided: Provided | None = None

    @property
    def problem(self) -> str:
        """Why it does not answer, or what is wrong with its workers while it does; "" when all is well."""
        return self.reason or (self.loaded.problem if self.loaded is not None else "")


@dataclass(slots=True)
class ModelEntry:
    """Where one model stands.

    Attributes:
        name: Its key: its name, or with namespaces its repository and name.
        failure: Why the model as a whole could not be loaded, "" when it could or was not tried.
        versions: Its versions that were ever asked for.
        provided: Its files, while they are in use.
        composition: What it is made of, for an ensemble that answers or should.
    """

    name: str
    failure: str = ""
    versions: dict[int, VersionEntry] = field(default_factory=dict)
    provided: Provided | None = None
    composition: Composition | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def take_files(self, provided: Provided) -> None:
        """Use these files; those before end, but for those of versions that could not be replaced and go on."""
        before, self.provided = self.provided, provided
        if before is not None:
            used = [v.provided for v in self.versions.values() if v.loaded is not None]
            provided.earlier, unused = before.split(lambda each: each in used)
            for each in unused:
                await each.ended()

    @property
    def wanted(self) -> bool:
        """Whether the model should be answering: it was loaded, or loading it failed."""
        return bool(self.failure) or any(
            v.loaded is not None or v.state is ModelState.LOADING or v.reason not in ("", UNLOADED)
            for v in self.versions.values()
        )

    @property
    def is_ready(self) -> bool:
        """Whether all of its wanted versions answer."""
        return not self.failure and all(v.loaded is not None or v.reason == UNLOADED for v in self.versions.values())

    @property
    def is_loaded(self) -> bool:
        """Whether any version answers."""
        return any(v.loaded is not None for v in self.versions.values())

    @property
    def problem(self) -> str:
        """Why it could not be loaded, as a whole or a version of it; "" where nothing went wrong."""
        reasons = [
            f"version {version} is at UNAVAILABLE state: {entry.reason};"
            for version, entry in sorted(self.versions.items())
            if entry.reason not in ("", UNLOADED)
        ]
        return self.failure or " ".join(reasons)


def index_of(models: Mapping[str, ModelEntry], found: Scan) -> list[ModelIndexEntry]:
    """Return every model of the repositories and of the past, with the state of its versions."""
    entries: list[ModelIndexEntry] = []
    for key in sorted(set(models) | set(found.models) | set(found.ambiguous)):
        model, name = models.get(key), name_of(key)
        if model is None:
            is_ambiguous = key in found.ambiguous
            state = ModelState.UNAVAILABLE if is_ambiguous else None
            entries.append(ModelIndexEntry(name, state=state, reason=AMBIGUOUS if is_ambiguous else ""))
            continue
        if model.failure:
            entries.append(ModelIndexEntry(name, "", ModelState.UNAVAILABLE, model.failure))
        entries.extend(
            ModelIndexEntry(name, str(version), entry.state, entry.problem)
            for version, entry in sorted(model.versions.items())
        )
    return entries
