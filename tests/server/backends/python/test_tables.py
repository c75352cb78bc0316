"""Tables: the data frames that objects of service files get, with the dtypes of their example."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from charonia.server.channel.tables import MISSING, DataColumn, DataTable, TableError, class_schema, table_of


def frame(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame(columns)


@pytest.mark.parametrize(
    ("values", "datatype", "schema"),
    [
        (pd.Series([1, 2]), "i8", {"type": "integer"}),
        (pd.Series([1.5]), "f8", {"type": "number"}),
        (pd.Series([1.5], dtype="float32"), "f4", {"type": "number"}),
        (pd.Series([True]), "?", {"type": "boolean"}),
        (pd.Series(["a", "b"]), "O", {"type": "string", "examples": ["a", "b"]}),
        (pd.Categorical(["a"], ["b", "a"]), "O", {"type": "string", "examples": ["a"]}),
        (pd.Categorical([3, 1]), "i8", {"type": "integer", "examples": [3, 1]}),
        (pd.Series([1, None], dtype="Int64"), "i8", {"type": "integer"}),
        (
            pd.to_datetime(pd.Series(["2024-01-31"])),
            "O",
            {"type": "string", "format": "date-time", "examples": ["2024-01-31T00:00:00"]},
        ),
    ],
    ids=str,
)
def test_a_column_of_each_dtype_is_a_tensor_and_a_column_of_that_dtype_again(
    values: Any, datatype: str, schema: dict[str, Any]
) -> None:
    rows = frame(x=values)
    table = table_of(rows)
    [column] = table.columns

    tensor = column.write(rows["x"].dropna())

    assert column.schema == schema
    assert tensor.dtype == np.dtype(datatype)
    pd.testing.assert_frame_equal(table.frame({"x": tensor.reshape(-1, 1)}), rows.dropna())


@pytest.mark.parametrize(
    "values",
    [
        pd.Series([1, 2]),
        pd.Series([True, False]),
        pd.Series([1.5, 2.5]),
        pd.Series(["a", "b"]),
        pd.Categorical(["a", "b"]),
        pd.Categorical([3, 1]),
        pd.to_datetime(pd.Series(["2024-01-31", "2024-02-01"])),
        pd.to_datetime(pd.Series(["2024-01-31", "2024-02-01"])).dt.tz_localize("Europe/Berlin"),
    ],
    ids=lambda values: str(values.dtype),
)
def test_missing_values_are_missing_in_a_column_of_each_dtype(values: Any) -> None:
    table = table_of(frame(x=values))
    table.find_nullable(lambda rows: [0] * len(rows))
    [column] = table.columns

    read = table.frame({"x": column.write([None, column.values[0] if column.values else 1])})

    assert read["x"].isna().tolist() == [True, False]
    assert "null" in column.schema["type"]
    assert column.tensor in (np.dtype(float), np.dtype(object))
    whole = table.frame({"x": column.write(column.examples(2))})
    assert whole["x"].dtype == frame(x=values)["x"].dtype


def test_columns_may_be_missing_without_which_a_model_answers() -> None:
    def predict(rows: pd.DataFrame) -> Any:
        if rows["a"].isna().any():
            raise ValueError
        return rows["b"].to_numpy() + rows["c"].map(lambda c: 0 if c is None else 1).astype(float).to_numpy()

    table = DataTable(
        [
            DataColumn("a", np.dtype(float)),
            DataColumn("b", np.dtype(float)),
            DataColumn("c", None),
            DataColumn("d", None),
        ]
    )

    table.find_nullable(predict)

    assert {each.name: each.is_nullable for each in table.columns} == {"a": False, "b": False, "c": True, "d": True}


def test_texts_and_times_are_checked() -> None:
    times = table_of(frame(x=pd.to_datetime(["2024-01-31"])))

    with pytest.raises(TableError, match="input 'x': expected times in ISO 8601"):
        times.frame({"x": np.array([b"tomorrow"], object)})
    for wrong in (b"\xc3", MISSING):
        with pytest.raises(TableError, match="input 'x': expected texts in UTF-8, got"):
            DataTable([DataColumn("x", None)]).frame({"x": np.array([wrong], object)})


def test_values_without_a_tensor_are_refused() -> None:
    with pytest.raises(TypeError, match=r"column 'x': values of dtype timedelta64.* have no tensor"):
        table_of(frame(x=pd.to_timedelta(["1 day"])))


def test_classes_are_values_of_labels_and_names_of_numbers() -> None:
    assert class_schema([np.int64(3), 5], is_label=True) == {"type": "integer", "enum": [3, 5]}
    assert class_schema(["a"], is_label=False)["prefixItems"] == [{"type": "number", "title": "a"}]
