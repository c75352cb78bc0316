"""The implementation of `Engine` that front ends call, over the life cycle and its runners."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from charonia.clock import now_ns
from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError, invalid, turned_away, unavailable
from charonia.core.metadata import ModelIndexEntry, ModelMetadata, ModelState, ServerMetadata
from charonia.core.request import InferRequest
from charonia.core.response import ANSWERED, InferResponse, Reply, Ticket
from charonia.core.statistics import ModelStatistics
from charonia.server.directory import (
    Directory,
    ModelRequests,
    ModelView,
    VersionView,
    bad_version,
    change_model,
    is_version,
    metadata_of,
    missing,
    models_at,
    target_of,
)
from charonia.server.execution.admission import with_request_id
from charonia.server.execution.runner import ModelRunner
from charonia.server.execution.version_runner import Runner
from charonia.server.lifecycle.lifecycle import Lifecycle
from charonia.server.lifecycle.offers import Offers
from charonia.server.lifecycle.on_demand import DemandOptions, OnDemandLoader
from charonia.server.metrics.key_usage import Usage
from charonia.server.metrics.metric_families import Family, family
from charonia.server.metrics.prometheus import ModelSample
from charonia.server.model_options import ReadyWhen
from charonia.server.sequences.models import ModelSequences, open_sequences, sequences_of
from charonia.server.traffic.split import unsplit


class ModelEngine:
    """A server's models, behind the `Engine` interface.

    Attributes:
        demand: Loads models on demand; None where it never has to.
        usage: Counts the requests of API keys.
        offers: The models that front ends in other processes load, too.
        traffic: How requests without a version are split.
        open_sequences: Returns the sequences that have begun and not ended: model and id.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        metadata: ServerMetadata,
        *,
        readiness: ReadyWhen = ReadyWhen.ALL_MODELS,
        demand: DemandOptions | None = None,
    ) -> None:
        self.demand = OnDemandLoader(lifecycle, demand, self.infer_loaded) if demand is not None else None
        self.usage = Usage(now_ns)
        self.offers = Offers(lifecycle.table)
        self._requests: ModelRequests | None = None  # observes loads and unloads by request before they are answered
        self._lifecycle = lifecycle
        self._routes = lifecycle.table.routes
        self.traffic = lifecycle.table.traffic
        self.open_sequences = partial(open_sequences, self._routes)
        self._models = lifecycle.table.models
        self._metadata = metadata
        self._readiness = readiness
        self._awaited: set[str] = set()  # models of the startup that have not been ready yet
        self._is_started = False
        self._is_leaving = False
        self._is_exiting = False
        self._connect()

    def _connect(self) -> None:
        """Connect the parts below, which were created first, to this engine."""
        ensembles = self._lifecycle.ensembles
        ensembles.infer, ensembles.infer_at_once = self.infer, self.infer_at_once
        if self.demand is not None:
            self._lifecycle.load_steps = self.demand.load_all
            self.traffic.demand = self.demand.demand

    def keep_changes(self, keeper: ModelRequests) -> None:
        """Report the changes that requests make from now on, before they are answered."""
        self._requests, self.traffic.keep = keeper, keeper.traffic_changed

    def started(self) -> None:
        """Turn ready: the models of the startup are loaded."""
        self._is_started = True
        self._awaited = {key for key, model in self._models.items() if model.wanted}
        self._lifecycle.table.notify()

    def begin_exit(self, *, refuses: bool = True) -> None:
        """Turn not ready, and with `refuses` reject new requests. Requests in flight continue."""
        self._is_leaving = True
        self._is_exiting = refuses
        self._lifecycle.table.notify()

    def on_change(self, changed: Callable[[], None]) -> None:
        self._lifecycle.table.on_change = changed

    def infer(self, request: InferRequest, reply: Reply) -> Ticket:
        """Run a request. See `Engine.infer`."""
        if request.flow.key and request.caller is None:
            counted = self.usage.begin(request.flow, reply)
            if counted is None:
                return ANSWERED
            reply = counted
        runner = self._routes.get((request.model_name, request.model_version))
        if runner is not None and not self._is_exiting:
            return runner.submit(request, reply)
        if self.demand is not None and not self._is_exiting:
            ticket = self.demand.submit(request, reply)
            if ticket is not None:
                return ticket
        return self.infer_loaded(request, reply)

    def infer_at_once(self, request: InferRequest) -> InferResponse | ServingError | None:
        """Run a request as `Runner.run_at_once` does; None if it needs `infer`."""
        runner = self._routes.get((request.model_name, request.model_version))
        return runner.run_at_once(request) if runner is not None and not self._is_exiting else None

    def infer_together(self, requests: Sequence[InferRequest]) -> list[InferResponse | ServingError]:
        """Run requests of equal forms as `ModelRunner.run_together` does; none if they need `infer`."""
        if any(request.flow.key for request in requests):
            return []
        runner = self._routes.get((requests[0].model_name, requests[0].model_version))
        return runner.run_together(requests) if isinstance(runner, ModelRunner) and not self._is_exiting else []

    def infer_loaded(self, request: InferRequest, reply: Reply) -> Ticket:
        """Run a request of a model that is loaded, or answer that it is not."""
        try:
            self.find(request.model_name, request.model_version)
            if self._is_exiting and request.caller is None:  # requests in flight may call other models
                message = "Server is stopping, scheduler for model has stopped accepting new inference requests"
                raise with_request_id(turned_away(message), request)
        except ServingError as error:
            reply(error, True)
            return ANSWERED
        return self._routes[target_of(request.model_name, request.model_version)].submit(request, reply)

    def is_live(self) -> bool:
        """Whether the server can answer at all: false while its repositories could never be read."""
        return not self._lifecycle.unread

    def is_ready(self) -> bool:
        """Whether the server is ready for inference."""
        if not self._is_started or self._is_leaving or self._lifecycle.unread:
            return False
        if self._readiness is ReadyWhen.ANY_TIME:
            return True
        # Models that are loaded on demand do not count for the server's readiness.
        needed = self.demand.counts_for_readiness if self.demand is not None else lambda _: True
        unready = {k for k, model in self._models.items() if model.wanted and not model.is_ready and needed(k)}
        if self._readiness is ReadyWhen.AT_START:
            unready = self._awaited = self._awaited & unready
        return self._lifecycle.is_complete and not unready

    def is_exiting(self) -> bool:
        return self._is_exiting

    async def model_ready(self, name: str, version: str = "") -> bool:
        """Whether a version of the model is ready; False while all of its workers are restarting."""
        try:
            runner = self.find(name, version)
        except ServingError:
            if not is_version(version) or self._lifecycle.unread:
                raise
            return not version and self.is_loadable(name) and not self._is_exiting
        loaded = next((each for each in self._lifecycle.table.loaded() if each.runner is runner), None)
        return not self._is_exiting and loaded is not None and not loaded.is_down and await loaded.is_ready()

    def server_metadata(self) -> ServerMetadata:
        return self._metadata

    def model_metadata(self, name: str, version: str = "") -> ModelMetadata:
        return metadata_of(self.find(name, version).config, name, version, self._routes)

    def is_loadable(self, name: str) -> bool:
        """Whether a request for a model that is not loaded waits until it is."""
        return self.demand is not None and self.demand.is_loadable(name)

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        return self.find(name, version).config

    def models_at(self, path: str) -> Mapping[bytes, str]:
        return models_at(path, ((target, runner.config) for target, runner in self._routes.items()))

    async def model_statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        """Return statistics of loaded versions."""
        runners = sorted(
            ((n, int(v), runner) for (n, v), runner in self._routes.items() if v and (name or n in self._models)),
            key=lambda item: item[:2],
        )
        _check_read(self._lifecycle.unread)
        if not name:
            return [runner.metrics.statistics for _, _, runner in runners]
        if not is_version(version):
            raise bad_version(version)
        of_model = [(v, runner) for n, v, runner in runners if n == name]
        if not of_model:
            raise invalid(f"requested model '{name}' is not available")
        chosen = [runner for v, runner in of_model if not version or v == int(version)]
        if not chosen:
            raise invalid(f"requested model version is not available for model '{name}': {version}")
        return [runner.metrics.statistics for runner in chosen]

    async def repository_index(self, ready_only: bool = False) -> list[ModelIndexEntry]:
        entries = self.index()
        return [e for e in entries if e.state is ModelState.READY] if ready_only else entries

    def index(self) -> list[ModelIndexEntry]:
        """Return every model in the repositories with the state of its versions."""
        _check_read(self._lifecycle.unread)
        return self._lifecycle.index()

    async def load_model(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load or reload a model."""

        async def load() -> None:
            await self._lifecycle.load(name, config, files)
            if self._requests is not None:
                await self._requests.model_loaded(name, config, files, self._lifecycle.is_overridden(name))

        await change_model(self._requests, name, load)

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        """Start to unload a model, with `unload_dependents` also the models loaded only for this ensemble."""

        async def unload() -> None:
            left = await self._lifecycle.unload(name, unload_dependents)
            if self.demand is not None:
                self.demand.exclude(name)
            if self._requests is not None:
                self._requests.model_unloaded(name, unload_dependents)
                for step in left:  # nothing else would load them in an engine that follows
                    await self._requests.model_loaded(step, None, None, False)

        await change_model(self._requests, name, unload)

    def sequences(self, name: str, version: str = "") -> ModelSequences:
        """Return the slots and the backlog of a model that works on sequences.

        Raises:
            ServingError: As `model_config`; INVALID_ARG for a model without sequence batching.
        """
        return sequences_of(self.find(name, version), name)

    def samples(self) -> list[ModelSample]:
        return [
            ModelSample(
                loaded.runner.metrics, loaded.runner.config.metric_tags, loaded.runner.pending, loaded.workers(),
                loaded.scaling.counts() if loaded.scaling is not None else None, loaded.instances,
            )
            for loaded in self._lifecycle.table.loaded()
        ]  # fmt: skip

    def readiness(self) -> Family:
        """Return the metric that says which models that should answer do."""
        wanted = ((key, model) for key, model in sorted(self._models.items()) if model.wanted)
        samples = ((int(model.is_ready), {"model": key}) for key, model in wanted)
        return family("charonia_model_ready", "gauge", "Whether a model that should answer does", *samples)

    def find(self, name: str, version: str = "") -> Runner:
        """Return the runner of a version of a model, "" for the version with most of the requests that name none.

        Raises:
            ServingError: The version does not exist, or is not ready.
        """
        runner = self._routes.get(target_of(name, version))
        if runner is None:
            raise missing(name, version, self._routes, self._models, self._lifecycle.unread)
        return unsplit(runner)

    def directory(self) -> Directory:
        return Directory(
            {target: unsplit(runner).config for target, runner in self._routes.items()},
            {
                key: ModelView(model.failure, {n: VersionView(v.state, v.reason) for n, v in model.versions.items()})
                for key, model in self._models.items()
            },
            self._lifecycle.unread,
        )


def _check_read(unread: str) -> None:
    """Raise UNAVAILABLE while the repositories could never be read."""
    if unread:
        raise unavailable("Server not ready", hint=unread)
