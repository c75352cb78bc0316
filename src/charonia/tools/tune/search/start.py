"""Puts a search together: the default configuration first, then the search mode, then the finalists. Pure."""

from collections.abc import Callable

from charonia.core.errors import invalid
from charonia.tools.tune.api import Goal, Outcome, Search, SearchMode, SearchOptions, SearchSpace, Skipped, Told, Trial
from charonia.tools.tune.search import brute, delays, final, load, optuna_search, quick, successive_halving
from charonia.tools.tune.search.trial_driver import USUAL, OutOfBudget, Steps, TrialDriver

_EXPLORE: dict[SearchMode, Callable[[TrialDriver], Steps[None]]] = {
    SearchMode.RACE: successive_halving.explore,
    SearchMode.BRUTE: brute.explore,
    SearchMode.QUICK: quick.explore,
    SearchMode.OPTUNA: optuna_search.explore,
}

_TIME_SHARES = (0.6, 0.75, 1.0, 1.0)
"""Shares of the time budget by which the phases have to end."""

_TRIALS_SHARE = 0.5
"""Share of the measurements reserved for the phases after the search."""


def make_search(space: SearchSpace, goal: Goal, options: SearchOptions) -> Search:
    """Return a new search.

    Raises:
        ServingError: INVALID_ARGUMENT for an impossible space or goal; UNIMPLEMENTED where optuna is missing.
    """
    if sorted(space.profiled) != sorted(model.model for model in goal.models):
        raise invalid(f"expected a goal for each of {sorted(space.profiled)}, got {[m.model for m in goal.models]}")
    if options.mode is SearchMode.OPTUNA:
        optuna_search.load_library()
    load.check(space.load)
    return _AskTell(TrialDriver(space, goal, options))


def _steps(driver: TrialDriver) -> Steps[None]:
    later = int(driver.options.trials_max * _TRIALS_SHARE)
    finalists = (driver.options.finalist_count + 1) * driver.options.repeats_max
    phases: tuple[tuple[str, Callable[[TrialDriver], Steps[None]], int], ...] = (
        ("search", _explore, min(later, 2 * finalists)),
        ("search for the edges of the constraints", final.refine, min(later, finalists)),
        ("repeats of the finalists", final.repeat, 0),
        ("comparison with what looks better", final.settle, 0),
    )
    for (name, phase, reserve), share in zip(phases, _TIME_SHARES, strict=True):
        driver.begin(share, reserve)
        try:
            yield from phase(driver)
        except OutOfBudget as limit:
            driver.note(f"The {name} ended early: {limit}.")
        if not driver.evidence.variants():
            return


def _explore(driver: TrialDriver) -> Steps[None]:
    yield from load.sweep(driver, driver.default, USUAL, "default configuration")
    yield from _EXPLORE[driver.options.mode](driver)
    yield from delays.explore(driver)


class _AskTell:
    """A generator of trials as a `Search`."""

    def __init__(self, driver: TrialDriver) -> None:
        self._bench = driver
        self._steps = _steps(driver)
        self._trial: Trial | None = None
        self._has_begun = self._has_ended = False

    def ask(self) -> Trial | None:
        if not self._has_begun:
            self._has_begun = True
            self._advance(None)
        return self._trial

    def tell(self, outcome: Outcome) -> None:
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
    def history(self) -> tuple[Told, ...]:
        return tuple(self._bench.history)

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        return tuple(self._bench.skipped.values())

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._bench.notes)

    @property
    def trials_left(self) -> int:
        return 0 if self._has_ended else self._bench.left
