"""The composition root: the only module that knows every part of the server."""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

import uvloop

from charonia import compiled
from charonia.busy_poll import SiblingProcesses, make_busy_poll
from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError, invalid, unavailable
from charonia.core.metadata import PRODUCT, ModelIndexEntry, ServerMetadata
from charonia.core.request import Flow
from charonia.core.statistics import TokenUsage
from charonia.server.backends.api import Models
from charonia.server.backends.registry import installed_backends
from charonia.server.closing import close_safely
from charonia.server.endpoints import Endpoints, allowed_hosts
from charonia.server.engine import ModelEngine
from charonia.server.execution.version_runner import Runner
from charonia.server.explain.explainer import Explainer, explanation_json
from charonia.server.explain.load_reports import EngineLoad
from charonia.server.facade import Document, LogControl, Services
from charonia.server.grpc.frontend import GrpcFrontend
from charonia.server.guard.notify import read_record
from charonia.server.http.frontend import HttpFrontend, MetricsFrontend
from charonia.server.lifecycle.backends import Backends
from charonia.server.lifecycle.configure import ConfigureOptions
from charonia.server.lifecycle.entries import folders_of
from charonia.server.lifecycle.front_end_placement import ExecutionPlacement
from charonia.server.lifecycle.lifecycle import Lifecycle, LifecycleOptions
from charonia.server.lifecycle.load_errors import NOT_ALL_LOADED
from charonia.server.lifecycle.loader import LoadedVersion
from charonia.server.lifecycle.on_demand import DemandOptions
from charonia.server.listening import GRACE_S, check_address
from charonia.server.machine.cores import policy_cores, usable_cores
from charonia.server.machine.gauges import GaugeReader, machine_sampler, process_usage
from charonia.server.machine.gpus import Nvml, visible_gpus
from charonia.server.machine.memory import BUDGET_SHARE, available_memory, usable_memory
from charonia.server.metrics.devices import (
    GpuGauges,
    PinnedMemory,
    gpu_families,
    gpu_pool_families,
    memory_families,
    pinned_families,
)
from charonia.server.metrics.metric_families import Family, family
from charonia.server.metrics.processes import Traffic, traffic_families
from charonia.server.metrics.processes import families as process_families
from charonia.server.metrics.prometheus import PageView, render
from charonia.server.model_options import AutoOptions, ControlMode
from charonia.server.options import ServerOptions
from charonia.server.rate_limiter.limiter import RateLimits
from charonia.server.response_cache.memory import LocalCache
from charonia.server.response_cache.options import CacheOptions
from charonia.server.response_cache.redis import RedisCache
from charonia.server.scaling.instances import InstanceScaler
from charonia.server.scaling.rule import MEMORY_KEPT, FreeMemory, Headroom
from charonia.server.sequences.models import sequences_json
from charonia.server.shared_memory.registry import RegionRegistry
from charonia.server.tracing.service import TracingService
from charonia.version import __version__

_log = logging.getLogger(__name__)

EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
    PRODUCT,
)
"""Protocol extensions in server metadata, as clients expect the list."""

COMPILED = "compiled"
"""One more extension, of a server whose request path is compiled."""

SWITCH_INTERVAL_S = 0.0005
"""Longest time that a thread keeps the interpreter while another waits, so that answers leave promptly."""

SERVES_THE_REST = "--exit-on-error=false, in Python exit_on_error=False, serves the other models"
"""The hint for a server that does not start because of some of its models."""

START_RETRY_S = 10.0
"""Pause before what could not be read or fetched at the start is tried again."""

SETTLE_S = 1.0
"""Pause before the next poll while a change waits for its confirmation."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of servers."""
    return uvloop.new_event_loop()


class FrontEnds(Protocol):
    """What takes the requests of clients: in this process, or in others."""

    async def check(self) -> None:
        """Check, before models are loaded, the requirements of `start`. Raises ServingError."""

    async def start(self, engine: ModelEngine, services: Services) -> None:
        """Take requests. Raises ServingError."""

    def stop_accepting(self) -> None:
        """Accept no more connections, and no more requests on open ones."""

    async def collect(self) -> list[Traffic]:
        """Merge the counters of other processes; return the traffic of the endpoints of each process."""

    def placement(self, runner: Runner) -> ExecutionPlacement | None:
        """Return where the requests of a version run, None for a server of one process."""

    async def drain(self, timeout_s: float) -> bool:
        """Wait for clients to receive their responses, up to a limit; return whether all did."""

    async def close(self) -> None:
        """Close everything immediately."""


class InferenceServer:
    """A server and its parts.

    Attributes:
        engine: The engine that the front ends call.
        metrics: The metrics page, where it is on and started.
    """

    def __init__(
        self,
        options: ServerOptions,
        *,
        log: LogControl | None = None,
        front_ends: FrontEnds | None = None,
        siblings: SiblingProcesses | None = None,
        left_out: Collection[str] = (),
        callable_models: Callable[[Models], Models] | None = None,
    ) -> None:
        """Create the parts; nothing is loaded or opened yet. To be called on the event loop.

        Args:
            options: All options.
            log: The log, whose settings clients may change; None where it belongs to the embedding program.
            front_ends: What takes requests; None for endpoints of this process.
            siblings: The other processes of the server, None where there are none.
            left_out: Models that are not loaded at start, because `front_ends` know how.
            callable_models: Returns the models that Python models can call, given this server's; None for the latter.
        """
        self._options, self._log, self._left_out = options, log, left_out
        self._tracing: TracingService | None = None
        models, cores = options.models, usable_cores(options.cpu_cores)
        self._cache = _make_cache(options.cache)
        self._limits = RateLimits(options.rate_limit.resources) if options.rate_limit.is_on else None
        self._backends = Backends(
            installed_backends(Path(options.backend_directory) if options.backend_directory else None),
            options.backends,
            verbose=options.log.verbose > 0,
            busy_poll=make_busy_poll(options.busy_poll_us, usable_cores(), siblings),
            limits=self._limits,
            cache=self._cache,
            pinned=PinnedMemory(options.pinned_memory_bytes),
            host_cores=policy_cores(options.host_policies),
        )
        self._lifecycle = Lifecycle(
            LifecycleOptions(
                repositories=models.repositories,
                control_mode=models.control_mode,
                configure=ConfigureOptions(
                    auto_complete=models.auto_complete, config_name=models.config_name, gpu_count=visible_gpus()
                ),
                cores=cores,
                load_threads=models.load_thread_count,
                load_retries=models.load_retry_count,
                stores=models.stores,
                has_namespaces=models.namespacing,
                agents=Path(models.agents) if models.agents else None,
                summarizes=options.metrics.summary_latencies,
                strict_versions=models.strict_versions,
            ),
            self._backends,
        )
        self.engine = ModelEngine(
            self._lifecycle,
            ServerMetadata(options.id, __version__, (*EXTENSIONS, *([COMPILED] if compiled.form == COMPILED else []))),
            readiness=options.readiness,
            demand=_demand_options(models.auto, loads_all=models.control_mode is ControlMode.AUTO),
        )
        self._demand = self.engine.demand
        self._backends.models = callable_models(self.engine) if callable_models is not None else self.engine
        self.front_ends: FrontEnds = front_ends if front_ends is not None else Endpoints(options)
        self.metrics: MetricsFrontend | None = None
        self._gpus: GaugeReader[list[GpuGauges]] | None = None
        self._traffic: list[Traffic] = []
        self._poller: asyncio.Task[None] | None = None
        loaded, find, words = self._lifecycle.table.loaded, self.engine.find, self._lifecycle.table.traffic.words
        self._explainer = Explainer(loaded, find, cores, read_record, self.front_ends.placement, words)
        self._scaler = self._make_scaler(loaded)
        self._background: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Load the models, then open the endpoints; whether those can be opened is known before.

        Raises:
            ServingError: A model failed to load and `exit_on_error` is set, or an endpoint cannot be opened. The parts
                that were started stay: call `shutdown`.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        _log.info("charonia %s, %s form", __version__, compiled.form)
        if compiled.problem:
            _log.warning("%s (hint: %s)", compiled.problem, compiled.HINT)
        options = self._options
        await self.front_ends.check()
        if options.metrics.enabled and options.metrics.port and not options.metrics.descriptors:
            await check_address(options.metrics_address, options.metrics.port)
        self._tracing = TracingService(options.trace)
        if isinstance(self._cache, RedisCache):
            await self._cache.connect()
        try:
            failures = await self._load_at_start()
        except ServingError as error:
            if options.exit_on_error:
                raise
            _log.error("%s", error)
            failures = []
        if failures and options.exit_on_error:
            raise invalid(
                f"{NOT_ALL_LOADED}:\n" + "\n".join(failures),
                hint=SERVES_THE_REST if self._lifecycle.table.loaded() else "",
            )
        await self._open(self._tracing)
        self._background = [asyncio.create_task(each.run()) for each in (self._explainer, self._scaler)]
        if self._demand is not None:
            self._background.append(asyncio.create_task(self._demand.unload_idle()))
        self.engine.started()
        if options.models.poll_interval_secs:
            self._poller = asyncio.create_task(self._poll(options.models.poll_interval_secs))
        elif not self._lifecycle.is_complete:
            self._poller = asyncio.create_task(self._load_rest())

    async def shutdown(self) -> bool:
        """Turn not ready, finish the requests in flight, unload everything, close the endpoints when clients are done.

        With an exit delay, the server first asks clients to leave, and still accepts requests.

        Returns:
            Whether everything in flight was answered, and the answers taken, within `exit_timeout_secs`.
        """
        if self._options.exit_delay_secs and isinstance(self.front_ends, Endpoints):  # those in processes have done so
            self.engine.begin_exit(refuses=False)
            await self.front_ends.ask_to_reconnect(self._options.exit_delay_secs)
        end_s = time.monotonic() + self._options.exit_timeout_secs
        self.engine.begin_exit()
        if self._demand is not None:
            self._demand.close()
        if self._poller is not None:
            self._poller.cancel()
        for task in self._background:
            task.cancel()
        self._lifecycle.table.traffic.close()
        self.front_ends.stop_accepting()
        finished = await self._drain(self._options.exit_timeout_secs)
        # The last answers have to be written, too, even after the exit timeout.
        left_s = max(end_s - time.monotonic(), GRACE_S)
        taken = await self.front_ends.drain(left_s)
        await close_safely(self.front_ends.close(), "the endpoints")
        if self.metrics is not None:
            await close_safely(self.metrics.close(), "the endpoint of metrics")
        if self._tracing is not None:
            await close_safely(self._tracing.aclose(), "tracing")
        if finished:
            await self._backends.aclose()
        return finished and taken

    @property
    def http(self) -> HttpFrontend | None:
        """The HTTP front end of this process, where it is on and started."""
        return self.front_ends.http if isinstance(self.front_ends, Endpoints) else None

    @property
    def grpc(self) -> GrpcFrontend | None:
        """The gRPC front end of this process, where it is on and started."""
        return self.front_ends.grpc if isinstance(self.front_ends, Endpoints) else None

    def models(self) -> list[ModelIndexEntry]:
        """Return every model with the state of its versions, for the table at start."""
        return self.engine.index() if self.engine.is_live() else []

    def model_config(self, name: str) -> ModelConfig:
        """Return the complete configuration of a model.

        Raises:
            ServingError: It is not ready.
        """
        return self.engine.model_config(name)

    async def _drain(self, timeout_s: float) -> bool:
        busy = self._lifecycle.table.in_flight()
        if busy:
            _log.info("Timeout %d: Found %d model versions that have in-flight inferences", timeout_s, busy)
        try:
            await asyncio.wait_for(self._lifecycle.drain(), timeout_s)
        except TimeoutError:
            _log.error("Exit timeout expired. Exiting immediately.")
            self._lifecycle.table.abandon(
                unavailable("the server stopped before the request was done: exit timeout expired")
            )
            return False
        return True

    async def _open(self, tracing: TracingService) -> None:
        options = self._options
        await self.front_ends.start(self.engine, self._services(tracing))
        if options.metrics.enabled:
            machine = machine_sampler(options.metrics.interval_ms) if options.metrics.cpu else None
            if options.metrics.gpu and (nvml := await asyncio.to_thread(Nvml.find)) is not None:
                self._gpus = GaugeReader(nvml.read, options.metrics.interval_ms)
            self.metrics = MetricsFrontend(
                lambda: render(
                    self.engine.samples(),
                    machine.sample() if machine is not None else None,
                    self._backends.metrics,
                    self._families(),
                    PageView(
                        options.metrics.counter_latencies,
                        options.metrics.histogram_latencies,
                        options.metrics.summary_quantiles if options.metrics.summary_latencies else (),
                        time.monotonic_ns(),
                    ),
                ),
                self._collect,
                allowed_hosts(options, options.metrics_address),
            )
            await self.metrics.start(
                options.metrics_address, options.metrics.port, descriptors=options.metrics.descriptors
            )

    def _services(self, tracing: TracingService) -> Services:
        options, limits, demand = self._options, self._limits, self._demand

        async def rate_limits() -> Document:
            return limits.document() if limits is not None else {}

        async def sequences(name: str, version: str) -> Document:
            return sequences_json(self.engine.sequences(name, version))

        async def explain(name: str, version: str) -> Document:
            return explanation_json(self._explainer.explain(name, version))

        async def folders(name: str, version: str) -> list[str]:
            return folders_of(self._lifecycle.table.models.values(), self.engine.find(name, version))

        async def count_tokens(name: str, usage: TokenUsage, flow: Flow) -> None:
            if flow.key:
                self.engine.usage.count_tokens(flow, usage)
            self.engine.find(name).metrics.count_tokens(usage)

        return Services(
            tracing=tracing,
            log=self._log,
            regions=RegionRegistry(options.client_shm_bytes_max) if options.client_shm else None,
            rate_limits=rate_limits if limits is not None else None,
            demand=demand.demand if demand is not None else None,
            sequences=sequences,
            explain=explain,
            folders=folders,
            count_tokens=count_tokens,
            traffic=self._lifecycle.table.traffic,
            load=EngineLoad(
                options.metrics.load,
                lambda: [version.runner for version in self._lifecycle.table.loaded()],
                self._backends.metrics,
            ),
        )

    async def _collect(self) -> None:
        self._traffic = await self.front_ends.collect()

    def _families(self) -> list[Family]:
        """Return the metrics of resources that models share."""
        labels = {"version": __version__, "form": compiled.form}
        shared = [family("charonia_build_info", "gauge", "Version and form of the server", (1, labels))]
        shared.append(self.engine.readiness())
        shared += self._limits.families() if self._limits is not None else []
        shared += self._cache.families() if self._cache is not None else []
        shared += self.engine.usage.families()
        shared += self._device_families()
        shared += process_families(read_record(), time.monotonic_ns(), process_usage)
        shared += traffic_families(self._traffic)
        shared += self._lifecycle.table.traffic.families()
        return shared + (self._demand.families() if self._demand is not None else [])

    def _device_families(self) -> list[Family]:
        """Return the metrics of GPUs and of the memory of models."""
        gpus = gpu_families(self._gpus.sample()) if self._gpus is not None else []
        pools = [*pinned_families(self._backends.pinned), *gpu_pool_families(self._backends.gpu_pools)]
        return [*gpus, *pools, *memory_families(self.engine.samples())]

    def _make_scaler(self, loaded: Callable[[], list[LoadedVersion]]) -> InstanceScaler:
        return InstanceScaler(
            lambda: [version.scaling for version in loaded() if version.scaling is not None],
            lambda: sum(worker.cpu_seconds for version in loaded() for worker in version.workers()),
            self._headroom,
        )

    def _headroom(self) -> Headroom:
        """Return the free capacity of the machine for more instances."""
        memories = [FreeMemory("memory", available_memory(), int(usable_memory() * MEMORY_KEPT))]
        if self._demand is not None:
            memories.append(FreeMemory("the memory budget of models", self._demand.free_bytes(), 0))
        for number, gpu in enumerate(self._gpus.sample() if self._gpus is not None else ()):
            total, used = gpu.memory_total_bytes, gpu.memory_used_bytes
            if total is not None and used is not None:
                memories.append(
                    FreeMemory(f"the memory of GPU {number}", total - used, int(total * MEMORY_KEPT), number)
                )
        return Headroom(usable_cores(self._options.cpu_cores), memories=tuple(memories))

    async def _load_at_start(self) -> list[str]:
        models = self._options.models
        return await self._lifecycle.load_at_start((*models.load, *models.auto.pinned), self._left_out)

    async def _load_rest(self) -> None:
        """Try again what could not be read or fetched at the start; who polls does so anyway."""
        while not self._lifecycle.is_complete:
            await asyncio.sleep(START_RETRY_S)
            try:
                await self._load_at_start()
            except ServingError as error:
                _log.error("%s", error)

    async def _poll(self, interval_s: float) -> None:
        is_pending = False
        while True:
            await asyncio.sleep(min(interval_s, SETTLE_S) if is_pending else interval_s)
            try:
                is_pending = await self._lifecycle.poll()
            except ServingError as error:  # the disk may be back at the next poll
                _log.error("the check for changed models failed: %s", error)
            except Exception:  # a bug of ours or of an agent must not end polling
                _log.exception("the check for changed models failed")


def _make_cache(options: CacheOptions) -> LocalCache | RedisCache | None:
    if options.redis is not None:
        return RedisCache(options.redis)
    return LocalCache(options.size) if options.size else None


def _demand_options(auto: AutoOptions, *, loads_all: bool) -> DemandOptions | None:
    if not (loads_all or auto.idle_secs):
        return None
    budget = auto.memory_mb * 2**20 or int(usable_memory() * BUDGET_SHARE) if loads_all else sys.maxsize
    return DemandOptions(auto, budget, loads_all=loads_all)
