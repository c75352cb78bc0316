"""What computes the scores of a forest: treelite, XGBoost or LightGBM. Each call computes in the calling thread.

The libraries release the GIL and may be called from several threads at a time.
"""

import json
from abc import ABC, abstractmethod
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
        """Return the scores."""
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
        """Return Shapley values.

        Raises:
            ServingError: INVALID_ARG for infinite values, which XGBoost refuses here.
        """
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
        """Return Shapley values."""
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
