"""Tables in JSON and CSV: rows of named columns, turned into plain values by input.

    [{"age": 1}, {"age": 2}]                                   records, also as `dataframe_records` or `instances`
    {"columns": ["age"], "data": [[1], [2]]}                   split, also as `dataframe_split`; an index is ignored
    {"inputs": {"age": [1, 2]}}                                columns
    age,city                                                   CSV, with a line of names

A column is an input of its name. A model whose only input is a matrix has the names of its columns as titles in the
schema of that input. Columns that may be missing can be left out, and columns that the model does not know are refused.

Source: MLflow's scoring server ("Accepted input formats"); pandas, `DataFrame.to_json`.
"""

import csv
import difflib
import io
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from charonia.config.model import ModelConfig
from charonia.core.errors import invalid
from charonia.wire.json_text import Object, kind_of
from charonia.wire.plain_values import (
    BASE64,
    CONTENT,
    PlainValues,
    Schema,
    is_nullable,
    plain_values,
    titles_of,
    type_of,
)

CSV = b"text/csv"
RECORDS = "dataframe_records"
SPLIT = "dataframe_split"
INSTANCES = "instances"
INPUTS = "inputs"

KEYS = (RECORDS, SPLIT, INSTANCES, INPUTS)
"""Members of a document that hold a table."""

_SPLIT_KEYS = frozenset({"columns", "data", "index"})
_WORDS = {"true": True, "false": False}


class Columns(NamedTuple):
    """A table: values by column, and the number of rows."""

    values: Mapping[str, Any]
    rows: int


def table_document(config: ModelConfig, document: Object) -> Object:
    """Return a document with the plain values by input in place of a table in it.

    Raises:
        ServingError: As `inputs_of`.
    """
    names = {tensor.name for tensor in config.input}
    keys = KEYS if names.isdisjoint(document) else (RECORDS, SPLIT, INSTANCES)  # beside inputs, it is a parameter
    key = next((each for each in keys if each in document and each not in names), None)
    if key is not None and not (key == INPUTS and _are_tensors(document[key])):
        return {k: v for k, v in document.items() if k != key} | inputs_of(config, key, document[key])
    if "data" in document and document.keys() <= _SPLIT_KEYS and not names & document.keys():
        return inputs_of(config, SPLIT, document)
    return document


def _are_tensors(value: object) -> bool:
    """Whether it looks like the body of an infer request, which has an error of its own kind."""
    return type(value) is list and bool(value) and type(value[0]) is dict and value[0].keys() >= {"name", "datatype"}


def plain_inputs(config: ModelConfig, table: Columns) -> Object:
    """Return the values of a table by input of the model.

    Raises:
        ServingError: INVALID_ARG for a column that is missing, or that the model does not know.
    """
    schemas, required = _schemas(config), [tensor.name for tensor in config.input if not tensor.optional]
    titles = titles_of(schemas[required[0]]) if len(required) == 1 else ()
    if titles and required[0] not in table.values:
        items = dict(zip(titles, schemas[required[0]]["prefixItems"], strict=True))
        columns = _complete(config, table, items, ())
        rows = zip(*columns.values(), strict=True)
        return {required[0]: [list(row) for row in rows]}
    return _complete(config, table, schemas, {tensor.name for tensor in config.input if tensor.optional})


def csv_columns(config: ModelConfig, body: bytes) -> Columns:
    """Return the table in CSV, whose first line has the names of the columns.

    Raises:
        ServingError: INVALID_ARG for text in another form.
    """
    try:
        lines = [line for line in csv.reader(io.StringIO(body.decode("utf-8-sig")), strict=True) if line]
    except (ValueError, csv.Error) as error:
        raise invalid(f"the CSV cannot be read: {error}") from error
    if len(lines) < 2:
        raise invalid("the CSV has no rows: expected a line of column names, and a line for each row")
    table = columns_of_split("the CSV", lines[0], lines[1:])
    columns = _schemas(config)
    for schema in columns.values():
        columns = columns | dict(zip(titles_of(schema), schema.get("prefixItems", ()), strict=False))
    typed = {
        name: [_csv_value(name, columns[name], str(text)) for text in texts] if name in columns else texts
        for name, texts in table.values.items()
    }
    return Columns(typed, table.rows)


def columns_of_records(subject: str, rows: Sequence[Object]) -> Columns:
    """Return the table of objects; a member that a row lacks is null.

    Raises:
        ServingError: INVALID_ARG for a row that is no object.
    """
    if any(type(row) is not dict for row in rows):
        raise invalid(f"{subject}: expected objects, a row each, got {_shown(rows)}")
    names = list(dict.fromkeys(name for row in rows for name in row))
    return Columns({name: [row.get(name) for row in rows] for name in names}, len(rows))


def columns_of_split(subject: str, names: Sequence[object], rows: object) -> Columns:
    """Return the table of column names and rows of values.

    Raises:
        ServingError: INVALID_ARG where a row has another size, or a name occurs twice.
    """
    if len(set(map(str, names))) != len(names):
        raise invalid(f"{subject}: expected distinct columns, got {', '.join(map(str, names))}")
    if type(rows) is not list or not rows:
        raise invalid(f"{subject}: expected an array of at least one row, got {_shown(rows)}")
    for index, row in enumerate(rows):
        if type(row) is not list or len(row) != len(names):
            got = f"{len(row)} values" if type(row) is list else kind_of(row)
            raise invalid(f"{subject}: row {index}: expected {len(names)} values, one a column, got {got}")
    return Columns({str(name): [row[at] for row in rows] for at, name in enumerate(names)}, len(rows))


def inputs_of(config: ModelConfig, key: str, value: object) -> Object:
    """Return the plain values by input for the member of a document that holds a table.

    Args:
        config: The model's configuration.
        key: Name of the member, one of `KEYS`.
        value: Its value.

    Raises:
        ServingError: INVALID_ARG for a table that is malformed, or has other columns than the model.
    """
    subject = f"'{key}'"
    if key == SPLIT:
        if type(value) is not dict or "data" not in value:
            raise invalid(f"{subject}: expected an object with 'columns' and 'data', got {kind_of(value)}")
        names = value.get("columns")
        if names is None:
            return {_only(config, f"{subject} without 'columns'"): value["data"]}
        if type(names) is not list:
            raise invalid(f"{subject}: 'columns': expected an array of names, got {kind_of(names)}")
        return plain_inputs(config, columns_of_split(subject, names, value["data"]))
    if key == INPUTS and _is_named(value):
        assert type(value) is dict
        sizes = [len(each) for each in value.values() if type(each) is list]
        return plain_inputs(config, Columns(value, max(sizes, default=1)))
    rows: list[Any] = value if type(value) is list else []
    if rows and _is_named(rows[0]):
        return plain_inputs(config, columns_of_records(subject, rows))
    if key == RECORDS or (key == INSTANCES and not rows):
        raise invalid(f"{subject}: expected an array of at least one row, got {_shown(value)}")
    return {_only(config, subject): value}


def _is_named(value: object) -> bool:
    return type(value) is dict and value.keys() != {BASE64}


def _only(config: ModelConfig, subject: str) -> str:
    required = [tensor.name for tensor in config.input if not tensor.optional]
    if len(required) != 1:
        names = ", ".join(tensor.name for tensor in config.input)
        raise invalid(f"{subject}: expected objects with the inputs {names}, got plain values")
    return required[0]


def _complete(
    config: ModelConfig, table: Columns, schemas: Mapping[str, Schema], optional: Collection[str]
) -> dict[str, Any]:
    """Return the columns of a model in their order; missing columns that may be null are null.

    Args:
        config: The model's configuration.
        table: The table.
        schemas: The columns of the model.
        optional: Columns that can be left out.
    """
    values = table.values
    known = ", ".join(schemas)
    absent = [name for name in schemas if name not in values]
    for name in values:
        if name not in schemas:
            near = difflib.get_close_matches(name, absent, n=1)
            hint = f"its inputs are {known}" + (f"; did you mean '{near[0]}'?" if near else "")
            raise invalid(f"model '{config.name}' has no input '{name}'", hint=hint)
    found: dict[str, Any] = {}
    for name, schema in schemas.items():
        column = values.get(name)
        if name in values:
            if type(column) is list and None in column and not is_nullable(schema) and CONTENT not in schema:
                raise invalid(f"row {column.index(None)} has no value for '{name}', which model '{config.name}' needs")
            found[name] = column
        elif is_nullable(schema):
            found[name] = [None] * table.rows
        elif name not in optional:
            missing = ", ".join(each for each in absent if each not in optional and not is_nullable(schemas[each]))
            raise invalid(f"model '{config.name}': the table lacks {missing}", hint=f"its inputs are {known}")
    return found


def _schemas(config: ModelConfig) -> dict[str, Schema]:
    """Return the schema of each input; of a model without any, that of its datatype."""
    kinds = {"b": "boolean", "i": "integer", "u": "integer", "f": "number"}
    known = (plain_values(config) or PlainValues()).inputs
    return {
        tensor.name: known.get(tensor.name) or {"type": kinds.get(tensor.data_type.numpy.kind, "string")}
        for tensor in config.input
        if tensor.data_type is not None
    }


def _csv_value(name: str, schema: Schema, text: str) -> object:
    kind = type_of(schema)
    if text == "" and (kind != "string" or is_nullable(schema)):
        return None
    try:
        if "boolean" in schema["type"] and text.lower() in _WORDS:
            return _WORDS[text.lower()]
        return text if kind == "string" else float(text)
    except ValueError:
        raise invalid(f"column '{name}': expected {kind}, got '{text:.40}'") from None


def _shown(rows: object) -> str:
    if type(rows) is list and rows:
        return f"an array with {next((kind_of(row) for row in rows if type(row) is not dict), 'an object')}"
    return "an empty one" if rows == [] else kind_of(rows)
