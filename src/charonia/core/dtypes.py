"""The tensor datatypes of the protocol and of model configurations.

Source: KServe v2 protocol ("Tensor Data Types") and the DataType enumeration of Triton's model configuration.
"""

from enum import Enum

import numpy as np


class DataType(Enum):
    """One tensor datatype.

    Attributes:
        wire: Name in requests and metadata, e.g. "FP32" or "BYTES".
        config: Name in model configurations, e.g. "TYPE_FP32" or "TYPE_STRING".
        number: Value of the configuration's enumeration.
        byte_size: Bytes of one element; 0 for BYTES, whose elements vary.
        numpy: dtype of the arrays that hold it. BF16 lacks a dtype: its arrays hold the bit patterns as uint16.
            BYTES arrays are object arrays of `bytes`.
    """

    wire: str
    config: str
    number: int
    byte_size: int
    numpy: "np.dtype[np.generic]"

    BOOL = ("BOOL", "TYPE_BOOL", 1, 1, "?")
    UINT8 = ("UINT8", "TYPE_UINT8", 2, 1, "u1")
    UINT16 = ("UINT16", "TYPE_UINT16", 3, 2, "<u2")
    UINT32 = ("UINT32", "TYPE_UINT32", 4, 4, "<u4")
    UINT64 = ("UINT64", "TYPE_UINT64", 5, 8, "<u8")
    INT8 = ("INT8", "TYPE_INT8", 6, 1, "i1")
    INT16 = ("INT16", "TYPE_INT16", 7, 2, "<i2")
    INT32 = ("INT32", "TYPE_INT32", 8, 4, "<i4")
    INT64 = ("INT64", "TYPE_INT64", 9, 8, "<i8")
    FP16 = ("FP16", "TYPE_FP16", 10, 2, "<f2")
    FP32 = ("FP32", "TYPE_FP32", 11, 4, "<f4")
    FP64 = ("FP64", "TYPE_FP64", 12, 8, "<f8")
    BYTES = ("BYTES", "TYPE_STRING", 13, 0, "O")
    BF16 = ("BF16", "TYPE_BF16", 14, 2, "<u2")

    __hash__ = object.__hash__  # that of Enum is a Python function, and each request looks datatypes up

    def __init__(self, wire: str, config: str, number: int, byte_size: int, numpy: str) -> None:
        self.wire = wire
        self.config = config
        self.number = number
        self.byte_size = byte_size
        self.numpy = np.dtype(numpy)


BY_WIRE: dict[str, DataType] = {d.wire: d for d in DataType}
"""Datatype by its name in requests."""

BY_NUMPY: dict["np.dtype[np.generic]", DataType] = {d.numpy: d for d in DataType if d is not DataType.BF16}
"""Datatype of an array by its numpy dtype; BF16 cannot be told from UINT16 and is not here."""

BY_NAME: dict[str, DataType] = {
    **{dtype.name: datatype for dtype, datatype in BY_NUMPY.items()},
    "string": DataType.BYTES,
    "bfloat16": DataType.BF16,
}
"""Datatype by the name that numpy has for it, and with it TensorFlow, PyTorch and, for most, ONNX Runtime."""
