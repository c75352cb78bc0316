"""The backends of one server, made when the first model needs them and closed together, and what models share."""

import asyncio
from collections.abc import Callable, Mapping, Set

from charonia.busy_poll import BusyPoll
from charonia.core.errors import invalid
from charonia.server.backends.api import Backend, BackendSettings, Models
from charonia.server.closing import close_safely
from charonia.server.execution.deadlock import DeadlockDetector
from charonia.server.metrics.custom import CustomMetrics
from charonia.server.metrics.devices import MemoryAccount, PinnedMemory, device_metric_names
from charonia.server.metrics.processes import traffic_metric_names
from charonia.server.metrics.prometheus import metric_names
from charonia.server.rate_limiter.limiter import RateLimits
from charonia.server.response_cache.api import ResponseCache
from charonia.server.scheduling.api import Scheduler


class Backends:
    """Backends by name.

    Args:
        factories: Makes a backend, by its name.
        settings: Settings of `--backend-config` by backend name; "" holds the global ones.
        verbose: Whether verbose logging is on.
        observed: Wraps each scheduler, for tests.

    Attributes:
        models: Runs the calls that models make to other models; set once, before the first model is loaded.
        deadlocks: The deadlock detector.
        host_cores: Numbers of cores by host policy.
        metrics: The metrics that models define themselves.
        busy_poll: Keeps threads awake between requests, None without busy polling.
        limits: The resources that instances share, None without a rate limiter.
        cache: Where responses are kept, None without a response cache.
        pinned: Pinned memory of all models.
        gpu_pools: Blocks of the memory of GPUs, by number of the GPU.
    """

    def __init__(
        self,
        factories: Mapping[str, Callable[[], Backend]],
        settings: Mapping[str, Mapping[str, str]] | None = None,
        *,
        verbose: bool = False,
        busy_poll: BusyPoll | None = None,
        limits: RateLimits | None = None,
        cache: ResponseCache | None = None,
        pinned: PinnedMemory | None = None,
        observed: Callable[[Scheduler], Scheduler] = lambda scheduler: scheduler,
        host_cores: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self._factories = factories
        self._settings = settings or {}
        self._verbose = verbose
        self.observed = observed
        self.models: Models | None = None
        self.host_cores = host_cores or {}
        self.deadlocks = DeadlockDetector()
        self.busy_poll = busy_poll
        self.limits = limits
        self.cache = cache
        self.pinned = pinned or PinnedMemory()
        self.gpu_pools: dict[int, MemoryAccount] = {}
        self.metrics = CustomMetrics(reserved=(*metric_names(), *device_metric_names(), *traffic_metric_names()))
        self._made: dict[str, Backend] = {}
        self._making = asyncio.Lock()

    @property
    def names(self) -> Set[str]:
        return self._factories.keys()

    async def get(self, name: str, model: str) -> Backend:
        """Return the backend called `name`.

        Raises:
            ServingError: INVALID_ARG when there is none; `model` is the model that asked.
        """
        backend = self._made.get(name)
        if backend is None:
            factory = self._factories.get(name)
            if factory is None:
                raise invalid(
                    f"unable to find backend '{name}' for model '{model}'",
                    hint=f"installed backends: {', '.join(sorted(self._factories))}",
                )
            async with self._making:
                backend = self._made.get(name)
                if backend is None:
                    # In a thread: importing a framework would block the models that already answer.
                    backend = self._made[name] = await asyncio.to_thread(factory)
        return backend

    def settings(self, name: str) -> BackendSettings:
        """Return the settings that apply to a backend: its own over the global ones.

        Raises:
            ServingError: INVALID_ARG for a `default-max-batch-size` other than a number.
        """
        values = {**self._settings.get("", {}), **self._settings.get(name, {})}
        text = values.get("default-max-batch-size", "4")
        try:
            default_max_batch_size = int(text)
        except ValueError:
            raise invalid(f"--backend-config default-max-batch-size: expected an integer, got {text!r}") from None
        return BackendSettings(
            values, default_max_batch_size, self._verbose, self.models, self.metrics, self.busy_poll,
            self.pinned, self.gpu_pools,
        )  # fmt: skip

    async def aclose(self) -> None:
        """Close every backend that was made, and the cache."""
        if self.cache is not None:
            await close_safely(self.cache.aclose(), "the response cache")
        for name, backend in self._made.items():
            await close_safely(backend.aclose(), f"backend '{name}'")
        self._made.clear()
