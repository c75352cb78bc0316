"""Brute force: every variant under every load that may improve it. Pure."""

import math

from charonia.tools.tune.api import Setting, Variant
from charonia.tools.tune.objective import gain
from charonia.tools.tune.search import load
from charonia.tools.tune.search.trial_driver import USUAL, Steps, TrialDriver

_WORSE_IN_A_ROW = 2


def explore(driver: TrialDriver) -> Steps[None]:
    """Measure all variants, the batch size in the innermost loop.

    Where the search may stop early, two batch sizes in a row that are no better than the best smaller one end the
    loop; what noise could have made look so is measured once more.
    """
    dimensions = driver.grid.space.dimensions
    innermost = len(dimensions) - 1
    ends_early = driver.options.stops_early and bool(dimensions) and dimensions[-1].setting == Setting.MAX_BATCH_SIZE
    row: list[Variant] = []
    given_up: tuple[int, ...] | None = None
    for coordinate in driver.grid.coordinates():
        if coordinate[innermost] == 0:
            row = []
        if coordinate[:innermost] == given_up:
            continue
        variant = driver.grid.variant(coordinate)
        yield from load.sweep(driver, variant, USUAL, "brute search")
        if driver.evidence.best(variant):
            row.append(variant)
        if ends_early and (yield from _levelled(driver, row)):
            given_up = coordinate[:innermost]
            if coordinate[innermost] + 1 < driver.grid.shape[innermost]:
                driver.note(f"No larger batches than in '{variant}': the last {_WORSE_IN_A_ROW} were no better.")


def _levelled(driver: TrialDriver, row: list[Variant]) -> Steps[bool]:
    if len(row) <= _WORSE_IN_A_ROW:
        return False
    for check in (True, False):
        points = [point for variant in row if (point := load.potential(driver, variant))]
        before = max(points[:-_WORSE_IN_A_ROW], key=lambda point: point.order)
        last = max(points[-_WORSE_IN_A_ROW:], key=lambda point: point.order)
        if last.order > before.order:
            return False
        undecided = gain(last, before, driver.goal.confidence).high > 0 and not math.isclose(last.score.error, 0)
        if not check or not undecided or before.violation or last.violation:
            break
        for point in (before, last):
            yield from driver.again(point.variant, point.loads, USUAL, "whether larger batches help")
    return True
