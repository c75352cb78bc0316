"""A whole run: query the server, start the workers, measure level after level, and collect the results."""

import math
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from types import FrameType
from typing import Any

import psutil

from charonia.client.sync_client import Client
from charonia.core.errors import Code, ServingError
from charonia.core.metadata import ModelMetadata, ServerMetadata
from charonia.tools.perf import schedule
from charonia.tools.perf.api import (
    InputSource,
    LevelDone,
    LevelStarted,
    MeasuredTarget,
    Progress,
    RunSettings,
    SharedMemory,
    silent,
)
from charonia.tools.perf.language.replies import ReplyReader
from charonia.tools.perf.level import Context, measure
from charonia.tools.perf.observer import Observer, find_processes
from charonia.tools.perf.options import is_decoupled, is_sequence
from charonia.tools.perf.pool import pool, process_count, shared
from charonia.tools.perf.statistics import composing_models
from charonia.tools.results.records import (
    LevelResult,
    LoadLevel,
    LoadMode,
    Machine,
    ModelInfo,
    PerfRun,
    ServerInfo,
    Verdict,
)
from charonia.version import __version__

STATISTICS_EXTENSION = "statistics"

_COMPOSING_DEPTH_MAX = 8
_ENDING = (Verdict.INTERRUPTED, Verdict.SERVER_LOST)


@dataclass(frozen=True, slots=True)
class Subject:
    """The measured model and its server.

    Attributes:
        config: The model's configuration as a JSON object, empty if the server does not provide it.
    """

    server: ServerMetadata
    metadata: ModelMetadata
    config: dict[str, Any]


def ask(client: Client, target: MeasuredTarget) -> Subject:
    """Query a server for the model to measure.

    Raises:
        ServingError: The server cannot be reached, or does not know the model.
    """
    server = client.server_metadata()
    metadata = client.model_metadata(target.model, target.version)
    try:
        config: dict[str, Any] = dict(client.model_config(target.model, target.version))
    except ServingError as error:
        # Servers without the extensions of the protocol do not provide the configuration.
        if error.code not in (Code.NOT_FOUND, Code.UNSUPPORTED, Code.INVALID_ARG):
            raise
        config = {}
    return Subject(server, metadata, config)


def run(
    settings: RunSettings,
    source: InputSource,
    client: Client,
    subject: Subject,
    progress: Progress = silent,
    stop: threading.Event | None = None,
    replies: ReplyReader | None = None,
) -> PerfRun:
    """Measure all levels.

    Args:
        subject: The result of `ask`.
        stop: Ends the run early; the current level is part of the result.

    Raises:
        ServingError: Nothing can be measured. After a later failure, the results so far are returned with a note.
    """
    stop = stop if stop is not None else threading.Event()
    began_at, begin_ns = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic_ns()
    levels: list[LevelResult] = []
    notes: list[str] = []
    answer: LoadLevel | None = None
    composing = _composing(client, subject.config) + list(settings.server.composing)
    processes = find_processes(settings.target.url) if settings.server.resources else None
    has_statistics = STATISTICS_EXTENSION in subject.server.extensions
    observer = Observer(client, settings, composing, has_statistics, processes)
    here = machine()

    def so_far() -> PerfRun:
        return PerfRun(
            tool=f"charonia {__version__}",
            began_at=began_at,
            duration_ns=time.monotonic_ns() - begin_ns,
            machine=here,
            server=ServerInfo.of(settings.target.url, settings.target.protocol, subject.server),
            model=_model_info(settings.target, subject),
            options=dict(settings.options),
            batch_size=source.batch_size,
            stabilising_percentile=settings.measure.percentile,
            levels=tuple(levels),
            notes=tuple(notes),
            answer=answer,
            command=settings.command,
        )

    if settings.server.trace:
        client.update_trace_settings(dict(settings.server.trace))
    with ExitStack() as stack:
        layout = None
        if settings.target.shared_memory is SharedMemory.SYSTEM:
            batches = bool(subject.config.get("max_batch_size", 0))
            layout = stack.enter_context(shared(client, source, settings.target, subject.metadata, batches))
        workers = stack.enter_context(pool(settings, source, _process_count(settings), layout))
        context = Context(workers, observer, settings, source.batch_size, progress, stop, replies)
        try:
            answer = _sweep(context, levels, so_far)
        except ServingError as error:
            if not levels:
                raise
            notes.append(f"The run ended before its last level: {error.message}.")
    return so_far()


@contextmanager
def signals_handled(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> Iterator[None]:
    """Handle Ctrl-C and SIGTERM in this way. Has no effect outside the main thread, which alone gets signals."""
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """Let Ctrl-C and SIGTERM end a run with the results so far; a second Ctrl-C ends the program."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        # `timeout` sends SIGTERM twice, to the process and to its group, which counts as one request.
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    with signals_handled(handle):
        yield stop


def _sweep(context: Context, levels: list[LevelResult], so_far: Callable[[], PerfRun]) -> LoadLevel | None:
    plan = context.settings.load
    mode = plan.mode
    values = schedule.levels(plan) if mode in (LoadMode.CONCURRENCY, LoadMode.REQUEST_RATE) else _single(context)
    count = schedule.level_count(plan) if mode in (LoadMode.CONCURRENCY, LoadMode.REQUEST_RATE) else 1
    value = next(values)
    while True:
        level = LoadLevel(mode, value)
        context.progress(LevelStarted(level, len(levels) + 1, count, so_far()))
        result = measure(context, level)
        levels.append(result)
        context.progress(LevelDone(result, so_far()))
        if result.verdict in _ENDING:
            return None
        try:
            value = values.send(not result.over_latency_limit)
        except StopIteration as end:
            limited = plan.binary_search or context.settings.measure.latency_limit_ns
            return LoadLevel(mode, end.value) if limited and end.value is not None else None


def _single(context: Context) -> schedule.Levels:
    plan = context.settings.load
    value = schedule.interval_rate(plan.intervals_ns) if plan.mode is LoadMode.INTERVALS else plan.end
    met = yield value
    return value if met else None


def _process_count(settings: RunSettings) -> int:
    plan = settings.load
    if plan.mode is LoadMode.PERIODIC:
        return 1
    is_rate = plan.mode is not LoadMode.CONCURRENCY
    rate = schedule.interval_rate(plan.intervals_ns) if plan.mode is LoadMode.INTERVALS else plan.end
    largest = plan.start if math.isinf(rate) else rate
    # Every worker sends at least one request, at the first level too.
    most = plan.process_count_max if is_rate else min(plan.process_count_max, int(plan.start))
    sequences = settings.sequences
    if sequences is not None and is_rate:
        most = min(most, sequences.concurrent)
    return process_count(most, largest, is_rate, own_cores())


def _composing(client: Client, config: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the composing models of an ensemble, including models of nested ensembles."""
    found: dict[tuple[str, str], None] = {}
    configs = [config]
    for _ in range(_COMPOSING_DEPTH_MAX):
        new = [model for each in configs for model in composing_models(each) if model not in found]
        if not new:
            break
        found.update(dict.fromkeys(new))
        configs = [dict(client.model_config(*model)) for model in new]
    return list(found)


def _model_info(target: MeasuredTarget, subject: Subject) -> ModelInfo:
    config = subject.config
    return ModelInfo(
        name=target.model,
        version=target.version,
        platform=subject.metadata.platform,
        max_batch_size=int(config.get("max_batch_size", 0)),
        decoupled=is_decoupled(config),
        sequence=is_sequence(config),
        cached=bool((config.get("response_cache") or {}).get("enable", False)),
    )


def machine() -> Machine:
    return Machine(
        host=platform.node(),
        system=f"{platform.system()} {platform.release()}",
        processor=_processor(),
        core_count=len(own_cores()),
        memory_bytes=psutil.virtual_memory().total,
        python=platform.python_version(),
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor()


def own_cores() -> list[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
