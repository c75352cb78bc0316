"""Outputs of `charonia infer` as people read them: text, tables, the largest classes. Pure."""

import base64
import binascii
from collections.abc import Mapping

import numpy as np

from charonia.core.tensor import Array

ROWS_MAX = 20
COLUMNS_MAX = 10
"""Largest table that is printed whole."""

LISTED_MAX = 8
"""Numbers that are shown of a longer output."""

CLASSES = 5
"""Classes that are shown of an output with labels."""

_DATA_URL = "data:"


def describe(name: str, datatype: str, array: Array) -> str:
    """Return an output in lines: its name, datatype and shape, and its elements or a summary of them."""
    head = f"{name} {datatype}[{','.join(map(str, array.shape))}]"
    if array.dtype == np.object_:
        texts = [shown(element) for element in array.ravel().tolist()[:ROWS_MAX]]
        more = [f"... {array.size - ROWS_MAX} more"] if array.size > ROWS_MAX else []
        return (
            f"{head}: {texts[0]}" if array.size == 1 else "\n".join([head, *(f"  {text}" for text in [*texts, *more])])
        )
    if array.size <= 1:
        return f"{head}: {number(array.reshape(-1)[0])}" if array.size else head
    table: Array = array.reshape(-1, array.shape[-1]) if array.ndim > 1 else array.reshape(1, -1)
    if table.shape[0] <= ROWS_MAX and table.shape[1] <= COLUMNS_MAX:
        cells = [[number(element) for element in row] for row in table]
        width = max(len(cell) for row in cells for cell in row)
        return "\n".join([head, *("  " + "  ".join(cell.rjust(width) for cell in row) for row in cells)])
    return f"{head}\n{_summary(array)}"


def classes(name: str, array: Array) -> str:
    """Return the elements `value:index:label` of a classification as a table."""
    lines = [name]
    for element in array.ravel().tolist():
        value, index, label = ([*element.decode(errors="replace").split(":", 2), "", ""])[:3]
        lines.append(f"  {float(value):10.4f}  {label or index}")
    return "\n".join(lines)


def number(element: object) -> str:
    """Return a number, rounded to six significant digits."""
    if isinstance(element, np.generic):
        element = element.item()
    return f"{element:.6g}" if isinstance(element, float) else str(element)


def shown(element: object) -> str:
    """Return an element of a BYTES output: its text, or what it holds."""
    if isinstance(element, bytes):
        try:
            element = element.decode()
        except UnicodeDecodeError:
            return f"{len(element)} bytes"
    text = str(element)
    if text.startswith(_DATA_URL):
        kind = text[len(_DATA_URL) :].partition(";")[0]
        return f"{kind}, {len(content_of(element))} bytes"
    return text


def content_of(element: object) -> bytes:
    """Return the bytes that an element holds, for a file; those that a data URL describes."""
    data = element if isinstance(element, bytes) else str(element).encode()
    if data.startswith(_DATA_URL.encode()) and b"," in data:
        try:
            return base64.b64decode(data.partition(b",")[2], validate=True)
        except binascii.Error:
            return data
    return data


def piece(outputs: Mapping[str, Array]) -> str | None:
    """Return the text that a response adds to a stream of text, None for a response that is something else."""
    if len(outputs) != 1:
        return None
    (array,) = outputs.values()
    if array.dtype != np.object_ or array.size != 1:
        return None
    element = array.ravel().tolist()[0]
    if isinstance(element, bytes):
        try:
            element = element.decode()
        except UnicodeDecodeError:
            return None
    return None if element.startswith(_DATA_URL) else element


def _summary(array: Array) -> str:
    flat = array.reshape(-1)
    first = "  ".join(number(element) for element in flat[:LISTED_MAX])
    lines = [f"  {first}  ... {array.size - LISTED_MAX} more"]
    if array.dtype.kind in "iuf":
        finite = flat[np.isfinite(flat)] if array.dtype.kind == "f" else flat
        if finite.size:
            lowest, highest = number(finite.min()), number(finite.max())
            lines.append(f"  from {lowest} to {highest}, mean {number(float(finite.mean(dtype=np.float64)))}")
        last = array.reshape(-1, array.shape[-1])
        if array.ndim <= 2 and len(last) <= ROWS_MAX:
            lines += [f"  largest: {number(row.max())} at {int(row.argmax())}" for row in last]
    return "\n".join(lines)
