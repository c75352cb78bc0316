"""Runs batches through a forest."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast

import numpy as np

from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError, internal
from charonia.core.request import InferRequest
from charonia.core.tensor import Array
from charonia.server.backends.api import Execution
from charonia.server.backends.array_instance import ArrayInstance
from charonia.server.backends.fil.forest import reason_of
from charonia.server.backends.fil.options import ForestPlan
from charonia.server.backends.fil.predictors import Library, Rows
from charonia.server.backends.fil.trial import PredictorChoice
from charonia.server.machine.cores import bound_to

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
        forest: The forest.
        config: The complete configuration.
        plan: What is made of the scores.
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
        """Run the forest."""
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
        """Run nothing more, and end the threads."""
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
