"""Tables: the columns that a model takes, and the data frames that it gets.

The one declaration of such a signature, for estimators in files (`backends/sklearn`) and for objects in service files.
A column is an input with an element for each row. Missing values are NaN in numbers, and `MISSING` in texts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import datatypes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from .datatypes import Array

OBJECT = np.dtype(np.object_)

MISSING = b"\xff"
"""A missing text in a tensor: no text in UTF-8 has this byte."""

EXAMPLES_MAX = 100
"""Known values of a column that its schema lists."""

TRIALS_MAX = 500
"""Calls of a model that find out which columns may be missing."""

_JSON_TYPES = {"b": "boolean", "i": "integer", "u": "integer", "f": "number"}


class TableError(ValueError):
    """A value cannot be one of its column."""


class DataColumn:
    """A column of a table.

    Attributes:
        dtype: dtype in the data frame, of numpy or pandas; None for texts, whose dtype pandas chooses.
        values: Values that the model knows, for examples.
        is_assumed: Whether nothing says what the column holds: booleans count as numbers.
        is_nullable: Whether values may be missing.
        missing: What a missing value is in the data frame: NaN or None.
    """

    def __init__(self, name: str, dtype: Any, values: Sequence[Any] = (), *, is_assumed: bool = False) -> None:
        self.name = name
        self.is_assumed = is_assumed
        self.dtype = dtype
        self.values = list(values)
        self.is_nullable = False
        self.missing: Any = np.nan
        categories = getattr(dtype, "categories", None)
        self._is_category = categories is not None
        if categories is not None:
            self.values = self.values or categories.tolist()
            dtype = categories.dtype
        kind = "O" if dtype is None else getattr(dtype, "kind", "O")
        self._is_time = kind == "M"
        self._plain: np.dtype[Any] = OBJECT
        if kind in _JSON_TYPES:
            own = np.dtype(getattr(dtype, "numpy_dtype", dtype))
            self._plain = own if own in datatypes.WIRE else np.dtype(np.float64)

    @property
    def tensor(self) -> np.dtype[Any]:
        """The dtype of the tensor: FP64 for integers and booleans that may be missing."""
        return np.dtype(np.float64) if self.is_nullable and self._plain.kind in "biu" else self._plain

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of a value."""
        name = _JSON_TYPES.get(self._plain.kind, "string")
        types = [name, *["boolean"] * self.is_assumed, *["null"] * self.is_nullable]
        schema: dict[str, Any] = {"type": types if len(types) > 1 else name}
        if self._is_time:
            schema["format"] = "date-time"
        if self.values and (self._is_category or self._plain == OBJECT) and len(self.values) <= EXAMPLES_MAX:
            schema["examples"] = [_shown(value) for value in self.values]
        return schema

    def read(self, array: Array) -> Any:
        """Return the column of a data frame for a tensor. Raises TableError: A text is not UTF-8, or no time."""
        column = self._texts(array) if array.dtype == OBJECT else self._numbers(array)
        if self.dtype is None:
            return column
        if self._is_time and not self._is_category:
            return self._times(column)
        if isinstance(self.dtype, np.dtype):
            return column
        import pandas as pd

        return pd.Series(column).astype(self.dtype)

    def write(self, values: Any) -> Array:
        """Return the tensor of values of such a column."""
        flat = values.tolist() if hasattr(values, "tolist") else list(values)
        if self.tensor != OBJECT:
            return np.array([np.nan if _is_missing(value) else value for value in flat], self.tensor)
        array: Array = np.empty(len(flat), OBJECT)
        array[:] = [MISSING if _is_missing(value) else str(_shown(value)).encode() for value in flat]
        return array

    def examples(self, rows: int) -> list[Any]:
        """Return values that the model knows."""
        first = {"b": True, "i": 1, "u": 1, "f": 1.0}.get(self._plain.kind, "2024-01-31" if self._is_time else "text")
        values = self.values or [first]
        return [values[row % len(values)] for row in range(rows)]

    def _texts(self, array: Array) -> Array:
        column: Array = np.empty(len(array), OBJECT)
        try:
            column[:] = [
                self.missing if self.is_nullable and element == MISSING else element.decode()
                for element in array.tolist()
            ]
        except UnicodeDecodeError as error:
            shown = repr(error.object[:20])
            raise TableError(f"input '{self.name}': expected texts in UTF-8, got {shown}") from None
        return column

    def _numbers(self, array: Array) -> Array:
        if array.dtype.kind != "f" or self._plain.kind not in "biu":
            return array if self._plain == OBJECT else array.astype(self._plain, copy=False)
        absent = np.isnan(array)
        if not absent.any():
            return array.astype(self._plain)
        if self._plain.kind != "b":
            return array
        column = array.astype(bool).astype(OBJECT)
        column[absent] = self.missing
        return column

    def _times(self, column: Array) -> Any:
        import pandas as pd

        zone = getattr(self.dtype, "tz", None)
        try:
            times = pd.to_datetime(pd.Series(column), format="ISO8601", utc=zone is not None)
            return times.astype(self.dtype)
        except (ValueError, TypeError) as error:
            text = str(error).partition(". ")[0]
            raise TableError(f"input '{self.name}': expected times in ISO 8601: {text}") from None


class DataTable:
    """The columns of a model, in their order.

    Args:
        make: Makes the data frame of columns by name; by default that of pandas.
    """

    def __init__(self, columns: Iterable[DataColumn], make: Callable[[Any], Any] | None = None) -> None:
        self.columns = list(columns)
        self._make = make

    def frame(self, tensors: Mapping[str, Array]) -> Any:
        """Return the data frame of tensors by column; those that are left out are missing.

        Raises:
            TableError: A column has a value that it cannot have.
        """
        rows = len(next(iter(tensors.values()))) if tensors else 0
        flat = {name: array.reshape(rows, -1)[:, 0] for name, array in tensors.items()}
        columns = {}
        for column in self.columns:
            array = flat.get(column.name)
            columns[column.name] = column.read(column.write([None] * rows) if array is None else array)
        if self._make is not None:
            return self._make(columns)
        import pandas as pd

        return pd.DataFrame(columns, copy=False)

    def examples(self, rows: int) -> dict[str, Array]:
        """Return tensors of rows that the model knows."""
        return {column.name: column.write(column.examples(rows)) for column in self.columns}

    def find_nullable(self, predict: Callable[[Any], Any]) -> None:
        """Let those columns be missing without which a model answers.

        Args:
            predict: The model. It refuses by raising, by NaN or by fewer rows.
        """
        left = [TRIALS_MAX]

        def try_missing(columns: list[DataColumn]) -> None:
            for missing in (np.nan, None):
                for column in columns:
                    column.is_nullable, column.missing = True, missing
                left[0] -= 1
                if left[0] >= 0 and all(_answers(predict, self._partly(columns, absent)) for absent in (1, 2)):
                    return
            for column in columns:
                column.is_nullable = False
            if len(columns) > 1:
                half = len(columns) // 2
                try_missing(columns[:half])
                try_missing(columns[half:])

        if self._make is None:  # what a missing value is in other data frames is not known
            try_missing(self.columns)

    def _partly(self, columns: list[DataColumn], absent: int) -> Any:
        """Return two rows, of which the first `absent` have no value in some columns."""
        tensors = {}
        for column in self.columns:
            values = column.examples(2)
            tensors[column.name] = column.write([None] * absent + values[absent:] if column in columns else values)
        return self.frame(tensors)


def table_of(frame: Any) -> DataTable:
    """Return the table that a data frame is an example of.

    Raises:
        TypeError: A column has values that no tensor carries.
    """
    is_pandas = type(frame).__module__.partition(".")[0] == "pandas"
    columns = []
    for name in frame.columns:
        values, dtype = frame[name], getattr(frame[name], "dtype", OBJECT)
        if getattr(dtype, "kind", "O") in "cmV":
            raise TypeError(f"column '{name}': values of dtype {dtype} have no tensor")
        known = [value for value in values.tolist() if not _is_missing(value)]
        if dtype == OBJECT:
            dtype = np.asarray(known).dtype if known and all(isinstance(each, bool) for each in known) else None
        columns.append(DataColumn(str(name), dtype, list(dict.fromkeys(known))))
    return DataTable(columns, None if is_pandas else type(frame))


def class_schema(classes: Sequence[Any], *, is_label: bool) -> dict[str, Any]:
    """Return the schema of a classifier's output: of its label, or of a number for each class.

    Args:
        classes: The classes, in the order of the numbers.
        is_label: Whether the output is the label.
    """
    shown = [_shown(each) for each in classes]
    if is_label:
        types = {bool: "boolean", int: "integer", float: "number"}
        return {"type": types.get(type(shown[0]), "string") if shown else "string", "enum": shown}
    return {"type": "array", "prefixItems": [{"type": "number", "title": str(each)} for each in shown]}


def _answers(predict: Callable[[Any], Any], rows: Any) -> bool:
    try:
        found = predict(rows)
        if len(found) != len(rows):
            return False
        array = np.asarray(found)
        return array.dtype.kind != "f" or not np.isnan(array).any()
    except Exception:  # a model raises what it likes
        return False


def _is_missing(value: Any) -> bool:
    return value is None or type(value).__name__ in ("NAType", "NaTType") or value != value


def _shown(value: Any) -> Any:
    """Return a value as JSON has it."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, (bool, int, float, str)):
        return value
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
