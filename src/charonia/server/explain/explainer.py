"""Samples the counters of every loaded version once a second; explanations as records and as JSON."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from charonia.clock import now_ns
from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError
from charonia.server.ensembles.configuration import scheduling_of
from charonia.server.ensembles.plan import key_of
from charonia.server.execution.version_runner import Runner
from charonia.server.explain.rules import Activity, Facts, Finding, History, ModelSetup, explain
from charonia.server.lifecycle.front_end_placement import ExecutionPlacement
from charonia.server.lifecycle.loader import LoadedVersion, placements
from charonia.server.machine.gauges import CpuTimes
from charonia.server.metrics.model_metrics import ModelMetrics
from charonia.server.metrics.processes import ProcessRecord
from charonia.server.rate_limiter.limiter import NO_SHORTAGE

_QUANTILES = ((0.5, "p50"), (0.99, "p99"))


@dataclass(frozen=True, slots=True)
class ProcessHistory:
    """A process of the server.

    Attributes:
        uptime_s: How long it has been running, in seconds; 0 while it does not run.
        last_exit: Why it ended the last time, "" if it has never ended.
    """

    name: str
    uptime_s: float
    restarts: int
    last_exit: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """An explained model version.

    Attributes:
        processes: The processes of the server; none for a server of one process.
        traffic: Where requests without a version go, in sentences; none for the default, the latest version.
    """

    facts: Facts
    findings: tuple[Finding, ...]
    steps: tuple["Explanation", ...] = ()
    processes: tuple[ProcessHistory, ...] = ()
    traffic: tuple[str, ...] = ()

    @classmethod
    def of(cls, facts: Facts, steps: tuple["Explanation", ...] = ()) -> "Explanation":
        return cls(facts, explain(facts), steps)


def explanation_json(explanation: Explanation) -> dict[str, object]:
    """Return an explanation as a JSON document; times are microseconds, shares lie between 0 and 1."""
    facts = explanation.facts
    setup, activity, counts = facts.setup, facts.activity, facts.activity.counts
    return {
        "model_name": setup.model,
        "model_version": setup.version,
        "seconds": round(activity.seconds, 1),
        "active_seconds": round(activity.active_seconds, 1),
        "findings": [{"kind": each.kind, "says": each.says, "change": each.change} for each in explanation.findings],
        "requests": {
            "success": counts.success,
            "per_second": round(counts.success / activity.active_seconds, 1) if activity.active_seconds else 0.0,
            "failed": {reason.value.lower(): count for reason, count in counts.failed.items()},
            "from_cache": counts.hits,
            "waiting": activity.queued[-1] if activity.queued else 0,
            "waiting_max": max(activity.queued, default=0),
        },
        "batches": {
            "count": activity.batch_count,
            "mean_size": round(activity.mean_batch, 2),
            "sizes": {str(size): counts.batches[size] for size in sorted(counts.batches)},
            "closed": {reason.value: count for reason, count in counts.closes.items()},
        },
        "time_us": {
            "request": _us(counts.request_ns, counts.success),
            "queue": _us(counts.queue_ns, counts.success),
            **{f"queue_{name}": _rounded_us(activity.wait_ns(share)) for share, name in _QUANTILES},
            "batch_infer": _us(counts.infer_ns, activity.batch_count),
            "batch_moving": _us(counts.moving_ns, activity.batch_count),
        },
        "instances": _instances(facts),
        "rate_limiter": {
            "waiting": round(activity.short, 3),
            "resources": list(activity.resources),
            "holders": list(activity.holders),
        },
        "cores": {
            "count": setup.cores,
            "idle": round(activity.idle_cores, 1),
            "taken": round(activity.taken_cores, 1),
        },
        "configuration": {
            "max_batch_size": setup.batch_max,
            "dynamic_batching": setup.batches,
            "max_queue_delay_microseconds": setup.delay_us,
            "preferred_batch_size": list(setup.preferred),
        },
        "runs_in": None
        if setup.placement is None
        else {"front_ends": setup.placement.front_ends, "only_in_engine_because": setup.placement.reason},
        "steps": [explanation_json(step) for step in explanation.steps],
        "processes": [
            {
                "name": each.name,
                "uptime_seconds": round(each.uptime_s, 1),
                "restarts": each.restarts,
                "last_exit": each.last_exit,
            }
            for each in explanation.processes
        ],
        "traffic": list(explanation.traffic),
    }


def _instances(facts: Facts) -> dict[str, object]:
    setup = facts.setup
    return {
        "count": setup.instances,
        "kind": "KIND_GPU" if setup.on_gpu else "KIND_CPU",
        "busy": round(facts.busy, 3),
        "batches_at_once": round(facts.activity.occupancy(setup.instances), 2),
        "threads": setup.threads,
        "min": setup.bounds.least if setup.bounds is not None else setup.instances,
        "max": setup.bounds.most if setup.bounds is not None else setup.instances,
        "scaling": setup.scaling,
    }


def _rounded_us(ns: float | None) -> int | None:
    return None if ns is None else round(ns / 1e3)


def _us(ns: int, count: int) -> float:
    return round(ns / count / 1e3, 1) if count else 0.0


INTERVAL_S = 1.0
"""Time between two marks."""

THREADS_PARAMETER = "intra_op_thread_count"
"""Parameter of a model: the number of threads of an instance."""


class Explainer:
    """Records the activity of every loaded version in the last minute.

    Args:
        loaded: Returns every version that answers.
        find: Returns a version by name and version ("" for any); raises where there is none.
        cores: Cores that the server may use.
        processes: Returns the state of the server's processes.
        where: Returns where the requests of a version run, None for a server of one process.
        traffic: Returns where requests of a model without a version go, in sentences.
    """

    def __init__(
        self,
        loaded: Callable[[], list[LoadedVersion]],
        find: Callable[[str, str], Runner],
        cores: int,
        processes: Callable[[], tuple[ProcessRecord, ...]] = tuple,
        where: Callable[[Runner], ExecutionPlacement | None] = lambda _: None,
        traffic: Callable[[str], Sequence[str]] = lambda _: (),
    ) -> None:
        self._loaded = loaded
        self._find = find
        self._cores = cores
        self._processes = processes
        self._placement = where
        self._traffic = traffic
        self._histories: dict[ModelMetrics, History] = {}
        self._times = CpuTimes.read(0.0)
        self._at_ns = now_ns()

    async def run(self) -> None:
        """Mark the counters periodically, until cancelled."""
        while True:
            self.mark()
            await asyncio.sleep(INTERVAL_S)

    def mark(self) -> None:
        """Mark the counters of all versions."""
        loaded = self._loaded()
        workers_s = sum(worker.cpu_seconds for version in loaded for worker in version.workers())
        now, times = now_ns(), CpuTimes.read(workers_s)
        idle, taken = times.since(self._times, (now - self._at_ns) / 1e9)
        idle = min(float(self._cores), idle)
        self._at_ns, self._times = now, times
        before, self._histories = self._histories, {}
        for version in loaded:
            runner = version.runner
            history = self._histories[runner.metrics] = before.get(runner.metrics) or History()
            shortage = version.claim.shortage(now) if version.claim is not None else NO_SHORTAGE
            history.mark(runner.metrics, now, runner.pending or 0, idle, shortage, taken)

    def explain(self, name: str, version: str = "") -> Explanation:
        """Explain a model version, an ensemble with the models of its steps.

        Raises:
            ServingError: The version does not exist.
        """
        explanation = self._explain(self._find(name, version))
        now = now_ns()
        processes = tuple(
            ProcessHistory(each.name, each.uptime_s(now), sum(each.restarts.values()), each.last_exit)
            for each in self._processes()
        )
        return replace(explanation, processes=processes, traffic=tuple(self._traffic(name)))

    def _explain(self, runner: Runner) -> Explanation:
        history = self._histories.get(runner.metrics)
        activity = history.activity() if history is not None else Activity()
        steps = tuple(self._explain(found) for step in _steps(runner.config) if (found := self._step(step)) is not None)
        setup = setup_of(runner.config, runner.version, self._cores, self._placement(runner))
        scaling = next((each.scaling for each in self._loaded() if each.runner is runner), None)
        if scaling is not None:
            rule = scaling.rule
            setup = replace(setup, instances=scaling.count, bounds=rule.bounds, scaling=rule.explanation(now_ns()))
        facts = Facts(
            setup,
            activity,
            max(((step.facts.setup.model, step.facts.busy) for step in steps), key=_share, default=None),
            max(((step.facts.setup.model, step.facts.activity.short) for step in steps), key=_share, default=None),
        )
        return Explanation.of(facts, steps)

    def _step(self, name: str) -> Runner | None:
        try:
            return self._find(name, "")
        except ServingError:
            return None


def setup_of(config: ModelConfig, version: str, cores: int, where: ExecutionPlacement | None = None) -> ModelSetup:
    """Return the part of a complete configuration that rules use."""
    steps = _steps(config)
    placed = [] if steps else placements(config, cores)
    parameter = config.parameters.get(THREADS_PARAMETER, "")
    batching = config.dynamic_batching
    return ModelSetup(
        model=config.name,
        version=version,
        instances=(where.front_ends if where is not None and placed else 0) or len(placed),
        on_gpu=any(placement.kind is InstanceKind.KIND_GPU for placement in placed),
        threads=int(parameter) if parameter.isdecimal() else 0,
        cores=cores,
        batch_max=config.max_batch_size,
        batches=batching is not None,
        delay_us=batching.max_queue_delay_microseconds if batching is not None else 0,
        preferred=batching.preferred_batch_size if batching is not None else (),
        steps=steps,
        placement=where,
    )


def _share(step: tuple[str, float]) -> float:
    return step[1]


def _steps(config: ModelConfig) -> tuple[str, ...]:
    if config.ensemble_scheduling is None:
        return ()
    return tuple(dict.fromkeys(key_of(step) for step in scheduling_of(config).step))
