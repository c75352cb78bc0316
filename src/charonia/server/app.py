"""The composition root: the only module that knows every part of the server."""

import asyncio
import logging
import ssl
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from charonia import __version__
from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError, invalid, unavailable
from charonia.core.metadata import ModelIndexEntry, ServerMetadata
from charonia.server.access.key_file import KeyFile
from charonia.server.access.options import forwarded_headers, grpc_gate, http_gate
from charonia.server.access_log import AccessLog, LogStream
from charonia.server.backends.registry import installed_backends
from charonia.server.engine import ModelEngine
from charonia.server.execution.busy_poll import BusyPoll
from charonia.server.explain.explainer import Explainer
from charonia.server.facade import LogControl, Services
from charonia.server.grpc.frontend import GrpcFrontend, GrpcLimits
from charonia.server.guard.record import families as process_families
from charonia.server.guard.record_file import read_record
from charonia.server.http.frontend import HttpFrontend, HttpLimits, MetricsFrontend
from charonia.server.lifecycle.backends import Backends
from charonia.server.lifecycle.configure import ConfigureOptions
from charonia.server.lifecycle.lifecycle import Lifecycle, LifecycleOptions
from charonia.server.lifecycle.on_demand import DemandOptions, OnDemandLoader
from charonia.server.lifecycle.repository.options import StoreSettings
from charonia.server.lifecycle.repository.sources import StoreOptions
from charonia.server.listening import GRACE_S, check_address
from charonia.server.log_file import LogFile
from charonia.server.machine.cores import policy_cores, usable_cores
from charonia.server.machine.gauges import MachineSampler
from charonia.server.machine.gpus import GpuSampler, Nvml, visible_gpus
from charonia.server.machine.memory import BUDGET_SHARE, usable_memory
from charonia.server.metrics.devices import PinnedMemory, gpu_families, memory_families, pinned_families
from charonia.server.metrics.metric_families import Family
from charonia.server.metrics.prometheus import PageView, render
from charonia.server.options import ControlMode, EndpointTls, MetricsOptions, ModelOptions, ServerOptions
from charonia.server.rate_limiter.limiter import RateLimits
from charonia.server.rate_limiter.overview import families
from charonia.server.response_cache.memory import LocalCache
from charonia.server.response_cache.options import CacheOptions
from charonia.server.response_cache.redis import RedisCache
from charonia.server.shared_memory.registry import RegionRegistry
from charonia.server.tracing.service import TracingService
from charonia.wire.log_settings import AccessLogFormat, LogOptions

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
)
"""Protocol extensions in server metadata, as clients expect the list."""

SWITCH_INTERVAL_S = 0.0005
"""Longest time that a thread keeps the interpreter while another waits, so that answers leave promptly."""

SETTLE_S = 1.0
"""Pause before the next poll while a change waits for its confirmation."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of servers: uvloop where it is available."""
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop  # not on Windows

    return uvloop.new_event_loop()


class InferenceServer:
    """A server and its parts.

    Attributes:
        engine: The engine that the front ends call.
        http: The HTTP front end, where it is on and started.
        grpc: The gRPC front end, where it is on and started.
        metrics: The metrics page, where it is on and started.
    """

    def __init__(self, options: ServerOptions, *, log: LogControl | None = None) -> None:
        """Create the parts; nothing is loaded or opened yet. To be called on the event loop.

        Args:
            options: All options.
            log: The log, whose settings clients may change; None where it belongs to the embedding program.
        """
        self._options = options
        self._log = log
        self._tracing: TracingService | None = None
        models = options.models
        cores = usable_cores()
        # With a single core, busy polling would starve the thread that it waits for.
        poll_ns = options.busy_poll_us * 1000 if cores > 1 else 0
        busy_poll = BusyPoll(asyncio.get_running_loop(), poll_ns) if poll_ns else None
        self._cache = _make_cache(options.cache)
        self._limits = RateLimits(options.rate_limit.resources) if options.rate_limit.is_on else None
        self._backends = Backends(
            installed_backends(Path(options.backend_directory) if options.backend_directory else None),
            options.backends,
            verbose=options.log.verbose > 0,
            busy_poll=busy_poll,
            limits=self._limits,
            cache=self._cache,
            pinned=PinnedMemory(options.pinned_memory_bytes),
        )
        self._lifecycle = Lifecycle(
            LifecycleOptions(
                repositories=models.repositories,
                control_mode=models.control_mode,
                configure=ConfigureOptions(
                    auto_complete=models.auto_complete, config_name=models.config_name, gpu_count=visible_gpus()
                ),
                cores=options.cpu_cores or cores,
                load_threads=models.load_thread_count,
                load_retries=models.load_retry_count,
                stores=_store_options(models.stores),
                has_namespaces=models.namespacing,
                agents=Path(models.agents) if models.agents else None,
                summarizes=options.metrics.summary_latencies,
                strict_versions=models.strict_versions,
            ),
            self._backends,
        )
        self.engine = ModelEngine(
            self._lifecycle,
            ServerMetadata(options.id, __version__, EXTENSIONS),
            strict_readiness=options.strict_readiness,
        )
        self._demand = self._on_demand(models) if models.control_mode is ControlMode.AUTO else None
        self._backends.models = self.engine
        self._backends.host_cores = policy_cores(options.host_policies)
        self.http: HttpFrontend | None = None
        self.grpc: GrpcFrontend | None = None
        self.metrics: MetricsFrontend | None = None
        self._gpus: GpuSampler | None = None
        self._files = ExitStack()
        self._poller: asyncio.Task[None] | None = None
        self._keys = KeyFile(options.api_keys) if options.api_keys else None
        self._key_watcher: asyncio.Task[None] | None = None
        self._explainer = Explainer(
            self._lifecycle.table.loaded, self.engine.find, options.cpu_cores or cores, read_record
        )
        self._marking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the models, then open the endpoints; whether those can be opened is known before.

        Raises:
            ServingError: A model failed to load and `exit_on_error` is set, or an endpoint cannot be opened. The parts
                that were started stay: call `shutdown`.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        options = self._options
        await self._check_addresses()
        self._tracing = TracingService(options.trace)
        if isinstance(self._cache, RedisCache):
            await self._cache.connect()
        try:
            failures = await self._lifecycle.load_at_start((*options.models.load, *options.models.auto.pinned))
        except ServingError as error:
            if options.exit_on_error:
                raise
            _log.error("%s", error)
            failures = []
        if failures and options.exit_on_error:
            raise invalid(
                "not every model could be loaded:\n" + "\n".join(failures),
                hint="exit_on_error off (--exit-on-error=false) serves the rest",
            )
        await self._open()
        if self._keys is not None:
            self._key_watcher = asyncio.create_task(self._keys.watch(self._keys_changed))
        self._marking = asyncio.create_task(self._explainer.run())
        self.engine.started()
        if options.models.poll_interval_secs:
            self._poller = asyncio.create_task(self._poll(options.models.poll_interval_secs))

    async def shutdown(self) -> bool:
        """Turn not ready, finish the requests in flight, unload everything, close the endpoints when clients are done.

        Returns:
            Whether everything in flight was answered, and the answers taken, within `exit_timeout_secs`.
        """
        end_s = time.monotonic() + self._options.exit_timeout_secs
        self.engine.begin_exit()
        if self._demand is not None:
            self._demand.close()
        if self._poller is not None:
            self._poller.cancel()
        if self._key_watcher is not None:
            self._key_watcher.cancel()
        if self._marking is not None:
            self._marking.cancel()
        front_ends = [f for f in (self.http, self.grpc) if f is not None]
        for front_end in front_ends:
            front_end.stop_accepting()
        finished = await self._drain(self._options.exit_timeout_secs)
        # The last answers have to be written, too, even after the exit timeout.
        left_s = max(end_s - time.monotonic(), GRACE_S)
        taken = await asyncio.gather(*(front_end.drain(left_s) for front_end in front_ends))
        for endpoint in (*front_ends, self.metrics):
            if endpoint is not None:
                await endpoint.close()
        if self._tracing is not None:
            await self._tracing.aclose()
        if finished:
            await self._backends.aclose()
        self._files.close()
        return finished and all(taken)

    def models(self) -> list[ModelIndexEntry]:
        """Return every model with the state of its versions, for the table at start."""
        return self.engine.repository_index() if self.engine.is_live() else []

    def model_config(self, name: str) -> ModelConfig:
        """Return the complete configuration of a model.

        Raises:
            ServingError: It is not ready.
        """
        return self.engine.model_config(name)

    def _keys_changed(self) -> None:
        """End the open streams of keys that are gone."""
        for front_end in (self.http, self.grpc):
            if front_end is not None:
                front_end.recheck()

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

    async def _check_addresses(self) -> None:
        options = self._options
        for is_on, address, port, reuse_port in (
            (options.grpc.enabled, options.grpc.address, options.grpc.port, options.grpc.reuse_port),
            (options.http.enabled, options.http.address, options.http.port, options.http.reuse_port),
            (options.metrics.enabled, options.metrics_address, options.metrics.port, False),
        ):
            if is_on and port:
                await check_address(address, port, reuse_port=reuse_port)

    async def _open(self) -> None:
        options = self._options
        access_log = self._access_log(options.log)
        keys = self._keys.ring if self._keys is not None else None
        services = Services(
            tracing=self._tracing,
            log=self._log,
            http_gate=http_gate(options.http.access, keys),
            grpc_gate=grpc_gate(options.grpc.access, keys),
            http_headers=forwarded_headers(options.http.access),
            grpc_headers=forwarded_headers(options.grpc.access),
            regions=RegionRegistry(options.client_shm_bytes_max) if options.client_shm else None,
            rate_limits=self._limits.view if self._limits is not None else None,
            demand=self._demand.demand if self._demand is not None else None,
            page_scheme=("https" if options.http.tls.active else "http") if options.http.page else "",
            sequences=self.engine.sequences,
            explain=self._explainer.explain,
            cors_origins=options.http.cors_origins,
        )
        if options.grpc.enabled:
            self.grpc = GrpcFrontend(self.engine, GrpcLimits.of(options.grpc), access_log=access_log, services=services)
            await self.grpc.start(
                options.grpc.address,
                options.grpc.port,
                ssl=tls_context(options.grpc.tls, "grpc", alpn="h2"),
                reuse_port=options.grpc.reuse_port,
            )
        if options.http.enabled:
            limits = HttpLimits(body_bytes_max=options.http.input_bytes_max)
            self.http = HttpFrontend(self.engine, limits, access_log=access_log, services=services)
            await self.http.start(
                options.http.address,
                options.http.port,
                ssl=tls_context(options.http.tls, "http", alpn="http/1.1"),
                reuse_port=options.http.reuse_port,
            )
        if options.metrics.enabled:
            machine = MachineSampler(options.metrics.interval_ms) if options.metrics.cpu else None
            if options.metrics.gpu and (nvml := await asyncio.to_thread(Nvml.find)) is not None:
                self._gpus = GpuSampler(nvml, options.metrics.interval_ms)
            self.metrics = MetricsFrontend(
                lambda: render(
                    self.engine.samples(),
                    machine.sample() if machine is not None else None,
                    self._backends.metrics,
                    self._families(),
                    _page_view(options.metrics),
                )
            )
            await self.metrics.start(options.metrics_address, options.metrics.port)

    def _families(self) -> list[Family]:
        """Return the metrics of resources that models share."""
        shared = families(self._limits.view()) if self._limits is not None else []
        shared += self._cache.families() if self._cache is not None else []
        shared += self._device_families()
        shared += process_families(read_record(), time.monotonic_ns())
        return shared + (self._demand.families() if self._demand is not None else [])

    def _device_families(self) -> list[Family]:
        """Return the metrics of GPUs and of the memory of models."""
        gpus = gpu_families(self._gpus.sample()) if self._gpus is not None else []
        return [*gpus, *pinned_families(self._backends.pinned), *memory_families(self.engine.samples())]

    def _on_demand(self, models: ModelOptions) -> OnDemandLoader:
        """Let the engine load models on demand."""
        auto = models.auto
        budget = auto.memory_mb * 2**20 or int(usable_memory() * BUDGET_SHARE)
        options = DemandOptions(budget, frozenset(auto.pinned), auto.waiting_max, auto.wait_secs)
        self.engine.demand = OnDemandLoader(self._lifecycle, options, self.engine.infer_loaded)
        return self.engine.demand

    def _access_log(self, log: LogOptions) -> AccessLog | None:
        if log.access is AccessLogFormat.NONE:
            return None
        stream: LogStream = sys.stderr
        if log.access_file:
            try:
                stream = file = LogFile(log.access_file)
            except OSError as error:
                raise invalid(f"--access-log-file: cannot write '{log.access_file}': {error.strerror}") from error
            self._files.callback(file.close)
        return AccessLog(stream, as_json=log.access is AccessLogFormat.JSON)

    async def _poll(self, interval_s: float) -> None:
        is_pending = False
        while True:
            await asyncio.sleep(min(interval_s, SETTLE_S) if is_pending else interval_s)
            try:
                is_pending = await self._lifecycle.poll()
            except ServingError as error:  # the disk may be back at the next poll
                _log.error("looking for changed models failed: %s", error)
            except Exception:  # a bug of ours or of an agent must not end polling
                _log.exception("looking for changed models failed")


def _make_cache(options: CacheOptions) -> LocalCache | RedisCache | None:
    if options.redis is not None:
        return RedisCache(options.redis)
    return LocalCache(options.size) if options.size else None


def _store_options(settings: StoreSettings) -> StoreOptions:
    defaults = StoreOptions()
    return StoreOptions(
        Path(settings.cache) if settings.cache else defaults.cache, settings.cache_mb * 2**20, settings.downloads
    )


def _page_view(metrics: MetricsOptions) -> PageView:
    return PageView(
        metrics.counter_latencies,
        metrics.histogram_latencies,
        metrics.summary_quantiles if metrics.summary_latencies else (),
        time.monotonic_ns(),
    )


def tls_context(tls: EndpointTls, prefix: str, *, alpn: str) -> ssl.SSLContext | None:
    """Return the TLS context of an endpoint, None for plain text.

    Raises:
        ServingError: INVALID_ARG when a certificate or key cannot be used.
    """
    if not tls.active:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.certificate, tls.key)
        if tls.root:
            context.load_verify_locations(tls.root)
    except (OSError, ssl.SSLError) as error:
        raise invalid(f"--{prefix}-server-cert, --{prefix}-server-key, --{prefix}-root-cert: {error}") from error
    if tls.mutual:
        context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols([alpn])
    return context
