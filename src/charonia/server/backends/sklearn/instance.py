"""Runs batches in an estimator."""

import threading
from collections.abc import Sequence
from typing import Any

from threadpoolctl import ThreadpoolController

from charonia.config.model import ModelConfig
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, internal, invalid
from charonia.core.tensor import Array
from charonia.server.backends.array_instance import ArrayInstance
from charonia.server.backends.sklearn.features import Features
from charonia.server.backends.sklearn.files import plain_text
from charonia.server.backends.sklearn.methods import METHODS, array_of, as_datatype

_OF_OTHERS = "/torch/"
"""In the path of a library whose threads another backend sets."""

_limits = threading.local()
"""The limit that OpenMP has in a thread, and whose libraries have it."""


class Threads:
    """The native libraries that compute for estimators, as they are loaded now."""

    def __init__(self) -> None:
        found = [each for each in ThreadpoolController().lib_controllers if _OF_OTHERS not in each.filepath]
        self._openmp = [library for library in found if library.user_api == "openmp"]
        self._blas = [library for library in found if library.user_api == "blas"]

    def limit_process(self, threads: int) -> None:
        """Set the number of threads of BLAS, which is one for the process."""
        for library in self._blas:
            library.set_num_threads(threads)

    def limit_thread(self, threads: int) -> None:
        """Set the number of threads of OpenMP, for calls of this thread, unless it is the last one that was set."""
        limit = (self, threads)
        if getattr(_limits, "limit", None) == limit:
            return
        _limits.limit = limit
        for library in self._openmp:
            library.set_num_threads(threads)


class SklearnInstance(ArrayInstance):
    """An instance. Instances share the estimator, which a prediction does not change.

    Args:
        estimator: The estimator.
        features: What it takes.
        config: The complete configuration.
        libraries: The libraries that compute for it.
        threads: Threads that one of their calls may use.
    """

    def __init__(
        self, estimator: Any, features: Features, config: ModelConfig, libraries: Threads, threads: int
    ) -> None:
        super().__init__(config)
        # An attribute that a pipeline decides on is as slow as some estimators.
        self._methods = {plan.name: getattr(estimator, METHODS[plan.name]) for plan in self.outputs}
        self._features = features
        self._libraries = libraries
        self._threads = threads
        libraries.limit_process(threads)
        self._ranks = {plan.name: len(plan.source) + int(self.is_batched) for plan in self.outputs}
        self._datatypes: dict[str, DataType] = {plan.name: plan.datatype for plan in self.outputs}

    def run(self, names: Sequence[str], feed: dict[str, Array]) -> Sequence[Array]:
        return [as_datatype(array, self._datatypes[name]) for name, array in self.answers(names, feed).items()]

    def answers(self, names: Sequence[str], feed: dict[str, Array]) -> dict[str, Array]:
        """Return what the estimator answers, by output, with the rank but not the datatype of the configuration.

        Raises:
            ServingError: INVALID_ARG where the estimator refuses its input, such as NaN; INTERNAL where it fails.
        """
        self._libraries.limit_thread(self._threads)
        found = {}
        try:
            rows = self._features.table(feed)
            for name in names:
                array = array_of(name, self._methods[name](rows))
                found[name] = array[..., None] if array.ndim + 1 == self._ranks[name] else array
        except ServingError:
            raise
        except (ValueError, TypeError) as error:
            raise invalid(f"the estimator refuses its input: {plain_text(error)}") from error
        except Exception as error:  # estimators raise what they like
            raise internal(f"the estimator failed: {plain_text(error)}") from error
        return found
