"""PyTorch's datatypes and the protocol's."""

import torch

from charonia.core.dtypes import DataType

TORCH: dict[DataType, torch.dtype] = {
    DataType.BOOL: torch.bool,
    DataType.UINT8: torch.uint8,
    DataType.UINT16: torch.uint16,
    DataType.UINT32: torch.uint32,
    DataType.UINT64: torch.uint64,
    DataType.INT8: torch.int8,
    DataType.INT16: torch.int16,
    DataType.INT32: torch.int32,
    DataType.INT64: torch.int64,
    DataType.FP16: torch.float16,
    DataType.FP32: torch.float32,
    DataType.FP64: torch.float64,
    DataType.BF16: torch.bfloat16,
}
"""PyTorch's datatype by the protocol's; strings are lists, not tensors."""

PROTOCOL: dict[torch.dtype, DataType] = {own: datatype for datatype, own in TORCH.items()}
"""The protocol's datatype by PyTorch's; complex, quantised and 8-bit floating ones have none."""
