"""Measuring a trial: load on one model or several at once, made by the load generator in processes that are kept.

A process that sends load takes longer to start than a short measurement, so those of a model and batch size stay for
the next trial; the connections to the server stay with them.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace

from charonia.client.sync_client import Client
from charonia.perf import resources
from charonia.perf.api import InputSource, MeasurementMode, RunSettings, Stop, silent
from charonia.perf.level import measure
from charonia.perf.observer import Observer
from charonia.perf.pool import Pool, pool, process_count
from charonia.perf.run import STATISTICS_EXTENSION, Subject
from charonia.perf.running import Context
from charonia.results.records import LevelResult, LoadLevel, LoadMode, Verdict
from charonia.tune.api import LoadPoint
from charonia.tune.deployment import ServerLostError
from charonia.tune.servers import Server, fate_of

PRECISION = 0.02
"""Half-width of the confidence intervals that ends a measurement of full effort before its time."""

STEADY_SHARE = 0.4
"""Least part of the longest time of a measurement: a steady model needs no more."""

REQUESTS_MIN = 10
"""Fewer answers say too little: a slow model is measured again, for longer."""

SLOW_SECONDS_MAX = 60.0
ATTEMPTS_MAX = 4
GROWTH_MAX = 8.0

WARMUP_SHARE = 0.1
"""Part of a second's requests that warm up a variant under a request rate; under a concurrency it is one each."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A load, ready to be sent.

    Attributes:
        settings: What the load generator takes, without load and duration.
        source: The requests.
        subject: The model as the server has it now.
        is_timed: Whether the user has said how it is to be measured.
    """

    settings: RunSettings
    source: InputSource
    subject: Subject
    is_timed: bool = False


Prepare = Callable[[Client, LoadPoint, Server], Prepared]
"""Makes a load ready; raises ServingError where the model takes no such requests."""


class InterruptedTrialError(Exception):
    """The user wants the end; the trial was not measured to the end."""


class Measurer:
    """Measures trials on one server. Use `close` at the end.

    Args:
        server: The server.
        prepare: Makes loads ready.
        time_s: Longest time of a measurement of full effort.
        percentiles: The percentile of each model that has to be known well, None for the mean.
        composing: Models whose statistics belong to a model's, by its name.
        stop: A wish to end.
        metrics_interval_s: Time between two looks at the metrics page, 0 for none: only GPUs need it.
    """

    def __init__(
        self,
        server: Server,
        prepare: Prepare,
        time_s: float,
        percentiles: Mapping[str, float | None],
        composing: Mapping[str, Sequence[str]],
        stop: Stop,
        metrics_interval_s: float = 0.0,
    ) -> None:
        self._server = server
        self._prepare = prepare
        self._time_s = time_s
        self._percentiles = percentiles
        self._composing = composing
        self._stop = stop
        self._metrics_interval_s = metrics_interval_s
        self._pools: dict[tuple[str, int, int, int], Pool] = {}
        self._stack = ExitStack()
        self._processes: resources.ServerProcesses | None = None
        self._has_looked = False
        self._least_s: dict[LoadPoint, float] = {}

    def close(self) -> None:
        """End the processes that send load; the next measurement starts new ones."""
        self._stack.close()
        self._pools.clear()
        self._has_looked = False

    def check(self) -> None:
        """Check that nobody wants the end.

        Raises:
            InterruptedTrialError: Somebody does.
        """
        if self._stop.requested:
            raise InterruptedTrialError

    def memory_mb(self) -> float | None:
        """Return the memory of the server's processes, None where they are not here."""
        processes = self._find()
        sample = processes.sample() if processes is not None else None
        return sample[1] / 1e6 if sample is not None else None

    def measure(self, loads: Sequence[LoadPoint], effort: float, *, is_fresh: bool) -> dict[str, LevelResult]:
        """Measure loads at the same time and return what was found, by model.

        Args:
            loads: One a model.
            effort: Share of the usual time.
            is_fresh: Whether the variant has just been loaded, and warms up first.

        Raises:
            InterruptedTrialError: The user wants the end.
            ServerLostError: The server is gone.
            ServingError: The load cannot be sent.
        """
        for attempt in range(ATTEMPTS_MAX):
            contexts = [self._context(load, effort, is_fresh and not attempt) for load in loads]
            results = self._together(loads, contexts)
            longer = [
                self._takes_longer(load, context, result)
                for load, context, result in zip(loads, contexts, results, strict=True)
            ]
            if not any(longer):
                break
        return {load.model: result for load, result in zip(loads, results, strict=True)}

    def _together(self, loads: Sequence[LoadPoint], contexts: Sequence[Context]) -> list[LevelResult]:
        if len(contexts) == 1:
            results = [_measured(contexts[0], loads[0])]
        else:
            with ThreadPoolExecutor(len(contexts)) as threads:
                results = list(threads.map(_measured, contexts, loads))
        self.check()
        if any(result.verdict is Verdict.SERVER_LOST for result in results):
            raise ServerLostError(fate_of(self._server) or "the server stopped answering")
        return results

    def _takes_longer(self, load: LoadPoint, context: Context, result: LevelResult) -> bool:
        """Return whether a slow model needs more time than it had; it is given it from now on."""
        plan = context.settings.measure
        if plan.mode is not MeasurementMode.ADAPTIVE or result.error_count or result.request_count >= REQUESTS_MIN:
            return False
        if plan.time_max_s >= SLOW_SECONDS_MAX:
            return False
        growth = min(GROWTH_MAX, 1.2 * REQUESTS_MIN / max(result.request_count, 1))
        self._least_s[load] = min(SLOW_SECONDS_MAX, plan.time_max_s * growth)
        return True

    def _context(self, load: LoadPoint, effort: float, is_fresh: bool) -> Context:
        prepared = self._prepare(self._server.client, load, self._server)
        settings = prepared.settings
        plan = replace(
            settings.measure,
            warmup_request_count=_warmup(load) if is_fresh else 0,
            percentile=settings.measure.percentile or self._percentiles.get(load.model),
        )
        if not prepared.is_timed:
            longest_s = max(self._time_s * effort, self._least_s.get(load, 0.0))
            plan = replace(
                plan,
                mode=MeasurementMode.ADAPTIVE,
                precision=PRECISION / effort,
                time_max_s=longest_s,
                time_min_s=longest_s * STEADY_SHARE,
            )
        side = settings.server
        if self._metrics_interval_s and not side.metrics_url:
            interval_ms = max(1, int(self._metrics_interval_s * effort * 1000))
            side = replace(side, metrics_url=self._server.metrics_url, metrics_interval_ms=interval_ms)
        settings = replace(
            settings,
            server=side,
            measure=plan,
            load=replace(settings.load, mode=load.mode, start=load.value, end=load.value, step=1.0),
        )
        observer = Observer(
            self._server.client,
            settings,
            [(name, "") for name in self._composing.get(load.model, ())],
            STATISTICS_EXTENSION in prepared.subject.server.extensions,
            self._find(),
        )
        return Context(
            pool=self._pool(load, settings, prepared),
            observer=observer,
            settings=settings,
            batch_size=load.batch_size,
            progress=silent,
            stop=self._stop,
        )

    def _pool(self, load: LoadPoint, settings: RunSettings, prepared: Prepared) -> Pool:
        batches = int(prepared.subject.config.get("max_batch_size", 0)) > 0
        is_rate = load.mode is not LoadMode.CONCURRENCY
        count = process_count(settings.load.process_count_max, load.value, is_rate, _cores())
        key = (load.model, load.batch_size, batches, count)
        if key not in self._pools:
            self._pools[key] = self._stack.enter_context(pool(settings, prepared.source, count))
        return self._pools[key]

    def _find(self) -> resources.ServerProcesses | None:
        if not self._has_looked:
            self._processes = resources.find(self._server.control_url)
            self._has_looked = True
        return self._processes


def _measured(context: Context, load: LoadPoint) -> LevelResult:
    return measure(context, LoadLevel(load.mode, load.value))


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _warmup(load: LoadPoint) -> int:
    return max(1, int(load.value if load.mode is LoadMode.CONCURRENCY else load.value * WARMUP_SHARE))
