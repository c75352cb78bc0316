"""The trial driver of all search modes: numbers trials, records outcomes, and enforces the time budget. Pure.

A mode is a generator that yields a trial and is sent its outcome. So it reads as a plain loop, and is suspended while
the measurement runs.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TypeVar

from charonia.tools.tune.api import (
    Failed,
    Goal,
    LoadPoint,
    Measured,
    Metric,
    ModelChange,
    Outcome,
    SearchOptions,
    SearchSpace,
    Skipped,
    Told,
    Trial,
    Variant,
)
from charonia.tools.tune.objective import Evidence, Loads, Point
from charonia.tools.tune.space import Grid, batch_slots, instance_count, load_values

_Result = TypeVar("_Result")
Steps = Generator[Trial, Outcome, _Result]
"""A generator that yields trials, is sent their outcomes, and returns a result."""

BRIEF, USUAL, FULL = 0.25, 0.5, 1.0
"""Efforts: of a first short measurement, of one during the search, and of one that decides."""

FAILURES_MAX = 5
"""After this many trials without a success, a search stops."""


class OutOfBudget(Exception):  # noqa: N818 - the end of a phase, no error
    """A phase of the search used up its measurements or its time, as the text states."""


class TrialDriver:
    """The measurements of a search.

    Attributes:
        repeat_effort: Of the measurements that decide. In a small space it equals `look_effort`, and the first
            measurement counts as one of them.
    """

    def __init__(self, space: SearchSpace, goal: Goal, options: SearchOptions) -> None:
        self.grid = Grid(space)
        self.goal = goal
        self.options = options
        self.evidence = Evidence(goal)
        self.history: list[Told] = []
        self.skipped: dict[str, Skipped] = {}
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

    @property
    def default(self) -> Variant:
        return Variant()

    @property
    def left(self) -> int:
        """Upper bound of the remaining trials, if every point is measured twice."""
        return max(0, min(self.options.trials_max, self._bound) - len(self.history))

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
        self._take(Told(trial, outcome))
        return isinstance(outcome, Measured)

    def fits(self, variant: Variant) -> bool:
        """Return whether a variant can be tried; if not, its reason is kept in `skipped`."""
        key = variant.key
        if key in self.skipped:
            return False
        reason = self.grid.misfit(variant) or too_large(self.grid.space, variant, self.history)
        if reason and not variant.is_default:
            self.skipped[key] = Skipped(variant, reason)
            return False
        return True

    def note(self, text: str) -> None:
        """Note a decision of the search; duplicates are dropped."""
        if text not in self.notes:
            self.notes.append(text)

    def _take(self, told: Told) -> None:
        self.history.append(told)
        self.evidence.add(told)
        outcome, trial = told.outcome, told.trial
        self._spent_s += outcome.elapsed_s
        total, count = self._elapsed_s.get(trial.effort, (0.0, 0))
        self._elapsed_s[trial.effort] = (total + outcome.elapsed_s, count + 1)
        if isinstance(outcome, Failed):
            self._failed.add((trial.variant.key, trial.loads))
            if outcome.loading:
                self.skipped[trial.variant.key] = Skipped(trial.variant, outcome.reason)
            return
        missing = self.evidence.lacks(outcome)
        if missing:
            self.note(f"A measurement does not count, as it lacks {', '.join(missing)}.")
        self._any_success |= not missing

    def _check_budget(self, effort: float) -> None:
        if len(self.history) >= FAILURES_MAX and not self._any_success:
            last = self.history[-1].outcome
            reason = f", the last one: {last.reason}" if isinstance(last, Failed) else ""
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


def too_large(space: SearchSpace, variant: Variant, history: Sequence[Told]) -> str:
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


def _extrapolated(space: SearchSpace, variant: Variant, history: Sequence[Told], metric: Metric) -> float:
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
