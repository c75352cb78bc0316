"""Statistics of variants: pooled repeats, scores and differences with confidence intervals, constraints. Pure.

The score of a point (a variant under a load) is the weighted sum of the logarithms of its objectives' metrics, so the
difference of two scores is a relative gain: a ratio of throughputs for the usual single objective. Scores are
transitive; sums of pairwise percentages are not.

An interval from within one measurement does not cover what changes between measurements (another reload, another
process on the machine). Therefore the scatter of repeats counts too, pooled over all variants, because the few repeats
of one variant say little.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from charonia.tools.results.records import Estimate, LoadMode, student
from charonia.tools.tune.api import Constraint, Goal, LoadPoint, Measured, Metric, SearchOptions, TrialRecord, Variant

Loads = tuple[LoadPoint, ...]

UNKNOWN_SPREAD = 0.1
"""Half-width assumed for a measurement without an interval, as a share of its value."""

KEEPS_UP = 0.95
"""A server that answers less than this share of an offered rate is overloaded: latencies would grow without end."""

_FLOOR = 1e-3  # below every metric's unit; a logarithm needs something above 0


@dataclass(frozen=True, slots=True)
class Score:
    """How good a point is.

    Attributes:
        freedom: Degrees of freedom behind the error; infinite where it comes from within the measurements.
    """

    value: float
    error: float
    freedom: float


@dataclass(frozen=True, slots=True)
class Point:
    """A variant under a load, all counted measurements together.

    Attributes:
        metrics: Pooled, by model and name.
        trial_numbers: Every trial of it, counted or not.
        violation: Sum of the relative distances to the constraints that are missed, 0 where all are kept.
        surely_violates: Whether a constraint is missed by the whole interval.
        count: How often it was measured with this effort, counted or not.
    """

    variant: Variant
    loads: Loads
    metrics: Mapping[str, Mapping[str, Estimate]]
    trial_numbers: tuple[int, ...]
    score: Score
    violation: float
    surely_violates: bool
    effort: float
    count: int = 1

    @property
    def order(self) -> tuple[bool, float]:
        """Key to sort by, best last: valid ones by score, after the others by their distance from the constraints."""
        return (True, self.score.value) if self.violation == 0 else (False, -self.violation)


class Evidence:
    """All measurements so far, judged by a goal."""

    def __init__(self, goal: Goal) -> None:
        self._goal = goal
        self._groups: dict[str, dict[Loads, list[TrialRecord]]] = defaultdict(dict)
        self._variants: dict[str, Variant] = {}
        self._noise: dict[tuple[str, float], tuple[float, int]] | None = None
        self._points: dict[tuple[str, Loads], Point] = {}

    def add(self, told: TrialRecord) -> None:
        """Add an outcome. Failures, and measurements that lack an objective's metric, are ignored."""
        if not isinstance(told.outcome, Measured) or self.lacks(told.outcome):
            return
        key = told.trial.variant.key
        self._variants.setdefault(key, told.trial.variant)
        group = self._groups[key].setdefault(told.trial.loads, [])
        group.append(told)
        if len(group) > 1:  # it shows how much measurements vary, which is a part of every point
            self._noise = None
            self._points.clear()

    def lacks(self, outcome: Measured) -> tuple[str, ...]:
        """Return the objectives and constraints whose metric a measurement lacks, as `model: metric`."""
        missing = []
        for model in self._goal.models:
            measured = outcome.metrics.get(model.model, {})
            wanted = [objective.metric for objective in model.objectives]
            wanted += [constraint.metric for constraint in model.constraints]
            missing += [f"{model.model}: {metric.value}" for metric in wanted if not _is_number(measured.get(metric))]
        return tuple(missing)

    def variants(self) -> tuple[Variant, ...]:
        """Return the measured variants, in the order of the first measurements."""
        return tuple(self._variants.values())

    def count(self, variant: Variant, loads: Loads, effort: float = 0.0) -> int:
        """Return how often a point was measured with at least an effort."""
        return sum(told.trial.effort >= effort for told in self._groups.get(variant.key, {}).get(loads, ()))

    def points(self, variant: Variant) -> Iterator[Point]:
        """Yield the points of a variant, in the order of their first measurements."""
        for loads in self._groups.get(variant.key, {}):
            yield self._point(variant.key, loads)

    def point(self, variant: Variant, loads: Loads) -> Point | None:
        """Return one point, None where it was not measured."""
        return self._point(variant.key, loads) if loads in self._groups.get(variant.key, {}) else None

    def best(self, variant: Variant) -> Point | None:
        """Return a variant's best point, None without any.

        Points that were measured with the most effort are preferred over briefly measured ones, which were already
        judged when the former were picked.
        """
        return max(self.points(variant), key=lambda point: (point.effort, point.order), default=None)

    def ranking(self) -> list[Point]:
        """Return the best point of each variant, best first.

        Of the points that keep the constraints, a point measured with more effort comes first: the others lost the
        comparison at equal effort, and may look better only by chance.
        """
        points = [point for variant in self.variants() if (point := self.best(variant))]
        most = max((point.effort for point in points if not point.variant.is_default), default=0.0)

        def order(point: Point) -> tuple[bool, float, float]:
            keeps, value = point.order
            return keeps, min(point.effort, most), value

        return sorted(points, key=order, reverse=True)

    def _point(self, key: str, loads: Loads) -> Point:
        known = self._points.get((key, loads))
        if known is None:
            known = self._points[key, loads] = self._compute(key, loads)
        return known

    def _compute(self, key: str, loads: Loads) -> Point:
        group = self._groups[key][loads]
        outcomes, effort = _counted(group)
        pools = {
            model.model: {
                name: self._pool(name, effort, [outcome.metrics[model.model][name] for outcome in outcomes])
                for name in _shared([outcome.metrics[model.model] for outcome in outcomes])
            }
            for model in self._goal.models
        }
        metrics = {model: {name: pool.estimate for name, pool in named.items()} for model, named in pools.items()}
        violation, surely = self._violation(metrics, loads)
        return Point(
            self._variants[key],
            loads,
            metrics,
            tuple(told.trial.number for told in group),
            self._score(pools),
            violation,
            surely,
            effort,
            self.count(self._variants[key], loads, effort),
        )

    def _pool(self, name: str, effort: float, estimates: Sequence[Estimate]) -> "_Pool":
        value = sum(estimate.value for estimate in estimates) / len(estimates)
        error = math.sqrt(sum(standard_error(estimate) ** 2 for estimate in estimates)) / len(estimates)
        freedom = math.inf
        if self._noise is None:
            self._noise = run_to_run_noise(group for loads in self._groups.values() for group in loads.values())
        spread, known = self._noise.get((name, effort), (0.0, 0))
        between = spread * abs(value) / math.sqrt(len(estimates))
        if between > error:
            error, freedom = between, float(known)
        half = student(self._goal.confidence, freedom) * error
        interval = Estimate(value, max(0.0, value - half), value + half, self._goal.confidence)
        return _Pool(interval, error, freedom)

    def _score(self, pools: Mapping[str, Mapping[str, "_Pool"]]) -> Score:
        value, variance, freedom = 0.0, 0.0, math.inf
        total = sum(model.weight for model in self._goal.models)
        for model in self._goal.models:
            of_model = sum(objective.weight for objective in model.objectives)
            for objective in model.objectives:
                pool = pools[model.model][objective.metric]
                weight = model.weight / total * objective.weight / of_model
                measured = max(pool.estimate.value, _FLOOR)
                value += weight * math.log(measured) * (1 if objective.metric.text.larger_is_better else -1)
                variance += (weight * pool.error / measured) ** 2
                freedom = min(freedom, pool.freedom)
        return Score(value, math.sqrt(variance), freedom)

    def _violation(self, metrics: Mapping[str, Mapping[str, Estimate]], loads: Loads) -> tuple[float, bool]:
        distances, surely = 0.0, False
        for model in self._goal.models:
            for constraint in (*model.constraints, *_offered(model.model, loads)):
                estimate = metrics[model.model].get(constraint.metric)
                if estimate:
                    distances += _distance(constraint, estimate.value, estimate.value)
                    surely |= _distance(constraint, estimate.high, estimate.low) > 0
        return distances, surely


@dataclass(frozen=True, slots=True)
class _Pool:
    estimate: Estimate
    error: float
    freedom: float


def gain(one: Point, other: Point, confidence: float) -> Estimate:
    """Return how much better one point is than another, relative (0.1: 10 % better), with its interval."""
    difference = one.score.value - other.score.value
    same = one.variant == other.variant and one.loads == other.loads
    error = 0.0 if same else math.hypot(one.score.error, other.score.error)
    half = student(confidence, min(one.score.freedom, other.score.freedom)) * error
    low, value, high = (
        math.expm1(min(bound, _LOG_MAX)) for bound in (difference - half, difference, difference + half)
    )
    return Estimate(value, low, high, confidence)


def confidence_of_looks(goal: Goal, options: SearchOptions) -> float:
    """Return the confidence of one comparison of finalists, so that all of them together have the goal's (Bonferroni).

    They are compared after each round of repeats, and the best with the default one when what looks better is measured
    again: many checks find a difference by chance more often than one.
    """
    looks = max(1, options.finalist_count) * max(1, options.repeats_max - 1) + options.repeats_max
    return 1 - (1 - goal.confidence) / looks


_LOG_MAX = 100.0  # a gain of e^100 is as good as infinite, and a float


def standard_error(estimate: Estimate) -> float:
    """Return the standard error that corresponds to an interval."""
    if not estimate.confidence:
        return UNKNOWN_SPREAD * abs(estimate.value) / student(0.95)
    return (estimate.high - estimate.low) / 2 / student(estimate.confidence)


def run_to_run_noise(groups: Iterable[Sequence[TrialRecord]]) -> dict[tuple[str, float], tuple[float, int]]:
    """Return the relative standard deviation from one measurement to the next, and its degrees of freedom.

    Returns:
        By name of the metric and effort, pooled over groups and models.
    """
    squares: dict[tuple[str, float], float] = defaultdict(float)
    freedoms: dict[tuple[str, float], int] = defaultdict(int)
    for group in groups:
        for key, values in _values(group).items():
            mean = sum(values) / len(values)
            if len(values) > 1 and mean > 0:
                squares[key] += sum((value / mean - 1) ** 2 for value in values)
                freedoms[key] += len(values) - 1
    return {key: (math.sqrt(squares[key] / freedom), freedom) for key, freedom in freedoms.items()}


def _values(group: Sequence[TrialRecord]) -> dict[tuple[str, float], list[float]]:
    """Return the values of a point by metric and effort. Of several models, the first that has the metric counts."""
    found: dict[tuple[str, float], list[float]] = defaultdict(list)
    for told in group:
        if isinstance(told.outcome, Measured):
            seen: set[str] = set()
            for metrics in told.outcome.metrics.values():
                for name in metrics.keys() - seen:
                    found[name, told.trial.effort].append(metrics[name].value)
                    seen.add(name)
    return found


def _counted(group: Sequence[TrialRecord]) -> tuple[list[Measured], float]:
    """Return the measurements that count for a point, and their effort.

    Short ones do not count beside long ones. Neither does the first where there are two more: the point was picked for
    it, and picked measurements were lucky more often than not.
    """
    effort = max(told.trial.effort for told in group)
    kept = [told.outcome for told in group if told.trial.effort == effort and isinstance(told.outcome, Measured)]
    return kept[len(kept) - counted(len(kept)) :], effort


def counted(count: int) -> int:
    """Return how many of a point's measurements count: all, or all but the first."""
    return count - 1 if count > 2 else count


def _shared(metrics: Sequence[Mapping[str, Estimate]]) -> list[str]:
    return [name for name in metrics[0] if all(_is_number(each.get(name)) for each in metrics)]


def _is_number(estimate: Estimate | None) -> bool:
    return estimate is not None and math.isfinite(estimate.value)


def _offered(model: str, loads: Loads) -> Iterator[Constraint]:
    """Yield the constraint that an open loop adds to the user's: the server has to keep up."""
    for load in loads:
        if load.model == model and load.mode is LoadMode.REQUEST_RATE:
            yield Constraint(Metric.THROUGHPUT, minimum=KEEPS_UP * load.value * load.batch_size)


def _distance(constraint: Constraint, for_minimum: float, for_maximum: float) -> float:
    distance = 0.0
    if constraint.minimum is not None:
        distance += max(0.0, constraint.minimum - for_minimum) / (abs(constraint.minimum) or 1.0)
    if constraint.maximum is not None:
        distance += max(0.0, for_maximum - constraint.maximum) / (abs(constraint.maximum) or 1.0)
    return distance
