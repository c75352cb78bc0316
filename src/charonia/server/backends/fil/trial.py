"""A short trial of predictors: whether they agree, and which of them runs a batch of which size."""

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt

import numpy as np

from charonia.server.backends.fil.predictors import Predictor, Rows

SIZES = (1, 8, 64, 512, 4096)
"""Rows of the batches that are tried, up to the model's largest batch."""

SAMPLE_VALUES_MAX = 4_000_000
"""Values of the made-up rows: fewer rows where a row has many features."""

AGREEMENT_ROWS = 64
TOLERANCE = 1e-4
"""Of two predictors' scores, relative to the score, or to a tenth of the largest one: they add in another order."""

RUN_NS = 3_000_000
RUNS_MAX = 20
"""Each batch is run for this time, or as often, and twice at least."""

LAST_NS = 20_000_000
"""Where a batch takes longer, larger ones are not tried."""

PART_NS = 1_000_000
"""A batch is divided among threads into parts that take at least this long."""


@dataclass(frozen=True, slots=True)
class PredictorChoice:
    """Which predictor runs a batch.

    Attributes:
        predictors: One for each range of sizes.
        edges: The last size of each range but the last one.
        part_rows: Least rows of a part, where a batch is divided among threads.
    """

    predictors: tuple[Predictor, ...]
    edges: tuple[int, ...]
    part_rows: int

    def of(self, rows: int) -> Predictor:
        return self.predictors[bisect_left(self.edges, rows)]

    def __str__(self) -> str:
        words = [
            f"up to {edge} rows {predictor.name}" for edge, predictor in zip(self.edges, self.predictors, strict=False)
        ]
        return ", ".join([*words, f"{'more ' if words else ''}{self.predictors[-1].name}"])


def sample_rows(features: int) -> Rows:
    """Return made-up rows, always the same: numbers of several magnitudes, small integers, missing values."""
    count = max(size for size in SIZES if size == 1 or size * features <= SAMPLE_VALUES_MAX)
    random = np.random.default_rng(0)
    rows = random.standard_normal((count, features), np.float32)
    rows *= (10.0 ** random.integers(-1, 4, (1, features))).astype(np.float32)
    whole = random.random(features) < 0.3  # as categories and counts are
    rows[:, whole] = random.integers(0, 10, (count, int(whole.sum())))
    rows[random.random(rows.shape, np.float32) < 0.05] = np.nan
    return rows


def difference(one: Predictor, other: Predictor, rows: Rows) -> float:
    """Return how far the scores of two predictors are apart, as a multiple of the tolerance."""
    rows = rows[:AGREEMENT_ROWS]
    mine, own = one.scores(rows).astype(np.float64), other.scores(rows).astype(np.float64)
    if mine.shape != own.shape or not np.array_equal(np.isnan(mine), np.isnan(own)):
        return np.inf
    allowed = TOLERANCE * np.maximum(np.abs(own), np.nanmax(np.abs(own), initial=0) / 10)
    return float(np.nanmax(np.abs(mine - own) / np.maximum(allowed, np.finfo(np.float32).tiny), initial=0))


def choose(predictors: Sequence[Predictor], rows: Rows, largest: int) -> PredictorChoice:
    """Measure predictors, and choose the fastest for each size.

    Args:
        predictors: At least one.
        rows: Rows to run; `sample_rows` makes them.
        largest: Rows of the model's largest batch; 0 for any.
    """
    sizes = [size for size in SIZES if size <= min(largest or SIZES[-1], len(rows))]
    winners: list[Predictor] = []
    best_ns = 1
    for size in sizes:
        times = [_time_ns(predictor, rows, size) for predictor in predictors]
        best_ns = min(times)
        winners.append(predictors[times.index(best_ns)])
        if best_ns > LAST_NS:
            break
    measured = sizes[: len(winners)]
    part_rows = max(1, PART_NS * measured[-1] // best_ns)
    # Between two sizes with different winners, the edge is halfway between the powers.
    changes = [index for index, (one, other) in enumerate(pairwise(winners)) if one is not other]
    edges = tuple(isqrt(measured[index] * measured[index + 1]) for index in changes)
    return PredictorChoice((*(winners[index] for index in changes), winners[-1]), edges, part_rows)


def _time_ns(predictor: Predictor, rows: Rows, size: int) -> int:
    """Return the shortest time of a batch; each run has other rows, as processors learn the way of the last ones."""
    best, count, until = 0, 0, time.perf_counter_ns() + RUN_NS
    while count < 2 or (count < RUNS_MAX and time.perf_counter_ns() < until):
        first = count * size % len(rows)
        start = time.perf_counter_ns()
        predictor.scores(rows[first : first + size])
        taken = time.perf_counter_ns() - start
        best = min(best, taken) if count else max(1, taken)
        count += 1
    return best
