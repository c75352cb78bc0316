"""What an estimator takes: a matrix, a column of texts, or a table with a column for each input.

An estimator that was fitted with a data frame gets data frames. What its columns hold is said by its parts (encoders,
vectorizers, boosters, statsmodels' data), or by example rows.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from charonia.config.complete import SignatureTensor
from charonia.core.dtypes import BY_NUMPY, DataType
from charonia.core.errors import ServingError, internal, invalid, unsupported
from charonia.core.tensor import Array
from charonia.install_hint import package_hint
from charonia.server.backends.boosters import are_named, xgboost_columns
from charonia.server.channel.datatypes import as_bytes
from charonia.server.channel.tables import DataColumn, DataTable, TableError, table_of

METHODS = {
    "label": "predict",
    "output": "predict",
    "predict_proba": "predict_proba",
    "predict_log_proba": "predict_log_proba",
    "decision_function": "decision_function",
    "score_samples": "score_samples",
    "transform": "transform",
}
"""Method by output."""


CLASS_NUMBERS = ("predict_proba", "predict_log_proba", "decision_function")
"""Outputs with a number for each class."""


def classes_of(estimator: Any) -> list[Any]:
    """Return the classes of a classifier with one target, empty for any other estimator."""
    try:
        classes = np.asarray(estimator.classes_)
    except Exception:  # it has none, or several lists
        return []
    return classes.tolist() if classes.ndim == 1 else []


def outputs_of(estimator: Any, rows: Any) -> list[str]:
    """Return the outputs that a model has unless its configuration names others.

    Args:
        rows: Rows that it accepts: whether it answers labels or numbers, it may only show when it does.
    """
    if not hasattr(estimator, "predict"):
        return ["transform"]
    is_number = array_of("output", estimator.predict(rows)).dtype.kind == "f"
    proba = ["predict_proba"] if hasattr(estimator, "predict_proba") else []
    return ["output" if is_number and not hasattr(estimator, "classes_") else "label", *proba]


def provided(estimator: Any) -> list[str]:
    return [output for output, method in METHODS.items() if hasattr(estimator, method)]


def array_of(output: str, result: Any) -> Array:
    """Return what a method returned as an array: a sparse matrix becomes dense, a table loses the names of its columns.

    Raises:
        ServingError: INTERNAL for a list of arrays, which is what several targets of classes have.
    """
    if isinstance(result, np.ndarray):
        return result
    if hasattr(result, "toarray"):
        result = result.toarray()
    elif hasattr(result, "to_numpy"):
        result = result.to_numpy()
    if isinstance(result, list):
        raise internal(
            f"output '{output}': the estimator has several targets and returns a list of arrays, not one tensor",
            hint="name other outputs in config.pbtxt",
        )
    return np.asarray(result)


def answer_datatype(array: Array) -> DataType:
    """Return the datatype that an array is sent as."""
    if array.dtype.kind in "OSUT":
        return DataType.BYTES
    return BY_NUMPY.get(array.dtype.newbyteorder("<"), DataType.FP64)


def as_datatype(array: Array, datatype: DataType) -> Array:
    """Return an array in the datatype of its output."""
    if datatype is DataType.BYTES:
        return as_bytes(array)
    return array.astype(datatype.numpy, copy=False)


MATRIX = "X"
"""Name of the input of an estimator that takes one: the name of the argument in scikit-learn."""

EXAMPLE_TEXT = "text"

EXAMPLE_ROWS = 2

TRIAL_ROWS = 16
"""Rows for which an estimator must answer the same to an array and a data frame."""

_NAMES = "feature_names_in_"

NUMBERS = ("float64", "float32")
"""The dtypes of a matrix of numbers, in the order in which they are tried."""

_FITTED = frozenset({"steps", "transformer_list"})
"""Parameters of estimators that are fitted themselves."""

_METHODS = ("fit", "predict", "predict_proba", "transform")


@dataclass(frozen=True, slots=True)
class Features:
    """The features of an estimator.

    Attributes:
        count: Features of a row, None where it is not known.
        columns: Its columns; empty for a matrix of numbers.
        is_named: Whether the columns have names, and are inputs.
        takes_frame: Whether it is called with a data frame rather than an array.
        is_text: Whether a row is one text, as vectorizers take it.
        words: Texts that a vectorizer knows.
        numbers: The numpy dtype of a matrix of numbers: some estimators take that of their training data only.
    """

    count: int | None
    columns: tuple[DataColumn, ...] = ()
    is_named: bool = False
    takes_frame: bool = False
    is_text: bool = False
    words: tuple[str, ...] = ()
    numbers: str = NUMBERS[0]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns) if self.is_named else ()

    @property
    def texts(self) -> frozenset[str]:
        """The columns that are sent as texts."""
        return frozenset(column.name for column in self.columns if column.tensor == np.object_)

    @property
    def datatype(self) -> DataType:
        """Datatype of the matrix."""
        return DataType.BYTES if self.is_text or (self.texts and not self.is_named) else DataType.FP64

    def signature(self) -> tuple[SignatureTensor, ...]:
        """Return the inputs of the model."""
        if self.is_named:
            return tuple(
                SignatureTensor(column.name, datatype_of(column), (-1,), nullable=column.is_nullable)
                for column in self.columns
            )
        return (SignatureTensor(MATRIX, self.datatype, (-1,) if self.is_text else (-1, self.count or -1)),)

    def as_matrix(self) -> "Features":
        """Return these features as a matrix of numbers."""
        return Features(self.count, numbers=self.numbers)

    def schemas(self) -> dict[str, dict[str, Any]]:
        """Return the JSON schema of each input."""
        if self.is_named:
            return {column.name: column.schema for column in self.columns}
        if self.is_text:
            return {MATRIX: {"type": "string"}}
        items = {"prefixItems": [column.schema for column in self.columns]} if self.columns else {}
        size = {"minItems": self.count, "maxItems": self.count} if self.count else {}
        return {MATRIX: {"type": "array", "items": {"type": "number"}, **items, **size}}

    def example(self, rows: int = EXAMPLE_ROWS) -> dict[str, Array]:
        """Return rows that the estimator accepts, by input: ones, and values that it knows."""
        if self.is_text:
            return {MATRIX: np.full(rows, self.known_texts(MATRIX)[0].encode(), object)}
        if not self.columns:
            return {MATRIX: np.ones((rows, self.count or 1))}
        columns = DataTable(self.columns).examples(rows)
        if self.is_named:
            return columns
        texts = [[str(value) for value in column.examples(rows)] for column in self.columns]
        return {MATRIX: np.array([[value.encode() for value in row] for row in zip(*texts, strict=True)], object)}

    def known_texts(self, name: str) -> tuple[str, ...]:
        """Return texts that the estimator knows in an input, at least one."""
        known = next((column.values for column in self.columns if column.name == name), ())
        return tuple(map(str, known or self.words)) or (EXAMPLE_TEXT,)

    def rows(self, feed: Mapping[str, Array]) -> Any:
        """Return the argument of the estimator's methods: an array, a list of texts or a data frame.

        Args:
            feed: The inputs: columns by name, or one matrix.

        Raises:
            ServingError: A value cannot be one of its column, or a table is needed and pandas is not installed.
        """
        try:
            if next(iter(feed)) not in self.names:
                return self._matrix(*next(iter(feed.items())))
            if any(column.dtype != np.float64 for column in self.columns) or len(feed) < len(self.columns):
                return self._of_columns(feed)
            matrix = np.column_stack([feed[name].reshape(-1) for name in self.names]).astype(float, copy=False)
            return require_pandas().DataFrame(matrix, columns=self.names, copy=False) if self.takes_frame else matrix
        except TableError as error:
            raise invalid(str(error)) from None

    def _matrix(self, name: str, array: Array) -> Any:
        if self.is_text:
            return DataColumn(name, None).read(array.reshape(-1)).tolist()
        if not self.columns:
            if array.dtype != object:
                return array.astype(self.numbers, copy=False)
            return DataColumn(name, None).read(array.reshape(-1)).reshape(array.shape)
        if array.ndim != 2 or array.shape[1] != len(self.columns):
            raise invalid(f"input '{name}': expected {len(self.columns)} columns, got shape {list(array.shape)}")
        columns = {}
        for column, values in zip(self.columns, array.T, strict=True):
            is_number = array.dtype == object and column.name not in self.texts
            columns[column.name] = _numbers(name, values) if is_number else values
        return self._of_columns(columns)

    def _of_columns(self, columns: Mapping[str, Array]) -> Any:
        require_pandas()
        frame = DataTable(self.columns).frame(columns)
        return frame if self.takes_frame else frame.to_numpy(object if self.texts else None)


def datatype_of(column: DataColumn) -> DataType:
    return DataType.BYTES if column.tensor == np.object_ else BY_NUMPY[column.tensor.newbyteorder("<")]


def prepare(estimator: Any, example: Any = None) -> Features:
    """Return what a fitted estimator takes.

    Args:
        example: A data frame with rows that it takes, None for none.

    Raises:
        ServingError: The example has other columns.
    """
    features = features_of(estimator, example)
    predict = estimator.predict if hasattr(estimator, "predict") else estimator.transform
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for candidate in _candidates(features, has_example=example is not None):
            try:
                predict(candidate.rows(candidate.example()))
            except ServingError:
                raise
            except Exception:  # the error of the first candidate is the one that requests will show
                continue
            if candidate.is_named:
                DataTable(candidate.columns).find_nullable(predict)
            return _as_array(estimator, candidate, predict)
    return features


def _as_array(estimator: Any, features: Features, predict: Callable[[Any], Any]) -> Features:
    """Return the features of an estimator that answers the same to an array: that takes a part of a data frame's time.

    The estimator forgets the names then, which it would miss in every array, with a warning.
    """
    if not features.takes_frame or any(column.dtype != np.float64 for column in features.columns):
        return features
    chance = np.random.default_rng(0)
    feed = {column.name: chance.normal(size=TRIAL_ROWS) for column in features.columns}
    for row, column in enumerate(features.columns):
        if column.is_nullable:
            feed[column.name][row % TRIAL_ROWS] = np.nan
    bare = replace(features, takes_frame=False)
    named = [vars(part) for part, _ in parts_of(estimator) if _NAMES in vars(part)]
    names = [attributes[_NAMES] for attributes in named]
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        try:
            expected, before = np.asarray(predict(features.rows(feed))), len(raised)
            for attributes in named:
                del attributes[_NAMES]
            if np.array_equal(np.asarray(predict(bare.rows(feed))), expected) and len(raised) == before:
                return bare
        except Exception:  # it needs the names, or refuses such numbers
            pass
    for attributes, own in zip(named, names, strict=True):
        attributes[_NAMES] = own
    return features


def _candidates(features: Features, *, has_example: bool) -> Iterator[Features]:
    """Yield the ways in which the values of columns can be understood that no part of the estimator explains."""
    yield features
    if not features.columns:
        yield replace(features, numbers=NUMBERS[1])
        return
    short = (
        DataColumn(c.name, np.dtype(NUMBERS[1]), c.values) if c.dtype == np.float64 else c for c in features.columns
    )
    yield replace(features, columns=tuple(short))
    if has_example:
        times = tuple(_as_time(column) or column for column in features.columns)
        yield replace(features, columns=times)
    else:
        texts = tuple(column if column.values else DataColumn(column.name, None) for column in features.columns)
        yield replace(features, columns=texts)


def _as_time(column: DataColumn) -> DataColumn | None:
    """Return a column of texts as one of times, None if it holds other texts."""
    if column.tensor != np.object_ or not column.values:
        return None
    pd = require_pandas()
    times = pd.to_datetime(pd.Series(map(str, column.values)), format="ISO8601", errors="coerce")
    return DataColumn(column.name, times.dtype, times.tolist()) if times.notna().all() else None


def parts_of(value: Any, names: Sequence[str] = (), known: set[int] | None = None) -> Iterator[tuple[Any, list[str]]]:
    """Yield an estimator and those that it consists of, each once, with the names of its columns.

    Args:
        value: An estimator, or what one has as an attribute.
        names: The columns that it gets.
        known: The ids of those that were yielded.
    """
    known = set() if known is None else known
    if isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from parts_of(each, names, known)
        return
    is_part = any(hasattr(type(value), method) for method in _METHODS)
    if isinstance(value, type) or not is_part or not hasattr(value, "__dict__") or id(value) in known:
        return
    known.add(id(value))
    own = [str(name) for name in _attribute(value, "feature_names_in_", ())] or list(names)
    yield value, own
    for _, part, columns in getattr(value, "transformers_", ()):
        yield from parts_of(part, _chosen(own, columns), known)
    params = value.get_params(deep=False).keys() if hasattr(value, "get_params") else ()
    templates = set(params) - _FITTED  # what was cloned before it was fitted
    for name, attribute in list(vars(value).items()):
        if name not in templates:
            yield from parts_of(attribute, own, known)


def features_of(estimator: Any, example: Any = None) -> Features:
    """Return the features of a fitted estimator; `example` as in `prepare`."""
    # A model of CatBoost that was read from a file counts none, and has names that are numbers.
    count = _attribute(estimator, "n_features_in_", 0) or len(_attribute(estimator, "feature_names_", ())) or None
    if example is None and _takes_texts(estimator):
        words = [word for part, _ in parts_of(estimator) for word in _attribute(part, "vocabulary_", ())]
        return Features(None, is_text=True, words=tuple(words))
    names = _names(estimator)
    example = _data_of(estimator) if example is None else example
    takes_frame = bool(names) or count is None
    is_named = bool(names) or example is not None
    if example is not None:
        names = _checked_names(names or [str(name) for name in example.columns], example, count)
    numbered = names or [str(number) for number in range(count or 0)]
    known = _known_columns(estimator, numbered)
    if not is_named and all(isinstance(dtype, np.dtype) for dtype, _ in known.values()):
        return Features(int(count) if count is not None else None)
    shown = {column.name: column for column in table_of(example[names]).columns} if example is not None else {}
    columns = []
    for name in numbered:
        dtype, values = known.get(name, (np.dtype(float), ()))
        is_shown = name in shown and not hasattr(dtype, "categories")
        made = DataColumn(name, dtype, values, is_assumed=is_named and name not in known)
        columns.append(shown[name] if is_shown else made)
    return Features(len(columns), tuple(columns), is_named, is_named and takes_frame)


def read_rows(path: Path) -> Any:
    """Return the data frame in a file of example rows: CSV, JSON or Parquet.

    Raises:
        ServingError: INVALID_ARG for a file that cannot be read.
    """
    pd = require_pandas()
    readers = {".csv": pd.read_csv, ".json": pd.read_json, ".parquet": pd.read_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise invalid(f"'{path.name}': expected example rows in a file {', '.join(readers)}")
    try:
        frame = reader(path)
    except (OSError, ValueError, ImportError) as error:
        raise invalid(f"'{path.name}': the example rows cannot be read: {error}") from error
    if frame.empty:
        raise invalid(f"'{path.name}': expected at least one example row, got none")
    return frame


def require_pandas() -> Any:
    """Return pandas. Raises ServingError: UNSUPPORTED where it is not installed."""
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise unsupported(
            "the estimator takes a table with named columns, which needs the package 'pandas', which is not installed",
            hint=package_hint("pandas"),
        ) from error
    return pd


def _names(estimator: Any) -> list[str]:
    """Return the names of the columns of the training data, empty where it had none."""
    model = _attribute(estimator, "model", None)  # of statsmodels
    named = _attribute(estimator, "feature_name", None)  # of a booster of LightGBM
    for names in (
        _attribute(estimator, "feature_names_in_", ()),
        _attribute(estimator, "feature_names_", ()),
        named() if callable(named) else (),
        _attribute(model, "exog_names", ()) if _data_of(estimator) is None else (),
        *(_attribute(part, "feature_names_in_", ()) for part, _ in parts_of(estimator)),
    ):
        if are_named(names):
            return [str(name) for name in names]
    return []


def _data_of(estimator: Any) -> Any:
    """Return the training data of a model of statsmodels that has a formula, without what it predicts."""
    model = _attribute(estimator, "model", None)
    frame = getattr(getattr(model, "data", None), "frame", None)
    if frame is None or not hasattr(model, "formula"):
        return None
    return frame.drop(columns=[name for name in frame.columns if name == model.endog_names])


def _checked_names(names: list[str], example: Any, count: int | None) -> list[str]:
    missing = [name for name in names if name not in example.columns]
    if missing:
        hint = f"the estimator takes {', '.join(names)}"
        raise invalid(f"the example rows lack column {', '.join(missing)}", hint=hint)
    if count and len(names) != count:
        raise invalid(
            f"the example rows have {len(names)} columns, and the estimator takes {count}: {', '.join(names)}",
            hint="leave out columns that it does not take, such as the target",
        )
    return names


def _known_columns(estimator: Any, names: Sequence[str]) -> dict[str, tuple[Any, Sequence[Any]]]:
    """Return dtype and known values of the columns that the parts of an estimator explain, by name."""
    found: dict[str, tuple[Any, Sequence[Any]]] = {}
    for part, own in parts_of(estimator, names):
        for name, dtype, values in _explained(part, own):
            if name in names and (name not in found or len(values) > len(found[name][1])):
                found[name] = dtype if name not in found else found[name][0], values
    return found


def _explained(part: Any, names: Sequence[str]) -> Iterator[tuple[str, Any, Sequence[Any]]]:
    """Yield name, dtype and known values of the columns that one part of an estimator explains."""
    categories = _attribute(part, "categories_", ())
    if len(categories) == len(names):
        for name, values in zip(names, categories, strict=True):
            known = [value for value in np.asarray(values).tolist() if value is not None and value == value]
            is_text = any(isinstance(value, str) for value in known)
            yield name, None if is_text else np.dtype(bool if known and isinstance(known[0], bool) else float), known
    if hasattr(part, "build_analyzer"):
        yield from ((name, None, ()) for name in names[:1])
    statistics = _attribute(part, "statistics_", ())  # of an imputer
    if len(statistics) == len(names):
        yield from ((n, None, [v]) for n, v in zip(names, statistics, strict=True) if isinstance(v, str))
    if type(part).__module__.startswith("category_encoders"):
        yield from ((str(name), None, ()) for name in part.cols or ())
    if _attribute(part, "feature_names_", ()) and hasattr(part, "get_cat_feature_indices"):
        indices = [*part.get_cat_feature_indices(), *part.get_text_feature_indices()]
        yield from ((names[index], None, ()) for index in indices)
    for index, values in _booster_categories(part).items():
        pd = require_pandas()
        yield names[index], pd.CategoricalDtype(values), values


def _booster_categories(part: Any) -> Mapping[int, Sequence[Any]]:
    """Return the categories that a booster of LightGBM or XGBoost was fitted with, by the number of the column."""
    booster = _attribute(part, "booster_", part)
    if _attribute(booster, "pandas_categorical", ()):
        return dict(zip(booster.params["categorical_column"], booster.pandas_categorical, strict=False))
    try:
        booster = part.get_booster() if hasattr(part, "get_booster") else part
    except Exception:  # it is not fitted: the template of others
        return {}
    if "c" not in _attribute(booster, "feature_types", ()):
        return {}
    return xgboost_columns(bytes(booster.save_raw("json"))).categories


def _chosen(names: Sequence[str], columns: Any) -> list[str]:
    """Return the columns that a ColumnTransformer gives to a part: chosen by name, number, slice or mask."""
    if isinstance(columns, str):
        return [columns]
    if callable(columns) or not len(names):
        return []
    if isinstance(columns, slice):
        if isinstance(columns.start, str) or isinstance(columns.stop, str):
            first = names.index(columns.start) if columns.start is not None else 0
            last = names.index(columns.stop) + 1 if columns.stop is not None else len(names)
            return list(names[first:last])
        return list(names[columns])
    if len(np.atleast_1d(columns)) and isinstance(np.atleast_1d(columns)[0], str):
        return [str(name) for name in columns]
    return [str(name) for name in np.atleast_1d(np.asarray(names, object)[columns])] if np.size(columns) else []


def _numbers(name: str, values: Array) -> Array:
    try:
        return np.array([np.nan if value in (b"", b"null") else float(value) for value in values.tolist()])
    except ValueError as error:
        raise invalid(f"input '{name}': {error}") from None


def _takes_texts(estimator: Any) -> bool:
    """Return whether a row is one text: a vectorizer comes first."""
    for parts in (_attribute(estimator, "steps", ())[:1], _attribute(estimator, "transformer_list", ())):
        if parts:
            return any(_takes_texts(part) for _, part in parts)
    inner = [_attribute(estimator, name, None) for name in ("best_estimator_", "estimator_", "regressor_")]
    inner += list(_attribute(estimator, "estimators_", ()))[:1]
    inner += [each.estimator for each in _attribute(estimator, "calibrated_classifiers_", ())[:1]]
    return hasattr(estimator, "build_analyzer") or any(_takes_texts(part) for part in inner if part is not None)


def _attribute(value: Any, name: str, default: Any) -> Any:
    """Return an attribute, or a default where it is missing or None; properties of estimators raise what they like."""
    try:
        found = getattr(value, name, default)
    except Exception:
        return default
    return default if found is None else found
