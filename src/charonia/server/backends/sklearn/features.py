"""What an estimator takes: a matrix, a column of texts, or a table with a column for each input."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from sklearn.pipeline import Pipeline

from charonia.config.complete import SignatureTensor
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, invalid, unsupported
from charonia.core.tensor import Array
from charonia.install_hint import package_hint

MATRIX = "X"
"""Name of the input of an estimator that takes one: the name of the argument in scikit-learn."""

EXAMPLE_TEXT = "text"

NUMBERS = ("float64", "float32")
"""The dtypes of a matrix of numbers, in the order in which they are tried."""


@dataclass(frozen=True, slots=True)
class Features:
    """The features of an estimator.

    Attributes:
        count: Features of a row, None where it is not known.
        names: Their names, empty where there are none.
        texts: The features that are texts, by name or else by number, with the texts that the estimator knows.
        needs_names: Whether the estimator selects features by name: it takes a table.
        is_text: Whether a row is one text, as vectorizers take it.
        numbers: The numpy dtype of a matrix of numbers: some estimators take that of their training data only.
    """

    count: int | None
    names: tuple[str, ...] = ()
    texts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    needs_names: bool = False
    is_text: bool = False
    numbers: str = NUMBERS[0]

    def signature(self) -> tuple[SignatureTensor, ...]:
        """Return the inputs of the model."""
        if self.is_text:
            return (SignatureTensor(MATRIX, DataType.BYTES, (-1,)),)
        if self.needs_names:
            return tuple(
                SignatureTensor(name, DataType.BYTES if name in self.texts else DataType.FP64, (-1,))
                for name in self.names
            )
        datatype = DataType.BYTES if self.texts else DataType.FP64
        return (SignatureTensor(MATRIX, datatype, (-1, self.count or -1)),)

    def example(self, rows: int) -> dict[str, Array]:
        """Return rows that the estimator accepts, by input: ones, and texts that it knows."""
        feed = {}
        for tensor in self.signature():
            shape = tuple(rows if index == 0 else dim for index, dim in enumerate(tensor.shape))
            if tensor.datatype is DataType.BYTES:
                feed[tensor.name] = np.full(shape, self.known_texts(tensor.name)[0].encode(), object)
            else:
                feed[tensor.name] = np.ones(shape)
        return feed

    def known_texts(self, name: str) -> tuple[str, ...]:
        return self.texts.get(name) or next(iter(self.texts.values()), ()) or (EXAMPLE_TEXT,)

    def table(self, feed: Mapping[str, Array]) -> Any:
        """Return the argument of the estimator's methods: an array, a list of texts or a DataFrame.

        Args:
            feed: The inputs: one is the matrix or the texts; several are columns, by the feature's name.

        Raises:
            ServingError: A text is not UTF-8, or a table is needed and pandas is not installed.
        """
        if len(feed) > 1 or (self.needs_names and feed.keys() == set(self.names)):
            columns = {name: _decoded(name, feed[name].reshape(len(feed[name]), -1)[:, 0]) for name in self.names}
            return _frame(columns) if self.needs_names else np.column_stack(list(columns.values()))
        [(name, array)] = feed.items()
        if self.is_text:
            return _decoded(name, array.reshape(-1)).tolist()
        array = _decoded(name, array)
        if not self.needs_names:
            return array if array.dtype == object else array.astype(self.numbers, copy=False)
        if array.ndim != 2 or array.shape[1] != len(self.names):
            raise invalid(f"input '{name}': expected {len(self.names)} columns, got shape {list(array.shape)}")
        return _frame({column: array[:, index] for index, column in enumerate(self.names)})


def prepare(estimator: Any) -> Features:
    """Return what a fitted estimator takes, and have it take that without warnings.

    An estimator that was fitted with a table, but needs no names, forgets them: it would miss them in each matrix.
    """
    features = features_of(estimator)
    if not features.needs_names:
        for part in parts_of(estimator):
            vars(part).pop("feature_names_in_", None)
    for numbers in NUMBERS:
        candidate = replace(features, numbers=numbers)
        try:
            method = estimator.predict if hasattr(estimator, "predict") else estimator.transform
            method(candidate.table(candidate.example(2)))
        except ServingError:
            raise
        except Exception:  # the error of the first dtype is the one that requests will show
            continue
        return candidate
    return features


def parts_of(value: Any, known: set[int] | None = None) -> Iterator[Any]:
    """Yield an estimator and those that it consists of, each once.

    Args:
        value: An estimator, or what one has as an attribute.
        known: The ids of those that were yielded.
    """
    known = set() if known is None else known
    if hasattr(value, "get_params") and hasattr(value, "__dict__") and not isinstance(value, type):
        if id(value) not in known:
            known.add(id(value))
            yield value
            for attribute in list(vars(value).values()):
                yield from parts_of(attribute, known)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from parts_of(each, known)


def features_of(estimator: Any) -> Features:
    """Return the features of a fitted estimator."""
    if _takes_texts(estimator):
        words = [word for step in _steps(estimator) for word in getattr(step, "vocabulary_", ())]
        return Features(None, texts={MATRIX: tuple(words)} if words else {}, is_text=True)
    names = tuple(str(name) for name in getattr(estimator, "feature_names_in_", ()))
    count = getattr(estimator, "n_features_in_", None)
    texts = dict(_known_texts(estimator, names))
    needs_names = bool(names) and any(
        isinstance(column, str) for step in _steps(estimator) for column in _selected(step)
    )
    return Features(int(count) if count is not None else None, names, texts, needs_names)


def require_pandas() -> Any:
    """Return pandas.

    Raises:
        ServingError: UNSUPPORTED where it is not installed.
    """
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise unsupported(
            "the estimator takes a table with named columns, which needs the package 'pandas', which is not installed",
            hint=package_hint("pandas"),
        ) from error
    return pd


def _frame(columns: Mapping[str, Array]) -> Any:
    return require_pandas().DataFrame(columns, copy=False)


def _decoded(name: str, array: Array) -> Array:
    """Return an array with texts in place of bytes."""
    if array.dtype != object:
        return array
    texts = np.empty(array.shape, object)
    try:
        texts.reshape(-1)[:] = [element.decode() for element in array.reshape(-1).tolist()]
    except UnicodeDecodeError as error:
        raise invalid(f"input '{name}': expected texts in UTF-8, got {error.object[:20]!r}") from None
    return texts


def _steps(estimator: Any) -> Iterator[Any]:
    """Yield an estimator, or the steps of a pipeline, and what they consist of."""
    yield estimator
    parts = estimator.steps if isinstance(estimator, Pipeline) else getattr(estimator, "transformer_list", ())
    for _, part in parts:
        yield from _steps(part)


def _selected(step: Any) -> Iterator[object]:
    """Yield the columns that a step selects, if it is a ColumnTransformer."""
    for _, _, columns in getattr(step, "transformers", ()):
        yield from columns if isinstance(columns, list | tuple | np.ndarray) else (columns,)


def _takes_texts(estimator: Any) -> bool:
    if isinstance(estimator, Pipeline):
        return bool(estimator.steps) and _takes_texts(estimator.steps[0][1])
    if getattr(estimator, "transformer_list", ()):
        return any(_takes_texts(part) for _, part in estimator.transformer_list)
    return hasattr(estimator, "build_analyzer")


def _known_texts(estimator: Any, names: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each feature that is a text, by name or else by number, with the texts that the estimator knows."""
    for step in _steps(estimator):
        for _, part, columns in getattr(step, "transformers_", ()):
            chosen = [columns] if isinstance(columns, str | int) else list(columns) if not callable(columns) else []
            found = [str(names[c]) if isinstance(c, int) and names else str(c) for c in chosen]
            if _takes_texts(part):
                yield from ((name, (EXAMPLE_TEXT,)) for name in found)
            yield from _first_texts(part, found)
    yield from _first_texts(estimator, list(names) or [str(n) for n in range(getattr(estimator, "n_features_in_", 0))])


def _first_texts(part: Any, names: list[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the features of a transformer, or of the first steps of a pipeline, that have categories of texts."""
    for step in _steps(part):
        for name, categories in zip(names, getattr(step, "categories_", ()), strict=False):
            if len(categories) and isinstance(categories[0], str):
                yield name, tuple(map(str, categories))
