"""A named tensor."""

import numpy as np
from numpy.typing import NDArray

from charonia.core.dtypes import DataType

Array = NDArray[np.generic]


class Tensor:
    """A named array with its protocol datatype.

    The array is often a read-only view of the bytes that were received, so whoever wants to change it copies it.
    BYTES tensors hold an object array of `bytes`; BF16 tensors hold the bit patterns as uint16.

    Attributes:
        name: Tensor name.
        datatype: Protocol datatype.
        array: The elements, in the tensor's own shape (with the batch dimension, where the model has one).
    """

    __slots__ = ("array", "datatype", "name")

    def __init__(self, name: str, datatype: DataType, array: Array) -> None:
        self.name = name
        self.datatype = datatype
        self.array = array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array, batch dimension included."""
        return self.array.shape

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.datatype.wire}, {list(self.array.shape)})"
