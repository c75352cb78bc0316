"""The closed loop of autoscaling: random arrivals, pods that batch, and a rule that sees them late.

Usage: python -m bench.fleet.scaling
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Protocol

import numpy as np

from charonia.platform.deployments.scaler import ReplicaRule, ReplicaSample
from charonia.platform.deployments.spec import Replicas
from charonia.server.metrics.model_metrics import BatchCost

TICK_S = 15.0
"""Between two scrapes, and between two decisions of Kubernetes."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model of a pod.

    Attributes:
        by_batch: Seconds by size of the batch, from 1 to the greatest.
        instances: In each pod.
        share: Of the requests.
    """

    by_batch: tuple[float, ...]
    instances: int = 1
    share: float = 1.0

    @property
    def capacity(self) -> float:
        """Requests a second of a pod whose batches are all full."""
        return self.instances * len(self.by_batch) / self.by_batch[-1]


@dataclass(slots=True)
class Counters:
    """What a model of a pod has counted, as the server's metrics do: when a batch ends."""

    load_s: float = 0.0
    queue_s: float = 0.0
    compute_s: float = 0.0


class Pod:
    """A pod that is ready: each model has a queue and instances."""

    def __init__(self, models: Sequence[Model]) -> None:
        self.models = models
        self.waiting: list[deque[float]] = [deque() for _ in models]
        self.working = [0] * len(models)
        self.counters = [Counters() for _ in models]
        self._costs = [BatchCost(len(each.by_batch)) for each in models]
        self._batches: list[list[tuple[int, float]]] = [[] for _ in models]
        self.scraped: deque[tuple[float, list[Counters]]] = deque()
        self.in_flight = 0
        self.is_leaving = False

    def count(self, number: int, size: int, took_s: float, waited_s: float) -> None:
        """Count a batch of a model."""
        self._batches[number].append((size, took_s))
        self.counters[number].compute_s += took_s * size
        self.counters[number].queue_s += waited_s

    def add_up(self) -> None:
        """Count the load of the batches so far."""
        for batches, cost, counted in zip(self._batches, self._costs, self.counters, strict=True):
            if batches:
                sizes, took_s = zip(*batches, strict=True)
                took_ns = np.array(took_s) * 1e9
                counted.load_s += cost.load_ns(np.array(sizes), took_ns) / 1e9
                batches.clear()

    def scrape(self, now: float, window_s: float) -> None:
        """Keep the counters, for as long as a rate looks back."""
        self.add_up()
        self.scraped.append((now, [replace(each) for each in self.counters]))
        while self.scraped[0][0] < now - window_s:
            self.scraped.popleft()

    def rates(self) -> list[Counters] | None:
        """Return the rates of all models over the window, None for a pod without two scrapes."""
        if len(self.scraped) < 2:
            return None
        (start, before), (end, after) = self.scraped[0], self.scraped[-1]
        seconds = end - start
        return [
            Counters(
                (b.load_s - a.load_s) / seconds,
                (b.queue_s - a.queue_s) / seconds,
                (b.compute_s - a.compute_s) / seconds,
            )
            for a, b in zip(before, after, strict=True)
        ]


Measure = Callable[[Pod], float | None]


def load_share(pod: Pod) -> float | None:
    """Return the share of time in which the instances of the busiest model computed."""
    rates = pod.rates()
    return None if rates is None else max(r.load_s / m.instances for r, m in zip(rates, pod.models, strict=True))


def queue_ratio(pod: Pod) -> float | None:
    """Return the time in the queue over the time of execution."""
    rates = pod.rates()
    return None if rates is None else sum(r.queue_s for r in rates) / max(sum(r.compute_s for r in rates), 0.1)


def wait_ratio(pod: Pod) -> float | None:
    """Return the same, 2 at most: it at most doubles the pods."""
    ratio = queue_ratio(pod)
    return None if ratio is None else min(ratio, 2.0)


class Rule(Protocol):
    """Decides how many pods there are."""

    every_s: float

    def wanted(self, now: float, ready: Sequence[Pod], starting: int) -> int:
        """Return the number of pods to run."""
        ...


@dataclass(slots=True)
class Cluster:
    """A HorizontalPodAutoscaler as the chart makes it, or with `is_keda` the one that KEDA makes.

    Attributes:
        measures: The target of each measure.
        least: Fewest pods.
        most: Most pods.
        is_keda: The measure is a sum that is divided by the number of pods; otherwise pods without a value count as 0
            where pods would be added, and as at the target where pods would be removed.
        up: Pods that are added in a minute.
        calm_s: Time of less load before a pod is removed.
    """

    measures: Mapping[Measure, float]
    least: int = 1
    most: int = 30
    is_keda: bool = False
    up: int = 4
    calm_s: float = 300.0
    tolerance: float = 0.1
    every_s: float = TICK_S
    _wishes: deque[tuple[float, int]] = field(default_factory=deque)
    _changes: deque[tuple[float, int]] = field(default_factory=deque)

    def wanted(self, now: float, ready: Sequence[Pod], starting: int) -> int:
        """Return the number of pods to run."""
        count = len(ready) + starting
        wish = max(self._by(measure, target, ready, count) for measure, target in self.measures.items())
        wish = min(max(wish, self.least), self.most)
        self._wishes.append((now, wish))
        while self._wishes[0][0] <= now - self.calm_s:
            self._wishes.popleft()
        while self._changes and self._changes[0][0] <= now - 60.0:
            self._changes.popleft()
        wish = max(wish, min(count, max(each for _, each in self._wishes)))
        added = sum(more for _, more in self._changes if more > 0)
        removed = -sum(more for _, more in self._changes if more < 0)
        wish = min(max(wish, count - max(0, 1 - removed)), count + max(0, self.up - added))
        if wish != count:
            self._changes.append((now, wish - count))
        return wish

    def _by(self, measure: Measure, target: float, ready: Sequence[Pod], count: int) -> int:
        values = [value for pod in ready if (value := measure(pod)) is not None]
        if not values:
            return count
        total, seen = sum(values), len(values)
        if not self.is_keda and seen < count:
            ratio = total / seen / target
            if abs(ratio - 1.0) <= self.tolerance:
                return count
            with_others = total / count / target if ratio > 1.0 else (total + (count - seen) * target) / count / target
            if abs(with_others - 1.0) <= self.tolerance or (ratio > 1.0) != (with_others > 1.0):
                return count
            return math.ceil(with_others * count)
        ratio = total / count / target
        return count if abs(ratio - 1.0) <= self.tolerance else math.ceil(ratio * count)


class Platform:
    """The rule of the platform."""

    every_s = 5.0

    def __init__(self, least: int = 1, most: int = 30) -> None:
        self._rule = ReplicaRule(Replicas(min=least, max=most))
        self._before: tuple[float, list[float], float, float] | None = None

    def wanted(self, now: float, ready: Sequence[Pod], starting: int) -> int:
        """Return the number of servers to run."""
        models = ready[0].models
        for pod in ready:
            pod.add_up()
        busy = [sum(pod.counters[n].load_s for pod in ready) for n in range(len(models))]
        queued = sum(each.queue_s for pod in ready for each in pod.counters)
        computed = sum(each.compute_s for pod in ready for each in pod.counters)
        before, self._before = self._before, (now, busy, queued, computed)
        sample = None
        if before is not None:
            shares = [
                max(0.0, after - earlier) / (now - before[0]) / model.instances / len(ready)
                for earlier, after, model in zip(before[1], busy, models, strict=True)
            ]
            waited = (queued - before[2]) / max(computed - before[3], 0.1 * (now - before[0]))
            sample = ReplicaSample(now, max(0.0, waited), max(shares))
        return self._rule.wanted(len(ready) + starting, sample, now, is_steady=not starting)


@dataclass(slots=True)
class Outcome:
    """What came of it.

    Attributes:
        pods: Time and number of pods, starting ones included, after each change.
        latencies: Arrival and latency of each request.
    """

    pods: list[tuple[float, int]] = field(default_factory=list)
    latencies: list[tuple[float, float]] = field(default_factory=list)

    def changes(self, since_s: float) -> int:
        """Return how often the number of pods changed after a time."""
        return sum(at >= since_s for at, _ in self.pods)

    def at(self, time_s: float) -> int:
        """Return the number of pods at a time."""
        return [count for at, count in self.pods if at <= time_s][-1]

    def late(self, since_s: float, limit_s: float, until_s: float = math.inf) -> float:
        """Return the share of the requests of a time that took longer than a limit."""
        found = [latency > limit_s for at, latency in self.latencies if since_s <= at < until_s]
        return sum(found) / max(1, len(found))


def simulate(
    models: Sequence[Model],
    rate: Callable[[float], float],
    rule: Rule,
    *,
    pods: int,
    seconds: float,
    start_s: float = 30.0,
    window_s: float = 120.0,
    seed: int = 1,
) -> Outcome:
    """Simulate a service: each request goes to the one of two ready pods that has fewer.

    Args:
        models: The models of each pod.
        rate: Requests a second, at a time.
        rule: The rule.
        pods: How many there are at first.
        seconds: How long.
        start_s: From a decision until the pod is ready.
        window_s: Time over which rates are taken.
        seed: Of the random numbers.
    """
    random = Random(seed)
    outcome = Outcome([(0.0, pods)])
    ready = [Pod(models) for _ in range(pods)]
    starting = ordinal = 0
    events: list[tuple[float, int, Callable[[float], None]]] = []
    shares = [each.share for each in models]

    def at(when: float, happens: Callable[[float], None]) -> None:
        nonlocal ordinal
        ordinal += 1
        heapq.heappush(events, (when, ordinal, happens))

    def begin(pod: Pod, number: int, now: float) -> None:
        model, queue = models[number], pod.waiting[number]
        while queue and pod.working[number] < model.instances:
            batch = [queue.popleft() for _ in range(min(len(queue), len(model.by_batch)))]
            took = model.by_batch[len(batch) - 1] * random.uniform(0.8, 1.2)
            pod.working[number] += 1
            at(now + took, lambda end, batch=batch, took=took: finish(pod, number, batch, took, end))  # type: ignore[misc]

    def finish(pod: Pod, number: int, batch: list[float], took: float, now: float) -> None:
        pod.count(number, len(batch), took, sum(now - took - arrived for arrived in batch))
        pod.working[number] -= 1
        pod.in_flight -= len(batch)
        outcome.latencies += [(arrived, now - arrived) for arrived in batch]
        begin(pod, number, now)

    def arrive(now: float) -> None:
        at(now + random.expovariate(rate(now)), arrive)
        pod = min(random.choice(ready), random.choice(ready), key=lambda each: each.in_flight)
        number = random.choices(range(len(models)), shares)[0] if len(models) > 1 else 0
        pod.in_flight += 1
        pod.waiting[number].append(now)
        begin(pod, number, now)

    def look(now: float) -> None:
        nonlocal starting
        at(now + rule.every_s, look)
        there = len(ready) + starting
        wanted = rule.wanted(now, ready, starting)
        for _ in range(wanted - there):
            starting += 1
            at(now + start_s, started)
        for _ in range(there - wanted):
            if len(ready) > 1:
                ready.pop()  # it completes what it has
        if wanted != there:
            outcome.pods.append((now, wanted))
        # What a decision sees is one scrape old.
        for pod in ready if rule.every_s == TICK_S else ():
            pod.scrape(now, window_s)

    def started(now: float) -> None:
        nonlocal starting
        starting -= 1
        ready.append(Pod(models))

    at(random.expovariate(rate(0.0)), arrive)
    at(rule.every_s, look)
    while events[0][0] < seconds:
        now, _, happens = heapq.heappop(events)
        happens(now)
    return outcome


CPU = (Model((0.8,), 8),)
"""Eight instances, no batching."""

BATCHES = (Model(tuple(0.6 + 0.08 * size for size in range(1, 9)), 2),)
"""Two instances with dynamic batching."""

GPU = (Model(tuple(0.2 + 0.02 * size for size in range(1, 33))),)
"""One instance of a network on a GPU, with large batches."""

SEVERAL = (
    Model((0.8,), 4, 0.6),
    Model((2.0,), 2, 0.1),
    Model(tuple(0.4 + 0.08 * size for size in range(1, 9)), 1, 0.3),
)
"""Three models in each pod."""

PODS: Mapping[str, tuple[Sequence[Model], float]] = {
    "8 instances": (CPU, 30.0),
    "dynamic batching": (BATCHES, 30.0),
    "GPU, start 180 s": (GPU, 180.0),
    "three models": (SEVERAL, 30.0),
}
"""The models of a pod and its start in seconds, by name. Slow ones, so that an hour is simulated in seconds."""

RULES: Mapping[str, Callable[[], Rule]] = {
    "HPA, busy share": lambda: Cluster({load_share: 0.7, wait_ratio: 1.0}),
    "KEDA, busy share": lambda: Cluster({load_share: 0.7, wait_ratio: 1.0}, is_keda=True),
    "platform": Platform,
    "HPA, queue ratio": lambda: Cluster({queue_ratio: 1.0}),
    "KEDA, queue ratio": lambda: Cluster({queue_ratio: 1.0}, is_keda=True),
}


def capacity(models: Sequence[Model]) -> float:
    """Return the requests a second at which the first of a pod's models is always busy."""
    whole = sum(each.share for each in models)
    return min(each.capacity * whole / each.share for each in models)


def main() -> None:
    """Print how each rule follows a constant load, and one that triples."""
    print("| pods | rule | constant load: pods | changes in an hour | late | load x 3: on time after | most pods |")
    print("|---|---|---|---|---|---|---|")
    for name, (models, start_s) in PODS.items():
        rate = 3.2 * capacity(models)
        for label, rule in RULES.items():
            steady = simulate(models, lambda _: rate, rule(), pods=4, seconds=4500.0, start_s=start_s)  # noqa: B023
            grown = partial(_tripled, rate / 3)
            step = simulate(models, grown, rule(), pods=2, seconds=2100.0, start_s=start_s)
            limit = 5 * max(each.by_batch[-1] for each in models)
            counts = [count for at, count in steady.pods if at >= 900] or [steady.at(900)]
            print(
                f"| {name} | {label} | {min(counts)} to {max(counts)} | {steady.changes(900)} "
                f"| {steady.late(900, limit):.2%} | {on_time_after(step, 900, limit)} s "
                f"| {max(count for at, count in step.pods if at >= 900)} |",
                flush=True,
            )


def _tripled(rate: float, now: float) -> float:
    return rate * (3 if now >= 900 else 1)


def on_time_after(outcome: Outcome, since_s: float, limit_s: float) -> int:
    """Return the seconds after a time from which at most 1 % of the requests of each 15 s are late."""
    last = 0.0
    for start in range(int(since_s), int(outcome.latencies[-1][0]) - 15, 15):
        if outcome.late(start, limit_s, start + 15) > 0.01:
            last = start + 15 - since_s
    return int(last)


if __name__ == "__main__":
    main()
