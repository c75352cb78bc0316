"""Search by the library optuna: its tree-structured Parzen estimator suggests variants from scores. Seeded."""

import math
from random import Random
from typing import Any

from charonia.core.errors import unsupported
from charonia.install_hint import extra_hint
from charonia.tools.tune.objective import Loads, Point
from charonia.tools.tune.search.trial_driver import USUAL, Steps, TrialDriver
from charonia.tools.tune.space import Coordinate, load_values

_MIN_SHARE, _MAX_SHARE = 0.05, 0.1
_TRIALS_MIN = 20
_KNOWN_IN_A_ROW = 20
"""After this many known suggestions in a row, an unknown one is drawn at random."""


def explore(driver: TrialDriver) -> Steps[None]:
    """Ask optuna for variants and tell it their scores, until they stop improving.

    Raises:
        ServingError: UNIMPLEMENTED where optuna is not installed.
    """
    optuna = load_library()
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=driver.options.seed))
    choices = _Choices(driver, optuna)
    at_least, at_most = trial_counts(driver, choices.size)
    best, without_gain = -math.inf, 0
    while len(choices.seen) < at_most:
        trial, picked = choices.suggest(study)
        is_new = picked not in choices.seen
        choices.seen.add(picked)
        variant_point = yield from _measure(driver, choices, picked)
        if variant_point is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, value(variant_point))
        if variant_point and value(variant_point) > best:
            best, without_gain = value(variant_point), 0
        elif is_new:
            without_gain += 1
        if len(choices.seen) >= at_least and without_gain >= driver.options.optuna_patience:
            driver.note(f"optuna: nothing better in the last {without_gain} of {len(choices.seen)} suggestions.")
            return


def load_library() -> Any:
    """Return the module optuna.

    Raises:
        ServingError: UNIMPLEMENTED where it is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise unsupported(
            "search mode 'optuna' needs the library optuna, which is not installed",
            hint=f"{extra_hint('tune')}, or choose another search mode",
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def trial_counts(driver: TrialDriver, size: int) -> tuple[int, int]:
    """Return the minimum and maximum of suggestions: the options, or shares of the number of points."""
    options = driver.options
    at_most = min(options.optuna_trials_max or max(_TRIALS_MIN, round(size * _MAX_SHARE)), size)
    at_least = min(options.optuna_trials_min or max(_TRIALS_MIN, round(size * _MIN_SHARE)), at_most)
    return at_least, at_most


def value(point: Point) -> float:
    """Return what optuna maximises: the score, or less than any score if the constraints are missed."""
    return -_MISSED * (1 + min(point.violation, _MISSED)) if point.violation else point.score.value


_MISSED = 1000.0  # the logarithms that scores are made of lie far within

Picked = tuple[Coordinate, int, int]
"""A coordinate, the index of a batch size and that of a load."""


def _measure(driver: TrialDriver, choices: "_Choices", picked: Picked) -> Steps[Point | None]:
    coordinate, batch, load = picked
    variant = driver.grid.variant(coordinate)
    loads = choices.loads(coordinate, batch, load)
    return (yield from driver.measure(variant, loads, USUAL, "optuna"))


class _Choices:
    """What optuna chooses from: an index for each dimension, for the batch size and for the load."""

    def __init__(self, driver: TrialDriver, optuna: Any) -> None:
        self.seen: set[Picked] = set()
        load = driver.grid.space.load
        self._bench = driver
        self._random = Random(driver.options.seed)
        self._values = () if load.formula else load_values(load)
        counts = (*driver.grid.shape, len(load.batch_sizes), max(1, len(self._values)))
        self._counts = counts
        self.size = math.prod(counts) if driver.grid.shape else 0
        names = [f"{dimension.model}.{dimension.setting}" for dimension in driver.grid.space.dimensions]
        self._names = [*names, "batch_size", "load"]
        self._distributions = {
            name: optuna.distributions.IntDistribution(0, count - 1)
            for name, count in zip(self._names, counts, strict=True)
        }
        self._known_in_a_row = 0

    def suggest(self, study: Any) -> tuple[Any, Picked]:
        """Return optuna's trial and its choice."""
        if self._known_in_a_row >= _KNOWN_IN_A_ROW:
            study.enqueue_trial(dict(zip(self._names, self._unknown(), strict=True)))
        trial = study.ask(self._distributions)
        indices = tuple(trial.params[name] for name in self._names)
        picked = (indices[:-2], indices[-2], indices[-1])
        self._known_in_a_row = self._known_in_a_row + 1 if picked in self.seen else 0
        return trial, picked

    def loads(self, coordinate: Coordinate, batch: int, load: int) -> Loads:
        """Return the loads that indices stand for."""
        batch_size = self._bench.grid.space.load.batch_sizes[batch]
        if not self._values:
            return self._bench.formula(self._bench.grid.variant(coordinate), batch_size)
        return self._bench.loads(self._values[load], batch_size)

    def _unknown(self) -> tuple[int, ...]:
        """Return indices that were not chosen yet, from a random place on."""
        number = self._random.randrange(self.size)
        while True:
            indices, rest = [], number
            for count in reversed(self._counts):
                rest, index = divmod(rest, count)
                indices.append(index)
            found = tuple(reversed(indices))
            if (found[:-2], found[-2], found[-1]) not in self.seen:
                return found
            number = (number + 1) % self.size
