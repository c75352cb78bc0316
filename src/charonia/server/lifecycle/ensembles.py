"""The ensembles of a server: each is planned again whenever a model of its steps changes."""

import logging
from collections.abc import Collection

from charonia.core.errors import ServingError, invalid
from charonia.core.metadata import ModelState, name_of
from charonia.core.request import InferRequest
from charonia.core.response import Reply, Ticket
from charonia.server.ensembles.call import EnsembleRunner, Infer, InferAtOnce, never_at_once
from charonia.server.ensembles.plan import EnsemblePlan
from charonia.server.lifecycle.ensemble_dependencies import Composition, cycle, dependents, plan_of
from charonia.server.lifecycle.entries import AMBIGUOUS, ModelEntry, VersionEntry
from charonia.server.lifecycle.loader import LoadedVersion, behind_cache, ensemble_namespace
from charonia.server.lifecycle.model_table import ModelTable
from charonia.server.response_cache.api import ResponseCache
from charonia.server.response_cache.runner import CachedRunner

_log = logging.getLogger(__name__)


def _no_engine(request: InferRequest, reply: Reply) -> Ticket:
    raise RuntimeError(f"there is no engine to run {request}")


class Ensembles:
    """Makes the plans of ensembles, and renews them when a model of theirs changes.

    Args:
        table: Every model.
        cache: Where responses are kept, None without a response cache.

    Attributes:
        infer: Runs the request of a step; set by the engine.
        infer_at_once: Runs it before it returns, where that is possible; set by the engine.
    """

    def __init__(self, table: ModelTable, cache: ResponseCache | None = None) -> None:
        self.infer: Infer = _no_engine
        self.infer_at_once: InferAtOnce = never_at_once
        self._table = table
        self._models = table.models
        self._cache = cache

    def record(self, model: ModelEntry, composition: Composition) -> None:
        """Record the composition of an ensemble.

        Raises:
            ServingError: INVALID_ARG: it contains itself.
        """
        model.composition = composition
        circle = cycle(model.name, self._compositions())
        if circle:
            raise invalid(f"circular dependency between ensembles: {' -> '.join(circle)}")

    def missing(self, composition: Composition) -> list[str]:
        return [name for name in composition.models if name not in self._models or not self._models[name].is_loaded]

    def culprits(self, name: str) -> set[str]:
        """Return the models that could not be loaded and without which an ensemble cannot answer.

        They are models of its steps, or of ensembles among these; none where the fault is its own.
        """
        found: set[str] = set()
        seen, left = {name}, [name]
        while left:
            composition = self._models[left.pop()].composition
            for member in self.missing(composition) if composition is not None else []:
                if member in seen or not self._failure(member):
                    continue
                seen.add(member)
                inner = self._models[member].composition
                if inner is not None and self.missing(inner):
                    left.append(member)
                else:
                    found.add(member)
        return found

    def needs(self, name: str) -> bool:
        return any(name in composition.models for composition in self._compositions().values())

    def of_steps(self, names: Collection[str]) -> list[str]:
        """Return the ensembles with a step that names one of these models, in whatever namespace."""
        compositions = self._compositions().items()
        return [key for key, each in compositions if any(name_of(step) in names for step in each.models)]

    def load(self, composition: Composition, version: int) -> LoadedVersion:
        """Return a version of an ensemble that is ready to run.

        Raises:
            ServingError: INVALID_ARG with everything that does not fit.
        """
        return self._load(version, plan_of(composition, self._answering, self._failure), self._namespace(composition))

    def follow(self, name: str) -> None:
        """Update the ensembles that contain a model, and the model itself where it is an ensemble."""
        for ensemble in (name, *dependents(name, self._compositions())):
            model = self._models.get(ensemble)
            # An ensemble that is being loaded does this itself at the end.
            if model is None or model.composition is None or model.lock.locked():
                continue
            try:
                plan = plan_of(model.composition, self._answering, self._failure)
            except ServingError as error:
                self._take_down(model, model.composition, str(error))
            else:
                self._replace_plans(model, model.composition, plan)

    def _replace_plans(self, model: ModelEntry, composition: Composition, plan: EnsemblePlan) -> None:
        model.failure = ""
        namespace = self._namespace(composition)
        for version in composition.versions:
            entry = model.versions.setdefault(version, VersionEntry())
            runner = entry.loaded.runner if entry.loaded is not None else None
            inner = runner.inner if isinstance(runner, CachedRunner) else runner
            if runner is not None and isinstance(inner, EnsembleRunner):
                inner.replace_plan(plan)
                if isinstance(runner, CachedRunner):
                    runner.renew(namespace)
                entry.loaded = LoadedVersion(runner, None, plan.labels, cache_namespace=namespace)
            else:
                entry.loaded, entry.state, entry.reason = self._load(version, plan, namespace), ModelState.READY, ""
                _log.info("ensemble '%s' version %d is ready: its models are there", model.name, version)
        self._table.route(model)

    def _take_down(self, model: ModelEntry, composition: Composition, reason: str) -> None:
        """Mark an ensemble as unavailable, and retire the versions that answered until now."""
        if model.failure:
            return
        for version in composition.versions:
            entry = model.versions.setdefault(version, VersionEntry())
            if entry.loaded is not None:
                _log.warning("ensemble '%s' version %d is unavailable: %s", model.name, version, reason)
                self._table.retire(entry.loaded)
            entry.loaded, entry.state, entry.reason = None, ModelState.UNAVAILABLE, reason
        self._table.route(model)

    def _load(self, version: int, plan: EnsemblePlan, namespace: bytes) -> LoadedVersion:
        runner = behind_cache(
            EnsembleRunner(str(version), plan, self.infer, self.infer_at_once), self._cache, namespace
        )
        return LoadedVersion(runner, None, plan.labels, cache_namespace=namespace)

    def _namespace(self, composition: Composition) -> bytes:
        if self._cache is None:
            return b""
        models = [self._models[name] for name in composition.models if name in self._models]
        members = [
            (m.name, v, e.loaded.cache_namespace) for m in models for v, e in m.versions.items() if e.loaded is not None
        ]
        return ensemble_namespace(composition.config, members)

    def _compositions(self) -> dict[str, Composition]:
        return {name: model.composition for name, model in self._models.items() if model.composition is not None}

    def _answering(self, name: str, version: int) -> LoadedVersion | None:
        """Return a version that answers; 0 for the highest."""
        model = self._models.get(name)
        loaded = {v: entry.loaded for v, entry in model.versions.items()} if model is not None else {}
        return loaded.get(version or max((v for v, there in loaded.items() if there is not None), default=0))

    def _failure(self, name: str) -> str | None:
        """Return why a model could not be loaded, "" for an unknown reason, None for an unknown model."""
        model = self._models.get(name)
        return None if model is None or model.failure.startswith(AMBIGUOUS) else model.problem
