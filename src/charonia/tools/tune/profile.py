"""A whole run of `charonia tune profile`: starts or finds the server, searches model by model, restores everything.

It also measures the memory that variants may take (of this machine, its control group or its GPUs) and what one more
instance needs.

A search proposes trials; each is found in the journal or measured, and the search gets the outcome. The journal is an
append-only file, so that an interrupted run can be resumed. Its lines are identified by the trial's key and a digest of
everything else that the result depends on: the model's files and configuration, the server, the relevant options. If
any of it changes, the trial is measured again. Truncated and foreign lines are skipped.
"""

import contextlib
import difflib
import fcntl
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from charonia.config.backends import record_of
from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig
from charonia.config.pbtxt import parse, render
from charonia.core.errors import ServingError, invalid
from charonia.tools.perf import statistics
from charonia.tools.perf.observer import find_processes, read_page
from charonia.tools.perf.run import machine, signals_handled
from charonia.tools.results.json_form import plain, record
from charonia.tools.results.records import Gpu, LevelResult, LoadMode, ServerInfo
from charonia.tools.tune.api import (
    PERCENTILES,
    Constraint,
    Dimension,
    Goal,
    LoadPoint,
    LoadSpace,
    Measured,
    MemoryLimit,
    Metric,
    ModelFacts,
    ModelGoal,
    Objective,
    Outcome,
    SearchOptions,
    SearchSpace,
    Skipped,
    Trial,
    TrialFailed,
    TrialRecord,
    Variant,
)
from charonia.tools.tune.decision import Conclusion, Decision, Ranked, decide
from charonia.tools.tune.measure import (
    Deployment,
    InterruptedTrialError,
    Measurer,
    Prepare,
    ServerLostError,
    outcome_of,
)
from charonia.tools.tune.options import (
    GoalSettings,
    LaunchMode,
    ModelRequest,
    SearchSettings,
    TuneOptions,
    TuneRequest,
    UseCase,
)
from charonia.tools.tune.output import CONFIG_FILE, OutputRepository
from charonia.tools.tune.result import GroupRecord, ModelConfigRecord, TuneRun, VariantRecord
from charonia.tools.tune.search.phases import Search
from charonia.tools.tune.servers import MeasuredServer, can_start, server_of
from charonia.tools.tune.space import SMALL_SPACE, automatic_dimensions, manual_dimensions, powers_of_two
from charonia.tools.tune.variants import (
    BaseModel,
    Names,
    apply_variant,
    config_of,
    effective_text,
    instance_group_text,
    instance_kind,
    on_cpu,
    serving_text,
    wants_gpu,
)
from charonia.version import __version__

QUEUE_DELAYS_US = (100, 500, 2000, 10_000)
"""Queue delays that the best variants are tried with, as long as they bring more."""

_SMALL_REPEATS_MAX = 3
"""In a small space, the best variant is less likely to be a lucky one, so fewer repeats are enough."""


@dataclass(frozen=True, slots=True)
class SearchProblem:
    """The arguments of a search."""

    space: SearchSpace
    goal: Goal
    options: SearchOptions


def problem_of(
    options: TuneOptions,
    requests: Sequence[ModelRequest],
    bases: Mapping[str, BaseModel],
    *,
    core_count: int = 0,
    memory: MemoryLimit | None = None,
    time_budget_s: float = 0.0,
) -> SearchProblem:
    """Return the search for the models of a group.

    Args:
        core_count: Cores of the server, 0 for unknown.
        memory: Memory of the server, None for unknown.
        time_budget_s: Time for the group, 0 for no limit.
    """
    settings = options.search
    profiled = {request.name: request for request in requests}
    settings_of = {request.name: request for request in options.models.composing} | profiled
    automatic = {name for name in bases if _is_automatic(options, settings_of.get(name))}
    facts = tuple(_facts(base, base.name in profiled, base.name in automatic) for base in bases.values())
    dimensions: list[Dimension] = []
    if not options.launch.reload_disabled:
        for each in facts:
            dimensions += _dimensions(each, settings_of.get(each.name), settings, core_count)
    space = SearchSpace(facts, tuple(dimensions), _load(options, requests), memory, core_count)
    return SearchProblem(space, goal_of(options, requests), _search_options(options, space, time_budget_s))


def goal_of(options: TuneOptions, requests: Sequence[ModelRequest]) -> Goal:
    return Goal(tuple(model_goal(request, options.goal) for request in requests))


def percentiles(goal: Goal) -> dict[str, float | None]:
    """Return the percentile of each model's latency that its goal is about, None for the mean."""
    found: dict[str, float | None] = {}
    for model in goal.models:
        metrics = {objective.metric for objective in model.objectives}
        metrics |= {constraint.metric for constraint in model.constraints}
        found[model.model] = next((percent for metric, percent in PERCENTILES.items() if metric in metrics), None)
    return found


def _is_automatic(options: TuneOptions, request: ModelRequest | None) -> bool:
    """Return whether the search chooses the values to try."""
    named = request is not None and bool(request.config_parameters)
    return not (named or options.search.disabled or options.launch.reload_disabled)


def _facts(base: BaseModel, is_profiled: bool, is_automatic: bool) -> ModelFacts:
    complete = base.complete
    is_ensemble = complete.ensemble_scheduling is not None
    record = record_of(complete.backend, complete.platform)
    return ModelFacts(
        name=base.name,
        max_batch_size=complete.max_batch_size,
        instance_count=base.instance_count,
        is_profiled=is_profiled,
        instances_tunable=not is_ensemble and base.kind is not InstanceKind.KIND_MODEL,
        batching_tunable=base.batches_dynamically,
        threads_tunable=bool(record.thread_parameter) and base.kind is InstanceKind.KIND_CPU,
        instance_memory_mb=base.instance_memory_mb,
        is_batching=complete.dynamic_batching is not None,
        queue_delays_us=_queue_delays(base) if is_automatic else (),
    )


def _queue_delays(base: BaseModel) -> tuple[int, ...]:
    """Return the delays beyond the model's own."""
    batching = base.complete.dynamic_batching
    own = batching.max_queue_delay_microseconds if batching is not None else 0
    return tuple(delay for delay in QUEUE_DELAYS_US if delay > own) if base.batches_dynamically else ()


def _dimensions(
    facts: ModelFacts, request: ModelRequest | None, settings: SearchSettings, core_count: int
) -> Sequence[Dimension]:
    if request is not None and request.config_parameters:
        return manual_dimensions(facts.name, {name: json.loads(text) for name, text in request.config_parameters})
    if settings.disabled:
        return ()
    return automatic_dimensions(
        facts,
        instance_counts=range(settings.instances_min, settings.instances_max + 1),
        batch_sizes=powers_of_two(settings.batch_size_min, settings.batch_size_max),
        core_count=core_count,
    )


def _load(options: TuneOptions, requests: Sequence[ModelRequest]) -> LoadSpace:
    search, measure = options.search, options.measure
    rates = next((request.request_rate for request in requests if request.request_rate), ()) or measure.request_rate
    counts = next((request.concurrency for request in requests if request.concurrency), ()) or measure.concurrency
    by_rate = bool(rates) or (search.by_rate and not counts)
    values: tuple[float, ...] = rates if by_rate else tuple(map(float, counts))
    if not values and search.disabled:
        values = (float(search.rate_min if by_rate else search.concurrency_min),)
    return LoadSpace(
        mode=LoadMode.REQUEST_RATE if by_rate else LoadMode.CONCURRENCY,
        minimum=float(search.rate_min if by_rate else search.concurrency_min),
        maximum=float(search.rate_max if by_rate else search.concurrency_max),
        values=values,
        batch_sizes=next((request.batch_sizes for request in requests if request.batch_sizes), measure.batch_sizes),
        formula=search.formula and not values,
        stops_early=search.stops_early,
        binary_steps_max=search.binary_steps_max,
    )


def _search_options(options: TuneOptions, space: SearchSpace, time_budget_s: float) -> SearchOptions:
    search = options.search
    size = math.prod(len(dimension.values) for dimension in space.dimensions)
    return SearchOptions(
        mode=search.mode,
        time_budget_s=time_budget_s,
        seed=search.seed,
        finalist_count=options.output.configs_per_model,
        repeats_max=_SMALL_REPEATS_MAX if size <= SMALL_SPACE else SearchOptions().repeats_max,
    )


def model_goal(request: ModelRequest, settings: GoalSettings) -> ModelGoal:
    """Return the goal of a model: its own if it has one, else that of all models."""
    wanted = request.objectives or settings.objectives or (Objective(Metric.THROUGHPUT),)
    limits = list(settings.constraints if request.constraints is None else request.constraints)
    if settings.latency_budget_ms and not _limits(limits, Metric.LATENCY_P99):
        limits.append(Constraint(Metric.LATENCY_P99, maximum=float(settings.latency_budget_ms)))
    if settings.min_throughput and not _limits(limits, Metric.THROUGHPUT):
        limits.append(Constraint(Metric.THROUGHPUT, minimum=float(settings.min_throughput)))
    return ModelGoal(request.name, wanted, tuple(limits), request.weight)


def _limits(constraints: list[Constraint], of: Metric) -> bool:
    return any(constraint.metric is of for constraint in constraints)


FILE = "charonia-tune.jsonl"
VERSION = 1
"""Version of a line: raised when a reader of the old one would misunderstand the new one."""

_HASH_CHUNK = 1 << 20
_NOT_CONTENT = "__pycache__"


@dataclass(frozen=True, slots=True)
class Entry:
    """A trial that was measured, or failed.

    Attributes:
        measured: The measurements, None for a failure.
        failed: Why it failed, None otherwise.
    """

    scope: str
    key: str
    measured: Measured | None = None
    failed: TrialFailed | None = None
    levels: dict[str, LevelResult] = field(default_factory=dict)


class Journal:
    """The journal of a folder. A context manager that locks the folder: one process at a time uses it.

    Args:
        folder: The folder; made where it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._entries: dict[tuple[str, str], Entry] = {}
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        """Open it and read its lines.

        Raises:
            ServingError: INVALID_ARG when it cannot be read or written, or another process has it.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab+")
            _lock(self._file, self.path)
            self._file.seek(0)
            content = self._file.read()
            if content and not content.endswith(b"\n"):
                self._file.write(b"\n")  # a truncated entry stays a separate line
        except OSError as error:
            self._close()
            raise _unwritable(self.path, error) from error
        except ServingError:
            self._close()
            raise
        for line in content.split(b"\n"):
            if (entry := _entry(line)) is not None:
                self._entries[entry.scope, entry.key] = entry
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def find(self, scope: str, key: str) -> Entry | None:
        """Return the entry of a trial, None if there is none. Of several lines, the last counts."""
        return self._entries.get((scope, key))

    def append(self, entry: Entry) -> None:
        """Write a line and sync it to disk."""
        if self._file is None:
            raise invalid(f"journal '{self.path}' is not open")
        line = json.dumps({"version": VERSION, **plain(entry)}, allow_nan=False).encode() + b"\n"
        try:
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self._entries[entry.scope, entry.key] = entry

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def scope_of(facts: Mapping[str, object]) -> str:
    """Return a digest of what results depend on. The facts must be representable in JSON."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def content_of(folder: Path) -> str:
    """Return a digest of the names and the content of all files of a model. Blocks on the disk.

    Raises:
        ServingError: INVALID_ARG when a file cannot be read.
    """
    digest = blake2b(digest_size=16)
    try:
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder)
            if not path.is_file() or _NOT_CONTENT in inside.parts or any(part.startswith(".") for part in inside.parts):
                continue
            digest.update(b"%s\0%d\0" % (os.fsencode(inside), path.stat().st_size))
            with path.open("rb") as file:
                while chunk := file.read(_HASH_CHUNK):
                    digest.update(chunk)
    except OSError as error:
        raise invalid(f"'{error.filename}' cannot be read: {(error.strerror or str(error)).lower()}") from error
    return digest.hexdigest()


def _entry(line: bytes) -> Entry | None:
    try:
        data: Any = json.loads(line)
        if not isinstance(data, dict) or data.get("version") != VERSION:
            return None
        entry = record(Entry, data)
    except (ValueError, TypeError, KeyError, RecursionError, ServingError):
        return None
    return entry if (entry.measured is None) != (entry.failed is None) else None


def _unwritable(path: Path, error: OSError) -> ServingError:
    return invalid(f"journal '{path}' cannot be written: {(error.strerror or str(error)).lower()}")


def _lock(file: IO[bytes], path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise invalid(
            f"journal '{path}' is in use by another run", hint="name another folder with --checkpoint-directory"
        ) from None


@dataclass(frozen=True, slots=True)
class TrialStarted:
    """A measurement begins.

    Attributes:
        left_s: Time left of the budget, None without one.
    """

    trial: Trial
    name: str
    trials_left: int
    left_s: float | None


@dataclass(frozen=True, slots=True)
class TrialDone:
    """A measurement ended.

    Attributes:
        best: Best so far, None where nothing was measured yet.
    """

    trial: Trial
    outcome: Outcome
    best: Ranked | None
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class NoteAdded:
    """A note for the user."""

    text: str


Event = TrialStarted | TrialDone | NoteAdded
Progress = Callable[[Event], None]
"""Called with each event."""


RESTARTS_MAX = 3
"""How often a server that this tool started is restarted after a crash, in a whole run."""


class GroupSearch:
    """A search for models that are tuned together."""

    def __init__(
        self,
        run: "TuningRun",
        problem: SearchProblem,
        bases: Mapping[str, BaseModel],
        scope: str,
        measurer: Measurer,
    ) -> None:
        self._run = run
        self._problem = problem
        self._bases = bases
        self._scope = scope
        self._measurer = measurer
        self._loads_variants = not run.options.launch.reload_disabled
        self._percentiles = percentiles(problem.goal)
        self._variants: dict[str, VariantRecord] = {}
        self._trials: list[TrialRecord] = []
        self._notes: list[str] = []
        self._loaded = ""
        self._resumed: dict[str, bool] = {}
        # A variant that spells out the default is the default, whenever it is measured.
        self._first_of = {effective_text(bases, Variant()): Variant()}
        self._duplicates: dict[str, Skipped] = {}

    def run(self) -> tuple[GroupRecord, str]:
        """Run the search; return the measurements in any case, and what ended it early, "" for nothing or the user."""
        begin = time.monotonic()
        search = Search(self._problem.space, self._problem.goal, self._problem.options)
        is_interrupted, problem = False, ""
        try:
            self._carry_out(search, begin)
        except (InterruptedTrialError, KeyboardInterrupt):
            is_interrupted = True
        except ServingError as error:
            # The server is gone, or a write failed: report the measurements so far.
            problem = str(error)
        decision = self._decide()
        skipped = (*search.skipped, *self._duplicates.values())
        group = GroupRecord(
            goal=self._problem.goal,
            decision=decision,
            variants=tuple(self._variants.values()),
            trials=tuple(self._trials),
            skipped=skipped,
            notes=(*search.notes, *self._notes),
            duration_s=time.monotonic() - begin,
            is_complete=not is_interrupted and not problem,
        )
        return group, problem

    def _carry_out(self, search: Search, begin: float) -> None:
        budget = self._problem.options.time_budget_s
        while (trial := search.ask()) is not None:
            self._measurer.check()
            left = max(0.0, budget - (time.monotonic() - begin)) if budget else None
            told = self._as_first(trial)
            configs = self._configs(told.variant)
            is_copy = self._key(told, configs) in self._resumed
            if not is_copy:
                name = self._record(told.variant, configs).name if configs else str(told.variant)
                self._report(TrialStarted(told, name, search.trials_left, left))
            record = self._outcome(told, configs)
            search.tell(record.outcome)
            if not is_copy:
                self._trials.append(record)
                self._report(TrialDone(told, record.outcome, self._decide().leader, record.is_resumed))

    def _decide(self) -> Decision:
        return decide(self._problem.goal, self._trials, self._problem.options)

    def _as_first(self, trial: Trial) -> Trial:
        """Return a trial of the first variant with the same effect: reports leave the others out."""
        variant = trial.variant
        try:
            first = self._first_of.setdefault(effective_text(self._bases, variant), variant)
        except ServingError:  # it is not a configuration, which `_configs` reports
            first = variant
        if first.key != variant.key:
            self._duplicates.setdefault(variant.key, Skipped(variant, f"the same configuration as '{first}'"))
        return replace(trial, number=len(self._trials) + 1, variant=first)

    def _outcome(self, trial: Trial, configs: Mapping[str, ModelConfig]) -> TrialRecord:
        """Return a trial's record: from the journal, from a variant with the same effect, or measured now."""
        key = self._key(trial, configs)
        entry = self._run.journal.find(self._scope, key)
        if entry is None or (entry.failed is not None and not entry.failed.loading):
            entry = self._measured(trial, key, configs)
            self._run.journal.append(entry)
            self._resumed[key] = False
            return TrialRecord(trial, entry.measured, entry.failed, entry.levels)
        measured = entry.measured
        if key in self._resumed and measured is not None:
            # Another variant had the same effect and was measured: this one takes no time.
            measured = replace(measured, elapsed_s=0.0)
        is_resumed = self._resumed.setdefault(key, True)
        return TrialRecord(trial, measured, entry.failed, entry.levels, is_resumed)

    def _key(self, trial: Trial, configs: Mapping[str, ModelConfig]) -> str:
        """Return a text that is equal for equal measurements."""
        variant = effective_text(self._bases, trial.variant) if configs else trial.variant.key
        loads = [[load.model, load.mode.value, load.value, load.batch_size] for load in trial.loads]
        return scope_of({"variant": variant, "loads": loads, "repeat": trial.repeat, "effort": trial.effort})

    def _measured(self, trial: Trial, key: str, configs: Mapping[str, ModelConfig]) -> Entry:
        begin = time.monotonic()
        levels: dict[str, LevelResult] = {}
        outcome: Outcome
        if not configs:
            return self._entry(key, TrialFailed("the configuration cannot be written", loading=True), {})
        is_loading = True
        try:
            is_fresh = self._load(trial.variant, configs)
            is_loading = False
            levels = self._measurer.measure(trial.loads, trial.effort, is_fresh=is_fresh)
            outcome = outcome_of(levels, self._percentiles, time.monotonic() - begin)
        except ServerLostError as error:
            self._loaded = ""
            self._recover_server(error)
            outcome = TrialFailed(f"{error.message}", loading=True, elapsed_s=time.monotonic() - begin)
        except ServingError as error:
            self._loaded = ""
            self._measurer.close()
            outcome = TrialFailed(str(error), loading=is_loading, elapsed_s=time.monotonic() - begin)
        return self._entry(key, outcome, levels)

    def _entry(self, key: str, outcome: Outcome, levels: dict[str, LevelResult]) -> Entry:
        if isinstance(outcome, TrialFailed):
            return Entry(self._scope, key, failed=outcome)
        return Entry(self._scope, key, measured=outcome, levels=levels)

    def _load(self, variant: Variant, configs: Mapping[str, ModelConfig]) -> bool:
        """Load a variant, and return whether that was necessary."""
        wanted = effective_text(self._bases, variant)
        if self._loaded == wanted or not self._loads_variants:
            is_first, self._loaded = not self._loaded, wanted
            return is_first
        self._run.deployment.load(self._bases, configs)
        self._loaded = wanted
        return True

    def _recover_server(self, error: ServerLostError) -> None:
        """Restart a server that this tool started, so that the search continues with other variants."""
        self._measurer.close()
        if not self._run.server.is_ours or self._run.restarts == RESTARTS_MAX:
            raise error
        self._run.restarts += 1
        self._note(f"{error.message}; it is started again.")
        try:
            self._run.server.restart()
        except ServingError as failure:
            raise ServerLostError(failure.message) from None
        self._run.deployment.reset_models()

    def _configs(self, variant: Variant) -> dict[str, ModelConfig]:
        try:
            return apply_variant(self._bases, variant)
        except ServingError as error:
            self._note(f"'{variant}' is not a configuration: {error}.")
            return {}

    def _record(self, variant: Variant, configs: Mapping[str, ModelConfig]) -> VariantRecord:
        """Return the record of a variant; a new one is written to the output repository."""
        if variant.key in self._variants:
            return self._variants[variant.key]
        profiled = self._problem.space.profiled
        names = self._run.names.names(self._bases, configs, profiled)
        if self._loads_variants:
            for model, config in configs.items():
                self._run.output.write(model, names[model], config, names)
        records = [
            self._config_record(model, names[model], configs[model], is_profiled=model in profiled)
            for model in sorted(configs, key=lambda model: model not in profiled)
        ]
        made = VariantRecord(variant, ",".join(names[model] for model in profiled), tuple(records))
        self._variants[variant.key] = made
        return made

    def _config_record(self, model: str, name: str, config: ModelConfig, *, is_profiled: bool) -> ModelConfigRecord:
        base = self._bases[model]
        text = serving_text(config)
        shown = config if config.instance_group else replace(config, instance_group=base.complete.instance_group)
        batching = config.dynamic_batching or (base.complete.dynamic_batching if config == base.config else None)
        batch_size = base.complete.max_batch_size if config.max_batch_size == base.config.max_batch_size else None
        return ModelConfigRecord(
            model=model,
            name=name,
            text=text,
            diff=_diff(serving_text(base.config), text),
            instance_group=instance_group_text(base.complete if config == base.config else shown),
            max_batch_size=config.max_batch_size if batch_size is None else batch_size,
            is_profiled=is_profiled,
            parameters=dict(config.parameters),
            queue_delay_us=batching.max_queue_delay_microseconds if batching is not None else None,
        )

    def _note(self, text: str) -> None:
        self._notes.append(text)
        self._report(NoteAdded(text))

    def _report(self, event: Event) -> None:
        self._run.progress(event)


def _diff(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "default", "recommended", lineterm="", n=2)
    return "\n".join(lines)


SHARED_MB = 100.0
"""Memory of the first instance that all instances share: libraries."""

SHARED_GPU_MB = 600.0
"""The same on a GPU: the context of its process."""

COMPOSING_DEPTH_MAX = 8
"""Ensembles within ensembles."""

MEMORY_SHARE = 0.95
"""Share of the memory free at the start that variants may take."""


def profile(
    request: TuneRequest, prepare: Prepare, progress: Progress, stop: threading.Event, free: Callable[[], int]
) -> TuneRun:
    """Tune the models that the options name.

    Args:
        free: Returns the free memory of this machine or control group, in bytes.

    Raises:
        ServingError: Nothing can be tuned, or nothing can be written. The journal has the measurements.
    """
    options = request.options
    began_at, begin = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    notes = list(request.notes)
    source = options.launch.repository if options.launch.mode is not LaunchMode.REMOTE else None
    output = OutputRepository(options.output.repository, source, override=options.output.override)
    if options.launch.mode is LaunchMode.LOCAL and not can_start(options.launch.server_path):
        notes.append(f"{options.launch.server_path} is not installed: charonia serve is started instead.")
    for note in notes:
        progress(NoteAdded(note))
    with (
        Journal(options.output.journal_folder) as journal,
        server_of(options.launch, options.measure.protocol, lambda text: progress(NoteAdded(text)), stop) as server,
    ):
        deployment = Deployment(server)
        if not options.launch.reload_disabled:
            deployment.check_explicit()
        protocol = server.control_url.partition("://")[0]
        info = ServerInfo.of(server.control_url, protocol, server.client.server_metadata())
        parts = (server, deployment, journal, output, progress)
        run = TuningRun(options, *parts, prepare, stop, free, source, info, _gpus(server), notes)
        run.groups()
    return TuneRun(
        tool=f"charonia {__version__}",
        began_at=began_at,
        duration_s=time.monotonic() - begin,
        machine=machine(),
        server=info,
        is_remote=options.launch.mode is LaunchMode.REMOTE,
        options=request.named,
        seed=options.search.seed,
        groups=tuple(run.records),
        idle_gpus=run.idle_gpus,
        notes=tuple(notes),
        is_interrupted=run.is_interrupted,
        problem=run.problem,
        is_offline=options.goal.tune_for is UseCase.OFFLINE,
    )


@dataclass(slots=True)
class TuningRun:
    """The state that the searches of a run share, and their results."""

    options: TuneOptions
    server: MeasuredServer
    deployment: Deployment
    journal: Journal
    output: OutputRepository
    progress: Progress
    prepare: Prepare
    stop: threading.Event
    free: Callable[[], int]
    source: Path | None
    info: ServerInfo
    idle_gpus: tuple[Gpu, ...]
    notes: list[str]
    names: Names = field(default_factory=Names)
    restarts: int = 0
    records: list[GroupRecord] = field(default_factory=list)
    is_interrupted: bool = False
    problem: str = ""

    def groups(self) -> None:
        """Tune one group of models after the other, until one ends early."""
        requests = self.options.models.profile
        batches = [requests] if self.options.search.together else [(request,) for request in requests]
        budget = self.options.search.time_budget_s
        deadline = time.monotonic() + budget
        for number, batch in enumerate(batches):
            left = (deadline - time.monotonic()) / (len(batches) - number)
            try:
                group, problem = self._group(batch, max(left, 0.1) if budget else 0.0)
            except ServingError as error:
                if len(batches) == 1 or self.server.exit_reason():
                    raise
                # The other models can still be tuned.
                self.problem = str(error)
                self._note(str(error))
                continue
            self.records.append(group)
            self.problem = problem or self.problem
            if not group.is_complete:
                self.is_interrupted = not problem
                return

    def _group(self, requests: tuple[ModelRequest, ...], budget: float) -> tuple[GroupRecord, str]:
        measurer = None
        try:
            bases = self._bases(requests)
            for request in requests:
                # What no configuration changes, such as a shape that is missing, is one error now, not one a variant.
                self.prepare(self.server.client, LoadPoint(request.name, LoadMode.CONCURRENCY, 1.0), self.server)
            scope = self._scope(bases, requests)
            if not self.options.launch.reload_disabled:
                self.output.open(bases, scope)
            measurer = Measurer(
                self.server,
                self.prepare,
                self.options.measure.time_s,
                percentiles(goal_of(self.options, requests)),
                {name: base.composing for name, base in bases.items()},
                self.stop,
                self.options.measure.metrics_interval_s if self.idle_gpus else 0.0,
            )
            wanted = problem_of(
                self.options,
                requests,
                bases,
                core_count=machine().core_count if measurer.memory_mb() is not None else 0,
                memory=self._memory(measurer, bases),
                time_budget_s=budget,
            )
            group, problem = GroupSearch(self, wanted, bases, scope, measurer).run()
            if group.decision.conclusion is Conclusion.NOTHING_MEASURED:
                self.output.discard(bases)  # otherwise the next run mistakes them for another run's
            return group, problem
        finally:
            if measurer is not None:
                measurer.close()
            with signals_handled(signal.SIG_IGN):  # so that the server is restored completely
                self.deployment.restore(self._note)

    def _bases(self, requests: tuple[ModelRequest, ...]) -> dict[str, BaseModel]:
        """Return the models of a group as found: the profiled ones, and their composing models."""
        wanted = {request.name: request for request in requests}
        wanted |= {request.name: request for request in self.options.models.composing if request.name not in wanted}
        found: dict[str, BaseModel] = {}
        names = list(wanted)
        for _ in range(COMPOSING_DEPTH_MAX):
            self.deployment.remember(names)
            for name in sorted(names, key=lambda name: name in {request.name for request in requests}):
                request = wanted.get(name)
                cpu_only = name in self.options.models.cpu_only_composing or (request is not None and request.cpu_only)
                parameters = request.config_parameters if request is not None else ()
                found[name] = self._base(name, parameters, cpu_only=cpu_only)
            names = [inner for base in found.values() for inner in base.composing if inner not in found]
            names = list(dict.fromkeys(names))
            if not names:
                return found
        raise invalid(f"ensembles of '{requests[0].name}': expected at most {COMPOSING_DEPTH_MAX} within one another")

    def _base(self, name: str, parameters: Sequence[tuple[str, str]], *, cpu_only: bool) -> BaseModel:
        before = self._used_mb()
        written = self._written(name)
        complete, on_cpu_only = self._load_own(name, written, cpu_only=cpu_only)
        after = self._used_mb()
        if written is not None and on_cpu_only:
            written = on_cpu(written)
        # A server whose metrics page is off does not name its GPUs, but the models that run on them do.
        has_gpu = not on_cpu_only and (bool(self.idle_gpus) or wants_gpu(complete))
        kind = instance_kind(complete, cpu_only=on_cpu_only)
        base = BaseModel(name, written or complete, complete, kind, has_gpu)
        if not has_gpu and not cpu_only and any("KIND_GPU" in text for _, text in parameters):
            self._note_cpu()
        on_gpu = base.kind is InstanceKind.KIND_GPU and bool(self.idle_gpus)
        taken = of_one_instance(before[on_gpu], after[on_gpu], base.instance_count, on_gpu=on_gpu)
        return replace(base, instance_memory_mb=taken)

    def _load_own(self, name: str, written: ModelConfig | None, *, cpu_only: bool) -> tuple[ModelConfig, bool]:
        """Load a model with its own configuration; return it completed, and whether its instances must use the CPU.

        Instances for GPUs use the CPU if the user demands it or the server has no GPU.
        """
        deployment = self.deployment
        if self.options.launch.reload_disabled:
            return config_of(self.server.client.model_config(name)), cpu_only
        needs_gpu = written is not None and wants_gpu(written)
        if written is None or not needs_gpu:
            return config_of(deployment.load_own(name)), cpu_only
        if not cpu_only:
            try:
                return config_of(deployment.load_own(name)), False
            except ServerLostError:
                raise
            except ServingError:
                if self.idle_gpus:
                    raise
            self._note_cpu()
        return config_of(deployment.load_own(name, on_cpu(written))), True

    def _note_cpu(self) -> None:
        note = "The server has no GPU: instances of KIND_GPU run on the CPU."
        if note not in self.notes:
            self._note(note)

    def _used_mb(self) -> tuple[float | None, float | None]:
        """Return the server's memory on this machine, and that of its GPUs; None where it is unknown."""
        processes = find_processes(self.server.control_url)
        sample = processes.sample() if processes is not None else None
        gpus = _gpus(self.server) if self.idle_gpus else ()
        return (sample[1] / 1e6 if sample is not None else None), (_used_on(gpus) if gpus else None)

    def _written(self, name: str) -> ModelConfig | None:
        """Return the configuration in the model's own config.pbtxt, None if the file does not exist here."""
        path = self.source / name / CONFIG_FILE if self.source is not None else None
        if path is None or not path.is_file():
            return None
        try:
            return parse(path.read_text(encoding="utf-8", errors="surrogateescape"))
        except OSError as error:
            raise invalid(f"{path}: cannot be read: {error}") from error

    def _scope(self, bases: Mapping[str, BaseModel], requests: tuple[ModelRequest, ...]) -> str:
        """Return a digest of what results depend on besides the trial."""
        measure = self.options.measure
        flags = {request.name: sorted((*measure.perf_flags, *request.perf_flags)) for request in requests}
        files = {name: content_of(self.source / name) for name in bases} if self.source is not None else {}
        return scope_of(
            {
                "files": files,
                "configs": {name: [render(base.config), render(base.complete)] for name, base in bases.items()},
                "kinds": {name: base.kind.name for name, base in bases.items()},
                "server": [self.info.name, self.info.version, "" if self.server.is_ours else self.info.url],
                "server_flags": [self.options.launch.server_flags, self.options.launch.server_environment],
                "load": [measure.protocol.value, measure.time_s, flags],
                "reload": not self.options.launch.reload_disabled,
            }
        )

    def _memory(self, measurer: Measurer, bases: Mapping[str, BaseModel]) -> MemoryLimit | None:
        """Return the memory that variants may take, of the GPUs if models run on them; None if it is unknown."""
        gpus = _gpus(self.server) if self.idle_gpus else ()
        totals = [gpu.memory_total_bytes for gpu in gpus if gpu.memory_total_bytes]
        if totals and any(base.kind is InstanceKind.KIND_GPU for base in bases.values()):
            return MemoryLimit(Metric.GPU_USED_MEMORY, sum(totals) / 1e6, base_mb=_used_on(gpus))
        used = measurer.memory_mb()
        if used is None:
            return None
        return MemoryLimit(Metric.CPU_USED_RAM, used + self.free() / 1e6 * MEMORY_SHARE, base_mb=used)

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.progress(NoteAdded(text))


def _gpus(server: MeasuredServer) -> tuple[Gpu, ...]:
    """Return the GPUs that the server's metrics page names; none without that page."""
    try:
        return statistics.gpus([statistics.parse_page(read_page(server.metrics_url))])
    except ServingError:
        return ()


def _used_on(gpus: tuple[Gpu, ...]) -> float:
    return sum(gpu.memory_used_bytes or 0 for gpu in gpus) / 1e6


def of_one_instance(before_mb: float | None, after_mb: float | None, count: int, *, on_gpu: bool = False) -> float:
    """Return a lower bound of what one more instance of a model takes, in MB; 0 if that is unknown.

    Args:
        before_mb: Memory of the server before the model was loaded, None for unknown.
    """
    if before_mb is None or after_mb is None:
        return 0.0
    return max(0.0, after_mb - before_mb - (SHARED_GPU_MB if on_gpu else SHARED_MB)) / count
