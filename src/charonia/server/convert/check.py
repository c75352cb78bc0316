"""Samples of a file, and the comparison of what two models answer to samples. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from charonia.config.complete import SignatureTensor
from charonia.core.dtypes import DataType
from charonia.core.errors import invalid
from charonia.core.tensor import Array


@dataclass(frozen=True, slots=True)
class OutputDifference:
    """How far the answers for one output are apart.

    Attributes:
        shape: Its shape, with -1 for variable dimensions.
        absolute: Greatest absolute difference of numbers with a fraction.
        relative: Greatest difference relative to the original's number, or to the tolerance where that is greater.
        beyond: Elements that differ by more than the tolerance, or at all where they are no numbers with a fraction.
        is_alike: Whether the original answered every row of several the same, so that little was compared.
    """

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    absolute: float
    relative: float
    beyond: int
    elements: int
    is_alike: bool

    @property
    def is_exact(self) -> bool:
        """Whether elements are equal or not, with nothing between."""
        return self.datatype.numpy.kind not in "f"


def given_samples(inputs: Sequence[SignatureTensor], arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays of a file in the datatypes of the inputs.

    Raises:
        ServingError: INVALID_ARG when an array is missing or does not fit.
    """
    feed: dict[str, Array] = {}
    for tensor in inputs:
        array = arrays.get(tensor.name)
        if array is None:
            known = ", ".join(arrays) or "none"
            raise invalid(f"--samples: expected an array for input '{tensor.name}', got {known}")
        array = np.asarray(array)
        fits = len(array.shape) == len(tensor.shape) and all(
            dim in (-1, size) for dim, size in zip(tensor.shape, array.shape, strict=True)
        )
        if not fits or (array.dtype.kind in "OSUT") != (tensor.datatype is DataType.BYTES):
            raise invalid(
                f"--samples: input '{tensor.name}' takes {tensor.datatype.wire} {list(tensor.shape)}, "
                f"got {array.dtype} {list(array.shape)}"
            )
        if tensor.datatype is DataType.BYTES:
            texts = [e if isinstance(e, bytes) else str(e).encode() for e in array.ravel().tolist()]
            array = np.array([*texts, None], object)[:-1].reshape(array.shape)
        feed[tensor.name] = array.astype(tensor.datatype.numpy, copy=False)
    return feed


def batches_of(inputs: Sequence[SignatureTensor], feed: Mapping[str, Array]) -> list[dict[str, Array]]:
    """Return the samples as one batch, and where the batch dimension is variable, its first row as a batch of one."""
    sizes = {array.shape[0] if array.ndim else 0 for array in feed.values()}
    whole = dict(feed)
    if len(sizes) != 1 or sizes <= {0, 1} or any(tensor.shape[:1] != (-1,) for tensor in inputs):
        return [whole]
    return [{name: array[:1] for name, array in feed.items()}, whole]


def compare(
    tensor: SignatureTensor, expected: Sequence[Array], got: Sequence[Array], tolerance: float
) -> OutputDifference:
    """Return how far an output's answers to all batches are apart.

    A number with a fraction may differ by the tolerance plus the tolerance times the original's magnitude; what is not
    finite in one is the same in the other.

    Args:
        tolerance: Absolute and relative.

    Raises:
        ServingError: INVALID_ARG when they have different numbers of elements.
    """
    for index, (one, other) in enumerate(zip(expected, got, strict=True)):
        if one.size != other.size:
            raise invalid(
                f"output '{tensor.name}': the original answers batch {index + 1} with shape {list(one.shape)}, "
                f"the converted model with {list(other.shape)}"
            )
    one, other = (np.concatenate([array.ravel() for array in arrays]) for arrays in (expected, got))
    rows = expected[-1].reshape(len(expected[-1]), -1) if expected[-1].ndim else expected[-1].reshape(1, -1)
    is_alike = len(rows) > 1 and bool((_texts(rows) == _texts(rows[:1])).all())
    absolute = relative = 0.0
    if tensor.datatype.numpy.kind == "f":
        real, near = one.astype(np.float64), other.astype(np.float64)
        same = (real == near) | (np.isnan(real) & np.isnan(near))
        with np.errstate(invalid="ignore", divide="ignore"):
            apart = np.where(same, 0.0, np.abs(real - near))
            ratio = np.where(same, 0.0, apart / np.maximum(np.abs(real), tolerance))
            beyond = ~same & ~(np.isfinite(apart) & (apart <= tolerance + tolerance * np.abs(real)))
        absolute, relative = float(apart.max(initial=0.0)), float(ratio.max(initial=0.0))
    else:
        beyond = _texts(one) != _texts(other)
    return OutputDifference(
        tensor.name, tensor.datatype, tensor.shape, absolute, relative,
        int(beyond.sum()), one.size, is_alike,
    )  # fmt: skip


def _texts(array: Array) -> Array:
    """Return an array whose elements can be compared: texts as text."""
    if array.dtype.kind != "O":
        return array
    texts = [e.decode(errors="replace") if isinstance(e, bytes) else str(e) for e in array.ravel().tolist()]
    return np.array(texts, np.str_).reshape(array.shape)
