"""The phases of a search: the default configuration, the search mode, queue delays, and the finalists. Pure.

Successive halving measures every variant briefly, then gives more time to fewer and fewer of them. Each round measures
the survivors with twice the effort. A variant that is significantly worse than the leader drops out; if the intervals
overlap for too many, only the best part continues, so a round never costs more than the previous one.

As a dimension of the grid, the queue delay would multiply its size, and it matters little while the batch size is
wrong. So it is tried last, and only for the best few variants. At the end, the search finds the best variants' limits
of load, then repeats them until the verdict is certain.

The search itself numbers trials, records outcomes, and enforces the time budget. A mode is a generator that
yields a trial and is sent its outcome. So it reads as a plain loop, and is suspended while the measurement runs.

Source: Maron and Moore, Hoeffding races (1994); Karnin, Koren, Somekh, Almost optimal exploration (2013).
"""

import itertools
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from random import Random
from statistics import NormalDist
from typing import TypeVar

from charonia.core.errors import invalid
from charonia.tools.results.records import LoadMode, student
from charonia.tools.tune.api import (
    Goal,
    LoadPoint,
    Measured,
    Metric,
    ModelChange,
    ModelFacts,
    Outcome,
    SearchMode,
    SearchOptions,
    SearchSpace,
    Skipped,
    Trial,
    TrialFailed,
    TrialRecord,
    Variant,
)
from charonia.tools.tune.objective import Evidence, Loads, Point, Score, confidence_of_looks, counted, gain
from charonia.tools.tune.space import Coordinate, Grid, batch_slots, instance_count, load_values, max_batch_size

_Result = TypeVar("_Result")
Steps = Generator[Trial, Outcome, _Result]
"""A generator that yields trials, is sent their outcomes, and returns a result."""

BRIEF, USUAL, FULL = 0.25, 0.5, 1.0
"""Efforts: of a first short measurement, of one during the search, and of one that decides."""

_DEFAULT = Variant()

FAILURES_MAX = 5
"""After this many trials without a success, a search stops."""


class OutOfBudget(Exception):  # noqa: N818 - the end of a phase, no error
    """A phase of the search used up its measurements or its time, as the text states."""


class Search:
    """A search: a state machine without clock, network and files. The same outcomes lead to the same trials.

    To resume, create the same search again and tell it the journal's outcomes of its trials.

    Attributes:
        history: All trials and outcomes told, in order.
        notes: Decisions of the search, one sentence each: where it stopped, and the dropped variants with reasons.
        repeat_effort: Of the measurements that decide. In a small space it equals `look_effort`, and the first
            measurement counts as one of them.
    """

    def __init__(self, space: SearchSpace, goal: Goal, options: SearchOptions) -> None:
        self.grid = Grid(space)
        self.goal = goal
        self.options = options
        self.evidence = Evidence(goal)
        self.history: list[TrialRecord] = []
        self.notes: list[str] = []
        self.look_effort = USUAL if self.grid.is_small else BRIEF
        self.repeat_effort = USUAL if self.grid.is_small else FULL
        self._bound = self._points_max()
        self._share = 1.0
        self._reserve = 0
        self._spent_s = 0.0
        self._elapsed_s: dict[float, tuple[float, int]] = {}
        self._failed: set[tuple[str, Loads]] = set()
        self._any_success = False
        self._skipped: dict[str, Skipped] = {}
        self._steps: Steps[None] = _steps(self)
        self._trial: Trial | None = None
        self._has_begun = self._has_ended = False

    def ask(self) -> Trial | None:
        """Return what to measure next, None at the end. Until `tell` it returns the same trial."""
        if not self._has_begun:
            self._has_begun = True
            self._advance(None)
        return self._trial

    def tell(self, outcome: Outcome) -> None:
        """Take the outcome of the trial that `ask` returned."""
        if self._trial is None:
            raise invalid("no trial is open whose outcome could be told", hint="ask first")
        self._advance(outcome)

    def _advance(self, outcome: Outcome | None) -> None:
        try:
            self._trial = next(self._steps) if outcome is None else self._steps.send(outcome)
        except StopIteration:
            self._trial = None
            self._has_ended = True

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Variants that were not measured, and why."""
        return tuple(self._skipped.values())

    @property
    def trials_left(self) -> int:
        """Upper bound of the remaining trials, if every point is measured twice."""
        return 0 if self._has_ended else max(0, min(self.options.trials_max, self._bound) - len(self.history))

    def _points_max(self) -> int:
        space, options = self.grid.space, self.options
        loads = 1 if space.load.formula else len(load_values(space.load))
        edges = 2 * space.load.binary_steps_max
        each = (2 * loads + edges) * len(space.load.batch_sizes)
        delays = (options.finalist_count + 1) * sum(len(model.queue_delays_us) for model in space.models)
        return (math.prod(self.grid.shape) + 1) * each + (options.finalist_count + 6) * options.repeats_max + delays

    def begin(self, share: float, reserve: int) -> None:
        """Start a phase with a share of the time budget, and reserve a number of trials for later phases."""
        self._share = share
        self._reserve = reserve

    def loads(self, value: float, batch_size: int) -> Loads:
        """Return the same load on each profiled model."""
        mode = self.grid.space.load.mode
        return tuple(LoadPoint(model, mode, value, batch_size) for model in self.grid.space.profiled)

    def formula(self, variant: Variant, batch_size: int) -> Loads:
        """Return a concurrency that fills each model's batches twice: 2 x batch size x instances, within the bounds."""
        space = self.grid.space
        low, high = space.load.minimum, space.load.maximum
        return tuple(
            replace(load, value=float(min(max(2 * batch_slots(space, variant, load.model), low), high)))
            for load in self.loads(low, batch_size)
        )

    def measure(self, variant: Variant, loads: Loads, effort: float, purpose: str) -> Steps[Point | None]:
        """Measure a point unless it was already measured with at least this effort; None if it cannot be measured.

        Raises:
            OutOfBudget: The budget does not allow another trial.
        """
        known = self.evidence.count(variant, loads, effort) or (variant.key, loads) in self._failed
        if not known and self.fits(variant):
            yield from self.again(variant, loads, effort, purpose)
        return self.evidence.point(variant, loads)

    def again(self, variant: Variant, loads: Loads, effort: float, purpose: str) -> Steps[bool]:
        """Measure a point, again if it was measured before; return whether that succeeded."""
        self._check_budget(effort)
        repeat = sum(told.trial.variant == variant and told.trial.loads == loads for told in self.history)
        trial = Trial(len(self.history) + 1, variant, loads, repeat, effort, purpose)
        outcome = yield trial
        self._take(TrialRecord.of(trial, outcome))
        return isinstance(outcome, Measured)

    def fits(self, variant: Variant) -> bool:
        """Return whether a variant can be tried; if not, its reason is in `skipped`."""
        key = variant.key
        if key in self._skipped:
            return False
        reason = self.grid.misfit(variant) or too_large(self.grid.space, variant, self.history)
        if reason and not variant.is_default:
            self._skipped[key] = Skipped(variant, reason)
            return False
        return True

    def note(self, text: str) -> None:
        """Note a decision of the search; duplicates are dropped."""
        if text not in self.notes:
            self.notes.append(text)

    def _take(self, told: TrialRecord) -> None:
        self.history.append(told)
        self.evidence.add(told)
        outcome, trial = told.outcome, told.trial
        self._spent_s += outcome.elapsed_s
        total, count = self._elapsed_s.get(trial.effort, (0.0, 0))
        self._elapsed_s[trial.effort] = (total + outcome.elapsed_s, count + 1)
        if isinstance(outcome, TrialFailed):
            self._failed.add((trial.variant.key, trial.loads))
            if outcome.loading:
                self._skipped[trial.variant.key] = Skipped(trial.variant, outcome.reason)
            return
        missing = self.evidence.lacks(outcome)
        if missing:
            self.note(f"A measurement does not count, as it lacks {', '.join(missing)}.")
        self._any_success |= not missing

    def _check_budget(self, effort: float) -> None:
        if len(self.history) >= FAILURES_MAX and not self._any_success:
            last = self.history[-1].outcome
            reason = f", the last one: {last.reason}" if isinstance(last, TrialFailed) else ""
            raise OutOfBudget(f"the first {FAILURES_MAX} measurements all failed{reason}")
        if len(self.history) >= self.options.trials_max - self._reserve:
            raise OutOfBudget(f"the limit of {self.options.trials_max} measurements was reached")
        budget = self.options.time_budget_s
        if budget and self._spent_s + self._expected_s(effort) > budget * self._share:
            raise OutOfBudget(f"the time budget of {budget:g} s was used up")

    def _expected_s(self, effort: float) -> float:
        """Return the expected duration of a trial, from trials of the same effort, or from all if there was none."""
        total, count = self._elapsed_s.get(effort, (self._spent_s, len(self.history)))
        return total / count if count else 0.0


def too_large(space: SearchSpace, variant: Variant, history: Sequence[TrialRecord]) -> str:
    """Return why a variant cannot fit, "" if it may.

    It cannot where the instances that it adds take more than there is, or where two measured variants that differ from
    it in the number of instances alone lie on a line that leads beyond the limit.
    """
    if not space.memory or not space.memory.limit_mb:
        return ""
    limit = space.memory.limit_mb
    expected = _added(space, variant)
    if expected > limit:
        return f"needs at least {expected:,.0f} MB of memory by what one instance takes, there are {limit:,.0f} MB"
    expected = _extrapolated(space, variant, history, space.memory.metric)
    if expected > limit:
        return f"would need about {expected:,.0f} MB of memory by what fewer instances took, there are {limit:,.0f} MB"
    return ""


def _added(space: SearchSpace, variant: Variant) -> float:
    """Return the memory of the default configuration and of the missing instances, 0 if it is unknown."""
    added = sum(
        model.instance_memory_mb * (instance_count(model, variant.change(model.name)) - model.instance_count)
        for model in space.models
    )
    return space.memory.base_mb + added if space.memory and added > 0 else 0.0


def _extrapolated(space: SearchSpace, variant: Variant, history: Sequence[TrialRecord], metric: Metric) -> float:
    wanted = _total(space, variant)
    without = _without_instances(variant)
    known: dict[int, float] = {}
    for told in history:
        count = _total(space, told.trial.variant)
        if count < wanted and isinstance(told.outcome, Measured) and _without_instances(told.trial.variant) == without:
            known[count] = max(known.get(count, 0.0), _used(told.outcome, metric))
    if not known:
        return 0.0
    more = max(known)
    fewer = [count for count in known if count < more]
    slope = (known[more] - known[max(fewer)]) / (more - max(fewer)) if fewer else 0.0
    return known[more] + max(0.0, slope) * (wanted - more)


def _used(outcome: Measured, metric: Metric) -> float:
    """Return the memory of the server, which every model's metrics contain in full."""
    used = [metrics[metric] for metrics in outcome.metrics.values() if metric in metrics]
    return max((estimate.value for estimate in used), default=0.0)


def _total(space: SearchSpace, variant: Variant) -> int:
    return sum(instance_count(model, variant.change(model.name)) for model in space.models)


def _without_instances(variant: Variant) -> tuple[ModelChange, ...]:
    return tuple(replace(change, instance_count=None) for change in variant.changes)


PLATEAU = 0.05
"""Three loads in a row that gain at most this over the previous load are the plateau."""

_PLATEAU_LOADS = 3
_RATE_PRECISION = 0.02
_FAILED_LOADS_MAX = 2


def sweep(search: Search, variant: Variant, effort: float, purpose: str) -> Steps[None]:
    """Measure a variant under growing loads, until throughput no longer grows or the constraints are missed."""
    load = search.grid.space.load
    for batch_size in load.batch_sizes:
        if load.formula:
            yield from search.measure(variant, search.formula(variant, batch_size), effort, purpose)
        else:
            yield from _sweep(search, variant, batch_size, effort, purpose)


def _sweep(search: Search, variant: Variant, batch_size: int, effort: float, purpose: str) -> Steps[None]:
    load = search.grid.space.load
    points: list[Point] = []
    failed = 0
    for value in load_values(load):
        point = yield from search.measure(variant, search.loads(value, batch_size), effort, purpose)
        if point is None:
            failed += 1
            if failed == _FAILED_LOADS_MAX or not search.fits(variant):
                return
            continue
        points.append(point)
        if load.values and not load.stops_early:
            continue
        if _missed(points) or (yield from _levelled(search, points, effort)):
            return


def _missed(points: Sequence[Point]) -> bool:
    """Return whether more load would only miss the constraints by more."""
    if len(points) < 2 or not points[-1].violation:
        return False
    if not points[-2].violation:
        return points[-1].surely_violates
    return points[-1].violation >= points[-2].violation


def _levelled(search: Search, points: list[Point], effort: float) -> Steps[bool]:
    """Return whether the last loads gained nothing. If noise may be the reason, they are measured once more."""
    if len(points) <= _PLATEAU_LOADS:
        return False
    before, best = points[-_PLATEAU_LOADS - 1], max(points[-_PLATEAU_LOADS:], key=lambda point: point.order)
    if _rises(before, best):
        return False
    undecided = gain(best, before, search.goal.confidence).high > PLATEAU
    if undecided and not before.violation and len(before.trial_numbers) == len(best.trial_numbers) == 1:
        for point in (before, best):
            yield from search.again(point.variant, point.loads, effort, "whether this is the plateau")
        before, best = _fresh(search, before), _fresh(search, best)
        points[:] = [_fresh(search, point) for point in points]
        return not _rises(before, best)
    return True


def _rises(before: Point, after: Point) -> bool:
    if before.violation:
        return not after.violation or after.violation < before.violation * (1 - PLATEAU)
    return not after.violation and after.score.value - before.score.value > math.log1p(PLATEAU)


def _fresh(search: Search, point: Point) -> Point:
    return search.evidence.point(point.variant, point.loads) or point


def edges(search: Search, variant: Variant) -> list[tuple[Point, Point]]:
    """Return two neighbouring points of a variant: the first keeps the constraints, the second does not.

    At most two for each batch size: the smallest load that keeps them and the largest.
    """
    found = []
    by_batch: dict[int, list[Point]] = {}
    for point in search.evidence.points(variant):
        if len({load.value for load in point.loads}) == 1:
            by_batch.setdefault(point.loads[0].batch_size, []).append(point)
    for points in by_batch.values():
        points.sort(key=lambda point: point.loads[0].value)
        pairs = list(itertools.pairwise(points))
        rising = [(after, before) for before, after in pairs if before.violation and not after.violation]
        falling = [(before, after) for before, after in pairs if not before.violation and after.violation]
        found += rising[:1] + falling[-1:]
    return found


def potential(search: Search, variant: Variant) -> Point | None:
    """Return the best score that a variant may reach at the limit of the constraints, None if it was not measured.

    Between a load that keeps the constraints and one that misses them, the objective lies between the two.
    """
    best = search.evidence.best(variant)
    if best is None or best.violation or not searches_edges(search):
        return best
    return max([best, *(outside for _, outside in edges(search, variant))], key=lambda point: point.score.value)


def searches_edges(search: Search) -> bool:
    """Return whether loads between the sweep's may be measured: not if the user named the loads."""
    load = search.grid.space.load
    return not load.values and not load.formula and load.binary_steps_max > 0


def approach_edges(search: Search, variant: Variant, effort: float) -> Steps[None]:
    """Find the limits that the constraints set, by bisection."""
    if not searches_edges(search):
        return
    for inside, outside in edges(search, variant):
        for _ in range(search.grid.space.load.binary_steps_max):
            value = _middle(search, inside, outside)
            if value is None:
                break
            loads = search.loads(value, inside.loads[0].batch_size)
            point = yield from search.measure(variant, loads, effort, "edge of the constraints")
            if point is None:
                break
            inside, outside = (inside, point) if point.violation else (point, outside)


def _middle(search: Search, inside: Point, outside: Point) -> float | None:
    low, high = sorted((inside.loads[0].value, outside.loads[0].value))
    if search.grid.space.load.mode is LoadMode.CONCURRENCY:
        return float((low + high) // 2) if high - low >= 2 else None
    return (low + high) / 2 if high - low > _RATE_PRECISION * low else None


def climb(search: Search, variant: Variant, effort: float, purpose: str) -> Steps[None]:
    """Measure a variant with full batches, and continue in the direction that improves it."""
    load = search.grid.space.load
    for batch_size in load.batch_sizes:
        formula = search.formula(variant, batch_size)
        if load.formula:
            yield from search.measure(variant, formula, effort, purpose)
            continue
        values = load_values(load)
        wanted = max(point.value for point in formula)
        if load.mode is LoadMode.REQUEST_RATE:
            known = search.evidence.best(_DEFAULT)
            wanted = known.loads[0].value if known else values[0]
        start = next((index for index, value in enumerate(values) if value >= wanted), len(values) - 1)
        yield from _climb(search, variant, (batch_size, start), effort, purpose)


def _climb(search: Search, variant: Variant, origin: tuple[int, int], effort: float, purpose: str) -> Steps[None]:
    batch_size, start = origin
    values = load_values(search.grid.space.load)
    first = yield from search.measure(variant, search.loads(values[start], batch_size), effort, purpose)
    if first is None or _cannot_win(search, first):
        return
    for step in (-1, 1) if first.violation else (1, -1):
        here, index = first, start + step
        while 0 <= index < len(values):
            point = yield from search.measure(variant, search.loads(values[index], batch_size), effort, purpose)
            if point is None or not _better(here, point):
                break
            here, index = point, index + step
        if here is not first:
            return


def _cannot_win(search: Search, first: Point) -> bool:
    """Return whether no other load can make a variant win, given its measurement with full batches.

    Less load never brings more throughput, and more than fills the batches brings only a little.
    """
    if any(objective.metric is not Metric.THROUGHPUT for model in search.goal.models for objective in model.objectives):
        return False
    leader = search.evidence.ranking()[0]
    lacking = 0.0 if first.violation else _ROOM_ABOVE
    return not leader.violation and gain(first, leader, search.goal.confidence).high < -lacking


def _better(here: Point, there: Point) -> bool:
    """Return whether a load is better: the constraints are kept or missed by less, or the gain is significant."""
    if here.violation:
        return not there.violation or there.violation < here.violation
    return not there.violation and there.score.value - here.score.value > math.log1p(_WORTH_A_STEP)


_WORTH_A_STEP = 0.01
_ROOM_ABOVE = 0.2  # what more load than fills the batches may bring at most


FIRST_LOOK_MAX = 128
"""Limit of variants of the first round. It samples a larger space evenly, then the neighbours of the best."""

_NEIGHBOUR_ROUNDS_MAX = 8
_KEPT = 4  # one of this number is measured again


def halve(search: Search) -> Steps[None]:
    """Narrow all variants down to a few."""
    order = _spread(search)
    # In random order, a good variant comes early and eliminates others, and a short budget covers a fair sample.
    Random(search.options.seed).shuffle(order)
    coordinates = {search.grid.variant(coordinate).key: coordinate for coordinate in order}
    for coordinate in coordinates.values():
        yield from _explore_first(search, coordinate)
    yield from _visit_neighbours(search, coordinates)
    for variant in _survivors(search, max(2 * search.options.finalist_count, len(coordinates) // _KEPT)):
        point = search.evidence.best(variant)
        if point:
            yield from search.measure(variant, point.loads, USUAL, "second look")


def _spread(search: Search) -> list[Coordinate]:
    """Return the coordinates of the first round: all in order, or an even sample of a large space with its corners."""
    every = list(search.grid.coordinates())
    if len(every) <= FIRST_LOOK_MAX:
        return every
    shape = search.grid.shape
    kept = list(shape)
    while math.prod(kept) > FIRST_LOOK_MAX:
        longest = max(range(len(kept)), key=lambda axis: kept[axis])
        kept[longest] -= 1
    axes = [_evenly(size, count) for size, count in zip(shape, kept, strict=True)]
    return list(itertools.product(*axes))


def _evenly(size: int, count: int) -> list[int]:
    if count == 1:
        return [size // 2]
    return [round(index * (size - 1) / (count - 1)) for index in range(count)]


def _explore_first(search: Search, coordinate: Coordinate) -> Steps[None]:
    yield from climb(search, search.grid.variant(coordinate), search.look_effort, "first look")


def _visit_neighbours(search: Search, seen: dict[str, Coordinate]) -> Steps[None]:
    """Measure the neighbours of the best, then of any better ones, until there are no new neighbours."""
    for _ in range(_NEIGHBOUR_ROUNDS_MAX):
        best = [point.variant.key for point in search.evidence.ranking()[: search.options.finalist_count]]
        near = [other for key in best if key in seen for other in search.grid.neighbours(seen[key])]
        new = {search.grid.variant(coordinate).key: coordinate for coordinate in near}
        new = {key: coordinate for key, coordinate in new.items() if key not in seen}
        if not new:
            return
        seen |= new
        for coordinate in new.values():
            yield from _explore_first(search, coordinate)


def _survivors(search: Search, count: int) -> list[Variant]:
    """Return a limited number of variants that may still win, the most promising first."""
    ranking = search.evidence.ranking()
    if not ranking:
        return []
    leader = ranking[0]
    hopes = [(hope, point) for point in ranking if (hope := potential(search, point.variant))]
    left = [(hope, point) for hope, point in hopes if _may_win(search, leader, point, hope)]
    left.sort(key=lambda pair: (pair[1].violation == 0, pair[0].score.value), reverse=True)
    kept = [point.variant for _, point in left[:count]]
    search.note(
        f"{len(ranking) - len(kept)} of {len(ranking)} variants dropped after {len(search.history)} measurements."
    )
    return kept


def _may_win(search: Search, leader: Point, point: Point, hope: Point) -> bool:
    """Return whether a variant may win, by its best point or by its potential at the limit of the constraints."""
    if leader.violation:
        return True
    return not point.surely_violates and gain(hope, leader, search.goal.confidence).high >= 0


def brute_force(search: Search) -> Steps[None]:
    """Measure all variants."""
    for coordinate in search.grid.coordinates():
        yield from sweep(search, search.grid.variant(coordinate), USUAL, "brute search")


LATENCY_SHARE_MAX = 0.5
"""A delay beyond this share of the mean response time costs more than fuller batches gain."""


def raise_delays(search: Search) -> Steps[None]:
    """Measure the best variants and the default one with growing queue delays, while these bring more."""
    best = search.evidence.ranking()[: search.options.finalist_count]
    default = search.evidence.best(_DEFAULT)
    if default and default not in best:
        best.append(default)
    for point in best:
        for facts in search.grid.space.models:
            yield from _raise_delay(search, point, facts)


def _raise_delay(search: Search, point: Point, facts: ModelFacts) -> Steps[None]:
    if not _can_wait(point, facts):
        return
    here = point
    for delay_us in facts.queue_delays_us:
        if delay_us > (
            LATENCY_SHARE_MAX * min(_metric_of(point, model, Metric.LATENCY_AVG) for model in point.metrics) * 1e3
        ):
            return
        variant = delayed(search, point.variant, facts.name, delay_us)
        there = yield from search.measure(variant, point.loads, USUAL, "queue delay")
        if there is None or gain(there, here, search.goal.confidence).value <= 0:
            return
        here = there


def delayed(search: Search, variant: Variant, model: str, delay_us: int) -> Variant:
    """Return a variant with a queue delay for a model."""
    changes = tuple(
        variant.change(facts.name) if facts.name != model else replace(variant.change(model), queue_delay_us=delay_us)
        for facts in search.grid.space.models
    )
    return Variant(changes)


def _can_wait(point: Point, facts: ModelFacts) -> bool:
    """Return whether waiting can fill batches: batching is on, and more than one request per batch is in flight."""
    change = point.variant.change(facts.name)
    size = max_batch_size(facts, change)
    if not facts.queue_delays_us or size < 2 or not _batches(facts, change):
        return False
    return all(
        _items(load, point) >= 2 * instance_count(facts, change) and load.batch_size < size for load in point.loads
    )


def _batches(facts: ModelFacts, change: ModelChange) -> bool:
    return facts.is_batching or change.max_batch_size is not None


def _items(load: LoadPoint, point: Point) -> float:
    """Return how many items are in flight, by Little's law: arrivals in a response time."""
    return _metric_of(point, load.model, Metric.THROUGHPUT) * _metric_of(point, load.model, Metric.LATENCY_AVG) / 1e3


def _metric_of(point: Point, model: str, metric: Metric) -> float:
    """Return a metric, 0 if it was not measured: then no delay is tried."""
    estimate = point.metrics[model].get(metric)
    return estimate.value if estimate else 0.0


_TIME_SHARES = (0.6, 0.75, 1.0, 1.0)
"""Shares of the time budget by which the phases have to end."""

_TRIALS_SHARE = 0.5
"""Share of the measurements reserved for the phases after the search."""


def _steps(search: Search) -> Steps[None]:
    later = int(search.options.trials_max * _TRIALS_SHARE)
    finalists = (search.options.finalist_count + 1) * search.options.repeats_max
    phases: tuple[tuple[str, Callable[[Search], Steps[None]], int], ...] = (
        ("search", _explore, min(later, 2 * finalists)),
        ("search for the edges of the constraints", refine, min(later, finalists)),
        ("repeats of the finalists", repeat, 0),
        ("comparison with what looks better", settle, 0),
    )
    for (name, phase, reserve), share in zip(phases, _TIME_SHARES, strict=True):
        search.begin(share, reserve)
        try:
            yield from phase(search)
        except OutOfBudget as limit:
            search.note(f"The {name} ended early: {limit}.")
        if not search.evidence.variants():
            return


def _explore(search: Search) -> Steps[None]:
    yield from sweep(search, _DEFAULT, USUAL, "default configuration")
    yield from (halve if search.options.mode is SearchMode.RACE else brute_force)(search)
    yield from raise_delays(search)


TIE = 0.02
"""Variants are equally good if the interval of their difference lies within this share."""

CLEAR = 0.05
"""A configuration that looks better than the recommended one by more than this is measured again."""

_REFINED_MAX = 12
_REPEATS_MIN = 2


def refine(search: Search) -> Steps[None]:
    """Sweep the loads of the best variants, and approach the limits of the constraints while that may win."""
    for best in search.evidence.ranking()[: search.options.finalist_count]:
        yield from _sweep_loads(search, best.variant)
    yield from _sweep_loads(search, _DEFAULT)
    yield from approach_edges(search, _DEFAULT, USUAL)
    promising = [(point, point.variant) for v in search.evidence.variants() if (point := potential(search, v))]
    promising.sort(key=lambda pair: pair[0].score.value, reverse=True)
    promising.sort(key=lambda pair: _keeps(search, pair[1]), reverse=True)
    for point, variant in promising[:_REFINED_MAX]:
        leader = search.evidence.ranking()[0]
        if not leader.violation and point.score.value <= leader.score.value:
            continue
        yield from approach_edges(search, variant, USUAL)


def _sweep_loads(search: Search, variant: Variant) -> Steps[None]:
    yield from sweep(search, variant, USUAL, "loads of the best variants")


def _keeps(search: Search, variant: Variant) -> bool:
    best = search.evidence.best(variant)
    return best is not None and not best.violation


def repeat(search: Search) -> Steps[None]:
    """Measure the best variants and the default one in turn until one is better, or they are as good as each other."""
    count = max(1, search.options.finalist_count)
    finalists = [point for point in search.evidence.ranking() if not point.variant.is_default][:count]
    running = [(point.variant, point.loads) for point in finalists]
    default = search.evidence.best(_DEFAULT)
    if default:
        # Under its own best load and that of the best: a gain that is only one of the load is none of the variant.
        both = [default.loads, *(point.loads for point in finalists[:1])]
        running += [(_DEFAULT, loads) for loads in dict.fromkeys(both)]
    for number in range(1, search.options.repeats_max + 1):
        for variant, loads in running:
            yield from search.again(variant, loads, search.repeat_effort, "repeat of the best")
        points = [point for variant, loads in running if (point := search.evidence.point(variant, loads))]
        left = search.options.repeats_max - number
        if number < _REPEATS_MIN and not _is_early_enough(search, points, left):
            continue
        points = _still_running(search, points)
        # Where there is nothing to compare, only the repeats show how much a measurement varies.
        if finalists and (len(points) <= 1 or _settled(search, points, left)):
            return
        running = [(point.variant, point.loads) for point in points]


def settle(search: Search) -> Steps[None]:
    """Measure again the present recommendation, and variants that look clearly better.

    So a report does not recommend one configuration and show a better one: variants that were lucky in a brief
    measurement fall back, and better ones win.
    """
    rounds = 0
    while rounds < search.options.repeats_max and (champion := _champion(search)) is not None:
        rivals = [point for point in search.evidence.ranking() if _challenges(search, point, champion)]
        if not rivals:
            return
        # Briefly measured variants come first, one time each.
        rival = min(rivals, key=lambda point: (point.effort, -point.score.value))
        if rival.effort < search.repeat_effort:
            yield from search.again(rival.variant, rival.loads, search.repeat_effort, "whether it is better")
            continue
        rounds += 1
        for point in (rival, champion):
            yield from search.again(point.variant, point.loads, search.repeat_effort, "whether it is better")


def _champion(search: Search) -> Point | None:
    """Return the present recommendation, None if there is no default configuration to compare with."""
    default, first = search.evidence.best(_DEFAULT), search.evidence.ranking()[0]
    if default is None or default.violation or first.violation:
        return None
    return first if gain(first, default, _level(search)).low > 0 else default


def _challenges(search: Search, point: Point, champion: Point) -> bool:
    return (
        point.variant != champion.variant
        and not point.violation
        and gain(point, champion, _level(search)).value > CLEAR
    )


def _is_early_enough(search: Search, points: list[Point], left: int) -> bool:
    """Return whether one repeat is enough: all were measured twice, and nothing better than the default is in sight.

    A variant that seems better may owe that to one lucky measurement, so it is measured again.
    """
    default = [point for point in points if point.variant.is_default]
    if not default or min(point.count for point in points) < _REPEATS_MIN:
        return False
    best = max(default, key=lambda point: point.order)
    return not any(
        point.order > best.order and may_decide(point, best, _level(search), left)
        for point in points
        if not point.variant.is_default
    )


def _still_running(search: Search, points: list[Point]) -> list[Point]:
    leader = max(points, key=lambda point: point.order, default=None)
    return [point for point in points if leader and may_win(leader, point, _level(search))]


def may_win(leader: Point, point: Point, level: float) -> bool:
    """Return whether a point may still turn out as good as the leader."""
    if leader.violation:
        return True
    return not point.surely_violates and gain(leader, point, level).low <= 0


def _settled(search: Search, points: list[Point], left: int) -> bool:
    """Return whether the rest are as good as the leader, or no other measurement would distinguish them."""
    leader = max(points, key=lambda point: point.order)
    if leader.violation:
        return False
    others = [point for point in points if point is not leader]
    return all(_tied(search, leader, other) or not may_decide(other, leader, _level(search), left) for other in others)


def _tied(search: Search, leader: Point, point: Point) -> bool:
    difference = gain(point, leader, _level(search))
    return difference.low >= -TIE and difference.high <= TIE


def _level(search: Search) -> float:
    return confidence_of_looks(search.goal, search.options)


CHANCE_MIN = 0.2
"""Probability of a verdict below which more measurements are not worth their time."""


def may_decide(one: Point, other: Point, level: float, left: int) -> bool:
    """Return whether two points may still turn out significantly different.

    This is the futility rule of clinical trials: the remaining measurements may move the difference by about its
    present uncertainty. If even that is unlikely to make it significant, the verdict is already known.

    Source: Lan, Simon, Halperin, Stochastically curtailed testing in long-term clinical trials (1982).
    """
    if not left or one.violation or other.violation:
        return bool(left)
    now = math.hypot(one.score.error, other.score.error)
    after = [_after(point, left) for point in (one, other)]
    later = math.hypot(*(score.error for score in after))
    needed = student(level, min(score.freedom for score in after)) * later
    reach = NormalDist().inv_cdf(1 - CHANCE_MIN) * now
    return abs(one.score.value - other.score.value) + reach > needed


def _after(point: Point, left: int) -> Score:
    """Return the score with the uncertainty that it would have after more measurements with the same mean."""
    before, later = (counted(count) for count in (point.count, point.count + left))
    error = point.score.error * math.sqrt(before / later)
    return replace(point.score, error=error, freedom=point.score.freedom + 2 * left)
