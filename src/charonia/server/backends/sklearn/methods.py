"""What an estimator answers: its methods by output, and their results as tensors."""

from typing import Any

import numpy as np

from charonia.core.dtypes import BY_NUMPY, DataType
from charonia.core.errors import internal
from charonia.core.tensor import Array

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
        estimator: The estimator.
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


def datatype_of(array: Array) -> DataType:
    """Return the datatype that an array is sent as."""
    if array.dtype.kind in "OSUT":
        return DataType.BYTES
    return BY_NUMPY.get(array.dtype.newbyteorder("<"), DataType.FP64)


def as_datatype(array: Array, datatype: DataType) -> Array:
    """Return an array in the datatype of its output."""
    if datatype is DataType.BYTES:
        encoded = np.empty(array.shape, object)
        encoded.reshape(-1)[:] = [
            element if isinstance(element, bytes) else str(element).encode() for element in array.reshape(-1).tolist()
        ]
        return encoded
    return array.astype(datatype.numpy, copy=False)
