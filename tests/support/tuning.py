"""A server in closed form for tests of searches: its performance is a formula, so the optimum is known.

`m` busy instances work on batches of `k` items each; a batch takes `fixed + item * k + square * k * k` milliseconds,
shared by the threads of its instance, and longer if instances and threads need more cores than there are.
"""

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from charonia.tools.results.records import Estimate, LoadMode
from charonia.tools.tune.api import (
    LoadPoint,
    Measured,
    Metric,
    Outcome,
    SearchSpace,
    Trial,
    TrialFailed,
    Variant,
)
from charonia.tools.tune.objective import Loads
from charonia.tools.tune.search.phases import Search
from charonia.tools.tune.space import instance_count, max_batch_size

TELLS_MAX = 100_000


def never(variant: Variant) -> str:
    """Return the reason why a variant does not load: none."""
    return ""


@dataclass(frozen=True)
class SimulatedServer:
    """A server whose answers are formulas.

    Attributes:
        item_ms: Time of each item of a batch, in one thread.
        square_ms: What makes large batches worse than their sum.
        thread_gain: From 0 (further threads bring nothing) to 1 (they share the work evenly).
        memory_mb: Memory without any instance; each takes `instance_mb` more.
        noise: Standard deviation between measurements of full effort, as a share. Intervals tell half of it.
        refuses: Returns why a variant cannot be loaded, "" where it can.
        trial_s: Wall time of a trial at full effort; loading takes `load_s` more.
    """

    space: SearchSpace
    core_count: int = 4
    fixed_ms: float = 2.0
    item_ms: float = 1.0
    square_ms: float = 0.02
    thread_gain: float = 0.5
    memory_mb: float = 100.0
    instance_mb: float = 50.0
    noise: float = 0.0
    seed: int = 0
    refuses: Callable[[Variant], str] = field(default=never)
    trial_s: float = 1.0
    load_s: float = 0.5

    def outcome(self, trial: Trial) -> Outcome:
        """Return what a trial finds. The same trial finds the same."""
        reason = self.refuses(trial.variant)
        if reason:
            return TrialFailed(reason, loading=True, elapsed_s=self.load_s)
        drawn = random.Random(f"{self.seed} {trial_key(trial)}")
        spread = self.noise / math.sqrt(trial.effort)
        metrics = {
            load.model: {
                name: self._estimate(value, spread * drawn.gauss(0, 1), spread)
                for name, value in self.truth(trial.variant, load).items()
            }
            for load in trial.loads
        }
        return Measured(metrics, self.load_s + self.trial_s * trial.effort)

    def truth(self, variant: Variant, load: LoadPoint) -> dict[str, float]:
        """Return the metrics of a variant under a load, without noise."""
        instances, threads, batch_ms = self._stage(variant, load.model)
        if load.mode is LoadMode.REQUEST_RATE:
            capacity = self._throughput(math.inf, instances, threads, batch_ms)
            offered = load.value * load.batch_size
            throughput = min(offered, capacity)
            busy = offered / capacity
            latency = batch_ms[1] / (1 - busy) if busy < 1 else 1e6
        else:
            items = load.value * load.batch_size
            throughput = self._throughput(items, instances, threads, batch_ms)
            latency = items / throughput * 1e3
        return {
            Metric.THROUGHPUT: throughput,
            Metric.LATENCY_AVG: latency,
            Metric.LATENCY_P99: 1.5 * latency,
            Metric.CPU_USED_RAM: self.memory_mb + self.instance_mb * instances,
        }

    def _stage(self, variant: Variant, model: str) -> tuple[int, int, list[float]]:
        """Return instances, threads of each, and the time of a batch of each size from 0 items on."""
        facts = next(facts for facts in self.space.models if facts.name == model)
        change = variant.change(model)
        threads = change.thread_count or 1
        speed = 1 + self.thread_gain * (threads - 1)
        largest = max(1, max_batch_size(facts, change))
        times = [
            (self.fixed_ms + self.item_ms * size / speed + self.square_ms * size * size) for size in range(largest + 1)
        ]
        return instance_count(facts, change), threads, times

    def _throughput(self, items: float, instances: int, threads: int, batch_ms: list[float]) -> float:
        busy = int(min(instances, items))
        size = int(min(len(batch_ms) - 1, max(1, items // max(1, busy))))
        contention = math.pow(max(1.0, busy * threads / self.core_count), 1.2)
        return busy * size / batch_ms[size] * 1e3 / contention

    @staticmethod
    def _estimate(value: float, share: float, spread: float) -> Estimate:
        measured = value * math.exp(share)
        half = 1.96 * spread * measured / 2
        return Estimate(measured, max(0.0, measured - half), measured + half)


def run(search: Search, server: SimulatedServer, tells_max: int = TELLS_MAX) -> int:
    """Tell a search what the server finds, to its end or for so many trials; return how many there were."""
    for count in range(tells_max):
        trial = search.ask()
        if trial is None:
            return count
        search.tell(server.outcome(trial))
    return tells_max


def best_throughput(
    server: SimulatedServer, variant: Variant, loads: Sequence[Loads], keeps: Callable[[dict[str, float]], bool]
) -> float:
    """Return a variant's largest true throughput under loads of one model that keep to what is asked."""
    found = (server.truth(variant, load) for (load,) in loads)
    return max((metrics[Metric.THROUGHPUT] for metrics in found if keeps(metrics)), default=0.0)


def trial_key(trial: Trial) -> str:
    """Return a text that is equal for equal measurements."""
    loads = [[load.model, load.mode.value, load.value, load.batch_size] for load in trial.loads]
    return f"{trial.variant.key} {json.dumps(loads)} {trial.repeat} {trial.effort:g}"
