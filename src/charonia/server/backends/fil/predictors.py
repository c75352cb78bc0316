"""What computes the scores of a forest: treelite, XGBoost or LightGBM. Each call computes in the calling thread.

The libraries release the GIL and may be called from several threads at a time.
"""

import json
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import treelite
from numpy.typing import NDArray

from charonia.core.errors import invalid
from charonia.server.backends.fil.forest import LIGHTGBM_END, Forest

Rows = NDArray[np.float32]
"""FP32 [rows, features], contiguous; NaN for a missing value."""

LIBRARIES = {"xgboost_json": "xgboost", "xgboost_ubj": "xgboost", "lightgbm": "lightgbm"}
"""The library that predicts with a file, by its `model_type`; for others there is only treelite."""


class Predictor(ABC):
    """Computes scores, as FP32 [rows, scores]: values of a regression, probabilities of a classification."""

    name = ""

    def __init__(self, forest: Forest) -> None:
        self.forest = forest

    @abstractmethod
    def scores(self, rows: Rows) -> Rows:
        """Return the scores of each row."""


class Library(Predictor):
    """A predictor that knows how much each feature contributes to a score."""

    @abstractmethod
    def contributions(self, rows: Rows) -> Rows:
        """Return Shapley values as FP32 [rows, scores, features + 1]: their sum is the score before its last function.

        The last value is what the score would be without a row.
        """


class TreelitePredictor(Predictor):
    """treelite's own inference."""

    name = "treelite"

    def scores(self, rows: Rows) -> Rows:
        found = treelite.gtil.predict(self.forest.model, rows, nthread=1)
        return np.asarray(found, np.float32).reshape(len(rows), self.forest.scores)


class XGBoostPredictor(Library):
    """XGBoost's own inference."""

    name = "xgboost"

    def __init__(self, path: Path, forest: Forest) -> None:
        import xgboost

        super().__init__(forest)
        self._matrix: Any = xgboost.DMatrix
        # Of bytes, it tells the format itself; of a path, by its suffix.
        self._booster = xgboost.Booster({"nthread": 1})
        self._booster.load_model(bytearray(path.read_bytes()))
        self._booster.set_param({"nthread": 1})
        if json.loads(self._booster.save_config())["learner"]["objective"]["name"] == "multi:softmax":
            self._booster.set_param({"objective": "multi:softprob"})  # the same, but for the scores behind the class

    def scores(self, rows: Rows) -> Rows:
        found = self._booster.inplace_predict(rows, validate_features=False)
        return np.asarray(found, np.float32).reshape(len(rows), self.forest.scores)

    def contributions(self, rows: Rows) -> Rows:
        """Return Shapley values. Raises ServingError: INVALID_ARG for infinite values, which XGBoost refuses here."""
        if np.isinf(rows).any():
            raise invalid("the input has infinite values, for which XGBoost computes no Shapley values")
        matrix = self._matrix(rows, nthread=1)
        found: Rows = self._booster.predict(matrix, pred_contribs=True, validate_features=False, strict_shape=True)
        return found


class LightGBMPredictor(Library):
    """LightGBM's own inference."""

    name = "lightgbm"

    def __init__(self, path: Path, forest: Forest) -> None:
        import lightgbm

        super().__init__(forest)
        # What follows the trees is for people; of a damaged line there, LightGBM reads beyond the text.
        trees, end, _ = path.read_bytes().partition(LIGHTGBM_END)
        self._booster = lightgbm.Booster(model_str=(trees + end + b"\n").decode())

    def scores(self, rows: Rows) -> Rows:
        # Always one thread: the number is global, and a call with another one would change it for those that run.
        found = self._booster.predict(rows, num_iteration=-1, num_threads=1)
        return np.asarray(found, np.float32).reshape(len(rows), self.forest.scores)

    def contributions(self, rows: Rows) -> Rows:
        forest = self.forest
        found = self._booster.predict(rows, num_iteration=-1, num_threads=1, pred_contrib=True)
        # Of a random forest, LightGBM adds up what its score is the mean of.
        found = np.asarray(found).reshape(len(rows), forest.scores, forest.features + 1) / forest.averaged
        return found.astype(np.float32)


def library_of(path: Path, model_type: str, forest: Forest) -> Library:
    """Load a file with the library that wrote it.

    Raises:
        ModuleNotFoundError: It is not installed.
        Exception: It cannot read the file.
    """
    make = XGBoostPredictor if LIBRARIES[model_type] == "xgboost" else LightGBMPredictor
    return make(path, forest)


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
