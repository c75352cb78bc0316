"""The models of a server: the state of each, the routes to the models that answer, and the versions that retire.

1. Routes change in one step, on the event loop: a request sees the old version or the new one, never neither.
2. A retired version finishes its requests in flight; only then are its instances closed.
"""

import asyncio
import logging
from collections.abc import Callable

from charonia.core.errors import ServingError
from charonia.core.metadata import ModelIndexEntry, ModelState, name_of
from charonia.server.closing import close_safely
from charonia.server.execution.version_runner import Runner
from charonia.server.lifecycle.entries import AMBIGUOUS, UNLOADED, ModelEntry
from charonia.server.lifecycle.loader import LoadedVersion
from charonia.server.lifecycle.repository.scan import Scan
from charonia.server.sequences.models import hand_over
from charonia.server.traffic.service import TrafficService
from charonia.server.traffic.split import hand_over_sequences

_log = logging.getLogger(__name__)

Routes = dict[tuple[str, str], Runner]
"""Runner by model and version as text, "" for requests without a version: the highest that is ready, or a split."""


class ModelTable:
    """Every model that was ever requested, and where requests go.

    Args:
        summarizes: Whether summaries of latencies are kept.

    Attributes:
        models: The models by key.
        routes: Where requests go. Read by the request path, which holds this very object.
        traffic: How requests without a version are split.
        on_change: Called when models or routes may have changed; None for no callback.
    """

    def __init__(self, *, summarizes: bool = False) -> None:
        self.models: dict[str, ModelEntry] = {}
        self.routes: Routes = {}
        self.traffic = TrafficService(self._reroute)
        self.on_change: Callable[[], None] | None = None
        self._summarizes = summarizes
        self._retirements: set[asyncio.Task[None]] = set()
        self._retiring: set[Runner] = set()

    def entry(self, key: str) -> ModelEntry:
        """Return the state of a model; a new one where the model was never requested."""
        return self.models.setdefault(key, ModelEntry(key))

    def index(self, found: Scan) -> list[ModelIndexEntry]:
        entries: list[ModelIndexEntry] = []
        for key in sorted(set(self.models) | set(found.models) | set(found.ambiguous)):
            model, name = self.models.get(key), name_of(key)
            if model is None:
                is_ambiguous = key in found.ambiguous
                state = ModelState.UNAVAILABLE if is_ambiguous else None
                entries.append(ModelIndexEntry(name, state=state, reason=AMBIGUOUS if is_ambiguous else ""))
                continue
            if model.failure and not model.versions:
                entries.append(ModelIndexEntry(name, "", ModelState.UNAVAILABLE, model.failure))
            entries.extend(
                ModelIndexEntry(name, str(version), entry.state, model.reason(version))
                for version, entry in sorted(model.versions.items())
            )
        return entries

    def loaded(self) -> list[LoadedVersion]:
        return [v.loaded for m in self.models.values() for v in m.versions.values() if v.loaded is not None]

    def in_flight(self) -> int:
        return sum(1 for runner in self._runners() if runner.in_flight)

    def abandon(self, error: ServingError) -> None:
        for runner in self._runners():
            runner.abandon(error)

    def route(self, model: ModelEntry) -> None:
        """Direct requests to the versions of a model that answer now."""
        routes = self._routes_after(model.name)
        for runner in routes.values() if self._summarizes else ():
            runner.metrics.summarize()
        hand_over(self.routes, routes)
        hand_over_sequences(self.routes, routes)
        self.routes.clear()
        self.routes.update(routes)
        self.notify()

    def _reroute(self, key: str) -> None:
        """Route a model again if it was ever requested: its traffic has changed."""
        model = self.models.get(key)
        if model is not None:
            self.route(model)

    def notify(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def unload(self, model: ModelEntry, versions: set[int]) -> "list[asyncio.Task[None]]":
        """Take versions of a model out of service, and return their retirements."""
        leaving = []
        for version in versions:
            entry = model.versions[version]
            if entry.loaded is not None:
                entry.state, entry.reason = ModelState.UNLOADING, ""
                leaving.append((entry.loaded, version))
                entry.loaded = None
            elif entry.state is not ModelState.UNLOADING:
                entry.state, entry.reason = ModelState.UNAVAILABLE, UNLOADED
        self.route(model)
        return [self.retire(loaded, (model, version)) for loaded, version in leaving]

    def drop(self, model: ModelEntry, retirements: "list[asyncio.Task[None]]") -> None:
        """Remove a model from the index after these retirements, unless it was requested again."""
        self.keep(asyncio.get_running_loop().create_task(self._drop(model, retirements)))

    def retire(self, loaded: LoadedVersion, of: tuple[ModelEntry, int] | None = None) -> "asyncio.Task[None]":
        """Close a version after its requests in flight.

        Args:
            loaded: The version, which no route leads to any more.
            of: The entry and the number that it leaves empty; None where a successor has taken its place.
        """
        self._retiring.add(loaded.runner)
        return self.keep(asyncio.get_running_loop().create_task(self._retire(loaded, of)))

    def keep(self, task: "asyncio.Task[None]") -> "asyncio.Task[None]":
        """Make `retired` wait for a task, too, and return it."""
        self._retirements.add(task)
        task.add_done_callback(self._retirements.discard)
        return task

    async def retired(self) -> None:
        while self._retirements:
            await asyncio.wait(set(self._retirements))

    def _runners(self) -> list[Runner]:
        return [v.runner for v in self.loaded()] + list(self._retiring)

    def _routes_after(self, key: str) -> Routes:
        """Return the routes after the model of `key` has changed."""
        name = name_of(key)
        changed = {key, name}
        new = {target: runner for target, runner in self.routes.items() if target[0] not in changed}
        _add(new, key, self.models[key], self.traffic)
        if name != key:
            same = [k for k, model in self.models.items() if name_of(k) == name and model.wanted]
            if len(same) == 1:
                _add(new, name, self.models[same[0]], self.traffic)
        return new

    async def _drop(self, model: ModelEntry, retirements: "list[asyncio.Task[None]]") -> None:
        if retirements:
            await asyncio.wait(retirements)
        if not model.wanted and not model.lock.locked():
            self.models.pop(model.name, None)
            self.notify()

    async def _retire(self, loaded: LoadedVersion, of: tuple[ModelEntry, int] | None) -> None:
        try:
            await close_safely(loaded.retire(), f"'{loaded.runner.config.name}' version {loaded.runner.version}")
        finally:
            self._retiring.discard(loaded.runner)
        if of is None:
            return
        model, version = of
        entry = model.versions[version]
        if entry.state is ModelState.UNLOADING:
            entry.state, entry.reason = ModelState.UNAVAILABLE, UNLOADED
            self.notify()
        _log.info("successfully unloaded '%s' version %d", model.name, version)
        if model.provided is not None and not model.is_loaded and not model.lock.locked():
            provided, model.provided = model.provided, None
            await provided.ended()


def _add(routes: Routes, name: str, model: ModelEntry, traffic: TrafficService) -> None:
    ready = {version: v.loaded.runner for version, v in model.versions.items() if v.loaded is not None}
    for version, runner in ready.items():
        routes[name, str(version)] = runner
    loading = [version for version, v in model.versions.items() if v.state is ModelState.LOADING]
    default = traffic.follow(model.name, ready, loading)
    if default is not None:
        routes[name, ""] = default
