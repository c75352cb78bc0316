"""Measures a trial: puts load on one or several models and turns the results into metrics.

The load comes from processes of the load generator. Starting one takes longer than a short measurement, so the
processes of a model and batch size, with their connections, are kept for the next trial.

Variants are loaded into the server one after the other, and the models are restored at the end. Only tuned models are
ever loaded with another configuration. Other models are loaded again if a reload unloaded them, as servers do with the
ensembles of a model.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import attrgetter

import psutil

from charonia.client.errors import ClientError
from charonia.client.sync_client import Client
from charonia.config.model import ModelConfig
from charonia.core.errors import Code, ServingError, invalid, not_found
from charonia.core.latency import LatencyHistogram
from charonia.core.metadata import ModelState
from charonia.tools.perf.api import InputSource, MeasurementMode, RunSettings, silent
from charonia.tools.perf.language.replies import ReplyReader
from charonia.tools.perf.level import Context, measure
from charonia.tools.perf.observer import Observer, ProcessTree, find_processes
from charonia.tools.perf.pool import WorkerPool, pool, process_count
from charonia.tools.perf.run import STATISTICS_EXTENSION, Subject, own_cores
from charonia.tools.results.language import LanguageFigures
from charonia.tools.results.records import Estimate, Gpu, LevelResult, LoadLevel, LoadMode, Verdict, student
from charonia.tools.tune.api import PERCENTILES, LoadPoint, Measured, Metric, Outcome, TrialFailed
from charonia.tools.tune.servers import MeasuredServer, exit_reason_of
from charonia.tools.tune.variants import BaseModel, depth, load_text
from charonia.wire.answer import Failure

PROBE = "charonia-tune-is-this-mode-explicit"
"""Name of a model that does not exist: a request to load it reveals whether the server is in mode explicit."""

NOT_EXPLICIT = "explicit model load"
"""What servers in another mode answer."""

Note = Callable[[str], None]


class ServerLostError(ServingError):
    """The server is gone."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.UNAVAILABLE, message)


@dataclass(frozen=True, slots=True)
class OriginalModel:
    """A tuned model as it was.

    Attributes:
        config: Its configuration on the server, None where it was not loaded.
    """

    is_ready: bool
    config: dict[str, object] | None


class Deployment:
    """The tuned models of a server."""

    def __init__(self, server: MeasuredServer) -> None:
        self._server = server
        self._before: dict[str, OriginalModel] = {}
        self._ready_before: set[str] = set()
        self._loaded: dict[str, str] = {}
        self._touched: set[str] = set()
        self._overridden: set[str] = set()

    @property
    def client(self) -> Client:
        return self._server.client

    def check_explicit(self) -> None:
        """Check that the server loads models on request."""
        try:
            self.client.load_model(PROBE)
        except ClientError as error:
            if error.failure is not Failure.STATUS:
                raise
            if NOT_EXPLICIT in error.message.lower():
                raise invalid(
                    f"the server at {self._server.control_url} does not load models when asked to",
                    hint="start it with --model-control-mode=explicit, or measure the loads alone: "
                    "--reload-model-disable",
                ) from None

    def remember(self, models: Iterable[str]) -> None:
        """Remember how the models to tune are, and which others are ready.

        Raises:
            ServingError: NOT_FOUND for a model that the server does not have.
        """
        index = self.client.repository_index()
        known = {entry.name for entry in index}
        self._ready_before |= {entry.name for entry in index if entry.state is ModelState.READY} - self._touched
        for name in models:
            if name not in known:
                listed = ", ".join(sorted(known)[:20]) or "none"
                raise not_found(f"the server does not have the model '{name}'; its models are: {listed}")
            if name not in self._before:
                is_ready = name in self._ready_before
                self._before[name] = OriginalModel(is_ready, dict(self.client.model_config(name)) if is_ready else None)

    def load_own(self, model: str, instead: ModelConfig | None = None) -> dict[str, object]:
        """Load a model with its own configuration unless it is ready, and return the completed configuration.

        Args:
            instead: Replacement of its configuration, None for none.
        """
        if not self._before[model].is_ready and model not in self._loaded:
            self._load(model, "" if instead is None else load_text(instead))
        return dict(self.client.model_config(model))

    def load(self, bases: Mapping[str, BaseModel], configs: Mapping[str, ModelConfig]) -> None:
        """Load the models of a variant, the steps of an ensemble before the ensemble.

        Args:
            configs: Configuration by model; of unchanged models, their own.

        Raises:
            ServerLostError: The server is gone.
            ServingError: A model cannot be loaded.
        """
        texts = {name: self._text(bases[name], configs[name]) for name in configs}
        changed: list[str] = []
        for name in sorted(configs, key=lambda name: depth(bases, name)):
            if self._loaded.get(name) != texts[name] or set(changed) & set(bases[name].composing):
                changed.append(name)
        try:
            # A loaded ensemble is checked against its models while they change, and would refuse them.
            for name in reversed(changed):
                if bases[name].composing:
                    self._touched.add(name)
                    self._loaded.pop(name, None)
                    with self._watched():
                        self.client.unload_model(name)
            for name in changed:
                self._load(name, texts[name])
        except ServingError:
            # The server may have unloaded other models with them.
            self._loaded.clear()
            raise

    def reset_models(self) -> None:
        """Reset the record of loaded models, because the server was restarted."""
        self._loaded.clear()
        self._overridden.clear()

    def restore(self, note: Note) -> None:
        """Restore the server's models. A failure is noted, and the rest continues.

        A server that this tool started serves other models next: the tuned models are unloaded.
        """
        touched = sorted(self._touched)
        if self._server.is_ours:
            with contextlib.suppress(ServingError):  # it may have ended, and ends soon in any case
                for name in touched:
                    self.client.unload_model(name)
        else:
            self._restore(touched, note)
        self._touched.clear()
        self.reset_models()

    def _restore(self, touched: Iterable[str], note: Note) -> None:
        for name in touched:
            before = self._before[name]
            with _told(note, f"model '{name}' is not as it was"):
                if not before.is_ready:
                    self.client.unload_model(name)
                    continue
                self.client.load_model(name)
                if before.config is not None and dict(self.client.model_config(name)) != before.config:
                    # A client had loaded it with another configuration.
                    self.client.load_model(name, config=before.config)
        with _told(note, "models that depend on others may not be loaded"):
            ready = {entry.name for entry in self.client.repository_index(ready=True)}
            for name in sorted(self._ready_before - ready):
                with _told(note, f"model '{name}' is not loaded again"):
                    self.client.load_model(name)

    def _text(self, base: BaseModel, config: ModelConfig) -> str:
        """Return the text of a configuration in a load request.

        Triton does not reload a model whose files have not changed, even if it runs with another configuration. So
        after such a load, the model's own configuration is sent in full, too.
        """
        return "" if config == base.config and base.name not in self._overridden else load_text(config)

    def _load(self, name: str, text: str) -> None:
        self._touched.add(name)
        self._loaded.pop(name, None)
        with self._watched():
            if self._server.is_ours and self.client.model_ready(name):
                # Loaded side by side, both would need memory, and the measured peak would include both.
                self.client.unload_model(name)
            self.client.load_model(name, config=text)
        self._loaded[name] = text
        if text:
            self._overridden.add(name)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Raise ServerLostError for errors of the connection, and let refusals of the server pass."""
        try:
            yield
        except ClientError as error:
            if error.failure is not Failure.STATUS or self._server.exit_reason():
                raise ServerLostError(exit_reason_of(self._server) or f"the server was lost: {error.message}") from None
            raise


@contextlib.contextmanager
def _told(note: Note, what: str) -> Iterator[None]:
    try:
        yield
    except ServingError as error:
        note(f"{what}: {error.message}")


CONFIDENCE = 0.95
ERROR_SHARE_MAX = 0.5
"""Share of failed requests from which a trial has failed; a smaller share is a note."""


def outcome_of(
    results: Mapping[str, LevelResult], percentiles: Mapping[str, float | None], elapsed_s: float
) -> Outcome:
    """Return the outcome of a trial.

    Args:
        percentiles: Percentile that `LevelResult.latency` is, by model; None for the mean.
    """
    notes: list[str] = []
    metrics = {}
    for model, result in results.items():
        problem = _problem(model, result)
        if problem:
            return TrialFailed(problem, elapsed_s=elapsed_s)
        if result.error_count:
            kinds = ", ".join(f"{error.kind} {error.count}" for error in result.errors)
            notes.append(f"{model}: {result.error_share:.1%} of the requests failed: {kinds}.")
        if result.verdict is Verdict.OVERLOADED:
            notes.append(f"{model}: the server did not keep up with the offered rate.")
        if result.machine_load is not None and result.machine_load.disturbance:
            notes.append(f"{model}: {result.machine_load.disturbance}")
        metrics[model] = metrics_of(result, percentiles.get(model))
    return Measured(metrics, elapsed_s, tuple(notes))


def metrics_of(result: LevelResult, percentile: float | None) -> dict[str, Estimate]:
    """Return the metrics of a measurement, by name, in the units of the tables."""
    found = {Metric.THROUGHPUT.value: result.throughput}
    times = result.response_times
    found[Metric.LATENCY_AVG.value] = _mean(times)
    for metric, percent in PERCENTILES.items():
        found[metric.value] = _percentile(times, percent)
    by_percentile = {percent: metric for metric, percent in PERCENTILES.items()} | {None: Metric.LATENCY_AVG}
    measured = by_percentile.get(percentile)
    if measured is not None:
        found[measured.value] = result.latency.scaled(1e-6)
    if result.language is not None:
        found |= {metric.value: estimate for metric, estimate in _token_metrics(result, result.language)}
    if result.resources is not None:
        found[Metric.CPU_USED_RAM.value] = Estimate.exact(result.resources.rss_bytes / 1e6)
        found[Metric.CPU_AVAILABLE_RAM.value] = Estimate.exact(psutil.virtual_memory().available / 1e6)
    return found | {metric.value: estimate for metric, estimate in _gpu_metrics(result.gpus)}


def _token_metrics(result: LevelResult, figures: LanguageFigures) -> Iterator[tuple[Metric, Estimate]]:
    """Yield the metrics of a language model."""
    if figures.output_tokens is not None:
        yield Metric.OUTPUT_TOKENS, result.token_rate
    for times, mean, median, slow in (
        (figures.first_token_times, Metric.TTFT_AVG, Metric.TTFT_P50, Metric.TTFT_P99),
        (figures.inter_token_times, Metric.ITL_AVG, Metric.ITL_P50, Metric.ITL_P99),
    ):
        if times.count:
            yield mean, _mean(times)
            yield median, _percentile(times, 50.0)
            yield slow, _percentile(times, 99.0)


def _gpu_metrics(gpus: tuple[Gpu, ...]) -> Iterator[tuple[Metric, Estimate]]:
    """Yield the memory of all GPUs together, utilisation and power as their mean."""
    for metric, factor, is_mean, of in (
        (Metric.GPU_USED_MEMORY, 1e-6, False, attrgetter("memory_used_bytes")),
        (Metric.GPU_FREE_MEMORY, 1e-6, False, attrgetter("memory_free_bytes")),
        (Metric.GPU_UTILIZATION, 100.0, True, attrgetter("utilization")),
        (Metric.GPU_POWER_USAGE, 1.0, True, attrgetter("power_watts")),
    ):
        known = [value for value in map(of, gpus) if value is not None]
        if known:
            yield metric, Estimate.exact(sum(known) * factor / (len(known) if is_mean else 1))


def _problem(model: str, result: LevelResult) -> str:
    samples = [sample for error in result.errors for sample in error.samples]
    first = f", the first: {samples[0]}" if samples else ""
    if result.verdict is Verdict.NO_REQUESTS or not result.request_count:
        return f"{model}: no request was answered{first}"
    if result.error_share > ERROR_SHARE_MAX:
        return f"{model}: {result.error_share:.0%} of the requests failed{first}"
    return ""


def _mean(times: LatencyHistogram) -> Estimate:
    if times.count < 2:
        return Estimate.exact(times.mean / 1e6)
    half = student(CONFIDENCE) * times.deviation / math.sqrt(times.count)
    return Estimate(times.mean, max(0.0, times.mean - half), times.mean + half, CONFIDENCE).scaled(1e-6)


def _percentile(times: LatencyHistogram, percent: float) -> Estimate:
    """Return a percentile with the interval of its rank; requests are taken as independent of one another."""
    value, share = float(times.percentile(percent)), percent / 100
    half = student(CONFIDENCE) * math.sqrt(share * (1 - share) / max(1, times.count))
    low, high = share - half, share + half
    if low <= 0 or high >= 1:
        return Estimate.exact(value / 1e6)
    bounds = times.percentile(low * 100), times.percentile(high * 100)
    return Estimate(value, float(bounds[0]), float(bounds[1]), CONFIDENCE).scaled(1e-6)


PRECISION = 0.02
"""Half-width of the confidence intervals that ends a measurement of full effort before its time."""

STEADY_SHARE = 0.4
"""Least part of the longest time of a measurement, enough for a steady model."""

REQUESTS_MIN = 10
"""With fewer answers, a slow model is measured again, for longer."""

SLOW_SECONDS_MAX = 60.0
ATTEMPTS_MAX = 4
GROWTH_MAX = 8.0

WARMUP_SHARE = 0.1
"""Part of a second's requests that warm up a variant under a request rate; under a concurrency it is one each."""


@dataclass(frozen=True, slots=True)
class PreparedLoad:
    """A load, ready to be sent.

    Attributes:
        settings: Settings of the load generator, without load and duration.
        is_timed: Whether the user has chosen how to measure.
    """

    settings: RunSettings
    source: InputSource
    subject: Subject
    is_timed: bool = False
    replies: ReplyReader | None = None


Prepare = Callable[[Client, LoadPoint, MeasuredServer], PreparedLoad]
"""Prepares a load; raises ServingError if the model does not accept such requests."""


class InterruptedTrialError(Exception):
    """The user ended the run before the trial was finished."""


class Measurer:
    """Measures trials on one server. Use `close` at the end.

    Args:
        percentiles: The percentile of each model that has to be known well, None for the mean.
        composing: Models whose statistics belong to a model's, by its name.
        metrics_interval_s: Interval between readings of the metrics page, 0 for none: only GPUs need it.
    """

    def __init__(
        self,
        server: MeasuredServer,
        prepare: Prepare,
        time_s: float,
        percentiles: Mapping[str, float | None],
        composing: Mapping[str, Sequence[str]],
        stop: threading.Event,
        metrics_interval_s: float = 0.0,
    ) -> None:
        self._server = server
        self._prepare = prepare
        self._time_s = time_s
        self._percentiles = percentiles
        self._composing = composing
        self._stop = stop
        self._metrics_interval_s = metrics_interval_s
        self._pools: dict[tuple[str, int, int, int], WorkerPool] = {}
        self._stack = ExitStack()
        self._processes: ProcessTree | None = None
        self._has_looked = False
        self._least_s: dict[LoadPoint, float] = {}

    def close(self) -> None:
        """End the processes that send load; the next measurement starts new ones."""
        self._stack.close()
        self._pools.clear()
        self._has_looked = False

    def check(self) -> None:
        """Check whether the run is to end."""
        if self._stop.is_set():
            raise InterruptedTrialError

    def memory_mb(self) -> float | None:
        """Return the memory of the server's processes, None if they are on another machine."""
        processes = self._find()
        sample = processes.sample() if processes is not None else None
        return sample[1] / 1e6 if sample is not None else None

    def measure(self, loads: Sequence[LoadPoint], effort: float, *, is_fresh: bool) -> dict[str, LevelResult]:
        """Measure loads at the same time and return the results by model.

        Args:
            is_fresh: Whether the variant has just been loaded, and warms up first.

        Raises:
            InterruptedTrialError: The user interrupted the run.
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
            raise ServerLostError(exit_reason_of(self._server) or "the server stopped answering")
        return results

    def _takes_longer(self, load: LoadPoint, context: Context, result: LevelResult) -> bool:
        """Return whether a slow model needs more time than it had; if so, it gets that from now on."""
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
            replies=prepared.replies,
        )

    def _pool(self, load: LoadPoint, settings: RunSettings, prepared: PreparedLoad) -> WorkerPool:
        batches = int(prepared.subject.config.get("max_batch_size", 0)) > 0
        is_rate = load.mode is not LoadMode.CONCURRENCY
        count = process_count(settings.load.process_count_max, load.value, is_rate, own_cores())
        key = (load.model, load.batch_size, batches, count)
        if key not in self._pools:
            self._pools[key] = self._stack.enter_context(pool(settings, prepared.source, count))
        return self._pools[key]

    def _find(self) -> ProcessTree | None:
        if not self._has_looked:
            self._processes = find_processes(self._server.control_url)
            self._has_looked = True
        return self._processes


def _measured(context: Context, load: LoadPoint) -> LevelResult:
    return measure(context, LoadLevel(load.mode, load.value))


def _warmup(load: LoadPoint) -> int:
    return max(1, int(load.value if load.mode is LoadMode.CONCURRENCY else load.value * WARMUP_SHARE))
