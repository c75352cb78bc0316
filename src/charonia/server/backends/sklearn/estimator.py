"""Infers signatures from estimators, loads them, and runs batches."""

import asyncio
import json
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.ensemble import (
    ExtraTreesClassifier,
    ExtraTreesRegressor,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from threadpoolctl import ThreadpoolController

from charonia.config.complete import Signature, SignatureTensor
from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.config.parameters import EXAMPLE, JSON_SCHEMA
from charonia.config.problems import Problem, check_problems
from charonia.config.sequence_tensors import seen_by_model
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, internal, invalid
from charonia.core.statistics import MemoryUsage
from charonia.core.tensor import Array
from charonia.server.backends.api import Placement
from charonia.server.backends.array_backend import ArrayInstance, SharingModel
from charonia.server.backends.sklearn.features import (
    CLASS_NUMBERS,
    EXAMPLE_ROWS,
    MATRIX,
    METHODS,
    Features,
    answer_datatype,
    array_of,
    as_datatype,
    classes_of,
    outputs_of,
    parts_of,
    prepare,
    provided,
    read_rows,
)
from charonia.server.backends.sklearn.files import plain_text, read_estimator
from charonia.server.backends.sklearn.options import EstimatorPlan
from charonia.server.backends.sklearn.trust import Trust
from charonia.server.channel.tables import MISSING, class_schema

_OF_OTHERS = "/torch/"
"""In the path of a library whose threads another backend sets."""

_limits = threading.local()
"""The limit that OpenMP has in a thread, and whose libraries have it."""


class Threads:
    """The native libraries that compute for estimators, as they are loaded now."""

    def __init__(self) -> None:
        found = [each for each in ThreadpoolController().lib_controllers if _OF_OTHERS not in each.filepath]
        self._openmp = [library for library in found if library.user_api == "openmp"]
        self.blas = [library for library in found if library.user_api == "blas"]

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
        for library in libraries.blas:  # whose number of threads is one for the process
            library.set_num_threads(threads)
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
            rows = self._features.rows(feed)
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


_log = logging.getLogger(__name__)

_FORESTS = (
    ExtraTreesClassifier, ExtraTreesRegressor, GradientBoostingClassifier, GradientBoostingRegressor,
    HistGradientBoostingClassifier, HistGradientBoostingRegressor, RandomForestClassifier, RandomForestRegressor,
)  # fmt: skip


class SklearnModel(SharingModel):
    """A loaded version. Its memory is the size of the file: estimators do not tell theirs.

    Attributes:
        estimator: The estimator, which all instances share.
    """

    def __init__(self, path: Path, estimator: Any, features: Features, config: ModelConfig) -> None:
        super().__init__()
        self.usage = [MemoryUsage("CPU", 0, path.stat().st_size)]
        self.estimator = estimator
        self._features = features
        self._config = config
        self._libraries = Threads()

    async def create_instance(self, placement: Placement) -> SklearnInstance:
        instance = SklearnInstance(self.estimator, self._features, self._config, self._libraries, placement.threads)
        await self.shared("check", lambda: asyncio.to_thread(self._check, instance))
        return instance

    async def aclose(self) -> None:
        self.estimator = None
        await super().aclose()

    def _check(self, instance: SklearnInstance) -> None:
        """Compare the configuration with what the estimator answers to an example."""
        config = self._config
        try:
            answers = instance.answers(instance.names, _example(self._features, config))
        except ServingError as error:
            _log.info("model '%s': its outputs are not checked, as it refuses an example: %s", config.name, error)
            return
        check_problems(config.name, _output_problems(config, answers))


async def open_estimator(path: Path, config: ModelConfig, plan: EstimatorPlan, trust: Trust) -> SklearnModel:
    """Load a version. Raises ServingError."""
    estimator, found = await asyncio.to_thread(read_estimator, path, trust)
    for sentence in found:
        _log.warning("model '%s': %s", config.name, sentence)
    config = seen_by_model(config)
    _set_jobs(estimator, plan.jobs)
    features = await asyncio.to_thread(prepare, estimator, _example_rows(path, plan))
    check_problems(config.name, [*_input_problems(config, features), *_name_problems(config, estimator)])
    return SklearnModel(path, estimator, features, config)


def _example_rows(path: Path, plan: EstimatorPlan) -> Any:
    return read_rows(path.parent / plan.rows) if plan.rows else None


def _example_text(features: Features) -> str:
    """Return an example request as JSON, with a row that the estimator knows."""
    example = {}
    for name, array in features.example(1).items():
        row = array[0].tolist() if array.ndim > 1 else array[0]
        example[name] = [row] if array.ndim > 1 else row.item() if isinstance(row, np.generic) else row
    return json.dumps(example, default=lambda text: None if text == MISSING else text.decode())


def inspect_estimator(
    path: Path, config: ModelConfig, plan: EstimatorPlan, trust: Trust
) -> tuple[Signature, list[str]]:
    """Return the inputs and outputs of an estimator, and remarks, by calling it with an example."""
    estimator, _ = read_estimator(path, trust)
    _set_jobs(estimator, plan.jobs)
    features = prepare(estimator, _example_rows(path, plan))
    way_out = "give example rows: charonia serve FILE --example rows.csv, or the parameter EXAMPLE_ROWS in config.pbtxt"
    if not features.is_text and features.count is None:
        raise invalid(
            f"model '{config.name}': the {type(estimator).__name__} does not say which features it takes", hint=way_out
        )
    remarks = []
    schemas: dict[str, Any] = {}
    outputs = []
    try:
        rows = features.rows(features.example())
        for name in outputs_of(estimator, rows):
            result = getattr(estimator, METHODS[name])(rows)
            if isinstance(result, list):
                remarks.append(f"output '{name}': left out, as the estimator has several targets with classes")
                continue
            array = array_of(name, result)
            classes = classes_of(estimator)
            if classes and (name == "label" or (name in CLASS_NUMBERS and array.shape[1:] == (len(classes),))):
                schemas[name] = class_schema(classes, is_label=name == "label")
            outputs.append(SignatureTensor(name, answer_datatype(array), (-1, *array.shape[1:])))
    except ServingError:
        raise
    except Exception as error:  # estimators raise what they like
        raise invalid(
            f"model '{config.name}' cannot be completed: the estimator refuses an example: {plain_text(error)}",
            hint=way_out,
        ) from error
    if isinstance(estimator, _FORESTS):
        remarks.append("a forest: the fil backend may answer faster, from treelite.sklearn.import_model(model)")
    parameters = {
        JSON_SCHEMA: json.dumps({"inputs": features.schemas(), "outputs": schemas}),
        EXAMPLE: _example_text(features),
    }
    return Signature(features.signature(), tuple(outputs), parameters), remarks


def _set_jobs(estimator: Any, jobs: int) -> None:
    """Set the threads of an estimator and its parts: files often say `n_jobs=-1`, a thread for each core."""
    for part, _ in parts_of(estimator):
        if hasattr(part, "n_jobs"):
            part.n_jobs = jobs


def _dims(tensor: ModelInput | ModelOutput, config: ModelConfig) -> tuple[int, ...]:
    """Return the shape of a tensor as the estimator sees it, with -1 for the rows of a batch."""
    return (-1, *tensor.inner_dims) if config.max_batch_size > 0 else tensor.inner_dims


def _example(features: Features, config: ModelConfig) -> dict[str, Array]:
    """Return an example of the configured inputs: ones, and values that the estimator knows."""
    feed: dict[str, Array] = {}
    columns = features.example() if features.is_named else {}
    for tensor in config.input:
        if tensor.name in columns and tensor.data_type is not None:
            shape = (len(columns[tensor.name]), *[1] * (len(_dims(tensor, config)) - 1))
            feed[tensor.name] = columns[tensor.name].astype(tensor.data_type.numpy).reshape(shape)
            continue
        first, *others = _dims(tensor, config)
        shape = (EXAMPLE_ROWS if first == -1 else first, *(features.count or 1 if dim == -1 else dim for dim in others))
        if tensor.data_type is DataType.BYTES:
            feed[tensor.name] = np.full(shape, features.known_texts(tensor.name)[0].encode(), object)
        elif tensor.data_type is not None:
            feed[tensor.name] = np.ones(shape, tensor.data_type.numpy)
    return feed


def _input_problems(config: ModelConfig, features: Features) -> Iterator[Problem]:
    """Yield what of the inputs the estimator does not take."""
    names = [tensor.name for tensor in config.input]
    if not names:
        yield Problem("input", f"none is configured; the estimator takes '{MATRIX}'")
        return
    if features.is_named and set(names) <= set(features.names):
        left_out = [c.name for c in features.columns if c.name not in names and not c.is_nullable]
        if left_out:
            yield Problem("input", f"the estimator needs column {', '.join(left_out)}")
        for index, tensor in enumerate(config.input):
            if (tensor.data_type is DataType.BYTES) != (tensor.name in features.texts):
                kind = "texts: TYPE_STRING" if tensor.name in features.texts else "numbers"
                yield Problem(f"input[{index}].data_type", f"the estimator takes column '{tensor.name}' as {kind}")
            if len(_dims(tensor, config)) > 2:
                yield Problem(f"input[{index}].dims", f"column '{tensor.name}': expected dims [ 1 ]")
        return
    if len(names) > 1:
        known = f", or one for each column: {', '.join(features.names)}" if features.names else ""
        yield Problem("input", f"expected one input, the matrix{known}; got {', '.join(names)}")
        return
    [tensor] = config.input
    dims = _dims(tensor, config)
    if features.is_text:
        if tensor.data_type is not DataType.BYTES:
            yield Problem("input[0].data_type", "the estimator takes texts: expected TYPE_STRING")
        if any(dim not in (1, -1) for dim in dims):
            yield Problem("input[0].dims", f"a row is one text: expected dims [ 1 ], got {list(tensor.dims)}")
        return
    if tensor.data_type is DataType.BYTES and features.datatype is not DataType.BYTES:
        yield Problem("input[0].data_type", "the estimator takes numbers, got TYPE_STRING")
    if len(dims) != 2 or (features.count is not None and dims[1] not in (-1, features.count)):
        wanted = f"rows of {features.count if features.count is not None else 'n'} features"
        yield Problem("input[0].dims", f"the estimator takes {wanted}, got dims {list(tensor.dims)}")


def _name_problems(config: ModelConfig, estimator: Any) -> Iterator[Problem]:
    """Yield the outputs that the estimator cannot answer."""
    known = provided(estimator)
    if not config.output:
        yield Problem("output", f"none is configured; the estimator provides {', '.join(known)}")
    for index, tensor in enumerate(config.output):
        if tensor.name not in known:
            message = f"unexpected inference output '{tensor.name}', the estimator provides: {', '.join(known)}"
            yield Problem(f"output[{index}].name", message)


def _output_problems(config: ModelConfig, answers: Mapping[str, Array]) -> Iterator[Problem]:
    """Yield the outputs that are of another shape or kind than what the estimator answers."""
    for index, tensor in enumerate(config.output):
        array, datatype = answers[tensor.name], tensor.data_type or DataType.FP32
        dims, own = _dims(tensor, config), answer_datatype(array)
        fits = len(dims) == array.ndim and all(
            dim in (-1, size) for dim, size in zip(dims[1:], array.shape[1:], strict=True)
        )
        if not fits:
            message = f"the estimator answers '{tensor.name}' with shape {[-1, *array.shape[1:]]}, got {list(dims)}"
            yield Problem(f"output[{index}].dims", message)
        is_text = DataType.BYTES in (datatype, own)
        if (is_text and datatype is not own) or not np.can_cast(own.numpy, datatype.numpy, "same_kind"):
            message = f"the estimator answers '{tensor.name}' as {own.config}, got {datatype.config}"
            yield Problem(f"output[{index}].data_type", message)
