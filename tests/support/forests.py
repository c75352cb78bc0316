"""Small forests, each made by its own library, and what that library predicts with it."""

import base64
import gzip
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import treelite
import xgboost
from numpy.typing import NDArray
from sklearn.ensemble import GradientBoostingRegressor, RandomForestClassifier

Rows = NDArray[np.float32]

FEATURES = 6
CLASSES = 3

LEGACY = gzip.decompress(
    base64.b64decode(
        "H4sIAAAAAAACA0vKzEtzm/DajoUBAhihNBOUzYgkRmvAD6WTMvMSiyqtcvLTM4tLMpPZoMLpSSVFqalMdHQQOQDkNmYkPssgcO9/"
        "IGCERioI7LLjswVSDf+hACQmqMS5H6YWJlbzVt7eU9PBedtONycfvg07YebNmX/NEaYeBC5e3uYIUjuU/d/6984+dP9fUn5vJ/7p"
        "qpOIgrlT+XvJPTDzWq7td4SpB4GlmescQWrR0wEIcELp/KSs1OSSzLJUF6hAtVJeYm6qkpUSWnJX0lEqSk2Pz8kvLo4vSCxKzFWy"
        "qlYqTk7MSY0vyC+OL0/NTM8oAWozVKqtBQBkJIIWvgMAAA=="
    )
)
"""XGBoost's binary format, which releases before 3.1 wrote: 4 features, binary classification, 2 trees of depth 2."""

LEGACY_ROWS: Rows = np.array([[0.1, -0.1, 0.6, 0.1], [-0.5, 0.4, 1.3, 0.9], [-0.7, -1.3, -0.6, 0.0]], np.float32)
LEGACY_SCORES = (0.717437744140625, 0.24466009438037872, 0.24466009438037872)
"""What XGBoost 2.1 itself predicts for these rows."""


@dataclass(frozen=True, slots=True)
class MadeForest:
    """A forest.

    Attributes:
        filename: Name of its file in a version's folder.
        scores: What its library predicts, [rows, scores].
        contributions: Its library's Shapley values, [rows, scores, features + 1]; None where there are none.
        margin: The sums of the trees, which the Shapley values add up to.
    """

    filename: str
    save: Callable[[Path], object]
    scores: Callable[[Rows], NDArray[Any]]
    contributions: Callable[[Rows], NDArray[Any]] | None = None
    margin: Callable[[Rows], NDArray[Any]] | None = None

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        self.save(folder / self.filename)
        return folder / self.filename


def rows(count: int, seed: int = 0, features: int = FEATURES) -> Rows:
    """Return rows, a tenth of their values missing."""
    random = np.random.default_rng(seed)
    found = random.standard_normal((count, features), np.float32)
    found[random.random(found.shape) < 0.1] = np.nan
    return found


def _labels(task: str, data: Rows) -> NDArray[Any]:
    value = np.nan_to_num(data[:, 0]) + np.nan_to_num(data[:, 1])
    return {"regression": value, "binary": value > 0, "multi": np.digitize(value, [-0.7, 0.7])}[task].astype(np.float32)


def of_xgboost(task: str, suffix: str = "json", trees: int = 4, depth: int = 3, **parameters: Any) -> MadeForest:
    """Make a forest of XGBoost.

    Args:
        task: "regression", "binary" or "multi".
        suffix: "json" or "ubj".
        parameters: Further parameters, such as another `objective`.
    """
    data = rows(200)
    objective = {"regression": "reg:squarederror", "binary": "binary:logistic", "multi": "multi:softprob"}[task]
    given: dict[str, Any] = {"objective": objective, "max_depth": depth, "nthread": 1, **parameters}
    if task == "multi":
        given["num_class"] = CLASSES
    booster = xgboost.train(given, xgboost.DMatrix(data, _labels(task, data)), trees)

    def predict(batch: Rows, **options: Any) -> NDArray[Any]:
        found: NDArray[Any] = booster.predict(xgboost.DMatrix(batch), strict_shape=True, **options)
        return found

    return MadeForest(
        f"xgboost.{suffix}",
        booster.save_model,
        predict,
        lambda batch: predict(batch, pred_contribs=True),
        lambda batch: predict(batch, output_margin=True),
    )


def of_lightgbm(task: str, trees: int = 4, leaves: int = 8, **parameters: Any) -> MadeForest:
    data = rows(200)
    objective = {"regression": "regression", "binary": "binary", "multi": "multiclass"}[task]
    given: dict[str, Any] = {
        "objective": objective,
        "num_leaves": leaves,
        "num_threads": 1,
        "verbose": -1,
        **parameters,
    }
    if task == "multi":
        given["num_class"] = CLASSES
    booster = lightgbm.train(given, lightgbm.Dataset(data, _labels(task, data)), trees)

    def predict(batch: Rows, **options: Any) -> NDArray[Any]:
        return np.asarray(booster.predict(batch, num_threads=1, **options)).reshape(len(batch), -1)

    return MadeForest(
        "model.txt",
        booster.save_model,
        predict,
        lambda batch: predict(batch, pred_contrib=True).reshape(len(batch), -1, FEATURES + 1),
        lambda batch: predict(batch, raw_score=True),
    )


def of_sklearn(task: str) -> MadeForest:
    """Make a checkpoint of treelite from a forest of scikit-learn."""
    data = np.nan_to_num(rows(200))
    if task == "regression":
        forest: Any = GradientBoostingRegressor(n_estimators=4, max_depth=3, random_state=0)
        predict = forest.predict
    else:
        forest = RandomForestClassifier(n_estimators=4, max_depth=3, random_state=0)
        predict = forest.predict_proba
    forest.fit(data, _labels(task, data))
    model = treelite.sklearn.import_model(forest)
    return MadeForest("checkpoint.tl", model.serialize, lambda batch: predict(batch).reshape(len(batch), -1))
