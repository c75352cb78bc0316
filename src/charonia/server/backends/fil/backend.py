"""Completes the configurations of forests, and runs them with treelite, XGBoost or LightGBM.

The libraries release the GIL and may be called from several threads at a time. Each call computes in the calling
thread.
"""

import asyncio
import json
import logging
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isqrt
from pathlib import Path
from typing import Any, cast

import numpy as np
import treelite
from numpy.typing import NDArray

from charonia.config.complete import Signature, SignatureTensor, check_signature, rows_batch_size
from charonia.config.model import ModelConfig
from charonia.config.parameters import JSON_SCHEMA
from charonia.config.problems import Problem, check_problems
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, internal, invalid, unsupported
from charonia.core.request import InferRequest
from charonia.core.statistics import MemoryUsage
from charonia.core.tensor import Array
from charonia.install_hint import extra_hint
from charonia.server.backends.api import BackendSettings, Execution, ModelFiles, Placement
from charonia.server.backends.array_backend import ArrayBackend, ArrayInstance, SharingModel
from charonia.server.backends.boosters import lightgbm_columns, xgboost_columns
from charonia.server.backends.fil.forest import LIGHTGBM_END, Forest, forest_file, read_forest, reason_of
from charonia.server.backends.fil.options import LIBRARY, PARAMETERS, TREELITE, ForestPlan, read_plan, remarks
from charonia.server.machine.cores import bound_to
from charonia.server.machine.memory import release_freed_memory

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


INPUT, SCORES, CONTRIBUTIONS = "input__0", "output__0", "treeshap_output"
"""Names of the tensors, those of Triton's backend."""

CONTRIBUTIONS_PART_ROWS = 16
"""Least rows of a part where Shapley values are computed; they take a thousand times as long as scores."""


@dataclass(frozen=True, slots=True)
class OpenForest:
    """A forest that is ready to run. Instances share it.

    Attributes:
        choice: What computes scores.
        library: What computes Shapley values, None where the model has no such output.
    """

    choice: PredictorChoice
    library: Library | None


class FilInstance(ArrayInstance):
    """An instance.

    Args:
        threads: Threads among which it divides a large batch.
        cores: Numbers of the cores that these are bound to, empty for any.
    """

    def __init__(
        self, forest: OpenForest, config: ModelConfig, plan: ForestPlan, threads: int, cores: tuple[int, ...] = ()
    ) -> None:
        super().__init__(config)
        self._forest = forest
        self._plan = plan
        self._threads = threads
        self._cores = cores
        self._pool = ThreadPoolExecutor(threads - 1, thread_name_prefix="forest") if threads > 1 else None
        self._dims = {plan.name: plan.source[0 if self.is_batched else 1 :] for plan in self.outputs}

    def run(self, names: Sequence[str], feed: dict[str, Array]) -> Sequence[Array]:
        rows = cast(Rows, feed[INPUT])
        if not (rows.flags.c_contiguous and rows.flags.aligned):
            rows = np.require(rows, requirements=["C", "A"])
        try:
            return [self._contributions(rows) if name == CONTRIBUTIONS else self._answers(rows) for name in names]
        except ServingError:
            raise
        except Exception as error:  # the libraries' errors have no common base class
            raise internal(f"the forest failed: {reason_of(error)}") from error

    def execute(self, requests: Sequence[InferRequest]) -> Execution:
        """Run the requests, on the instance's cores; threads that are started meanwhile stay there."""
        if not self._cores:
            return super().execute(requests)
        with bound_to(self._cores):
            return super().execute(requests)

    def close(self) -> None:
        super().close()
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def _answers(self, rows: Rows) -> Rows:
        choice = self._forest.choice
        scores = self._by_parts(choice.of(len(rows)).scores, rows, choice.part_rows)
        return answers(scores, self._plan, self._dims[SCORES][-1])

    def _contributions(self, rows: Rows) -> Rows:
        library = self._forest.library
        assert library is not None, "the configuration was checked"
        found = self._by_parts(library.contributions, rows, CONTRIBUTIONS_PART_ROWS)
        return found.reshape(len(rows), *self._dims[CONTRIBUTIONS])

    def _by_parts(self, call: Callable[[Rows], Rows], rows: Rows, least: int) -> Rows:
        """Divide rows among the threads, where each gets `least` of them, and this one the first part."""
        count = min(self._threads, len(rows) // least)
        if count < 2 or self._pool is None:
            return call(rows)
        first, *others = np.array_split(rows, count)
        futures = [self._pool.submit(call, part) for part in others]
        return np.concatenate([call(first), *(future.result() for future in futures)])


def answers(scores: Rows, plan: ForestPlan, width: int) -> Rows:
    """Return what `output__0` says of scores.

    Args:
        scores: FP32 [rows, scores].
        plan: Whether classes or their probabilities are asked for.
        width: Values of a row of the output: 2 gives a binary classification the probability of class 0, too.
    """
    is_binary = scores.shape[1] == 1
    if plan.has_probabilities and plan.is_classifier and is_binary and width == 2:
        return np.concatenate([1 - scores, scores], axis=1)
    if plan.has_probabilities or not plan.is_classifier:
        return scores
    classes = scores > plan.threshold if is_binary else scores.argmax(axis=1, keepdims=True)
    return np.asarray(classes, np.float32)


_log = logging.getLogger(__name__)


class FilModel(SharingModel):
    """A loaded version. Its instances share the forest."""

    def __init__(self, path: Path, model_type: str, config: ModelConfig, plan: ForestPlan) -> None:
        super().__init__()
        self._path = path
        self._type = model_type
        self._config = config
        self._plan = plan

    async def create_instance(self, placement: Placement) -> FilInstance:
        forest = await self.shared("forest", lambda: asyncio.to_thread(self._open))
        threads = self._plan.threads or placement.threads
        return FilInstance(forest, self._config, self._plan, threads, placement.cores)

    def _open(self) -> OpenForest:
        config, plan = self._config, self._plan
        forest = read_forest(self._path, self._type, plan, config.name)
        problems = check_signature(config, _signature(forest, config, plan))
        if plan.is_classifier and forest.targets > 1:
            given = f"the forest has {forest.targets} targets, of which no class is made; leave it out for their scores"
            problems.append(Problem("parameters['is_classifier']", given))
        check_problems(config.name, problems)
        explains = any(tensor.name == CONTRIBUTIONS for tensor in config.output)
        rows = sample_rows(forest.features)
        library = self._library(forest, rows[:1], must=explains or plan.predictor == LIBRARY)
        choice = choose(self._candidates(forest, library, rows[:64]), rows, config.max_batch_size)
        _log.info("model '%s': %s", config.name, choice)
        if explains and library is not None:
            library.contributions(rows[:1])
        release_freed_memory()
        self.usage = [MemoryUsage("CPU", 0, self._path.stat().st_size)]
        return OpenForest(choice, library if explains else None)

    def _library(self, forest: Forest, rows: Rows, *, must: bool) -> Library | None:
        """Load the library's own model, where there is one, and run rows; with `must`, its lack is an error."""
        name = self._config.name
        if not must and self._plan.predictor == TREELITE:
            return None
        if self._type not in LIBRARIES:
            if must:
                raise unsupported(
                    f"model '{name}': only treelite can run a forest of model_type {self._type}, and it computes no "
                    "Shapley values",
                    hint=f"serve the file of XGBoost or LightGBM itself, or leave out {CONTRIBUTIONS} and predictor",
                )
            return None
        try:
            library = library_of(self._path, self._type, forest)
            library.scores(rows)
        except Exception as error:  # the libraries' errors have no common base class
            is_missing = isinstance(error, ModuleNotFoundError)
            if must:
                message = f"model '{name}': {LIBRARIES[self._type]} cannot run '{self._path.name}': {reason_of(error)}"
                raise unsupported(message, hint=extra_hint("fil") if is_missing else "") from error
            _log.warning(
                "model '%s': treelite alone, as %s cannot run it: %s", name, LIBRARIES[self._type], reason_of(error)
            )
            return None
        return library

    def _candidates(self, forest: Forest, library: Library | None, rows: Rows) -> list[Predictor]:
        """Return the predictors that may run the model; where they disagree, only the library is right."""
        treelite = TreelitePredictor(forest)
        if library is None or self._plan.predictor == TREELITE:
            return [treelite]
        if self._plan.predictor == LIBRARY:
            return [library]
        apart = difference(treelite, library, rows)
        if apart > 1:
            sentence = "model '%s': %s alone, as treelite's scores differ by %.3g times the tolerance"
            _log.warning(sentence, self._config.name, library.name, apart)
            return [library]
        return [treelite, library]


class FilBackend(ArrayBackend[ForestPlan, FilModel]):
    """The `fil` backend."""

    name = "fil"
    parameters = PARAMETERS
    read_plan = staticmethod(read_plan)
    remarks = staticmethod(remarks)
    gpu_hint = "use KIND_CPU, or KIND_AUTO, which is the CPU for this backend"

    def batch_size(self, settings: BackendSettings) -> int:
        return rows_batch_size(settings.default_max_batch_size)

    async def inspect(
        self, files: ModelFiles, config: ModelConfig, plan: ForestPlan
    ) -> tuple[Signature, Sequence[str]]:
        path, model_type = forest_file(files, config, plan)
        forest = await asyncio.to_thread(read_forest, path, model_type, plan, config.name)
        signature = _signature(forest, config, plan)
        schemas = await asyncio.to_thread(_schemas, path, model_type, forest.features)
        parameters = {JSON_SCHEMA: json.dumps({"inputs": schemas, "outputs": {}})} if schemas else {}
        return replace(signature, outputs=signature.outputs[:1], parameters=parameters), ()

    async def open(
        self, files: ModelFiles, config: ModelConfig, plan: ForestPlan, settings: BackendSettings
    ) -> FilModel:
        path, model_type = forest_file(files, config, plan)
        return FilModel(path, model_type, config, plan)


def _schemas(path: Path, model_type: str, count: int) -> dict[str, object]:
    """Return the JSON schema of the input, by its name, if the file has names of columns."""
    if model_type == "lightgbm":
        columns = lightgbm_columns(path.read_bytes())
    elif model_type in ("xgboost_json", "xgboost_ubj"):
        columns = xgboost_columns(path.read_bytes())
    else:
        return {}
    if len(columns.names) != count:
        return {}
    items = []
    for index, name in enumerate(columns.names):
        categories = columns.categories.get(index)
        item: dict[str, object] = {"title": name, "type": ["number", "boolean", "null"]}
        if categories:
            kind = "string" if isinstance(categories[0], str) else "number"
            item |= {"type": [kind, "null"], "enum": [*categories, None]}
        items.append(item)
    return {INPUT: {"type": "array", "prefixItems": items}}


def _signature(forest: Forest, config: ModelConfig, plan: ForestPlan) -> Signature:
    """Return the forest's tensors; where dims can be written in several ways, those of the configuration."""
    given = {o.name: o.inner_dims for o in config.output}
    lead = 0 if config.max_batch_size > 0 else 1

    def output(name: str, *ways: tuple[int, ...]) -> SignatureTensor:
        dims = given.get(name, ())[lead:]
        return SignatureTensor(name, DataType.FP32, (-1, *(dims if dims in ways else ways[0])))

    scores, values = forest.scores, forest.features + 1
    binary = ((2,),) if scores == 1 and plan.is_classifier and plan.has_probabilities else ()
    width = scores if plan.has_probabilities or not plan.is_classifier else 1
    parts = ((values,), (1, values)) if scores == 1 else ((scores, values), (scores * values,))
    return Signature(
        (SignatureTensor(INPUT, DataType.FP32, (-1, forest.features)),),
        (output(SCORES, (width,), *binary), output(CONTRIBUTIONS, *parts)),
    )
