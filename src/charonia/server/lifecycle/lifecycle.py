"""The life cycle of models: load, reload, unload, poll.

1. A version answers until its successor is ready; when the load of the successor fails, nothing changes for callers.
2. A change of one model affects no other model except the ensembles that contain it, which are planned again in the
   same step of the event loop. An ensemble that no longer fits its models becomes unavailable, with the reason, and
   returns by itself when it fits again.
3. The load of an ensemble waits for the loads of its models, never the other way round.

`model_table.py` has the rules of routes and of retirement.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from charonia.config.backends import ENSEMBLE
from charonia.config.json_form import from_json
from charonia.config.model import ModelConfig
from charonia.core.errors import Code, ServingError, invalid, not_found, unavailable
from charonia.core.metadata import ModelIndexEntry, ModelState, name_of, namespace_of
from charonia.server.lifecycle.backends import Backends
from charonia.server.lifecycle.configure import (
    ConfigurationError,
    Configured,
    ConfigureOptions,
    VersionsError,
    configure,
)
from charonia.server.lifecycle.ensemble_dependencies import Composition
from charonia.server.lifecycle.ensembles import Ensembles
from charonia.server.lifecycle.entries import (
    AMBIGUOUS,
    UNLOADED,
    ModelEntry,
    VersionContent,
    VersionEntry,
    keys_of,
    with_namespaces,
)
from charonia.server.lifecycle.load_errors import PollError, load_error, log_failure, logged, reason_of
from charonia.server.lifecycle.loader import LoadedVersion, load_version
from charonia.server.lifecycle.model_table import ModelTable
from charonia.server.lifecycle.provision import ProvidedFiles, Provisioner
from charonia.server.lifecycle.repository.data_files import read_labels
from charonia.server.lifecycle.repository.scan import ModelFolder, Scan, Watch
from charonia.server.lifecycle.repository.sources import Sources
from charonia.server.machine.private_folder import remove_abandoned
from charonia.server.model_options import ALL_MODELS, ControlMode, StoreSettings

_log = logging.getLogger(__name__)

DRAIN_LOOK_S = 0.005
"""Pause between two checks whether requests are in flight, at shutdown."""


@dataclass(frozen=True, slots=True)
class LifecycleOptions:
    """How models are found and loaded.

    Attributes:
        repositories: Folders that hold model folders, and URIs of stores.
        control_mode: Who decides which models are loaded.
        configure: How configurations are completed.
        cores: Cores that this process may use.
        load_threads: Models that load at the same time.
        load_retries: Retries of a load that fails.
        stores: How stores are read.
        has_namespaces: Whether the repository is part of a model's key.
        agents: Folder of repository agents, None for the built-in ones only.
        summarizes: Whether models keep summaries of latencies.
        strict_versions: Whether one version that fails to load keeps all others of that load from answering.
    """

    repositories: tuple[str | Path, ...]
    control_mode: ControlMode = ControlMode.NONE
    configure: ConfigureOptions = field(default_factory=ConfigureOptions)
    cores: int = 1
    load_threads: int = 4
    load_retries: int = 0
    stores: StoreSettings = field(default_factory=StoreSettings)
    has_namespaces: bool = False
    agents: Path | None = None
    summarizes: bool = False
    strict_versions: bool = False


_NO_PATH = "model name must not contain path traversal characters"

REMOVAL_S_MAX = 2.0
"""Time for which a load waits until the instances that it removed are closed."""

LOADS_S_MAX = 5.0
"""Time for which a shutdown waits for loads under way, so that it closes what they create."""


@dataclass(slots=True)
class PendingLoad:
    """A load of a model under way.

    Attributes:
        table: The models.
        model: The model.
        provided: Its files.
        configured: Its configuration.
        held: The versions that are ready and do not answer yet, with their entries and what they were loaded from.
    """

    table: ModelTable
    model: ModelEntry
    provided: ProvidedFiles
    configured: Configured
    held: list[tuple[VersionEntry, LoadedVersion, VersionContent | None]] = field(default_factory=list)

    async def decide(self, *, is_complete: bool) -> None:
        """Let the versions that are held answer; where the load is not complete, close them all instead."""
        held, self.held = self.held, []
        if is_complete:
            closing = []
            for entry, loaded, content in held:
                before, entry.loaded = entry.loaded, loaded
                entry.state, entry.reason = ModelState.READY, ""
                entry.provided, entry.content = self.provided, content
                self.table.route(self.model)
                if before is not None:
                    retirement = self.table.retire(before)
                    if before.shared is loaded.shared and not before.has_sequences:
                        closing.append(retirement)
            if closing:  # programs may expect that removed instances are gone after the load
                await asyncio.wait(closing, timeout=REMOVAL_S_MAX)
            return
        for entry, _, _ in held:
            if entry.loaded is None:
                entry.state, entry.reason = ModelState.UNAVAILABLE, UNLOADED
        closing = [self.table.retire(loaded) for _, loaded, _ in held]
        if closing:  # they still use the files of the load
            await asyncio.wait(closing)


class Lifecycle:
    """The models of a server.

    Attributes:
        table: Every model that was ever requested, and the routes to the models that answer.
        ensembles: The models that are made of others.
        sources: The repositories.
        found: Result of the last scan of them.
        unread: Why the repositories could not be read at the start, "" from the first time that they could.
        is_complete: Whether all repositories, stores too, could be read since the start, and what they had loaded.
        load_steps: Loads the missing models of an ensemble in place of this object; None where it does so itself.
    """

    def __init__(self, options: LifecycleOptions, backends: Backends) -> None:
        self.table = ModelTable(summarizes=options.summarizes)
        self.ensembles = Ensembles(self.table, backends.cache)
        self.sources = Sources(options.repositories, options.stores, has_namespaces=options.has_namespaces)
        self.found = Scan()
        self.unread = ""
        self.is_complete = True
        self.load_steps: Callable[[Sequence[str]], Awaitable[None]] | None = None
        self._provisioner = Provisioner(self.sources, config_name=options.configure.config_name, agents=options.agents)
        self._options = options
        self._backends = backends
        self._loaders = asyncio.Semaphore(options.load_threads)
        self._loads: dict[str, asyncio.Task[None]] = {}  # under way, by model
        self._tried: set[str] = set()  # at the start
        self._requested: set[str] = set()  # models loaded for their own sake; others were loaded for an ensemble
        self._watch = Watch()

    async def load_at_start(self, names: Sequence[str], without: Collection[str] = ()) -> list[str]:
        """Load the models that the control mode selects at startup: all, or in explicit mode `names` ("*" for all).

        Where a store could not be read, or a model not fetched, `is_complete` is false: call this again for them.

        Args:
            names: The models of explicit mode.
            without: Models that are not loaded, whatever selects them.

        Returns:
            The reasons of the failures, which are in the log. A model that lacks only others is left out if they are
            there.

        Raises:
            ServingError: NOT_FOUND or UNAVAILABLE when a repository cannot be read; `unread` says so, too.
        """
        await asyncio.to_thread(remove_abandoned)
        self.is_complete = False
        try:
            found = await self._scan()
        except ServingError as error:
            self.unread = str(error)
            raise
        self._watch.reset(found)
        if self._options.control_mode in (ControlMode.NONE, ControlMode.POLL) or ALL_MODELS in names:
            wanted = sorted(found.models) + sorted(found.ambiguous)
        else:
            wanted = [key for name in names for key in keys_of(name, found) or [name]]
        for reason in found.unread:
            _log.error("%s", reason)
        keys = [key for key in wanted if name_of(key) not in without and key not in self._tried]
        results = await self._load_all(keys, found)
        failed = {key: error for key, error in zip(keys, results, strict=True) if error is not None}
        self._tried |= found.models.keys() & set(keys) - self._mark_unfetched(failed, found)
        return [
            *found.unread,
            *(
                reason_of(error)
                for key, error in failed.items()
                if failed.keys().isdisjoint(self._culprits(key, error))
            ),
        ]

    async def load(self, name: str, config: str | None, files: Mapping[str, bytes] | None) -> None:
        """Load or reload a model on request, also if the caller leaves. Raises as `Engine.load_model`."""
        self._require_explicit()
        if name.strip() in (".", ".."):
            raise invalid(f"{_NO_PATH}, got {name!r}")
        try:
            if not name.strip():
                raise invalid("Model name cannot be empty. Please enter a valid name to deploy.")
            if "/" in name or "\\" in name:
                raise invalid(f"{_NO_PATH}, got {name!r}")
            if files and config is None:
                raise invalid("Load parameter 'config' must be specified for model file override")
            # In a thread: a client may send a configuration that takes long to read.
            override = await asyncio.to_thread(from_json, config) if config is not None else None
            found = await self._scan_model(name) if not files else Scan()
        except ServingError as unusable:
            raise logged(PollError(name, unusable)) from unusable
        if files:
            self._requested.add(name)
            folder = ModelFolder(name, Path())
            await asyncio.shield(self._begin(name, self._load(name, folder, override, files)))
            return
        keys = keys_of(name, found)
        if not keys:
            unread = "".join(f"; {reason}" for reason in found.unread)
            hint = f"models there: {', '.join(map(name_of, sorted(found.models))) or 'none'}"
            raise logged(PollError(name, not_found(f"there is no such model folder{unread}", hint=hint)))
        for error in await asyncio.shield(self._load_all(keys, found, override, are_expected=False)):
            if error is not None:
                raise error

    async def load_on_demand(self, key: str) -> None:
        """Load a model on demand.

        Raises:
            ServingError: With the reason, when it cannot be loaded.
        """
        folder = await asyncio.to_thread(self.sources.refreshed, self.found.models[key])
        self.found = replace(self.found, models={**self.found.models, key: folder})
        for error in await asyncio.shield(self._load_all([key], self.found)):
            if error is not None:
                raise error

    async def evict(self, key: str) -> None:
        """Evict a model; returns when its requests in flight are answered and it is closed."""
        model = self.table.models.get(key)
        retirements = await self._retire_model(model) if model is not None else []
        if retirements:
            await asyncio.wait(retirements)

    async def unload(self, name: str, unload_dependents: bool = False) -> set[str]:
        """Start to unload a model on request, and return the loaded models that only this ensemble had needed.

        Raises:
            ServingError: As `Engine.unload_model`.
        """
        self._require_explicit()
        left: set[str] = set()
        for key in keys_of(name, Scan(models=dict.fromkeys(self.table.models, ModelFolder(name, Path())))):
            model = self.table.models[key]
            if loads := [self._loads[each] for each in self.ensembles.of_steps([name]) if each in self._loads]:
                await asyncio.wait(loads)  # they would miss the model that they have loaded
            self._requested.discard(key)
            model.override = None
            composition = model.composition
            retirements = await self._retire_model(model)
            if composition is None:
                continue
            if not unload_dependents:
                left |= {name_of(step.name) for step in self._only_steps(composition) if step.is_loaded}
            elif self.table.in_flight():
                # The ensemble's last requests still need its models.
                self.table.keep(asyncio.get_running_loop().create_task(self._unload_steps(composition, retirements)))
            else:
                await self._unload_steps(composition, [])
        return left

    async def poll(self) -> bool:
        """Scan the repositories, and load and unload the models added, changed or removed since the last scan.

        Returns:
            Whether a change was seen that the next scan has to confirm: poll again soon.
        """
        found = await self._scan()
        for reason in found.unread:
            _log.error("%s; the last successful scan of it is used", reason)
        changes = self._watch.changes(found)
        removed = [self.table.models[name] for name in changes.removed if name in self.table.models]
        wanted = [*changes.added, *changes.modified]
        if self._options.control_mode is ControlMode.AUTO:  # the others are loaded on demand
            wanted = [name for name in wanted if name in self.table.models and self.table.models[name].is_loaded]
        if self._options.has_namespaces:  # a step may mean another model now, which then answers before its own is gone
            moved = {name_of(key) for key in (*changes.added, *changes.removed)}
            wanted += [key for key in self.ensembles.of_steps(moved) if key in found.models and key not in wanted]
            errors = await asyncio.shield(self._load_all(wanted, found))
        for model in removed:
            self.table.drop(model, await self._retire_model(model))
        if not self._options.has_namespaces:
            errors = await asyncio.shield(self._load_all(wanted, found))
        self._mark_unfetched(dict(zip(wanted, errors, strict=True)), found)
        return self._watch.is_pending

    def is_overridden(self, name: str) -> bool:
        """Whether a model has the configuration of a load request in place of its own."""
        return any(model.override for key, model in self.table.models.items() if name_of(key) == name)

    def index(self) -> list[ModelIndexEntry]:
        """Return every model of the repositories and of the past, with the state of its versions."""
        return self.table.index(self.sources.known())

    async def drain(self) -> None:
        """Unload everything; return when the last request in flight has been answered."""
        # Every model stays until then: the requests in flight of one may call another.
        while self.table.in_flight():
            await asyncio.sleep(DRAIN_LOOK_S)
        if self._loads:
            await asyncio.wait(list(self._loads.values()), timeout=LOADS_S_MAX)
        for model in self.table.models.values():
            if model.provided is not None:
                await model.provided.ending()
            self.table.unload(model, set(model.versions))
        await self.table.retired()
        self.sources.close()

    def _require_explicit(self) -> None:
        if self._options.control_mode not in (ControlMode.EXPLICIT, ControlMode.AUTO):
            raise unavailable(
                "explicit model load / unload is not allowed if polling is enabled or the control mode is 'none'",
                hint="start the server with --model-control-mode=explicit",
            )

    async def _scan(self, *, fingerprints: bool = True) -> Scan:
        self.found = await asyncio.to_thread(self.sources.scan_all, fingerprints=fingerprints)
        if self.unread:
            self.unread = ""
            self.table.notify()
        return self.found

    async def _scan_model(self, name: str) -> Scan:
        """Scan for one model: among thousands, a scan of all would take longer than the load. Scan all without it.

        With namespaces, scan all: which model a step of an ensemble means depends on every repository. Where none could
        be read so far, too: the server is live from then on.
        """
        if self._options.has_namespaces or self.unread:
            return await self._scan(fingerprints=False)
        found = await asyncio.to_thread(self.sources.scan_model, name)
        if not (found.models or found.ambiguous):
            return await self._scan(fingerprints=False)
        models, ambiguous = dict(self.found.models), dict(self.found.ambiguous)
        for mapping in (models, ambiguous):
            mapping.pop(name, None)
        models.update(found.models)
        ambiguous.update(found.ambiguous)
        self.found = replace(self.found, models=models, ambiguous=ambiguous)
        return found

    def _mark_unfetched(self, failed: Mapping[str, BaseException | None], found: Scan) -> set[str]:
        """Return the models of stores that could not be fetched, which are new to the next scan; set `is_complete`."""
        later = {k for k, e in failed.items() if isinstance(e, ServingError) and e.code is Code.UNAVAILABLE}
        for key in later:
            self._watch.invalidate(key)
        unfetched = {key for key in later if key in found.models and found.models[key].origin}
        if not (self.is_complete or unfetched or found.unread or self._watch.is_pending):
            self.is_complete = True
            self.table.notify()
        return unfetched

    async def _load_all(
        self, names: Sequence[str], found: Scan, override: ModelConfig | None = None, *, are_expected: bool = True
    ) -> list[BaseException | None]:
        """Load models concurrently and return the error of each, None where the load succeeded."""
        self._requested.update(names)
        for name in names:
            self.table.entry(name).is_expected |= are_expected
        tasks = [self._begin(name, self._load_found(name, found, override)) for name in names]
        return await asyncio.gather(*tasks, return_exceptions=True)

    async def _load_found(self, name: str, found: Scan, override: ModelConfig | None = None) -> None:
        model = self.table.entry(name)
        if name in found.ambiguous:
            reason = f"{AMBIGUOUS}: {', '.join(found.ambiguous[name])}"
            if self._options.control_mode is ControlMode.POLL or not model.is_loaded:
                # Neither answers: a request by name could mean either. (A failed load request takes nothing away.)
                await self._retire_model(model, reason)
            raise PollError(name, invalid(reason))
        folder = found.models.get(name)
        if folder is None:
            missing = PollError(name, not_found("there is no such model folder"))
            model.failure = missing.message.removeprefix(f"failed to load '{name}', ")
            raise missing
        if override is None and model.override is not None:
            kept, fingerprint = model.override
            if fingerprint == await asyncio.to_thread(folder.present):
                override = kept
            else:
                model.override = None
        await self._load(name, folder, override)

    async def _load(
        self,
        name: str,
        folder: ModelFolder,
        override: ModelConfig | None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        model = self.table.entry(name)
        try:
            async with model.lock:
                for attempt in range(self._options.load_retries + 1):
                    try:
                        await self._load_locked(model, folder, override, files)
                        break
                    except ServingError as error:
                        if attempt == self._options.load_retries:
                            raise
                        _log.warning("loading '%s' failed, trying again: %s", model.name, error)
        finally:
            if model.provided is not None and not model.is_loaded:
                provided, model.provided = model.provided, None  # of a former version, which has been unloaded
                await provided.ended()
            self.ensembles.follow(name)

    async def _load_locked(
        self,
        model: ModelEntry,
        folder: ModelFolder,
        override: ModelConfig | None,
        files: Mapping[str, bytes] | None,
    ) -> None:
        name, previous = model.name, model.composition
        provided: ProvidedFiles | None = None
        kept = None
        if override is not None and not files:
            kept = override, await asyncio.to_thread(folder.present)
        try:
            async with self._loaders:
                provided = await self._provide(folder, override, files)
                folder = provided.folder
                try:
                    configured = await configure(folder, self._backends, self._options.configure, override)
                except ConfigurationError as error:
                    raise PollError(folder.name, error) from error
            await self._prepare(model, folder, configured)
        except Exception as error:
            if provided is not None:
                await provided.failed()
            reason = error.reason if isinstance(error, PollError) else reason_of(error)
            if isinstance(error, VersionsError):
                model.record_unusable(error.reasons)
                self.table.notify()
            if model.is_loaded:
                model.composition = previous
            else:
                model.failure = reason
                model.is_expected |= not isinstance(error, PollError)
            raise load_error(name, reason, error) from error
        model.failure = ""
        load = PendingLoad(self.table, model, provided, configured)
        model.record_unusable(configured.unusable)
        results = await asyncio.gather(*(self._load_version(load, version) for version in configured.versions))
        reasons = {**dict(zip(configured.versions, results, strict=True)), **configured.unusable}
        await load.decide(is_complete=not any(reasons.values()))
        failed = [f"version {v} is at UNAVAILABLE state: {why};" for v, why in sorted(reasons.items()) if why]
        unselected = set(model.versions) - set(reasons)
        # A version answers until all versions that replace it do.
        self.table.unload(model, {v for v in unselected if not failed or model.versions[v].loaded is None})
        if failed and all(entry.provided is not provided for entry in model.versions.values()):
            await provided.failed()
        else:
            await model.take_files(provided)
            model.override = kept
        if failed:
            if model.is_loaded:
                model.composition = previous
            raise invalid(f"load failed for model '{name}': {' '.join(failed)}")
        await provided.loaded()
        _log.info("successfully loaded '%s'", name)

    async def _provide(
        self, folder: ModelFolder, override: ModelConfig | None, files: Mapping[str, bytes] | None
    ) -> ProvidedFiles:
        try:
            return await self._provisioner.provide(folder, override, files)
        except ServingError as error:
            raise PollError(folder.name, error) from error

    async def _load_version(self, load: PendingLoad, version: int) -> str:
        """Load a version, unless it answers from the same files already; return why it failed, "" for success."""
        model, folder, config = load.model, load.provided.folder, load.configured.config
        entry = model.versions.setdefault(version, VersionEntry())
        is_new = entry.loaded is None
        if is_new:  # before anything is awaited: models that are ready first must know that this one comes
            entry.state, entry.reason = ModelState.LOADING, ""
            self.table.notify()
        content: VersionContent | None = None
        try:
            if model.composition is None:
                content = VersionContent(config, await asyncio.to_thread(load.provided.fingerprint, version))
                if entry.answers_from(content):
                    return ""
            _log.info("loading: %s:%d", model.name, version)
            if model.composition is not None:
                loaded = self.ensembles.load(model.composition, version)
            else:
                async with self._loaders:
                    before = entry.loaded if content is not None and entry.differs_in_instances_only(content) else None
                    loaded = await load_version(
                        folder, version, config, model.instances, before,
                        backends=self._backends,
                        cores=self._options.cores,
                    )  # fmt: skip
        except Exception as error:
            reason = reason_of(error)
            if not isinstance(error, ServingError):
                _log.warning("loading '%s' version %d", model.name, version, exc_info=error)
            if is_new:
                entry.state, entry.reason = ModelState.UNAVAILABLE, reason
            return reason
        loaded.runner.metrics.namespace = namespace_of(model.name)
        load.held.append((entry, loaded, content))
        if not self._options.strict_versions:
            await load.decide(is_complete=True)
        return ""

    def _begin(self, name: str, load: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        """Start a load; ensembles that contain the model wait for it."""
        task = self._loads[name] = asyncio.get_running_loop().create_task(load)

        def done(task: "asyncio.Task[None]") -> None:
            if self._loads.get(name) is task:
                del self._loads[name]
            self.table.notify()
            error = None if task.cancelled() else task.exception()
            if error is not None:  # the caller has it too, and ensembles find it in the model's entry
                log_failure(name, error, self._culprits(name, error))

        task.add_done_callback(done)
        return task

    def _culprits(self, name: str, error: BaseException) -> set[str]:
        """Return the models because of which another one could not be loaded; none where the error is its own."""
        is_own = isinstance(error, PollError) or name not in self.table.models
        return set() if is_own else self.ensembles.culprits(name)

    async def _prepare(self, model: ModelEntry, folder: ModelFolder, configured: Configured) -> None:
        """Record the composition of an ensemble, and load the models that are missing."""
        config = configured.config
        if config.platform != ENSEMBLE:
            model.composition = None
            return
        labels = await asyncio.to_thread(read_labels, folder, config)
        config = with_namespaces(config, folder.namespace, self.found)
        composition = Composition(config, configured.versions, labels)
        self.ensembles.record(model, composition)
        missing = [name for name in self.ensembles.missing(composition) if name not in self._loads]
        if missing and self.load_steps is not None:
            await self.load_steps(composition.models)
            missing = [name for name in self.ensembles.missing(composition) if name not in self._loads]
        if missing and self._options.control_mode is ControlMode.EXPLICIT:
            found = await self._scan(fingerprints=False)
            for name in missing:
                if name in found.models and name not in self._loads:
                    self._begin(name, self._load_found(name, found))
        waited = [self._loads[name] for name in composition.models if name in self._loads]
        if waited:
            await asyncio.wait(waited)

    async def _retire_model(self, model: ModelEntry, failure: str = "") -> "list[asyncio.Task[None]]":
        """Take a model out of service, and return the retirements of its versions."""
        async with model.lock:
            if model.provided is not None:
                await model.provided.ending()
            model.composition = None
            retirements = self.table.unload(model, set(model.versions))
            model.failure = failure
            model.is_expected &= bool(failure)
            self.table.notify()
        self.ensembles.follow(model.name)
        return retirements

    async def _unload_steps(self, composition: Composition, retirements: "list[asyncio.Task[None]]") -> None:
        """Unload the models that were loaded only for a former ensemble, once its last requests are answered."""
        if retirements:
            await asyncio.wait(retirements)
        for model in self._only_steps(composition):
            nested = model.composition
            retired = await self._retire_model(model)
            if nested is not None:
                await self._unload_steps(nested, retired if retirements else [])

    def _only_steps(self, composition: Composition) -> Iterator[ModelEntry]:
        """Yield the models that were loaded only for a former ensemble."""
        for name in composition.models:
            if name in self.table.models and name not in self._requested and not self.ensembles.needs(name):
                yield self.table.models[name]
