"""A whole run of `charonia tune profile`: starts or finds the server, searches model by model, restores everything.

It also measures the memory that variants may take (of this machine, its control group or its GPUs) and what one more
instance needs.
"""

import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import psutil

from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig
from charonia.config.pbtxt import parse, render
from charonia.core.errors import ServingError, invalid
from charonia.tools.perf import metrics_page, resources
from charonia.tools.perf.api import StopRequest
from charonia.tools.perf.observer import read_page
from charonia.tools.perf.run import machine
from charonia.tools.results.records import LoadMode
from charonia.tools.results.server import Gpu, ServerInfo
from charonia.tools.tune.api import LoadPoint, MemoryLimit, Metric
from charonia.tools.tune.decision import Conclusion
from charonia.tools.tune.deployment import Deployment, ServerLostError
from charonia.tools.tune.group import GroupSearch, SearchContext, SearchEnd
from charonia.tools.tune.journal import Journal, content_of, scope_of
from charonia.tools.tune.measure import Measurer, Prepare
from charonia.tools.tune.options import LaunchMode, ModelRequest, TuneFor, TuneOptions, TuneRequest
from charonia.tools.tune.output import CONFIG_FILE, OutputRepository
from charonia.tools.tune.problem import goal_of, percentiles, problem_of
from charonia.tools.tune.progress import Noted, Progress
from charonia.tools.tune.result import GroupRecord, TuneRun
from charonia.tools.tune.servers import MeasuredServer, is_there, server_of
from charonia.tools.tune.variants import BaseModel, config_of, instance_kind, on_cpu, wants_gpu
from charonia.version import __version__

SHARED_MB = 100.0
"""Memory of the first instance that all instances share: libraries."""

SHARED_GPU_MB = 600.0
"""The same on a GPU: the context of its process."""

_GROUP = Path("/sys/fs/cgroup")
_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))

COMPOSING_DEPTH_MAX = 8
"""Ensembles within ensembles."""

MEMORY_SHARE = 0.95
"""Share of the memory free at the start that variants may take."""


@dataclass(slots=True)
class _Progressed:
    groups: list[GroupRecord] = field(default_factory=list)
    idle_gpus: tuple[Gpu, ...] = ()
    notes: list[str] = field(default_factory=list)
    is_interrupted: bool = False
    problem: str = ""


def profile(request: TuneRequest, prepare: Prepare, progress: Progress, stop: StopRequest) -> TuneRun:
    """Tune the models that the options name.

    Args:
        request: The options.
        prepare: Makes loads ready.
        progress: Receives the events.
        stop: Ends the run early, with the measurements so far.

    Raises:
        ServingError: Nothing can be tuned, or nothing can be written. The journal has the measurements.
    """
    options = request.options
    began_at, begin = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    done = _Progressed(notes=list(request.notes))
    source = options.launch.repository if options.launch.mode is not LaunchMode.REMOTE else None
    output = OutputRepository(options.output.repository, source, override=options.output.override)
    _note_server(options, done, progress)
    with (
        Journal(options.output.journal_folder) as journal,
        server_of(options.launch, options.measure.protocol, lambda text: progress(Noted(text)), stop) as server,
    ):
        deployment = Deployment(server)
        if not options.launch.reload_disabled:
            deployment.check_explicit()
        context = SearchContext(server, deployment, journal, output, progress)
        info = _server_info(server)
        done.idle_gpus = _gpus(server)
        run = _TuningRun(options, context, prepare, stop, source, info, done)
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
        groups=tuple(done.groups),
        idle_gpus=done.idle_gpus,
        notes=tuple(done.notes),
        is_interrupted=done.is_interrupted,
        problem=done.problem,
        is_offline=options.goal.tune_for is TuneFor.OFFLINE,
    )


@dataclass(slots=True)
class _TuningRun:
    options: TuneOptions
    context: SearchContext
    prepare: Prepare
    stop: StopRequest
    source: Path | None
    info: ServerInfo
    done: _Progressed

    def groups(self) -> None:
        """Tune one group of models after the other, until one ends early."""
        requests = self.options.models.profile
        batches = [requests] if self.options.search.together else [(request,) for request in requests]
        budget = self.options.search.time_budget_s
        deadline = time.monotonic() + budget
        for number, batch in enumerate(batches):
            left = (deadline - time.monotonic()) / (len(batches) - number)
            try:
                ended = self._group(batch, max(left, 0.1) if budget else 0.0)
            except ServingError as error:
                if len(batches) == 1 or self.context.server.fate():
                    raise
                # The other models can still be tuned.
                self.done.problem = str(error)
                self._note(str(error))
                continue
            self.done.groups.append(ended.group)
            self.done.is_interrupted |= ended.is_interrupted
            self.done.problem = ended.problem or self.done.problem
            if ended.is_interrupted or ended.problem:
                return

    def _group(self, requests: tuple[ModelRequest, ...], budget: float) -> SearchEnd:
        measurer = None
        try:
            bases = self._bases(requests)
            for request in requests:
                # What no configuration changes, such as a shape that is missing, is one error now, not one a variant.
                self.prepare(
                    self.context.server.client, LoadPoint(request.name, LoadMode.CONCURRENCY, 1.0), self.context.server
                )
            scope = self._scope(bases, requests)
            if not self.options.launch.reload_disabled:
                self.context.output.open(bases, scope)
            measurer = Measurer(
                self.context.server,
                self.prepare,
                self.options.measure.time_s,
                percentiles(goal_of(self.options, requests)),
                {name: base.composing for name, base in bases.items()},
                self.stop,
                self.options.measure.metrics_interval_s if self.done.idle_gpus else 0.0,
            )
            problem = problem_of(
                self.options,
                requests,
                bases,
                core_count=machine().core_count if measurer.memory_mb() is not None else 0,
                memory=_memory(measurer, bases, _gpus(self.context.server) if self.done.idle_gpus else ()),
                time_budget_s=budget,
            )
            search = GroupSearch(
                *(self.context, problem, bases, scope, measurer),
                loads_variants=not self.options.launch.reload_disabled,
            )
            ended = search.run()
            if ended.group.decision.conclusion is Conclusion.NOTHING_MEASURED:
                self.context.output.discard(bases)  # otherwise the next run mistakes them for another run's
            return ended
        finally:
            if measurer is not None:
                measurer.close()
            with _undisturbed():
                self.context.deployment.restore(self._note)

    def _bases(self, requests: tuple[ModelRequest, ...]) -> dict[str, BaseModel]:
        """Return the models of a group as found: the profiled ones, and their composing models."""
        wanted = {request.name: request for request in requests}
        wanted |= {request.name: request for request in self.options.models.composing if request.name not in wanted}
        found: dict[str, BaseModel] = {}
        names = list(wanted)
        for _ in range(COMPOSING_DEPTH_MAX):
            self.context.deployment.remember(names)
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
        has_gpu = not on_cpu_only and (bool(self.done.idle_gpus) or wants_gpu(complete))
        kind = instance_kind(complete, cpu_only=on_cpu_only)
        base = BaseModel(name, written or complete, complete, kind, has_gpu)
        if not has_gpu and not cpu_only and any("KIND_GPU" in text for _, text in parameters):
            self._note_cpu()
        on_gpu = base.kind is InstanceKind.KIND_GPU and bool(self.done.idle_gpus)
        taken = of_one_instance(before[on_gpu], after[on_gpu], base.instance_count, on_gpu=on_gpu)
        return replace(base, instance_memory_mb=taken)

    def _load_own(self, name: str, written: ModelConfig | None, *, cpu_only: bool) -> tuple[ModelConfig, bool]:
        """Load a model with its own configuration; return it completed, and whether its instances must use the CPU.

        Instances for GPUs use the CPU if the user demands it or the server has no GPU.
        """
        deployment = self.context.deployment
        if self.options.launch.reload_disabled:
            return config_of(deployment.client.model_config(name)), cpu_only
        needs_gpu = written is not None and wants_gpu(written)
        if written is None or not needs_gpu:
            return config_of(deployment.load_own(name)), cpu_only
        if not cpu_only:
            try:
                return config_of(deployment.load_own(name)), False
            except ServerLostError:
                raise
            except ServingError:
                if self.done.idle_gpus:
                    raise
            self._note_cpu()
        return config_of(deployment.load_own(name, on_cpu(written))), True

    def _note_cpu(self) -> None:
        note = "The server has no GPU: instances of KIND_GPU run on the CPU."
        if note not in self.done.notes:
            self._note(note)

    def _used_mb(self) -> tuple[float | None, float | None]:
        """Return the server's memory on this machine, and that of its GPUs; None where it is unknown."""
        processes = resources.find(self.context.server.control_url)
        sample = processes.sample() if processes is not None else None
        gpus = _gpus(self.context.server) if self.done.idle_gpus else ()
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
                "server": [self.info.name, self.info.version, "" if self.context.server.is_ours else self.info.url],
                "server_flags": [self.options.launch.server_flags, self.options.launch.server_environment],
                "load": [measure.protocol.value, measure.time_s, flags],
                "reload": not self.options.launch.reload_disabled,
            }
        )

    def _note(self, text: str) -> None:
        self.done.notes.append(text)
        self.context.progress(Noted(text))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM, so that the server is restored completely."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _note_server(options: TuneOptions, done: _Progressed, progress: Progress) -> None:
    if options.launch.mode is LaunchMode.LOCAL and not is_there(options.launch.server_path):
        done.notes.append(f"{options.launch.server_path} is not installed: charonia serve is started instead.")
    for note in done.notes:
        progress(Noted(note))


def _server_info(server: MeasuredServer) -> ServerInfo:
    protocol = server.control_url.partition("://")[0]
    return ServerInfo.of(server.control_url, protocol, server.client.server_metadata())


def _gpus(server: MeasuredServer) -> tuple[Gpu, ...]:
    """Return the GPUs that the server's metrics page names; none without that page."""
    try:
        return metrics_page.gpus([metrics_page.parse(read_page(server.metrics_url))])
    except ServingError:
        return ()


def _used_on(gpus: tuple[Gpu, ...]) -> float:
    return sum(gpu.memory_used_bytes or 0 for gpu in gpus) / 1e6


def _memory(measurer: Measurer, bases: Mapping[str, BaseModel], gpus: tuple[Gpu, ...]) -> MemoryLimit | None:
    """Return the memory that variants may take, of the GPUs if models run on them; None if it is unknown."""
    totals = [gpu.memory_total_bytes for gpu in gpus if gpu.memory_total_bytes]
    if totals and any(base.kind is InstanceKind.KIND_GPU for base in bases.values()):
        return MemoryLimit(Metric.GPU_USED_MEMORY, sum(totals) / 1e6, base_mb=_used_on(gpus))
    used = measurer.memory_mb()
    if used is None:
        return None
    return MemoryLimit(Metric.CPU_USED_RAM, used + available_mb() * MEMORY_SHARE, base_mb=used)


def available_mb(group: Path = _GROUP) -> float:
    """Return the free memory of this machine or control group, in MB (10^6 bytes)."""
    left = float(psutil.virtual_memory().available)
    for limit_name, used_name in _FILES:
        limit, used = _number(group / limit_name), _number(group / used_name)
        if limit is not None and used is not None:
            left = min(left, max(0.0, limit - used))
    return left / 1e6


def of_one_instance(before_mb: float | None, after_mb: float | None, count: int, *, on_gpu: bool = False) -> float:
    """Return a lower bound of what one more instance of a model takes, in MB; 0 if that is unknown.

    Args:
        before_mb: Memory of the server before the model was loaded, None for unknown.
        after_mb: Memory of the server afterwards.
        count: Instances of the model.
        on_gpu: Whether it is the memory of GPUs.
    """
    if before_mb is None or after_mb is None:
        return 0.0
    return max(0.0, after_mb - before_mb - (SHARED_GPU_MB if on_gpu else SHARED_MB)) / count


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or "max"
        return None
