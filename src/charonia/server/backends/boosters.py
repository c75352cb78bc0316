"""What files of LightGBM and XGBoost say of their columns: names, and the categories of a data frame. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

_UNNAMED = re.compile(r"(Column_|f)?\d+")
"""Names that boosters give to columns without any."""


class BoosterColumns(NamedTuple):
    """The columns of a booster.

    Attributes:
        names: Their names, empty where they have none.
        categories: Categories by number of the column, in the order of their codes.
    """

    names: Sequence[str] = ()
    categories: Mapping[int, Sequence[Any]] = {}


def are_named(names: Sequence[object]) -> bool:
    return any(not _UNNAMED.fullmatch(str(name)) for name in names)


def lightgbm_columns(text: bytes) -> BoosterColumns:
    """Return the columns in a text file of LightGBM."""
    names = _line(text, rb"feature_names=").split()
    numbers = [int(number) for number in re.findall(r"\d+", _line(text, rb"\[categorical_feature:"))]
    try:
        known = json.loads(_line(text, rb"pandas_categorical:") or "null") or ()
    except ValueError:
        known = ()
    return BoosterColumns(names if are_named(names) else (), dict(zip(numbers, known, strict=False)))


def xgboost_columns(content: bytes) -> BoosterColumns:
    """Return the columns in a file of XGBoost: JSON, or UBJSON, whose categories are not read."""
    if b"feature_names[#L" in content[:_HEADER_BYTES]:
        return BoosterColumns(_ubjson_names(content))
    names = _value(content, b'"feature_names":') or ()
    encoded = _value(content, b'"cats":') or {"enc": ()}
    found: dict[int, Sequence[Any]] = {}
    for index, column in enumerate(encoded["enc"]):
        values = column["values"]
        if values and "offsets" in column:
            raw = bytes(value & 0xFF for value in values)
            found[index] = [raw[first:end].decode() for first, end in pairwise(column["offsets"])]
        elif values:
            found[index] = values
    return BoosterColumns(names if are_named(names) else (), found)


_HEADER_BYTES = 4096
"""Part of a UBJSON file in which the list of names begins."""


def _line(text: bytes, start: bytes) -> str:
    """Return what follows the last occurrence of a beginning of a line."""
    found = re.findall(rb"^" + start + rb"(.*?)\r?$", text, re.MULTILINE)
    return found[-1].decode(errors="replace") if found else ""


def _value(content: bytes, key: bytes) -> Any:
    """Return the value of the first member with a key, None if there is none."""
    start = content.find(key)
    if start < 0:
        return None
    end = content.find(b'"tree_info"', start)
    try:
        return json.JSONDecoder().raw_decode(content[start + len(key) : end if end > 0 else None].decode())[0]
    except ValueError:
        return None


def _ubjson_names(content: bytes) -> list[str]:
    """Return the strings of an array: each is `SL`, its size as eight bytes, and its text."""
    at = content.index(b"feature_names[#L") + len(b"feature_names[#L")
    count = int.from_bytes(content[at : at + 8], "big")
    at += 8
    names = list[str]()
    while len(names) < count and content[at : at + 2] == b"SL":
        size = int.from_bytes(content[at + 2 : at + 10], "big")
        names.append(content[at + 10 : at + 10 + size].decode(errors="replace"))
        at += 10 + size
    return names if len(names) == count and are_named(names) else []
